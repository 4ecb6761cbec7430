"""States offloaded to a disk: reads return the last write, and no files are left behind."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from pathlib import Path
from shutil import disk_usage

import pytest

from lightning_zero.io.disk import ALIGNMENT
from lightning_zero.io.swap import BUFFERS, Buffers, SwapFile, Turn
from tests.checkpoint import faults
from tests.examples.running import REPOSITORY
from tests.support.disk import all_buffers_in_use
from tests.support.warm import warm_python
from tests.test_disk import FOLDERS, folder_for, is_direct, refuse_direct

SECONDS = 20
"""Seconds after which a wait for another thread fails."""


def files_in(folder, nbytes, count):
    return [SwapFile(str(folder), nbytes) for _ in range(count)]


def change_all(buffers, files, act, then=lambda number: None):
    """Change files in order, in as many threads as there are buffers. Return each file's error, or None.

    `then` is called with a file's number after its change was submitted, before the next one is.
    """
    turn, changes = None, []
    with ThreadPoolExecutor(BUFFERS) as threads:
        for number, file in enumerate(files):
            turn = Turn(turn)
            changes.append(threads.submit(buffers.change, file, act, turn))
            then(number)
    return [change.exception() for change in changes]


def contents(file):
    found = bytearray(file.nbytes)
    file.read(memoryview(found), 0)
    return bytes(found)


def filled(file, data):
    file.write(memoryview(data), 0)
    return data


def plus_one(memory):
    memory[:] = bytes(memory).translate(bytes(range(1, 256)) + b"\0")


class Failing:
    """Lets the system calls that `SwapFile` reads or writes with fail for one file, while set to."""

    def __init__(self, monkeypatch, method, file, code=errno.EIO):
        self.on = True
        name = {"read": "preadv", "write": "pwrite"}[method]
        real = getattr(os, name)

        def call(descriptor, memory, position):
            if self.on and descriptor == file._file:
                raise OSError(code, os.strerror(code))
            return real(descriptor, memory, position)

        monkeypatch.setattr(os, name, call)


# ------------------------------------------------------------------------------------------------------------- contents


@FOLDERS
@pytest.mark.parametrize("is_refused", [False, True], ids=["direct", "cached"])
@pytest.mark.parametrize("size", [4 * ALIGNMENT, 4 * ALIGNMENT + 3, 5000, 777, 0])
def test_many_passes_give_the_same_bytes_as_in_memory(tmp_path, monkeypatch, in_memory, is_refused, size):
    if is_refused:
        refuse_direct(monkeypatch)
    folder = folder_for(in_memory, tmp_path)
    files = [SwapFile(str(folder), number * size) for number in (1, 3, 2, 1, 5, 1, 2)]
    expected, buffers = [filled(file, os.urandom(file.nbytes)) for file in files], Buffers()
    for _ in range(5):
        assert not any(change_all(buffers, files, plus_one))
        files, expected = files[::-1], expected[::-1]
    step = bytes((byte + 5) % 256 for byte in range(256))
    assert [contents(file) for file in files] == [data.translate(step) for data in expected]


def test_aligned_files_on_a_disk_bypass_the_cache(tmp_path):
    files = files_in(tmp_path, 2**21, 4)
    change_all(Buffers(), files, plus_one)
    assert all(map(is_direct, files))
    assert [contents(file) for file in files] == [b"\1" * 2**21] * 4


# ----------------------------------------------------------------------------------------------------- at the same time


def test_the_next_file_is_read_and_the_previous_one_written_while_one_is_changed(tmp_path, monkeypatch):
    """Each of the three waits until the other two have begun, which would never happen if they ran in sequence."""
    files, began = files_in(tmp_path, ALIGNMENT, 8), {}
    for kind in ("read", "act", "write"):
        began[kind] = [threading.Event() for _ in files]

    def together(index, but):
        others = {"read": index + 1, "act": index, "write": index - 1}
        for kind, number in others.items():
            if kind != but and 0 <= number < len(files):
                assert began[kind][number].wait(SECONDS), f"{kind} {number} has not begun during {but} {others[but]}"

    def watched(kind, offset):
        real = getattr(SwapFile, kind)

        def call(file, memory, position):
            number = files.index(file)
            began[kind][number].set()
            together(number + offset, kind)
            return real(file, memory, position)

        monkeypatch.setattr(SwapFile, kind, call)

    turns = iter(range(len(files)))

    def act(memory):
        index = next(turns)
        began["act"][index].set()
        together(index, "act")
        plus_one(memory)

    def read_in_order(number):
        assert began["read"][number].wait(SECONDS)

    watched("read", -1)
    watched("write", +1)
    assert not any(change_all(Buffers(), files, act, read_in_order))
    monkeypatch.undo()
    assert [contents(file) for file in files] == [b"\1" * ALIGNMENT] * len(files)


def test_files_are_read_one_at_a_time_and_changed_one_at_a_time_in_order(tmp_path, monkeypatch):
    """The disk delays each operation by a random time."""
    delays, real = random.Random(0), SwapFile.read
    running, changed = {"read": 0, "act": 0}, []

    def alone(kind):
        running[kind] += 1
        time.sleep(delays.random() * 0.002)
        assert running[kind] == 1
        running[kind] -= 1

    def read(file, memory, position):
        alone("read")
        real(file, memory, position)

    def act(memory):
        alone("act")
        changed.append(memory[0])
        plus_one(memory)

    files, buffers = files_in(tmp_path, ALIGNMENT, 30), Buffers()
    for number, file in enumerate(files):
        filled(file, bytes([number]) * ALIGNMENT)
    monkeypatch.setattr(SwapFile, "read", read)
    for _ in range(3):
        assert not any(change_all(buffers, files, act))
    monkeypatch.undo()
    assert changed == [number + turn for turn in range(3) for number in range(30)]
    assert [contents(file) for file in files] == [bytes([number + 3]) * ALIGNMENT for number in range(30)]


# --------------------------------------------------------------------------------------------------------------- memory


def memory_in_use(folder, nbytes, count):
    """The most bytes that changes of files add to this process's memory."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE

    most = 0

    def act(memory):
        nonlocal most
        for start in range(0, nbytes, 2**16):
            memory[start : start + 1] = b"1"
        most = max(most, resident())

    change_all(Buffers(), files_in(folder, ALIGNMENT, BUFFERS), lambda _: None)
    files, buffers = files_in(folder, nbytes, count), Buffers()
    before = resident()
    for _ in range(2):
        with all_buffers_in_use():
            change_all(buffers, files, act)
    assert len(buffers.free) == BUFFERS
    return most - before


