"""Plans of a training run for combinations of stage, offload, micro-batch and other options, and advice on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_zero.engine.compat import tree_leaves, tree_map
from lightning_zero.engine.config import NothingToCompressError, stages_allowed
from lightning_zero.io.sizes import in_gb
from lightning_zero.planning.fake_run import fake_run
from lightning_zero.planning.timeline import Resources, replay

ROOM = 0.9
"""Fraction of a device's memory that a plan may use; fragmentation and the communication library take the rest."""


_SUFFIXES = {"none": "", "cpu": "_offload", "nvme": "_nvme", "activations": ""}

_OFFLOADS: dict[str, Any] = {
    "none": None,
    "cpu": "cpu",
    "nvme": {"optimizer": "nvme", "path": "."},  # creates no file; the default folder, if in memory, would be refused
    "activations": {"optimizer": None, "activations": "cpu"},
}


@dataclass(frozen=True)
class Plan:
    """Memory per rank and time per step under one combination of choices.

    Attributes:
        stage: the ZeRO stage; 0 for DDP.
        offload: ``"none"``; ``"cpu"`` or ``"nvme"`` for optimizer states and master weights, to the host's memory or to
            a disk; ``"activations"`` for activation checkpoints only, to the host's memory.
        ranks: the world size.
        micro_batch: samples per rank and micro-batch; None if the batch's tensors differ in their first dimension.
        accumulate: micro-batches per step.
        activation_checkpointing: whether units are recomputed in backward.
        parameters: number of elements in all parameters.
        peak_bytes: bytes on the device at the peak, by category, and their sum under ``"total"``.
        host_bytes: bytes in the host's memory: offloaded states, buffers for states on a disk, and the copies that
            ``resilience`` keeps.
        disk_bytes: bytes offloaded to a disk.
        traffic_bytes: bytes of communicated buffers per step, by kind of collective.
        leaving_bytes: bytes per step that all ranks of a machine send to other machines; 0 on one machine.
        seconds_per_step: an estimate; None if the machine's speed is unknown.
        waiting_seconds: the part of ``seconds_per_step`` in which the device waits for communication or the host.
        samples_per_second: the sum over all ranks; None if ``seconds_per_step`` or ``micro_batch`` is None.
        fits: whether the peak is within 90 % of the device's memory; None if the device's memory is unknown.
        assumptions: what the plan assumes, such as the values of tensors that the user's code reads, and which parts of
            the user's code did not run.
        shard_within, compression, tensor_parallel_size, partition_activations: as in ``ZeroStrategy``.
    """

    stage: int
    offload: str
    ranks: int
    micro_batch: int | None
    accumulate: int
    activation_checkpointing: bool
    parameters: int
    peak_bytes: dict[str, int]
    host_bytes: int
    disk_bytes: int
    traffic_bytes: dict[str, int]
    leaving_bytes: int
    seconds_per_step: float | None
    waiting_seconds: float | None
    samples_per_second: float | None
    fits: bool | None
    assumptions: tuple[str, ...]
    shard_within: str | int | None = None
    compression: str | None = None
    tensor_parallel_size: int | None = None
    partition_activations: bool = False

    @property
    def name(self) -> str:
        """The plan's strategy and options, such as ``zero3 with shard_within='node'``."""
        text = "DDP" if self.stage == 0 else f"zero{self.stage}{_SUFFIXES[self.offload]}"
        checkpointing = "units" if self.activation_checkpointing else None
        chosen = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "shard_within": self.shard_within,
            "compression": self.compression,
            "activation_checkpointing": checkpointing,
            "partition_activations": self.partition_activations or None,
            "offload": _OFFLOADS["activations"] if self.offload == "activations" else None,
        }
        options = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value is not None)
        return f"{text} with {options}" if options else text


