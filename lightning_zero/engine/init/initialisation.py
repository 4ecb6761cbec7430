"""Find the initialisers to call for a module on the meta device, and values that these initialisers would not restore.

Lazy tensors record the operators that write to them. Of an ordinary tensor on the meta device, a write leaves only a
higher version counter, so initialisers run once on stand-ins, before anything is changed, to compare the counters.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.init.sources import Source
from lightning_zero.engine.tensor.identity import with_attributes
from lightning_zero.engine.tensor.initialisers import APPLIED, OF_ADAPTERS, OWN, label, takes
from lightning_zero.io.names import listed

Call = Callable[[], Any]


def initialisers_of(module: nn.Module, sources: dict[str, Source]) -> dict[int, list[Call]]:
    """The initialisers of each module that has new tensors, in the order of ordinary construction, by the module's id.

    Raises:
        ValueError: if a new tensor has no initialiser, or has been written to by code that initialisers do not repeat.
    """
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    trial = _Trial(module, sources, names)
    calls: dict[int, list[Call]] = {}
    owner_of: dict[str, str] = {}  # the class of the first module that holds the tensor
    lacking: set[str] = set()
    with trial.stand_ins():
        for inner, ancestors in inside_out(module):
            new = {name for tensor in _tensors(inner) if sources[name := names[id(tensor)]].is_new}
            own = {name for tensor in _tensors(inner, recurse=False) if (name := names[id(tensor)]) in new}
            if new:
                methods, of_adapters = _own(inner), _of_adapters(inner, ancestors)
                # Tied tensors have replaced those that the module's constructor initialised.
                trial.count(methods + of_adapters, inner, tied=owner_of.keys() & own)
                recorded = {label for name in own or new for label in sources[name].initialised_by}
                calls[id(inner)] = methods + trial.applied(inner, ancestors, recorded) + of_adapters
            if not any(map(_has_initialiser, (inner, *ancestors))):
                lacking |= own - owner_of.keys()
            for name in own:
                owner_of.setdefault(name, type(inner).__name__)
    if lacking:
        lacking_in_order = [name for name in sources if name in lacking]
        raise ValueError(
            f"{listed(lacking_in_order)}: on the meta device without values, and there is no reset_parameters() in "
            f"{listed(dict.fromkeys(owner_of[name] for name in lacking_in_order))}. Define it, without arguments, to "
            "initialise the module's own parameters and buffers in place; or load the values in configure_model "
            "(lightning_zero.load_weights); or construct the module outside of torch.device('meta')."
        )
    trial.check_nothing_is_lost()
    return calls


class _Trial:
    """Runs initialisers on stand-ins, to count their writes to tensors on which nothing has recorded writes.

    Args:
        names: of all parameters and buffers, by the tensor's id. Those of the stand-ins are added.
    """

    def __init__(self, module: nn.Module, sources: dict[str, Source], names: dict[int, str]) -> None:
        self._module, self._names = module, names
        # TorchScript's tensors cannot be replaced by stand-ins
        is_scripted = any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules())
        versions = {name: source.version for name, source in sources.items() if source.version}
        self._versions = {} if is_scripted else versions
        self._repeated: Counter[str] = Counter()  # writes that initialisers will repeat, by tensor
        self._unknown: set[str] = set()  # tensors of modules whose initialisers cannot run on the meta device

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Context in which, if counters are compared, tensors on the meta device replace all parameters and buffers."""
        if not self._versions:
            yield
            return
        stand_ins: dict[int, Tensor] = {}
        with (
            _tensors_kept(self._module) as places,
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.device("meta"),
        ):
            for holder, name, tensor in places:
                holder[name] = stand_ins.setdefault(id(tensor), on_meta(tensor))
                self._names[id(holder[name])] = self._names[id(tensor)]
            yield

    def count(self, calls: Sequence[Call], module: nn.Module, *, tied: Collection[str]) -> None:
        """Count the writes of a module's own initialisers, as in its constructor, without those to tied tensors."""
        for call in calls:
            writes = self._writes_of(call, module)
            self._add({name: writes[name] for name in writes.keys() - tied}, module, OWN)

    def applied(self, module: nn.Module, ancestors: Sequence[nn.Module], recorded: set[str]) -> list[Call]:
        """The methods that models have applied to the module (``self.apply(self._init_weights)``), innermost first.

        Args:
            recorded: the initialisers that lazy tensors of the module have recorded.
        """
        calls: list[Call] = []
        kinds: list[Any] = [type(model) for model in (module, *ancestors)]
        for model in (module, *reversed(ancestors)):
            method = getattr(model, APPLIED, None)
            if not takes(method, 1):
                continue
            call = partial(method, module)
            writes = self._writes_of(call, module)
            has_run = bool(writes) and all(
                self._repeated[name] + writes[name] <= self._versions[name] for name in writes
            )
            if recorded:
                has_run |= label(APPLIED, model) in recorded
            elif writes and not any(map(_applies, kinds)):
                has_run = False
            else:
                has_run |= not calls  # even with lower version counters, as copies of modules have them
            if has_run:
                calls.append(call)
                self._add(writes, model, (APPLIED,))
        return calls

    def check_nothing_is_lost(self) -> None:
        lost = [
            name
            for name, version in self._versions.items()
            if version > self._repeated[name] and name not in self._unknown
        ]
        if lost:
            raise ValueError(
                f"{listed(lost)}: written to on the meta device by code other than reset_parameters() and "
                "_init_weights(), which alone are repeated when the module receives its values. Create the module "
                "within configure_model() or init_module(), which record what is written to it, or outside of "
                "torch.device('meta')."
            )

    def _add(self, writes: dict[str, int], caller: nn.Module, methods: Sequence[str]) -> None:
        """Add writes as often as the caller's constructor makes them: a subclass may repeat those of its base class."""
        constructors = (vars(base).get("__init__") for base in type(caller).__mro__)
        times = max(1, sum(_mentions(constructor, methods) for constructor in constructors))
        self._repeated.update({name: count * times for name, count in writes.items()})

    def _writes_of(self, call: Call, module: nn.Module) -> dict[str, int]:
        """Run an initialiser on the stand-ins, and return its number of writes to each tensor that has a counter."""
        writes: dict[str, int] = {}
        if not self._versions:
            return writes
        with _tensors_kept(module) as places:
            before = {id(tensor): tensor._version for *_, tensor in places}
            try:
                call()
            except Exception:  # the code may need values, such as those of a file, or of a tensor
                self._unknown.update(self._names[id(tensor)] for *_, tensor in places)
                return writes
            for holder, name, tensor in places:
                now, full_name = holder.get(name), self._names[id(tensor)]
                if now is not None and full_name in self._versions:
                    writes[full_name] = now._version - (before[id(tensor)] if now is tensor else 0)
        return {name: count for name, count in writes.items() if count}


