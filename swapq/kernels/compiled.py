"""The contract's quantizers as compiled loops over BF16 bits (numba). Imported through ``cpu.py``, which falls back to the reference.

Every arithmetic line is one IEEE float32 operation: LLVM may neither contract, reorder nor flush (``fastmath=False``). Loops work on
pieces that stay in the first-level cache and have no branches, so that they vectorize.
"""

import numba
import numpy as np

from swapq.formats.mxfp8 import ONE_OVER_448

__all__ = ["amax", "mxfp8", "nvfp4"]

F, U = np.float32, np.uint32
_jit = numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")

_PIECE = 4096
_ONE_OVER_448 = F(ONE_OVER_448)
_F32_MAX = F(np.finfo(np.float32).max)
_SUBNORMAL = F(16384.0)  # adding 2^14 rounds to multiples of 2^-9, E4M3's subnormal step, nearest even
_SUBNORMAL_BITS = U(0x46800000)
_SMALLEST_NORMAL = U(0x3C800000)  # 2^-6


@_jit
def amax(bits: np.ndarray) -> np.uint16:
    """Largest magnitude of BF16 ``bits``, as bits: NaN is above Inf is above every number."""
    top = np.uint16(0)
    for i in range(bits.size):
        top = max(top, bits[i] & np.uint16(0x7FFF))
    return top


@_jit
def _e4m3(magnitude: np.ndarray, shifted: np.ndarray, codes: np.ndarray) -> None:
    """E4M3 codes of float32 magnitudes of at most 448, nearest even. ``shifted`` is scratch."""
    bits = magnitude.view(np.uint32)
    for i in range(magnitude.size):
        shifted[i] = magnitude[i] + _SUBNORMAL
    low = shifted.view(np.uint32)
    for i in range(magnitude.size):
        u = bits[i]
        normal = ((u + U(0x7FFFF) + ((u >> U(20)) & U(1))) >> U(20)) - U(960)
        codes[i] = np.uint8(normal if u >= _SMALLEST_NORMAL else low[i] - _SUBNORMAL_BITS)


@_jit
def _e4m3_values(codes: np.ndarray, values: np.ndarray) -> None:
    """float32 values of E4M3 codes without sign."""
    bits = values.view(np.uint32)
    for i in range(codes.size):
        q = U(codes[i])
        normal = (q << U(20)) + U(960 << 20)
        bits[i] = normal
    for i in range(codes.size):
        if codes[i] < 8:
            values[i] = F(codes[i]) * F(0.001953125)


@_jit
def nvfp4(bits: np.ndarray, mult: np.float32, decode: np.float32, codes: np.ndarray, scales: np.ndarray) -> None:
    """NVFP4 of BF16 ``bits`` (blocks of 16 in order), given ``S / 6`` and G. ``codes`` has half a byte, ``scales`` a 16th per element."""
    word = np.empty(_PIECE, np.uint32)
    x = word.view(np.float32)
    top = np.empty(_PIECE // 16, np.uint32)
    scale = np.empty(_PIECE // 16, np.float32)
    shifted = np.empty(_PIECE // 16, np.float32)
    factor = np.empty(_PIECE // 16, np.float32)
    nibble = np.empty(_PIECE, np.uint32)  # as wide as the comparisons, so that they vectorize without repacking
    pair = nibble.view(np.uint64)
    block_amax = top.view(np.float32)
    for start in range(0, bits.size, _PIECE):
        count = min(_PIECE, bits.size - start)
        blocks = count // 16
        for i in range(count):
            word[i] = U(bits[start + i]) << U(16)
        for b in range(blocks):
            largest = U(0)
            for j in range(16):
                largest = max(largest, word[b * 16 + j] & U(0x7FFFFFFF))
            top[b] = largest
        for b in range(blocks):
            scale[b] = min(block_amax[b] * mult, F(448.0))
        out = scales[start // 16 : start // 16 + blocks]
        _e4m3(scale[:blocks], shifted[:blocks], out)
        _e4m3_values(out, scale[:blocks])
        for b in range(blocks):
            factor[b] = min(F(1.0) / (scale[b] * decode), _F32_MAX)
        for b in range(blocks):
            t = factor[b]
            for j in range(16):
                i = b * 16 + j
                y = abs(x[i] * t)
                code = (
                    U(y > F(0.25))
                    + U(y >= F(0.75))
                    + U(y > F(1.25))
                    + U(y >= F(1.75))
                    + U(y > F(2.5))
                    + U(y >= F(3.5))
                    + U(y > F(5.0))
                )
                nibble[i] = code | ((word[i] >> U(28)) & U(8))
        half = start // 2
        for i in range(count // 2):
            both = pair[i]  # little-endian: the even element in the low word
            codes[half + i] = np.uint8((both | (both >> np.uint64(28))) & np.uint64(0xFF))


@_jit
def mxfp8(bits: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    """MXFP8 of BF16 ``bits`` (blocks of 32 in order). ``codes`` has a byte per element, ``scales`` one per block."""
    word = np.empty(_PIECE, np.uint32)
    x = word.view(np.float32)
    magnitude = np.empty(_PIECE, np.float32)
    shifted = np.empty(_PIECE, np.float32)
    top = np.empty(_PIECE // 32, np.uint32)
    block_amax = top.view(np.float32)
    wanted = np.empty(_PIECE // 32, np.float32)
    wanted_bits = wanted.view(np.uint32)
    inverse = np.empty(_PIECE // 32, np.uint32)
    factor = inverse.view(np.float32)
    for start in range(0, bits.size, _PIECE):
        count = min(_PIECE, bits.size - start)
        blocks = count // 32
        for i in range(count):
            word[i] = U(bits[start + i]) << U(16)
        for b in range(blocks):
            largest = U(0)
            for j in range(32):
                largest = max(largest, word[b * 32 + j] & U(0x7FFFFFFF))
            top[b] = largest
        for b in range(blocks):
            wanted[b] = block_amax[b] * _ONE_OVER_448
        for b in range(blocks):
            u = wanted_bits[b]
            exponent, mantissa = u >> U(23), u & U(0x7FFFFF)
            if mantissa > U(0) and exponent != U(254) and not (exponent == U(0) and mantissa <= U(0x400000)):
                exponent += U(1)
            scales[start // 32 + b] = np.uint8(exponent)
            inverse[b] = U(0x00400000) if exponent == U(254) else (U(254) - exponent) << U(23)
        for b in range(blocks):
            t = factor[b]
            for j in range(32):
                magnitude[b * 32 + j] = min(abs(x[b * 32 + j] * t), F(448.0))
        out = codes[start : start + count]
        _e4m3(magnitude[:count], shifted[:count], out)
        for i in range(count):
            out[i] = out[i] | np.uint8((word[i] >> U(24)) & U(0x80))
