"""A user's default device (``torch.set_default_device``) applies to user code and not to the engine.

Tensors that it keeps on the CPU or sends to other ranks would be lost on the "meta" device, a stand-in for a GPU here.
"""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.checkpoint.saving import by_name, names_in
from lightning_zero.engine import Engine
from lightning_zero.engine.tensor.sharded_tree import in_parts
from tests.support import rank
from tests.support.training import same_values
from tests.support.transports import cross_memory


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def train(module: nn.Module, folder: Path, **options: Any) -> dict[str, Any]:
    """Train for three steps, save and load checkpoints, and return the results."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(module, [optimizer], **options)
    for step in range(3):
        inputs = torch.linspace(-1, 1 + step + rank(), 20, device="cpu").view(4, 5)
        module(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    names = names_in(optimizer, {id(p): name for name, p in module.named_parameters()})
    states = by_name(engine.full_optimizer_state_dict(optimizer, leaf=in_parts), names)
    tree = {"state_dict": module.state_dict(), "optimizer_0": states}
    for saver, path in ((Saver(in_background=True), "begun"), (Saver(in_background=False), "waited for")):
        job = SaveJob(SaveMode.SHARDED, folder / path, {}, tree)
        saver.save(job, Ranks(rank(), engine.communicator.control.gather_objects))
        saver.finish()
    whole, states = engine.full_state_dict(), engine.full_optimizer_state_dict(optimizer)
    optimizer.load_state_dict(states)
    for path in ("begun", "waited for"):
        opened = open_checkpoint(folder / path)
        opened.verify()
        module.load_state_dict(opened.checkpoint["state_dict"])
        same_values(engine.full_state_dict(), whole, path)
    engine.close()
    return {"weights": whole, "states": states, "at the end": module.state_dict()}


def compare(folder: Path, **options: Any) -> None:
    torch.manual_seed(0)
    module = make()
    other = copy.deepcopy(module)
    expected = train(module, folder / "without", **options)
    torch.set_default_device("meta")
    try:
        found = train(other, folder / "with", **options)
    finally:
        torch.set_default_device(None)
    same_values(found, expected, "")


OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "bf16": {"stage": 3, "compute_dtype": torch.bfloat16, "reduce_dtype": "bf16"},
    "on the CPU": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu"}},
    "on a disk": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "path": "swap"}},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_default_device_changes_nothing(run_on, tmp_path, options, ranks):
    run_on(ranks, compare, folder=tmp_path, **OPTIONS[options])


def test_a_default_device_changes_nothing_when_ranks_read_each_others_memory(run_on, tmp_path):
    run_on(2, compare_across_memory, folder=tmp_path, stage=3)


def compare_across_memory(folder: Path, **options: Any) -> None:
    with cross_memory():
        compare(folder, **options)


MAKES_A_TENSOR = set(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace normal ones rand randint "
    "randn randperm scalar_tensor tensor tril_indices triu_indices zeros".split()
)


def test_every_tensor_that_the_package_creates_names_its_device():
    """This includes code that no case above runs. The zoo counts as user code: its models use the default device."""
    package = Path(lightning_zero.__file__).parent
    silent = []
    for file in sorted(package.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if file.parent.name == "zoo" or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            says = any(keyword.arg == "device" for keyword in call.keywords)
            if call.func.attr in MAKES_A_TENSOR and ast.unparse(call.func.value) == "torch" and not says:
                silent.append(f"{file.relative_to(package)}:{call.lineno}: {ast.unparse(call)}")
    assert not silent, "\n".join(silent)
