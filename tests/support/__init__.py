"""What the tests share: pools of real processes that run one function on every rank, and small models to train there.

A test hands a module-level function to the `run_on` fixture. It runs on `world_size` processes that joined one Gloo
group (one rank has no group at all), and what each rank returned comes back as a list by rank:

    import torch
    import torch.distributed as dist

    from tests.support import rank, world_size


    def sum_of_ranks(start):
        total = torch.tensor(float(start + rank()))
        dist.all_reduce(total)
        return total.item()


    def test_every_rank_gets_the_same_sum(run_on):
        assert run_on(2, sum_of_ranks, start=10) == [21.0, 21.0]

- The function, its arguments and its results travel by pickle: the function must live at the top of a module.
- Every case starts from the same seeds (torch, numpy, random; `seed=0`) and environment, in an empty working folder.
- A Trainer inside a case runs as it would under torchrun: the environment says so, hence Lightning neither launches
  processes nor makes a group. `Trainer(devices=world_size(), accelerator="cpu", strategy=...)` is all it takes.
- A rank that raises makes the call raise `CaseFailed`, whose text has each failing rank's traceback, the stack of each
  rank that was still busy, and what the ranks printed. A case that exceeds `timeout` seconds (default 60) ends so too.
  The pool is then replaced, so the tests that follow are not disturbed. An error that is expected is cheaper to catch
  inside the case, with `pytest.raises`, when it comes on every rank alike.
- The processes are forked from one that has imported torch and Lightning, so a pool costs a fraction of a second.

Tests that start a script or a command as a user does start it with `warm.warm_python()`, which costs as little; with
`sys.executable`, which costs seconds, only where the start itself, or who is whose child, is what they are about.
"""

from tests.support.workers import CaseFailed, WorkerPools, rank, world_size

__all__ = ["CaseFailed", "WorkerPools", "rank", "world_size"]
