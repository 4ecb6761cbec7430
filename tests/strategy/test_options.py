"""Each option has the same name, default and description everywhere: class, Fabric, Hydra, LightningCLI."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.strategies import ParallelStrategy as FabricParallelStrategy
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

import lightning_zero.conf
import lightning_zero.fabric
from lightning_zero import OffloadConfig, ResilienceConfig, ZeroStrategy
from lightning_zero.engine import Engine, EngineConfig
from lightning_zero.strategies.base import StrategyOptions, TrainerOptions, takes_options

STRATEGIES = pytest.mark.parametrize(
    "strategy, base", [(ZeroStrategy, ParallelStrategy), (lightning_zero.fabric.ZeroStrategy, FabricParallelStrategy)]
)
FOLLOW_FROM_OTHERS = {"compute_dtype"}  # from the precision
ENGINE_OPTIONS = {
    each.name: each.default for each in dataclasses.fields(EngineConfig) if each.name not in FOLLOW_FROM_OTHERS
}


def options_of(strategy: type, base: type) -> dict[str, object]:
    """Names and defaults of a strategy's arguments beyond those of every Lightning strategy."""
    lightnings_own = {*inspect.signature(base).parameters, "precision"}
    parameters = inspect.signature(strategy).parameters.values()
    return {each.name: each.default for each in parameters if each.name not in lightnings_own}


@STRATEGIES
def test_a_strategy_takes_every_option_of_the_engine_with_its_default(strategy, base):
    options = options_of(strategy, base)
    assert {name: options.get(name, "missing") for name in ENGINE_OPTIONS} == ENGINE_OPTIONS


@STRATEGIES
def test_all_arguments_but_the_stage_are_given_by_name(strategy, base):
    assert strategy(2).stage == 2
    with pytest.raises(TypeError, match="positional"):
        strategy(2, "cpu")


@STRATEGIES
def test_every_option_is_documented_where_help_shows_it(strategy, base):
    assert "{options}" not in strategy.__doc__
    for name in options_of(strategy, base):
        assert strategy.__doc__.count(f"\n    {name}: ") == 1, name


def test_options_are_found_in_docstrings_that_python_has_dedented(monkeypatch):
    for cls in (EngineConfig, StrategyOptions, TrainerOptions):
        monkeypatch.setattr(cls, "__doc__", inspect.cleandoc(cls.__doc__))  # as Python does from 3.13 on

    class Strategy:
        """A strategy.

        Arguments:
            {options}
        """

        def __init__(self, stage=3, **options):
            raise NotImplementedError

    Strategy.__doc__ = inspect.cleandoc(Strategy.__doc__) + "\n"
    described = takes_options(TrainerOptions, ParallelStrategy)(Strategy).__doc__
    assert all(described.count(f"\n    {name}: ") == 1 for name in options_of(ZeroStrategy, ParallelStrategy))


