"""What an epoch has accumulated when its job is killed: means, metrics, learning rates that depend on them, modes."""

from __future__ import annotations

import shutil

import pytest

from tests.resilience.jobs import fault, run

# Six steps an epoch, with a validation after the third and the sixth: kills in the first step of an epoch, after a
# validation, and in between. The state of the last completed step is then certainly in memory.
KILLS = [fault(0, 3, [1], "forward"), fault(1, 8, [0], "forward"), fault(2, 12, [0, 1], "forward")]


@pytest.mark.behaviour(
    "The Trainer",
    '`resilience="memory"`: epoch means, torchmetrics, schedulers that monitor them, and frozen layers survive a kill',
)
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (3, {}),
        (1, {"accumulate": 2, "precision": "bf16-mixed"}),
        (2, {"strategy": {"offload": "cpu"}}),
    ],
)
def test_what_an_epoch_has_accumulated_survives_kills(stage, options, uninterrupted, tmp_path):
    options = {"stage": stage, "watches": True, "validates": 3, **options}
    kills = KILLS if "accumulate" not in options else [fault(0, 2, [1], "forward"), fault(1, 6, [0], "forward")]
    found, expected = run(tmp_path, options | {"faults": kills}), uninterrupted(options)
    found.same_as(expected)
    assert {"mean", "train_epoch", "train_step", "loss", "best", "max", "at the start", "early", "values"} <= set(
        found.weights
    )
    assert len(found.begun) == 1 + len(kills)
    found.repeats_at_most(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("accumulate", "step", "ended_after"), [(1, 7, 8), (2, 3, 4)])
def test_what_an_epoch_has_accumulated_survives_a_sigterm(accumulate, step, ended_after, uninterrupted, tmp_path):
    """With accumulation, the signal comes between the micro-batches of a step, which is completed."""
    options = {"watches": True, "validates": 3, "accumulate": accumulate}
    first = run(tmp_path, options | {"faults": [fault(0, step, [0], "start", "term")]})
    assert first.code == 0, first.output
    shutil.rmtree(tmp_path / "memory")  # as on another machine
    again = run(tmp_path, options)
    assert again.continued == [ended_after]
    again.same_as(uninterrupted(options))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("accumulate", "step", "ended_after"), [(1, 9, 9), (2, 4, 5)])
def test_a_sigterm_in_a_validation_leaves_no_trace_in_later_ones(
    accumulate, step, ended_after, uninterrupted, tmp_path
):
    """The rest of the validation is skipped. One between micro-batches goes on, and the job ends after the step."""
    options = {"validates": 3, "accumulate": accumulate}
    first = run(tmp_path, options | {"faults": [fault(0, step, [0], "validation", "term")]})
    assert first.code == 0 and f"Its state after step {ended_after} was saved" in first.output, first.output
    shutil.rmtree(tmp_path / "memory")
    again, expected = run(tmp_path, options), uninterrupted(options)
    again.same_as(expected)
    assert expected.weights["validated"] == 96


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stochastic_weight_averaging_survives_kills(stage, uninterrupted, tmp_path):
    """The kills are in the first epoch that is averaged, in the second, and in the pass for the batch statistics."""
    options = {"stage": stage, "averages": True}
    kills = [fault(0, 8, [1], "forward"), fault(1, 13, [0], "forward"), fault(2, 18, [0, 1], "forward")]
    found, expected = run(tmp_path, options | {"faults": kills}), uninterrupted(options)
    found.same_as(expected)
    assert len(found.begun) == 1 + len(kills)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_samplers_own_generator_continues_where_it_was(ranks, uninterrupted, tmp_path):
    options = {"draws": True}
    kills = [fault(0, 8, [0], "forward"), fault(1, 12, [0], "forward")]
    found, expected = run(tmp_path, options | {"faults": kills}, ranks), uninterrupted(options, ranks)
    found.same_as(expected)


def test_a_fit_that_was_stopped_early_is_not_continued_after_a_kill_in_the_test_that_follows(uninterrupted, tmp_path):
    options = {"stops": True, "tests": True}
    found = run(tmp_path, options | {"faults": [fault(0, 12, [0], "test")]})
    found.same_as(uninterrupted(options))
    assert found.begun == [list(range(12))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_that_basefinetuning_has_added_survives_kills(stage, uninterrupted, tmp_path):
    options = {"stage": stage, "unfreezes": True}
    kills = [fault(0, 5, [1], "forward"), fault(1, 8, [0], "forward")]
    found, expected = run(tmp_path, options | {"faults": kills}), uninterrupted(options)
    found.same_as(expected)
