"""Entry point of the command `lightning-zero`, beside the package because importing the package takes seconds.

`lightning_zero/__init__.py` imports torch and Lightning. Help and the version need neither, so for them the package is
put into `sys.modules` without running `__init__.py`; every other command line imports the package as usual.
"""

import importlib.util
import itertools
import sys


def main() -> int:
    words = list(itertools.takewhile("--".__ne__, sys.argv[1:]))  # arguments after -- belong to a script
    if not sys.argv[1:] or {"-h", "--help", "-V", "--version"} & set(words):
        spec = importlib.util.find_spec("lightning_zero")
        assert spec is not None, "this file is installed with the package"
        sys.modules["lightning_zero"] = importlib.util.module_from_spec(spec)
    from lightning_zero.__main__ import main

    return main()
