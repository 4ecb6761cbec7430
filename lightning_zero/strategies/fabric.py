"""ZeRO strategy for Lightning Fabric: modules and optimizers are set up one by one, and the user writes the loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, TypeVar

from lightning import fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.fitting import load_module
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.reading import by_number
from lightning_zero.checkpoint.saver import SaveMode
from lightning_zero.checkpoint.saving import by_name, names_in
from lightning_zero.engine import Engine, compat, compatibility, consolidate, deferred_param, engine_of, sharded_tree
from lightning_zero.strategies.base import BaseStrategy, StrategyOptions, takes_options

_Kind = TypeVar("_Kind")


@takes_options(StrategyOptions, ParallelStrategy)
class FabricStrategy(BaseStrategy):
    """ZeRO (Rajbhandari et al., SC20) for modules and optimizers that are passed to ``Fabric.setup``.

    Each module that is set up has its own engine until the module is deleted or the strategy is torn down. An
    optimizer may be set up before, with or after its module, and may hold parameters of several modules.

    Arguments:
        {options}
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as for any strategy.

    Raises:
        TypeError, ValueError: if an option does not exist, or its value is not allowed.
    """

    def __init__(self, stage: int | str = 3, **options: Any) -> None:
        super().__init__(stage=stage, **options)
        # Modules and optimizers, in set-up order, the same on every rank. Users own them, so references are weak.
        self._set_up: list[weakref.ref[Any]] = []
        self._backward_sync_control: Any = SimpleNamespace(no_backward_sync=_no_backward_sync)

    # -- setting up -------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[Engine]:
        return [engine for _, engine in self._modules_and_engines()]

    def _modules_and_engines(self) -> list[tuple[nn.Module, Engine]]:
        """Return the modules that have not been deleted and whose engines have not been closed, with their engines."""
        return [(module, engine) for module in self._known(nn.Module) if (engine := engine_of(module)) is not None]

    def _known(self, kind: type[_Kind]) -> list[_Kind]:
        return [each for reference in self._set_up if isinstance(each := reference(), kind)]

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module to the device, unless parameters are sharded or deferred: ``setup_module`` moves those."""
        if not self._is_sharded and not deferred_param.awaits_values(module):
            module.to(self.root_device)

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context manager of ``Fabric.init_module``."""
        with self._making_module(empty_init), self.precision.module_init_context():
            yield

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        return self.setup_module(module), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard, in place, a module and the states of optimizers already set up for its parameters. Collective."""
        consolidate(module, self.root_device)
        # Hooks of the module keep the engine.
        Engine(
            module,
            [optimizer for optimizer in self._known(Optimizer) if _hold_in_common(optimizer, module)],
            config=self._config_of_run(),
            device=self.root_device,
            mesh=self.ranks.mesh,
        )
        others = [each for each in self._set_up if each() is not None and each() is not module]
        self._set_up = [*others, weakref.ref(module)]
        return _Sharded(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make an optimizer update this rank's shards of its parameters, including those of modules set up later."""
        compatibility.check_optimizers([optimizer], self.config, ranks=self.world_size)
        if not any(optimizer is each for each in self._known(Optimizer)):
            self._set_up.append(weakref.ref(optimizer))
            for module, engine in self._modules_and_engines():
                if _hold_in_common(optimizer, module):
                    engine.set_optimizers([*engine.optimizers, optimizer])
        return optimizer

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict, on the CPU. Collective."""
        return self._state_of(module, sharded_tree.on_cpu)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's full state dict in torch's format, on the CPU. Collective."""
        return self._state_of(optimizer, sharded_tree.on_cpu)

    def _state_of(self, value: Any, leaf: sharded_tree.Leaf) -> Any:
        """Return a module's or optimizer's state dict, with ``leaf`` applied to sharded tensors; other values as is."""
        engine = self._engine_of(value)
        if isinstance(value, nn.Module):
            if engine is not None:
                return engine.full_state_dict(leaf=leaf, module=_unwrapped(value))
            return super().get_module_state_dict(_unwrapped(value))
        if isinstance(value, Optimizer):
            if engine is not None:
                return engine.full_optimizer_state_dict(value, leaf=leaf)
            return super().get_optimizer_state(value)
        return value

    def _masters_of(self, value: Any, leaf: sharded_tree.Leaf) -> dict[str, Tensor]:
        """Return the fp32 master weights of a module by name, with ``leaf`` applied; {} for other values."""
        if isinstance(value, nn.Module) and (engine := self._engine_of(value)) is not None:
            return engine.masters_by_name(leaf=leaf, module=_unwrapped(value))
        return {}

    def _engine_of(self, value: Any) -> Engine | None:
        """Return the engine of a module, a submodule or an optimizer; None for other values."""
        value = _unwrapped(value) if isinstance(value, nn.Module) else value
        for module, engine in self._modules_and_engines():
            if any(value is each for each in (*module.modules(), *engine.optimizers)):
                return engine
        return None

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        load_module(_unwrapped(module), state_dict, strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a file on rank 0, or a folder to which each rank writes its shards (sharded checkpoint). Collective."""
        # A filter of a full checkpoint runs on rank 0 and may read values, so values are gathered first.
        mode = self._files.mode(reads_values=filter is not None)
        leaf = self._files.leaf(mode)
        # The rendezvous raises within seconds if not every rank calls this method. It takes place in an engine of
        # ``state``, which exists on every rank: the engine of a deleted module may be left on some ranks only.
        values = sorted(state.values(), key=lambda value: isinstance(value, Optimizer))  # modules first
        engine = next((own for value in values if (own := self._engine_of(value)) is not None), None)
        with engine.met("what fabric.save() writes") if engine is not None else nullcontext():
            masters = {}
            if any(isinstance(value, Optimizer) for value in state.values()):
                masters = {key: found for key, value in state.items() if (found := self._masters_of(value, leaf))}
            if not self.is_global_zero and mode is not SaveMode.SHARDED:
                filter = None
            for key, keeps in (filter or {}).items():
                if key in masters:
                    masters[key] = {name: value for name, value in masters[key].items() if keeps(name, value)}
            about = {CHECKPOINT_KEY: {"masters": masters}} if masters else {}
            collected = {key: self._state_of(value, leaf) for key, value in state.items()}
            contents = {**self._convert_stateful_objects_in_state(collected, filter=filter or {}), **about}
            self._files.save(mode, path, contents, partial(self._tree_in, state), storage_options)

    def _tree_in(self, state: dict[str, Any], contents: dict[str, Any]) -> dict[str, Any]:
        """Remove and return the entries that are stored in DCP's format: weights, and optimizer states by name."""
        tree = {}
        for key, value in state.items():
            if isinstance(value, Optimizer):
                tree[key] = by_name(contents.pop(key), _names_in(value, state))
            elif isinstance(value, nn.Module) and contents[key]:  # DCP does not store empty containers
                tree[key] = contents.pop(key)
        return tree

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a full or sharded checkpoint as Fabric does. Each rank reads only its shards of weights and states."""
        self._files.finish()
        io: Any = self._checkpoint_io
        if self._files.are_opened_here:
            opened = self._files.opened(path, weights_only)
            checkpoint = dict(opened.as_saved)
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Optimizer) and key in checkpoint and opened.form == "sharded":
                    checkpoint[key] = by_number(checkpoint[key])
            self._checkpoint_io = SimpleNamespace(load_checkpoint=lambda *_, **__: checkpoint)
        try:
            remainder = super().load_checkpoint(path, state, strict, weights_only)
        finally:
            self._checkpoint_io = io
        if isinstance(state, dict) and state:
            for key, masters in remainder.pop(CHECKPOINT_KEY, {}).get("masters", {}).items():
                value = state.get(key)
                if isinstance(value, nn.Module) and (engine := self._engine_of(value)) is not None:
                    engine.load_masters(masters, module=_unwrapped(value))
        return remainder

    # -- the end ----------------------------------------------------------------------------------------------------

    def _teardown(self) -> None:
        gc.collect()  # closing is collective, so no rank may be left with a deleted module in a reference cycle
        try:
            self._close(self.engines)
        finally:
            super(BaseStrategy, self).teardown()


class _Sharded(nn.Module):
    """Wrapper, as in DDP: Fabric routes methods like ``training_step`` via ``forward`` only if a module is wrapped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._has_compared = False  # the first inputs between tensor-parallel ranks

    @compat.never_traced  # otherwise compiled code has guards on all engines, and fails if one is deleted meanwhile
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(self.module)
        if engine is not None and not self._has_compared:
            self._has_compared = True
            engine.tensor_parallel.check_same(
                (*args, kwargs),
                "leave use_distributed_sampler=True in fabric.setup_dataloaders(...), or create the sampler with "
                "DistributedSampler(dataset, **fabric.strategy.distributed_sampler_kwargs)",
            )
        return self.module(*args, **kwargs)


def _names_in(optimizer: Optimizer, state: dict[str, Any]) -> list[str]:
    """Return an optimizer's parameter names in group order, prefixed with the modules' keys if there are several."""
    modules = {key: _unwrapped(value) for key, value in state.items() if isinstance(value, nn.Module)}
    names = {
        id(parameter): name if len(modules) == 1 else f"{key}.{name}"
        for key, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    return names_in(optimizer, names)


def _no_backward_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    engine = engine_of(_unwrapped(module))
    return engine.no_sync() if engine is not None and enabled else nullcontext()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Sharded) else module


def _hold_in_common(optimizer: Optimizer, module: nn.Module) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in module.parameters())


class ZeroStrategy(FabricStrategy, ParallelStrategy):
    __doc__ = FabricStrategy.__doc__
    lightning: ClassVar[ModuleType] = fabric


ZeroStrategy.register_strategies(STRATEGY_REGISTRY)
