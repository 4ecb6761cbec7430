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


def test_a_job_with_an_accumulation_schedule_continues_at_the_same_batch(tmp_path):
    options = {"batch": 4, "schedule": {"0": 2, "1": 3}}
    whole = run(tmp_path / "whole", options)
    faults = [fault(0, 3, [0, 1], "backward"), fault(1, 7, [1], "start")]
    found = run(tmp_path / "killed", {**options, "faults": faults})
    found.same_as(whole)


@pytest.mark.exhaustive
def test_a_checkpoint_is_resumed_on_other_ranks_as_without_resilience(tmp_path):
    """The samples per step are those of the script, as with any `ckpt_path`, since no state of the job is kept."""
    options = {"is_plain": True, "batch": 4}
    saved = run(tmp_path / "before", {**options, "saves": 8, "epochs": 1})
    (path,) = (saved.folder / "checkpoints").glob("*step=8.ckpt")
    options |= {"ckpt_path": str(path), "epochs": 2}
    plain = run(tmp_path / "plain", {**options, "resilience": None}, 4)
    found = run(tmp_path / "kept", {**options, "resilience": {"job": "another"}}, 4)
    found.same_as(plain)


@pytest.mark.exhaustive
def test_states_of_the_old_ranks_are_removed_only_when_a_copy_of_the_new_ranks_is_complete(tmp_path):
    options = {**OPTIONS, "batch": 4}
    whole = run(tmp_path / "whole", options, 4)
    run(tmp_path / "moved", {**options, "faults": [fault(0, 4, range(4), "backward")]}, 4, restarts=0)
    faults = [fault(0, 5, [0, 1], "copy", "find no room"), fault(0, 6, [0, 1], "copy")]
    run(tmp_path / "moved", {**options, "faults": faults}, 2, restarts=0)
    found = run(tmp_path / "moved", options, 2)
    assert found.continued == [4]
    same_tensors(whole.weights, found.weights, bound=1e-12)
