"""The one family of errors that swapq raises on purpose. A message says what, where, which value, and what to do."""

__all__ = [
    "AnatomyError",
    "CheckpointError",
    "FormatError",
    "MissingPackageError",
    "PlanError",
    "RecipeError",
    "SwapqError",
    "SyncError",
    "UnsupportedError",
]


class SwapqError(ValueError):
    """Base class of every error that swapq raises on purpose."""


class FormatError(SwapqError):
    """A tensor that a format cannot hold: non-finite values, an odd length, a wrong dtype or scope."""


class RecipeError(SwapqError):
    """A recipe that is not one: an unknown key or value, or a combination that is refused."""


class AnatomyError(SwapqError):
    """A model or checkpoint whose tensors are not known."""


class PlanError(SwapqError):
    """A recipe that this model cannot follow: a pattern without a match, a length the block does not divide."""


class CheckpointError(SwapqError):
    """A checkpoint folder that is damaged, incomplete, inconsistent or unsafe."""


class SyncError(SwapqError):
    """A weight update that did not arrive whole and byte for byte."""


class UnsupportedError(SwapqError):
    """A request that this version, machine or installation cannot carry out."""


class MissingPackageError(UnsupportedError, ImportError):
    """A package that this request needs and this installation lacks."""
