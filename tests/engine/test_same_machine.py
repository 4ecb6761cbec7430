"""Cross-memory attach: the numbers of the default transport, and what happens when a process fails."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.training import Recipe, same_runs, train_zero
from tests.support.transports import cross_memory
from tests.support.workers import rank, world_size

SIZES = pytest.mark.parametrize("size", [2, 3, 4])
MINUTE = timedelta(minutes=1)


def objects_of_all(value: object) -> list[object]:
    found: list[object] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def neighbours():
    from lightning_zero.engine.comm.cross_memory.exchange import connect

    with cross_memory():
        found = connect(range(world_size()), rank(), MINUTE, objects_of_all)
    assert found is not None, "this machine does not let processes read each other's memory"
    return found


def exchange_slices(numel: int) -> None:
    transport = neighbours()
    values = torch.arange(numel * world_size()).view(world_size(), numel) + 1
    for turn in range(20):
        full = torch.zeros(world_size(), numel, dtype=torch.int64)
        full[rank()] = values[rank()] * (turn + 1)
        if (turn + rank()) % 3 == 0:
            time.sleep(0.002)  # so that some ranks are ready earlier than others
        transport.gather(list(full)).wait()
        assert torch.equal(full, values * (turn + 1))
    dist.barrier()
    transport.close()


@SIZES
@pytest.mark.parametrize("numel", [1, 100_003])
def test_a_gather_gives_each_rank_the_slices_of_all_ranks(run_on, size, numel):
    run_on(size, exchange_slices, numel=numel)


def switched_off_on(place: int) -> str:
    from lightning_zero.engine.comm.collectives import Communicator
    from lightning_zero.engine.plan.mesh import ALL

    with cross_memory() if rank() != place else nullcontext():
        communicator = Communicator(None, torch.device("cpu"))
    name = type(communicator.along(ALL)._transport).__name__
    communicator.close()
    return name


@pytest.mark.parametrize("place", [None, 1])
def test_a_rank_can_switch_it_off_for_all(run_on, place):
    expected = "CrossMemoryTransport" if place is None else "BackendTransport"
    assert run_on(2, switched_off_on, place=place) == [expected] * 2


def add_up(numel: int, wire: torch.dtype) -> None:
    transport, size = neighbours(), world_size()
    values = torch.randn(size, size, numel, generator=torch.Generator().manual_seed(3))  # from each rank, for each rank
    own, sent = values[rank()][rank()], values[rank()].to(wire)
    exchanges = [transport.reduce(own, list(sent)) for _ in range(3)]
    terms = [own if other == rank() else values[other][rank()].to(wire).float() for other in range(size)]
    expected = sum(terms[1:], terms[0].clone())
    for exchange in exchanges:
        assert torch.equal(exchange.wait(), expected)
    dist.barrier()
    transport.close()


@SIZES
@pytest.mark.parametrize("numel", [3, 2**15, 100_003])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_reduction_gives_each_rank_the_sum_of_all_ranks_contributions(run_on, size, numel, wire):
    run_on(size, add_up, numel=numel, wire=wire)


def memory_of_a_reduction() -> None:
    transport = neighbours()
    sent = torch.ones(world_size(), 100_003)
    exchange = transport.reduce(sent[rank()], list(sent))
    is_freed = threading.Event()
    weakref.finalize(sent.untyped_storage(), is_freed.set)
    del sent
    assert is_freed.wait(30), "the sent values are kept until the reduction is waited for"
    assert (exchange.wait() == world_size()).all()
    dist.barrier()
    transport.close()


def test_sent_gradients_are_freed_once_all_ranks_have_read_them(run_on):
    run_on(3, memory_of_a_reduction)


def train_both_ways(recipe: Recipe, stage: int, **options: object) -> None:
    with cross_memory():
        run = train_zero(recipe, stage, **options)
    same_runs(run, train_zero(recipe, stage, **options))


@pytest.mark.exhaustive(but=2)
@SIZES
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bf16"}, {"unit_numel": 2**20}], ids=str)
def test_training_is_bit_equal_to_training_over_the_default_transport(run_on, size, stage, options):
    run_on(size, train_both_ways, recipe=Recipe(steps=4), stage=stage, **options)


def many_at_once(count: int) -> None:
    """More messages than a socket can hold, in both directions, while neither rank waits for them."""
    transport = neighbours()
    buffers = [torch.full((world_size(), 4), -1.0) for _ in range(count)]
    exchanges = []
    for number, full in enumerate(buffers):
        full[rank()] = number
        exchanges.append(transport.gather(list(full)))
    for number, (full, exchange) in enumerate(zip(buffers, exchanges)):
        exchange.wait()
        assert (full == number).all()
    dist.barrier()
    transport.close()


def test_thousands_of_exchanges_may_be_under_way(run_on):
    run_on(2, many_at_once, count=5000)


def many_small_ones_at_once(count: int, nbytes: int) -> None:
    """More small messages than a socket holds, in both directions, while all ranks wait for something else."""
    transport = neighbours()
    keys = [transport.small.send(5, [bytes([number % 251]) * nbytes] * (world_size() - 1)) for number in range(count)]
    dist.barrier()
    for number, key in enumerate(keys):
        assert transport.small.receive(key) == [bytes([number % 251]) * nbytes] * (world_size() - 1)
    dist.barrier()
    transport.close()


@SIZES
@pytest.mark.parametrize(("count", "nbytes"), [(3000, 0), (100, 2**16)], ids=["empty", "as large as may be"])
def test_more_small_exchanges_than_a_socket_holds_may_be_under_way(run_on, size, count, nbytes):
    run_on(size, many_small_ones_at_once, count=count, nbytes=nbytes)


def small_ones_in_different_orders() -> None:
    """Messages match by tag and ordinal, since ranks may start different tags in different orders."""
    transport, other = neighbours(), 1 - rank()
    tags = [3, 4] if rank() == 0 else [4, 3]
    keys = [(tag, turn, transport.small.send(tag, [bytes([rank(), tag, turn])])) for turn in range(3) for tag in tags]
    for tag, turn, key in reversed(keys):
        assert transport.small.receive(key) == [bytes([other, tag, turn])]
    dist.barrier()
    transport.close()


def test_small_exchanges_of_different_tags_may_begin_in_different_orders(run_on):
    run_on(2, small_ones_in_different_orders)


def small_ones_waited_for_by_threads() -> None:
    transport = neighbours()
    begun = [transport.small.send(tag, [bytes([tag])]) for tag in range(8)]
    found: dict[int, list[bytes]] = {}
    threads = [
        threading.Thread(target=lambda tag=tag: found.update({tag: transport.small.receive((tag, 1))}))
        for tag in range(8)
    ]
    for thread in threads:
        thread.start()
    dist.barrier()
    for tag in range(8)[:: 1 if rank() else -1]:
        transport.small.send(tag, [bytes([100 + tag])])
    for thread in threads:
        thread.join(20)
    assert found == {tag: [bytes([100 + tag])] for tag in range(8)}
    assert [transport.small.receive(key) for key in begun] == [[bytes([tag])] for tag in range(8)]
    dist.barrier()
    transport.close()


def test_several_threads_may_wait_for_small_exchanges(run_on):
    run_on(2, small_ones_waited_for_by_threads)


def end_while_others_wait_for_small_ones() -> None:
    transport = neighbours()
    if rank() == 1:
        transport.small.send(1, [b"sent before it ends"])
        dist.barrier()
        transport.sever("it failed")
        return
    keys = [transport.small.send(1, [b"for a rank that ends"]) for _ in range(2)]
    dist.barrier()
    assert transport.small.receive(keys[0]) == [b"sent before it ends"]
    with pytest.raises(RuntimeError, match="rank 1 closed the connection"):
        transport.small.receive(keys[1])
    transport.close()


def test_waiting_for_a_small_message_from_a_rank_that_ends_raises(run_on):
    run_on(2, end_while_others_wait_for_small_ones)


def end_while_others_wait() -> None:
    transport = neighbours()
    if rank() == 1:
        dist.barrier()
        transport.close()
        return
    exchange = transport.gather(list(torch.zeros(world_size(), 4)))
    dist.barrier()
    with pytest.raises(RuntimeError, match="closed"):
        exchange.wait()
    with pytest.raises(RuntimeError, match="closed"):
        transport.gather(list(torch.zeros(world_size(), 4))).wait()
    transport.close()


def test_waiting_for_a_gather_with_a_rank_that_ends_raises(run_on):
    run_on(2, end_while_others_wait)


def end_one_after_another() -> None:
    """A rank that has received everything closes the connection while others still work on the same exchange."""
    for turn in range(30):
        transport = neighbours()
        full = torch.full((world_size(), 3), -1.0)
        full[rank()] = rank()
        exchange = transport.gather(list(full))
        if rank() == turn % world_size():
            exchange.wait()
            transport.close()
        dist.barrier() if turn % 2 else time.sleep(0.001 * rank())
        exchange.wait()
        assert full[:, 0].tolist() == list(range(world_size()))
        transport.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_may_close_before_the_others_notice_that_the_exchange_is_done(run_on, size):
    run_on(size, end_one_after_another)


def close_while_another_is_late() -> None:
    transport = neighbours()
    full = torch.full((world_size(), 3), -1.0)
    full[rank()] = rank()
    if rank() == 0:
        exchange = transport.gather(list(full))
        transport.close()  # returns after a timeout, and leaves the rest to the thread
        dist.barrier()
    else:
        dist.barrier()
        exchange = transport.gather(list(full))
    exchange.wait()
    assert full[:, 0].tolist() == list(range(world_size()))
    transport.close()


def test_an_exchange_under_way_when_a_rank_closes_its_transport_still_completes(run_on):
    run_on(2, close_while_another_is_late)


def fail_before_the_last_has_read() -> None:
    """Rank 2 fails, and frees memory that others would read, while rank 0 is busy with data from rank 1."""
    from lightning_zero.engine.comm.cross_memory import process_memory
    from lightning_zero.engine.comm.cross_memory.small_messages import GATHER_TAG

    read, is_reading, may_read = process_memory.read_memory, threading.Event(), threading.Event()

    def read_late(*arguments: object) -> None:
        is_reading.set()
        may_read.wait(20)
        read(*arguments)

    transport = neighbours()
    full = torch.full((world_size(), 3), -1.0)
    full[rank()] = rank()
    if rank() == 0:
        process_memory.read_memory = read_late
    try:
        if rank() != 1:
            exchange = transport.gather(list(full))
        while rank() == 0 and set(transport.small.received.get((GATHER_TAG, 0), ())) != {1}:  # rank 2's position
            time.sleep(0.001)
        dist.barrier()
        if rank() == 1:
            exchange = transport.gather(list(full))
        if rank() == 0:
            assert is_reading.wait(20)
        dist.barrier()
        if rank() == 2:
            transport.sever("it failed")
            full.fill_(7)
        dist.barrier()
        may_read.set()
        if rank() == 0:
            with pytest.raises(RuntimeError, match="rank 2 closed the connection"):
                exchange.wait()
    finally:
        process_memory.read_memory = read
    dist.barrier()
    transport.close()


def test_memory_left_by_a_failed_rank_is_not_taken_for_its_contribution(run_on):
    run_on(3, fail_before_the_last_has_read)


class CollectsGarbage(dict[Any, Any]):
    """Garbage collection may run at any allocation, in any thread."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        gc.collect()
        return super().setdefault(key, default)


