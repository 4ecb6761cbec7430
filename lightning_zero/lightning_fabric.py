"""The strategy for the package ``lightning_fabric``. Importing this module registers the strategies."""

from types import ModuleType
from typing import ClassVar

import lightning_fabric
from lightning_fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy

from lightning_zero.strategies import fabric


class ZeroStrategy(fabric.FabricStrategy, ParallelStrategy):
    __doc__ = fabric.FabricStrategy.__doc__
    lightning: ClassVar[ModuleType] = lightning_fabric


ZeroStrategy.register_strategies(STRATEGY_REGISTRY)
