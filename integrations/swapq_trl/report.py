"""What one weight sync did."""

import dataclasses

__all__ = ["SyncReport"]


@dataclasses.dataclass(frozen=True, slots=True)
class SyncReport:
    """One completed weight sync."""

    seconds: float
    """Wall-clock seconds from the first tensor quantized to the engine being ready."""
    bytes: int
    """Bytes of codes, scales and unquantized tensors sent."""
    tensors: int
    """Number of the checkpoint's tensors sent; a stack of experts counts as all that it stands for."""
    verified: int
    """Number of tensors whose bytes, recomputed from what the engine holds, equal the sender's. 0 where a server holds them."""
    lora_codes_changed: float | None = None
    """With `approximate_lora`: the fraction of an adapted linear's codes that the adapter changes. The rest rounds away."""

    def metrics(self) -> dict[str, float]:
        """The report under the names it is logged with."""
        figures = {
            "swapq/sync_seconds": self.seconds,
            "swapq/sync_bytes": float(self.bytes),
            "swapq/sync_tensors_verified": float(self.verified),
        }
        if self.lora_codes_changed is not None:
            figures["swapq/lora_codes_changed"] = self.lora_codes_changed
        return figures
