"""ZeRO as a Lightning strategy: import this, and pass ``Trainer(strategy="zero3")``.

Lightning is imported by whoever uses it, before or after this package: then the names are registered there. The engine
alone (``lightning_zero.engine``) does without it, and begins in half the time.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # before the imports: checkpoints say it

from lightning_zero.after_import import after_import
from lightning_zero.engine.access import full_grad, full_optimizer_state, full_parameters, shard_of
from lightning_zero.engine.core import uneven_forwards
from lightning_zero.engine.offload.config import OffloadConfig

if TYPE_CHECKING:
    from lightning_zero.strategy import ZeroStrategy
    from lightning_zero.weights import load_weights

for _package, _ours in (
    ("lightning.fabric", "fabric"),
    ("lightning.pytorch", "strategy"),
    ("lightning_fabric", "lightning_fabric"),
    ("pytorch_lightning", "pytorch_lightning"),
):
    after_import(_package, f"lightning_zero.{_ours}")

_MODULE_OF = {"ZeroStrategy": "strategy", "load_weights": "weights"}

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
    """What needs Lightning, and its modules, when somebody asks for it."""
    from importlib import import_module

    if name in _MODULE_OF:
        return getattr(import_module(f"lightning_zero.{_MODULE_OF[name]}"), name)
    if name in ("fabric", "strategy"):
        return import_module(f"lightning_zero.{name}")
    raise AttributeError(f"module 'lightning_zero' has no attribute {name!r}")
