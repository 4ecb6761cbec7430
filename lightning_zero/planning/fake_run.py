"""Fake runs: two training steps with the real Trainer and engine, on fake tensors and as one of many ranks."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from types import ModuleType
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_zero.checkpoint.saving import entry_of, identity
from lightning_zero.engine import Engine
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.compat import FakeTensorMode, nbytes_of, tree_leaves, tree_map
from lightning_zero.engine.state.residency import Medium
from lightning_zero.engine.tensor.identity import become
from lightning_zero.io.sizes import in_bytes
from lightning_zero.io.swap import BUFFERS
from lightning_zero.planning.pretend import pretending
from lightning_zero.planning.timeline import Event, Recorder
from lightning_zero.planning.tracking import Assumptions, MemoryTracker
from lightning_zero.strategies.trainer import TrainerStrategy

DDP_BUCKET_BYTES = 25 * 2**20
"""``DistributedDataParallel``'s default bucket size: it reduces about this many bytes of gradients together."""


class _Pretending:
    """Mixin for the strategies of fake runs: parameters start on the meta device, and other ranks do not exist.

    Attributes:
        modes: dispatch modes for the run. ``model_to_device`` enters them; closing ``leave_modes`` exits them.
    """

    _ranks: int
    _recorder: Recorder
    modes: Sequence[AbstractContextManager[Any]] = ()
    leave_modes: ExitStack
    model: nn.Module | None

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta"), super().tensor_init_context(empty_init):  # type: ignore[misc]
            yield

    def model_to_device(self) -> None:
        """Replace meta tensors with fake ones: only now, since a module with fake tensors cannot change its dtype."""
        for mode in self.modes:
            self.leave_modes.enter_context(mode)
        assert self.model is not None
        leave_meta(self.model)

    def held(self) -> Counter[str]:
        """Bytes of model states and working buffers, by category."""
        raise NotImplementedError

    def traffic(self) -> dict[str, int]:
        """Bytes communicated so far, by kind of collective."""
        raise NotImplementedError

    def forget_gradients(self) -> None:
        """Called before gradients are set to None."""

    def reset_peak(self) -> None:
        """Called before the measured step."""

    def report_peak(self) -> dict[str, int]:
        """The engine's ``Report.peak``; under DDP, the bytes that a rank holds after a step."""
        return dict(self.held())

    def host_bytes(self) -> int:
        """Bytes in the host's memory that ``held`` counts as parameters or master weights."""
        return 0

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes of the states on a disk, and of the buffers in the host's memory through which they are updated."""
        return 0, 0

    def kept_bytes(self) -> int:
        """Bytes of the copies of this rank's state that ``resilience`` keeps in memory."""
        return 0

    def most_loaded(self, rank: int) -> int:
        """The rank that holds the most elements; ``rank`` if no rank holds more."""
        return rank

    def teardown(self) -> None:
        """Do nothing: fake parameters need not become ordinary parameters again."""


