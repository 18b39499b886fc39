"""How often the host asks for a tensor's value, which on a GPU waits for the device; counted where there is none."""

from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["Reads"]

#: ``numpy`` is not among them: on a CPU it is how kernels reach memory
_READS = {"__bool__", "__float__", "__index__", "__int__", "cpu", "equal", "item", "nonzero", "tolist"}


class Reads(TorchFunctionMode):
    """``with Reads() as reads: ...``, then ``reads.count``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))
