"""The bytes of the numeric contract in NumPy, written from its text alone: tables and midpoints in float64, no code of swapq."""

import numpy as np

F = np.float32


def _f32(bits: int) -> np.float32:
    return np.uint32(bits).view(F)


ONE_OVER_448, ONE_SIXTH, F32_MAX = _f32(0x3B124925), _f32(0x3E2AAAAB), _f32(0x7F7FFFFF)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])


def _nearest(y: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Code of each float32 value: nearest, ties to the even code, saturating. NaN becomes the code after the last."""
    magnitude = np.abs(y.astype(np.float64))
    nan = np.isnan(magnitude)
    magnitude = np.where(nan, 0, np.minimum(magnitude, table[-1]))
    middle = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(middle, magnitude, side="left")
    tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    return np.where(nan, len(table), code + (tie & (code % 2 == 1)))


def _e4m3(y: np.ndarray) -> np.ndarray:
    return (_nearest(y, E4M3) | np.signbit(y).astype(int) << 7).astype(np.uint8)


def _e4m3_value(b: np.ndarray) -> np.ndarray:
    return (np.append(E4M3, np.nan)[b & 0x7F] * np.where(b & 0x80, -1, 1)).astype(F)


def _e8m0(v: np.ndarray) -> np.ndarray:
    u = v.view(np.uint32).astype(np.int64)
    e, m = u >> 23, u & 0x7FFFFF
    e = e + ((m > 0) & (e != 254) & ~((e == 0) & (m <= 0x400000)))
    return np.where(np.isnan(v), 255, np.where(np.isinf(v), 254, e)).astype(np.uint8)


def _power(e: np.ndarray, nan: np.ndarray) -> np.ndarray:
    """2^(e - 127) of bytes; 2^-127 is the subnormal."""
    bits = np.where(e == 0, 0x00400000, e.astype(np.int64) << 23).astype(np.uint32)
    return np.where(nan, F(np.nan), bits.view(F))


def _block(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        e = _e8m0((np.abs(x).max(axis) * ONE_OVER_448).astype(F))
        nan = e == 255
        inverse = _power(np.where(nan, 0, 254 - e.astype(int)), nan)
        codes = _e4m3((x * np.expand_dims(inverse, axis)).astype(F))
        return codes, e, (_e4m3_value(codes) * np.expand_dims(_power(e, nan), axis)).astype(F)


def mxfp8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, dequantized values of ``[M, K]``."""
    codes, e, values = _block(x.reshape(x.shape[0], -1, 32), -1)
    return codes.reshape(x.shape), e, values.reshape(x.shape)


def mxfp8_columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same in blocks along M; a ragged last block is its rows only."""
    parts = [_block(x[start : start + 32], 0) for start in range(0, len(x), 32)]
    return np.concatenate([p[0] for p in parts]), np.stack([p[1] for p in parts]), np.concatenate([p[2] for p in parts])


def _at_most(x: np.ndarray, limit: np.float32) -> np.ndarray:
    return np.where(np.isnan(x), x, np.minimum(x, limit)).astype(F)


def nvfp4(x: np.ndarray, scope: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, scales, G and dequantized values of ``[M, K]``."""
    with np.errstate(all="ignore"):
        rows = x.shape[0]
        amax = np.asarray(np.abs(x).max(-1) if scope == "row" else np.abs(x).max(), F)
        s = np.where(amax == 0, F(1), _at_most((F(2688) / amax).astype(F), F32_MAX)).astype(F)
        g = (F(1) / s).astype(F)
        spread = (slice(None), None) if scope == "row" else ()
        blocks = x.reshape(rows, -1, 16)
        top = np.abs(blocks).max(-1)
        if scope == "tile":
            top = np.pad(top, ((0, -rows % 16), (0, 0))).reshape(-1, 16, top.shape[1]).max(1)
        scales = _e4m3(_at_most((top * (s * ONE_SIXTH).astype(F)[spread]).astype(F), F32_MAX))
        value = _e4m3_value(scales)
        factor = _at_most((F(1) / (value * g[spread]).astype(F)).astype(F), F32_MAX)
        if scope == "tile":
            factor, value = (np.repeat(t, 16, 0)[:rows] for t in (factor, value))
        y = (blocks * factor[..., None]).astype(F)
        codes = np.minimum(_nearest(y, E2M1), 7) | np.signbit(y).astype(int) << 3
        magnitude = (E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)).astype(F)
        values = ((magnitude * value[..., None]).astype(F) * (g[:, None, None] if scope == "row" else g)).astype(F)
    codes = codes.reshape(x.shape).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, g, values.reshape(x.shape)
