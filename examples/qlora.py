"""Fine-tunes a language model whose weights are quantised to 4 bits while they are loaded, with LoRA: QLoRA.

python examples/qlora.py                                     # a tiny Qwen, two processes on the CPU, stage 3
torchrun --nproc-per-node 8 examples/qlora.py --model FOLDER # --help: options
"""

import argparse
import sys
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_zero

try:
    import bitsandbytes  # noqa: F401
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
except ModuleNotFoundError as error:
    sys.exit(f"qlora: the package {error.name} is missing: pip install 'lightning_zero[libraries,optimizers]'")


class QLoRA(LightningModule):
    """A quantised causal language model with adapters; batches are (batch, time) token ids.

    Args:
        model: a folder written by ``save_pretrained``.
        quantize: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        rank: of the adapters.
    """

    def __init__(self, model: str, quantize: str = "nf4", rank: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is not None:  # Lightning calls this before each fit, validation and test
            return
        folder = self.trainer.strategy.broadcast(self.hparams["model"])  # rank 0's
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        lightning_zero.load_weights(network, folder, quantize=self.hparams["quantize"])
        adapters = LoraConfig(r=self.hparams["rank"], lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.network = get_peft_model(network, adapters)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3)


def write_tiny_model(folder: str) -> None:
    """Write a Qwen with random weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=256, num_hidden_layers=4, max_position_embeddings=128, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder written by save_pretrained; by default, a tiny random Qwen is made")
    parser.add_argument("--quantize", default="nf4", choices=["nf4", "fp4", "int8"])
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="adapter", help="the folder for the adapters")
    given = parser.parse_args()
    seed_everything(0)
    text = torch.tensor(list("".join(topics.values()).encode()))  # bytes of the Python language reference
    windows: Any = list(text[: len(text) // 64 * 64].view(-1, 64))
    trainer = Trainer(
        strategy=lightning_zero.ZeroStrategy(stage=given.stage),
        accelerator="auto",
        devices=given.devices,
        precision="bf16-mixed",
        max_steps=given.steps,
        logger=False,
        enable_checkpointing=False,
    )
    with TemporaryDirectory() as folder:
        if given.model is None and trainer.is_global_zero:
            write_tiny_model(folder)
        module = QLoRA(given.model or folder, given.quantize)
        trainer.fit(module, DataLoader(windows, batch_size=4, shuffle=True))
        if trainer.is_global_zero:
            print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['train/loss']:.3f}")
            module.network.save_pretrained(given.output)


if __name__ == "__main__":
    main()