class _PretendingZero(_Pretending):
    """Mixin that runs the ZeRO strategy as one of several simulated ranks, in one process.

    Arguments:
        ranks: number of ranks.
        recorder: records the collectives.
        transport, rank, machines: as for ``pretending``.
        options: as for ``ZeroStrategy``.
    """

    engine: Engine | None

    def __init__(
        self, ranks: int, recorder: Recorder, transport: str, rank: int, machines: int, **options: Any
    ) -> None:
        self._ranks, self._machines, self._recorder, self.leave_modes = ranks, machines, recorder, ExitStack()
        self._engine_class = pretending(ranks, recorder, transport, rank, machines)
        super().__init__(**options)

    @property
    def world_size(self) -> int:
        return self._ranks

    @property
    def _mesh_ranks(self) -> int:
        return self._ranks

    _is_alone = True  # the other ranks do not exist, so nothing is sent to them

    def setup_environment(self) -> None:
        self._make_mesh()  # type: ignore[attr-defined]
        super().setup_environment()  # type: ignore[misc]

    def held(self) -> Counter[str]:
        return Counter(self.engine.ledger.now) if self.engine is not None else Counter()

    def traffic(self) -> dict[str, int]:
        assert self.engine is not None
        sent = self.engine.report().bytes  # report() also enters the optimizer states in the ledger
        shared = self._recorder.tensor_parallel_bytes
        return {**sent, "tensor_parallel": shared} if shared else sent

    def reset_peak(self) -> None:
        assert self.engine is not None
        self.engine.reset_peak()

    def report_peak(self) -> dict[str, int]:
        assert self.engine is not None
        return self.engine.report().peak

    def host_bytes(self) -> int:
        assert self.engine is not None
        at_rest = (part for bucket in self.engine.buckets for part in bucket.residency.plan.at_rest())
        return sum(nbytes for _, medium, nbytes in at_rest if medium is Medium.HOST)

    def _new_restarts(self) -> None:
        """Do nothing: ``resilience`` has no values to copy in a fake run."""

    def kept_bytes(self) -> int:
        if self.options.keeps is None:  # type: ignore[attr-defined]
            return 0
        leaves = tree_leaves(self.state_to_keep())  # type: ignore[attr-defined]
        rank: int = self.global_rank  # type: ignore[attr-defined]
        entries = {identity(leaf): entry_of(leaf, rank) for leaf in leaves if isinstance(leaf, Tensor)}
        return 3 * sum(entry.nbytes for entry in entries.values())  # two in shared memory, one from which a save writes

    def most_loaded(self, rank: int) -> int:
        assert self.engine is not None
        # shards have unequal sizes only in buckets whose parameters stay whole
        layouts = [bucket.layout for bucket in self.engine.buckets if bucket.layout.is_whole]
        size = self.engine.communicator.size
        loads = [sum(layout.shard_numel(each) for layout in layouts) for each in range(size)] if layouts else []
        return max([rank, *range(len(loads))], key=loads.__getitem__) if loads else rank

    def disk_bytes(self) -> tuple[int, int]:
        assert self.engine is not None
        files = [bucket.states for bucket in self.engine.buckets if bucket.states is not None]
        largest = max((extent.nbytes for states in files for extent in states.extents()), default=0)
        return sum(states.nbytes for states in files), BUFFERS * largest


class _PretendingDDP(_Pretending):
    """Mixin that simulates a rank under ``DistributedDataParallel``, which holds all states and all-reduces gradients.

    Arguments:
        ranks: number of ranks.
        recorder: records the collectives.
        machines: number of machines.
    """

    optimizers: list[torch.optim.Optimizer]
    lightning_module: LightningModule

    def __init__(self, ranks: int, recorder: Recorder, machines: int) -> None:
        self._ranks, self._recorder, self._machines, self.leave_modes = ranks, recorder, machines, ExitStack()
        self._now = Counter[str]()
        self._started: list[int] = []
        self._collected = self._reduced = 0
        super().__init__("cpu")  # type: ignore[call-arg]
        self.world_size = ranks

    def model_to_device(self) -> None:
        super().model_to_device()
        assert self.model is not None
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._now["parameters"] = sum(parameter.nbytes for parameter in self.model.parameters())
        # by default, DDP copies each gradient to a bucket and back
        self._buckets = [torch.empty_like(parameter) for parameter in trained] if self._ranks > 1 else []
        self._now["reduction"] = sum(bucket.nbytes for bucket in self._buckets)
        self._trained_bytes = sum(parameter.nbytes for parameter in trained)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        nbytes = parameter.nbytes  # also of a sparse gradient, since fake ones have no rows
        self._now["gradients"] = min(self._now["gradients"] + nbytes, self._trained_bytes)
        if not self.lightning_module.trainer.fit_loop._should_accumulate():
            self._collected += nbytes  # Lightning runs earlier micro-batches of a step in no_sync
        if self._collected >= DDP_BUCKET_BYTES:
            self._reduce()

    def _reduce(self) -> None:
        if self._ranks > 1 and self._collected:
            sent = 2 * self._collected * (self._ranks - 1) / self._ranks  # bytes that a rank sends in a ring
            self._started.append(self._recorder.launch(sent, sent if self._machines > 1 else 0.0))
            self._reduced += self._collected
        self._collected = 0

    def post_backward(self, closure_loss: Tensor) -> None:
        self._reduce()
        while self._started:
            self._recorder.wait(self._started.pop(0))

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        states = tree_leaves([list(each.state.values()) for each in self.optimizers])  # also those of no parameter
        self._now["optimizer"] = sum(nbytes_of(value) for value in states if isinstance(value, Tensor))
        return result

    def held(self) -> Counter[str]:
        return self._now.copy()

    def forget_gradients(self) -> None:
        self._now["gradients"] = 0

    def traffic(self) -> dict[str, int]:
        return {"all_reduce": self._reduced}