def make_plans(
    make_module: Callable[[], LightningModule],
    batch: Any,
    *,
    ranks: int,
    stages: Iterable[int],
    offloads: Iterable[str] = ("none",),
    micro_batches: Iterable[int | None] = (None,),
    checkpointing: Iterable[bool | Literal["partitioned"]] = (False,),
    resources: Resources | None = None,
    memory: float | None = None,
    accumulate: int | Iterable[int] = 1,
    shard_within: Iterable[str | int | None] = (None,),
    compression: Iterable[str | None] = (None,),
    tensor_parallel: Iterable[int | None] = (None,),
    left_out: list[str] | None = None,
    **options: Any,
) -> list[Plan]:
    """Plan every possible combination of the choices. DDP (stage 0) is planned without the strategy's options.

    Args:
        make_module, batch, options: as for ``fake_run``.
        offloads: choices for ``Plan.offload``.
        micro_batches: numbers of samples to which the batch is resized; None leaves the batch unchanged.
        checkpointing: whether to checkpoint activations; ``"partitioned"`` divides them over tensor-parallel ranks.
        resources: the machine's speed; with None, plans have no times.
        memory: the device's memory in bytes; with None, plans do not say whether they fit.
        accumulate: micro-batches per step; one number, or several choices.
        shard_within: choices for stage 3.
        compression: choices.
        tensor_parallel: choices for ``tensor_parallel_size``; only None is combined with ``shard_within``.
        left_out: receives a sentence for each combination whose ``compression`` has nothing to compress.

    Raises:
        ValueError: if ``ranks`` is below 1, the batch cannot be resized, or no combination is possible.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1.")
    plans = []
    left_out = [] if left_out is None else left_out
    accumulates = [accumulate] if isinstance(accumulate, int) else accumulate
    choices = product(
        *(micro_batches, accumulates, stages, offloads, checkpointing, shard_within, compression, tensor_parallel)
    )
    for micro_batch, of_step, stage, offload, recompute, within, compress, together in choices:
        is_partitioned = recompute == "partitioned"
        if stage == 0 and (offload != "none" or recompute or within or compress or together):
            continue
        if (stage and stage not in stages_allowed(within)) or (within is not None and together):
            continue
        if (is_partitioned and together in (None, 1)) or (offload == "activations" and not recompute):
            continue
        sized = batch if micro_batch is None else resized(batch, micro_batch)
        chosen = {
            "offload": _OFFLOADS[offload],
            "activation_checkpointing": "units" if recompute else None,
            "partition_activations": is_partitioned,
            "tensor_parallel_size": together,
            "shard_within": within,
            "compression": compress,
            **options,
        }
        try:
            run = fake_run(make_module, sized, ranks=ranks, stage=stage or None, accumulate=of_step, **chosen)
        except NothingToCompressError as error:
            within_groups = f" with shard_within={within!r}," if within is not None else " with"
            reason = f"zero{stage}{_SUFFIXES[offload]}{within_groups} {error}"
            left_out += [reason] if reason not in left_out else []
            continue
        times = replay(run.events, resources) if resources is not None else {}
        seconds = times.get("total")
        samples = samples_of(sized)
        total = run.total_bytes
        plans.append(
            Plan(
                stage=stage,
                offload=offload,
                ranks=ranks,
                micro_batch=samples,
                accumulate=of_step,
                activation_checkpointing=bool(recompute),
                parameters=run.numel,
                peak_bytes={**run.peak_bytes, "total": total},
                host_bytes=run.host_bytes,
                disk_bytes=run.disk_bytes,
                traffic_bytes=run.traffic,
                leaving_bytes=run.leaving,
                seconds_per_step=seconds,
                waiting_seconds=times.get("waiting"),
                samples_per_second=samples * (ranks // (together or 1)) * of_step / seconds
                if samples and seconds
                else None,
                fits=None if memory is None else total <= ROOM * memory,
                assumptions=run.assumptions,
                shard_within=within,
                compression=compress,
                tensor_parallel_size=together,
                partition_activations=is_partitioned,
            )
        )
    if not plans and left_out:
        raise ValueError(left_out[0])
    if not plans:
        raise ValueError(
            "No combination is valid: DDP takes no options; shard_within requires stage 3 without tensor parallelism; "
            "offloaded activations require checkpointing; partitioned checkpointing requires several tensor-parallel "
            "ranks."
        )
    return plans


def samples_of(batch: Any) -> int | None:
    """The common size of the first dimension of a batch's tensors; None if the sizes differ."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def resized(batch: Any, samples: int) -> Any:
    """Return a batch with the given number of samples, by repeating or dropping samples.

    Raises:
        ValueError: if the batch's tensors differ in the size of their first dimension.
    """
    now = samples_of(batch)
    if now is None:
        raise ValueError(
            "The micro-batch cannot be resized: the batch's tensors have no common first dimension. Leave "
            "--micro-batch out, and pass a batch of the size that you want to plan."
        )
    copies = -(-samples // now)
    return tree_map(
        lambda leaf: (
            leaf.repeat(copies, *[1] * (leaf.dim() - 1))[:samples] if isinstance(leaf, Tensor) and leaf.dim() else leaf
        ),
        batch,
    )


def advise(plans: list[Plan], memory: float | None) -> list[str]:
    """Recommend a plan, in sentences that give the reasons with figures."""
    fitting = [plan for plan in plans if plan.fits is not False]
    if not fitting:
        best = min(plans, key=lambda plan: plan.peak_bytes["total"])
        assert memory is not None
        largest = _largest(best)
        return [
            f"Nothing fits: the smallest plan is {best.name}, which needs {in_gb(best.peak_bytes['total'])}; a device "
            f"has {in_gb(ROOM * memory)} of usable memory. The largest category is {largest} "
            f"({in_gb(best.peak_bytes[largest])}). {_way_out(best)}"
        ]
    timed = [plan for plan in fitting if plan.seconds_per_step]
    if not timed:
        best = min(fitting, key=lambda plan: (plan.stage, plan.offload != "none"))
        said = [f"{best.name} is the lowest stage that fits, with {in_gb(best.peak_bytes['total'])} a rank."]
        if memory is None:
            best = min(fitting, key=lambda plan: plan.peak_bytes["total"])
            said = [f"{best.name} takes the least memory, {in_gb(best.peak_bytes['total'])} a rank."]
        return [
            *said,
            "Times are unknown without the machine's speed: pass --flops, or --resources with a file written by "
            "`lightning-zero doctor --json`.",
        ]
    best = max(timed, key=_rate)
    assert best.seconds_per_step is not None
    if best.samples_per_second is not None:
        sizes = f" with {_samples(best)}"
        rate = f"{best.samples_per_second:.4g} samples/s, "
    else:
        sizes = f" with {best.accumulate} micro-batches a step" if best.accumulate > 1 else ""
        rate = ""
    said = [
        f"Take {best.name}{sizes}: {rate}{best.seconds_per_step:.3g} s a step, "
        f"{in_gb(best.peak_bytes['total'])} a rank."
    ]
    smallest = min((plan for plan in plans if plan.stage == 0), key=lambda plan: plan.peak_bytes["total"], default=None)
    ddp = max((plan for plan in timed if plan.stage == 0), key=_rate, default=smallest)
    if ddp is not None and ddp.seconds_per_step:
        if best is ddp:
            rival = max((plan for plan in timed if plan.stage), key=_rate, default=None)
            if rival is not None:
                slower = 100 * (1 - _rate(rival) / _rate(ddp))
                saved = ddp.peak_bytes["total"] - rival.peak_bytes["total"]
                less = f"; it would save {in_gb(saved)} a rank" if saved > 0 else ""
                said.append(
                    f"ZeRO does not help here: its fastest plan, {rival.name}, is {slower:.0f} % slower than DDP{less}."
                )
        elif ddp.fits is False:
            said.append(f"DDP does not fit: it needs {in_gb(ddp.peak_bytes['total'])}.")
        else:
            at = f" at {_samples(ddp)}" if ddp.micro_batch is not None else ""
            said.append(f"That is {_rate(best) / _rate(ddp):.2f} times DDP's rate{at}.")
    if best.waiting_seconds and best.waiting_seconds > 0.2 * best.seconds_per_step:
        part = 100 * best.waiting_seconds / best.seconds_per_step
        said.append(
            f"For {part:.0f} % of the step, the device waits for communication or the host: more accumulation, larger "
            "micro-batches or a faster link help more than a higher stage."
        )
    return said


def _rate(plan: Plan) -> float:
    """Samples per second; micro-batches per second if their number of samples is unknown; 0 if the time is unknown."""
    if plan.samples_per_second is not None:
        return plan.samples_per_second
    micro_batches = plan.accumulate * (plan.ranks // (plan.tensor_parallel_size or 1))
    return micro_batches / plan.seconds_per_step if plan.seconds_per_step else 0.0


def _samples(plan: Plan) -> str:
    """A rank's samples per step, such as ``8 samples a rank in each of 4 micro-batches``."""
    samples = f"{plan.micro_batch} sample{'' if plan.micro_batch == 1 else 's'} a rank"
    return samples if plan.accumulate == 1 else f"{samples} in each of {plan.accumulate} micro-batches"


def _largest(plan: Plan) -> str:
    """The category with the most bytes."""
    return max(plan.peak_bytes.keys() - {"total"}, key=plan.peak_bytes.__getitem__)


def _way_out(plan: Plan) -> str:
    if _largest(plan) == "activations":
        return "Use smaller micro-batches (--micro-batch) or activation checkpointing (--checkpointing on)."
    if plan.stage == 3 and plan.offload != "none":
        return "Use more ranks, or wrap smaller units."
    return "Use stage 3 (--stage 3), more ranks, or offload (--offload cpu)."
