"""An out-of-memory error names what holds how much memory, and what would free how much."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.support.trainer import Learner, make_trainer


class Greedy(Learner):
    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.gathers:
            self.all_gather(torch.empty(1).expand(2**52))
        elif batch_idx == 2:
            torch.empty(2**52, device="cpu")  # the allocator of the CPU refuses
        return loss


def error_of(stage: int, gathers: bool) -> str:
    module = Greedy(gathers)
    with pytest.raises(RuntimeError) as raised:
        make_trainer(f"zero{stage}", max_epochs=1).fit(module)
    return str(raised.value)


@pytest.mark.parametrize(("stage", "gathers"), [(1, False), (2, False), (3, False), (3, True)])
def test_an_out_of_memory_error_names_holders_and_what_each_remedy_frees(run_on, stage, gathers):
    for number, said in enumerate(run_on(2, error_of, stage=stage, gathers=gathers)):
        first, holders, remedies = said.splitlines()[-3:]
        assert "can't allocate memory" in said and "another rank" not in said
        assert holders.startswith(f"When the allocation failed, rank {number} held ") and "optimizer" in holders
        assert remedies.startswith("What helps: ") and 'offload="nvme"' in remedies
        assert ("stage=3" in remedies) == (stage < 3)
        assert len(re.findall(r"frees [^;]*?[\d.e-]+ GB", remedies)) == (4 if stage < 3 else 3)
