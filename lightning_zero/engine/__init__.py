"""The ZeRO engine on plain torch: no Lightning in here."""

from lightning_zero.engine.core import Engine, Report, engine_of, slot_of
from lightning_zero.engine.schedule import Unit
from lightning_zero.engine.sharded_tensor import ShardedTensor

__all__ = ["Engine", "Report", "ShardedTensor", "Unit", "engine_of", "slot_of"]