def collect_in_the_thread() -> None:
    """The transport's owner is garbage in a cycle, and the transport's own thread collects it."""

    class Owner:
        pass

    transport = neighbours()
    gc.disable()
    transport.small.received = CollectsGarbage()
    owner = Owner()
    owner.itself = owner
    weakref.finalize(owner, transport.close)
    full = torch.full((world_size(), 3), -1.0)
    full[rank()] = rank()
    transport.gather(list(full))
    del owner
    dist.barrier()
    for _ in range(2):  # incoming messages trigger a collection
        transport.gather(list(full.clone()))
    dist.barrier()
    transport.sever("it failed")
    gc.enable()


def test_garbage_collection_in_a_transports_thread_may_close_that_transport(run_on):
    run_on(2, collect_in_the_thread)


def send_more_than_a_socket_takes() -> None:
    transport = neighbours()
    for line in transport.small.sockets:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    full, is_first = torch.zeros(2, 15_000), rank() == 0
    dist.barrier()
    if is_first:
        with pytest.raises(RuntimeError, match="a message could not be sent: .*Message too long"):
            transport.gather(list(full), is_small=True).wait()
    else:
        with pytest.raises(RuntimeError, match="closed the connection"):
            transport.gather(list(full[:, :1]), is_small=True).wait()
    dist.barrier()
    transport.close()


