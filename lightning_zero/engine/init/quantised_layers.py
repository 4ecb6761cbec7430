"""bitsandbytes' quantised linear layers: frozen codes, which are sharded like other parameters, and their scales.

Scales are attributes of weights and layers. Each rank keeps all of them, as with FSDP: 0.016 bytes a parameter with
double quantisation, 0.0625 without, 4 bytes a row in int8. Sharding them would add a gather to each unit, in order to
save 1.1 GB of a model of 70 billion parameters, whose codes take 35 GB divided by the number of ranks.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.counters import Ledger
from lightning_zero.engine.tensor.identity import attributes_of_users, project_class, set_contents
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor, in_memory
from lightning_zero.io.text import listed


def quantised_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with codes instead of weights, or whose weights become codes when they receive values, by name."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and _is_quantised(layer._parameters.get("weight")):
            yield name, layer


def _is_quantised(weight: Any) -> bool:
    """Whether a weight is one of ``Params4bit``, or of ``Int8Params`` with codes."""
    return hasattr(weight, "quant_state") or not getattr(weight, "has_fp16_weights", True)


def scales_of(weight: Any) -> list[tuple[Any, str, Tensor]]:
    """The scales of a weight, after the objects and names of the attributes that hold them."""
    if hasattr(weight, "SCB"):
        return [(weight, "SCB", weight.SCB)]
    states = [state for state in (weight.quant_state, weight.quant_state.state2) if state is not None]
    attributes = [(state, name, value) for state in states for name, value in vars(state).items()]
    return [each for each in attributes if isinstance(each[2], Tensor)]


# -- quantising while loading ------------------------------------------------------------------------------------------


def replace_linear_layers(module: nn.Module, kind: str, state: Mapping[str, Any]) -> None:
    """Replace linear layers with weights in ``state``, except heads, by quantised ones on the meta device.

    Raises:
        ModuleNotFoundError: if bitsandbytes is not installed.
        ValueError: if ``kind`` is unknown, or there is no such layer.
    """
    if kind not in ("nf4", "fp4", "int8"):
        raise ValueError(f"quantize={kind!r} is unknown: write one of 'nf4', 'fp4', 'int8'.")
    try:
        from bitsandbytes.nn import Linear4bit, Linear8bitLt
    except ImportError:
        raise ModuleNotFoundError(
            "the package bitsandbytes is missing: pip install 'lightning_zero[optimizers]'", name="bitsandbytes"
        ) from None
    make: Any = partial(Linear4bit, quant_type=kind)
    if kind == "int8":
        make = partial(Linear8bitLt, has_fp16_weights=False)
    named = module.named_modules(remove_duplicate=False)  # a layer with two names counts as tied
    uses = Counter(id(p) for _, inner in named for p in inner._parameters.values())
    models: list[Any] = [inner for inner in module.modules() if hasattr(inner, "get_output_embeddings")]
    heads = [model.get_output_embeddings() for model in models]
    chosen = [
        (name, layer)
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and layer not in heads and uses[id(layer.weight)] == 1 and f"{name}.weight" in state
    ]
    if not chosen:
        raise ValueError(
            f"quantize={kind!r}: {type(module).__name__} contains no nn.Linear to replace. Leave quantize out."
        )
    for name, layer in chosen:
        with torch.device("meta"):
            quantised = make(layer.in_features, layer.out_features, layer.bias is not None)
        module.set_submodule(name, quantised.to(layer.weight.dtype).train(layer.training).requires_grad_(False))
    for model in models:
        _note_kind(model, kind)


def _note_kind(model: Any, kind: str) -> None:
    """Record in a transformers model how it is quantised, for PEFT and, once it is saved, ``from_pretrained``."""
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        model.is_loaded_in_8bit = True
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        model.is_loaded_in_4bit = True
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True)
    model.config.quantization_config = config


def awaits_quantisation(parameter: Any) -> bool:
    """Whether a parameter on the meta device is to be quantised when it receives values."""
    has_codes = getattr(parameter, "bnb_quantized", not parameter.is_floating_point())
    return _is_quantised(parameter) and parameter.device.type == "meta" and not has_codes


def quantise(parameter: Any, values: Tensor, *, wait: bool) -> None:
    """Give codes to a parameter on the meta device; with ``wait``, values are read and quantised when codes are."""
    codes = _Codes(parameter, values)
    shown = codes.on_meta() if wait else codes.made()
    if wait:
        origin = values.lazy_values.origin if isinstance(values, LazyTensor) else None
        shown = DeferredCodes("", shown.shape, shown.dtype, codes, origin)
    set_contents(parameter, nn.Parameter(shown, requires_grad=False))
    if hasattr(parameter, "CB") and not wait:
        parameter.CB = parameter.data


class _Codes:
    """The codes of a parameter. Each read quantises the whole tensor, and gives its scales to the parameter.

    Attributes:
        device: where to quantise; the engine's device, once there is an engine.
    """

    def __init__(self, parameter: Any, values: Tensor) -> None:
        self.values, self._dtype, self._kind = values, parameter.dtype, project_class(parameter)
        self._parameter = weakref.ref(parameter)
        self.device = torch.device("cpu")

    def of(self, parameter: Any) -> _Codes:
        """The codes of a copy of the parameter."""
        codes = copy.copy(self)
        codes._parameter = weakref.ref(parameter)
        return codes

    def __call__(self, start: int, stop: int) -> Tensor:
        return self.made().view(-1)[start:stop]

    def made(self) -> Tensor:
        return self._quantised(in_memory(self.values).to(self.device, self._dtype))

    def on_meta(self) -> Tensor:
        """The codes without values. The parameter gets scales of zero."""
        with torch.device("cpu"):  # bitsandbytes keeps the table that its first call makes: it needs values
            sys.modules["bitsandbytes.functional"].quantize_blockwise(torch.zeros(1, device="cpu"))
        codes = self._quantised(torch.empty(self.values.shape, dtype=self._dtype, device="meta"))
        for holder, name, scale in scales_of(self._parameter()):
            setattr(holder, name, torch.zeros_like(scale, device="cpu"))
        return codes

    def _quantised(self, values: Tensor) -> Tensor:
        parameter = self._parameter()
        assert parameter is not None, "a parameter was deleted before it was sharded"
        quantised = self._kind(values, **{**attributes_of_users(parameter), "requires_grad": False})
        quantised._quantize(values.device)
        codes: Tensor = quantised.data
        if hasattr(quantised, "CB"):
            quantised.CB = None  # a second reference to the codes
        parameter.__dict__.update(attributes_of_users(quantised))
        return codes


class DeferredCodes(LazyTensor):
    """Codes of values that stay in a file until the codes are read."""

    def alias(self) -> Tensor:
        return DeferredCodes._over(self.lazy_values, self.shape, self.dtype)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing: a conversion to another dtype is not meant for codes, and the engine moves them."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            attributes = {name: value for name, value in attributes_of_users(self).items() if name != "module"}
            shown, source = torch.empty(self.shape, dtype=self.dtype, device="meta"), replace(self.lazy_values)
            copied = project_class(self)(shown, requires_grad=False, **copy.deepcopy(attributes, memo))
            if isinstance(source.read, _Codes):  # otherwise user code has replaced the codes
                source.read = source.read.of(copied)
            set_contents(copied, nn.Parameter(DeferredCodes._over(source, self.shape, self.dtype), False))
            memo[id(self)] = copied
        return memo[id(self)]


# -- in an engine ------------------------------------------------------------------------------------------------------


def prepare(module: nn.Module, device: torch.device) -> None:
    """Quantise, undo the layout for evaluation on CPUs, and note where deferred codes are quantised."""
    for _, layer in quantised_layers(module):
        weight = layer.weight
        if isinstance(weight, DeferredCodes):
            codes: Any = weight.lazy_values.read
            codes.device = device
        elif weight.is_floating_point() and not getattr(weight, "bnb_quantized", False):
            layer.to(weight.device)
        elif getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            layer.state_dict()  # undoes it


class QuantisedLayers:
    """The quantised layers of a module whose codes are sharded. All ranks get rank 0's scales. Collective.

    On CPUs with AVX512-BF16, ``Linear4bit`` would replace its codes in evaluation, by a layout through which no
    gradients flow: it must not. ``Linear8bitLt`` computes with a second reference to its codes: it gets the gathered
    ones in each forward.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, ledger: Ledger) -> None:
        self._changed: list[tuple[weakref.ref[Any], Any]] = []  # layers, and what ``remove`` needs to restore them
        scales = []
        for _, layer in quantised_layers(module):
            if is_8bit := hasattr(layer, "state"):
                before: Any = layer.register_forward_pre_hook(_compute_with_gathered)
                layer.weight.SCB = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
                layer.weight.CB = layer.state.CB = None
            else:
                before = getattr(layer, _PACKS, False)
                setattr(layer, _PACKS, False)
            self._changed.append((weakref.ref(layer), before))
            for holder, name, scale in scales_of(layer.weight):
                scales.append(scale.to(communicator.device))
                setattr(holder, name, scales[-1])
            if is_8bit:
                layer.state.SCB = layer.weight.SCB
        communicator.everyone.copy_from_first(scales)
        ledger.add("parameters", sum(scale.nbytes for scale in scales))

    def remove(self) -> None:
        for reference, before in self._changed:
            layer = reference()
            if layer is not None and hasattr(layer, "state"):
                before.remove()
                layer.state.CB = layer.weight  # which will have all codes
            elif layer is not None:
                setattr(layer, _PACKS, before)


