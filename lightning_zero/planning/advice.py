"""Plans of a training run for combinations of stage, offload, micro-batch and other options, and advice on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_zero.engine import compat
from lightning_zero.io.text import in_gb
from lightning_zero.planning.fake_run import FakeRun, fake_run
from lightning_zero.planning.timeline import Resources, replay

ROOM = 0.9
"""Fraction of a device's memory that a plan may use; fragmentation and the communication library take the rest."""

Options = Mapping[str, Any]
"""Options of ``ZeroStrategy``."""

OFFLOADS: dict[str, Options] = {
    "none": {},
    "cpu": {"offload": "cpu"},
    # creates no file; the default folder, if in memory, would be refused
    "nvme": {"offload": {"optimizer": "nvme", "path": "."}},
    "activations": {"offload": {"optimizer": None, "activations": "cpu"}},
}

_SUFFIXES = {"cpu": "_offload", "nvme": "_nvme"}

CHECKPOINTING: dict[str, Options] = {
    "off": {},
    "on": {"activation_checkpointing": "units"},
    "partitioned": {"activation_checkpointing": "units", "partition_activations": True},
}


@dataclass(frozen=True, kw_only=True)
class Plan(FakeRun):
    """Memory per rank and time per step under one combination of choices.

    Attributes:
        stage: the ZeRO stage; 0 for DDP.
        options: options of ``ZeroStrategy`` that are choices.
        micro_batch: samples per rank and micro-batch; None if the batch's tensors differ in their first dimension.
        seconds_per_step: an estimate; None if the machine's speed is unknown.
        waiting_seconds: the part of ``seconds_per_step`` in which the device waits for communication or the host.
        samples_per_second: the sum over all ranks; None if ``seconds_per_step`` or ``micro_batch`` is None.
        fits: whether the peak is within 90 % of the device's memory; None if the device's memory is unknown.
    """

    stage: int
    ranks: int
    micro_batch: int | None
    accumulate: int
    seconds_per_step: float | None
    waiting_seconds: float | None
    samples_per_second: float | None
    fits: bool | None
    options: Options = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The plan's strategy and options, such as ``zero3 (shard_within='node')``."""
        return _name(self.stage, self.options)


def _name(stage: int, options: Options) -> str:
    if stage == 0:
        return "DDP"
    shown = {name: value for name, value in options.items() if value is not None}
    suffix = next((_SUFFIXES[name] for name in _SUFFIXES if OFFLOADS[name]["offload"] == shown.get("offload")), "")
    if suffix:
        del shown["offload"]
    text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    return f"zero{stage}{suffix}" + (f" ({text})" if text else "")


def make_plans(
    make_module: Callable[[], LightningModule],
    batch: Any,
    *,
    ranks: int,
    stages: Iterable[int],
    variants: Sequence[Options] = ({},),
    micro_batches: Iterable[int | None] = (None,),
    accumulate: int | Iterable[int] = 1,
    machines: int = 1,
    resources: Resources | None = None,
    memory: float | None = None,
    left_out: list[str] | None = None,
    **settings: Any,
) -> list[Plan]:
    """Plan every possible combination of the choices. DDP (stage 0) is planned without the strategy's options.

    Args:
        variants: choices for options of ``ZeroStrategy``.
        micro_batches: numbers of samples to which the batch is resized; None leaves the batch unchanged.
        accumulate: micro-batches per step; one number, or several choices.
        resources: the machine's speed, without which plans have no times.
        memory: the device's memory in bytes, without which plans do not say whether they fit.
        left_out: receives a sentence for each combination that the strategy refuses.

    Raises:
        ValueError: if the batch cannot be resized, the ranks cannot be split evenly among the machines, or no
            combination is possible.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1.")
    if machines < 1 or ranks % machines:
        raise ValueError(f"machines={machines} must be at least 1 and divide the number of ranks, {ranks}.")
    plans = []
    left_out = [] if left_out is None else left_out
    accumulates = [accumulate] if isinstance(accumulate, int) else accumulate
    for micro_batch, of_step, stage in product(micro_batches, accumulates, stages):
        sized = batch if micro_batch is None else resized(batch, micro_batch)
        settings |= {"ranks": ranks, "machines": machines, "accumulate": of_step, "stage": stage or None}
        for options in variants if stage else ({},):
            try:
                run = fake_run(make_module, sized, **{**options, **settings})
            except ValueError as error:
                left_out.append(f"{_name(stage, options)}: {error}")
            else:
                choice = {"stage": stage, "options": options, "ranks": ranks, "accumulate": of_step}
                plans.append(_plan(run, samples_of(sized), resources, memory, **choice))
    left_out[:] = dict.fromkeys(left_out)  # each sentence once, not for every micro-batch
    if not plans:
        reasons = {sentence.partition(": ")[2] for sentence in left_out}
        raise ValueError(
            f"No combination can be planned. {' '.join(reasons if len(reasons) == 1 < len(left_out) else left_out)}"
        )
    return plans


def _plan(run: FakeRun, samples: int | None, resources: Resources | None, memory: float | None, **choice: Any) -> Plan:
    seconds, waiting = replay(run.events, resources) if resources is not None else (None, None)
    return Plan(
        micro_batch=samples,
        seconds_per_step=seconds,
        waiting_seconds=waiting,
        samples_per_second=samples * run.replicas * choice["accumulate"] / seconds if samples and seconds else None,
        fits=None if memory is None else run.total_bytes <= ROOM * memory,
        **choice,
        **vars(run),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan's fields, except the details of its run; the sum of ``peak_bytes`` is its entry ``"total"``."""
    found = asdict(replace(plan, events=[], peak_bytes={**plan.peak_bytes, "total": plan.total_bytes}))
    return {name: value for name, value in found.items() if name not in ("events", "report_peak")}


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
    rows = torch.arange(samples, device="cpu") % now
    return compat.tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)


