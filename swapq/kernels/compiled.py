"""The contract's quantizers as compiled loops over BF16 bits (numba). Imported through ``cpu.py``, which falls back to the reference.

Every arithmetic line is one IEEE float32 operation: LLVM may neither contract, reorder nor flush (``fastmath=False``). Loops run over
slices from 0, without branches and on pieces that stay in the first-level cache: with an offset in the index they do not vectorize.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from swapq.formats.mxfp8 import ONE_OVER_448

__all__ = ["amax", "mxfp8", "nvfp4", "word_sums"]

F, U, H = np.float32, np.uint32, np.uint16

_PIECE = 4096
_ONE_OVER_448 = F(ONE_OVER_448)
_F32_MAX = F(np.finfo(np.float32).max)
_SUBNORMAL = F(16384.0)  # adding 2^14 rounds to multiples of 2^-9, E4M3's subnormal step, nearest even
_SUBNORMAL_BITS = U(0x46800000)
_SMALLEST_NORMAL = U(0x3C800000)  # 2^-6


def _jit(function: Callable[..., Any]) -> Any:
    """Compile on first use; without a place to keep the machine code (read-only package and home), once per process."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:
        return numba.njit(function, **options)


@_jit
def amax(bits: np.ndarray) -> np.uint16:
    """Largest magnitude of BF16 ``bits``, as bits: NaN is above Inf is above every number."""
    top = H(0)
    for i in range(bits.size):
        top = max(top, bits[i] & H(0x7FFF))
    return top


@_jit
def _halved(values: np.ndarray, into: np.ndarray) -> None:
    """The larger of each two neighbours."""
    for i in range(into.size):
        into[i] = max(values[2 * i], values[2 * i + 1])


@_jit
def _doubled(values: np.ndarray, into: np.ndarray) -> None:
    """Each value twice."""
    for i in range(values.size):
        into[2 * i] = values[i]
        into[2 * i + 1] = values[i]


@_jit
def _e4m3(magnitude: np.float32) -> np.uint32:
    """E4M3 code of a float32 magnitude of at most 448, nearest even."""
    m = F(magnitude)
    u = m.view(np.uint32)
    normal = U((u + U(0x7FFFF) + ((u >> U(20)) & U(1))) >> U(20)) - U(960)
    shifted = F(m + _SUBNORMAL)
    low = shifted.view(np.uint32) - _SUBNORMAL_BITS
    return U(normal) if u >= _SMALLEST_NORMAL else U(low)


@_jit
def _e4m3_value(code: np.uint32) -> np.float32:
    """float32 value of an E4M3 code without sign."""
    bits = U((code << U(20)) + U(960 << 20))
    return F(code) * F(0.001953125) if code < U(8) else bits.view(np.float32)


@_jit
def _e2m1(y: np.float32) -> np.uint32:
    """E2M1 code of a float32 magnitude, nearest even, saturating: how many of the seven midpoints lie below."""
    return (
        U(y > F(0.25))
        + U(y >= F(0.75))
        + U(y > F(1.25))
        + U(y >= F(1.75))
        + U(y > F(2.5))
        + U(y >= F(3.5))
        + U(y > F(5.0))
    )


@_jit
def _magnitudes(bits: np.ndarray, into: np.ndarray) -> None:
    for i in range(bits.size):
        into[i] = bits[i] & H(0x7FFF)


@_jit
def _nvfp4_scales(
    top: np.ndarray, mult: np.float32, decode: np.float32, scales: np.ndarray, factor: np.ndarray
) -> None:
    """Block scales and the factors of their elements, from the blocks' largest magnitudes."""
    for b in range(scales.size):
        word = U(U(top[b]) << U(16))
        code = _e4m3(min(word.view(F) * mult, F(448.0)))
        scales[b] = np.uint8(code)
        factor[b] = min(F(1.0) / (_e4m3_value(code) * decode), _F32_MAX)


@_jit
def _nvfp4_codes(bits: np.ndarray, factor: np.ndarray, nibbles: np.ndarray) -> None:
    for i in range(bits.size):
        word = U(U(bits[i]) << U(16))
        nibbles[i] = np.uint8(_e2m1(abs(word.view(F) * factor[i])) | ((word >> U(28)) & U(8)))


@_jit
def _packed(nibbles: np.ndarray, into: np.ndarray) -> None:
    """Two codes a byte; little-endian, so the even element is the low half of a pair."""
    pair = nibbles.view(np.uint16)
    for i in range(into.size):
        into[i] = np.uint8(pair[i] | (pair[i] >> H(4)))


