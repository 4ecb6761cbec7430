"""For a process that shall start faster: no transformers. Python imports this file where PYTHONPATH has its folder.

torchmetrics, and so Lightning, imports transformers where it is installed: a fourth of the time that it all takes.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError

_from_name = Distribution.from_name


def from_name(name: str) -> Distribution:
    if name == "transformers":
        raise PackageNotFoundError(name)
    return _from_name(name)


Distribution.from_name = staticmethod(from_name)  # type: ignore[method-assign, assignment]
sys.modules["transformers"] = None  # type: ignore[assignment]
