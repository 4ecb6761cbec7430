"""Which optimizers can be used, and which parameters each needs as a whole, by a table of their classes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.compat import without_hooks
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.plan.share import Share


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
        found = _TABLE.get((cls.__module__.partition(".")[0], _VARIANT.sub("", cls.__name__)))
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
TORCHS_ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()

_FACTORED = "it factors the second moment over the rows and columns of each matrix"
_LAYER_NORM = "it scales the update by the norm of each parameter"
_BLOCKS = "it quantises its state in blocks from the parameter's start, and keeps small parameters' states in fp32"

# Rows of (package, need, why the optimizer needs more than single elements, classes).
_NEEDS: tuple[tuple[str, Need, str, str], ...] = (
    ("torch", Need.ELEMENT, "", " ".join(TORCHS_ELEMENTWISE)),
    ("torch", Need.PARAMETER, "it orthogonalises each whole matrix", "Muon"),
    ("torch", Need.PARAMETER, _FACTORED, "Adafactor"),
    ("torch", Need.MODEL, "it takes inner products of whole gradients and calls the closure several times", "LBFGS"),
    ("torch", Need.MODEL, "it requires sparse gradients, which cannot be laid out in a flat buffer", "SparseAdam"),
    ("transformers", Need.PARAMETER, _FACTORED, "Adafactor"),
    ("pytorch_optimizer", Need.ELEMENT, "", "Lion ScheduleFreeAdamW ScheduleFreeSGD ScheduleFreeRAdam"),
    (
        "pytorch_optimizer",
        Need.PARAMETER,
        "it computes with each whole matrix",
        "SOAP Shampoo ScalableShampoo Muon AdaMuon NorMuon",
    ),
    ("pytorch_optimizer", Need.PARAMETER, _FACTORED, "AdaFactor CAME"),
    ("pytorch_optimizer", Need.PARAMETER, _LAYER_NORM, "Lamb LARS"),
    (
        "pytorch_optimizer",
        Need.MODEL,
        "it computes the step size from all parameters together",
        "Prodigy DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD AliG AdamG SGDSaI",
    ),
    (
        "pytorch_optimizer",
        Need.MODEL,
        "it moves all parameters along the gradient, and computes the gradient again at the new point",
        "SAM GSAM WSAM BSAM LookSAM FriendlySAM",
    ),
    (
        "pytorch_optimizer",
        Need.MODEL,
        "it distributes matrices over the ranks itself (use Muon, for which ZeRO does this)",
        "DistributedMuon",
    ),
    ("pytorch_optimizer", Need.MODEL, "it updates parameters within backward", "LOMO AdaLOMO"),
    ("torchao", Need.PARAMETER, _BLOCKS, "Adam AdamW"),
    ("torchao", Need.MODEL, "it offloads states itself (write offload='cpu' instead)", "CPUOffloadOptimizer"),
    ("bitsandbytes", Need.PARAMETER, _BLOCKS, "Adam AdamW Adagrad AdEMAMix Lion RMSprop SGD"),
    ("bitsandbytes", Need.PARAMETER, _LAYER_NORM, "LAMB LARS PytorchLARS"),
)
_TABLE = {(package, name): (need, why) for package, need, why, names in _NEEDS for name in names.split()}
_VARIANT = re.compile("^Paged|(4bit|8bit|32bit|Fp8)$")
"""What names of classes have besides those in the table, as in ``PagedAdamW8bit``."""

_OPTIONS: dict[str, tuple[Need, str]] = {
    "use_gc": (Need.PARAMETER, "use_gc subtracts the mean of each gradient"),
    "adanorm": (Need.PARAMETER, "adanorm uses the norm of each gradient"),
    "cautious": (Need.PARAMETER, "cautious divides the update by the mean of a mask over each parameter"),
    "pre_norm": (Need.MODEL, "pre_norm divides each gradient by the norm of all gradients"),
}
"""Options of optimizers or param groups that require more than ``_NEEDS`` lists for the optimizer's class."""


def check_optimizers(optimizers: Iterable[Optimizer], config: EngineConfig, *, ranks: int) -> None:
    """Raise a TypeError for optimizers that would give different results with sharding than without.

    Args:
        ranks: the number of ranks that shard parameters. A single rank has whole parameters, so its optimizers are
            checked only if it offloads states.

    Raises:
        TypeError: if an optimizer needs other parameters to update one, if its class is unknown and
            ``whole_parameters`` is unset, or if its states cannot be sharded, offloaded or rounded.
    """
    for kind in map(type, optimizers := list(optimizers)):
        if isinstance(state := getattr(kind, "state", None), property) and state.fset is None:
            raise TypeError(
                f"{kind.__name__} shows the state of an optimizer that it wraps, and cannot be used with ZeRO. Use the "
                "wrapped optimizer itself, and change gradients in on_before_optimizer_step(), or use strategy='ddp'."
            )
    if ranks > 1 or config.offloads_optimizer or config.rounding_options is not None:
        for optimizer in optimizers:
            _check(optimizer, config, ranks)


