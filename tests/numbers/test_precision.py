"""Every `Trainer(precision=...)` and precision plugin: as under DDP, or refused before any process is started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    Precision,
    TransformerEnginePrecision,
)
from torch import Tensor

from lightning_zero import ZeroStrategy
from tests.support import models
from tests.support.trainer import Learner, fit, fit_ddp, make_trainer
from tests.support.training import same_on_every_rank, same_runs

SIZES = pytest.mark.parametrize("size", [1, 2])


def train_in_fp64() -> None:
    learner = partial(Learner, optimizer=models.adamw_with_decay_groups)
    reference = fit_ddp(learner, precision="64-true", max_epochs=1)
    assert {weight.dtype for weight in reference.weights.values()} == {torch.float64}
    for stage in (1, 2, 3):
        same_runs(fit(f"zero{stage}", learner, precision="64-true", max_epochs=1), reference)


@pytest.mark.behaviour("The numbers", "`64-true`")
@SIZES
def test_64_true_equals_ddp_bit_for_bit(run_on, size):
    run_on(size, train_in_fp64)


def train_in_fp16() -> None:
    # DDP rounds the weights to fp16 at each step, which masters avoid, so the reference is the run in fp32.
    reference = fit_ddp(max_epochs=1)
    first = None
    for stage in (1, 2, 3):
        run = fit(f"zero{stage}", precision="16-true", max_epochs=1)
        assert {weight.dtype for weight in run.weights.values()} == {torch.float16}
        same_on_every_rank(run.weights)
        for loss, expected in zip(run.losses, reference.losses, strict=True):
            # Roundings of 2**-11 along the way, few of which add up: a quarter of a percent.
            assert abs(loss - expected) <= 0.0025 * abs(expected), f"{loss} instead of {expected}"
        first = first or run
        same_runs(run, first)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "`16-true`", notes=dict.fromkeys((1, 2, 3), "fp32 masters: follows fp32"))
@SIZES
def test_16_true_follows_fp32_and_the_three_stages_give_the_same_bits(run_on, size):
    run_on(size, train_in_fp16)


def train_with_the_word() -> None:
    for strategy in ("ddp", "zero1", "zero3"):
        with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
            plugin = make_trainer(strategy, precision="16-mixed").precision_plugin
        assert type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed" and plugin.scaler is None


def test_16_mixed_means_bf16_mixed_on_a_cpu_as_under_ddp(run_on):
    run_on(1, train_with_the_word)


class Scaled(Precision):
    """A project's own plugin: scales the loss by hand and unscales the gradients before the step."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor * 8, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        def unscaled() -> Any:
            result = closure()
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.div_(8)
            return result

        return super().optimizer_step(optimizer, model, unscaled, **kwargs)


class Autocast(Precision):
    """Autocast without Lightning's own plugin; weights stay in fp32, and numbers equal DDP's exactly."""

    @contextmanager
    def forward_context(self) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            yield


class Half(HalfPrecision):
    """A subclass of one of Lightning's own plugins."""


def train_with_a_plugin(plugin: Callable[[], Precision]) -> None:
    reference = fit_ddp(plugins=plugin(), max_epochs=1)
    for stage in (1, 2, 3):
        same_runs(fit(f"zero{stage}", plugins=plugin(), max_epochs=1), reference)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "A project's own precision plugin")
@pytest.mark.parametrize("plugin", [Scaled, Autocast], ids=lambda plugin: plugin.__name__)
def test_a_users_own_precision_plugin_works_as_under_ddp(run_on, plugin):
    run_on(2, train_with_a_plugin, plugin=plugin)


def train_with_a_subclass() -> None:
    run, reference = [
        fit("zero2", **it, max_epochs=1) for it in ({"plugins": Half("bf16-true")}, {"precision": "bf16-true"})
    ]
    same_runs(run, reference)


def test_a_subclass_of_a_lightning_precision_plugin_works_as_its_base_class(run_on):
    run_on(1, train_with_a_subclass)


@pytest.mark.behaviour(
    "The numbers",
    "Lightning's precision plugins for TransformerEngine and bitsandbytes",
    notes=dict.fromkeys((1, 2, 3), "refused; the error names alternatives"),
)
@pytest.mark.parametrize(
    "plugin",
    [
        FSDPPrecision("bf16-mixed"),
        DeepSpeedPrecision("bf16-mixed"),
        # their packages are not needed to refuse them
        TransformerEnginePrecision.__new__(TransformerEnginePrecision),
        BitsandbytesPrecision.__new__(BitsandbytesPrecision),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_a_precision_plugin_whose_parameters_cannot_be_sharded_is_refused_in_one_line(plugin):
    instead = r"load_weights\(model, path, quantize='nf4'\)" if "Bits" in type(plugin).__name__ else "'16-mixed'"
    with pytest.raises(ValueError, match=rf"^{type(plugin).__name__} cannot be used with .*{instead}") as error:
        ZeroStrategy(stage=2, precision_plugin=plugin)
    assert "\n" not in str(error.value)


def test_the_trainer_refuses_an_unsupported_precision_plugin_before_any_process_is_started():
    with pytest.raises(ValueError, match="FSDPPrecision cannot be used with ZeroStrategy"):
        make_trainer("zero3", plugins=FSDPPrecision("bf16-mixed"))
