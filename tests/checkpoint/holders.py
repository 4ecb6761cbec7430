"""Objects that refer to a module in training. Like a project without the package, this file does not import it.

As a script: `python -m tests.checkpoint.holders EXPECTED FILE...` compares checkpoints where the package is not
installed.
"""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR


@dataclass
class Kept:
    """A dataclass around anything."""

    values: Any


class Reads:
    """An object whose pickle contains values in forms other than tensors, and a nested pickle."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __getstate__(self) -> dict[str, Any]:
        weight = self.layer.weight.detach()
        bias = self.layer.bias.tolist()
        numbers = {"array": weight.float().numpy().copy(), "norm": weight.norm().item(), "list": bias}
        return {**numbers, "double": weight.double() * 2, "inner": pickle.dumps(self.layer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, layer=pickle.loads(state.pop("inner")))


class Watching(Callback):
    """Keeps an average of the weights, a copy of the network, and whatever else a callback may refer to."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        self.copied = copy.deepcopy(module.net)
        self.layer, self.method = module.net[0], module.net[0].extra_repr
        self.column, self.alias = module.net[0].weight.t()[0], module.net[0].weight.data

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, weight in module.named_parameters():
            self.average[name].lerp_(weight.detach(), 0.5)
        self.gradient = module.net[0].weight.grad
        self.optimizer, self.scheduler = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler


class Holding(LightningModule):
    """All of its arguments are hyperparameters, as in lightning-hydra-template."""

    def __init__(self, net: nn.Module, watching: Callback, kept: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


class HoldingMore(Holding):
    """Adds objects in the hook, too."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = [Kept({"module": self, "average": self.hparams.watching.average})]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.added = checkpoint["added"]


def make(kind: type[Holding] = Holding, dtype: torch.dtype = torch.float32) -> Holding:
    """A module whose hyperparameters hold itself, its layers and a callback in several ways."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
    net = nn.Sequential(*layers).to(dtype)
    net[4].weight = net[3].weight
    net[5].weight.gain = 0.5
    kept = {"nested": Kept([net, (net[0], {"layer": net[3]})]), "reads": Reads(net[0])}
    return kind(net, Watching(), kept)


def described(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Describe an object's contents by comparable values; an object that occurs again is described by its number."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    if isinstance(value, str):
        return Path(value).name
    if isinstance(value, type) or type(value).__name__ in ("function", "builtin_function_or_method", "dtype"):
        return getattr(value, "__qualname__", str(value))
    if id(value) in seen:
        return f"object {seen[id(value)][0]}"
    seen[id(value)] = len(seen), value  # the value too, so that no other object gets its id
    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        kind = "Parameter" if isinstance(value, nn.Parameter) else kind
        return kind, str(value.dtype), value.requires_grad, value.detach().tolist(), described(vars(value), seen)
    if isinstance(value, numpy.ndarray):
        return kind, value.tolist()
    if isinstance(value, dict):
        return kind, [(described(key, seen), described(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)):
        return kind, [described(item, seen) for item in value]
    if hasattr(value, "__self__"):
        return value.__name__, described(value.__self__, seen)
    attributes = dict(getattr(value, "__dict__", {"text": str(value)}))
    attributes.pop("forward", None)  # Lightning's DDP leaves a module's method among the attributes
    return kind, described(attributes, seen)


def difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Return the first difference between two descriptions; empty if they are equal."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
        name = f"{path}.{ours[0]}" if ours and isinstance(ours[0], str) else path
        return next((found for pair in zip(ours, theirs) if (found := difference(*pair, name))), "")
    return "" if ours == theirs else f"{path}: {str(ours)[:600]} instead of {str(theirs)[:600]}"


def held_in(path: str) -> dict[str, Any]:
    """The entries that may hold objects, of a full or sharded checkpoint, and the weights of a full checkpoint."""
    file = Path(path, "meta.pt") if Path(path).is_dir() else path
    checkpoint = torch.load(file, weights_only=False)
    return {key: checkpoint[key] for key in ("state_dict", "hyper_parameters", "added") if key in checkpoint}


def has_weights_once(checkpoint: dict[str, Any]) -> bool:
    """Whether a module in a file's hyperparameters shares its parameters' memory with the file's state dict."""
    weights, net = checkpoint["state_dict"], checkpoint["hyper_parameters"]["net"]
    return all(weights[f"net.{name}"].data_ptr() == value.data_ptr() for name, value in net.named_parameters())


def main(expected: str, *files: str) -> None:
    sys.modules["lightning_zero"] = None  # type: ignore[assignment]
    theirs = held_in(expected)
    is_once = "state_dict" in theirs and has_weights_once(theirs)
    theirs.pop("state_dict", None)
    for file in files:
        ours = held_in(file)
        if is_once and "state_dict" in ours and "async" not in file:
            assert has_weights_once(ours), f"{file} has a weight twice"
        ours.pop("state_dict", None)
        found = difference(described(ours), described(theirs))
        assert not found, f"{file}{found}"
    print("equal", len(files))


if __name__ == "__main__":
    main(*sys.argv[1:])
