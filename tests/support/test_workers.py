"""The pools of processes: results, failures and hangs are reported, and the next case is not affected."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

from tests.support import CaseFailed, rank, world_size


def sum_of_ranks(start: int) -> float:
    total = torch.tensor(float(start + rank()))
    dist.all_reduce(total)
    return total.item()


def surroundings() -> tuple[int, int, bool, float, float, int, list[str]]:
    random_numbers = (torch.rand(()).item(), random.random())
    return rank(), world_size(), dist.is_initialized(), *random_numbers, torch.get_num_threads(), os.listdir()


def leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    open("left_behind", "w").close()
    torch.set_default_dtype(torch.float64)


def traces() -> tuple[bool, bool, torch.dtype]:
    return "LEFT_BEHIND" in os.environ, os.path.exists("left_behind"), torch.get_default_dtype()


def raise_on_the_last_rank() -> None:
    if rank() == world_size() - 1:
        print("a last word")
        raise ValueError("only here")


def wait_for_a_rank_that_never_comes() -> None:
    if rank() == 0:
        dist.all_reduce(torch.zeros(1))
    else:
        while True:
            pass


def die_on_rank_0() -> None:
    if rank() == 0:
        os._exit(3)


def take_the_group_down() -> None:
    dist.destroy_process_group()


def one_collective_more_on_rank_0() -> None:
    if rank() == 0:
        dist.send(torch.zeros(1), 1)
        dist.all_reduce(torch.zeros(1))
    else:
        dist.recv(torch.zeros(1), 0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_runs_the_function_in_one_group(run_on, size):
    assert run_on(size, sum_of_ranks, start=10) == [10.0 * size + sum(range(size))] * size


def test_cases_start_from_the_same_seeds_in_an_empty_folder_with_one_thread(run_on):
    first, second = run_on(2, surroundings), run_on(2, surroundings)
    assert first == second
    assert [case[:3] for case in first] == [(0, 2, True), (1, 2, True)]
    assert first[0][3:] == first[1][3:]
    assert first[0][5:] == (1, [])


def test_one_rank_has_no_process_group(run_on):
    assert run_on(1, surroundings)[0][:3] == (0, 1, False)


def test_a_case_leaves_no_traces_for_the_next(run_on):
    run_on(1, leave_traces)
    assert run_on(1, traces) == [(False, False, torch.float32)]


@pytest.mark.exhaustive
def test_an_error_on_one_rank_comes_back_with_its_traceback_and_output_and_the_next_case_runs(run_on):
    with pytest.raises(CaseFailed) as failure:
        run_on(2, raise_on_the_last_rank)
    text = str(failure.value)
    assert "ValueError: only here" in text and "in raise_on_the_last_rank" in text and "a last word" in text
    assert "rank 0 of 2: still busy when another rank failed" in text
    assert run_on(2, sum_of_ranks, start=0) == [1.0, 1.0]


def test_a_hang_ends_at_the_timeout_with_every_ranks_stack_and_the_next_case_runs(run_on):
    with pytest.raises(CaseFailed, match="no answer within 1 s") as failure:
        run_on(2, wait_for_a_rank_that_never_comes, timeout=1)
    text = str(failure.value)
    assert "all_reduce" in text and text.count("in wait_for_a_rank_that_never_comes") == 2
    assert run_on(2, sum_of_ranks, start=0) == [1.0, 1.0]


@pytest.mark.exhaustive
def test_ranks_out_of_step_are_detected_in_the_case_that_caused_it(run_on):
    with pytest.raises(CaseFailed):
        run_on(2, one_collective_more_on_rank_0, timeout=2)
    assert run_on(2, sum_of_ranks, start=0) == [1.0, 1.0]


def test_a_process_that_dies_is_reported_with_its_exit_code(run_on):
    with pytest.raises(CaseFailed, match="the process ended with code 3"):
        run_on(2, die_on_rank_0)


def test_a_case_may_destroy_the_process_group(run_on):
    run_on(2, take_the_group_down)
    assert run_on(2, sum_of_ranks, start=0) == [1.0, 1.0]


def test_a_function_that_a_worker_cannot_find_is_refused(run_on):
    with pytest.raises(ValueError, match="not at the top of its module"):
        run_on(2, lambda: None)
