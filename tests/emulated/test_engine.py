"""Cases of the engine's tests in which parameters are written, copied and loaded, with all tensors on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.emulated.device import NAME, in_order
from tests.engine import test_copies_and_the_end as copies
from tests.engine import test_sharded_tensor as tensors
from tests.engine import test_stored as stored
from tests.engine import test_weights as weights

BF16 = {"dtype": torch.bfloat16}
FP32 = {"dtype": torch.float32}

CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (copies.write_each_ranks_own, BF16),
    (stored.loaded_into_engines, FP32),
    (tensors.replace_data, FP32),
    (tensors.replace_data, FP32 | {"offload": "cpu"}),
    (tensors.several_forwards_replace_data, {}),
    (tensors.replace_gradients, {}),
    (tensors.edit_optimizer_state, {}),
    (tensors.low_precision_writes, {}),
    (tensors.clip_many_parameters, {}),
    (copies.copied_modules, {}),
    (copies.copied_optimizers, {}),
    (copies.train_a_copy_in_full, {}),
    (copies.copies_in_forward, {}),
    (weights.use_before_it_is_cut, {}),
]


@in_order
def on_device(case: Callable[..., Any], **arguments: Any) -> None:
    with torch.device(NAME):
        case(**arguments)


@pytest.mark.exhaustive(but=4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("case", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_case_of_the_engine_ends_the_same_on_a_device(run_on_device, case, arguments, stage):
    run_on_device(2, on_device, case=case, stage=stage, **arguments)
