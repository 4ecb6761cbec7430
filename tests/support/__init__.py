"""Shared by the tests: pools of real processes that run one function on every rank, and small models to train there.

A test passes a module-level function to the `run_on` fixture. The function runs on `world_size` processes that have
joined one Gloo group (one rank has no group at all), and its return values come back as a list by rank:

    import torch
    import torch.distributed as dist

    from tests.support import rank, world_size


    def sum_of_ranks(start):
        total = torch.tensor(float(start + rank()))
        dist.all_reduce(total)
        return total.item()


    def test_every_rank_gets_the_same_sum(run_on):
        assert run_on(2, sum_of_ranks, start=10) == [21.0, 21.0]

- The function, its arguments and its results are pickled: the function must be defined at the top level of a module.
- Every case starts from the same seeds (torch, numpy, random; `seed=0`) and environment, in an empty working folder.
- A Trainer in a case runs as under torchrun: given the environment variables, Lightning neither launches processes nor
  creates a group. `Trainer(devices=world_size(), accelerator="cpu", strategy=...)` is sufficient.
- If a rank raises, the call raises `CaseFailed`, whose text has each failing rank's traceback, the stack of each rank
  that was still busy, and what the ranks printed. A case that exceeds `timeout` seconds (default 60) fails likewise.
  The pool is then replaced, so later tests are not affected. An expected error that occurs on every rank is cheaper to
  catch within the case, with `pytest.raises`.
- The processes are forked from one that has imported torch and Lightning, so a pool costs a fraction of a second.

Tests that start a script or a command as a user does use `warm.warm_python()`, which costs as little. `sys.executable`,
which costs seconds, is only for tests about starting itself, or about parent and child processes.
"""

from tests.support.workers import CaseFailed, WorkerPools, rank, world_size

__all__ = ["CaseFailed", "WorkerPools", "rank", "world_size"]
