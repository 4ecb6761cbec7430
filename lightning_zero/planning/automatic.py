"""``strategy="zero_auto"``: the advisor chooses stage, offload and activation checkpointing when ``fit`` begins."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from lightning import pytorch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.engine import layout
from lightning_zero.io.annotations import check_value
from lightning_zero.io.paths import read_json
from lightning_zero.strategies.lightning_internals import training_dataloader
from lightning_zero.strategies.trainer import TrainerStrategy

if TYPE_CHECKING:
    from lightning_zero.planning.timeline import Resources

_REST = 1.3
"""Assumed ratio of a training run's memory to its model states, for runs that cannot be planned."""


@dataclass(frozen=True)
class Choice:
    """Options that the advisor has chosen.

    Attributes:
        stage, offload, activation_checkpointing: as in ``ZeroStrategy``.
        why: sentences that give the reasons with figures.
    """

    stage: int
    offload: str | None
    activation_checkpointing: str | None
    why: tuple[str, ...]


class AutomaticStrategy(TrainerStrategy):
    """ZeRO with the stage that the advisor chooses when ``fit`` begins: the fastest that fits on the device.

    The machine is measured, and the training run is planned on fake tensors as in ``lightning-zero plan``. Losses and
    weights do not depend on the stage. If no stage fits, the advisor tries offload to the host's memory (unless the
    device is the CPU), then ``activation_checkpointing="units"``, then both. For the plan, rank 0 reads one sample of
    the training data. If planning fails, as with an iterable dataset, the ZeRO paper's formula is used.

    Arguments:
        resources: the machine's speed: a file with the output of ``lightning-zero doctor --json``, or the values under
            ``"resources"`` in that output. By default, the speed is measured.
        options: options of ``ZeroStrategy``, except those that the advisor chooses.

    Attributes:
        choice: the advisor's latest choice; None before the first ``fit``.

    Raises:
        TypeError, ValueError: if an option does not exist, is chosen by the advisor, or has an invalid value.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = lightning_zero.ZeroAutoStrategy(prefetch=2)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(self, resources: str | Path | dict[str, float] | None = None, **options: Any) -> None:
        chosen = ("stage", "offload", "activation_checkpointing")
        given = [name for name in chosen if options.pop(name, None)]  # configuration files may set these to null
        if given:
            raise TypeError(
                f"zero_auto does not accept {', '.join(given)}: the advisor chooses stage, offload and activation "
                f"checkpointing. To choose yourself, write strategy=ZeroStrategy({given[0]}=...)."
            )
        if options.get("tensor_parallel_size"):
            raise TypeError(
                "tensor_parallel_size: zero_auto does not plan tensor parallelism. Write "
                f"strategy=ZeroStrategy(stage=..., tensor_parallel_size={options['tensor_parallel_size']})."
            )
        self.stages = (1, 2, 3) if options.get("shard_within") is None else (3,)
        super().__init__(stage=self.stages[-1], **options)  # provisional: stage 3 allows parameters on the meta device
        self.choice: Choice | None = None
        self._given = {name: value for name, value in options.items() if name not in self._arguments_of_base}
        self._resources = _declared(resources) if resources is not None else None

    @classmethod
    def _named(cls) -> dict[str, dict[str, Any]]:
        return {"zero_auto": {}}

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self.choice is None:
            self.choice = self._choose(trainer)
            self.config = replace(
                self.config,
                stage=self.choice.stage,
                offload=self.choice.offload,  # type: ignore[arg-type]
                activation_checkpointing=self.choice.activation_checkpointing,
            )
            for sentence in self.choice.why:
                rank_zero_info(sentence)
        super().setup(trainer)

    def _choose(self, trainer: Trainer) -> Choice:
        from lightning_zero.planning.measure import measure_rank

        resources, transport = self._resources, "nccl" if self.root_device.type == "cuda" else "shared memory"
        if resources is None:
            with isolate_rng():
                resources, about = measure_rank(self.root_device, self.world_size, self.num_nodes)
            transport = about.get("transport", transport)
        return self.broadcast(self._advised(trainer, resources, transport) if self.is_global_zero else None)

    def _advised(self, trainer: Trainer, resources: Resources, transport: str) -> Choice:
        try:
            with isolate_rng():
                return self._planned(trainer, resources, transport)
        except Exception as error:  # a plan that fails must not end the training run
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        module, offload = self.lightning_module, None if self.root_device.type == "cpu" else "cpu"
        assert module is not None
        reason = f"this training run cannot be planned ({reason})"
        return by_formula(module, self.world_size, resources.memory, offload, reason, self.stages)

    def _planned(self, trainer: Trainer, resources: Resources, transport: str) -> Choice:
        from lightning_zero.planning.advice import CHECKPOINTING, OFFLOADS, advise, best_of, make_plans
        from lightning_zero.planning.projects import copied

        module = self.lightning_module
        assert module is not None
        # Options that are part of a variant appear in the names of plans.
        own = {name: self._given[name] for name in ("shard_within", "compression") if self._given.get(name)}
        settings = {name: value for name, value in self._given.items() if name not in ("shard_within", "compression")}
        plan_with = partial(
            make_plans,
            partial(copied, module),
            sample_batch(trainer),
            ranks=self.world_size,
            machines=self.num_nodes,
            resources=resources,
            memory=resources.memory,
            accumulate=trainer.accumulate_grad_batches,
            precision=trainer.precision,
            clip=trainer.gradient_clip_val,
            transport=transport,
            **settings,
        )
        ddp, plans = plan_with(stages=[0]), plan_with(stages=self.stages, variants=[own])
        rest = [("none", "on")]
        if self.root_device.type != "cpu":  # offload to the host saves nothing if the device is the CPU
            rest = [("cpu", "off"), *rest, ("cpu", "on")]
        sharded = [stage for stage in self.stages if layout.placements_of(stage).gradients.is_sharded]
        while rest and best_of(plans) is None:
            offload, checkpointing = rest.pop(0)
            plans += plan_with(stages=sharded, variants=[{**own, **CHECKPOINTING[checkpointing], **OFFLOADS[offload]}])
        best = best_of(plans) or plans[-1]
        why = (f"zero_auto chose {best.name}.", *advise([*ddp, *plans], resources.memory))
        return Choice(best.stage, best.options.get("offload"), best.options.get("activation_checkpointing"), why)


def _declared(resources: str | Path | dict[str, float]) -> Resources:
    from lightning_zero.planning.timeline import resources_of

    check_value("resources", resources, str | Path | dict[str, Any])
    if isinstance(resources, dict):
        return resources_of(resources, "resources")
    return resources_of(read_json(resources).get("resources"), resources)


def sample_batch(trainer: Trainer) -> Any:
    """Return a batch of the training loader's batch size that repeats the first sample.

    Raises:
        ValueError: if the dataset is not map-style, or if the batch sampler does not state its batch size: reading from
            a stream or a sampler would consume its first batch.
    """
    loader = training_dataloader(trainer)()
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError("planning reads a sample, which requires one DataLoader with a map-style dataset")
    sampler = loader.batch_sampler
    if sampler is None:  # the dataset's items are batches
        return loader.collate_fn(loader.dataset[0])
    size = getattr(sampler, "batch_size", None)
    if size is None:
        raise ValueError(
            "planning repeats a sample, which requires a batch sampler with the attribute batch_size, but "
            f"{type(sampler).__name__} has none"
        )
    return loader.collate_fn([loader.dataset[0]] * min(size, len(loader.dataset)))  # type: ignore[arg-type]


def by_formula(
    module: nn.Module, ranks: int, memory: float | None, offload: str | None, reason: str, stages: Sequence[int]
) -> Choice:
    """Choose the lowest of ``stages`` whose model states plus 30 % fit in memory; if none fits, the last, offloaded."""
    flat = layout.Mesh.flat(ranks)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    for stage in stages:
        states = layout.placements_of(stage)
        needed = _REST * sum(states.model_state_bytes(n, flat, parameter_bytes=4, trains=t) for n, t in sizes)
        fits = memory is None or needed <= memory
        if fits:
            break
    ddp = _REST * sum(layout.replicated_bytes(n, 4, trains=t) for n, t in sizes)
    offload = None if fits else offload
    why = (
        f"zero_auto chose zero{stage}{'_offload' if offload else ''} by a formula, since {reason}.",
        f"Model states plus 30 % for other data: {needed / 1e9:.3g} GB a rank; under DDP: {ddp / 1e9:.3g} GB.",
    )
    return Choice(stage, offload, None, why)


class ZeroAutoStrategy(AutomaticStrategy, ParallelStrategy):
    __doc__ = AutomaticStrategy.__doc__
    lightning: ClassVar[ModuleType] = pytorch


DDPStrategy.register(ZeroAutoStrategy)
ZeroAutoStrategy.register_strategies(StrategyRegistry)
