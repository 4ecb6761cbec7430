"""Windows of a module: what the engine does before and after each forward, and each step around forwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.comm.tensor_parallel import own_share
from lightning_zero.engine.compat import running_calls
from lightning_zero.engine.runtime.activations import ActivationStore, CheckpointedModule
from lightning_zero.engine.runtime.reducer import GradientReducer
from lightning_zero.engine.runtime.schedule import Schedule, in_backward
from lightning_zero.engine.state.bucket import SharedByBuckets


class Windows:
    """Opens and closes the windows of a module, which may be nested; the outermost window is usually one step.

    Args:
        before: called before the outermost window is opened.

    Attributes:
        buffers_follow: whether the next step's forward begins by copying rank 0's buffers to all ranks.
        activations: the inputs of checkpointed modules that are moved; None if none are moved.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        reducer: GradientReducer,
        shared: SharedByBuckets,
        *,
        activations: ActivationStore | None,
        checkpointed: Sequence[CheckpointedModule],
        before: Callable[[], None],
    ) -> None:
        self._module, self._schedule, self._reducer = weakref.ref(module), schedule, reducer
        self._shared, self._before = shared, before
        self.activations, self._checkpointed = activations, checkpointed
        self.buffers_follow = True
        self._is_forward_a_step = True  # whether a call of the module is a step; False once ``step`` is used
        self._is_forward = False  # whether a call of the module has opened the outermost window

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for a step that is not merely a call of the root module."""
        self._is_forward_a_step = False
        self._recover_if_interrupted(running=0)
        windows = self._schedule.windows
        try:
            self._open(is_step=True)
            yield
            self.note_forward()
        except (KeyboardInterrupt, SystemExit):
            self._recover(windows + 1)
            raise
        finally:
            if self._schedule.windows > windows:
                self._close()

    def before_forward(self) -> None:
        """Open a window for a call of the module."""
        self._recover_if_interrupted(running=1)
        if self._schedule.windows == 0:
            self._is_forward = True
        self._open(is_step=self._is_forward_a_step)

    def after_forward(self, output: Any) -> None:
        """Close the window of a call of the module, whose output is None after an exception."""
        self._close()
        if self._is_forward_a_step and not self._schedule.windows and output is not None:
            self.note_forward()

    def note_forward(self) -> None:
        """Set ``buffers_follow`` after a step's forward: like DDP, only if the forward's backward is synchronised."""
        self.buffers_follow = torch.is_grad_enabled() and self._reducer.synchronise

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, as DDP does. Collective."""
        module = self._module()
        assert module is not None, "the module was deleted"
        with torch.no_grad(), self._shared.phases("wait for the other ranks", "buffers of rank 0"):
            self._shared.communicator.control.copy_from_first(list(map(own_share, module.buffers())))

    def _open(self, *, is_step: bool) -> None:
        self._reducer.abort()
        if self._schedule.windows == 0:
            if not in_backward():
                self._before()
                self._shared.streams.begin_forward()
                if self.activations is not None:
                    self.activations.begin_forward()
            if is_step and self.buffers_follow:
                self.sync_buffers()
        self._schedule.open_window()

    def _close(self) -> None:
        if self._schedule.windows:
            self._schedule.close_window()
        if not self._schedule.windows:
            self._is_forward = False

    def _recover_if_interrupted(self, running: int) -> None:
        """Recover if Ctrl-C or ``sys.exit`` has interrupted a forward outside of ``step``.

        Args:
            running: how many calls of the module are running, if no call has been interrupted.
        """
        if in_backward():
            return
        if self._schedule.windows == 0:
            was_interrupted = any(unit.depth for unit in self._schedule.units)
        else:
            module = self._module()
            was_interrupted = self._is_forward and module is not None and running_calls(module) <= running
        if was_interrupted:
            self._recover(0)

    def _recover(self, windows: int) -> None:
        for checkpointed in self._checkpointed:
            checkpointed.recover()
        self._schedule.recover(windows)
