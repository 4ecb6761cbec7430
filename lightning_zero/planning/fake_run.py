"""Fake runs: two training steps with the real Trainer and engine, on fake tensors and as one of many ranks."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero.checkpoint.saving import entry_of
from lightning_zero.checkpoint.trees import identity
from lightning_zero.engine import Ledger, compat, deferred_param, process_group, quantised_layers, tensor_parallel
from lightning_zero.planning.timeline import Event
from lightning_zero.planning.tracking import Observer
from lightning_zero.strategies.lightning_internals import should_accumulate
from lightning_zero.strategies.loops import Wrappers, meet_between_batches
from lightning_zero.strategies.rank_group import RankGroup
from lightning_zero.strategies.trainer import TrainerStrategy

DDP_BUCKET_BYTES = 25 * 2**20
"""``DistributedDataParallel``'s default bucket size: it reduces about this many bytes of gradients together."""


class _Planned:
    """Mixin for the strategies of plans: parameters start on the meta device, and other ranks do not exist.

    Attributes:
        modes: dispatch modes for the run. ``model_to_device`` enters them; closing ``leave_modes`` exits them.
        before: bytes communicated before the second step, in which optimizer states exist, by kind of collective.
    """

    modes: Sequence[AbstractContextManager[Any]] = ()
    ledger: Ledger
    model: nn.Module | None
    traffic: Callable[[], dict[str, int]]

    def _plan(self, ranks: int, machines: int, accumulate: int, observer: Observer) -> None:
        self._ranks, self._machines, self._observer, self.leave_modes = ranks, machines, observer, ExitStack()
        self._until_second_step = accumulate

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta"), super().tensor_init_context(empty_init):  # type: ignore[misc]
            yield

    def model_to_device(self) -> None:
        """Replace meta tensors with fake ones: only now, since a module with fake tensors cannot change its dtype."""
        assert self.model is not None
        for parameter in self.model.parameters():
            if quantised_layers.awaits_quantisation(parameter):
                quantised_layers.quantise(parameter, parameter.detach(), wait=True)
        for mode in self.modes:
            self.leave_modes.enter_context(mode)
        deferred_param.leave_meta(self.model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._until_second_step == 0:
            self.before = self.traffic()
            self.ledger.reset_peak()
            self._observer.reset()
        self._until_second_step -= 1
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def teardown(self) -> None:
        """Do nothing: fake parameters need not become ordinary parameters again."""


class _PlannedRanks(RankGroup):
    """Ranks of which all but this one do not exist, so nothing is sent to them."""

    is_alone = True

    @property
    def size_of_mesh(self) -> int:
        return self._strategy.world_size


class _PlannedZero(_Planned):
    """Mixin that runs the ZeRO strategy as one rank of a fake process group; takes ``fake_run``'s arguments."""

    engine: Any

    def __init__(
        self, ranks: int, machines: int, accumulate: int, observer: Observer, transport: str, **options: Any
    ) -> None:
        self._plan(ranks, machines, accumulate, observer)
        self._simulation = observer.simulation(transport, machines)
        super().__init__(**options)
        self.ranks = _PlannedRanks(self)

    @property
    def world_size(self) -> int:
        return self._ranks

    def setup_environment(self) -> None:
        self.ranks.make_mesh()
        if self.ranks.mesh is not None:
            self._observer.group = self.ranks.mesh[tensor_parallel.TENSOR].get_group()
        super().setup_environment()  # type: ignore[misc]

    @property
    def ledger(self) -> Ledger:  # type: ignore[override]
        return self.engine.ledger if self.engine is not None else Ledger()

    def traffic(self) -> dict[str, int]:
        """Bytes communicated so far, by kind of collective."""
        sent = self.engine.report().bytes  # report() also enters the optimizer states in the ledger
        shared = self._observer.tensor_parallel_bytes
        return {**sent, "tensor_parallel": shared} if shared else sent

    def _new_restarts(self) -> None:
        """Do nothing: ``resilience`` has no values to copy in a fake run."""

    def offloaded(self) -> tuple[int, int]:
        """Bytes in the host's memory that ``ledger`` does not count, and bytes on a disk."""
        on_disk, in_transfer = self.engine.bytes_on_disk()
        kept = 0
        if self.options.resilience is not None:  # type: ignore[attr-defined]
            leaves = compat.tree_leaves(self.checkpoints.state_to_keep())  # type: ignore[attr-defined]
            rank: int = self.global_rank  # type: ignore[attr-defined]
            entries = {identity(leaf): entry_of(leaf, rank) for leaf in leaves if isinstance(leaf, Tensor)}
            # two generations in shared memory, and the copy from which a save writes
            kept = 3 * sum(entry.nbytes for entry in entries.values())
        return in_transfer + kept, on_disk

    def most_loaded(self, rank: int) -> int:
        """The rank that holds the most elements; ``rank`` if no rank holds more."""
        # shards have unequal sizes only in buckets whose parameters stay whole
        loads = self.engine.owned_numels()
        return max([rank, *range(len(loads))], key=loads.__getitem__)


class _PlannedDDP(_Planned):
    """Mixin for a rank under ``DistributedDataParallel``, which holds all states and all-reduces gradients."""

    optimizers: list[torch.optim.Optimizer]
    lightning_module: LightningModule

    def __init__(self, ranks: int, machines: int, accumulate: int, observer: Observer) -> None:
        self._plan(ranks, machines, accumulate, observer)
        self.ledger = Ledger()
        self._started: list[Callable[[], None]] = []
        self._collected = self._reduced = 0
        super().__init__("cpu")  # type: ignore[call-arg]
        self.world_size = ranks

    def model_to_device(self) -> None:
        super().model_to_device()
        assert self.model is not None
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.ledger.now["parameters"] = sum(parameter.nbytes for parameter in self.model.parameters())
        # by default, DDP copies each gradient to a bucket and back
        self._buckets = [torch.empty_like(parameter) for parameter in self._trained] if self._ranks > 1 else []
        self.ledger.now["reduction"] = sum(bucket.nbytes for bucket in self._buckets)
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def pre_backward(self, closure_loss: Tensor) -> None:
        # a gradient takes the size of its parameter, also if it is sparse, since a fake one has no rows
        self._without = {parameter for parameter in self._trained if parameter.grad is None}
        trained = sum(parameter.nbytes for parameter in self._trained)
        self.ledger.now["gradients"] = trained - sum(parameter.nbytes for parameter in self._without)

    def _take(self, parameter: Any) -> None:
        if parameter in self._without:
            self._without.remove(parameter)
            self.ledger.now["gradients"] += parameter.nbytes
        if not should_accumulate(self.lightning_module.trainer):
            self._collected += parameter.nbytes  # Lightning runs earlier micro-batches of a step in no_sync
        if self._collected >= DDP_BUCKET_BYTES:
            self._reduce()

    def _reduce(self) -> None:
        if self._ranks > 1 and self._collected:
            sent = 2 * self._collected * (self._ranks - 1) / self._ranks  # bytes that a rank sends in a ring
            self._started.append(self._observer.sends(sent, sent if self._machines > 1 else 0.0))
            self._reduced += self._collected
        self._collected = 0

    def post_backward(self, closure_loss: Tensor) -> None:
        self._reduce()
        while self._started:
            self._started.pop(0)()

    def traffic(self) -> dict[str, int]:
        # including states under keys that are not parameters
        states = compat.tree_leaves([list(each.state.values()) for each in self.optimizers])
        self.ledger.now["optimizer"] = sum(compat.nbytes_of(value) for value in states if isinstance(value, Tensor))
        return {"all_reduce": self._reduced}

    def offloaded(self) -> tuple[int, int]:
        return 0, 0

    def most_loaded(self, rank: int) -> int:
        return rank


@cache
def zero_strategy_of(package: ModuleType, *mixins: type) -> Any:
    """Make a ZeRO strategy for the Trainer of ``lightning.pytorch`` or ``pytorch_lightning``."""
    bases = (*mixins, TrainerStrategy, package.strategies.ParallelStrategy)
    made = type("ZeroStrategy", bases, {"lightning": package})
    package.strategies.DDPStrategy.register(made)  # Lightning then accepts compiled modules
    return made


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """What one rank holds, sends and does in the second step of a fake run.

    Attributes:
        peak_bytes: bytes on the training device by category, when their sum is highest: ``parameters`` (with master
            weights), ``gathered``, ``gradients``, ``reduction``, ``optimizer``, and ``activations`` (with the batch,
            buffers, and all other tensors that the project creates).
        host_bytes: bytes offloaded to the host's memory, the buffers for states on a disk, and the copies that
            ``resilience`` keeps.
        traffic_bytes: bytes of communicated buffers, by kind of collective.
        leaving_bytes: bytes that all ranks of a machine send to other machines; 0 on one machine.
        replicas: number of ranks that compute different batches; with tensor parallelism fewer than all ranks.
        assumptions: values assumed where the project reads tensors, since fake tensors have no values; and parts of the
            project that did not run.
        report_peak: the engine's bytes by category, when the engine's sum is highest, as in ``Report.peak`` of a real
            run.
    """

    peak_bytes: dict[str, int]
    host_bytes: int = 0
    disk_bytes: int = 0
    traffic_bytes: dict[str, int] = field(default_factory=dict)
    leaving_bytes: int = 0
    parameters: int = 0
    replicas: int = 1
    assumptions: tuple[str, ...] = ()
    report_peak: dict[str, int] = field(default_factory=dict, repr=False)
    events: list[Event] = field(default_factory=list, repr=False)

    @property
    def total_bytes(self) -> int:
        return sum(self.peak_bytes.values())


def packages() -> list[ModuleType]:
    """``lightning.pytorch`` and ``pytorch_lightning``, as far as they have been imported."""
    return [sys.modules[name] for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]


def package_of(module: Any) -> ModuleType:
    """The package of an object's LightningModule class: ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        ValueError: if the object is not a LightningModule.
    """
    for package in packages():
        if isinstance(module, package.LightningModule):
            return package
    raise ValueError(f"The module must be a LightningModule, but its type is {type(module).__name__}.")


def _made_on_meta(make_module: Callable[[], LightningModule]) -> LightningModule:
    try:
        with torch.device("meta"):
            return make_module()
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"The module could not be built on the meta device: {error}. Tensors read in __init__ must be created "
            'with device="cpu".'
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Context that hides Python warnings, and log messages below the level ERROR."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


@quiet()
def fake_run(
    make_module: Callable[[], LightningModule],
    batch: Any,
    *,
    ranks: int,
    stage: int | None,
    accumulate: int = 1,
    precision: Any = "32-true",
    clip: float | None = None,
    transport: str = "nccl",
    with_values: bool = False,
    machines: int = 1,
    **options: Any,
) -> FakeRun:
    """Train a module for two steps on fake tensors, with the real Trainer, strategy and engine, as rank 0.

    If another rank holds more elements, because parameters stay whole, the run is repeated as that rank.

    Args:
        make_module: returns the module; called with the meta device as the default device.
        batch: a batch as the project's loader returns it, on the CPU.
        stage: the ZeRO stage; None for DDP.
        transport: ``"nccl"``, ``"gloo"`` or ``"shared memory"``; each uses different buffers to reduce gradients.
        with_values: whether to compute with real tensors, to check the results of a fake run.

    Raises:
        ValueError: if the module cannot be built on the meta device.
    """
    together = (stage and options.get("tensor_parallel_size")) or 1
    if together == "auto":
        together = options["tensor_parallel_size"] = ranks // machines
    crosses = together > ranks // machines  # tensor-parallel ranks are consecutive
    leaving = ranks // machines if crosses else 0.0

    def run_as(rank: int) -> tuple[FakeRun, int]:
        """Run as a rank along the data-parallel dimension; return the result, and the rank that holds the most."""
        module, observer = _made_on_meta(make_module), Observer(lambda: strategy.ledger.now.copy(), together, leaving)
        package = package_of(module)
        if stage is None:
            ddp = type("DDPStrategy", (_PlannedDDP, package.strategies.SingleDeviceStrategy), {})
            strategy: Any = ddp(ranks, machines, accumulate, observer)
        else:
            zero = zero_strategy_of(package, _PlannedZero)
            strategy = zero(ranks, machines, accumulate, observer, transport, stage=stage, **options)
        mode, own = compat.FakeTensorMode(allow_non_fake_inputs=True), batch
        strategy.modes = [observer] if with_values else [mode, observer]
        if not with_values:
            own = compat.tree_map(lambda leaf: mode.from_tensor(leaf) if _is_data(leaf) else leaf, batch)
        observer.count(compat.tree_leaves(own))
        with process_group.simulated(rank * together, ranks), strategy.leave_modes:
            trainer = package.Trainer(
                strategy=strategy,
                accelerator="cpu",
                devices=1,
                precision=precision,
                accumulate_grad_batches=accumulate,
                gradient_clip_val=clip,
                max_epochs=1,
                limit_val_batches=0,
                barebones=True,  # no checkpoints, and nothing is logged
            )
            # instead of Lightning's exchange of signals
            meet_between_batches(trainer, lambda: None, lambda: None, Wrappers())
            batches = UserList([own] * (2 * accumulate))  # the Trainer would take a list for a list of loaders
            trainer.fit(module, batches)
            traffic = {kind: nbytes - strategy.before.get(kind, 0) for kind, nbytes in strategy.traffic().items()}
            buffers, on_disk = strategy.offloaded()
            most_loaded = strategy.most_loaded(rank)
        run = FakeRun(
            peak_bytes=_peak_of(observer),
            report_peak=dict(strategy.ledger.peak),
            host_bytes=observer.host_peak + buffers,
            disk_bytes=on_disk,
            traffic_bytes=traffic,
            leaving_bytes=round(sum(event.leaving for event in observer.events)),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            replicas=ranks // together,
            events=observer.events,
            assumptions=(*observer.assumptions, *_left_out(module, package.LightningModule)),
        )
        return run, most_loaded

    run, most_loaded = run_as(0)
    return run if most_loaded == 0 else run_as(most_loaded)[0]


def _peak_of(observer: Observer) -> dict[str, int]:
    """Bytes on the device at the peak, by category."""
    peak = {"parameters": 0, "optimizer": 0, **observer.at_peak}  # at_peak has no entry for offloaded states
    peak.pop("host", None)
    peak["activations"] = observer.peak - sum(each for category, each in peak.items() if category != "activations")
    return peak


def _is_data(leaf: Any) -> bool:
    """Whether a tensor of a batch becomes fake. Ids, labels and masks stay real, as code may read their values."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.uint8)


def _left_out(module: nn.Module, base: type) -> list[str]:
    """The assumption that names the project's methods outside training, such as validation, which did not run."""
    beside = re.compile("validation|test|predict|checkpoint")
    own = {name for cls in type(module).__mro__ if not issubclass(base, cls) for name in vars(cls)}
    names = sorted(name for name in own if hasattr(base, name) and beside.search(name))
    return [f"training needs the most memory ({', '.join(names)} did not run)"] if names else []
