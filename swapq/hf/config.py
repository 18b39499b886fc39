"""SwapqConfig: the ``quantization_config`` of a checkpoint, or of a request to convert while loading."""

from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from swapq.errors import CheckpointError
from swapq.recipe import Recipe

__all__ = ["CONFIG_VERSION", "SwapqConfig"]

CONFIG_VERSION = 1


@register_quantization_config("swapq")
class SwapqConfig(QuantizationConfigMixin):
    """What a checkpoint says of itself, or what ``from_pretrained(..., quantization_config=SwapqConfig("nvfp4-rl"))`` asks for.

    Args:
        recipe: a name, a Recipe or its dictionary.
        quantized: format -> exact names of the weights held in it; given by a checkpoint, never by a user.
        layout, version: of the checkpoint.
        trainable: when converting while loading, whether masters are kept.

    Raises:
        RecipeError: a recipe that is not one.
        CheckpointError: a version, layout or list that this swapq cannot read.
    """

    def __init__(
        self,
        recipe: "str | Recipe | Mapping[str, Any]" = "nvfp4-rl",
        *,
        quantized: "Mapping[str, list[str]] | None" = None,
        layout: str = "swapq",
        version: int = CONFIG_VERSION,
        trainable: bool = True,
        quant_method: str = "swapq",
        **unknown: Any,
    ) -> None:
        if unknown:
            raise CheckpointError(
                f"quantization_config: unknown key {sorted(unknown)[0]!r}; this checkpoint needs another version of swapq"
            )
        if version != CONFIG_VERSION:
            raise CheckpointError(
                f"quantization_config: version is {version!r}, this swapq reads {CONFIG_VERSION}; upgrade swapq"
            )
        if layout != "swapq":
            raise CheckpointError(f"quantization_config: layout is {layout!r}; transformers loads the layout 'swapq'")
        self.quant_method = quant_method  # type: ignore[assignment]
        self.recipe, self.layout, self.version, self.trainable = Recipe.resolve(recipe), layout, version, trainable
        self.quantized = None if quantized is None else _listed(quantized)
        if not isinstance(trainable, bool):
            raise CheckpointError(f"quantization_config: trainable is {trainable!r}, expected true or false")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """What transformers makes of a folder's ``quantization_config``: of a class of its own, so that one passed for a folder that is
        quantized already is refused instead of overlooked with a warning."""
        stored = _StoredConfig(**config_dict)
        return (stored, kwargs) if return_unused_kwargs else stored

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that ``config.json`` holds."""
        described: dict[str, Any] = {
            "quant_method": "swapq",
            "version": self.version,
            "layout": self.layout,
            "recipe": self.recipe.to_dict(),
        }
        return described if self.quantized is None else described | {"quantized": self.quantized}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class _StoredConfig(SwapqConfig):
    """The config that a checkpoint holds."""


#: ends up in transformers' message: "The model is quantized with ... but you are passing a SwapqConfig config"
_StoredConfig.__name__ = "SwapqConfig of the checkpoint itself, which is quantized already and loads without one,"


def _listed(quantized: object) -> dict[str, list[str]]:
    if not isinstance(quantized, Mapping):
        raise CheckpointError(
            f"quantization_config: quantized is {type(quantized).__name__}, expected formats and lists of weight names"
        )
    for fmt, names in quantized.items():
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"quantization_config: quantized[{fmt!r}] is not a list of weight names")
    return {fmt: list(names) for fmt, names in quantized.items()}
