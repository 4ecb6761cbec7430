"""For a process that shall start faster: Python imports this file where PYTHONPATH has its folder.

torchmetrics, and so Lightning, imports what is below where it is installed: a third of the time that it all takes.
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
