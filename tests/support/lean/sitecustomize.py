"""Faster start of a process: Python imports this file if its folder is in PYTHONPATH.

torchmetrics, and so Lightning, imports the packages hidden below if they are installed: a third of its import time.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError

WITHOUT = ("transformers", "scipy")
_from_name = Distribution.from_name


def from_name(name: str) -> Distribution:
    if name in WITHOUT:
        raise PackageNotFoundError(name)
    return _from_name(name)


Distribution.from_name = staticmethod(from_name)  # type: ignore[method-assign, assignment]
sys.modules.update(dict.fromkeys(WITHOUT))  # type: ignore[arg-type]
