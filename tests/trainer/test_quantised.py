"""bitsandbytes' quantised layers with adapters train as under DDP; at stage 3 each rank has its share of the codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_zero import ZeroStrategy, full_parameters, load_weights
from tests.support import rank, world_size
from tests.support.trainer import make_trainer
from tests.support.training import same_values
from tests.trainer.cases import Net, data, fit, observed, same_as_under_ddp, shared_folder, trained, weights

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4"},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "nf4 in bf16": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
    "nf4 in fp32": {"quant_type": "nf4", "quant_storage": torch.float32},
    "int8": {"has_fp16_weights": False},
    "int8 with outliers": {"has_fp16_weights": False, "threshold": 1.0},
}


def quantised(kind: str, inputs: int, outputs: int) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if kind.startswith("int8"):
        return Linear8bitLt(inputs, outputs, **KINDS[kind]).requires_grad_(False)
    layer = Linear4bit(inputs, outputs, compute_dtype=torch.float32, **KINDS[kind])
    layer.support_avx512bf16_for_cpu = False  # DDP would train wrongly after evaluation on CPUs with AVX512-BF16
    return layer.requires_grad_(False)


class LoRA(nn.Module):
    """A quantised layer beside a trained product of two thin matrices."""

    def __init__(self, kind: str, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = quantised(kind, inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Quantised(Net):
    def __init__(self, kind: str = "nf4", is_quantised: bool = True) -> None:
        super().__init__()
        sizes = (6, 64), (64, 64), (64, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(LoRA(kind, *size), nn.Tanh()) for size in sizes))
        if is_quantised:
            self.to("cpu")  # quantises; otherwise the strategy's own move does

    @property
    def strict_loading(self) -> bool:
        return False

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def with_bytes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights to compare: of codes that are stored as floating-point numbers, some are not numbers."""
    return {name: value.view(torch.uint8) if name.endswith("base.weight") else value for name, value in weights.items()}


def adapt(strategy: str, kind: str) -> Any:
    saving = ModelCheckpoint(shared_folder(), save_last=True)
    module = Quantised(kind, is_quantised=False)
    trainer, _ = fit(strategy, module, callbacks=[saving], enable_checkpointing=True)
    first = observed(trainer, module)
    first["weights"] = with_bytes(first["weights"])
    predicted = trainer.predict(module, data())
    saved = torch.load(shared_folder() / "last.ckpt", weights_only=False)["state_dict"]
    torch.manual_seed(0)  # DDP loads no scales, so the module must have the same
    module = Quantised(kind)
    resumed = trained(strategy, module, ckpt_path=shared_folder() / "last.ckpt", max_epochs=3)
    resumed["weights"] = with_bytes(resumed["weights"])
    return first, predicted, with_bytes(saved), resumed


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "Quantised layers of bitsandbytes (NF4, FP4, int8) with LoRA: fit, evaluate, save, resume"
)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_train_as_under_ddp(run_on, kind):
    run_on(2, same_as_under_ddp, case=partial(adapt, kind=kind))


class Compiled(Quantised):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile()


