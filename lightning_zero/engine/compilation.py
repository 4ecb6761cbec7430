"""Beside ``torch.compile``: hooks of the engine's, which it does not trace, and where compiled code begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs as ordinary Python, with all that it calls: a graph ends before it, another begins after it.

    What ``torch.compiler.disable`` does, at a fraction of its cost for each call.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    return never_traced(run)


def never_traced(function: Any) -> Any:
    """The same function, whose own code is not compiled; what it calls is, unless it calls ``set_eval_frame(None)``."""
    # By the interface in C: the compiler itself takes half a second to import, for projects that may have no use of it.
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    return function


class OwnHook:
    """A hook of the engine's on a module. Copies and pickles of the module have nothing of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)  # not by ``untraced``: one call less at each forward of each module
        try:
            return self._function(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return _made_no_hook, ()


class EntryHook(OwnHook):
    """One whose function is told first whether it was called from compiled code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return self._function(compiler is not None, *args, **kwargs)
        finally:
            set_eval_frame(compiler)


for _hook in (OwnHook, EntryHook):
    never_traced(_hook.__call__)


def _no_hook(*_: Any, **__: Any) -> None:
    """In the place of an engine's hook in a copy of the module."""


def _made_no_hook() -> Callable[..., None]:
    return _no_hook


def is_compiled(module: nn.Module) -> bool:
    """Whether compiled code begins in the forward of a module."""
    forward = vars(module).get("forward")  # of `model.forward = torch.compile(model.forward)`, and as Lightning does it
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # as long as it is not imported nothing is compiled
    return (
        (compiler is not None and isinstance(module, compiler.OptimizedModule))
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )
