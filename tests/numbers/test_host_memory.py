"""Host memory while a big module is created, loaded and saved: at most two units in addition to the shards.

With states on a disk, an update needs three chunks of them, independent of the model's size. The one exception is rank
0 while it writes a full checkpoint, which it holds once.

Measured in separate processes, which do nothing else and whose allocator returns memory at once: the anonymous memory
(not backed by files) and the resident pages of the file being read.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.common import RETURN_MEMORY_AT_ONCE
from tests.support.ports import reserved_port

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[2]
RANKS, UNITS, WIDTH = 2, 12, 1024
UNIT = 4 * WIDTH * WIDTH  # bytes
WHOLE = UNITS * UNIT
SHARDS = WHOLE // RANKS
PIECES = 3 * 3 * UNIT // RANKS  # bytes of three units' files, with a master and two moments for each element
OTHER = 3 * 2**20  # allocated or freed meanwhile by libraries and the measurement itself


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def make() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(UNITS)))


def on_meta() -> nn.Module:
    from lightning_zero.engine.init.deferred_param import parameters_await_values

    with parameters_await_values(only_on_meta=True), torch.device("meta"):
        return make()


def load(module: nn.Module, **options: str) -> nn.Module:
    from lightning_zero import load_weights
    from lightning_zero.engine.init.deferred_param import values_may_wait

    with values_may_wait():
        load_weights(module, "weights.pt", **options)
    return module


def assign(module: nn.Module) -> nn.Module:
    module.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
    return module


CASES = {
    "whole": make,
    "constructed": on_meta,
    "loaded": lambda: load(on_meta()),
    "loaded to be converted": lambda: load(on_meta().double()).float(),
    "mapped": lambda: assign(on_meta()),
    "quantised": lambda: load(on_meta(), quantize="nf4"),
}
CODES = WHOLE // 8  # bytes of all codes; the scales take a 32nd of this, and tables a kilobyte a unit


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def mapped_of_file() -> int:
    """Bytes of the weight file that are resident in this process, counted by the pages that it has read."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = line.endswith("/weights.pt")
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def measure(case: str) -> dict[str, int]:
    """The increase of anonymous memory, at its peak and at the end, and the bytes read of the file.

    The peak is sampled where most is held: when a rank has its shard of a unit and still holds the unit's buffer.
    """
    from lightning_zero.engine import Engine
    from lightning_zero.engine.comm.counters import Ledger
    from lightning_zero.engine.init import materialise
    from lightning_zero.engine.state.bucket import UnshardedBucket

    before = peak = anonymous()
    kept: list[Any] = []
    add, shard = Ledger.add, materialise.shard

    def look(self: Ledger, *args: Any) -> None:
        nonlocal peak
        peak = max(peak, anonymous())
        add(self, *args)

    def keep(unsharded: UnshardedBucket, sources: Any) -> Any:
        # so that the file stays mapped until its pages are counted
        kept.extend(source.values.detach() for source in sources if source.everywhere or case == "mapped")
        return shard(unsharded, sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "add", look)
        patch.setattr(materialise, "shard", keep)
        module = CASES[case]()
        peak = max(peak, anonymous())
        engine = Engine(module, stage=3)
    report = {"peak": peak - before, "file": mapped_of_file(), "at rest": anonymous() - before}
    engine.close(communicate=False)
    return report


def peak_at(kind: Any, method: str, act: Callable[[], object]) -> int:
    """The peak of anonymous memory while ``act`` runs, sampled at each call of a method."""
    peak, call = anonymous(), getattr(kind, method)

    def look(*args: Any) -> Any:
        nonlocal peak
        result = call(*args)
        peak = max(peak, anonymous())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, look)
        act()
    return max(peak, anonymous())


def measure_saving(form: str, rank: int) -> int:
    """The peak of anonymous memory in addition to the shards, sampled at each write; a file has thousands of writes."""
    from lightning_zero.checkpoint.commit import Stream
    from lightning_zero.checkpoint.objects import Ranks
    from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
    from lightning_zero.engine import Engine
    from lightning_zero.engine.tensor.sharded_tree import on_cpu, on_meta

    without = anonymous()
    module = make()
    engine = Engine(module, stage=3)
    saver, gather = Saver(in_background=False), engine.communicator.control.gather_objects

    def save() -> None:
        if form == "sharded":
            job = SaveJob(SaveMode.SHARDED, "saved", {}, {"state_dict": module.state_dict()})
            saver.save(job, Ranks(rank, gather))
            return
        state = engine.full_state_dict(leaf=on_cpu if rank == 0 else on_meta)
        if rank == 0:
            saver.save(SaveJob(SaveMode.GATHERED, "saved.ckpt", {"state_dict": state}))

    deadline = time.monotonic() + 30
    while (before := anonymous()) >= without + SHARDS + OTHER:  # held by garbage, or for another thread or rank
        assert time.monotonic() < deadline, f"{before - without} bytes are left of the module, where {SHARDS} stay"
        gc.collect()
        time.sleep(0.01)
    peak = peak_at(Stream, "write", save)
    engine.close(communicate=False)
    return peak - before


