"""A table of optimizer classes by what an update depends on: a single element, a whole parameter, or the model."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch.optim import Optimizer


class Need(Enum):
    """The data that an optimizer requires to update one element of a parameter exactly as without sharding."""

    ELEMENT = "the element's own gradient and state"
    PARAMETER = "the whole parameter"
    MODEL = "other parameters, too"


class Known(NamedTuple):
    """An optimizer class's entry in the table.

    Attributes:
        cls: the listed class, which is the optimizer's class or a base class of it.
        need: the data that the optimizer requires, given its class and options.
        why: why the optimizer needs more than single elements; empty if it does not.
    """

    cls: type
    need: Need
    why: str = ""


def known_class(optimizer: Optimizer) -> Known | None:
    """The table's entry for an optimizer's class, or for its nearest listed base class; None if there is no entry."""
    for cls in type(optimizer).__mro__:
        found = _TABLE.get((cls.__module__.partition(".")[0], cls.__name__))
        if found is None:
            continue
        need, why = found
        for option, (more, reason) in _OPTIONS.items():
            values = [getattr(optimizer, option, None), *(group.get(option) for group in optimizer.param_groups)]
            if any(values) and _ORDER.index(more) > _ORDER.index(need):
                need, why = more, reason
        return Known(cls, need, why)
    return None


_ORDER = list(Need)

# Separate from the table, since error messages list these optimizers.
TORCHS_ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)

_MATRIX = "it computes with each whole matrix"
_FACTORED = "it factors the second moment over the rows and columns of each matrix"
_LAYER_NORM = "it scales the update by the norm of each parameter"
_BLOCKS = "it quantises its state in blocks from the parameter's start, and keeps small parameters' states in fp32"
_GLOBAL = "it computes the step size from all parameters together"
_TWO_STEPS = "it moves all parameters along the gradient, and computes the gradient again at the new point"

_NEEDS: dict[str, dict[Need, dict[str, tuple[str, ...]]]] = {
    "torch": {
        Need.ELEMENT: {"": TORCHS_ELEMENTWISE},
        Need.PARAMETER: {
            "it orthogonalises each whole matrix": ("Muon",),
            _FACTORED: ("Adafactor",),
        },
        Need.MODEL: {
            "it takes inner products of whole gradients and calls the closure several times": ("LBFGS",),
            "it requires sparse gradients, which cannot be laid out in a flat buffer": ("SparseAdam",),
        },
    },
    "transformers": {Need.PARAMETER: {_FACTORED: ("Adafactor",)}},
    "pytorch_optimizer": {
        Need.ELEMENT: {"": ("Lion", "ScheduleFreeAdamW", "ScheduleFreeSGD", "ScheduleFreeRAdam")},
        Need.PARAMETER: {
            _MATRIX: ("SOAP", "Shampoo", "ScalableShampoo", "Muon", "AdaMuon", "NorMuon"),
            _FACTORED: ("AdaFactor", "CAME"),
            _LAYER_NORM: ("Lamb", "LARS"),
        },
        Need.MODEL: {
            _GLOBAL: (
                *("Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
                *("AliG", "AdamG", "SGDSaI"),
            ),
            _TWO_STEPS: ("SAM", "GSAM", "WSAM", "BSAM", "LookSAM", "FriendlySAM"),
            "it distributes matrices over the ranks itself (use Muon, for which ZeRO does this)": ("DistributedMuon",),
            "it updates parameters within backward": ("LOMO", "AdaLOMO"),
        },
    },
    "torchao": {
        Need.PARAMETER: {_BLOCKS: ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")},
        Need.MODEL: {"it offloads states itself (write offload='cpu' instead)": ("CPUOffloadOptimizer",)},
    },
    "bitsandbytes": {
        Need.PARAMETER: {
            _BLOCKS: (
                *("Adam", "AdamW", "Adagrad", "AdEMAMix", "Lion", "RMSprop", "SGD"),
                *("Adam8bit", "AdamW8bit", "Adagrad8bit", "AdEMAMix8bit", "Lion8bit", "RMSprop8bit", "SGD8bit"),
                *("Adam32bit", "AdamW32bit", "Adagrad32bit", "AdEMAMix32bit", "Lion32bit", "RMSprop32bit", "SGD32bit"),
                *("PagedAdam", "PagedAdam8bit", "PagedAdam32bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit"),
                *("PagedAdEMAMix", "PagedAdEMAMix8bit", "PagedAdEMAMix32bit"),
                *("PagedLion", "PagedLion8bit", "PagedLion32bit"),
            ),
            _LAYER_NORM: ("LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS"),
        },
    },
}

_TABLE: dict[tuple[str, str], tuple[Need, str]] = {
    (package, name): (need, why)
    for package, needs in _NEEDS.items()
    for need, reasons in needs.items()
    for why, names in reasons.items()
    for name in names
}

_OPTIONS: dict[str, tuple[Need, str]] = {
    "use_gc": (Need.PARAMETER, "use_gc subtracts the mean of each gradient"),
    "adanorm": (Need.PARAMETER, "adanorm uses the norm of each gradient"),
    "cautious": (Need.PARAMETER, "cautious divides the update by the mean of a mask over each parameter"),
    "pre_norm": (Need.MODEL, "pre_norm divides each gradient by the norm of all gradients"),
}
"""Options of optimizers or param groups that require more than ``_NEEDS`` lists for the optimizer's class."""
