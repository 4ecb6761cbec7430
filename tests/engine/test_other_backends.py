"""Backends other than Gloo, such as NCCL: process groups, communicated values, and detection of failed ranks.

No GPU is needed: collectives are those of `tests/gpu/one_device.py`, or Gloo's under another backend's name.
"""

from __future__ import annotations

import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.one_device import Layers, twins
from tests.support.models import Square
from tests.support.training import Recipe, batch, prepare
from tests.support.workers import rank


def groups_in_use() -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.comm import backend_transport

    used: dict[str, set[object]] = {"gather": set(), "reduce": set()}
    with twins(2):
        gather, reduce = backend_transport.all_gather_single, backend_transport.reduce_scatter_single

        def note(kind, act):
            def run(*tensors, group, **options):
                used[kind].add(group)
                return act(*tensors, group=group, **options)

            return run

        with (
            patch.object(backend_transport, "all_gather_single", note("gather", gather)),
            patch.object(backend_transport, "reduce_scatter_single", note("reduce", reduce)),
        ):
            module = Layers(8, 3)
            engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=3)
            module(torch.ones(2, 8)).backward()
            engine.close(communicate=False)
        ((gathers,), (reductions,)) = used["gather"], used["reduce"]
        assert len({gathers, reductions, dist.group.WORLD}) == 3


def test_gathers_and_reductions_each_use_a_separate_process_group(run_on):
    run_on(1, groups_in_use)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.ones(64), torch.ones(64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().sum()


def reduce_complex(stage: int) -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.comm import backend_transport

    with twins(2):
        reduce, dtypes = backend_transport.reduce_scatter_single, []

        def note(shard, flat, **options):
            dtypes.extend([shard.dtype, flat.dtype])
            return reduce(shard, flat, **options)

        module = Complex()
        expected = torch.autograd.grad(module(torch.arange(64.0)), module.weight)[0]
        with patch.object(backend_transport, "reduce_scatter_single", note):
            engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
            module(torch.arange(64.0)).backward()
        assert dtypes == [torch.float32, torch.float32]  # NCCL has no complex dtypes
        local = module.weight.grad.local
        assert torch.equal(local, expected[: len(local)] / 2), "rank 0's part of half the twin's own"
        engine.close(communicate=False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_complex_gradients_travel_as_pairs_of_real_numbers(run_on, stage):
    run_on(1, reduce_complex, stage=stage)


def transport_of_a_gpus_tensors() -> str:
    from lightning_zero.engine.comm.collectives import Communicator
    from lightning_zero.engine.plan.mesh import ALL

    communicator = Communicator(None, torch.device("cuda"))  # starts nothing on a device
    transport = communicator.along(ALL)._transport
    communicator.close()
    return type(transport).__name__


def test_on_gpus_gloo_is_used_through_its_collectives_since_it_sends_only_cpu_tensors(run_on):
    assert run_on(2, transport_of_a_gpus_tensors) == ["BackendTransport"] * 2


def gather_over_gloo(bounds: list[int]) -> None:
    from lightning_zero.engine.comm.backend_transport import BackendTransport

    transport = BackendTransport(dist.new_group(), dist.new_group(), is_gloo=True)
    full, (start, stop) = torch.full((8,), -1.0), bounds[rank() : rank() + 2]
    full[start:stop] = torch.arange(8.0)[start:stop]
    version = full._version
    transport.all_gather(full, bounds).wait()
    assert torch.equal(full, torch.arange(8.0))
    assert full._version == version, "autograd would refuse what it has saved"


@pytest.mark.parametrize("bounds", [[0, 4, 8], [0, 3, 8], [0, 0, 8]], ids=str)
def test_collectives_of_gloo_gather_slices_of_any_lengths(run_on, bounds):
    run_on(2, gather_over_gloo, bounds=bounds)


def group_in_another_order() -> str:
    from lightning_zero.engine.comm import process_group

    with patch.object(process_group, "_CAN_KEEP_ORDER", False), pytest.raises(ValueError) as refused:
        process_group.new_group([1, 0], "gloo", None)
    assert dist.get_process_group_ranks(process_group.new_group([0, 1], "gloo", None)) == [0, 1]
    return str(refused.value)


def test_torch_before_2_12_makes_no_process_group_in_another_order(run_on):
    for said in run_on(2, group_in_another_order):
        assert "cannot make a process group of the ranks [1, 0] in this order" in said


def timeouts_of_own_groups() -> None:
    from lightning_zero.engine import Engine

    device, group = torch.device("cpu"), dist.new_group(timeout=timedelta(seconds=77))
    module, optimizer = prepare(Recipe(Square))
    engine = Engine(module, [optimizer], group=group)
    made = engine.communicator._new_group("gloo", [[0, 1]])
    assert made._get_backend(device).options._timeout == timedelta(seconds=77)
    module(*batch(0)).backward()
    engine.close()


def test_the_engines_process_groups_have_the_timeout_chosen_by_the_user(run_on):
    run_on(2, timeouts_of_own_groups)


def fail_while_the_other_waits_for_a_device() -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.comm import failures

    module, optimizer = prepare(Recipe(Square))
    engine = Engine(module, [optimizer])
    dist.barrier()
    if rank() == 0:
        failures.fail("rank 0 failed: out of memory")
    else:
        time.sleep(3)  # as if held up by a kernel behind a collective that does not end
        assert failures.failure() == "rank 0 failed: out of memory"
        with pytest.raises(RuntimeError, match="rank 0 failed: out of memory"):
            module(*batch(0)).backward()
    engine.close(communicate=False)


def fail_alike() -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.comm import failures

    module, optimizer = prepare(Recipe(Square))
    engine = Engine(module, [optimizer])
    for _ in range(2):
        dist.barrier()
        failures.fail(f"rank {rank()} failed: out of memory")
        assert failures.failure() is None
    dist.barrier()  # the group is left as it is
    engine.close()


def test_the_process_group_is_left_as_it_is_when_all_ranks_fail_alike(run_on):
    run_on(2, fail_alike)


@pytest.mark.exhaustive
def test_a_rank_that_waits_only_for_its_device_learns_that_another_rank_has_failed(run_on):
    run_on(2, fail_while_the_other_waits_for_a_device)
