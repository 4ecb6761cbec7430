"""Plans of a training run for combinations of stage, offload, micro-batch and other options, and advice on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_zero.engine import compat, placement
from lightning_zero.io.sizes import in_gb
from lightning_zero.planning.fake_run import Footprint, fake_run
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


@dataclass(frozen=True, kw_only=True)
class Plan(Footprint):
    """Memory per rank and time per step under one combination of choices.

    Attributes:
        stage: the ZeRO stage; 0 for DDP.
        offload: ``"none"``; ``"cpu"`` or ``"nvme"`` for optimizer states and master weights, to the host's memory or to
            a disk; ``"activations"`` for activation checkpoints only, to the host's memory.
        ranks: the world size.
        micro_batch: samples per rank and micro-batch; None if the batch's tensors differ in their first dimension.
        accumulate: micro-batches per step.
        activation_checkpointing: whether units are recomputed in backward.
        peak_bytes: as in ``Footprint``, and the sum under ``"total"``.
        seconds_per_step: an estimate; None if the machine's speed is unknown.
        waiting_seconds: the part of ``seconds_per_step`` in which the device waits for communication or the host.
        samples_per_second: the sum over all ranks; None if ``seconds_per_step`` or ``micro_batch`` is None.
        fits: whether the peak is within 90 % of the device's memory; None if the device's memory is unknown.
        partition_activations: as in ``ZeroStrategy``.
        options: other options of ``ZeroStrategy``.
    """

    stage: int
    offload: str
    ranks: int
    micro_batch: int | None
    accumulate: int
    activation_checkpointing: bool
    seconds_per_step: float | None
    waiting_seconds: float | None
    samples_per_second: float | None
    fits: bool | None
    partition_activations: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The plan's strategy and options, such as ``zero3 (shard_within='node')``."""
        if self.stage == 0:
            return "DDP"
        checkpointing: Checkpointing = "partitioned" if self.partition_activations else self.activation_checkpointing
        return _name(self.stage, self.offload, checkpointing, self.options)


Checkpointing = bool | Literal["partitioned"]


def _options(offload: str, checkpointing: Checkpointing) -> dict[str, Any]:
    """Options of ``ZeroStrategy`` for choices of ``make_plans``."""
    return {
        "activation_checkpointing": "units" if checkpointing else None,
        "partition_activations": checkpointing == "partitioned",
        "offload": _OFFLOADS[offload],
    }


def _name(stage: int, offload: str, checkpointing: Checkpointing, options: Mapping[str, Any]) -> str:
    shown = {**options, **_options(offload, checkpointing)}
    if offload != "activations":
        del shown["offload"]  # the strategy's name says it
    text = ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None and value is not False)
    return f"zero{stage}{_SUFFIXES[offload]}" + (f" ({text})" if text else "")


def make_plans(
    make_module: Callable[[], LightningModule],
    batch: Any,
    *,
    ranks: int,
    stages: Iterable[int],
    offloads: Iterable[str] = ("none",),
    micro_batches: Iterable[int | None] = (None,),
    checkpointing: Iterable[Checkpointing] = (False,),
    accumulate: int | Iterable[int] = 1,
    machines: int = 1,
    choices: Mapping[str, Sequence[Any]] | None = None,
    left_out: list[str] | None = None,
    **settings: Any,
) -> list[Plan]:
    """Plan every possible combination of the choices. DDP (stage 0) is planned without the strategy's options.

    Args:
        make_module, batch, ranks, machines: as for ``fake_run``.
        offloads: choices for ``Plan.offload``.
        micro_batches: numbers of samples to which the batch is resized; None leaves the batch unchanged.
        checkpointing: whether to checkpoint activations; ``"partitioned"`` divides them over tensor-parallel ranks.
        accumulate: micro-batches per step; one number, or several choices.
        choices: choices for other options of ``ZeroStrategy``, by name.
        left_out: receives a sentence for each combination that the strategy refuses.
        settings: ``resources``, the machine's speed, without which plans have no times; ``memory``, the device's memory
            in bytes, without which plans do not say whether they fit; other arguments of ``fake_run``.

    Raises:
        ValueError: if the batch cannot be resized, the ranks cannot be split evenly among the machines, or no
            combination is possible.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1.")
    if machines < 1 or ranks % machines:
        raise ValueError(f"machines={machines} must be at least 1 and divide the number of ranks, {ranks}.")
    plans = []
    settings |= {"ranks": ranks, "machines": machines}
    left_out = [] if left_out is None else left_out
    accumulates = [accumulate] if isinstance(accumulate, int) else accumulate
    names, values = list(choices or {}), list((choices or {}).values())
    for micro_batch, of_step, stage in product(micro_batches, accumulates, stages):
        sized = batch if micro_batch is None else resized(batch, micro_batch)
        if stage == 0:
            plans.append(_plan(make_module, sized, 0, "none", False, {}, accumulate=of_step, **settings))
            continue
        for offload, recompute, *chosen in product(offloads, checkpointing, *values):
            combination = stage, offload, recompute, dict(zip(names, chosen))
            try:
                plans.append(_plan(make_module, sized, *combination, accumulate=of_step, **settings))
            except ValueError as error:
                left_out.append(f"{_name(*combination)}: {error}")
    left_out[:] = dict.fromkeys(left_out)  # each sentence once, not for every micro-batch
    if not plans:
        raise ValueError(f"No combination can be planned. {' '.join(left_out)}")
    return plans


def _plan(
    make_module: Callable[[], LightningModule],
    batch: Any,
    stage: int,
    offload: str,
    checkpointing: Checkpointing,
    options: Mapping[str, Any],
    *,
    ranks: int,
    accumulate: int,
    resources: Resources | None = None,
    memory: float | None = None,
    **settings: Any,
) -> Plan:
    given = {**_options(offload, checkpointing), **options, **settings}
    run = fake_run(make_module, batch, ranks=ranks, stage=stage or None, accumulate=accumulate, **given)
    seconds, waiting = replay(run.events, resources) if resources is not None else (None, None)
    samples = samples_of(batch)
    held = {each.name: getattr(run, each.name) for each in fields(Footprint)}
    return Plan(
        stage=stage,
        offload=offload,
        ranks=ranks,
        micro_batch=samples,
        accumulate=accumulate,
        activation_checkpointing=bool(checkpointing),
        seconds_per_step=seconds,
        waiting_seconds=waiting,
        samples_per_second=samples * run.replicas * accumulate / seconds if samples and seconds else None,
        fits=None if memory is None else run.total_bytes <= ROOM * memory,
        partition_activations=checkpointing == "partitioned",
        options=options,
        **{**held, "peak_bytes": {**run.peak_bytes, "total": run.total_bytes}},
    )


def samples_of(batch: Any) -> int | None:
    """The common size of the first dimension of a batch's tensors; None if the sizes differ."""
    sizes = {leaf.shape[0] for leaf in compat.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
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
    return compat.tree_map(
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
    return plan.accumulate * plan.replicas / plan.seconds_per_step if plan.seconds_per_step else 0.0


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
    if plan.stage and placement.placements_of(plan.stage).parameters.is_sharded and plan.offload != "none":
        return "Use more ranks, or wrap smaller units."
    return "Use stage 3 (--stage 3), more ranks, or offload (--offload cpu)."
