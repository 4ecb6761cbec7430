"""Direct file I/O returns what was written, on any file system, and reports errors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
from contextlib import closing
from pathlib import Path
from shutil import disk_usage
from types import SimpleNamespace

import pytest

from lightning_zero.io import swap
from lightning_zero.io.disk import ALIGNMENT, aligned_memory, huge_memory
from lightning_zero.io.swap import SwapFile
from tests.checkpoint import faults

IN_MEMORY = Path("/dev/shm")
"""A file system that consists of its cache: Linux before 6.6 refuses direct I/O to it."""

FOLDERS = pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])


def folder_for(in_memory, tmp_path):
    if in_memory and not IN_MEMORY.is_dir():
        pytest.fail("there is no file system in memory here")
    return IN_MEMORY if in_memory else tmp_path


def flags_of(descriptor):
    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def is_direct(file):
    return flags_of(file._file) & os.O_DIRECT != 0


def test_direct_io_bypasses_the_cache_where_the_disk_allows(tmp_path):
    """Otherwise, misaligned memory would not be an error."""
    file, memory = SwapFile(str(tmp_path)), aligned_memory(2 * ALIGNMENT)
    with pytest.raises(OSError) as told:
        os.pwrite(file._file, memory[1 : 1 + ALIGNMENT], 0)
    assert told.value.errno == errno.EINVAL, "this disk takes any memory: nothing can be seen here"
    memory[:] = data = os.urandom(2 * ALIGNMENT)
    file.write(memory, 0)
    memory[:] = bytes(len(memory))
    file.read(memory, 0)
    assert is_direct(file) and memory == data
    file.write(memory[1 : 1 + ALIGNMENT], 0)  # refused, and written through the cache
    assert not is_direct(file)
    file.read(memory[:ALIGNMENT], 0)
    assert memory[:ALIGNMENT] == data[1 : 1 + ALIGNMENT]
    file.close()


def refuse_direct(monkeypatch):
    """Refuse O_DIRECT, as file systems without it do."""
    real = fcntl.fcntl

    def call(descriptor, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", call)


@FOLDERS
@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("unit", [1, ALIGNMENT])
@pytest.mark.parametrize("at_once", [None, 3 * ALIGNMENT])
def test_reads_return_what_was_written_at_any_position_and_of_any_size(
    tmp_path, monkeypatch, in_memory, is_refused, unit, at_once
):
    """Direct and cached; also if the system transfers fewer bytes at once than requested."""
    if is_refused:
        refuse_direct(monkeypatch)
    preadv, pwrite = os.preadv, os.pwrite
    if at_once is not None:
        monkeypatch.setattr(os, "preadv", lambda file, memory, position: preadv(file, [memory[0][:at_once]], position))
        monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[:at_once], position))
    size = 10 * ALIGNMENT
    expected, memory, choice = bytearray(size), aligned_memory(size), random.Random(0)
    with closing(SwapFile(str(folder_for(in_memory, tmp_path)), size)) as file:
        for _ in range(50):
            start = choice.randrange(size // unit) * unit
            stop = choice.randrange(start, size, unit) + unit
            part = memory[: stop - start]
            data = part[:] = choice.randbytes(len(part))
            expected[start:stop] = data
            file.write(part, start)
            part[:] = bytes(len(part))
            file.read(part, start)
            assert part == data
        file.read(memory, 0)
        assert memory == expected
        assert in_memory or is_direct(file) == (unit == ALIGNMENT and not is_refused)


@FOLDERS
def test_reading_past_the_end_of_a_file_is_reported(tmp_path, in_memory):
    folder = str(folder_for(in_memory, tmp_path))
    with closing(SwapFile(folder)) as file:
        file.write(memoryview(b"x" * (ALIGNMENT + 10)), 0)
        with pytest.raises(OSError, match=f"ends at byte {ALIGNMENT + 10}, {ALIGNMENT - 10} bytes too") as told:
            file.read(aligned_memory(2 * ALIGNMENT), 0)
        assert told.value.filename == folder


@FOLDERS
@pytest.mark.parametrize("allocates", [True, False])
def test_space_is_reserved_where_there_is_enough(tmp_path, monkeypatch, in_memory, allocates):
    if not allocates:
        monkeypatch.delattr(os, "posix_fallocate")
    folder, nbytes = str(folder_for(in_memory, tmp_path)), 2**20 + 1
    with closing(SwapFile(folder)) as file:
        with pytest.raises(OSError, match=rf"{2**60} bytes are required, \d+ are available: free some") as told:
            file.reserve(2**60)
        assert told.value.errno == errno.ENOSPC and told.value.filename == folder
        assert os.fstat(file._file).st_size == 0 and os.fstat(file._file).st_blocks == 0
        file.reserve(0)
        file.reserve(nbytes)
        assert os.fstat(file._file).st_size == nbytes
        assert os.fstat(file._file).st_blocks * 512 >= (nbytes if allocates else 0)
        found = memoryview(bytearray(b"x" * nbytes))
        file.read(found, 0)
        assert found == bytes(nbytes)


def another_takes_it(folder):
    """Another program takes the space between the check of free space and the reservation."""

    def on_the_disk():
        free = disk_usage(folder).free
        swap.disk_usage = lambda _: SimpleNamespace(free=2 * free)
        with closing(SwapFile(str(folder))) as file:
            with pytest.raises(OSError, match=f"No space left on device: {free + 1} bytes are required") as told:
                file.reserve(free + 1)
            assert told.value.errno == errno.ENOSPC and disk_usage(folder).free == free
            file.reserve(free)

    assert faults.on_a_small_disk(folder, 2**20, on_the_disk) == 0


def test_a_reservation_that_fails_midway_frees_its_space(run_on, tmp_path):
    run_on(1, another_takes_it, folder=tmp_path)


def test_a_closed_file_does_not_touch_the_next_file_with_its_descriptor_number(tmp_path):
    file = SwapFile(str(tmp_path))
    file.close()
    with closing(SwapFile(str(tmp_path))) as other:
        for call in (file.read, file.write):
            with pytest.raises(OSError) as told:
                call(aligned_memory(ALIGNMENT), 0)
            assert told.value.errno == errno.EBADF
        assert os.fstat(other._file).st_size == 0


def test_forked_processes_neither_see_nor_hold_memory_in_huge_pages():
    """The disk may write to this memory at the moment of a fork."""
    memory = huge_memory(2**22)
    memory[:] = b"x" * len(memory)
    child = os.fork()
    if child == 0:
        is_wiped = memory == bytes(len(memory))
        memory[:] = b"y" * len(memory)
        os._exit(0 if is_wiped else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory == b"x" * len(memory)


@pytest.mark.parametrize("refused", [18, mmap.MADV_HUGEPAGE], ids=["wiped on fork", "huge pages"])
def test_huge_memory_works_where_the_system_refuses_madvise(monkeypatch, tmp_path, refused):
    class Refusing(mmap.mmap):
        def madvise(self, advice, *where):
            if advice == refused:
                raise OSError(errno.EINVAL, "by the system")
            super().madvise(advice, *where)

    monkeypatch.setattr(mmap, "mmap", Refusing)
    memory = huge_memory(2 * ALIGNMENT)
    memory[:] = data = os.urandom(len(memory))
    with closing(SwapFile(str(tmp_path))) as file:
        file.write(memory, 0)
        memory[:] = bytes(len(memory))
        file.read(memory, 0)
        assert is_direct(file) and memory == data


def test_files_are_private_to_the_user_and_have_no_name(tmp_path):
    umask = os.umask(0)
    try:
        with closing(SwapFile(str(tmp_path))) as file:
            assert os.fstat(file._file).st_mode & 0o777 == 0o600 and not os.listdir(tmp_path)
    finally:
        os.umask(umask)
