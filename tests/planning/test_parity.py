"""`lightning-zero parity`: the same steps under DDP and under ZeRO, and where they first differ."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_zero.commands import parity
from tests.planning.test_command import OTHER_SCRIPT, PROJECT, SCRIPT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, since it forks."""
    command = [sys.executable, "-m", "lightning_zero", "parity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def probed(*arguments: str) -> tuple[int, list[dict]]:
    done = run("--json", *arguments)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.exhaustive
def test_a_project_trains_as_under_ddp():
    done = run(*PROJECT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"zero{stage}: the same as DDP, bit for bit (steps: 3, ranks: 2)." for stage in (1, 2, 3)
    ]


@pytest.mark.exhaustive
def test_sums_in_another_order_may_differ_by_a_millionth_but_no_more():
    """Stages 2 and 3 reduce each micro-batch, where stage 1 and DDP reduce their sum.

    The attention keys' bias differs by more, since Adam divides its gradient, which is zero but for rounding.
    """
    project = ["model=vit_tiny", "data=digits", "trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=null"]
    code, found = probed(*project, "stage=2")
    assert code == 0 and all(each["is_equal"] for each in found)
    assert [each["tolerance"] for each in found] == [0, 1e-6, 1e-6]
    code, (found,) = probed(*project, "model.warmup_steps=0", "--stage", "3", "--option", "reduce_dtype=bf16")
    assert code == 1 and found["tolerance"] == 1e-6 and max(found["weights"].values()) > 1e-6


@pytest.mark.exhaustive
def test_the_first_difference_from_ddp_is_reported_with_its_weights():
    """With one more rounding of the gradients, weights differ after the first step; its losses are still equal."""
    code, (found,) = probed(*PROJECT, "--stage", "2", "--steps", "2", "--option", "reduce_dtype=bf16")
    assert code == 1 and not found["is_equal"]
    assert found["step"] == 0 and found["loss"] is None
    assert "blocks.0.up.weight" in found["weights"] and max(found["weights"].values()) > 0
    said = run(*PROJECT, "--stage", "2", "--steps", "1", "--option", "reduce_dtype=bf16").stdout
    assert "zero2: differs from DDP at micro-batch 0: weights differ after this micro-batch: blocks." in said


@pytest.mark.exhaustive
def test_different_losses_are_reported_with_those_of_ddp():
    other = ["tests.planning.projects:KnowsItsStrategy", *PROJECT[1:]]
    code, (found,) = probed(*other, "--stage", "3", "--steps", "2")
    assert code == 1 and found["step"] == 1
    (theirs, ours) = found["loss"]
    assert len(theirs) == len(ours) == 2 and all(b == pytest.approx(2 * a) for a, b in zip(theirs, ours))


@pytest.mark.exhaustive
def test_manual_optimization_is_compared():
    project = ["tests.planning.projects:Adversaries", "--batch", "tests.planning.projects:pictures"]
    code, found = probed(*project, "--stage", "1", "3", "--steps", "2")
    assert code == 0 and [each["stage"] for each in found] == [1, 3]


@pytest.mark.parametrize(
    ("option", "instead"),
    [("stage=2", "write --stage 2"), ("start_method=spawn", "parity always forks its processes")],
)
def test_options_that_parity_sets_itself_are_refused_before_anything_runs(capsys, option, instead):
    assert parity.main(["no_such_script.py", "--option", option]) == 2
    assert capsys.readouterr().err == f"lightning-zero parity: {option} cannot be set with --option: {instead}.\n"


@pytest.mark.parametrize("text", [SCRIPT, OTHER_SCRIPT], ids=["lightning", "pytorch_lightning"])
@pytest.mark.exhaustive
def test_a_script_is_compared_on_its_own_batches(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    script = [str(tmp_path / "train.py"), "--stage", "3", "--precision", "32-true"]
    code, (found,) = probed(*script, "--steps", "1", "--ranks", "1", "--", "--width", "32")
    assert code == 0 and found["is_equal"]
    done = run(*script, "--", "--width", "32")
    assert done.returncode == 2
    assert "Too few batches for steps=3 and ranks=2: 12 are needed, the loader has 2." in done.stderr
