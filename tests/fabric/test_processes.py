"""Processes under Fabric: launch, collectives, failures, teardown, and refused arguments."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch
from lightning.fabric.plugins.precision import FSDPPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero.fabric
import lightning_zero.lightning_fabric
from lightning_zero.engine.plan.mesh import ALL
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from tests.fabric.training import make_fabric, same_as_under_ddp, set_up, state_of, train, weights
from tests.support.models import OddModel
from tests.support.patience import little_patience
from tests.support.training import batch, same_values
from tests.support.transports import cross_memory
from tests.support.warm import warm_python
from tests.support.workers import rank

SCRIPT = """
    import sys, torch
    from lightning.fabric import Fabric
    import lightning_zero

    def run(fabric):
        torch.set_num_threads(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
        for step in range(3):
            if step == 2 and fabric.global_rank in {failing}:
                raise KeyError("user error")
            fabric.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return fabric.global_rank, fabric.world_size

    if __name__ == "__main__":
        fabric = Fabric(strategy="{strategy}", devices=2, accelerator="cpu")
        if {function}:
            print("TRAINED", *fabric.launch(run))
        else:
            fabric.launch()
            print("TRAINED", *run(fabric))
"""


def run_script(tmp_path: Path, **options: Any) -> tuple[Any, float]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(**options))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    begin = time.monotonic()
    done = subprocess.run([warm_python(), script], capture_output=True, text=True, timeout=150, env=environment)
    return done, time.monotonic() - begin


@pytest.mark.behaviour("Fabric", "An exception in a script after `launch()` ends every rank in seconds, saying why")
def test_an_exception_after_launch_ends_every_rank_in_seconds(tmp_path):
    done, seconds = run_script(tmp_path, strategy="zero3", failing={0}, function=False)
    assert done.returncode != 0 and "TRAINED" not in done.stdout
    assert "KeyError: 'user error'" in done.stderr
    assert "did not complete: rank 0 failed with KeyError: 'user error'" in done.stderr
    assert seconds < 90


@pytest.mark.behaviour("Fabric", "`launch(function)` by fork returns rank 0's result")
def test_a_launched_function_returns_what_rank_0_returns(tmp_path):
    done, _ = run_script(tmp_path, strategy="zero2_fork", failing=set(), function=True)
    assert done.stdout.split() == ["TRAINED", "0", "2"], done.stderr


def collectives(strategy: str) -> Any:
    """`all_gather`, `all_reduce`, `broadcast`, `barrier`, `rank_zero_first`; `setup_dataloaders`; `init_module`"""
    fabric = make_fabric(strategy)
    value = torch.tensor([1.0 + rank(), 2.0])
    found = [
        fabric.all_gather({"a": value, "b": 3 * rank()}),
        fabric.all_reduce(value.clone(), reduce_op="sum"),
        fabric.all_reduce(value.clone()),
        fabric.broadcast({"from": rank()}, src=1),
        fabric.strategy.reduce_boolean_decision(rank() == 0, all=False),
    ]
    fabric.barrier("here")
    with fabric.rank_zero_first():
        found.append(fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True))
    found += [[b[0] for b in loader], fabric.strategy.distributed_sampler_kwargs]
    with fabric.init_module(empty_init=False), fabric.init_tensor():
        torch.manual_seed(0)
        module = OddModel()
    with fabric.init_module(empty_init=True):
        empty = OddModel()
    empty.load_state_dict(module.state_dict())
    model, optimizer = fabric.setup(empty, Adam(empty.parameters(), lr=0.01))
    found += [fabric.all_reduce(value.clone(), reduce_op="sum"), fabric.broadcast(rank(), src=1)]  # with an engine
    return found, train(fabric, model, optimizer), weights(model)


@pytest.mark.behaviour("Fabric", str(collectives.__doc__))
def test_collectives_give_ddps_results(run_on):
    run_on(2, same_as_under_ddp, case=collectives)


def evaluated(strategy: str) -> Any:
    """A module set up without an optimizer, for inference"""
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    model = fabric.setup(OddModel()).eval()
    with torch.no_grad():
        return [model(*batch(index)) for index in range(2)]


@pytest.mark.behaviour("Fabric", str(evaluated.__doc__))
def test_a_module_without_an_optimizer_is_evaluated_as_under_ddp(run_on):
    run_on(2, same_as_under_ddp, case=evaluated)


def ended() -> None:
    """After `teardown` modules and optimizers are ordinary and whole, and train alike with or without a new setup."""
    for stage in (1, 2, 3):
        fabric = make_fabric(f"zero{stage}")
        torch.manual_seed(0)
        one, two = nn.Linear(3, 4), nn.Linear(4, 2)
        optimizer = Adam([*one.parameters(), *two.parameters()], lr=0.1)
        first, second = fabric.setup_module(one), fabric.setup_module(two)
        wrapped = fabric.setup_optimizers(optimizer)

        def step(first: Any, second: Any, optimizer: Any) -> None:
            second(first(torch.ones(2, 3))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(first, second, wrapped)
        before = weights(one), weights(two), state_of(wrapped)
        fabric.strategy.teardown()
        assert not any(isinstance(p, ShardedTensor) for p in (*one.parameters(), *two.parameters()))
        same_values((dict(one.state_dict()), dict(two.state_dict()), state_of(optimizer)), before, f"stage {stage}")
        again = copy.deepcopy((one, two, optimizer.state_dict()))
        step(one, two, optimizer)
        fabric = make_fabric(f"zero{stage}")
        other = Adam([*again[0].parameters(), *again[1].parameters()], lr=0.1)
        other.load_state_dict(again[2])
        first, wrapped = fabric.setup(again[0], other)
        second = fabric.setup_module(again[1])
        step(first, second, wrapped)
        same_values(weights(first), dict(one.state_dict()), "set up again")
        same_values(weights(second), dict(two.state_dict()), "set up again")


def test_after_teardown_modules_are_whole_and_can_be_set_up_again(run_on):
    run_on(2, ended)


def deleted() -> None:
    fabric = make_fabric("zero3")
    gc.collect()
    gc.disable()
    with cross_memory():
        model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, steps=1)
    (engine,) = fabric.strategy.engines
    thread = engine.communicator.along(ALL)._transport._gathers._thread
    assert thread.is_alive()
    del engine, model, optimizer
    assert fabric.strategy.engines == [] and not thread.is_alive()


def test_an_engine_is_closed_when_its_module_is_deleted(run_on):
    run_on(2, deleted)


def engines_in_variables() -> None:
    """The variable of a loop over ``engines`` keeps the last engine after its module was deleted, or it was closed."""
    fabric = make_fabric("zero3", precision="bf16-true")
    for fold in range(3):
        model, optimizer = set_up(fabric)
        assert len(fabric.strategy.engines) == 1
        train(fabric, model, optimizer, steps=1)
        fabric.save("fold", {"model": model, "optimizer": optimizer})
        for engine in fabric.strategy.engines:
            assert engine.module is model.module
            if fold == 1:
                engine.close()
                assert fabric.strategy.engines == []
                fabric.barrier()
        del model, optimizer
        assert fabric.strategy.engines == []
    fabric.strategy.teardown()


def test_engines_has_no_engine_of_a_deleted_module_and_no_closed_engine(run_on):
    run_on(2, engines_in_variables)


def refusals() -> None:
    fabric = make_fabric("zero3")
    model, _ = set_up(fabric)
    with pytest.raises(ValueError, match="temperature is sharded already: a module can have only one engine"):
        fabric.setup(model.module)
    with pytest.raises(ValueError, match="should be passed only once"):
        fabric.setup(model)
    with pytest.raises(ValueError, match="prefetch=-1 must be an integer"):
        other = make_fabric(lightning_zero.fabric.ZeroStrategy(prefetch=-1))
        other.setup(OddModel())
    with pytest.raises(ValueError, match="FSDPPrecision cannot be used with ZeroStrategy"):
        make_fabric("zero3", plugins=FSDPPrecision("bf16-true"))
    with pytest.raises(ValueError, match=r"<ZeroStrategy\(stage=3\) for lightning.pytorch.Trainer>"):
        make_fabric(lightning_zero.ZeroStrategy())
    with pytest.raises(ValueError, match=r"<ZeroStrategy\(stage=2\) for lightning.fabric.Fabric>"):
        lightning_fabric.Fabric(strategy=lightning_zero.fabric.ZeroStrategy(stage=2), accelerator="cpu", devices=1)


def test_bad_input_is_refused(run_on):
    run_on(1, refusals)


def test_the_strategy_names_are_in_both_registries():
    registries = [
        (STRATEGY_REGISTRY, lightning_zero.fabric.ZeroStrategy),
        (lightning_fabric.strategies.STRATEGY_REGISTRY, lightning_zero.lightning_fabric.ZeroStrategy),
    ]
    for registry, cls in registries:
        for stage in (1, 2, 3):
            for suffix, start_method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
                strategy = registry.get(f"zero{stage}{suffix}")
                assert (type(strategy), strategy.stage, strategy.options.start_method) == (cls, stage, start_method)
                assert pickle.loads(pickle.dumps(strategy)).stage == stage  # as a spawned process gets it


def other_namespace() -> None:
    fabric = lightning_fabric.Fabric(strategy="zero3", accelerator="cpu", devices=2, precision="bf16-mixed")
    fabric.launch()
    assert type(fabric.strategy) is lightning_zero.lightning_fabric.ZeroStrategy
    model, optimizer = set_up(fabric)
    reference = make_fabric("zero3", precision="bf16-mixed")
    same_values(
        (train(fabric, model, optimizer), weights(model)),
        (train(reference, *(expected := set_up(reference))), weights(expected[0])),
        "lightning_fabric",
    )


def test_lightning_fabric_has_the_same_strategy(run_on):
    run_on(2, other_namespace)
    assert lightning.fabric.Fabric is not lightning_fabric.Fabric


@little_patience()
def diverges() -> None:
    """Each rank runs a different one of two modules: both wait for each other in the rendezvous of its first gather."""
    fabric = make_fabric("zero3")
    torch.manual_seed(0)
    modules = [fabric.setup(OddModel()), fabric.setup(OddModel())]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="the gather of unit 'root'.* Every rank must run the same units"):
        modules[rank()](*batch(0))
    assert time.monotonic() - begin < 20


def test_ranks_that_run_different_modules_get_an_error_within_seconds(run_on):
    run_on(2, diverges, timeout=30)
