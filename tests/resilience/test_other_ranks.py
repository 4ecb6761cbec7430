"""A job continues on another number of ranks: each step takes as many samples as before, and no sample is lost."""

from __future__ import annotations

import pytest

from tests.resilience.jobs import TORCHRUN, fault, run
from tests.support.selection import one_at_a_time
from tests.support.training import same_tensors

OPTIONS = {"is_plain": True, "precision": "64-true"}


def continued(folder, options, *, ranks_and_ends):
    """Run a job on a number of ranks, kill it in a step, continue on another number of ranks, and so on."""
    for ranks, step in ranks_and_ends:
        faults = [] if step is None else [fault(0, step, range(ranks), "backward")]
        found = run(folder, {**OPTIONS, **options, "faults": faults}, ranks, restarts=0)
        assert (found.code == 0) == (step is None), found.output
    return found


BATCHES = {
    "a batch size for each rank": {"batch": 4},
    "accumulation": {"batch": 2, "accumulate": 2},
    "a script that keeps the global batch itself": {},
    "every third step": {"batch": 4, "resilience": {"every_n_steps": 3}},
}


@pytest.mark.parametrize(("stage", "kind"), one_at_a_time([3, 2], list(BATCHES)))
def test_four_ranks_then_two_then_four_do_the_steps_of_four(stage, kind, tmp_path):
    options = {"stage": stage, **BATCHES[kind]}
    whole = run(tmp_path / "whole", {**OPTIONS, **options}, 4)
    found = continued(tmp_path / "moved", options, ranks_and_ends=[(4, 4), (2, 10), (4, None)])
    assert "was 2 before the restart and is 4 now" in found.output
    assert found.begun[0][-1] == whole.begun[0][-1] == 17
    same_tensors(whole.weights, found.weights, bound=1e-12)


@pytest.mark.exhaustive
def test_a_number_of_ranks_that_cannot_take_the_same_samples_is_refused(tmp_path):
    folder, options = tmp_path / "moved", {**OPTIONS, "batch": 4}
    run(folder, {**options, "faults": [fault(0, 4, [0, 1], "forward")]}, 2, restarts=0)
    found = run(folder, options, 3, restarts=0, launcher=TORCHRUN)
    assert found.code != 0
    assert "was 2 before the restart and is 3 now. To keep the samples per step" in found.output
    assert "accumulate_grad_batches would have to be 2/3" in found.output
    assert run(folder, options, 2).code == 0


@pytest.mark.exhaustive
def test_on_the_same_ranks_a_changed_accumulation_is_named_and_set_back(tmp_path):
    folder, options = tmp_path / "moved", {**OPTIONS, "batch": 4}
    run(folder, {**options, "faults": [fault(0, 4, [0, 1], "forward")]}, 2, restarts=0)
    found = run(folder, {**options, "accumulate": 2}, 2)
    assert "accumulate_grad_batches was 1 before the restart and is 2 now" in found.output
    same_tensors(run(tmp_path / "whole", options, 2).weights, found.weights, bound=1e-12)
