"""What the benchmarks compute from what they measure."""

import pytest

from benchmarks.hopper.engine import covered


@pytest.mark.parametrize(
    ("spans", "total"),
    [
        ([], 0),
        ([(0, 5)], 5),
        ([(10, 12), (0, 5)], 7),
        ([(0, 5), (3, 8)], 8),  # a kernel that begins while the one before it ends
        ([(0, 10), (2, 3), (4, 12)], 12),
    ],
)
def test_time_in_which_kernels_overlap_counts_once(spans: list[tuple[int, int]], total: int) -> None:
    assert covered(spans) == total
