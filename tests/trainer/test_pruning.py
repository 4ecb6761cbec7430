"""``MagnitudePruning``: masks, and training with them, equal those of torch's pruning under DDP."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.utils import prune

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.pruning import MagnitudePruning, magnitude_masks, pruned_numels
from tests.support import whole
from tests.support.models import Square, adam
from tests.support.trainer import Learner, fit, make_trainer
from tests.support.training import same_tensors, same_values
from tests.support.workers import world_size

AMOUNTS = [0.3, 0.45, 0.4]


def amount(epoch: int) -> float:
    return AMOUNTS[epoch % 3]


class ByHand(Callback):
    """Torch's pruning as projects use it: one mask for all matrices, and zeros restored after each step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.chosen = [p for p in pl_module.parameters() if p.ndim >= 2]
        self.mask = torch.ones(sum(p.numel() for p in self.chosen))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        more = round(amount(trainer.current_epoch) * len(self.mask)) - int((self.mask == 0).sum())
        if more > 0:
            values = torch.cat([p.detach().flatten() for p in self.chosen])
            alive = self.mask.nonzero()[:, 0]
            self.mask[alive] = prune.L1Unstructured(more).compute_mask(values[alive], torch.ones(len(alive)))
        self.set_to_zero()

    @torch.no_grad()
    def set_to_zero(self) -> None:
        for p, mask in zip(self.chosen, self.mask.split([p.numel() for p in self.chosen])):
            p.mul_(mask.view(p.shape))

    def on_train_batch_end(self, *_: Any) -> None:
        self.set_to_zero()


class Clipped(Learner):
    """Its updates begin in the optimizer's step, since clipping needs all gradients."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")


def stays_pruned(stage: int, precision: str, offload: str | None, folder: Path) -> None:
    """Pruned elements are zero for modules, in whole weights and in checkpoints, wherever the masters are."""
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with lightning_zero.full_parameters(pl_module):
                seen.append(sum(int((p == 0).sum()) for p in pl_module.parameters() if p.ndim >= 2))

    chosen = lightning_zero.OffloadConfig("nvme", path=str(folder)) if offload == "nvme" else offload
    pruning = MagnitudePruning(0.5)
    run = fit(
        ZeroStrategy(stage=stage, offload=chosen),
        lambda: Clipped(whole.Layered, adam, batches=3),
        callbacks=[pruning, Look()],
        max_epochs=2,
        precision=precision,
    )
    matrices = [weight for weight in run.weights.values() if weight.ndim >= 2]
    wanted = round(0.5 * sum(weight.numel() for weight in matrices))
    assert seen == [wanted] * len(seen) and len(seen) == 6
    assert sum(int((weight == 0).sum()) for weight in matrices) == wanted


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_pruned_elements_are_zero_wherever_masters_and_copies_are(run_on, tmp_path, size, stage, precision, offload):
    run_on(size, stays_pruned, stage=stage, precision=precision, offload=offload, folder=tmp_path)


class Validates(Learner):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(*batch)


def saves_after_the_fit(folder: Path) -> None:
    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        pruning = MagnitudePruning(lambda epoch: [0.5, 0.1][epoch])
        return make_trainer("zero3", callbacks=[pruning], max_epochs=2, max_steps=4), Validates(whole.Layered), pruning

    trainer, learner, pruning = made()
    trainer.fit(learner)  # ends in the second epoch
    trainer.validate(learner, learner.train_dataloader(), verbose=False)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer, resumed, resumed_pruning = made()
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(resumed, ckpt_path=folder / "end.ckpt")
    zeros = sum(int((p == 0).sum()) for p in resumed.parameters() if p.ndim >= 2)
    assert zeros == round(0.5 * sum(p.numel() for p in resumed.parameters() if p.ndim >= 2))
    pruning._amount = 0.0  # a new fit with the first callback starts without its masks
    trainer = make_trainer("zero3", callbacks=[pruning], max_epochs=1, max_steps=1)
    trainer.fit(Learner(whole.Layered))
    assert pruning.sparsity == 0.0


def test_a_checkpoint_saved_after_the_fit_and_a_validation_contains_the_masks(run_on, tmp_path):
    run_on(2, saves_after_the_fit, folder=tmp_path)


class StartsAnew(Callback):
    """Replaces the optimizers in the third call of a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.replace)
        self.calls = 0

    def replace(self, trainer: Any, *_: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            trainer.strategy.setup_optimizers(trainer)


def prunes_after_new_optimizers(strategy: str, hook: str) -> None:
    pruning = MagnitudePruning(0.5)
    run = fit(strategy, lambda: Learner(whole.Layered), callbacks=[pruning, StartsAnew(hook)], max_epochs=1)
    matrices = [weight for weight in run.weights.values() if weight.ndim >= 2]
    zeros = sum(int((weight == 0).sum()) for weight in matrices)
    assert zeros == round(0.5 * sum(weight.numel() for weight in matrices))


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "zero2_offload"])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_pruned_elements_stay_zero_after_optimizers_are_replaced(run_on, strategy, hook):
    run_on(2, prunes_after_new_optimizers, strategy=strategy, hook=hook)


