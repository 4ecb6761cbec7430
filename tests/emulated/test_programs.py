"""Random training programs on a device: the numbers of averaged gradients, and all work on the device is in order."""

from __future__ import annotations

import pytest
import torch

from tests.emulated.device import NAME, in_order
from tests.search.execution import execute
from tests.search.programs import Program
from tests.search.test_programs import search


@in_order
def execute_on_device(program: Program) -> str | None:
    with torch.device(NAME):
        return execute(program)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(0)  # see tests/search/test_programs.py
def test_random_programs_are_in_order(run_on_device, ranks, request):
    search(run_on_device, execute_on_device, ranks, 0.2, request.config)
