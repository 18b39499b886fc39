"""The contract's quantizers as compiled loops over BF16 bits (numba). Imported through ``cpu.py``, which falls back to the reference.

Every arithmetic line is one IEEE float32 operation: LLVM may neither contract, reorder nor flush (``fastmath=False``). Loops run over
slices from 0, without branches and on pieces that stay in the first-level cache: with an offset in the index they do not vectorize.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from swapq.formats.bits import E4M3_MAX
from swapq.formats.fp8_block import BLOCK
from swapq.formats.fp8_block import FLOOR as FP8_FLOOR
from swapq.formats.int4 import FLOOR as INT4_FLOOR
from swapq.formats.int4 import ONE_SEVENTH, TOP
from swapq.formats.mxfp8 import ONE_OVER_448

__all__ = ["amax", "fp8_block", "int4", "mxfp8", "nvfp4", "packed", "word_sums"]

F, U, H = np.float32, np.uint32, np.uint16

_PIECE = 4096
_ONE_OVER_448 = F(ONE_OVER_448)
_F32_MAX = F(np.finfo(np.float32).max)
_SUBNORMAL = F(16384.0)  # adding 2^14 rounds to multiples of 2^-9, E4M3's subnormal step, nearest even
_SUBNORMAL_BITS = U(0x46800000)
_SMALLEST_NORMAL = U(0x3C800000)  # 2^-6
_E4M3_MAX = F(E4M3_MAX)
_FP8_FLOOR = F(FP8_FLOOR)
_INT4_FLOOR = F(INT4_FLOOR)
_INT4_TOP = F(TOP)
_ONE_SEVENTH = F(ONE_SEVENTH)
#: adding 1.5 * 2^23 rounds to integers, nearest even; the last byte is the integer in two's complement
_INTEGER = F(12582912.0)
#: columns of a row of tiles that are worked on at once, so that the second pass finds them in the second-level cache
_STRIP = 8 * BLOCK


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
def packed(codes: np.ndarray, into: np.ndarray) -> None:
    """The low halves of two bytes in one; little-endian, so the even element is the low half of a pair."""
    pair = codes.view(np.uint16)
    for i in range(into.size):
        into[i] = np.uint8((pair[i] & H(0x0F)) | ((pair[i] >> H(4)) & H(0xF0)))


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
        packed(nibbles, codes[start // 2 : (start + _PIECE) // 2])


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
def _e4m3_codes(bits: np.ndarray, factor: np.ndarray, codes: np.ndarray) -> None:
    for i in range(bits.size):
        word = U(U(bits[i]) << U(16))
        code = _e4m3(min(abs(word.view(F) * factor[i]), _E4M3_MAX))
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
        _e4m3_codes(piece, f1, codes[start : start + _PIECE])


@_jit
def _raised(bits: np.ndarray, top: np.ndarray) -> None:
    """Let the largest magnitude of each column know one more row."""
    for i in range(bits.size):
        top[i] = max(top[i], bits[i] & H(0x7FFF))


@_jit
def _fp8_block_scales(top: np.ndarray, scales: np.ndarray, factor: np.ndarray) -> None:
    """Scales of the tiles of a strip, and the factors of its columns, from the columns' largest magnitudes."""
    for tile in range(scales.size):
        word = U(U(amax(top[tile * BLOCK : (tile + 1) * BLOCK])) << U(16))
        scale = F(max(word.view(F), _FP8_FLOOR) / _E4M3_MAX)
        scales[tile] = scale
        factor[tile * BLOCK : (tile + 1) * BLOCK] = F(F(1.0) / scale)


@_jit
def fp8_block(bits: np.ndarray, columns: int, codes: np.ndarray, scales: np.ndarray) -> None:
    """FP8 block of a BF16 matrix of so many ``columns``, row after row, tiles at the edges partial. ``codes`` has a byte per element,
    ``scales`` (float32) one per tile."""
    rows, across = bits.size // columns, (columns + BLOCK - 1) // BLOCK
    top, factor = np.empty(_STRIP, np.uint16), np.empty(_STRIP, np.float32)
    for first in range(0, rows, BLOCK):
        last = min(first + BLOCK, rows)
        for left in range(0, columns, _STRIP):
            width = min(_STRIP, columns - left)
            tile = first // BLOCK * across + left // BLOCK
            top[:] = H(0)
            for start in range(first * columns + left, last * columns, columns):
                _raised(bits[start : start + width], top)
            _fp8_block_scales(top[:width], scales[tile : tile + (width + BLOCK - 1) // BLOCK], factor)
            for start in range(first * columns + left, last * columns, columns):
                _e4m3_codes(bits[start : start + width], factor, codes[start : start + width])


@_jit
def _int4_scales(top: np.ndarray, scales: np.ndarray, step: np.ndarray) -> None:
    """BF16 scales of groups, and their float32 bits, from the groups' largest magnitudes."""
    for b in range(scales.size):
        word = U(U(top[b]) << U(16))
        wanted = F(max(F(word.view(F) * _ONE_SEVENTH), _INT4_FLOOR))
        u = wanted.view(np.uint32)
        rounded = U((u + U(0x7FFF) + ((u >> U(16)) & U(1))) >> U(16))
        scales[b] = H(rounded)
        step[b] = U(rounded << U(16))


@_jit
def _int4_codes(bits: np.ndarray, step: np.ndarray, codes: np.ndarray) -> None:
    for i in range(bits.size):
        word = U(U(bits[i]) << U(16))
        y = F(word.view(F) / step[i])
        shifted = F(min(max(y, -_INT4_TOP), _INT4_TOP) + _INTEGER)
        codes[i] = np.uint8(shifted.view(np.uint32))


@_jit
def int4(bits: np.ndarray, group: int, codes: np.ndarray, scales: np.ndarray) -> None:
    """INT4 of BF16 ``bits`` in groups of ``group`` (a power of two). ``codes`` has a byte per element, in two's complement, ``scales``
    (BF16 bits) one per group."""
    top, other = np.empty(_PIECE, np.uint16), np.empty(_PIECE, np.uint16)
    step, spread = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE]
        _magnitudes(piece, top)
        count = _PIECE
        while count > _PIECE // group:
            count //= 2
            _halved(top[: 2 * count], other[:count])
            top, other = other, top
        _int4_scales(top, scales[start // group : (start + _PIECE) // group], step.view(np.uint32))
        while count < _PIECE:
            _doubled(step[:count], spread[: 2 * count])
            step, spread = spread, step
            count *= 2
        _int4_codes(piece, step, codes[start : start + _PIECE])


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
