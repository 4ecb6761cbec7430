"""bitsandbytes' quantised layers with adapters train as under DDP; at stage 3 each rank has its share of the codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import AdamW

from tests.support.training import same_values
from tests.trainer.cases import Net, data, fit, observed, same_as_under_ddp, shared_folder, trained

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


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The module", "bitsandbytes' `Linear4bit` and `Linear8bitLt` with LoRA: fit, evaluate, save, resume")
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_train_as_under_ddp(run_on, kind):
    run_on(2, same_as_under_ddp, case=partial(adapt, kind=kind))
