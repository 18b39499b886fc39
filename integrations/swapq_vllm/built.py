"""A method of the plugin tells its configuration that the model is built. Methods that the plugin adopted later have none."""

from typing import Any

__all__ = ["built"]


def built(method: Any) -> None:
    """Let the configuration that made ``method`` check that every listed weight found its layer."""
    config = getattr(method, "config", None)
    if config is not None:
        config.built()