def best_of(plans: Iterable[Plan]) -> Plan | None:
    """The fastest plan that fits, of equally fast ones the smallest; None if no plan fits."""
    fitting = [plan for plan in plans if plan.fits is not False]
    return max(fitting, key=lambda plan: (float(f"{_rate(plan):.4g}"), -plan.total_bytes), default=None)


def advise(plans: list[Plan], memory: float | None) -> list[str]:
    """Recommend a plan, in sentences that give the reasons with figures."""
    best = best_of(plans)
    if best is None:
        best = min(plans, key=lambda plan: plan.total_bytes)
        assert memory is not None
        largest = max(best.peak_bytes, key=best.peak_bytes.__getitem__)
        return [
            f"Nothing fits: the smallest plan is {best.name}, which needs {in_gb(best.total_bytes)}; a device "
            f"has {in_gb(ROOM * memory)} of usable memory. The largest category is {largest} "
            f"({in_gb(best.peak_bytes[largest])}). Use smaller micro-batches (--micro-batch), activation checkpointing "
            "(--checkpointing on), stage 3 (--stage 3), bf16 states (--option state_dtype=bf16, with bf16-true also "
            "masters=False), offload (--offload cpu), or more ranks."
        ]
    if best.seconds_per_step is None:
        says = "takes the least memory,"
        if memory is not None:
            best = min((plan for plan in plans if plan.fits), key=lambda plan: (plan.stage, "offload" in plan.options))
            says = "is the lowest stage that fits, with"
        return [
            f"{best.name} {says} {in_gb(best.total_bytes)} a rank.",
            "Times are unknown without the machine's speed: pass --flops, or --resources with a file written by "
            "`lightning-zero doctor --json`.",
        ]
    rate = "" if best.samples_per_second is None else f"{best.samples_per_second:.4g} samples/s, "
    said = [
        f"Take {best.name}{_sizes(best)}: {rate}{best.seconds_per_step:.3g} s a step, "
        f"{in_gb(best.total_bytes)} a rank.",
        *_beside_ddp(best, plans),
    ]
    if best.waiting_seconds and best.waiting_seconds > 0.2 * best.seconds_per_step:
        part = 100 * best.waiting_seconds / best.seconds_per_step
        said.append(
            f"For {part:.0f} % of the step, the device waits for communication or the host: more accumulation, larger "
            "micro-batches or a faster link help more than a higher stage."
        )
    return said


def _beside_ddp(best: Plan, plans: list[Plan]) -> list[str]:
    """A sentence that compares the best plan with DDP, or DDP with the fastest other plan."""
    of_ddp, of_zero = [[plan for plan in plans if bool(plan.stage) is is_zero] for is_zero in (False, True)]
    ddp, rival = best_of(of_ddp), best_of(of_zero)
    if best.stage:
        if ddp is not None:
            at = _sizes(ddp).replace(" with", " at", 1) if ddp.micro_batch is not None else ""
            return [f"That is {_rate(best) / _rate(ddp):.2f} times DDP's rate{at}."]
        needed = min((plan.total_bytes for plan in of_ddp), default=None)
        return [] if needed is None else [f"DDP does not fit: it needs {in_gb(needed)}."]
    if rival is None:
        return []
    saved = best.total_bytes - rival.total_bytes
    less = f"; it would save {in_gb(saved)} a rank" if saved > 0 else ""
    slower = 100 * (1 - _rate(rival) / _rate(best))
    return [f"ZeRO does not help here: its fastest plan, {rival.name}, is {slower:.0f} % slower than DDP{less}."]


def _rate(plan: Plan) -> float:
    """Samples per second; micro-batches per second if their number of samples is unknown; 0 if the time is unknown."""
    if plan.samples_per_second is not None:
        return plan.samples_per_second
    return plan.accumulate * plan.replicas / plan.seconds_per_step if plan.seconds_per_step else 0.0


def _sizes(plan: Plan) -> str:
    """A rank's samples per step, such as `` with 8 samples a rank in each of 4 micro-batches``; "" if unknown."""
    if plan.micro_batch is None:
        return f" with {plan.accumulate} micro-batches a step" if plan.accumulate > 1 else ""
    samples = f" with {plan.micro_batch} sample{'' if plan.micro_batch == 1 else 's'} a rank"
    return samples if plan.accumulate == 1 else f"{samples} in each of {plan.accumulate} micro-batches"
