"""docs/how-to/migrate.md lists every argument of DDP, FSDP and DeepSpeed, and names our arguments correctly."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_zero import ZeroStrategy
from tests.examples.running import REPOSITORY

TEXT = (REPOSITORY / "docs" / "how-to" / "migrate.md").read_text()
PAGE = re.sub(r"^ *```.*?```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
IN_CODE = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", PAGE))))


def arguments_of(callable_: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(callable_).parameters.values()
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"}


@pytest.mark.parametrize(
    "theirs",
    [
        *(DDPStrategy.__init__, DistributedDataParallel.__init__),
        *(FSDPStrategy.__init__, FullyShardedDataParallel.__init__),
        *(ModelParallelStrategy.__init__, fully_shard, DeepSpeedStrategy.__init__),
    ],
    ids=lambda theirs: theirs.__qualname__,
)
def test_every_argument_of_the_other_strategies_is_on_the_page(theirs: Callable[..., Any]) -> None:
    missing = arguments_of(theirs) - IN_CODE
    assert not missing, f"say what becomes of {sorted(missing)}"


def test_arguments_of_ours_that_the_page_names_exist() -> None:
    calls = re.findall(r"ZeroStrategy\(([^`)]*)\)", PAGE)
    named = {name for call in calls for name in re.findall(r"(\w+)=", call)}
    right = [line.split(" | ")[-1] for line in PAGE.splitlines() if line.startswith("| `")]
    options = {"stage", "units", "prefetch", "overlap", "reduce_dtype", "activation_checkpointing"}
    named |= {name for cell in right for name in re.findall(r"`(\w+)=", cell) if name in options}
    assert named <= arguments_of(ZeroStrategy.__init__)
    assert options <= named, "this test no longer finds them"
