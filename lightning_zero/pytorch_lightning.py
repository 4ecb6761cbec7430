"""Strategies and callbacks for ``pytorch_lightning``'s Trainer. Importing this module registers the strategies."""

from types import ModuleType
from typing import ClassVar

import pytorch_lightning
from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry

from lightning_zero.callbacks import monitor, non_finite, pruning
from lightning_zero.planning import automatic
from lightning_zero.strategies import trainer


class ZeroStrategy(trainer.TrainerStrategy, ParallelStrategy):  # type: ignore[misc]
    __doc__ = trainer.TrainerStrategy.__doc__
    lightning: ClassVar[ModuleType] = pytorch_lightning


class ZeroAutoStrategy(automatic.AutomaticStrategy, ParallelStrategy):  # type: ignore[misc]
    __doc__ = automatic.AutomaticStrategy.__doc__
    lightning: ClassVar[ModuleType] = pytorch_lightning


class ZeroMonitor(monitor.ZeroMonitor, Callback):  # type: ignore[misc]
    __doc__ = monitor.ZeroMonitor.__doc__


class FindNonFinite(non_finite.FindNonFinite, Callback):  # type: ignore[misc]
    __doc__ = non_finite.FindNonFinite.__doc__


class MagnitudePruning(pruning.MagnitudePruning, Callback):  # type: ignore[misc]
    __doc__ = pruning.MagnitudePruning.__doc__


for _strategy in (ZeroStrategy, ZeroAutoStrategy):
    DDPStrategy.register(_strategy)
    _strategy.register_strategies(StrategyRegistry)
