"""Trains a Llama from transformers on 2 x 2 ranks: pairs divide it by its own plan, and ZeRO shards each rank's part.

    python examples/tensor_parallel.py                     # four processes on the CPU; --help: options
    lightning-zero plan examples.tensor_parallel:Llama width=4096 depth=32 heads=32 vocabulary=32000 context=4096 \
        --batch 'int64[1,4096]' --ranks 64 --option tensor_parallel_size={null,2,8}
"""

import argparse
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

try:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
except ModuleNotFoundError as error:
    sys.exit(f"tensor_parallel: the package {error.name} is missing: pip install 'lightning_zero[libraries]'")


class Llama(LightningModule):
    """A causal language model; batches are (batch, time) token ids.

    Args:
        width, depth, heads: size of the decoder; the MLP is four times as wide.
        vocabulary: number of tokens.
        context: the longest sequence.
    """

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, vocabulary: int = 256, context: int = 128
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "network"):  # Lightning calls this before each fit, validation and test
            return
        sizes = LlamaConfig(
            hidden_size=self.hparams["width"],
            intermediate_size=4 * self.hparams["width"],
            num_hidden_layers=self.hparams["depth"],
            num_attention_heads=self.hparams["heads"],
            vocab_size=self.hparams["vocabulary"],
            max_position_embeddings=self.hparams["context"],
            use_cache=False,
        )
        self.network = AutoModelForCausalLM.from_config(sizes)
        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            plan, *_ = self.network._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
            apply_tensor_parallelism(self.network, mesh, plan)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="ranks that divide the model")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    seed_everything(0)
    text = torch.tensor(list("".join(topics.values()).encode()))  # bytes of the Python language reference
    windows: Any = list(text[: len(text) // 128 * 128].view(-1, 128))
    trainer = Trainer(
        strategy=ZeroStrategy(stage=given.stage, tensor_parallel_size=given.tensor_parallel_size),
        accelerator="cpu",
        devices=given.ranks,
        max_steps=given.steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Llama(), DataLoader(windows, batch_size=4, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['train/loss']:.3f}")


if __name__ == "__main__":
    main()