def test_a_message_that_the_system_refuses_ends_the_exchange_with_the_reason(run_on):
    run_on(2, send_more_than_a_socket_takes)


def refuse_until_asked() -> None:
    """Refuse reads as a kernel with `kernel.yama.ptrace_scope` 1 does; this machine's may have another value."""
    from lightning_zero.engine.comm.cross_memory import process_memory

    read, let = process_memory.read_memory, process_memory.let_read
    asked: list[bool] = []

    def read_if_allowed(process: int, address: int, target: torch.Tensor) -> None:
        if not asked:
            raise PermissionError("Operation not permitted")
        read(process, address, target)

    def let_read(ancestor: int) -> None:
        let(ancestor)
        asked.append(True)

    try:
        process_memory.read_memory, process_memory.let_read = read_if_allowed, let_read
        transport = neighbours()
        full = torch.full((2 * world_size(),), float(rank()))
        transport.gather(full.chunk(world_size())).wait()
        assert full.tolist() == [float(r) for r in range(world_size()) for _ in range(2)]
        dist.barrier()
        transport.close()
    finally:
        process_memory.read_memory, process_memory.let_read = read, let


def test_ranks_permit_each_other_to_read_where_the_kernel_requires_it(run_on):
    run_on(3, refuse_until_asked)


def refuse_on(refusing: int) -> None:
    from lightning_zero.engine.comm.cross_memory import process_memory
    from lightning_zero.engine.comm.cross_memory.exchange import connect

    def refuse(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    read = process_memory.read_memory
    try:
        if rank() == refusing:
            process_memory.read_memory = refuse
        with cross_memory():
            assert connect(range(world_size()), rank(), MINUTE, objects_of_all) is None
    finally:
        process_memory.read_memory = read
    assert "lightning_zero-gathers" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_no_rank_uses_shared_memory_if_one_rank_may_not_read(run_on, refusing):
    run_on(3, refuse_on, refusing=refusing)
