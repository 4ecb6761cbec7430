"""Hooks that ``torch.compile`` does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zero.engine.compat import never_traced, set_eval_frame


def untraced(function: Callable[[Any], Any]) -> Any:
    """Decorator for functions of one argument: ``torch.compile`` runs them as ordinary Python, with a graph break.

    This covers everything that the function calls, like ``torch.compiler.disable``, but costs less per call.
    """

    def run(argument: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return function(argument)
        finally:
            set_eval_frame(compiler)

    return never_traced(run)


class OwnHook:
    """An engine hook on a module. Copies and pickles of the module do not have it (see ``compat.leave_out_of_copies``).

    Args:
        function: called with a flag that says whether compiled code calls the hook, and with the hook's arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def __name__(self) -> str:
        # ``torch.jit.script`` compiles a module's hooks, too, and reads their names
        raise AttributeError(
            "torch.jit.script cannot compile a module that a strategy has set up, because of its hooks. Call "
            "torch.jit.trace within 'with lightning_zero.full_parameters(module):', or torch.jit.script after the run."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)  # inlined from ``untraced``, to save one call in each module's forward
        try:
            return self._function(compiler is not None, *args, **kwargs)
        finally:
            set_eval_frame(compiler)


never_traced(OwnHook.__call__)