def test_memory_is_three_buffers_however_many_files_there_are(run_on, tmp_path):
    nbytes = 2**23
    (few,) = run_on(1, memory_in_use, folder=tmp_path, nbytes=nbytes, count=3)
    (many,) = run_on(1, memory_in_use, folder=tmp_path, nbytes=nbytes, count=30)
    other = 2 * 2**20  # the threads' stacks, and Python's allocations
    assert BUFFERS * nbytes - other < few < BUFFERS * nbytes + other
    assert many < BUFFERS * nbytes + other


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("method", ["read", "write"])
@pytest.mark.parametrize("at", [0, 5, 9])
def test_an_error_of_the_disk_names_the_place_and_the_other_files_are_changed(tmp_path, monkeypatch, method, at, code):
    files, buffers = files_in(tmp_path, 2 * ALIGNMENT, 10), Buffers()
    failing = Failing(monkeypatch, method, files[at], code)
    errors = change_all(buffers, files, plus_one)
    assert [number for number, error in enumerate(errors) if error is not None] == [at]
    assert isinstance(errors[at], OSError) and errors[at].errno == code and errors[at].filename == str(tmp_path)
    done = {"read": "read", "write": "written"}[method]
    assert f"cannot be {done} at byte 0 ({os.strerror(code)})" in str(errors[at])
    failing.on = False
    assert [contents(file)[:1] for file in files] == [b"\0" if number == at else b"\1" for number in range(10)]
    assert not any(change_all(buffers, files, plus_one)), "the buffers serve again"


def test_a_file_whose_change_failed_stays_unchanged(tmp_path):
    files, buffers = files_in(tmp_path, 2 * ALIGNMENT, 6), Buffers()
    filled(files[4], b"\7" * 2 * ALIGNMENT)

    def act(memory):
        is_failing = bytes(memory[:1]) == b"\7"
        plus_one(memory)
        if is_failing:
            raise ZeroDivisionError("in the change")

    errors = change_all(buffers, files, act)
    assert [type(error) for error in errors] == [type(None)] * 4 + [ZeroDivisionError, type(None)]
    assert [contents(file)[:1] for file in files] == [b"\1"] * 4 + [b"\7", b"\1"]
    assert not any(change_all(buffers, files, plus_one))


