"""Serialise or copy objects that refer to sharded tensors on rank 0 alone, while the others join rank 0's gathers.

Only rank 0 decides what is gathered, since objects such as hyperparameters may differ between ranks. Tensors are
gathered one by one, to CPU memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_zero.engine import ShardedTensor, places, process_group, sharded_tree

Gather = Callable[[Any], list[Any]]
"""All-gather of a picklable value: returns the values in the order of ranks. Collective."""

_Result = TypeVar("_Result")


def alone(value: Any) -> list[Any]:
    """The ``Gather`` of a single rank."""
    return [value]


@dataclass(frozen=True)
class Ranks:
    """The ranks that save a checkpoint together.

    Attributes:
        on_rank_0: calls a function on rank 0, while the other ranks join its gathers; by default, without them.
        group: the process group of the ranks' background threads, in a background save of several ranks.
    """

    rank: int = 0
    gather: Gather = alone
    on_rank_0: Callable[[Callable[[], Any]], Any] | None = None
    group: process_group.ProcessGroup | None = None

    def on_first(self, act: Callable[[], _Result]) -> _Result | None:
        """Call a function that serialises or copies objects on rank 0; None on the other ranks."""
        return on_rank_0(act, self.rank) if self.on_rank_0 is None else self.on_rank_0(act)


ONE_RANK = Ranks()


def on_rank_0(
    act: Callable[[], _Result],
    rank: int = 0,
    gather: Gather | None = None,
    written: Callable[[], Mapping[Any, Tensor]] = dict,
) -> _Result | None:
    """Call ``act`` on rank 0 and return its result; None on the other ranks. Collective.

    Reads of sharded tensors by ``act``, also in pickles and deep copies, return full values in CPU memory.

    Args:
        gather: all-gathers a value; None if there is no other rank.
        written: returns full values that the checkpoint contains anyway, by the ``identity`` of the sharded tensor. If
            ``act`` reads an equal value of that tensor, it gets the same memory, so that ``torch.save`` writes it once.
    """
    if rank != 0:
        if gather is not None:
            _follow(gather)
        return None
    try:
        with places.read_by(_Leader(gather, written)):
            return act()
    finally:
        if gather is not None:
            gather(None)


def _follow(gather: Gather) -> None:
    """Take part in rank 0's gathers until rank 0 has finished, even after an error, which is raised at the end."""
    error: Exception | None = None
    while (place := gather(None)[0]) is not None:
        join = places.gather_at(place)
        if not all(gather(join is not None)):
            continue
        assert join is not None
        try:
            with torch.no_grad():
                join()
        except Exception as raised:
            error = error or raised
    if error is not None:
        raise error


class _Leader:
    """Reads sharded tensors for rank 0 (``places.read_by``); before a gather, sends the place to the other ranks."""

    def __init__(self, gather: Gather | None, written: Callable[[], Mapping[Any, Tensor]]) -> None:
        self._gather, self._written = gather, written
        self._values: dict[Any, Tensor] = {}
        self._alive: list[Tensor] = []  # so that no identity in ``_values`` is used again

    def whole(self, tensor: ShardedTensor) -> Tensor:
        key = sharded_tree.identity(tensor)
        if key not in self._values:
            self._alive.append(tensor)
            with places.read_by(None), torch.no_grad():
                value = tensor.whole_at_hand()
                if value is None:
                    self._ask(places.place_of(tensor), f"'{tensor.slot.name}'")
                    value = places.collected(tensor)
            value = value.detach().to("cpu", copy=True)
            saved = self._written().get(key)
            is_saved = saved is not None and saved.dtype == value.dtype and torch.equal(saved, value)
            self._values[key] = saved if saved is not None and is_saved else value
        return self._values[key]

    def states(self, states: Any) -> dict[Any, dict[str, Any]]:
        with places.read_by(None), torch.no_grad():
            self._ask(places.place_of_states(states), f"the state of {type(states.optimizer).__name__}")
            return states.by_parameter(sharded_tree.on_cpu)

    def _ask(self, place: places.Place | None, what: str) -> None:
        if self._gather is None:
            return
        if place is not None:
            self._gather(place)
        if place is None or not all(self._gather(True)):
            raise RuntimeError(
                f"{what}, or a tensor derived from it, cannot be gathered for an object in the checkpoint, because not "
                "every rank has it. Make such tensors on every rank (not inside 'if rank == 0:')."
            )


def serialised(value: Any) -> bytes:
    """Return the contents of a file that ``torch.save`` would write now."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def snapshot(value: Any) -> Any:
    """Return a copy of a value in CPU memory, with the contents that a file written now would have.

    ``copy.deepcopy`` would refuse tensors computed by autograd, and drop attributes of parameters.
    """
    return torch.load(io.BytesIO(serialised(value)), map_location="cpu", weights_only=False)
