"""Import hook: import one module right after another one, whichever code imports that and whenever."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(of: str, then: str) -> None:
    """Import the module ``then`` as soon as the module ``of`` has been imported; now, if ``of`` is imported already."""
    if of in sys.modules:
        importlib.import_module(then)
    else:
        sys.meta_path.insert(0, _Finder(of, then))


class _Finder(MetaPathFinder):
    """Finder that wraps the loader of one module until that module is executed; a search alone does not trigger it."""

    def __init__(self, of: str, then: str) -> None:
        self._of, self._then = of, then
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._of or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_import(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self._of and self in sys.meta_path:
                sys.meta_path.remove(self)
                importlib.import_module(self._then)

        spec.loader.exec_module = execute_then_import  # type: ignore[method-assign]
        return spec
