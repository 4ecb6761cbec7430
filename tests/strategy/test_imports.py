"""What importing this package imports, exposes and registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORTED = """
import sys
import lightning.pytorch
before = {*sys.modules}
import lightning_zero
print(sorted({name.partition(".")[0] for name in {*sys.modules} - before} - sys.stdlib_module_names))
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
one_device = {"accelerator": "cpu", "devices": 1}
print(type(Fabric(strategy="zero2", **one_device).strategy) is lightning_zero.fabric.ZeroStrategy)
print(type(Trainer(strategy="zero3", logger=False, **one_device).strategy) is lightning_zero.ZeroStrategy)
print(lightning_zero.engine.Engine.__name__, lightning_zero.monitoring.__name__, lightning_zero.pruning.__name__)
from lightning_zero import *
print(ZeroStrategy.__module__, load_weights.__module__)
"""


@pytest.mark.exhaustive
def test_importing_the_package_registers_the_strategies_of_lightning_and_imports_nothing_unrelated():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", IMPORTED]  # in a new process: tests/support/warm.py would change what is imported
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.stdout.splitlines() == [
        "['lightning_zero', 'torch']",  # neither pytorch_lightning nor what only commands and callbacks use
        "True",
        "True",
        "Engine lightning_zero.monitoring lightning_zero.pruning",
        "lightning_zero.strategies.trainer lightning_zero.checkpoint.weights",
    ], done.stderr
