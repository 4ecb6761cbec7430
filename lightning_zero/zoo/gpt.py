"""A byte-level GPT as a plain module, and the LightningModule that trains it. Neither depends on ZeRO."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.text import Perplexity

from lightning_zero.zoo.supervised import Supervised

VOCABULARY = 256  # every byte is a token, so any file works without a tokenizer


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, width / heads)
        return self.out(x.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """Maps bytes to logits for the next byte.

    Arguments:
        width: Number of features per token.
        depth: Number of blocks.
        heads: Attention heads per block; must divide ``width``.
        context: The maximum sequence length in bytes.
        tied: Whether the head shares the embedding's weight.
    """

    def __init__(self, width: int, depth: int, heads: int, context: int, tied: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}")
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.reset_parameters()
        if tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Initialize as in GPT-2; also called when a model that was created on the meta device is materialised."""
        for name, p in self.named_parameters():
            if p.ndim >= 2:
                # Layers that add to the residual stream are scaled so that its variance does not grow with depth.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * len(self.blocks)) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) bytes -> (batch, time, 256) logits."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.8, top_k: int = 40, seed: int = 0) -> bytes:
        """Extend ``prompt`` by ``length`` bytes, each sampled reproducibly from the ``top_k`` most likely bytes."""
        device = self.embedding.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[0, -1].float() / temperature
            values, indices = logits.nan_to_num().topk(top_k)  # after a diverged training, logits are NaN
            drawn = torch.multinomial(values.softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, indices[drawn][None]], dim=1)
        return bytes(tokens[0].tolist())


class LanguageModel(Supervised):
    """Trains a GPT with cross entropy on (batch, context) windows of bytes. Validation logs the perplexity per byte.

    Arguments:
        width, depth, heads, context, tied: See ``GPT``.
        optimizer, warmup_steps, float8: See ``Supervised``.
        prompt: The text that ``sample`` continues.
    """

    counted = "tokens"  # the unit of `count`

    def __init__(
        self,
        width: int = 256,
        depth: int = 3,
        heads: int = 4,
        context: int = 256,
        tied: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        warmup_steps: int = 100,
        prompt: str = "def ",
        float8: str | None = None,
    ) -> None:
        super().__init__("perplexity", Perplexity(), optimizer, warmup_steps)
        self.save_hyperparameters(ignore=["optimizer"])  # a function, which torch.load(weights_only=True) rejects
        self.gpt = GPT(width, depth, heads, context, tied)
        self.prompt, self.float8 = prompt, float8

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    @staticmethod
    def count(batch: tuple[Tensor, Tensor]) -> int:
        return batch[0].numel()

    def sample(self) -> str:
        """Generate text that continues the prompt; if the module is sharded, every rank must call this method."""
        return self.gpt.generate(self.prompt.encode(), length=400).decode("utf-8", errors="replace")
