"""The ZeRO engine in plain torch; it does not import Lightning."""

from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.engine import Engine, engine_of
from lightning_zero.engine.report import Report
from lightning_zero.engine.runtime.schedule import Unit
from lightning_zero.engine.state.slot import slot_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

__all__ = ["Engine", "EngineConfig", "Report", "ShardedTensor", "Unit", "engine_of", "slot_of"]
