"""The models on which systems are compared, each with its layers in `blocks`, and their data.

All but two read tokens, (batch, sequence) of bytes; `wide` reads vectors and `vit` images. The last dimension of the
output is the classes.
"""

import torch
from common import MODELS, READS_TOKENS
from torch import Tensor, nn

from lightning_zero.zoo.gpt import GPT, Attention

VOCABULARY = 256
CLASSES = 10
PIXELS, PATCH = 32, 4


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(nn.Module):
    """Many small layers, each a block, which show a step's cost beyond its arithmetic."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wide(nn.Module):
    """A few huge linear layers for a few vectors: communication costs more than computation."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)  # (batch, heads, patches, width / heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))


class ViT(nn.Module):
    """A vision transformer on images of 32 x 32 pixels in patches of 4 x 4, averaged at the end."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.position = nn.Parameter(0.02 * torch.randn((PIXELS // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """The two likeliest of several experts for each token, weighted by their probabilities.

    Every expert runs, even on an empty set of tokens, so that each parameter has a gradient on every rank. Otherwise
    DDP would need ``find_unused_parameters``, and other systems an equivalent.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(2)  # (tokens, 2) each
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == number)
            told = expert(tokens[rows]) * weights[rows, ranks, None]
            mixed = mixed.index_add(0, rows, told.to(mixed.dtype))
        return mixed.view_as(x)


class SparseBlock(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_experts = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.experts(self.norm_experts(x))


class Mixture(nn.Module):
    """A small Mixtral: RMSNorm, and two of eight experts instead of each MLP."""

    def __init__(self, width: int, depth: int, heads: int, experts: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(SparseBlock(width, heads, experts) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two small ones (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def lora(rank: int, **sizes: int) -> GPT:
    """A frozen GPT with trained adapters at each linear layer of its blocks."""
    model = GPT(**sizes)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("attention.qkv", "attention.out", "up", "down"):
            block.set_submodule(name, LowRank(block.get_submodule(name), rank))
    return model


KINDS = {"gpt": GPT, "deep": Deep, "wide": Wide, "vit": ViT, "moe": Mixture, "lora": lora}


def sizes_of(name: str, shrunk: bool) -> dict[str, int]:
    """The options of a model; a shrunk model has as many modules, but with negligible arithmetic."""
    sizes = {key: value for key, value in MODELS[name].items() if key != "kind"}
    return sizes | ({"width": 2 * sizes.get("heads", 4)} if shrunk else {})


def model_of(name: str, context: int, shrunk: bool = False) -> nn.Module:
    """One of ``common.MODELS``, for sequences of ``context`` tokens."""
    return KINDS[MODELS[name]["kind"]](**sizes_of(name, shrunk), context=context)


def batch_of(
    name: str, batch: int, sequence: int, generator: torch.Generator, shrunk: bool = False
) -> tuple[Tensor, Tensor]:
    """Random inputs and targets for a model of this name."""
    kind = MODELS[name]["kind"]
    if kind in READS_TOKENS:
        text = torch.randint(VOCABULARY, (batch, sequence + 1), generator=generator)
        return text[:, :-1], text[:, 1:]
    shape = (sizes_of(name, shrunk)["width"],) if kind == "wide" else (3, PIXELS, PIXELS)
    return torch.randn(batch, *shape, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)
