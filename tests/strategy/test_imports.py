"""What importing this package imports and exposes, and when the strategy names are registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENGINE_FIRST = """
import sys
import lightning_zero
assert dir(lightning_zero) == sorted([*lightning_zero.__all__, "engine", "fabric", "monitoring", "pruning"])
assert "torch" not in sys.modules
from lightning_zero.engine import Engine
lightning = ("lightning", "lightning_fabric", "pytorch_lightning")
assert not [name for name in sys.modules if name.partition(".")[0] in lightning]
assert not hasattr(lightning_zero, "nothing")
assert not {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint"} & set(sys.modules)

from lightning.fabric import Fabric
print(type(Fabric(strategy="zero2", accelerator="cpu", devices=1).strategy).__module__)
from lightning.pytorch import Trainer
trainer = Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False)
print(type(trainer.strategy) is lightning_zero.ZeroStrategy)
from lightning_zero import *
print(ZeroStrategy.__module__, load_weights.__module__)
assert all(hasattr(lightning_zero, name) for name in dir(lightning_zero))
assert dir(lightning_zero) == sorted([*lightning_zero.__all__, "engine", "fabric", "monitoring", "pruning"])
"""


@pytest.mark.parametrize(
    "first",
    [
        "from lightning_zero import ZeroStrategy",
        "from lightning_zero import ZeroAutoStrategy",
        "from lightning_zero.monitoring import ZeroMonitor",
        "import lightning_zero, pytorch_lightning",
        "import lightning_zero.strategies.trainer",
    ],
)
@pytest.mark.exhaustive
def test_whatever_a_project_imports_first_all_names_are_registered(first):
    then = "from lightning.pytorch.strategies import StrategyRegistry as all_; print({'zero3', 'zero_auto'} <= {*all_})"
    assert in_a_new_interpreter(f"{first}\n{then}").splitlines()[-1] == "True"


def in_a_new_interpreter(code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # not the Python that starts at once: Lightning is imported there already
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Each module is imported by a fork of one interpreter that has imported torch; Lightning is imported anew in the fork.
EACH_FIRST = """
import importlib, os, sys, traceback
import lightning.pytorch
assert not [name for name in sys.modules if name.startswith("lightning_zero")]
for module in sys.argv[1:]:
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
                del sys.modules[name]
            importlib.import_module(module)
            from lightning.pytorch import Trainer
            trainer = Trainer(
                strategy="zero3", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
            )
            assert type(trainer.strategy).__module__ == "lightning_zero.strategies.trainer"
        except BaseException:
            print(module, traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
print("done")
"""
# These modules import packages that need not be installed.
OPTIONAL = {"lightning_zero.lightning_fabric", "lightning_zero.pytorch_lightning"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", ["lightning_zero/strategies", "lightning_zero"])
def test_every_module_can_be_imported_first_and_the_strategies_are_registered_afterwards(folder):
    files = [file.relative_to(ROOT) for file in sorted((ROOT / folder).rglob("*.py")) if file.stem != "__init__"]
    modules = {".".join(file.with_suffix("").parts) for file in files} - OPTIONAL
    assert in_a_new_interpreter(EACH_FIRST, *sorted(modules)) == "done\n"


@pytest.mark.exhaustive
def test_names_are_imported_on_first_access_and_strategies_registered_when_lightning_is_imported():
    assert in_a_new_interpreter(ENGINE_FIRST).splitlines() == [
        "lightning_zero.strategies.fabric",
        "True",
        "lightning_zero.strategies.trainer lightning_zero.checkpoint.weights",
    ]
