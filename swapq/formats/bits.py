"""Element types at the level of bits: E2M1, E4M3 and E8M0, in plain torch that runs on any device.

Every function follows contract sections 1 and 2: round to nearest even, saturate, keep the sign of zero, let NaN and Inf show.
"""

import torch
from torch import Tensor

__all__ = [
    "E4M3_MAX",
    "F32_MAX",
    "e2m1_decode",
    "e2m1_encode",
    "e2m1_encode_stochastic",
    "e4m3_cast",
    "e8m0_ceil",
    "e8m0_inverse",
    "e8m0_value",
    "pack_nibbles",
    "unpack_nibbles",
]

F32_MAX = torch.finfo(torch.float32).max
E4M3_MAX = 448.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between two neighbours the tie goes to the even code: a strict boundary rounds the tie down, a "below" one rounds it up.
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (False, True, False, True, False, True, False)

_E8M0_NAN = 255
_SUBNORMAL_POWER = 0x00400000  # 2^-127, the one E8M0 value that float32 holds as a subnormal


def _boundaries(device: torch.device) -> Tensor:
    edges = torch.tensor(_E2M1_BOUNDARIES, dtype=torch.float32, device="cpu")
    below = torch.nextafter(edges, torch.zeros_like(edges))
    return torch.where(torch.tensor(_TIES_UP, device="cpu"), below, edges).to(device)


def e2m1_encode(y: Tensor) -> Tensor:
    """Codes 0..15 (uint8, sign in bit 3) of float32 ``y``, nearest even, saturating at 6; NaN becomes magnitude 6."""
    magnitude = torch.bucketize(y.abs().contiguous(), _boundaries(y.device), out_int32=True)
    sign = torch.signbit(y).to(torch.int32) << 3
    return (magnitude | sign).to(torch.uint8)


def e2m1_encode_stochastic(y: Tensor, draws: Tensor) -> Tensor:
    """Codes of float32 ``y``, up or down to a neighbour with probabilities that keep the mean (contract section 8).

    Args:
        y: values; beyond 6 they saturate, which no rounding can make unbiased.
        draws: uniform in [0, 1), shape of ``y``.
    """
    values = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=y.device)
    magnitude = y.abs().clamp(max=6.0)
    below = (torch.bucketize(magnitude.contiguous(), values, right=True, out_int32=True) - 1).clamp(0, 6)
    low, high = values[below], values[below + 1]
    up = draws < torch.div(magnitude - low, high - low)
    code = torch.where(torch.isnan(y), 7, below + up)  # as the nearest rounding does
    return (code | (torch.signbit(y).to(torch.int32) << 3)).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """float32 values of E2M1 ``codes`` (uint8, 0..15)."""
    values = torch.tensor(
        E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES), dtype=torch.float32, device=codes.device
    )
    return values[codes.to(torch.int32)]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte along the last axis, the even element in the low nibble: ``[..., K] -> [..., K/2]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo :func:`pack_nibbles`: ``[..., K/2] -> [..., K]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e4m3_cast(x: Tensor) -> Tensor:
    """``float8_e4m3fn`` of float32 ``x``, nearest even, saturating at 448; NaN stays NaN (torch's own cast does not saturate)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0_ceil(v: Tensor) -> Tensor:
    """E8M0 byte (uint8) of non-negative float32 ``v`` rounded up to a power of two; Inf gives 254, NaN gives 255."""
    bits = v.contiguous().view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= _SUBNORMAL_POWER))
    exponent = exponent + up.to(torch.int32)
    exponent = torch.where(torch.isinf(v), 254, exponent)
    return torch.where(torch.isnan(v), _E8M0_NAN, exponent).to(torch.uint8)


def e8m0_value(e: Tensor) -> Tensor:
    """float32 ``2^(e - 127)`` of E8M0 bytes; byte 0 is 2^-127 (a subnormal), byte 255 is NaN."""
    e32 = e.to(torch.int32)
    bits = torch.where(e32 == 0, _SUBNORMAL_POWER, e32 << 23)
    value = bits.to(torch.int32).view(torch.float32)
    return torch.where(e32 == _E8M0_NAN, torch.nan, value)


def e8m0_inverse(e: Tensor) -> Tensor:
    """float32 ``2^(127 - e)``, the factor that scales a block into E4M3's range; byte 255 gives NaN."""
    e32 = e.to(torch.int32)
    bits = torch.where(e32 == 254, _SUBNORMAL_POWER, (254 - e32) << 23)
    value = bits.to(torch.int32).view(torch.float32)
    return torch.where(e32 == _E8M0_NAN, torch.nan, value)
