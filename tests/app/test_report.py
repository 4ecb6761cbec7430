"""The figures that a training reports."""

import pytest

from lightning_zero.monitoring.report import expected_psi


@pytest.mark.parametrize(
    ("stage", "accumulate", "psi"),
    [
        (1, 1, 2),  # reduce-scatter, all-gather
        (1, 4, 2),
        (2, 1, 2),
        (2, 4, 5),  # four times reduce-scatter, once all-gather
        (3, 1, 3),  # all-gather for forward and for backward, reduce-scatter
        (3, 4, 12),
    ],
)
def test_expected_traffic_counts_what_is_done_once_a_micro_batch(stage: int, accumulate: int, psi: int) -> None:
    assert expected_psi(stage, accumulate, world_size=2) == psi
    assert expected_psi(stage, accumulate, world_size=1) == 0