def test_hydra_has_every_option_with_its_default():
    (folder,) = map(Path, lightning_zero.conf.__path__)
    text = (folder / "stage" / "options" / "zero.yaml").read_text(encoding="utf-8")
    given = yaml.safe_load(text)
    assert given.pop("_target_") == "lightning_zero.ZeroStrategy"
    options = options_of(ZeroStrategy, ParallelStrategy)
    assert options.pop("timeout") == timedelta(seconds=given.pop("timeout"))
    assert options.pop("stage") == 3  # set by the group's files
    for name in ("offload", "resilience"):
        assert given.pop(name) == {} and options.pop(name) is None  # merged with a dict in any order, unlike null
    assert given == options
    without_comment = [line for line in text.splitlines()[2:] if " # " not in line]
    assert not without_comment


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefetc": 1}, "ZeroStrategy has no option 'prefetc': did you mean 'prefetch'?"),
        ({"zzz": 1}, "ZeroStrategy has no option 'zzz': there are stage, offload, shard_within, compression, "),
        ({"compute_dtype": torch.bfloat16}, "ZeroStrategy has no option 'compute_dtype'"),
    ],
)
def test_an_unknown_option_is_refused_with_the_options_that_exist(options, message):
    with pytest.raises(TypeError) as caught:
        ZeroStrategy(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"stage": 4}, ValueError, "stage=4 is not a ZeRO stage"),
        ({"prefetch": True}, ValueError, "prefetch=True must be an integer of at least 0"),
        ({"unit_numel": -1}, ValueError, "unit_numel=-1 must be an integer of at least 0"),
        ({"overlap": "false"}, ValueError, "overlap='false' must be True or False"),
        ({"units": "all"}, TypeError, "units='all' must be 'auto', a module class"),
        ({"units": 3}, TypeError, "units=3 must be 'auto'"),
        ({"units": []}, TypeError, r"units=\[\] must be 'auto'"),
        ({"units": [3]}, TypeError, r"units=\[3\] must be 'auto'"),
        ({"activation_checkpointing": "auto"}, TypeError, "activation_checkpointing='auto' must be 'units'"),
        ({"reduce_dtype": "int8"}, ValueError, "reduce_dtype='int8' must be 'fp32', 'bf16', 'fp16'"),
        ({"offload": "disk"}, ValueError, "offload='disk' must be None, 'cpu', 'nvme', an OffloadConfig or a mapping"),
        ({"offload": OffloadConfig(activations="cpu")}, ValueError, "offload: activations='cpu' offloads the inputs"),
        (
            {"stage": 2, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
            ValueError,
            "requires stage 3",
        ),
    ],
)
def test_a_wrong_value_is_refused_when_the_options_are_made(options, error, message):
    for make in (EngineConfig, ZeroStrategy, lightning_zero.fabric.ZeroStrategy):
        with pytest.raises(error, match=message):
            make(**options)


def test_engine_options_can_be_given_as_a_config_and_one_by_one():
    config = EngineConfig(stage="os+g", reduce_dtype="bf16", offload="cpu")
    assert (config.stage, config.reduce_dtype, config.offload) == (2, "bf16", OffloadConfig("cpu"))
    engine = Engine(nn.Linear(2, 2), config=config, offload=None)
    assert engine.config == EngineConfig(stage=2, reduce_dtype="bf16")
    with pytest.raises(TypeError, match="Engine has no option 'stages': did you mean 'stage'?"):
        Engine(nn.Linear(2, 2), stages=2)


def test_an_option_that_can_be_given_in_several_forms_has_one_name_and_one_form():
    given = {"stage": "os", "offload": "cpu", "reduce_dtype": "bf16"}
    strategy = ZeroStrategy(**given, timeout=60, resilience="memory")
    config, options = strategy.config, strategy.options
    assert (config.stage, config.offload, config.reduce_dtype) == (1, OffloadConfig("cpu"), "bf16")
    assert (options.timeout, options.resilience) == (timedelta(minutes=1), ResilienceConfig())
    assert strategy.stage == config.stage


@STRATEGIES
def test_a_strategy_inherits_only_the_hooks_that_trainer_and_fabric_share(strategy, base):
    own = [each.__name__ for each in strategy.__mro__ if each.__module__.startswith("lightning_zero")]
    assert len(own) == 3 and own[0] == "ZeroStrategy" and own[-1] == "BaseStrategy"


def test_lightning_cli_takes_the_strategy_by_name_and_by_class(monkeypatch: pytest.MonkeyPatch):
    def strategy_by(*arguments: str) -> ZeroStrategy:
        device = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
        monkeypatch.setattr(sys, "argv", ["cli", *device, *arguments])
        return LightningCLI(BoringModel, BoringDataModule, run=False, save_config_callback=None).trainer.strategy

    assert strategy_by("--trainer.strategy=zero2").stage == 2
    given = ["--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.stage=1"]
    strategy = strategy_by(*given, "--trainer.strategy.offload=cpu", "--trainer.strategy.unit_numel=7")
    assert strategy.stage == 1
    assert strategy.config == ZeroStrategy(1, offload="cpu", unit_numel=7).config
