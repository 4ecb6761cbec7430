"""ZeRO as a Lightning strategy: import this package and pass ``Trainer(strategy="zero3")``.

Importing this package imports Lightning, and registers the names of the strategies. For ``pytorch_lightning`` and
``lightning_fabric``, which have registries of their own, the names are registered if the package has been imported
before; otherwise import ``lightning_zero.pytorch_lightning`` or ``lightning_zero.lightning_fabric``.
"""

import importlib
import sys

from lightning_zero import engine as engine
from lightning_zero import fabric as fabric
from lightning_zero import monitoring as monitoring
from lightning_zero import pruning as pruning
from lightning_zero.callbacks.restarts import ResilienceConfig
from lightning_zero.checkpoint.exporting import export_weights
from lightning_zero.checkpoint.weights import load_weights
from lightning_zero.engine import (
    OffloadConfig,
    full_grad,
    full_optimizer_state,
    full_parameters,
    iter_full_parameters,
    shard_of,
    uneven_forwards,
)
from lightning_zero.planning.automatic import ZeroAutoStrategy
from lightning_zero.strategies.trainer import ZeroStrategy
from lightning_zero.version import __version__

__all__ = [
    "OffloadConfig",
    "ResilienceConfig",
    "ZeroAutoStrategy",
    "ZeroStrategy",
    "__version__",
    "export_weights",
    "full_grad",
    "full_optimizer_state",
    "full_parameters",
    "iter_full_parameters",
    "load_weights",
    "shard_of",
    "uneven_forwards",
]

# Never imported here: importing pytorch_lightning replaces the logger of lightning.pytorch's messages.
for _package in ("lightning_fabric", "pytorch_lightning"):
    if _package in sys.modules:
        importlib.import_module(f"lightning_zero.{_package}")
