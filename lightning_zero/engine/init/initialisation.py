"""Find the initialisers to call for a module on the meta device, and values that these initialisers would not restore.

On the meta device an operator that writes to an ordinary tensor leaves only a higher version counter. Initialisers run
once on stand-ins on the meta device, before anything is changed, to compare the counters.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.init.sources import Source
from lightning_zero.engine.tensor.identity import attributes_of_users
from lightning_zero.engine.tensor.initialisers import APPLIED, OF_ADAPTERS, OWN, label, takes
from lightning_zero.io.names import listed

Call = Callable[[], Any]


class Initialisation:
    """The initialisers of each module that has new tensors, in the order of ordinary construction.

    Attributes:
        calls: by the module's id.

    Raises:
        ValueError: if a new tensor has no initialiser, or has been written to by code that initialisers do not repeat.
    """

    def __init__(self, module: nn.Module, sources: dict[str, Source]) -> None:
        self.calls: dict[int, list[Call]] = {}
        self._sources = sources
        self._names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        self._repeated: Counter[str] = Counter()  # writes by initialisers, by tensor
        self._unknown: set[str] = set()  # tensors of modules whose initialisers cannot run on the meta device
        self._owned: set[str] = set()  # tensors of the modules visited so far
        self._lacking: dict[str, str] = {}  # new tensors without an initialiser, and the classes of their modules
        self._classes_that_call: dict[type, bool] = {}
        if not any(source.is_new for source in sources.values()):
            return
        # TorchScript's tensors cannot be replaced by stand-ins
        is_scripted = any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules())
        self._compares = any(source.version for source in sources.values()) and not is_scripted
        if self._compares:
            with self._stand_ins(module), torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"):
                self._visit(module, [], set())
        else:
            self._visit(module, [], set())
        self._check_all_have_initialisers()
        self._check_nothing_is_lost()

    def _check_all_have_initialisers(self) -> None:
        lacking = {name: self._lacking[name] for name in self._sources if name in self._lacking}
        if lacking:
            raise ValueError(
                f"{listed(lacking)}: on the meta device without values, and there is no reset_parameters() in "
                f"{listed(dict.fromkeys(lacking.values()))}. Define it, without arguments, to initialise the module's "
                "own parameters and buffers in place; or load the values in configure_model "
                "(lightning_zero.load_weights); or construct the module outside of torch.device('meta')."
            )

    def _check_nothing_is_lost(self) -> None:
        lost = [
            name
            for name, source in self._sources.items()
            if source.version > self._repeated[name] and name not in self._unknown
        ]
        if lost and self._compares:
            raise ValueError(
                f"{listed(lost)}: written to on the meta device by code other than reset_parameters() and "
                "_init_weights(), which alone are repeated when the module receives its values. Create the module "
                "within configure_model() or init_module(), which record what is written to parameters, or outside of "
                "torch.device('meta'); initialise buffers in reset_parameters()."
            )

    @contextmanager
    def _stand_ins(self, module: nn.Module) -> Iterator[None]:
        """Context in which tensors on the meta device replace all parameters and buffers."""
        stand_ins: dict[int, Tensor] = {}
        with _tensors_kept(module) as places:
            for holder, tensors in places:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        stand_in = stand_ins.setdefault(id(tensor), on_meta(tensor))
                        self._names[id(stand_in)] = self._names[id(tensor)]
                        holder[name] = stand_in
            yield

    def _visit(self, module: nn.Module, ancestors: list[nn.Module], seen: set[int]) -> None:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen:
                self._visit(child, [*ancestors, module], seen)
        new = [name for name in self._names_in(module) if self._sources[name].is_new]
        if new:
            own, of_adapters = _own(module), _of_adapters(module, ancestors)
            self._count(own + of_adapters, module)
            self.calls[id(module)] = own + self._applied(module, ancestors, new) + of_adapters
        own_names = [name for name in self._names_in(module, recurse=False) if name not in self._owned]
        self._owned.update(own_names)
        new = [name for name in own_names if self._sources[name].is_new]
        if new and not any(map(_has_initialiser, (module, *ancestors))):
            self._lacking |= dict.fromkeys(new, type(module).__name__)

    def _names_in(self, module: nn.Module, recurse: bool = True) -> list[str]:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        return [self._names[id(tensor)] for tensor in tensors]

    def _count(self, calls: list[Call], module: nn.Module) -> None:
        """Count the writes of a module's own initialisers, as in its constructor."""
        # Tied tensors have replaced those that the module's constructor initialised.
        tied = self._owned.intersection(self._names_in(module, recurse=False))
        times = _times_in_constructor(module, OWN)
        for call in calls:
            for name, count in self._writes_of(call, module).items():
                self._repeated[name] += 0 if name in tied else count * times

    def _applied(self, module: nn.Module, ancestors: list[nn.Module], new: list[str]) -> list[Call]:
        """The methods that models have applied to the module (``self.apply(self._init_weights)``), innermost first."""
        own = [name for name in self._names_in(module, recurse=False) if name in new]
        recorded = {label for name in own or new for label in self._sources[name].initialised_by}
        calls: list[Call] = []
        for model in (module, *reversed(ancestors)):
            method = getattr(model, APPLIED, None)
            if not takes(method, 1):
                continue
            call = partial(method, module)
            writes = self._writes_of(call, module)
            counted = {name: count for name, count in writes.items() if self._sources[name].version}
            has_run = bool(counted) and self._has_versions(counted)
            if recorded:
                has_run |= label(APPLIED, model) in recorded
            elif counted and not any(map(self._calls_applied, (module, *ancestors))):
                has_run = False
            else:
                has_run |= not calls  # even with lower version counters, as copies of modules have them
            if has_run:
                calls.append(call)
                times = _times_in_constructor(model, (APPLIED,))
                self._repeated.update({name: count * times for name, count in writes.items()})
        return calls

    def _has_versions(self, further: dict[str, int]) -> bool:
        """Whether version counters are high enough for further writes."""
        return all(self._repeated[name] + count <= self._sources[name].version for name, count in further.items())

    def _calls_applied(self, model: nn.Module) -> bool:
        """Whether any code of a model's class, outside of ``_init_weights`` itself, mentions that method."""
        cls = type(model)
        if cls not in self._classes_that_call:
            functions = (value for base in cls.__mro__ for name, value in vars(base).items() if name != APPLIED)
            self._classes_that_call[cls] = any(_mentions(function, (APPLIED,)) for function in functions)
        return self._classes_that_call[cls]

    def _writes_of(self, call: Call, module: nn.Module) -> dict[str, int]:
        """Run an initialiser on the stand-ins, and return the number of writes to each; nothing without stand-ins."""
        writes: dict[str, int] = {}
        if not self._compares:
            return writes
        with _tensors_kept(module) as places:
            versions = {id(t): t._version for _, tensors in places for t in tensors.values() if t is not None}
            try:
                call()
            except Exception:  # the code may need values, such as those of a file, or of a tensor
                self._unknown.update(self._names_in(module))
                return writes
            for holder, tensors in places:
                for name, tensor in tensors.items():
                    if tensor is not None and (now := holder.get(name)) is not None:
                        before = versions[id(tensor)] if now is tensor else 0
                        if now._version > before:
                            writes[self._names[id(tensor)]] = now._version - before
        return writes


