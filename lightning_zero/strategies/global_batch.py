"""Keep the global batch size, in samples, when a job continues on a different number of ranks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

GLOBAL_BATCH = "global_batch"  # key in a checkpoint


def global_batch(trainer: Any) -> dict[str, Any]:
    """Return the numbers that determine the global batch size of a step, for ``keep_global_batch``.

    Returns:
        A dict: ``accumulate``, the number of micro-batches per rank; ``ranks``, the number of ranks; and ``samples``, a
        list with the samples per step from each training loader (micro-batches if the loader has no ``batch_size``).
    """
    accumulate, ranks = trainer.accumulate_grad_batches, trainer.world_size
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", ())
    return {
        "accumulate": accumulate,
        "ranks": ranks,
        "samples": [accumulate * ranks * (getattr(each, "batch_size", None) or 1) for each in loaders],
    }


def keep_global_batch(trainer: Any, before: dict[str, Any]) -> Fraction:
    """Set ``accumulate_grad_batches`` so that each step takes as many samples as before the restart. Collective.

    Args:
        trainer: the trainer, before its data is set up.
        before: the result of ``global_batch`` before the restart.

    Returns:
        The number of this rank's batches that correspond to one batch of a rank before the restart.

    Raises:
        ValueError: if the required ``accumulate_grad_batches`` is not a whole number, or cannot be set.
    """
    may_set = _can_accumulate(trainer)
    # A schedule sets the number again when the epoch begins.
    own = trainer.accumulate_grad_batches if may_set else before["accumulate"]
    if before["ranks"] == trainer.world_size and before["accumulate"] == own:
        return Fraction(1)
    trainer.fit_loop.setup_data()
    now = global_batch(trainer)
    trainer.fit_loop._combined_loader = None  # the fit sets the loaders up again, at the loaded position
    if len(now["samples"]) != len(before["samples"]):
        return Fraction(1)  # ``before`` was recorded before the data was set up
    ratios = {
        Fraction(old * now["accumulate"], new * own) for old, new in zip(before["samples"], now["samples"], strict=True)
    }
    accumulate = own * max(ratios, default=Fraction(1))
    change = f"The number of ranks was {before['ranks']} before the restart and is {now['ranks']} now."
    if before["ranks"] == now["ranks"]:  # an earlier restart has changed ``accumulate_grad_batches``
        change = f"accumulate_grad_batches was {before['accumulate']} before the restart and is {own} now."
    if len(ratios) > 1 or accumulate.denominator > 1 or (ratios != {1} and not may_set):
        raise ValueError(
            f"{change} To keep the samples per step, accumulate_grad_batches would have to be {accumulate}, which "
            "cannot be set. Choose the number of ranks, the batch size and accumulate_grad_batches so that their "
            f"product is {before['samples'][0]}. In manual optimization, or with an accumulation schedule, the script "
            "itself must keep this product."
        )
    if may_set:
        trainer.accumulate_grad_batches = int(accumulate)
        rank_zero_info(
            f"{change} Each step takes as many samples as before the restart, with "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}."
        )
    return accumulate / before["accumulate"]


def _can_accumulate(trainer: Any) -> bool:
    # by name, since projects use ``lightning.pytorch`` or ``pytorch_lightning``
    classes = {cls.__name__ for each in trainer.callbacks for cls in type(each).__mro__}
    return trainer.lightning_module.automatic_optimization and "GradientAccumulationScheduler" not in classes
