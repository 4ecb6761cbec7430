"""ZeRO as a Lightning strategy: import this package and pass ``Trainer(strategy="zero3")``.

Importing this package does not import torch or Lightning. Public names are imported on first access. Strategy names are
registered once Lightning and this package are both imported. ``lightning_zero.engine`` works without Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zero.strategies.after_import import after_import
from lightning_zero.version import __version__

if TYPE_CHECKING:
    from lightning_zero import engine as engine
    from lightning_zero import fabric as fabric
    from lightning_zero import monitoring as monitoring
    from lightning_zero import pruning as pruning
    from lightning_zero.checkpoint.weights import load_weights
    from lightning_zero.engine.access import full_grad, full_optimizer_state, full_parameters, shard_of, uneven_forwards
    from lightning_zero.engine.config import CompressionConfig, OffloadConfig
    from lightning_zero.planning.automatic import ZeroAutoStrategy
    from lightning_zero.strategies.trainer import ZeroStrategy

for _package, _ours in (
    ("lightning.fabric", "strategies.fabric"),
    ("lightning.pytorch", "strategies.trainer"),
    # not after lightning.pytorch: planning.automatic needs strategies.trainer, whose import may be unfinished then
    ("lightning_zero.strategies.trainer", "planning.automatic"),
    ("lightning_fabric", "lightning_fabric"),
    ("pytorch_lightning", "pytorch_lightning"),
):
    after_import(_package, f"lightning_zero.{_ours}")

_MODULE_OF = {
    "CompressionConfig": "engine.config",
    "OffloadConfig": "engine.config",
    "ResilienceConfig": "callbacks.restarts",
    "ZeroAutoStrategy": "planning.automatic",
    "ZeroStrategy": "strategies.trainer",
    "full_grad": "engine.access",
    "full_optimizer_state": "engine.access",
    "full_parameters": "engine.access",
    "load_weights": "checkpoint.weights",
    "shard_of": "engine.access",
    "uneven_forwards": "engine.access",
}
_SUBMODULES = ("engine", "fabric", "monitoring", "pruning")

__all__ = [
    "CompressionConfig",
    "OffloadConfig",
    "ResilienceConfig",
    "ZeroAutoStrategy",
    "ZeroStrategy",
    "__version__",
    "full_grad",
    "full_optimizer_state",
    "full_parameters",
    "load_weights",
    "shard_of",
    "uneven_forwards",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"lightning_zero.{_MODULE_OF[name]}"), name)
    if name in _SUBMODULES:
        return import_module(f"lightning_zero.{name}")
    raise AttributeError(f"module 'lightning_zero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES]
