"""Import torchao, through transformers, without notes about CUDA libraries and enums that a user can do nothing about.

Only while it is imported: loggers get their levels back.
"""

import logging

_CHATTY = ("torchao", "torch.utils._pytree")


def import_quietly() -> None:
    """Import what brings torchao in."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        import transformers.quantizers.auto  # noqa: F401
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