def measure_on_disk(rank: int) -> dict[str, int]:
    """Increase of anonymous memory: at rest, in updates and while everything is saved; and the states on the disk."""
    from lightning_zero.checkpoint.commit import Stream
    from lightning_zero.checkpoint.objects import Ranks
    from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
    from lightning_zero.checkpoint.saving import by_name, names_in
    from lightning_zero.engine import Engine
    from lightning_zero.engine.offload import Update
    from lightning_zero.engine.tensor.sharded_tree import in_parts, on_meta

    torch.optim.AdamW([torch.zeros(1)])  # creating the first optimizer makes torch import its compiler
    before = anonymous()
    module = make()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    names = names_in(optimizer, {id(p): name for name, p in module.named_parameters()})
    offload = {"optimizer": "nvme", "parameters": "nvme", "path": "swap"}
    engine = Engine(module, [optimizer], units=[Block], offload=offload)
    at_rest = anonymous()

    def train() -> None:
        for _ in range(2):
            module(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.full_state_dict(leaf=on_meta)  # after all updates

    def save() -> None:
        states = by_name(engine.full_optimizer_state_dict(optimizer, leaf=in_parts), names)
        saver = Saver(in_background=True)
        tree = {"state_dict": module.state_dict(), "optimizer_0": states}
        ranks = Ranks(rank, engine.communicator.control.gather_objects)
        saver.save(SaveJob(SaveMode.SHARDED, "saved", {}, tree), ranks)
        saver.finish()

    peaks = {"updating": peak_at(Update, "act", train), "saving": peak_at(Stream, "write", save)}
    on_disk = sum(bucket.states.file.nbytes for bucket in engine.buckets if bucket.states is not None)
    engine.close(communicate=False)
    return {"at rest": at_rest - before, **{name: peak - before for name, peak in peaks.items()}, "on disk": on_disk}


def worker(rank: int, port: int) -> None:
    import torch.distributed as dist
    from bitsandbytes.nn import Linear4bit

    from lightning_zero.engine import Engine

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would count unread bytes
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    Engine(nn.Linear(2, 2)).close()  # initializes everything that is set up once
    Linear4bit(64, 64).to("cpu")
    saving = {form: measure_saving(form, rank) for form in ("full", "sharded")}
    others = {"saving": saving, "on disk": measure_on_disk(rank)}
    print(json.dumps({case: measure(case) for case in CASES} | others))
    dist.barrier()


def cache_page_by_page(file: Path) -> None:
    """Load a file into the kernel's cache in pages of the smallest size: larger pages are mapped whole when one byte is
    read, and would be counted as read."""
    with file.open("rb+") as opened:
        number = opened.fileno()
        os.fsync(number)
        for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):
            os.posix_fadvise(number, 0, 0, advice)
        for offset in range(0, file.stat().st_size, PAGESIZE):
            os.pread(number, 1, offset)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """The memory that each case needed, by rank."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    torch.save(make().state_dict(), folder / "weights.pt")
    cache_page_by_page(folder / "weights.pt")
    environment = {**os.environ, **RETURN_MEMORY_AT_ONCE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with reserved_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import worker; worker({rank}, {port})"],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_weights_that_are_quantised_while_they_are_loaded_are_never_held_whole(measured):
    for found in (of_rank["quantised"] for of_rank in measured):
        own, of_unit = CODES // RANKS + CODES // 32, CODES // UNITS
        assert abs(found["at rest"] - own) < 2**20, f"{found}: not the share of the codes, {own}"
        assert found["peak"] < own + 2 * of_unit + 2**20 < CODES, f"{found}: all codes take {CODES}"
        assert found["file"] >= WHOLE, "for the scales, each rank reads the whole file"


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("whole", "quantised")])
def test_in_addition_to_its_shards_a_rank_never_holds_two_units_and_reads_no_more_than_necessary(measured, case):
    for found in (of_rank[case] for of_rank in measured):
        assert SHARDS - OTHER <= found["peak"] < SHARDS + 2 * UNIT + OTHER, f"{found}, where the whole is {WHOLE}"
        assert SHARDS - OTHER <= found["at rest"] < SHARDS + OTHER, f"{found}: more than the shards, {SHARDS}"
        if case == "constructed":
            assert found["file"] == 0
        elif case != "mapped":
            assert SHARDS <= found["file"] < SHARDS + UNIT, f"{found}: of a file of {WHOLE}"
    if case == "mapped":
        first, second = (of_rank[case]["file"] for of_rank in measured)
        assert first >= WHOLE and second < UNIT, "rank 0 reads the file, and sends the values"


def test_the_measurement_detects_a_module_that_is_created_in_full(measured):
    for found in (of_rank["whole"] for of_rank in measured):
        assert found["peak"] >= WHOLE > SHARDS + 2 * UNIT + OTHER


def test_a_full_checkpoint_is_held_once_by_the_writing_rank_and_a_sharded_one_by_no_rank(measured):
    first, second = (of_rank["saving"] for of_rank in measured)
    assert WHOLE - OTHER <= first["full"] < WHOLE + UNIT + OTHER
    assert second["full"] < UNIT + OTHER
    assert first["sharded"] < UNIT + OTHER and second["sharded"] < UNIT + OTHER


def test_with_states_on_a_disk_an_update_needs_three_units_files_in_addition_to_the_gradients(measured):
    for found in (of_rank["on disk"] for of_rank in measured):
        assert found["on disk"] == 3 * SHARDS > 3 * PIECES
        assert found["at rest"] < OTHER, f"{found}: parameters are on the disk too"
        beside = found["updating"] - SHARDS  # gradients; updates continue in the next forward, which gathers two units
        assert PIECES - OTHER <= beside < PIECES + 2 * UNIT + OTHER, f"{found}: pieces of {PIECES}"


def test_states_on_a_disk_are_saved_in_the_background_without_being_held_in_memory(measured):
    for found in (of_rank["on disk"] for of_rank in measured):
        assert found["saving"] < PIECES + UNIT + OTHER, f"{found}: the pieces are kept for the next update"
