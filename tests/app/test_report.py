"""The figures in the report of a training run."""

import pytest

from lightning_zero.engine.plan.layout import placements_of
from lightning_zero.reporting.results import figures


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
def test_expected_traffic_includes_the_collectives_of_each_micro_batch(stage: int, accumulate: int, psi: int) -> None:
    assert placements_of(stage).communicated_psi(accumulate, ranks=2) == psi
    assert placements_of(stage).communicated_psi(accumulate, ranks=1) == 0


def test_model_states_are_separate_from_working_buffers_and_compared_with_ddp() -> None:
    mega = 10**6
    peak = {"parameters": 5 * mega, "optimizer": 10 * mega, "gradients": 3 * mega, "gathered": 7 * mega}
    results = {
        "training_loss": None,
        "validation": {},
        "counted": "steps",
        "per_second": None,
        "peak_bytes": peak | {"reduction": 4 * mega},
        "formula_bytes": 20 * mega,
        "ddp_bytes": 40 * mega,
        "communicated_psi": None,
        "expected_psi": 3,
    }
    said = figures(results)
    assert (said["states"], said["formula"]) == ("18.0 MB", "20.0 MB")
    assert (said["buffers"], said["memory"], said["DDP's memory"]) == ("11.0 MB", "29.0 MB", "40.0 MB")
    said = figures(results | {"formula_bytes": None, "ddp_bytes": None})
    assert "formula" not in said and said["memory"] == "29.0 MB"
