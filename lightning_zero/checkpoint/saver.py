"""What a strategy saves by: in the form that was asked for, now or in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from threading import Event
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint.background import Background, StoreExchange
from lightning_zero.checkpoint.commit import Destination, new_label
from lightning_zero.checkpoint.saving import Gather, HostMemory, content_of, save_in_parts, save_whole


class Saver:
    """Saves one checkpoint after another. Call ``finish`` before each, on all ranks, to learn what became of the last.

    Args:
        in_background: copy what is to be saved, and let the caller go on while it is written.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._background, self._memory = Background(), HostMemory()
        self._abandoned = Event()

    def __reduce__(self) -> Any:
        # users copy trainers and strategies: what is under way belongs to one
        return Saver, (self._in_background,)

    def save_in_parts(
        self,
        tree: Mapping[str, Any],
        rest: Mapping[str, Any],
        path: Any,
        written_by: dict[str, Any],
        rank: int,
        gather: Gather,
    ) -> None:
        """Write a folder, of which each rank writes a file. Collective.

        Args:
            tree, rest: see ``content_of``.
            path: rank 0's counts.
            written_by: for the manifest.
            rank: this one.
            gather: collects a value of every rank.

        Raises:
            CheckpointNotSavedError: on every rank, if it was not written; in the background ``finish`` raises it.
        """
        everyone = gather((new_label(), str(path)))
        label, path = everyone[0]
        content, destination = content_of(tree, rest, rank), Destination(path, label)
        if not self._in_background:
            save_in_parts(content, destination, written_by, rank, gather)
            return
        self._background.finish()
        content = self._memory.copied(content)
        if len(everyone) == 1:
            self._background.submit(partial(save_in_parts, content, destination, written_by))
            return
        exchange = StoreExchange(label, rank, [each for each, _ in everyone], self._abandoned)

        def save() -> None:
            try:
                save_in_parts(content, destination, written_by, rank, exchange)
            finally:
                exchange.leave()

        self._background.submit(save)

    def save_whole(self, checkpoint: Mapping[str, Any], path: Any, own: tuple[str, ...] = ()) -> None:
        """Write one file, by one rank.

        Args:
            own: keys of what nobody else has, which need not be copied.

        Raises:
            CheckpointNotSavedError: if it was not written; in the background ``finish`` raises it.
        """
        destination = Destination(path, new_label())
        if not self._in_background:
            save_whole(checkpoint, destination)
            return
        self._background.finish()
        kept = {key: value if key in own else _copy(value) for key, value in checkpoint.items()}
        self._background.submit(partial(save_whole, kept, destination))

    def then(self, act: Callable[[], None]) -> None:
        """Do something when what was saved before is written; not at all if that fails."""
        if self._background.is_empty:
            act()
        else:
            self._background.submit(act)

    @property
    def is_done(self) -> bool:
        """Whether all that was saved is written, or has failed."""
        return self._background.is_done

    def finish(self) -> None:
        """Wait until all that was saved is written.

        Raises:
            CheckpointNotSavedError: if something was not.
        """
        self._background.finish()

    def close(self, *, abandon: bool = False) -> None:
        """As ``finish``, at the end of a run.

        Args:
            abandon: other ranks are gone: what waits for them for more than some seconds is given up, and removed.
        """
        if abandon:
            self._abandoned.set()
        try:
            self._background.close()
        finally:
            self._abandoned.clear()


def _copy(value: Any) -> Any:
    return copy.deepcopy(tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value))
