"""Numbers that no weight, code or scale may be: what the definitions in torch refuse."""

import pytest
import torch
from torch import Tensor

from swapq.errors import FormatError
from swapq.kernels.refused import REFUSED, any_refused
from swapq.qtensor import finite_flags, is_finite, require_finite

INF, NAN = float("inf"), float("nan")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def as_bytes(*values: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(dtype)


CASES = [
    ("bf16", torch.tensor([0.0, -1.0, 3.38e38], dtype=BF16), torch.tensor([INF, -INF, NAN], dtype=BF16)),
    ("float32", torch.tensor([0.0, 3.3895e38, -1e-40]), torch.tensor([3.3963e38, -INF, NAN])),
    ("e4m3", as_bytes(0x00, 0x7E, 0xFE, dtype=E4M3), as_bytes(0x7F, 0xFF, dtype=E4M3)),
    ("e4m3_scale", as_bytes(0x00, 0x01, 0x7E, dtype=E4M3), as_bytes(0x7F, 0x80, 0x81, 0xFF, dtype=E4M3)),
    ("e8m0", as_bytes(0x00, 0x7F, 0x80, 0xFE), as_bytes(0xFF)),
    ("float32_scale", torch.tensor([1e-45, 1.0, 3.4e38]), torch.tensor([0.0, -0.0, -1.0, INF, -INF, NAN])),
    ("bf16_scale", torch.tensor([1e-38, 1.0], dtype=BF16), torch.tensor([0.0, -1.0, INF, NAN], dtype=BF16)),
    ("int4_pairs", as_bytes(0x00, 0x77, 0x97, 0xFF), as_bytes(0x08, 0x80, 0x88)),
]


@pytest.mark.parametrize(("kind", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_every_refused_number_is_found_and_no_other(kind: str, good: Tensor, bad: Tensor) -> None:
    assert not REFUSED[kind](good).any()
    assert REFUSED[kind](bad).all()


def test_every_kind_has_a_case() -> None:
    assert [case[0] for case in CASES] == list(REFUSED)


def test_many_tensors_each_have_their_own_answer() -> None:
    tensors = [t for _, good, bad in CASES for t in (good, bad, good[:0])]
    kinds = [kind for kind, _, _ in CASES for _ in range(3)]
    assert any_refused(tensors, kinds).tolist() == [False, True, False] * len(CASES)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_flags_tell_what_each_weight_would(dtype: torch.dtype) -> None:
    good, bad = torch.ones(3, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    bad[2, 1] = NAN
    assert all(finite_flags([good, good]))
    assert not all(finite_flags([good, bad, good]))
    assert bool(is_finite(good))
    with pytest.raises(FormatError, match=r"w: 1 of 12 values are not finite in BF16, the first at index \(2, 1\)"):
        require_finite(bad, "w")
