"""Projects to plan: modules as users write them, and their batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Accuracy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attend(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(LightningModule):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.register_buffer("scale", torch.ones(width))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.blocks(batch) * self.scale).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class OfTwoTensors(Net):
    """Takes two tensors that differ in their first dimension."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, second = batch
        return super().training_step(first, batch_idx) + self.blocks(second[None]).mean()


class Reading(Net):
    """Reads tensor values, which a plan does not have."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        chosen = batch[batch > 0]
        loss = super().training_step(batch, batch_idx) + chosen.sum()
        if loss.item() > 10:
            loss = loss * 2
        return loss


class KnowsItsStrategy(Net):
    """Computes a different loss under ZeRO from the second batch on."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if batch_idx and type(self.trainer.strategy).__name__ == "ZeroStrategy" else loss


class LooksAtWeights(Net):
    """Reads a weight in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.blocks[0].up.weight[0, 0].item()


class Adversaries(LightningModule):
    """Two optimizers in turn, as in PyTorch's DCGAN tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
        self.critic = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        made = self.generator(torch.randn(len(batch), 8, device=self.device))
        for_critic.zero_grad()
        self.manual_backward(self.critic(made.detach()).mean() - self.critic(batch).mean())
        for_critic.step()
        for_generator.zero_grad()
        self.manual_backward(-self.critic(made).mean())
        for_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters()) for each in (self.generator, self.critic)]


class Llama(LightningModule):
    """A language model of transformers, with a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=500,
            )
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]


class ViT(LightningModule):
    """A vision model of transformers, with a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = ViTForImageClassification(
            ViTConfig(
                hidden_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=192,
                image_size=32,
                patch_size=8,
                num_labels=10,
            )
        )
        self.accuracy = Accuracy("multiclass", num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        found = self.model(pixel_values=pictures, labels=labels)
        self.accuracy(found.logits, labels)
        self.log("accuracy", self.accuracy)
        return found.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TiedHead(LightningModule):
    """A language model of transformers, whose head shares the embedding's weight. A subclass makes the model."""

    model: PreTrainedModel

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class GPT2(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=32, n_embd=64, n_layer=2, n_head=2))


class T5(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        config = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
        self.model = T5ForConditionalGeneration(T5Config(vocab_size=500, decoder_start_token_id=0, **config))


class Quantised(Net):
    """A net whose linear layers are quantised, with an adapter in each block."""

    def __init__(self, width: int = 64, depth: int = 4, kind: str = "nf4") -> None:
        from bitsandbytes.nn import Linear4bit, Linear8bitLt

        super().__init__(width, depth)
        self.adapters = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        make = partial(Linear4bit, quant_type=kind) if kind != "int8" else partial(Linear8bitLt, has_fp16_weights=False)
        for block in self.blocks:
            block.attend, block.up, block.down = make(width, 3 * width), make(width, 4 * width), make(4 * width, width)
        self.blocks.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block, adapter in zip(self.blocks, self.adapters):
            batch = block(batch) + adapter(batch)
        return (batch * self.scale).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.adapters.parameters())


class Sharing(Net):
    """Blocks that share a module, and a parameter that has two names."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, _ = self.blocks
        second.up = first.up
        third.down.weight = first.down.weight
        self.register_parameter("gain", first.norm.weight)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 500, (2, 32))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def labelled_pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))


def batch() -> Tensor:
    return torch.randn(4, 16, 64)


def pictures() -> Tensor:
    return torch.randn(4, 32)


def narrow() -> Tensor:
    return torch.randn(4, 16, 32)


class WithAdafactor(Net):
    """Trains with an optimizer whose whole matrices are owned by one rank each, and do not divide evenly by rank."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-3)


class CountsSteps(torch.optim.SGD):
    """Keeps a state of no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["k"] = self.state.get("k", torch.zeros(1, dtype=torch.int64)) + 1
        return loss


class WithStepCount(Net):
    def configure_optimizers(self) -> Any:
        return CountsSteps(self.parameters(), lr=0.1, momentum=0.9)
