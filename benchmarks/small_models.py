"""Ordinary small projects: many layers of moderate width, whose steps take some tens of milliseconds on one CPU core.

The shapes are those of common packages: SimCLR on CIFAR's images, a temporal fusion transformer for
forecasting, N-BEATS with thirty blocks, FT-Transformer for tables, SchNet for molecules. No code here depends on a
strategy.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset


class Regression(LightningModule):
    """A module that predicts one number, trained with Adam."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        *inputs, target = batch
        loss = functional.mse_loss(self(*inputs), target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class SimCLR(LightningModule):
    """Two views of each image through a small residual network; the views of one image attract each other."""

    def __init__(self, width: int = 16, dimension: int = 32) -> None:
        super().__init__()
        self.stem = self.convolution(3, width)
        self.stages = nn.ModuleList(
            nn.ModuleList([self.convolution(width * 2**level, width * 2**level) for _ in range(4)])
            for level in (0, 1, 2)
        )
        self.shrink = nn.ModuleList(self.convolution(width * 2**level, width * 2 ** (level + 1), 2) for level in (0, 1))
        self.project = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, dimension))

    @staticmethod
    def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for level, stage in enumerate(self.stages):
            for layer in stage:
                hidden = hidden + layer(hidden)
            if level < len(self.shrink):
                hidden = self.shrink[level](hidden)
        return functional.normalize(self.project(hidden.mean(dim=(2, 3))), dim=1)

    def training_step(self, batch: Any, _: int) -> Tensor:
        (images,) = batch
        one, other = (self(images + 0.1 * torch.randn_like(images)) for _ in range(2))
        loss = functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(images)))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        return TensorDataset(torch.randn(samples, 3, 16, 16))


class GatedResidual(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(inputs, width), nn.Linear(width, width)
        self.gate, self.norm = nn.Linear(width, 2 * outputs), nn.LayerNorm(outputs)
        self.skip = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.leave(functional.elu(self.enter(x)))
        return self.norm(self.skip(x) + functional.glu(self.gate(hidden), dim=-1))


class TFT(Regression):
    """A temporal fusion transformer: a gated network for each variable, their selection, LSTMs, attention."""

    def __init__(self, variables: int = 12, width: int = 32) -> None:
        super().__init__()
        self.scale = nn.ModuleList(nn.Linear(1, width) for _ in range(variables))
        self.single = nn.ModuleList(GatedResidual(width, width, width) for _ in range(variables))
        self.select = GatedResidual(variables * width, width, variables)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.enrich, self.feed = GatedResidual(width, width, width), GatedResidual(width, width, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scaled = [scale(x[..., number, None]) for number, scale in enumerate(self.scale)]
        weights = torch.softmax(self.select(torch.cat(scaled, dim=-1)), dim=-1)
        values = torch.stack([single(each) for single, each in zip(self.single, scaled)], dim=-1)
        hidden, _ = self.encoder((values * weights.unsqueeze(-2)).sum(dim=-1))
        hidden = self.enrich(hidden)
        attended, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.head(self.feed(self.norm(hidden + attended)))[:, -1, 0]

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        x = torch.randn(samples, 24, 12)
        return TensorDataset(x, x.mean(dim=(1, 2)))


class FTTransformer(Regression):
    """A transformer over the columns of a table, each of which has an embedding of its own."""

    def __init__(self, columns: int = 16, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, width) * 0.1)
        self.bias = nn.Parameter(torch.zeros(columns, width))
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 2 * width, dropout=0.1, norm_first=True, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.unsqueeze(-1) * self.weight + self.bias
        hidden = torch.cat([self.summary.expand(len(x), -1, -1), columns], dim=1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden[:, 0]).squeeze(1)

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        x = torch.randn(samples, 16)
        return TensorDataset(x, x.sin().sum(dim=1))


class NBEATS(Regression):
    """Thirty residual blocks of four layers; each subtracts its backcast from the input and adds a forecast."""

    def __init__(self, blocks: int = 30, history: int = 48, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(history, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width),
                nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, history + 1),
            )
            for _ in range(blocks)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        forecast = x.new_zeros(len(x))
        for block in self.blocks:
            found = block(x)
            x, forecast = x - found[:, :-1], forecast + found[:, -1]
        return forecast

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        x = torch.randn(samples, 48).cumsum(dim=1)
        return TensorDataset(x, x[:, -1])


class SchNet(Regression):
    """Continuous-filter convolutions over pairs of a molecule's atoms that are within reach of each other."""

    def __init__(self, width: int = 64, interactions: int = 6, filters: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.centres = nn.Parameter(torch.linspace(0, 5, filters), requires_grad=False)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(filters, width), nn.Softplus(), nn.Linear(width, width))
            for _ in range(interactions)
        )
        self.enter = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(interactions))
        self.leave = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width)) for _ in range(interactions)
        )
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.Softplus(), nn.Linear(width // 2, 1))

    def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
        distance = (places.unsqueeze(1) - places.unsqueeze(2)).pow(2).sum(dim=-1).add(1e-6).sqrt()
        spread = torch.exp(-10 * (distance.unsqueeze(-1) - self.centres) ** 2)
        hidden = self.embed(kinds)
        for make_filter, enter, leave in zip(self.filters, self.enter, self.leave):
            hidden = hidden + leave((make_filter(spread) * enter(hidden).unsqueeze(1)).sum(dim=2))
        return self.head(hidden).sum(dim=(1, 2))

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        places = torch.randn(samples, 12, 3)
        return TensorDataset(torch.randint(20, (samples, 12)), places, places.pow(2).sum(dim=(1, 2)))


MODELS: dict[str, type[Any]] = {
    "simclr": SimCLR, "tft": TFT, "ft_transformer": FTTransformer, "nbeats": NBEATS, "schnet": SchNet,
}  # fmt: skip