def _own(module: nn.Module) -> list[Call]:
    """``reset_parameters``, or ``_reset_parameters`` in torch's attention and transformer modules."""
    methods = [getattr(module, name, None) for name in OWN]
    return [method for method in methods if takes(method, 0)][:1]


def _of_adapters(module: nn.Module, ancestors: list[nn.Module]) -> list[Call]:
    """PEFT's ``reset_lora_parameters``, once per adapter."""
    reset: Any = getattr(module, OF_ADAPTERS, None)
    if not callable(reset):
        return []
    configs: Any = next((m.peft_config for m in reversed(ancestors) if hasattr(m, "peft_config")), {})
    adapters = (*module.lora_A, *module.lora_embedding_A)  # type: ignore[misc]
    return [partial(reset, name, getattr(configs.get(name), "init_lora_weights", True)) for name in adapters]


def _has_initialiser(module: nn.Module) -> bool:
    """Whether a module initialises tensors, of its own or of modules in it."""
    return bool(_own(module)) or hasattr(module, OF_ADAPTERS) or takes(getattr(module, APPLIED, None), 1)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor or parameter on the meta device with the same shape, dtype and attributes."""
    return like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """A parameter with other values if ``tensor`` is a parameter, with its attributes; otherwise the values."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
        values.__dict__.update(attributes_of_users(tensor))
    return values


@contextmanager
def _tensors_kept(module: nn.Module) -> Iterator[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Context after which modules have their present parameters and buffers again: pairs of a dict and its copy."""
    holders: list[dict[str, Any]] = [
        holder for inner in module.modules() for holder in (inner._parameters, inner._buffers)
    ]
    places = [(holder, dict(holder)) for holder in holders]
    try:
        yield places
    finally:
        for holder, tensors in places:
            holder.clear()
            holder.update(tensors)


def _times_in_constructor(module: nn.Module, names: Sequence[str]) -> int:
    """How often a constructor may call a method: that of a subclass may do so after that of the base class."""
    return max(1, sum(_mentions(vars(base).get("__init__"), names) for base in type(module).__mro__))


def _mentions(function: Any, names: Sequence[str]) -> bool:
    """Whether the code of a function, including functions inside it, has one of the names."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        if isinstance(code, CodeType):
            if not set(names).isdisjoint(code.co_names):
                return True
            codes += code.co_consts
    return False