@contextmanager
def _tensors_kept(module: nn.Module) -> Iterator[list[tuple[dict[str, Any], str, Tensor]]]:
    """Context after which modules have their present parameters and buffers again: (holder, name, tensor) of each."""
    holders = [holder for inner in module.modules() for holder in (inner._parameters, inner._buffers)]
    kept: list[tuple[Any, dict[str, Any]]] = [(holder, dict(holder)) for holder in holders]
    try:
        yield [(holder, name, t) for holder, tensors in kept for name, t in tensors.items() if t is not None]
    finally:
        for holder, tensors in kept:
            holder.clear()
            holder.update(tensors)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor or parameter on the meta device with the same shape, dtype and attributes."""
    return with_attributes(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def inside_out(
    module: nn.Module, ancestors: tuple[nn.Module, ...] = (), seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Each module once, after its submodules, with the modules that contain it, outermost first."""
    seen = set() if seen is None else seen
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from inside_out(child, (*ancestors, module), seen)
    yield module, ancestors


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _own(module: nn.Module) -> list[Call]:
    """``reset_parameters``, or ``_reset_parameters`` in torch's attention and transformer modules."""
    methods = [getattr(module, name, None) for name in OWN]
    return [method for method in methods if takes(method, 0)][:1]


def _of_adapters(module: nn.Module, ancestors: Sequence[nn.Module]) -> list[Call]:
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


@cache
def _applies(cls: Any) -> bool:
    """Whether any code of a model's class, outside of ``_init_weights`` itself, mentions that method."""
    functions = (value for base in cls.__mro__ for name, value in vars(base).items() if name != APPLIED)
    return any(_mentions(function, (APPLIED,)) for function in functions)


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