def reserved_before(folder):
    """A disk of 1 MiB: too small for a file, then large enough for it, and then full."""

    def on_the_disk():
        room = disk_usage(folder).free
        assert 2**19 < room <= 2**20
        with pytest.raises(OSError, match=f"{2**20 + 1} bytes are required, {room} are available") as raised:
            SwapFile(str(folder), 2**20 + 1)
        assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(folder)
        assert os.listdir(folder) == [] and disk_usage(folder).free == room
        file = SwapFile(str(folder), 2**19)
        with pytest.raises(OSError) as raised:
            (folder / "of others").write_bytes(bytes(2**20))
        assert raised.value.errno == errno.ENOSPC and disk_usage(folder).free == 0
        for _ in range(2):
            Buffers().change(file, plus_one, Turn())
        assert contents(file) == b"\2" * 2**19
        file.close()
        assert disk_usage(folder).free >= 2**19

    assert faults.on_a_small_disk(folder, 2**20, on_the_disk) == 0


def test_a_disk_that_is_too_small_is_reported_at_once_and_never_later(run_on, tmp_path):
    run_on(1, reserved_before, folder=tmp_path)


def refused(path, kind):
    with pytest.raises(kind, match="choose a folder on a local disk") as raised:
        SwapFile(str(path), 1)
    assert raised.value.filename == str(path) and str(path) in str(raised.value)


def test_a_path_that_is_a_file_or_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("of the user's")
    refused(tmp_path / "file", FileExistsError)
    refused(tmp_path / "file" / "below", NotADirectoryError)
    assert (tmp_path / "file").read_text() == "of the user's"


def without_permission(folder):
    os.chmod(folder, 0o555)

    def act(rank, gather):
        if os.getuid() == 0:  # root may write anywhere
            os.setuid(65534)
        refused(folder, PermissionError)
        refused(folder / "below", PermissionError)

    assert faults.run_ranks(act, 1) == [0]


def test_a_path_without_permission_is_refused(run_on, tmp_path):
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent.name.startswith("pytest"):
            parent.chmod(0o755)  # so that the other user can access it
    (tmp_path / "folder").mkdir()
    run_on(1, without_permission, folder=tmp_path / "folder")


# ----------------------------------------------------------------------------------------------------------- at the end


def test_a_missing_folder_is_made_and_its_files_have_no_name_and_are_closed(tmp_path):
    descriptors = set(os.listdir("/proc/self/fd"))
    folder = tmp_path / "a" / "b"
    file = SwapFile(str(folder), 100)
    assert folder.stat().st_mode & 0o777 == 0o700, "no other user may look into it"
    assert os.listdir(folder) == [] and contents(file) == bytes(100)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read(memoryview(bytearray(100)), 0)
    other = SwapFile(str(folder), 100)
    del other
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_forked_process_leaves_its_parents_files_alone(tmp_path):
    file = SwapFile(str(tmp_path), 100)

    def act(rank, gather):
        nonlocal file
        del file

    assert faults.run_ranks(act, 1) == [0]
    assert contents(file) == bytes(100)


@pytest.mark.exhaustive
def test_nothing_is_left_by_a_process_that_is_killed(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        from lightning_zero.io.swap import SwapFile
        file = SwapFile(sys.argv[1], 2**20)
        print("made", flush=True)
        sys.stdin.readline()
    """
    process = subprocess.Popen(
        [warm_python(), "-c", textwrap.dedent(script), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "made\n"
    process.kill()
    process.communicate(timeout=SECONDS)
    assert os.listdir(tmp_path) == []


def open_more_files_than_the_limit(folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    files = [SwapFile(str(folder), ALIGNMENT) for _ in range(300)]
    assert all(file.nbytes == ALIGNMENT for file in files)


def test_there_may_be_more_files_than_the_usual_limit_of_open_files(run_on, tmp_path):
    """As with many buckets: a model of 70 billion parameters has about a thousand."""
    run_on(1, open_more_files_than_the_limit, folder=tmp_path)
