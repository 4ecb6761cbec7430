"""ZeRO as a Lightning strategy: import this package, and pass ``Trainer(strategy="zero3")``.

This package does not import Lightning: strategy names are registered when Lightning is imported, before or after this
package. The engine alone (``lightning_zero.engine``) works without Lightning, and is imported in half the time.
"""

from typing import TYPE_CHECKING, Any

from lightning_zero.engine.access import (
    full_grad,
    full_optimizer_state,
    full_parameters,
    shard_of,
    uneven_forwards,
)
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.strategies.after_import import after_import
from lightning_zero.version import __version__

if TYPE_CHECKING:
    from lightning_zero.checkpoint.weights import load_weights
    from lightning_zero.strategies.trainer import ZeroStrategy

for _package, _ours in (
    ("lightning.fabric", "strategies.fabric"),
    ("lightning.pytorch", "strategies.trainer"),
    ("lightning_fabric", "lightning_fabric"),
    ("pytorch_lightning", "pytorch_lightning"),
):
    after_import(_package, f"lightning_zero.{_ours}")

_MODULE_OF = {"ZeroStrategy": "strategies.trainer", "load_weights": "checkpoint.weights"}

__all__ = [
    "OffloadConfig",
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
    """Import submodules and names that need Lightning on first access."""
    from importlib import import_module

    if name in _MODULE_OF:
        return getattr(import_module(f"lightning_zero.{_MODULE_OF[name]}"), name)
    if name == "fabric":
        return import_module("lightning_zero.fabric")
    raise AttributeError(f"module 'lightning_zero' has no attribute {name!r}")
