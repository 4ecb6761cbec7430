"""Import hook: once any code has imported a given module, import another module as well."""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OWN = f"{__name__.partition('.')[0]}."


def after_import(of: str, then: str) -> None:
    """Import the module ``then`` once the module ``of`` has been imported; immediately if ``of`` is already imported.

    ``then`` is not imported while modules of this package are being executed, since ``then`` may import these modules.
    """
    if of in sys.modules:
        importlib.import_module(then)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.then[of] = then


class _Thread(threading.local):
    """Per thread: the number of this package's modules being executed, and the names of modules to import later."""

    def __init__(self) -> None:
        self.own = 0
        self.due: list[str] = []


class _Finder(MetaPathFinder):
    """Finder that wraps module loaders, since a module may be searched for (``find_spec``) without being executed."""

    def __init__(self) -> None:
        self.then: dict[str, str] = {}
        self._thread = _Thread()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.then and not fullname.startswith(_OWN):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            if not isinstance(execute, partial):  # a loader shared by several modules is wrapped once
                spec.loader.exec_module = partial(self._execute, execute)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        name, thread = module.__name__, self._thread
        is_own = name.startswith(_OWN)
        thread.own += is_own
        try:
            execute(module)
            if then := self.then.pop(name, None):
                thread.due.append(then)
        finally:  # also after an error, since the modules imported before the error stay imported
            thread.own -= is_own
            while thread.due and not thread.own:
                importlib.import_module(thread.due.pop(0))


_FINDER = _Finder()