@cache
def _strategies(package: ModuleType) -> tuple[type[Any], type[Any]]:
    """The fake-run strategies for ZeRO and DDP, for the Trainer of ``lightning.pytorch`` or ``pytorch_lightning``."""

    class PretendingZeroStrategy(_PretendingZero, TrainerStrategy, package.strategies.ParallelStrategy):  # type: ignore[name-defined]
        lightning: ClassVar[ModuleType] = package

    class PretendingDDPStrategy(_PretendingDDP, package.strategies.SingleDeviceStrategy):  # type: ignore[name-defined]
        pass

    package.strategies.DDPStrategy.register(PretendingZeroStrategy)  # Lightning then accepts compiled modules
    return PretendingZeroStrategy, PretendingDDPStrategy


@dataclass(frozen=True)
class FakeRun:
    """Memory and events of one rank in the second step of a fake run.

    Attributes:
        peak_bytes: bytes on the training device by category, when their sum is highest: ``parameters`` (with master
            weights), ``gathered``, ``gradients``, ``reduction``, ``optimizer``, and ``activations`` (with the batch,
            buffers, and all other tensors that the project creates).
        report_peak: the engine's bytes by category, when the engine's sum is highest, as in ``Report.peak`` of a real
            run; under DDP, the bytes after a step.
        host_bytes: bytes offloaded to the host's memory, the buffers for states on a disk, and the copies that
            ``resilience`` keeps.
        disk_bytes: bytes of states on a disk.
        traffic: bytes of communicated buffers per step, by kind of collective.
        leaving: bytes per step that all ranks of a machine send to other machines; 0 on one machine.
        numel: number of elements in all parameters.
        events: events of the step; see ``replay``.
        assumptions: values assumed where the project reads tensors, since fake tensors have no values; and parts of the
            project that did not run.
    """

    peak_bytes: dict[str, int]
    report_peak: dict[str, int]
    host_bytes: int
    disk_bytes: int
    traffic: dict[str, int]
    leaving: int
    numel: int
    events: list[Event]
    assumptions: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.peak_bytes.values())


