"""Direct file I/O returns what was written, on any file system, and reports errors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from lightning_zero.io import disk
from lightning_zero.io.disk import ALIGNMENT, DirectFile, aligned_memory, free_bytes, huge_memory
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


def test_direct_io_bypasses_the_cache_where_the_disk_allows(tmp_path, monkeypatch):
    """Otherwise, misaligned memory would not be an error. Such an error does not affect later calls."""
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
    file.close()
    assert (tmp_path / "file").read_bytes() == bytes(memory[1 : 1 + ALIGNMENT]) + bytes(memory[: ALIGNMENT + 3])

    with closing(DirectFile(str(tmp_path / "another"))) as file:
        data = bytes(memory)
        file.write(memory, 0)
        memory[:] = bytes(len(memory))
        file.read(memory, 0)
        assert file.is_direct and memory == data
        file.read(memory[1 : 1 + ALIGNMENT], 0)  # likewise
        assert not file.is_direct and memory[1 : 1 + ALIGNMENT] == data[:ALIGNMENT]

        used, preadv = [], os.preadv
        monkeypatch.setattr(os, "preadv", lambda file, *where: used.append(flags_of(file)) or preadv(file, *where))
        file.read(memory[1 : 1 + ALIGNMENT], 0)
        assert [flags & os.O_DIRECT for flags in used] == [os.O_DIRECT, 0]
        file.read(memory, 0)
        assert used[2] & os.O_DIRECT and len(used) == 3, "one such call says nothing of the others"


def refuse_direct(monkeypatch):
    """Refuse O_DIRECT, as file systems without it do."""
    real = os.open

    def call(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", call)


@FOLDERS
@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("at_once", [None, ALIGNMENT, 3 * ALIGNMENT])
def test_reads_return_what_was_written_at_any_position_and_of_any_size(
    tmp_path, monkeypatch, in_memory, is_refused, at_once
):
    """Direct, cached and mixed; also if the system transfers fewer bytes at once than requested."""
    if is_refused:
        refuse_direct(monkeypatch)
    preadv, pwrite = os.preadv, os.pwrite
    if at_once is not None:
        monkeypatch.setattr(os, "preadv", lambda file, memory, position: preadv(file, [memory[0][:at_once]], position))
        monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[:at_once], position))
    size = 10 * ALIGNMENT + 7
    expected, memory, choice = bytearray(size), aligned_memory(size), random.Random(0)
    path = folder_for(in_memory, tmp_path) / f"lightning_zero-test-{os.getpid()}"
    try:
        with closing(DirectFile(str(path))) as file:
            file.reserve(size)
            for number in range(100):
                unit = ALIGNMENT if number % 2 else 1
                start = choice.randrange(size // unit) * unit
                stop = choice.randrange(start, size) + 1
                # memory that is as far from alignment as the file position, so that the middle bypasses the cache
                part = memory[start % ALIGNMENT :][: stop - start]
                data = part[:] = choice.randbytes(len(part))
                expected[start : start + len(data)] = data
                file.write(part, start)
                part[:] = bytes(len(part))
                file.read(part, start)
                assert part == data
            file.read(memory, 0)
            assert memory == expected == path.read_bytes()
            assert in_memory or file.is_direct != is_refused
    finally:
        path.unlink()


@FOLDERS
def test_reading_past_the_end_of_a_file_is_reported(tmp_path, in_memory):
    path = str(folder_for(in_memory, tmp_path) / f"lightning_zero-test-{os.getpid()}")
    try:
        with closing(DirectFile(path)) as file:
            file.write(memoryview(b"x" * (ALIGNMENT + 10)), 0)
            with pytest.raises(OSError, match=f"ends at byte {ALIGNMENT + 10}, {ALIGNMENT - 10} bytes too") as told:
                file.read(aligned_memory(2 * ALIGNMENT), 0)
            assert told.value.filename == path
    finally:
        os.unlink(path)


def without(monkeypatch, fallocate):
    def refuse(*_):
        raise OSError(getattr(errno, fallocate), "by the file system")

    if fallocate == "no such call":
        monkeypatch.delattr(os, "posix_fallocate")
    elif fallocate is not None:
        monkeypatch.setattr(os, "posix_fallocate", refuse)


@FOLDERS
@pytest.mark.parametrize("fallocate", [None, "no such call", "EOPNOTSUPP", "EINVAL"])
def test_space_is_reserved_where_there_is_enough(tmp_path, monkeypatch, in_memory, fallocate):
    without(monkeypatch, fallocate)
    path = str(folder_for(in_memory, tmp_path) / f"lightning_zero-test-{os.getpid()}")
    nbytes = 2**20 + 1
    try:
        with closing(DirectFile(path)) as file:
            with pytest.raises(OSError, match=rf"{2**60} bytes are required, \d+ are available: free some") as told:
                file.reserve(2**60)
            assert told.value.errno == errno.ENOSPC and told.value.filename == path
            assert os.path.getsize(path) == 0 and os.stat(path).st_blocks == 0
            file.reserve(0)
            file.reserve(nbytes)
            assert os.path.getsize(path) == nbytes
            assert os.stat(path).st_blocks * 512 >= (nbytes if fallocate is None else 0)
            found = memoryview(bytearray(b"x" * nbytes))
            file.read(found, 0)
            assert found == bytes(nbytes)
    finally:
        os.unlink(path)


def another_takes_it(folder):
    """Another program takes the space between the check of free space and the reservation."""

    def on_the_disk():
        free = free_bytes(str(folder))
        disk.free_bytes = lambda _: 2 * free
        with closing(DirectFile(str(folder / "file"))) as file:
            with pytest.raises(OSError, match=f"No space left on device: {free + 1} bytes are required") as told:
                file.reserve(free + 1)
            assert told.value.errno == errno.ENOSPC and free_bytes(str(folder)) == free
            file.reserve(free)

    assert faults.on_a_small_disk(folder, 2**20, on_the_disk) == 0


def test_a_reservation_that_fails_midway_frees_its_space(run_on, tmp_path):
    run_on(1, another_takes_it, folder=tmp_path)


def test_a_reservation_error_that_is_not_about_space_is_raised_unchanged(tmp_path, monkeypatch):
    without(monkeypatch, "EIO")
    with closing(DirectFile(str(tmp_path / "file"))) as file, pytest.raises(OSError) as told:
        file.reserve(1)
    assert told.value.errno == errno.EIO


def test_a_closed_file_does_not_touch_the_next_file_with_its_descriptor_number(tmp_path):
    file = DirectFile(str(tmp_path / "file"))
    file.close()
    with closing(DirectFile(str(tmp_path / "next"))):
        for call in (file.read, file.write):
            with pytest.raises(OSError) as told:
                call(aligned_memory(ALIGNMENT), 0)
            assert told.value.errno == errno.EBADF
    assert (tmp_path / "next").read_bytes() == b""


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
    with closing(DirectFile(str(tmp_path / "file"))) as file:
        file.write(memory, 0)
        memory[:] = bytes(len(memory))
        file.read(memory, 0)
        assert file.is_direct and memory == data


def test_existing_files_and_links_are_neither_opened_nor_followed(tmp_path):
    (tmp_path / "file").write_text("of another's")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "other").symlink_to(tmp_path / "file")
    for name in ("file", "link", "other"):
        with pytest.raises(FileExistsError, match=name):
            DirectFile(str(tmp_path / name))
    assert not (tmp_path / "target").exists() and (tmp_path / "file").read_text() == "of another's"


def test_files_are_private_to_the_user(tmp_path):
    umask = os.umask(0o022)
    try:
        with closing(DirectFile(str(tmp_path / "file"))):
            assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)
