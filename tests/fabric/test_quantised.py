"""With Fabric, a model that is quantised while it is loaded trains as under DDP, and is saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_zero import iter_full_parameters, load_weights
from tests.fabric.training import make_fabric, state_of
from tests.support import rank
from tests.support.training import same_values
from tests.trainer.cases import shared_folder
from tests.trainer.test_quantised import base, quantised, with_bytes, write_base

SIZES = (6, 64), (64, 64), (64, 6)


class Adapted(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.adapter, self.head = blocks, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x) + self.adapter(x))


def train(strategy: str, kind: str, file: Any, load: Any = None, save: Any = None) -> Any:
    fabric = make_fabric(strategy)
    if strategy == "ddp":
        blocks = base().requires_grad_(False)
        for block, size in zip(blocks, SIZES):
            block[0] = quantised(kind, *size)
        blocks.load_state_dict(load_file(file))
        blocks.to("cpu")
    else:
        with torch.device("meta"):
            blocks = base()
        with fabric.init_module():
            load_weights(blocks, file, quantize=kind)
    module = Adapted(blocks)
    trained = [p for p in module.parameters() if p.requires_grad]
    model, optimizer = fabric.setup(module, torch.optim.AdamW(trained, lr=0.01))
    state = {"model": model, "optimizer": optimizer}
    if load is not None:
        fabric.load(load, state, strict=strategy != "ddp")  # DDP does not know the scales
    losses = []
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank()))
        losses.append(model(x).square().mean())
        fabric.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        fabric.save(save, state)
    whole = dict(model.module.state_dict() if strategy == "ddp" else iter_full_parameters(model))
    return [loss.detach() for loss in losses], with_bytes(whole), state_of(optimizer)


def compare(kind: str) -> None:
    torch.manual_seed(11)
    file = write_base()
    path = shared_folder() / "first.ckpt"
    first, second = train("ddp", kind, file, save=path), train("ddp", kind, file, load=path)
    for strategy in ("zero1", "zero3"):
        path = shared_folder() / f"{strategy}.ckpt"
        same_values(train(strategy, kind, file, save=path), first, strategy)
        same_values(train(strategy, kind, file.with_name("other.safetensors"), load=path), second, strategy)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_quantised_while_it_is_loaded_trains_and_is_loaded_as_under_ddp(run_on, kind):
    run_on(2, compare, kind=kind)