def package_of(module: Any) -> ModuleType:
    """The package of an object's LightningModule class: ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        ValueError: if the object is not a LightningModule.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules and isinstance(module, sys.modules[name].LightningModule):
            return sys.modules[name]
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


class _Batches:
    """A loader that repeats one batch. Not a list of batches, which the Trainer would take for a list of loaders."""

    def __init__(self, batch: Any, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return repeat(self._batch, self._count)


class _SecondStep:
    """Mixin for a callback that measures the second step, when optimizer states exist."""

    def __init__(self, strategy: Any, tracker: MemoryTracker, recorder: Recorder, accumulate: int) -> None:
        self._strategy, self._tracker, self._recorder, self._accumulate = strategy, tracker, recorder, accumulate

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._accumulate:
            self._before = self._strategy.traffic()
            self._strategy.reset_peak()
            self._tracker.reset()
            self._recorder.events.clear()

    def on_before_zero_grad(self, *_: Any) -> None:
        self._strategy.forget_gradients()

    def on_train_end(self, *_: Any) -> None:
        self.events, self.report_peak = list(self._recorder.events), self._strategy.report_peak()
        self.traffic = {kind: nbytes - self._before.get(kind, 0) for kind, nbytes in self._strategy.traffic().items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Context that hides Python warnings and Lightning's log messages below the level ERROR."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)


@quiet()
@process_group.hidden()
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
    rank: int = 0,
    machines: int = 1,
    **options: Any,
) -> FakeRun:
    """Train a module for two steps on fake tensors, with the real Trainer, strategy and engine.

    Args:
        make_module: returns the module; called with the meta device as the default device.
        batch: a batch as the project's loader returns it, on the CPU.
        ranks: the world size.
        stage: the ZeRO stage; None for DDP.
        accumulate: micro-batches per step.
        precision: the Trainer's ``precision``.
        clip: the Trainer's ``gradient_clip_val``.
        transport: ``"nccl"``, ``"gloo"`` or ``"shared memory"``; each uses different buffers to reduce gradients.
        with_values: whether to compute with real tensors, to check the results of a fake run.
        rank: the rank to simulate; with tensor parallelism, its position along the data-parallel dimension. If another
            rank holds more elements, because parameters stay whole, the run is repeated as that rank.
        machines: number of machines; the ranks are split evenly among them.
        options: options of ``ZeroStrategy``.

    Raises:
        ValueError: if the module cannot be built on the meta device, or ``machines`` does not divide ``ranks``; with
            tensor parallelism, also if this process already has process groups.
    """
    if machines < 1 or ranks % machines:
        raise ValueError(f"machines={machines} must be at least 1 and divide the number of ranks, {ranks}.")
    module = _made_on_meta(make_module)
    package = package_of(module)
    zero_strategy, ddp_strategy = _strategies(package)
    if options.get("tensor_parallel_size") == "auto":
        options["tensor_parallel_size"] = ranks // machines
    has_mesh = options.get("tensor_parallel_size") is not None
    together = options["tensor_parallel_size"] if has_mesh else 1
    crosses = together > ranks // machines  # tensor-parallel ranks are consecutive
    recorder = Recorder(together, leaving=ranks // machines if crosses else 0.0)
    mode, assumptions = FakeTensorMode(allow_non_fake_inputs=True), Assumptions()
    strategy: Any = (
        ddp_strategy(ranks, recorder, machines)
        if stage is None
        else zero_strategy(ranks, recorder, transport, rank, machines, stage=stage, **options)
    )
    tracker = MemoryTracker(strategy.held, lambda: recorder.on_host)
    strategy.modes = [nullcontext() if with_values else mode, tracker, recorder, assumptions]
    second: Any = type("SecondStep", (_SecondStep, package.Callback), {})(strategy, tracker, recorder, accumulate)
    trainer = package.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        callbacks=[second],
        max_epochs=1,
        limit_val_batches=0,
        barebones=True,  # no checkpoints, and nothing is logged
    )
    given = batch
    if not with_values:
        batch = tree_map(lambda leaf: mode.from_tensor(leaf) if _is_data(leaf) else leaf, batch)
    tracker.count(tree_leaves(batch))
    with process_group.pretended(rank * together, ranks) if has_mesh else nullcontext(), strategy.leave_modes:
        trainer.fit(module, _Batches(batch, 2 * accumulate))
        numel = sum(parameter.numel() for parameter in module.parameters())
        whole = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
        offloaded, kept = strategy.host_bytes(), strategy.kept_bytes()
        on_disk, buffers = strategy.disk_bytes()
        most_loaded = strategy.most_loaded(rank)
    if most_loaded != rank:
        return fake_run(
            make_module,
            given,
            ranks=ranks,
            stage=stage,
            accumulate=accumulate,
            precision=precision,
            clip=clip,
            transport=transport,
            with_values=with_values,
            rank=most_loaded,
            machines=machines,
            **options,
        )
    peak = {"parameters": 0, "optimizer": 0, **tracker.at_peak}  # at_peak has no entry for offloaded states
    peak.pop("host", None)
    host = tracker.host_peak + offloaded + buffers + kept
    peak["activations"] = tracker.peak - sum(each for category, each in peak.items() if category != "activations")
    peak["parameters"] -= offloaded
    if stage is not None and transport != "nccl":
        assumptions.made[
            "freed memory returns to the system; by default, a process on the CPU keeps some of it, up to "
            f"{in_bytes(whole)} after setup alone (MALLOC_TRIM_THRESHOLD_=65536 MALLOC_MMAP_THRESHOLD_=65536 return it)"
        ] = None
    return FakeRun(
        peak_bytes=peak,
        report_peak=second.report_peak,
        host_bytes=host,
        disk_bytes=on_disk,
        traffic=second.traffic,
        leaving=round(sum(event.leaving for event in second.events)),
        numel=numel,
        events=second.events,
        assumptions=(*assumptions.made, *_left_out(module, package.LightningModule)),
    )


def _is_data(leaf: Any) -> bool:
    """Whether a tensor of a batch becomes fake. Ids, labels and masks stay real, as code may read their values."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.uint8)


def _left_out(module: nn.Module, base: type) -> list[str]:
    """The assumption that names the project's methods outside training, such as validation, which did not run."""
    beside = re.compile("validation|test|predict|checkpoint")
    own = {name for cls in type(module).__mro__ if not issubclass(base, cls) for name in vars(cls)}
    names = sorted(name for name in own if hasattr(base, name) and beside.search(name))
    return [f"training needs the most memory ({', '.join(names)} did not run)"] if names else []


def leave_meta(module: nn.Module) -> None:
    """Give a module's parameters and buffers uninitialised memory on the CPU; tied tensors stay one object."""
    for tensor in (*module.parameters(), *module.buffers()):
        values = torch.empty_like(tensor, device="cpu", requires_grad=False)
        become(tensor, nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values)
