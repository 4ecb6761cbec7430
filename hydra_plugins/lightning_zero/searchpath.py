"""Gives every Hydra app lightning_zero's config groups, and Lightning its strategy names, with no import by the user.

Importing lightning_zero imports torch and Lightning, which takes seconds: too long for each `--help` of each Hydra app
on the machine. So the groups are given by their folder, and the names are registered once Lightning has been imported.
"""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def _package() -> Path:
    """The folder of lightning_zero, which is not imported."""
    spec = find_spec("lightning_zero")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


class LightningZeroSearchPath(SearchPathPlugin):
    """Appended, so an app's own groups and options of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("lightning_zero", f"file://{_package() / 'conf'}")


def _register_after_lightning() -> None:
    spec = spec_from_file_location("lightning_zero_after_import", _package() / "strategies" / "after_import.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in LIGHTNING:
        module.after_import(name, "lightning_zero")


_register_after_lightning()