class Unfreezes(Learner):
    """Unfreezes matrices during training, which changes the layout of their unit and gives them owners."""

    def configure_optimizers(self) -> Any:
        last = list(self.model.head.parameters())
        self.rest = [p for p in self.model.parameters() if not any(p is each for each in last)]
        for p in self.rest:
            p.requires_grad_(False)
        return torch.optim.Adafactor(last, lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for p in self.rest:
                p.requires_grad_(True)
            self.optimizers().optimizer.zero_grad()
            self.optimizers().optimizer.add_param_group({"params": self.rest})


def prunes_what_is_unfrozen(stage: int) -> None:
    pruning = MagnitudePruning(0.5)
    run = fit(f"zero{stage}", lambda: Unfreezes(whole.Layered, batches=3), callbacks=[pruning], max_epochs=3)
    matrices = [weight for weight in run.weights.values() if weight.ndim >= 2]
    zeros = sum(int((weight == 0).sum()) for weight in matrices)
    assert zeros == round(0.5 * sum(weight.numel() for weight in matrices))


@pytest.mark.parametrize("stage", [1, 3])
def test_masks_follow_parameters_when_the_layout_of_their_unit_changes(run_on, stage):
    run_on(2, prunes_what_is_unfrozen, stage=stage)


def prunes(stage: int, optimizer: Any, precision: str, **options: Any) -> None:
    def learner() -> Learner:
        return Learner(whole.Layered, optimizer, batches=3)

    training = {"max_epochs": 3, "precision": precision}
    reference = fit("ddp", learner, callbacks=[ByHand()], **training)
    pruning = MagnitudePruning(amount)
    run = fit(ZeroStrategy(stage=stage, **options), learner, callbacks=[pruning], **training)
    same_tensors(run.weights, reference.weights, bound=0)
    same_values(run.losses, reference.losses, "losses")
    matrices = {name: weight for name, weight in run.weights.items() if weight.ndim >= 2}
    assert pruning.sparsity_of == {name: float((w == 0).sum()) / w.numel() for name, w in matrices.items()}
    zeros, numel = (sum(each) for each in zip(*((int((w == 0).sum()), w.numel()) for w in matrices.values())))
    assert (
        zeros == round(0.45 * numel) == round(pruning.sparsity * numel) and len(set(pruning.sparsity_of.values())) > 1
    )


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour(
    "The Trainer", "`MagnitudePruning`: global magnitude pruning on shards; `torch.nn.utils.prune` works as before"
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [whole.lion, whole.muon_of_mixed_groups], ids=["by element", "whole"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": "32-true"}, id="fp32"),
        pytest.param({"precision": "bf16-mixed", "reduce_dtype": "fp32"}, id="bf16-mixed"),
        pytest.param({"precision": "32-true", "offload": "cpu"}, id="offload"),
        pytest.param({"precision": "bf16-mixed", "reduce_dtype": "fp32", "offload": "cpu"}, id="offload bf16-mixed"),
    ],
)
def test_pruned_training_equals_training_with_torchs_masks_under_ddp(run_on, stage, optimizer, options):
    run_on(2, prunes, stage=stage, optimizer=optimizer, **options)


SHAPES = [(3, 5), (16,), (0, 4), (2, 3, 7), (1,), (40, 2)]


def masks_as_torchs(values: list[list[float]], amounts: list[float], dtype: torch.dtype) -> None:
    from lightning_zero.engine import Engine

    module = torch.nn.ParameterList(
        [torch.tensor(each, dtype=dtype).view(shape) for each, shape in zip(values, SHAPES)]
    )
    whole_values = torch.cat([p.detach().flatten().abs().double() for p in module])
    engine = Engine(module, [], stage=3)
    masks, left_out = None, torch.zeros(len(whole_values), dtype=torch.bool)
    for fraction in amounts:
        before, masks = left_out, magnitude_masks(list(module), fraction, masks)
        left_out = ~torch.cat([torch.tensor(mask.tolist(), dtype=torch.bool).flatten() for mask in masks])
        wanted = max(round(fraction * len(whole_values)), int(before.sum()))
        assert left_out.sum() == wanted == sum(pruned_numels(masks)) and (left_out | ~before).all()
        # The smallest elements by magnitude; ties are ordered by position.
        alive = (~before).nonzero()[:, 0]
        order = alive[torch.sort(whole_values[alive], stable=True).indices]
        expected = before.clone()
        expected[order[: wanted - int(before.sum())]] = True
        assert torch.equal(left_out, expected)
    engine.close()


numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-7, -3.0, float("inf"), 2.0**-20]) | st.floats(-8, 8, width=16)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.exhaustive
def test_masks_remove_the_smallest_magnitudes_and_break_ties_by_position(run_on, size):
    numels = [torch.Size(shape).numel() for shape in SHAPES]

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(
        st.tuples(*(st.lists(numbers, min_size=n, max_size=n) for n in numels)),
        st.lists(st.floats(0, 1), min_size=1, max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
    )
    def check(values: Any, amounts: list[float], dtype: torch.dtype) -> None:
        run_on(size, masks_as_torchs, values=list(values), amounts=amounts, dtype=dtype)

    check()


def saved(strategy: Any, folder: Path, epochs: int, ckpt_path: Path | None = None, **options: Any) -> dict[str, Tensor]:
    callbacks = [MagnitudePruning(amount), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    learner = fit(
        strategy, callbacks=callbacks, enable_checkpointing=True, max_epochs=epochs, ckpt_path=ckpt_path, **options
    )
    return learner.weights


def resumed(first: str, second: str, sharded: bool) -> None:
    made = {
        "ddp": lambda: "ddp",
        "zero1": lambda: ZeroStrategy(stage=1, checkpoint="sharded" if sharded else "full"),
        "zero3": lambda: ZeroStrategy(stage=3, checkpoint="sharded" if sharded else "full"),
    }
    folder = [str(Path.cwd() / "pruned")]
    dist.broadcast_object_list(folder)
    expected = saved("ddp", Path(folder[0], "never stopped"), 3)
    saved(made[first](), Path(folder[0], "stopped"), 1)
    weights = saved(made[second](), Path(folder[0], "resumed"), 3, Path(folder[0], "stopped", "epoch=0.ckpt"))
    same_tensors(weights, expected, bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("first", "second", "sharded"),
    [
        ("zero3", "zero3", False),
        ("zero3", "zero1", True),
        ("zero1", "ddp", False),
        ("ddp", "zero3", False),
    ],
)
def test_a_resumed_run_continues_with_its_masks(run_on, first, second, sharded):
    run_on(2, resumed, first=first, second=second, sharded=sharded)


def logs(tmp_path: Path, strategy: str) -> None:
    logger = CSVLogger(tmp_path)
    fit(strategy, callbacks=[MagnitudePruning(0.25)], logger=logger, max_epochs=1)
    if dist.get_rank() == 0:
        rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").open()))
        assert [float(row["pruning/sparsity"]) for row in rows] == [pytest.approx(0.25, abs=1e-3)]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_sparsity_is_logged(run_on, tmp_path, strategy):
    run_on(2, logs, tmp_path=tmp_path, strategy=strategy)


def moves(stage: int) -> None:
    fits = [
        fit(f"zero{stage}", lambda: Learner(Square, batches=6), callbacks=callbacks, max_epochs=1)
        for callbacks in ([], [MagnitudePruning(0.5)])
    ]
    # Count from the second batch on: before the first, elements are chosen and set to zero.
    moved = [{k: n - run.reports[0].bytes[k] for k, n in run.reports[-1].bytes.items()} for run in fits]
    assert moved[1] == moved[0] and moved[0]["all_gather"] > 0 and world_size() == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pruning_adds_no_traffic_to_a_step(run_on, stage):
    run_on(2, moves, stage=stage)


def test_wrong_amounts_and_an_empty_choice_of_parameters_are_refused_before_training():
    with pytest.raises(ValueError, match=r"amount=1.5 is not a fraction of the elements: write a number from 0 to 1"):
        MagnitudePruning(1.5)
    with pytest.raises(ValueError, match="amount=-0.1 is not a fraction"):
        magnitude_masks([torch.ones(2)], -0.1)
    trainer = make_trainer("auto", callbacks=[MagnitudePruning(parameters=lambda name, p: False)])
    with pytest.raises(ValueError, match=r"no parameter is chosen\. Pass parameters=f, where .* for example, \['model"):
        trainer.fit(Learner())


def is_chosen(*names: str) -> Any:
    return lambda name, p: name in names


def test_a_checkpoint_with_masks_of_other_parameters_is_refused_with_their_names(tmp_path):
    first, second = "model.widen.weight", "model.head.weight"
    trainer = make_trainer("auto", callbacks=[MagnitudePruning(parameters=is_chosen(first))])
    trainer.fit(Learner())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    for names, differing in (((first, second), second), ((second,), f"{second}, {first}")):
        trainer = make_trainer("auto", callbacks=[MagnitudePruning(parameters=is_chosen(*names))], max_epochs=4)
        with pytest.raises(ValueError, match=rf"choice of parameters= differ in {differing}\. Pass the parameters= of"):
            trainer.fit(Learner(), ckpt_path=tmp_path / "one.ckpt")
