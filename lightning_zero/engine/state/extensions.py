"""All-gather extensions: FSDP2's protocol by which a tensor subclass chooses what is gathered instead of its values.

``fsdp_pre_all_gather`` encodes values to send, and ``fsdp_post_all_gather`` makes the tensor that modules compute with
from the gathered codes. torchao's float8 weights are thus gathered in 8 bits. While sharded, such a parameter is an
ordinary one with the subclass's values; only in forward do its unit's modules find the other tensor in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.comm.asynchronous import current_stream, wait_for
from lightning_zero.engine.comm.process_group import ReduceOp
from lightning_zero.engine.plan.layout import ALIGNMENT
from lightning_zero.engine.tensor.identity import inner_of, set_contents, wrapper_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

# A ``Bucket`` (``bucket.py``, which imports this file).
Bucket = Any


class Extension:
    """The extension of one parameter, whose elements it encodes one by one.

    Attributes:
        kind: the tensor subclass.
        dtype: of the codes.
        scale: by which values are encoded; computed by ``Scales``.
    """

    def __init__(self, parameter: Tensor, device: torch.device) -> None:
        self.kind, self._wrap = type(parameter), wrapper_of(parameter)
        self._is_scaled = hasattr(parameter, "_precomputed_scale")
        self._empty = self._wrap(torch.empty(0, dtype=parameter.dtype, device=device))
        values = torch.ones(ALIGNMENT, dtype=parameter.dtype, device=device)
        self.scale = values[0].float()
        codes = self.encode(values)
        if codes.shape != values.shape or not codes.is_floating_point():
            raise TypeError(f"{codes.numel()} elements in {codes.dtype} are gathered for {values.numel()} values")
        self.dtype = codes.dtype
        self.decode(codes, parameter.dtype)

    def encode(self, values: Tensor) -> Tensor:
        """Encode this rank's values (1-D) of a parameter; return the codes."""
        tensor = self._wrap(values)
        if self._is_scaled:
            tensor._precomputed_scale = self.scale
        (codes,), self._metadata = tensor.fsdp_pre_all_gather(None)
        return codes

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Make the tensor that modules compute with from gathered codes, to whose memory it refers."""
        tensor, _ = self._empty.fsdp_post_all_gather((codes,), self._metadata, dtype)
        return tensor

    def computed(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor that a parameter's module computes with; its gradient is the gradient of ``view``."""
        return _Decoded.apply(view, partial(self.decode, dtype=dtype))

    def scales_of(self, largest: Tensor) -> Tensor:
        """The scales of weights with these largest absolute values."""
        if not self._is_scaled:
            return largest
        from torchao.float8.float8_utils import amax_to_scale  # type: ignore[import-untyped]

        return amax_to_scale(largest, self.dtype)

    def remove_from(self, parameter: nn.Parameter) -> None:
        """Give a parameter of the subclass the ordinary contents that the subclass wraps."""
        inner = inner_of(parameter)
        for name in vars(self._empty):
            vars(parameter).pop(name, None)
        set_contents(parameter, nn.Parameter(inner.detach(), parameter.requires_grad))

    def give_to(self, parameter: nn.Parameter) -> None:
        """Undo ``remove_from``, with the parameter's present values."""
        if not isinstance(parameter, ShardedTensor):
            set_contents(parameter, nn.Parameter(self._wrap(parameter.detach()), parameter.requires_grad))


@contextmanager
def without_extensions(module: nn.Module, device: torch.device) -> Iterator[dict[nn.Parameter, Extension]]:
    """Context whose value is the extensions of a module's parameters, which become and remain ordinary parameters.

    They are extended again only if the context ends with an exception.

    Args:
        device: the device on which values will be encoded.

    Raises:
        ValueError: if an extended parameter was tied to another one, or if its class, or torch on the device, cannot
            encode its elements. Nothing has been changed.
    """
    found, parameters = {}, {id(parameter) for parameter in module.parameters()}
    for name, parameter in module.named_parameters():
        if (inner := inner_of(parameter)) is parameter:
            continue
        kind = type(parameter).__name__
        if id(inner) in parameters:
            raise ValueError(
                f"{name} was tied to another parameter before it became a {kind}, so training would no longer change "
                "both. Leave its layer out, with torchao's argument module_filter_fn."
            )
        try:
            found[parameter] = Extension(parameter, device)
        except Exception as error:  # of the subclass, or of torch
            raise ValueError(
                f"{name} is a {kind}, whose fsdp_pre_all_gather cannot encode elements one by one on "
                f"{device.type} ({type(error).__name__}: {error}). Train an ordinary parameter: with torchao's float8 "
                "layers, leave out enable_fsdp_float8_all_gather=True."
            ) from error
    for parameter, extension in found.items():
        extension.remove_from(parameter)
    try:
        yield found
    except BaseException:
        for parameter, extension in found.items():
            extension.give_to(parameter)
        raise


class Scales:
    """Computes the scales of all extended weights of an engine, by one all-reduce after each change of any of them.

    Attributes:
        are_stale: whether master weights have changed since the scales were computed; the same on every rank.
    """

    def __init__(self) -> None:
        self._buckets: weakref.WeakKeyDictionary[Bucket, None] = weakref.WeakKeyDictionary()  # in their order
        self._stream: torch.Stream | None = None  # that computed the scales
        self.are_stale = True

    def add(self, bucket: Bucket) -> None:
        self._buckets[bucket], self.are_stale = None, True

    def refresh(self, device: torch.device) -> None:
        """Compute the scales if they are stale; the current stream may then use them. Collective if they are stale."""
        if self.are_stale:
            with torch.inference_mode(False), torch.no_grad():  # later graphs will use the scales
                self._compute(list(self._buckets))
            self.are_stale, self._stream = False, current_stream(device)
        wait_for([self._stream], current_stream(device))

    def _compute(self, buckets: list[Bucket]) -> None:
        zero = torch.zeros((), dtype=torch.float32, device=buckets[0].full.device)
        norms = [
            torch.linalg.vector_norm(part.to(bucket.dtype), float("inf")).to(zero) if len(part) else zero
            for bucket in buckets
            for part in _parts_of(bucket, bucket.own_values())
        ]
        largest = torch.stack(norms)
        buckets[0].communicator.control.all_reduce(largest, ReduceOp.MAX)
        for bucket, of_bucket in zip(buckets, largest.split([len(bucket.extensions) for bucket in buckets])):
            for extension, scale in zip(bucket.extensions, bucket.extensions[0].scales_of(of_bucket).unbind()):
                extension.scale = scale


def encode(bucket: Bucket, own: Tensor) -> None:
    """Fill the part of a bucket's buffer from which a gather starts with the codes of this rank's values."""
    bucket.scales.refresh(bucket.full.device)
    for index, part in enumerate(_parts_of(bucket, own)):
        values = part.to(bucket.full.device, bucket.dtype, non_blocking=True)
        codes = bucket.extensions[index].encode(values)
        bucket.full[slice(*bucket.layout.range_in_part(index))].copy_(codes)


def _parts_of(bucket: Bucket, own: Tensor) -> list[Tensor]:
    """The values of each parameter among those from which this rank's gathers start; may be empty."""
    layout, (begin, _) = bucket.layout, bucket.layout.own_part
    ranges = map(layout.range_in_part, range(len(layout.segments)))
    return [own[start - begin : stop - begin] for start, stop in ranges]


class _Decoded(torch.autograd.Function):
    """Decodes gathered codes; the gradient passes unchanged, in the dtype of the parameter."""

    @staticmethod
    def forward(ctx: Any, view: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
        return decode(view.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
