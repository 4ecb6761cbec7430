"""Which optimizers can update a part of a parameter without the rest."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"}
)
"""The optimizers of ``torch.optim`` that update each element from its own gradient and state alone."""

_WHY_NOT = {
    "LBFGS": "it takes inner products of whole gradients and calls the closure several times",
    "Adafactor": "it factors the second moment over the rows and columns of each matrix",
    "Muon": "it orthogonalises each whole matrix",
    "SparseAdam": "it takes sparse gradients, which cannot be laid in a flat buffer",
}


def check_optimizer(optimizer: Optimizer, allow_any: bool) -> None:
    """Refuse an optimizer that cannot update a part of a parameter without the rest.

    Raises:
        TypeError: if it is not elementwise, or not known to be and ``allow_any`` is not set.
    """
    cls = type(optimizer)
    known = next((base for base in cls.__mro__ if base.__module__.startswith("torch.optim")), Optimizer)
    # torch wraps the method of every class that is instantiated: whose it is shows beneath
    inherits_step = inspect.unwrap(cls.step).__module__.startswith("torch.optim")
    if known.__name__ in ELEMENTWISE and inherits_step:
        return
    if known.__name__ in _WHY_NOT:
        raise TypeError(
            f"{cls.__name__} cannot be used with ZeRO: {_WHY_NOT[known.__name__]}, while each rank holds only a part "
            f"of every parameter. Use an elementwise optimizer ({', '.join(sorted(ELEMENTWISE))}) or strategy='ddp'."
        )
    if not allow_any:
        raise TypeError(
            f"{cls.__name__} is not known to be elementwise, that is, to update each element from its own gradient and "
            "state alone; each rank holds only a part of every parameter. If you know that it is, pass "
            "ZeroStrategy(allow_any_optimizer=True); otherwise use one of "
            f"{', '.join(sorted(ELEMENTWISE))} or strategy='ddp'."
        )
