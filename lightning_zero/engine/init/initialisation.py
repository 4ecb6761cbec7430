"""Find the initialisers to call for a module on the meta device.

Lazy tensors record the operators that write to them, and the initialisers whose operators need no record, since they
will be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
        ValueError: if a new tensor has no initialiser.
    """
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    calls: dict[int, list[Call]] = {}
    owner_of: dict[str, str] = {}  # the class of the first module that holds the tensor
    lacking: set[str] = set()
    for inner, ancestors in inside_out(module):
        new = {name for tensor in _tensors(inner) if sources[name := names[id(tensor)]].is_new}
        own = {name for tensor in _tensors(inner, recurse=False) if (name := names[id(tensor)]) in new}
        if new:
            recorded = {label for name in own or new for label in sources[name].initialised_by}
            calls[id(inner)] = _own(inner) + _applied(inner, ancestors, recorded) + _of_adapters(inner, ancestors)
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
    return calls


def _applied(module: nn.Module, ancestors: Sequence[nn.Module], recorded: set[str]) -> list[Call]:
    """The methods that models have applied to the module (``self.apply(self._init_weights)``), innermost first.

    Args:
        recorded: the initialisers that lazy tensors of the module have recorded. If there are none, as with tensor
            parallelism, the innermost model's method counts.
    """
    models: list[Any] = [model for model in (module, *reversed(ancestors)) if takes(getattr(model, APPLIED, None), 1)]
    models = [model for model in models if label(APPLIED, model) in recorded] if recorded else models[:1]
    return [partial(getattr(model, APPLIED), module) for model in models]


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
