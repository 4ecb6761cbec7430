"""Gives every Hydra app lightning_zero's config groups, and Lightning its strategy names, with no import by the user.

Importing lightning_zero imports torch and Lightning, which takes seconds: too long for each `--help` of each Hydra app
on the machine. So the groups are given by their folder, and the names are registered once Lightning has been imported.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


class LightningZeroSearchPath(SearchPathPlugin):
    """Appended, so an app's own groups and options of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        spec = importlib.util.find_spec("lightning_zero")
        assert spec is not None and spec.submodule_search_locations is not None
        search_path.append("lightning_zero", f"file://{Path(spec.submodule_search_locations[0]) / 'conf'}")


class _RegisterAfterLightning(MetaPathFinder):
    """Imports lightning_zero right after Lightning, by taking part once in the search for Lightning's package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module("lightning_zero")

        spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    if any(name in sys.modules for name in LIGHTNING):
        importlib.import_module("lightning_zero")
    elif not any(type(finder).__name__ == _RegisterAfterLightning.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterLightning())


_register()
