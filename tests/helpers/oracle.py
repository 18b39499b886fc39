"""A plain NumPy oracle of the numeric contract, written from its text alone; products and sums in float64."""

import numpy as np

F = np.float32
F32_MAX = np.finfo(np.float32).max


def bf16(x: np.ndarray) -> np.ndarray:
    """Round float values to BF16, nearest even, kept as float32."""
    bits = np.asarray(x, dtype=F).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return rounded.astype(np.uint32).view(F)


def _e4m3_values() -> np.ndarray:
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


E4M3 = _e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_even(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Round magnitudes to a table of values, ties to the even code, saturating; the sign is kept."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    upper = np.searchsorted(table, magnitude)
    lower = np.maximum(upper - 1, 0)
    below, above = magnitude - table[lower], table[upper] - magnitude
    code = np.where(below < above, lower, np.where(above < below, upper, np.where(lower % 2 == 0, lower, upper)))
    return np.copysign(table[code], x)


def mxfp8(x: np.ndarray) -> np.ndarray:
    """Quantize and dequantize along the last axis in blocks of 32 (float64 values of float32 products)."""
    blocks = x.astype(F).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    v = amax * np.array(0x3B124925, np.uint32).view(F)
    bits = v.view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
    exponent += (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    codes = nearest_even(blocks * np.exp2(127.0 - exponent).astype(F), E4M3)
    return (codes * np.exp2(exponent - 127.0)).reshape(x.shape)


def mxfp8_columns(x: np.ndarray) -> np.ndarray:
    """Blocks of 32 along the first axis, a ragged end zero-padded."""
    padded = np.pad(x, ((0, -x.shape[0] % 32), (0, 0)))
    return mxfp8(padded.T.copy()).T[: x.shape[0]]


def nvfp4(x: np.ndarray, amax: np.ndarray | float) -> np.ndarray:
    """Quantize and dequantize with the scope's amax (a number, or one per row)."""
    amax = np.asarray(amax, dtype=F)
    with np.errstate(divide="ignore", over="ignore"):
        s = np.where(amax == 0, F(1), np.minimum(F(2688) / amax, F32_MAX)).astype(F)
        g = F(1) / s
        mult = s * np.array(0x3E2AAAAB, np.uint32).view(F)
        expand = (slice(None),) * amax.ndim + (None,) * (x.ndim + 1 - amax.ndim)
        blocks = x.astype(F).reshape(*x.shape[:-1], -1, 16)
        a = np.abs(blocks).max(-1, keepdims=True)
        scale = nearest_even(np.minimum(a * mult[expand], F32_MAX), E4M3).astype(F)
        t = np.minimum(F(1) / (scale * g[expand]), F32_MAX).astype(F)
        codes = nearest_even(blocks * t, E2M1)
    return (codes * scale * g[expand].astype(np.float64)).reshape(x.shape)


def nvfp4_rows(x: np.ndarray) -> np.ndarray:
    return nvfp4(x, np.abs(x).max(-1))


def nvfp4_matrix(x: np.ndarray) -> np.ndarray:
    return nvfp4(x, np.abs(x).max())


def fp8(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """FP8 with one scale per ``rows x columns``, partial blocks at the edges."""
    out = np.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].astype(F)
            s = F(np.maximum(np.abs(block).max(), F(1e-10))) / F(448)
            codes = nearest_even(np.clip(block * (F(1) / s), F(-448), F(448)), E4M3)
            out[i : i + rows, j : j + columns] = codes * np.float64(s)
    return out


def int4(x: np.ndarray, group: int = 32) -> np.ndarray:
    """INT4 in groups along K: the BF16 product of code and scale."""
    blocks = x.astype(F).reshape(*x.shape[:-1], -1, group)
    s = bf16(np.maximum(np.abs(blocks).max(-1, keepdims=True) * np.array(0x3E124925, np.uint32).view(F), F(1e-5)))
    codes = np.clip(np.rint(blocks / s), -7, 7).astype(F)
    return bf16(codes * s).reshape(x.shape)


def fp8_rows(x: np.ndarray) -> np.ndarray:
    return fp8(x, 1, 128)


def fp8_matrix(x: np.ndarray) -> np.ndarray:
    return fp8(x, 128, 128)


def fp8_columns(x: np.ndarray) -> np.ndarray:
    return fp8(x, 128, 1)


def as_it_is(x: np.ndarray) -> np.ndarray:
    return x


ROWS = {"mxfp8": mxfp8, "nvfp4": nvfp4_rows, "fp8_block": fp8_rows, "int4_g32": as_it_is}
WEIGHTS = {"mxfp8": mxfp8, "nvfp4": nvfp4_matrix, "fp8_block": fp8_matrix, "int4_g32": int4}
#: dy by rows, w for dgrad, dy and x by columns, of backward ``low_precision``
LOW = {
    "mxfp8": (mxfp8, mxfp8_columns, mxfp8_columns),
    "fp8_block": (fp8_rows, fp8_matrix, fp8_columns),
}


def linear(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, fmt: str, mode: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``y, dx, dw`` of one linear: ``x [M, K]``, ``w [N, K]``, ``dy [M, N]``; contract sections 3 and 5."""
    x, w, dy = (bf16(a).astype(np.float64) for a in (x, w, dy))
    x_hat, w_hat = ROWS[fmt](x), WEIGHTS[fmt](w)
    y = x_hat @ w_hat.T
    if mode == "low_precision":
        by_row, weight, by_column = LOW[fmt]
        return y, by_row(dy) @ weight(w), by_column(dy).T @ by_column(x)
    if mode == "dequantized":
        return y, dy @ bf16(w_hat).astype(np.float64), dy.T @ bf16(x_hat).astype(np.float64)
    return y, dy @ w, dy.T @ x
