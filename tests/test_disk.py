"""Files written past the system's cache are what was written, wherever they lie; what goes wrong is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightning_zero import disk
from lightning_zero.disk import ALIGNMENT, Appender, DirectFile, aligned_memory
from tests.checkpoint import faults

IN_MEMORY = Path("/dev/shm")
"""A file system that refuses to be written past its cache."""

FOLDERS = pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])


def folder_for(in_memory, tmp_path):
    if in_memory and not IN_MEMORY.is_dir():
        pytest.fail("there is no file system in memory here")
    return IN_MEMORY if in_memory else tmp_path


def written(path, parts):
    appender = Appender(str(path))
    try:
        for part in parts:
            assert appender.write(memoryview(part)) == len(part)
        appender.finish()
    finally:
        appender.close()


@FOLDERS
@pytest.mark.parametrize("size", [0, 1, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT, 3 * ALIGNMENT + 1, 10 * ALIGNMENT + 7])
@pytest.mark.parametrize("at_once", [1000, ALIGNMENT, 10**6])
def test_a_file_is_what_was_appended(tmp_path, monkeypatch, in_memory, size, at_once):
    monkeypatch.setattr(disk, "BUFFER", 2 * ALIGNMENT)  # several of them
    data = os.urandom(size)
    path = folder_for(in_memory, tmp_path) / f"lightning_zero-test-{os.getpid()}"
    path.write_bytes(b"longer than what comes" * 10**4)
    try:
        written(path, [data[start : start + at_once] for start in range(0, size, at_once)])
        assert path.read_bytes() == data
    finally:
        path.unlink()


def test_it_goes_past_the_cache_where_the_disk_allows(tmp_path):
    """Else the wrong memory and position would be no error, and none is remembered."""
    descriptor = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    memory = aligned_memory(2 * ALIGNMENT)
    with pytest.raises(OSError) as told:
        os.pwrite(descriptor, memory[1 : 1 + ALIGNMENT], 0)
    assert told.value.errno == errno.EINVAL, "this disk takes any memory: nothing can be seen here"
    os.close(descriptor)

    file = DirectFile(str(tmp_path / "file"))
    file.write(memory, 0)
    assert file.is_direct
    memory[:] = os.urandom(2 * ALIGNMENT)
    file.write(memory[1 : 1 + ALIGNMENT], 0)  # refused, and written through the cache
    assert not file.is_direct
    file.write(memory[: ALIGNMENT + 3], ALIGNMENT)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == bytes(memory[1 : 1 + ALIGNMENT]) + bytes(memory[: ALIGNMENT + 3])


def fills_up(folder):
    """A disk of 64 KiB, for a file of 256 KiB in buffers of 8 KiB."""

    def on_the_disk():
        disk.BUFFER = 2 * ALIGNMENT
        for parts in ([b"x" * 2**18], [b"x" * ALIGNMENT] * 64):
            with pytest.raises(OSError) as told:
                written(folder / "file", parts)
            assert told.value.errno == errno.ENOSPC
        written(folder / "file", [b"x" * 2**15])

    assert faults.on_a_small_disk(folder, 2**16, on_the_disk) == 0


def test_a_full_disk_is_told_though_another_thread_writes(run_on, tmp_path):
    run_on(1, fills_up, folder=tmp_path)


def test_a_file_that_is_given_up_leaves_no_thread_and_no_descriptor(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    appender = Appender(str(tmp_path / "file"))
    appender.write(memoryview(bytes(disk.BUFFER + 1)))
    appender.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert appender._thread is None
