"""The ZeRO engine in plain torch; it does not import Lightning.

This file is the engine's door: other rooms of the package import only the names in it (``tests/test_rooms.py``). The
names in ``__all__`` are public.
"""
# ruff: noqa: F401  (other rooms import these names from here)

from lightning_zero.engine import compat, config, places, streaming
from lightning_zero.engine.access import (
    full_grad,
    full_optimizer_state,
    full_parameters,
    iter_full_parameters,
    shard_of,
    uneven_forwards,
)
from lightning_zero.engine.comm import failures, process_group, tensor_parallel
from lightning_zero.engine.comm.asynchronous import await_always, own_stream
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Ledger
from lightning_zero.engine.comm.process_group import store_of_attempt
from lightning_zero.engine.comm.simulation import Simulation
from lightning_zero.engine.config import EngineConfig, OffloadConfig
from lightning_zero.engine.engine import Engine, engine_of
from lightning_zero.engine.init import deferred_param, quantised_layers
from lightning_zero.engine.init.restore import consolidate
from lightning_zero.engine.optim import compatibility
from lightning_zero.engine.optim.kinds import as_made_of_tensors
from lightning_zero.engine.optim.masters import after_updates
from lightning_zero.engine.plan import layout, share
from lightning_zero.engine.report import Report
from lightning_zero.engine.runtime.schedule import Unit
from lightning_zero.engine.state.slot import slot_of
from lightning_zero.engine.tensor import sharded_tree
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.wrapper import WrapperTensor, flat_range

__all__ = ["Engine", "EngineConfig", "Report", "ShardedTensor", "Unit", "engine_of", "slot_of"]
