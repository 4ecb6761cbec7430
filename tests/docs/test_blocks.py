"""The pages' Python blocks run, one after another, on two CPU ranks in place of the pages' eight GPUs."""

from __future__ import annotations

import faulthandler
import logging
import shlex
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_zero.__main__
from tests.docs.pages import blocks
from tests.support import rank
from tests.support.trainer import make_trainer

HERE = (
    *(("devices=8", "devices=2"), ('accelerator="gpu"', 'accelerator="cpu"'), ('"cuda"', '"cpu"')),
    ("enable_fsdp_float8_all_gather=True", "enable_fsdp_float8_all_gather=True, emulate=True"),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(LightningModule):
    """A module of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.layer = nn.Linear(6, 1)

    def forward(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return self.layer(x).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ModelForFSDP2(Model):
    """Under FSDP2 a module creates its shards itself."""

    def configure_model(self) -> None:
        for part in (*self.blocks, self.layer):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def data() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(0))), batch_size=4)


def small_trainer(*args: Any, **options: Any) -> Trainer:
    quiet = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(*args, **{**quiet, "enable_checkpointing": False, **options})


def names() -> dict[str, Any]:
    """Objects that the pages mention: the user's own, and a finished run with a checkpoint."""
    model, trainer = Model(), make_trainer("zero3", max_epochs=1)
    trainer.fit(model, data())
    trainer.save_checkpoint("last.ckpt")
    dist.barrier()
    user = {"Block": Block, "Model": Model, "model": model, "data": data(), "trainer": trainer, "server": SimpleQueue()}
    return user | {"Trainer": small_trainer, "torch": torch, "lightning_zero": lightning_zero}


def run_page(page: str, folder: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("lightning.pytorch.Trainer", small_trainer)
        namespace = names() if namespace is None else namespace
        for block in blocks(page):
            if block.language == "python":
                text = block.text
                for there, here in HERE:
                    text = text.replace(there, here)
                exec(compile("\n" * (block.line - 1) + text, page, "exec"), namespace)
    return namespace


def run_converted_project(folder: str) -> None:
    namespace = run_page("tutorials/convert-your-project.md", folder)
    assert all(type(p) is nn.Parameter for p in namespace["model"].parameters())
    namespace = run_page("reference/configuration.md", folder)
    assert namespace["strategy"].last_report.stage == 3


def run_plain_torch(folder: str) -> None:
    namespace = run_page("how-to/plain-torch.md", folder)
    assert list(namespace["weights"]) == list(Model().state_dict())
    assert namespace["saved"]["masters"] == {}, "in fp32 parameters are their own masters"
    namespace["engine"].close()


def run_checkpoints(folder: str) -> None:
    namespace = run_page("how-to/checkpoints.md", folder)
    assert namespace["strategy"].last_report.stage == 3


def run_whole_weights(folder: str) -> None:
    namespace = run_page("how-to/whole-weights.md", folder)
    assert namespace["average"].keys() == (Model().state_dict().keys() if rank() == 0 else set())


def run_transformers(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if rank() == 0:
            sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
            LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained("my_model")
        dist.barrier()
    tokens = torch.randint(16, (8, 12), generator=torch.Generator().manual_seed(0))
    namespace = {"data": DataLoader(TensorDataset(tokens), batch_size=2)}
    namespace = run_page("tutorials/fine-tune.md", folder, namespace)
    tuned = namespace["module"].network.state_dict()
    assert all(torch.equal(value, tuned[name]) for name, value in namespace["alone"].state_dict().items())
    run_page("how-to/qlora.md", folder, namespace)


def run_offload(folder: str) -> None:
    namespace = run_page("how-to/offload.md", folder)
    assert namespace["strategy"].last_report.at_rest.get("optimizer", 0) == 0


def run_two_dimensions(folder: str) -> None:
    namespace = run_page("how-to/two-dimensions.md", folder)
    assert namespace["strategy"].config.partition_activations


def run_fabric(folder: str) -> None:
    namespace = run_page("how-to/fabric.md", folder)
    assert namespace["state"]["step"] == 10
    assert namespace["norm"] > 0


def run_lean_states(folder: str) -> None:
    namespace = run_page("how-to/lean-states.md", folder)
    assert not namespace["strategy"].config.masters


def run_float8(folder: str) -> None:
    namespace = run_page("how-to/float8.md", folder)
    assert type(namespace["model"].blocks[0].up.weight).__name__ == "WeightWithDynamicFloat8CastTensor"


def run_big_models(folder: str) -> None:
    namespace = run_page("how-to/big-models.md", folder)
    assert not any(p.is_meta for p in namespace["module"].parameters())


def run_troubleshooting(folder: str) -> None:
    logger = logging.getLogger("lightning_zero")
    before, handlers = logger.level, logging.root.handlers[:]
    try:
        run_page("how-to/troubleshooting.md", folder)
        assert logger.level == logging.DEBUG
    finally:
        faulthandler.cancel_dump_traceback_later()
        logger.setLevel(before)
        logging.root.handlers[:] = handlers


def move_a_folder_of_fsdp2(folder: str) -> None:
    """A run on the page's converted checkpoint continues as directly from FSDP2's folder and from its single file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, is_folder in (("last.ckpt", True), ("whole.ckpt", False)):
            torch.manual_seed(0)
            strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=is_folder)
            trainer = make_trainer(strategy, max_epochs=1)
            trainer.fit(ModelForFSDP2(), data())
            trainer.save_checkpoint(name)
        if rank() == 0:
            (commands,) = (block.text for block in blocks("how-to/migrate.md") if block.language == "bash")
            (command,) = (line for line in commands.splitlines() if "import fsdp" in line)
            patch.setattr(sys, "argv", shlex.split(command, comments=True))
            assert lightning_zero.__main__.main() == 0
        dist.barrier()
        page = run_page("how-to/migrate.md", folder, {"model": Model(), "trainer": trainer, "data": data()})
        runs = [(page["model"], page["trainer"])]
        for name in ("last.ckpt", "whole.ckpt"):
            runs.append((Model(), make_trainer("zero3", max_epochs=2)))
            runs[-1][1].fit(runs[-1][0], data(), ckpt_path=name)
        found = []
        for model, trainer in runs:
            assert trainer.global_step == 4
            state = trainer.optimizers[0].state_dict()["state"]
            assert all(each["step"] == 4 for each in state.values())
            found.append([*model.state_dict().values(), *(each["exp_avg_sq"] for each in state.values())])
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


PAGES = [
    run_converted_project,
    run_plain_torch,
    run_checkpoints,
    run_whole_weights,
    run_lean_states,
    run_transformers,
    run_offload,
    run_two_dimensions,
    run_fabric,
    run_float8,
    run_big_models,
    run_troubleshooting,
    move_a_folder_of_fsdp2,
]


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(run_on, tmp_path: Path, page) -> None:
    run_on(2, page, folder=str(tmp_path), timeout=90)
