"""ZeRO as a Lightning strategy: import this, and pass ``Trainer(strategy="zero3")``."""

__version__ = "0.1.0"  # before the imports: checkpoints say it

from lightning_zero import fabric as fabric  # registers the names there
from lightning_zero.after_import import after_import
from lightning_zero.engine.access import full_grad, full_optimizer_state, full_parameters, shard_of
from lightning_zero.engine.core import uneven_forwards
from lightning_zero.engine.offload.config import OffloadConfig
from lightning_zero.strategy import ZeroStrategy
from lightning_zero.weights import load_weights

# The same packages under other names, which a project may import or not, before or after this one.
after_import("pytorch_lightning", "lightning_zero.pytorch_lightning")
after_import("lightning_fabric", "lightning_zero.lightning_fabric")

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