@_jit
def nvfp4(bits: np.ndarray, mult: np.float32, decode: np.float32, codes: np.ndarray, scales: np.ndarray) -> None:
    """NVFP4 of BF16 ``bits`` (blocks of 16 in order), given ``S / 6`` and G. ``codes`` has half a byte, ``scales`` a 16th per element."""
    x1, x2, x4 = np.empty(_PIECE, np.uint16), np.empty(_PIECE // 2, np.uint16), np.empty(_PIECE // 4, np.uint16)
    x8, top = np.empty(_PIECE // 8, np.uint16), np.empty(_PIECE // 16, np.uint16)
    f1, f2, f4 = np.empty(_PIECE, np.float32), np.empty(_PIECE // 2, np.float32), np.empty(_PIECE // 4, np.float32)
    f8, factor = np.empty(_PIECE // 8, np.float32), np.empty(_PIECE // 16, np.float32)
    nibbles = np.empty(_PIECE, np.uint8)
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE]
        _magnitudes(piece, x1)
        _halved(x1, x2)
        _halved(x2, x4)
        _halved(x4, x8)
        _halved(x8, top)
        _nvfp4_scales(top, mult, decode, scales[start // 16 : (start + _PIECE) // 16], factor)
        _doubled(factor, f8)
        _doubled(f8, f4)
        _doubled(f4, f2)
        _doubled(f2, f1)
        _nvfp4_codes(piece, f1, nibbles)
        _packed(nibbles, codes[start // 2 : (start + _PIECE) // 2])


@_jit
def _mxfp8_scales(top: np.ndarray, scales: np.ndarray, inverse: np.ndarray) -> None:
    """Block exponents, and the bits of the factors of their elements, from the blocks' largest magnitudes."""
    for b in range(scales.size):
        word = U(U(top[b]) << U(16))
        wanted = F(word.view(F) * _ONE_OVER_448)
        u = wanted.view(np.uint32)
        exponent, mantissa = u >> U(23), u & U(0x7FFFFF)
        if mantissa > U(0) and exponent != U(254) and not (exponent == U(0) and mantissa <= U(0x400000)):
            exponent += U(1)
        scales[b] = np.uint8(exponent)
        inverse[b] = U(0x00400000) if exponent == U(254) else (U(254) - exponent) << U(23)


@_jit
def _mxfp8_codes(bits: np.ndarray, factor: np.ndarray, codes: np.ndarray) -> None:
    for i in range(bits.size):
        word = U(U(bits[i]) << U(16))
        code = _e4m3(min(abs(word.view(F) * factor[i]), F(448.0)))
        codes[i] = np.uint8(code | ((word >> U(24)) & U(0x80)))


@_jit
def mxfp8(bits: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    """MXFP8 of BF16 ``bits`` (blocks of 32 in order). ``codes`` has a byte per element, ``scales`` one per block."""
    x1, x2, x4 = np.empty(_PIECE, np.uint16), np.empty(_PIECE // 2, np.uint16), np.empty(_PIECE // 4, np.uint16)
    x8, x16, top = (
        np.empty(_PIECE // 8, np.uint16),
        np.empty(_PIECE // 16, np.uint16),
        np.empty(_PIECE // 32, np.uint16),
    )
    f1, f2, f4 = np.empty(_PIECE, np.float32), np.empty(_PIECE // 2, np.float32), np.empty(_PIECE // 4, np.float32)
    f8, f16, inverse = (
        np.empty(_PIECE // 8, np.float32),
        np.empty(_PIECE // 16, np.float32),
        np.empty(_PIECE // 32, np.uint32),
    )
    factor = inverse.view(np.float32)
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE]
        _magnitudes(piece, x1)
        _halved(x1, x2)
        _halved(x2, x4)
        _halved(x4, x8)
        _halved(x8, x16)
        _halved(x16, top)
        _mxfp8_scales(top, scales[start // 32 : (start + _PIECE) // 32], inverse)
        _doubled(factor, f16)
        _doubled(f16, f8)
        _doubled(f8, f4)
        _doubled(f4, f2)
        _doubled(f2, f1)
        _mxfp8_codes(piece, f1, codes[start : start + _PIECE])


@_jit
def _lane_sums(words: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.int64, np.int64]:
    a, b = np.int64(0), np.int64(0)
    for i in range(words.size):
        word = np.int64(words[i])
        a += word * first[i]
        b += word * second[i]
    return a, b


@_jit
def word_sums(words: np.ndarray, lane_keys: np.ndarray, chunk_keys: np.ndarray, into: np.ndarray) -> None:
    """Add both sums of a digest to ``into``: see ``word_sums.py``."""
    lane = lane_keys.shape[1]
    for chunk in range((words.size + lane - 1) // lane):
        a, b = _lane_sums(words[chunk * lane : (chunk + 1) * lane], lane_keys[0], lane_keys[1])
        into[0] += a * chunk_keys[0, chunk]
        into[1] += b * chunk_keys[1, chunk]
