"""The strategy for ``lightning_fabric``'s Fabric; imported, and so registered, right after ``lightning_fabric``."""

from types import ModuleType
from typing import ClassVar

import lightning_fabric
from lightning_fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy

from lightning_zero.strategies import fabric


class ZeroStrategy(fabric.FabricStrategy, ParallelStrategy):
    __doc__ = fabric.FabricStrategy.__doc__
    lightning: ClassVar[ModuleType] = lightning_fabric


ZeroStrategy.register_strategies(STRATEGY_REGISTRY)
