"""Functions for user code: read full values of a sharded module; run different numbers of forwards on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine import streaming
from lightning_zero.engine.compat import replaced
from lightning_zero.engine.optim.masters import masters_that_hold
from lightning_zero.engine.runtime.join import each_forward
from lightning_zero.engine.tensor.identity import project_class, with_attributes
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import whole
from lightning_zero.io.annotations import check_value


@contextmanager
def full_parameters(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Context in which the module's parameters are ordinary tensors of the full shape. Collective.

    Args:
        module: a sharded, partly sharded or unsharded module. A forward within the context computes with the full
            tensors, and its backward adds to the gradients of the sharded parameters. In a copy of a sharded module,
            these gradients are this rank's own, as without the context.
        writeback: whether to keep changes to the full tensors, which must be the same on every rank.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> with lightning_zero.full_parameters(model, writeback=True), torch.no_grad():
        ...     type(model.weight).__name__, model.weight.fill_(1.0).sum().item()
        ('Parameter', 6.0)
        >>> model.weight.sum().item()
        6.0
        >>> engine.close()
    """
    sharded = {name: p for name, p in module.named_parameters() if isinstance(p, ShardedTensor)}
    ordinary: dict[str, Any] = {}
    for name, parameter in sharded.items():
        value = with_attributes(parameter, parameter.whole().detach().clone())
        value.__class__ = project_class(parameter) or nn.Parameter
        if value.requires_grad:
            value.register_post_accumulate_grad_hook(_taker_of_gradients(parameter))
        ordinary[name] = value
    with replaced(module, ordinary):
        yield
    if writeback:
        with torch.no_grad():
            for name, parameter in sharded.items():
                if ordinary[name] is not None:  # user code may have removed it for a while
                    parameter.copy_(ordinary[name])


def iter_full_parameters(
    module: nn.Module, max_bytes: int = 2**30, merge_adapters: bool = False, rank: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the names and whole tensors of ``module.state_dict()``, a few gathered at a time. Collective.

    The next tensors are gathered while the loop's body works with the last ones. Every rank must iterate; a rank that
    leaves the loop early causes an error on ranks that go on. Do not change parameters in the loop.

    Args:
        module: a sharded, partly sharded or unsharded module. Parameters and persistent buffers keep their names and
            dtypes; tied parameters are yielded under each name. Each tensor is new memory that belongs to the caller.
        max_bytes: limits the memory of the tensors gathered ahead and of the last one yielded. Tensors above a third of
            it may not be gathered ahead; one above the limit is gathered alone.
        merge_adapters: whether to yield the weights that ``merge_and_unload`` of peft would return, under the base
            model's names, for which one layer at a time needs additional memory. The module does not change.
        rank: the only rank on which the iterator yields; on the others it takes part in the gathers, and yields
            nothing. By default it yields on every rank.

    Raises:
        ValueError: if ``merge_adapters``, and adapters cannot be merged into weights; or if there is no such rank.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> [(name, tensor.shape) for name, tensor in lightning_zero.iter_full_parameters(model)]
        [('weight', torch.Size([2, 3])), ('bias', torch.Size([2]))]
        >>> engine.close()
    """
    check_value("iter_full_parameters: max_bytes", max_bytes, int, 1)
    parts = streaming.parts_of(module, merge_adapters)
    whole, (own, size, _) = streaming.stream(parts, max_bytes), streaming.ranks_of(parts)
    if rank is not None and rank not in range(size):
        raise ValueError(f"iter_full_parameters: rank={rank} must be at least 0 and below the number of ranks, {size}.")
    return whole if rank in (None, own) else streaming.exhausted(whole)


def _taker_of_gradients(parameter: ShardedTensor) -> Callable[[Tensor], None]:
    """What hands gradients of a parameter's full tensor over to the parameter: the reduction, except for a copy."""
    slot: Any = parameter.slot
    take: Callable[[Tensor], None] | None = slot.take_gradient if slot.is_of(parameter) else None
    if take is not None:
        return take

    def add(value: Tensor) -> None:
        gradient, value.grad = value.grad, None
        assert gradient is not None
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    return add


def full_grad(parameter: Tensor) -> Tensor | None:
    """A parameter's reduced gradient, as a tensor of the full shape; None if there is no gradient. Collective.

    Args:
        parameter: a parameter of a sharded or unsharded module.

    Returns:
        A new ordinary tensor; for an unsharded parameter, its ``grad`` itself.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> lightning_zero.full_grad(model.weight)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        >>> engine.close()
    """
    gradient = parameter.grad
    return gradient.whole().clone() if isinstance(gradient, ShardedTensor) else gradient


def full_optimizer_state(parameter: Tensor) -> dict[str, Any]:
    """The optimizer state of a sharded parameter, with sharded tensors gathered in full. Collective.

    Args:
        parameter: a parameter of a sharded module.

    Returns:
        The state's entries by name; empty before the first step, and for a parameter that is in no optimizer.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> lightning_zero.full_optimizer_state(model.weight)["exp_avg"].shape
        torch.Size([2, 3])
        >>> engine.close()
    """
    masters = masters_that_hold(parameter)
    return {} if masters is None else masters.states.by_parameter(whole, [parameter]).get(parameter, {})


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient as a 1-D tensor; for an ordinary tensor, all elements, flattened.

    Do not write to the shard. A parameter's shard is a view of its fp32 master weight, and a write would reach the
    modules only when values are next gathered or exchanged, which may never happen for frozen parameters. To change a
    parameter on every rank, write to the parameter itself (``p.mul_(2)``).

    Args:
        tensor: a parameter, a gradient, or an ordinary tensor.

    Returns:
        A 1-D tensor; it may be empty, since ranks own ranges of a unit, not of each parameter. The shard of a gradient
        is valid until the next backward. The function communicates only if the gradient has not yet been summed across
        the groups of ``shard_within``.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> lightning_zero.shard_of(model.weight).shape  # one rank owns everything
        torch.Size([6])
        >>> engine.close()
    """
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach().reshape(-1)


@contextmanager
def uneven_forwards(module: nn.Module) -> Iterator[None]:
    """Context in which ranks may run different numbers of forwards (join of uneven inputs). Collective.

    At stage 3, a forward all-gathers parameters. A rank that has finished takes part in the other ranks' gathers, so
    every forward must run the same units. Read parameters only before or after the context, since a read is collective.
    Methods named ``generate`` enter the context automatically. No effect at stages 1 and 2, or on unsharded modules.

    Args:
        module: the module whose forwards run: a sharded module, or a submodule of a sharded module.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> batches = [torch.ones(1, 3)] * 2  # other ranks may have more, or none
        >>> with lightning_zero.uneven_forwards(model), torch.no_grad():
        ...     outputs = [model(batch) for batch in batches]
        >>> engine.close()
    """
    with each_forward(module):
        yield