class Handled(Quantised):
    """Moved, copied, converted and read as a whole while it is sharded."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.to("cpu").float()
        copy.deepcopy(self.blocks)
        with full_parameters(self), torch.no_grad():
            assert type(self.blocks[0][0].base.weight).__name__ in ("Params4bit", "Int8Params")
            self.seen.append(self(torch.ones(2, 6)).sum().item())


def train(strategy: str, make: Callable[[str], Quantised], kind: str, **options: Any) -> Any:
    """Train under a strategy of this name, with options of ours that DDP does not have."""
    chosen = strategy if strategy == "ddp" else ZeroStrategy(stage=strategy[-1], **options)
    result = trained(chosen, make(kind))
    result["weights"] = with_bytes(result["weights"])
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "offload": {"make": Quantised, "offload": "cpu"},
    "activation checkpointing": {"make": Quantised, "activation_checkpointing": "units"},
    "compiled blocks": {"make": Compiled},
    "handled": {"make": Handled},
}


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "Quantised layers: offload, activation checkpointing, `torch.compile` of blocks, `full_parameters`"
)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("options", OPTIONS)
def test_quantised_layers_train_as_under_ddp_with_options(run_on, options, kind):
    run_on(2, same_as_under_ddp, case=partial(train, kind=kind, **OPTIONS[options]))


# -- quantised while they are loaded ----------------------------------------------------------------------------------


def base() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in ((6, 64), (64, 64), (64, 6))))


class Loaded(Net):
    """Its blocks are quantised from a file, by us in `configure_model` or, under DDP, by hand."""

    def __init__(self, kind: str, file: Path, by_hand: bool = False) -> None:
        super().__init__()
        self.kind, self.file, self.by_hand = kind, file, by_hand
        self.blocks = None
        self.adapter = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        if self.by_hand:
            self.blocks = base().requires_grad_(False)
            for block, size in zip(self.blocks, ((6, 64), (64, 64), (64, 6))):
                block[0] = quantised(self.kind, *size)
            self.blocks.load_state_dict(load_file(self.file))
            self.blocks.to("cpu")
            return
        with torch.device("meta"):
            self.blocks = base()
        load_weights(self.blocks, self.file, quantize=self.kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x) + self.adapter(x)) * self.scale

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def write_base() -> Path:
    """Write weights of the blocks to one file for all ranks, and to another one that differs."""
    folder = shared_folder()
    if rank() == 0:
        folder.mkdir()
        for name in ("base", "other"):
            save_file(base().state_dict(), folder / f"{name}.safetensors")
    torch.distributed.barrier()
    return folder / "base.safetensors"


def fit_loaded(strategy: Any, file: Path, kind: str, ckpt_path: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Loaded(kind, file, by_hand=strategy == "ddp")
    fit(strategy, module, ckpt_path=ckpt_path, **options)
    return with_bytes(weights(module))


def load_and_resume(kind: str, checkpoint: str, excluded: bool) -> None:
    torch.manual_seed(11)
    file = write_base()
    expected = fit_loaded("ddp", file, kind, max_epochs=3)
    for stage in (1, 2, 3):
        options = {"stage": stage, "checkpoint": checkpoint, "exclude_frozen_parameters": excluded}
        folder = shared_folder() / str(stage)
        saving = [ModelCheckpoint(folder, save_last=True)]
        fit_loaded(ZeroStrategy(**options), file, kind, callbacks=saving, enable_checkpointing=True)
        if checkpoint == "full":
            saved = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
            assert excluded != any(name.startswith("blocks") for name in saved), "codes and scales, or neither"
        # Codes and scales of the checkpoint belong together, also in a module of other weights.
        again = file if excluded else file.with_name("other.safetensors")
        found = fit_loaded(ZeroStrategy(**options), again, kind, ckpt_path=folder / "last.ckpt", max_epochs=3)
        same_values(found, expected, f"stage {stage}")


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "`load_weights(quantize=...)`: fit, save, resume, also with `exclude_frozen_parameters`"
)
@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_quantised_while_they_are_loaded_train_and_resume_as_under_ddp(run_on, kind, checkpoint, excluded):
    run_on(2, load_and_resume, kind=kind, checkpoint=checkpoint, excluded=excluded)


def train_in(folder: str, kind: str, checkpoint: str) -> list[Tensor]:
    file = Path(folder, "base.safetensors")
    if rank() == 0:
        save_file(base().state_dict(), file)
    torch.distributed.barrier()
    strategy = ZeroStrategy(stage=3, checkpoint=checkpoint)
    saving = [ModelCheckpoint(folder, save_last=True)]
    return list(fit_loaded(strategy, file, kind, callbacks=saving, enable_checkpointing=True, max_epochs=1).values())


def read_from(folder: str, kind: str) -> list[Tensor]:
    module = Loaded(kind, Path(folder, "base.safetensors"))
    trainer = make_trainer(ZeroStrategy(stage=3))
    trainer.validate(module, data(), ckpt_path=Path(folder, "last.ckpt"), verbose=False)
    return list(with_bytes(weights(module)).values())


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(("kind", "checkpoint"), [("nf4", "full"), ("int8", "sharded")])
def test_another_number_of_ranks_reads_the_same_codes_and_scales(run_on, tmp_path, kind, checkpoint):
    saved = run_on(2, train_in, folder=str(tmp_path), kind=kind, checkpoint=checkpoint)[0]
    for ranks in (1, 3):
        for read in run_on(ranks, read_from, folder=str(tmp_path), kind=kind):
            assert all(map(torch.equal, read, saved))


def start_apart(kind: str, evaluate_first: bool) -> None:
    for stage in (1, 3):
        torch.manual_seed(rank())
        module = Quantised(kind)
        if evaluate_first:
            module.eval()(torch.ones(1, 6))
        fit(f"zero{stage}", module)
        alike = module.train()(torch.ones(1, 6))
        assert all(torch.equal(alike, other) for other in all_gathered(alike))


def all_gathered(tensor: Tensor) -> list[Any]:
    found = [None] * world_size()
    torch.distributed.all_gather_object(found, tensor)
    return found


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_all_ranks_start_with_rank_0s_scales(run_on, kind):
    run_on(2, start_apart, kind=kind, evaluate_first=kind == "int8")