_PACKS = "support_avx512bf16_for_cpu"


def _compute_with_gathered(layer: Any, _: Any) -> None:
    layer.state.CB = layer.weight.detach()


# -- in state dicts ----------------------------------------------------------------------------------------------------


def names_of_scales(module: nn.Module) -> dict[str, list[str]]:
    """The names in a module's state dict of the scales of each quantised layer, by the layer's name.

    torch does not know them, and would refuse to load them.
    """
    found = {}
    for name, layer in quantised_layers(module):
        prefix = f"{name}.".lstrip(".")
        own = layer.state_dict(prefix=prefix, keep_vars=True)
        found[name] = [key for key in own if key.removeprefix(prefix) not in layer._parameters]
    return found


def take_scales(module: nn.Module, state: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return a copy of a state dict without scales, and layers with their new scales, for ``load_scales``.

    Raises:
        ValueError: if the state dict has a layer's weight without its scales, or if the scales cannot be read.
    """
    rest, new = copy.copy(state), []
    for name, keys in names_of_scales(module).items():
        scales = {key: in_memory(rest.pop(key)) for key in keys if key in rest}
        layer: Any = module.get_submodule(name)
        if f"{name}.weight".lstrip(".") in rest and not awaits_quantisation(layer.weight):
            try:
                new.append((layer, _read(layer, keys, scales)))
            except (ValueError, LookupError, AssertionError, RuntimeError) as error:
                raise ValueError(
                    f"The checkpoint has weights, but not the scales, of the quantised layer {name!r} ({error}): it is "
                    "damaged, or its weights are not quantised. To quantise them, pass its path to "
                    "lightning_zero.load_weights, with the layer on the meta device. Nothing was loaded."
                ) from error
    return rest, new


def _read(layer: Any, names: list[str], scales: dict[str, Tensor]) -> Any:
    if missing := [name for name in names if name not in scales and not name.endswith("weight_format")]:
        raise ValueError(f"{listed(missing)} missing")
    if hasattr(layer, "state"):  # of 8 bits
        return next(value for name, value in scales.items() if name.endswith("SCB")).view_as(layer.weight.SCB)
    library: Any = sys.modules["bitsandbytes.functional"]
    return library.QuantState.from_dict(scales, layer.weight.quant_state.absmax.device)


def load_scales(new: list[tuple[Any, Any]]) -> None:
    """Give quantised layers the scales that ``take_scales`` has read."""
    for layer, scales in new:
        if hasattr(layer, "state"):
            layer.weight.SCB.copy_(scales)
        else:
            layer.quant_state = layer.weight.quant_state = scales
