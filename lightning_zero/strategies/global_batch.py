"""Keep the global batch size, in samples, when a job continues on a different number of ranks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

GLOBAL_BATCH = "global_batch"  # entry of a checkpoint


def global_batch(trainer: Any) -> dict[str, Any]:
    """Return the size of an optimizer step's batch, for ``keep_global_batch`` to compare.

    Returns:
        ``accumulate``, the number of micro-batches per rank; ``ranks``; and ``samples`` for each training loader, over
        all ranks (counted in micro-batches if the loader has no ``batch_size``).
    """
    accumulate, ranks = trainer.accumulate_grad_batches, trainer.world_size
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", ())
    return {
        "accumulate": accumulate,
        "ranks": ranks,
        "samples": [accumulate * ranks * (getattr(each, "batch_size", None) or 1) for each in loaders],
    }


def keep_global_batch(trainer: Any, before: dict[str, Any]) -> None:
    """Set the number of accumulated micro-batches so that a step takes as many samples as before. Collective.

    Args:
        trainer: a trainer whose data is not set up yet.
        before: the result of ``global_batch`` with the previous number of ranks.

    Raises:
        ValueError: if no whole number of micro-batches achieves this.
    """
    is_as_before = before["accumulate"] == trainer.accumulate_grad_batches or not _can_accumulate(trainer)
    if before["ranks"] == trainer.world_size and is_as_before:
        return
    trainer.fit_loop.setup_data()
    now = global_batch(trainer)
    trainer.fit_loop._combined_loader = None  # set up again when the fit begins, at the loaded position
    if len(now["samples"]) != len(before["samples"]):
        return  # the state was kept before data was set up
    ratios = {Fraction(old, new) for old, new in zip(before["samples"], now["samples"])}
    accumulate = now["accumulate"] * max(ratios, default=Fraction(1))
    if len(ratios) > 1 or accumulate.denominator > 1 or (ratios != {1} and not _can_accumulate(trainer)):
        raise ValueError(
            f"This job ran on {before['ranks']} ranks with {before['samples'][0]} samples a step, and cannot take as "
            f"many on {now['ranks']} ranks: accumulate_grad_batches would become {accumulate}. Start it with a number "
            f"of ranks, a batch size and accumulate_grad_batches whose product is {before['samples'][0]}. In manual "
            "optimization, or with an accumulation schedule, the script itself must ensure this."
        )
    trainer.accumulate_grad_batches = int(accumulate)
    rank_zero_info(
        f"This job ran on {before['ranks']} ranks and continues on {now['ranks']}. Each step takes as many "
        f"samples as before, with accumulate_grad_batches={trainer.accumulate_grad_batches}."
    )


def _can_accumulate(trainer: Any) -> bool:
    has_schedule = any(type(each).__name__ == "GradientAccumulationScheduler" for each in trainer.callbacks)
    return trainer.lightning_module.automatic_optimization and not has_schedule