def _check(optimizer: Optimizer, config: EngineConfig, ranks: int) -> None:
    name, known, declared = type(optimizer).__name__, _known(optimizer), config.whole_parameters
    instead = "use strategy='ddp'" if ranks > 1 else f"leave {config.rounding_options or 'offload'} out"
    base = known or known_class(optimizer)
    if base is not None and base.need is Need.MODEL:
        raise TypeError(
            f"{name} cannot be used with ZeRO: {base.why}. With ZeRO, each rank updates only its own part of the "
            f"parameters: use an optimizer that updates each parameter independently, or {instead}."
        )
    if known is None and declared is None:
        raise TypeError(
            f"{name} is not known to be elementwise, that is, to update each element from its own gradient and state "
            "alone. If it is elementwise, pass ZeroStrategy(whole_parameters=False). If it updates each parameter from "
            "that parameter's gradient and state alone, pass ZeroStrategy(whole_parameters=True): each parameter is "
            f"then updated by one rank. Otherwise {instead}."
        )
    if config.rounding_options is not None and _rule(known, declared) is not False:
        raise TypeError(
            f"{name} cannot be used with {config.rounding_options}: it needs whole parameters"
            f"{f' ({known.why})' if known is not None else ''}. Use an elementwise optimizer "
            f"({', '.join(sorted(TORCHS_ELEMENTWISE))}), or leave {config.rounding_options} out."
        )
    if _has_overrides(optimizer):
        raise TypeError(
            f"{name} has overrides in bitsandbytes' GlobalOptimManager for some parameters. Overrides are looked up "
            "by a tensor's identity or position, but shards are different tensors. Give these parameters to a separate "
            f"optimizer, such as {name.removesuffix('8bit').removesuffix('32bit')}32bit, or {instead}."
        )
    if config.offloads_optimizer and getattr(optimizer, "is_paged", False):
        raise TypeError(
            f"{name} keeps its states in CUDA unified memory, which cannot be offloaded: leave offload "
            f"out, or use {name.removeprefix('Paged')} with is_paged=False."
        )


def warn_of_unknown(optimizer: Optimizer, config: EngineConfig) -> None:
    """Warn that the user's statement about an optimizer of an unknown class is not checked."""
    if _known(optimizer) is None:
        part = "parameter" if config.whole_parameters else "element"
        warnings.warn(
            f"{type(optimizer).__name__} is used with whole_parameters={config.whole_parameters!r}, which is not "
            f"checked: if its update of one {part} depends on another one, training silently differs from DDP's. "
            "Compare a short run with DDP, for example by lightning-zero parity.",
            stacklevel=2,
        )


def _has_overrides(optimizer: Optimizer) -> bool:
    """Whether bitsandbytes overrides the optimizer's options for individual parameters."""
    manager: Any = getattr(optimizer, "mng", None)
    if type(manager).__name__ != "GlobalOptimManager":
        return False
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    in_modules = {id(getattr(module, name)) for module, name, _ in manager.module_weight_config_triple}
    return bool(manager.index2config) or not ids.isdisjoint({*manager.pid2config, *in_modules})


def _known(optimizer: Optimizer) -> Known | None:
    """The table's entry for an optimizer; None if it has a ``step`` of its own."""
    known = known_class(optimizer)
    return known if known is not None and _inherits_step(optimizer, known.cls) else None


def _rule(known: Known | None, declared: Any) -> Any:
    """Whether an optimizer needs whole parameters, or the user's predicate of (name, parameter) that says so."""
    return declared if known is None else known.need is Need.PARAMETER


def kept_whole(optimizers: Iterable[Optimizer], config: EngineConfig, *, ranks: int) -> Callable[[str, Tensor], bool]:
    """Make a predicate of (name, parameter): whether one rank has to own the parameter as a whole."""
    rules: dict[int, Any] = {}
    if ranks > 1 or config.offloads_optimizer:
        for optimizer in optimizers:
            rule = _rule(_known(optimizer), config.whole_parameters)
            rules |= {id(p): rule for group in optimizer.param_groups for p in group["params"]}

    def is_kept_whole(name: str, parameter: Tensor) -> bool:
        rule = rules.get(id(parameter), False)
        return bool(rule(name, parameter) if callable(rule) else rule)

    return is_kept_whole


def check_not_divided(
    optimizers: Iterable[Optimizer], config: EngineConfig, parameters: Iterable[tuple[str, Tensor, Share]]
) -> None:
    """Raise a TypeError if tensor parallelism divides a parameter that an optimizer needs as a whole.

    Args:
        parameters: the module's parameters, each with its name and share.
    """
    parameters = [each for each in parameters if each[-1].is_divided]
    is_kept_whole = kept_whole(optimizers if parameters else (), config, ranks=2)
    for name, parameter, share in parameters:
        if is_kept_whole(name, parameter):
            raise TypeError(
                f"The optimizer of '{name}' needs the whole parameter, but tensor parallelism gives each of "
                f"{share.count} ranks only a part. Give such parameters to an elementwise optimizer "
                f"({', '.join(sorted(TORCHS_ELEMENTWISE))}), or leave them out of the tensor-parallel plan."
            )


def is_torchs_elementwise(cls: type) -> bool:
    """Whether a class is one of torch's own elementwise optimizers."""
    return cls.__name__ in TORCHS_ELEMENTWISE and cls.__module__.partition(".")[0] == "torch"


def _inherits_step(optimizer: Optimizer, known: type) -> bool:
    """Whether an optimizer's ``step`` is that of a listed base class, which may have been wrapped, by a mock, say."""
    classes = type(optimizer).__mro__
    # ``without_hooks``, since torch wraps ``step`` in the classes that are instantiated, even if it is inherited
    steps = [without_hooks(vars(cls)["step"]) for cls in classes[: classes.index(known) + 1] if "step" in vars(cls)]
    return all(step is steps[0] for step in steps)
