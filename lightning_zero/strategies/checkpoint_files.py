"""Checkpoint files of the Trainer's and Fabric's strategies: how ranks save and open them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_zero.checkpoint.objects import Ranks, on_rank_0, snapshot
from lightning_zero.checkpoint.reading import OpenedCheckpoint, open_for_run
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.engine import process_group, sharded_tree
from lightning_zero.version import __version__

_Result = TypeVar("_Result")


class CheckpointFiles:
    """Saves and opens the checkpoint files of the strategy that holds this object. All methods are collective."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.saver = Saver(strategy.options.async_save)
        self.has_run_ended = False

    def mode(self, *, reads_values: bool) -> SaveMode:
        """Return how a checkpoint is saved; ``reads_values`` if the project's code reads its tensors before that."""
        options = self._strategy.options
        if options.checkpoint == "sharded":
            return SaveMode.SHARDED
        # With a mesh, shards are gathered immediately.
        assembles = options.async_save and options.tensor_parallel_size is None and not reads_values
        return SaveMode.ASSEMBLED if assembles else SaveMode.GATHERED

    def leaf(self, mode: SaveMode, *, everywhere: bool = False) -> sharded_tree.Leaf:
        """Return what converts sharded tensors for a checkpoint: to themselves, or to full tensors.

        Unless full tensors are needed ``everywhere``, ranks other than 0 get meta tensors instead.
        """
        if mode is not SaveMode.GATHERED:
            return sharded_tree.in_parts
        keeps = everywhere or self._strategy.is_global_zero

        def own(tensor: Tensor) -> Tensor:
            value = sharded_tree.on_cpu(tensor) if keeps else sharded_tree.on_meta(tensor)
            self.saver.made(value, tensor)
            return value

        return own

    @property
    def written_by(self) -> dict[str, Any]:
        """Versions, stage and world size, to be recorded in checkpoints."""
        strategy = self._strategy
        return {
            "lightning_zero": __version__,
            "torch": str(torch.__version__),
            "lightning": strategy.lightning.__version__,
            "stage": strategy.stage,
            "world_size": strategy.world_size,
        }

    @property
    def has_default_io(self) -> bool:
        strategy = self._strategy
        return type(strategy.checkpoint_io) is strategy.lightning.plugins.TorchCheckpointIO

    @property
    def are_opened_here(self) -> bool:
        """Whether the strategy reads checkpoints: the ``CheckpointIO`` at most changes how Lightning writes them."""
        plugins, io = self._strategy.lightning.plugins, self._strategy.checkpoint_io
        passes_on = getattr(plugins, "AsyncCheckpointIO", plugins.CheckpointIO).load_checkpoint  # Fabric has no such
        while type(io).load_checkpoint is passes_on:
            io = io.checkpoint_io
        return type(io).load_checkpoint is plugins.TorchCheckpointIO.load_checkpoint

    def save(
        self,
        mode: SaveMode,
        path: Any,
        contents: dict[str, Any],
        tree_in: Callable[[dict[str, Any]], dict[str, Any]],
        storage_options: Any,
    ) -> None:
        """Save a checkpoint. Every rank raises if this save, or an earlier background save, failed.

        Args:
            contents: the checkpoint's entries; see ``SaveJob``.
            tree_in: removes and returns the entries that a sharded checkpoint stores in DCP's format.
            storage_options: those that the user has given, for a ``CheckpointIO`` of the user's.
        """
        if storage_options is not None or (mode is not SaveMode.SHARDED and not self.has_default_io):
            whole, io = self.gathered(contents), self._strategy.checkpoint_io
            writes_later = isinstance(io, getattr(self._strategy.lightning.plugins, "AsyncCheckpointIO", ()))
            self.on_rank_0(
                lambda: io.save_checkpoint(
                    snapshot(whole) if writes_later else whole, path, storage_options=storage_options
                )
            )
            return
        self.finish()
        tree = tree_in(contents) if mode is SaveMode.SHARDED else {}
        if mode is SaveMode.GATHERED:
            contents = self.gathered(contents)
        self.saver.save(SaveJob(mode, path, contents, tree, self.written_by), self.ranks())
        if self.has_run_ended:  # nothing would wait for the save
            self.finish()

    def finish(self) -> None:
        """Wait for background saves. An error is raised on every rank."""
        self._strategy.ranks.alike(self.saver.finish)

    def close(self) -> None:
        """End a run: wait for background saves. After a failure, each rank raises its own error."""
        self.has_run_ended, ranks = True, self._strategy.ranks
        if ranks.ended_by is not None:
            self.saver.close()
        elif self._strategy.options.async_save:
            ranks.alike(self.saver.close)

    def ranks(self) -> Ranks:
        """Return the ranks that save a checkpoint."""
        return Ranks(self._strategy.global_rank, self._strategy.ranks.all_gather_values, self.on_rank_0)

    def gathered(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Gather the sharded tensors that hooks may have added to a checkpoint."""
        leaf = self.leaf(SaveMode.GATHERED)
        return self._strategy.ranks.alike(lambda: sharded_tree.walk(dict(checkpoint), leaf, sharded_tree.is_in_parts))

    def on_rank_0(self, act: Callable[[], _Result]) -> _Result | None:
        """Call ``act``, which saves objects, on rank 0. The other ranks take part in gathers that the objects need.

        If ``act`` fails, every rank raises.
        """
        strategy = self._strategy
        gather = None if strategy.ranks.is_alone else strategy.ranks.all_gather_values
        return strategy.ranks.alike(lambda: on_rank_0(act, strategy.global_rank, gather, self.saver.made_values))

    def opened(self, path: Any, weights_only: bool | None) -> OpenedCheckpoint:
        """Open and verify a checkpoint in any format. An error on one rank is raised on every rank."""
        strategy = self._strategy
        opened = strategy.ranks.alike(lambda: open_for_run(path, weights_only))
        ranks = 1 if strategy.ranks.is_alone else process_group.world_size()
        strategy.ranks.alike(lambda: opened.verify(share=(strategy.global_rank if ranks > 1 else 0, ranks)))
        return opened
