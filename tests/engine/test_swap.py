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
from mmap import PAGESIZE
from pathlib import Path

import pytest

from lightning_zero.io import swap
from lightning_zero.io.disk import ALIGNMENT, free_bytes
from lightning_zero.io.swap import BUFFERS, FileRange, Ring, SwapFile, stream
from tests.checkpoint import faults
from tests.examples.running import REPOSITORY
from tests.support.warm import warm_python
from tests.test_disk import FOLDERS, folder_for, is_direct, refuse_direct

SECONDS = 20
"""Seconds after which a wait for another thread fails."""


@pytest.fixture
def small_slices(monkeypatch):
    """Divide small extents among threads, too."""
    monkeypatch.setattr(swap, "SLICE", ALIGNMENT)


def extents_of(file, nbytes):
    """A whole file in extents of one size; the last may be smaller."""
    return [FileRange(file, start, min(nbytes, file.nbytes - start)) for start in range(0, file.nbytes, nbytes)]


def contents(file):
    found = bytearray(file.nbytes)
    file.read(memoryview(found), 0)
    return bytes(found)


def filled(file, data):
    file.write(memoryview(data), 0)
    return data


def plus_one(index, memory):
    memory[:] = bytes(memory).translate(bytes(range(1, 256)) + b"\0")


def before(monkeypatch, method, act):
    """Do something before each call of a method of `SwapFile`."""
    real = getattr(SwapFile, method)

    def call(file, memory, position):
        act()
        return real(file, memory, position)

    monkeypatch.setattr(SwapFile, method, call)


class Failing:
    """Lets the system calls that `SwapFile` reads or writes with fail, at positions within a range, while set to."""

    def __init__(self, monkeypatch, method, start, stop, code=errno.EIO):
        self.on, self.calls, self.began = True, 0, threading.Event()
        name = {"read": "preadv", "write": "pwrite"}[method]
        real = getattr(os, name)

        def call(descriptor, memory, position):
            if self.on and start <= position < stop:
                self.calls += 1
                self.began.set()
                raise OSError(code, os.strerror(code))
            return real(descriptor, memory, position)

        monkeypatch.setattr(os, name, call)


# ------------------------------------------------------------------------------------------------------------- contents


@FOLDERS
@pytest.mark.parametrize("is_refused", [False, True], ids=["direct", "cached"])
@pytest.mark.parametrize("size", [4 * ALIGNMENT, 4 * ALIGNMENT + 3, 5000, 777])
def test_many_passes_give_the_same_bytes_as_in_memory(tmp_path, monkeypatch, small_slices, in_memory, is_refused, size):
    if is_refused:
        refuse_direct(monkeypatch)
    folder = folder_for(in_memory, tmp_path)
    files = [SwapFile(str(folder), 10 * ALIGNMENT + 123), SwapFile(str(folder), 7 * ALIGNMENT)]
    expected = [filled(file, os.urandom(file.nbytes)) for file in files]
    ring, extents = Ring(), [*extents_of(files[0], size), *extents_of(files[1], size)]
    seen: list[int] = []

    def act(index, memory):
        seen.append(index)
        plus_one(index, memory)

    for number in range(5):
        stream(extents if number % 2 else extents[::-1], act, ring)
    assert seen == [*range(len(extents))] * 5
    step = bytes((byte + 5) % 256 for byte in range(256))
    assert [contents(file) for file in files] == [data.translate(step) for data in expected]


def test_aligned_extents_on_a_disk_bypass_the_cache(tmp_path):
    file = SwapFile(str(tmp_path), 2**23)
    stream(extents_of(file, 2**21), plus_one, Ring())
    assert is_direct(file)
    assert contents(file) == b"\1" * 2**23


def test_passes_over_zero_one_or_two_extents_work(tmp_path):
    file = SwapFile(str(tmp_path), 2 * ALIGNMENT)
    for count in (0, 1, 2):
        stream(extents_of(file, ALIGNMENT)[:count], plus_one, Ring())
    assert contents(file) == b"\2" * ALIGNMENT + b"\1" * ALIGNMENT
    empty = SwapFile(str(tmp_path), 0)
    stream([FileRange(empty, 0, 0)], plus_one, Ring())


# ----------------------------------------------------------------------------------------------------- at the same time


def test_the_next_extent_is_read_and_the_previous_one_written_while_one_is_changed(tmp_path, monkeypatch):
    """Each of the three waits until the other two have begun, which would never happen if they ran in sequence."""
    count, began = 8, {}
    for kind in ("read", "act", "write"):
        began[kind] = [threading.Event() for _ in range(count)]

    def together(index, but):
        others = {"read": index + 1, "act": index, "write": index - 1}
        for kind, number in others.items():
            if kind != but and 0 <= number < count:
                assert began[kind][number].wait(SECONDS), f"{kind} {number} has not begun during {but} {others[but]}"

    def watched(kind, offset):
        real = getattr(SwapFile, kind)

        def call(file, memory, position):
            number = position // ALIGNMENT
            began[kind][number].set()
            together(number + offset, kind)
            return real(file, memory, position)

        monkeypatch.setattr(SwapFile, kind, call)

    def act(index, memory):
        began["act"][index].set()
        together(index, "act")
        plus_one(index, memory)

    file = SwapFile(str(tmp_path), count * ALIGNMENT)
    watched("read", -1)
    watched("write", +1)
    stream(extents_of(file, ALIGNMENT), act, Ring())
    monkeypatch.undo()
    assert contents(file) == b"\1" * file.nbytes


def test_an_extent_is_read_and_written_by_several_threads_at_once(tmp_path, monkeypatch, small_slices):
    together = {kind: threading.Barrier(4, timeout=SECONDS) for kind in ("read", "write")}
    for kind, barrier in together.items():
        before(monkeypatch, kind, barrier.wait)
    file = SwapFile(str(tmp_path), 24 * ALIGNMENT)
    stream(extents_of(file, 8 * ALIGNMENT), plus_one, Ring(threads=4))
    monkeypatch.undo()
    assert contents(file) == b"\1" * file.nbytes


def test_each_extent_is_reported_once_its_new_contents_can_be_read(tmp_path, small_slices):
    count = 9
    file = SwapFile(str(tmp_path), count * 3 * ALIGNMENT)
    found: dict[int, bytes] = {}

    def act(index, memory):
        assert len(found) >= index - BUFFERS + 1  # the extent that had the same buffer has been reported
        plus_one(index, memory)

    def told(index):
        assert index == len(found)
        room = bytearray(3 * ALIGNMENT)
        file.read(memoryview(room), index * len(room))
        found[index] = bytes(room)

    stream(extents_of(file, 3 * ALIGNMENT), act, Ring(), on_written=told)
    assert found == dict.fromkeys(range(count), b"\1" * 3 * ALIGNMENT)


def test_an_extent_is_reported_while_the_next_one_is_changed(tmp_path):
    """A forward may be waiting for it."""
    file, told = SwapFile(str(tmp_path), 5 * ALIGNMENT), [threading.Event() for _ in range(5)]

    def act(index, memory):
        assert index == 0 or told[index - 1].wait(SECONDS)
        plus_one(index, memory)

    stream(extents_of(file, ALIGNMENT), act, Ring(), on_written=lambda index: told[index].set())
    assert all(event.is_set() for event in told) and contents(file) == b"\1" * file.nbytes


def test_an_extent_that_is_not_written_is_not_reported(tmp_path, monkeypatch, small_slices):
    file = SwapFile(str(tmp_path), 4 * ALIGNMENT)
    told: list[int] = []
    Failing(monkeypatch, "write", 3 * ALIGNMENT, 4 * ALIGNMENT)
    with pytest.raises(OSError, match="cannot be written"):
        stream(extents_of(file, 2 * ALIGNMENT), plus_one, Ring(), on_written=told.append)
    assert 1 not in told


def test_a_buffer_is_not_read_into_before_its_contents_are_written(tmp_path, monkeypatch, small_slices):
    """The disk delays each operation by a random time."""
    delays = random.Random(0)
    for kind in ("read", "write"):
        before(monkeypatch, kind, lambda: time.sleep(delays.random() * 0.004))
    file = SwapFile(str(tmp_path), 80 * ALIGNMENT)
    for _ in range(3):
        stream(extents_of(file, 4 * ALIGNMENT), plus_one, Ring(threads=3))
    monkeypatch.undo()
    assert contents(file) == b"\3" * file.nbytes


# --------------------------------------------------------------------------------------------------------------- memory


def memory_in_the_pipeline(folder, nbytes, count):
    """The most bytes that the pipeline adds to this process's memory."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE

    most = 0

    def act(index, memory):
        nonlocal most
        plus = bytes([index % 255 + 1])
        for start in range(0, nbytes, 2**16):
            memory[start : start + 1] = plus
        most = max(most, resident())

    stream(extents_of(SwapFile(str(folder), 4 * ALIGNMENT), ALIGNMENT), act=lambda *_: None, ring=Ring())
    file = SwapFile(str(folder), count * nbytes)
    before = resident()
    ring = Ring()
    for _ in range(2):
        stream(extents_of(file, nbytes), act, ring)
    return most - before


def test_memory_is_three_buffers_however_many_extents_there_are(run_on, tmp_path):
    nbytes = 2**23
    (few,) = run_on(1, memory_in_the_pipeline, folder=tmp_path, nbytes=nbytes, count=3)
    (many,) = run_on(1, memory_in_the_pipeline, folder=tmp_path, nbytes=nbytes, count=30)
    other = 2 * 2**20  # the threads' stacks, and Python's allocations
    assert BUFFERS * nbytes - other < few < BUFFERS * nbytes + other
    assert many < BUFFERS * nbytes + other


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_read_error_names_the_place_and_leaves_later_extents_unchanged(tmp_path, monkeypatch, small_slices):
    file = SwapFile(str(tmp_path), 20 * ALIGNMENT)
    ring, acted = Ring(), []
    failing = Failing(monkeypatch, "read", 11 * ALIGNMENT, 12 * ALIGNMENT)

    def act(index, memory):
        acted.append(index)
        plus_one(index, memory)

    with pytest.raises(OSError, match=f"cannot be read at byte {11 * ALIGNMENT} .Input/output error") as raised:
        stream(extents_of(file, 2 * ALIGNMENT), act, ring)
    assert raised.value.errno == errno.EIO and raised.value.filename == str(tmp_path)
    assert acted == [0, 1, 2, 3, 4], "the extent could not be read, and those after it were not to be begun"
    failing.on = False
    assert contents(file) == b"\1" * 10 * ALIGNMENT + bytes(10 * ALIGNMENT)
    stream(extents_of(file, 2 * ALIGNMENT)[5:], act, ring)
    assert contents(file) == b"\1" * file.nbytes


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", [0, 5, 9])
def test_a_write_error_names_the_place_and_ends_the_pass(tmp_path, monkeypatch, small_slices, at, code):
    file = SwapFile(str(tmp_path), 20 * ALIGNMENT)
    ring, acted = Ring(), []
    extents = extents_of(file, 2 * ALIGNMENT)
    failing = Failing(monkeypatch, "write", 2 * at * ALIGNMENT, (2 * at + 1) * ALIGNMENT, code)

    def act(index, memory):
        if index == min(at + 2, len(extents) - 1):
            assert at >= 8 or failing.began.wait(SECONDS)
        acted.append(index)
        plus_one(index, memory)

    with pytest.raises(OSError, match=f"cannot be written at byte {2 * at * ALIGNMENT} ") as raised:
        stream(extents, act, ring)
    assert raised.value.errno == code and raised.value.filename == str(tmp_path)
    done = len(acted)
    assert acted == [*range(done)] and at < done <= at + BUFFERS, "the next buffers at most were changed meanwhile"


def test_an_extent_whose_change_failed_stays_unchanged_and_earlier_ones_are_written(tmp_path, small_slices):
    file = SwapFile(str(tmp_path), 20 * ALIGNMENT)

    def act(index, memory):
        plus_one(index, memory)
        if index == 4:
            raise ZeroDivisionError("in the change")

    ring = Ring()
    with pytest.raises(ZeroDivisionError, match="in the change"):
        stream(extents_of(file, 2 * ALIGNMENT), act, ring)
    assert contents(file) == b"\1" * 8 * ALIGNMENT + bytes(12 * ALIGNMENT)
    stream(extents_of(file, 2 * ALIGNMENT), plus_one, ring)
    assert contents(file) == b"\2" * 8 * ALIGNMENT + b"\1" * 12 * ALIGNMENT


def reserved_before(folder):
    """A disk of 1 MiB: too small for a file, then large enough for it, and then full."""

    def on_the_disk():
        room = free_bytes(folder)
        assert 2**19 < room <= 2**20
        with pytest.raises(OSError, match=f"{2**20 + 1} bytes are required, {room} are available") as raised:
            SwapFile(str(folder), 2**20 + 1)
        assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(folder)
        assert os.listdir(folder) == [] and free_bytes(folder) == room
        file = SwapFile(str(folder), 2**19)
        with pytest.raises(OSError) as raised:
            (folder / "of others").write_bytes(bytes(2**20))
        assert raised.value.errno == errno.ENOSPC and free_bytes(folder) == 0
        for _ in range(2):
            stream(extents_of(file, 2**17), plus_one, Ring())
        assert contents(file) == b"\2" * 2**19
        file.close()
        assert free_bytes(folder) >= 2**19

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


def anybodys_folder(tmp_path):
    """A folder with the permissions of the one for temporary files."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


def prepared(path, how, monkeypatch):
    if how == "a link":
        (path.parent.parent / "target").mkdir(exist_ok=True)
        path.symlink_to(path.parent.parent / "target")
        return "the path is a link"
    path.mkdir()
    if how == "another user's":
        if os.geteuid() == 0:
            os.chown(path, 65534, -1)
        else:  # other users may not give it away
            monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        return "the folder belongs to user"
    path.chmod(0o777)
    return "other users may change"


@pytest.mark.parametrize("how", ["a link", "another user's", "open to all"])
def test_a_path_that_another_user_may_have_prepared_is_refused(tmp_path, monkeypatch, how):
    path = anybodys_folder(tmp_path) / "offload"
    words = prepared(path, how, monkeypatch)
    with pytest.raises(PermissionError, match=words) as raised:
        SwapFile(str(path), 1)
    assert str(path) in str(raised.value)
    assert list(path.iterdir()) == [] and not list((tmp_path).glob("target/*"))


def test_a_folder_in_a_shared_folder_is_made_for_this_user_alone_and_used_again(tmp_path):
    path = anybodys_folder(tmp_path) / "offload"
    for _ in range(2):
        kept = SwapFile(str(path), 1)
        assert path.stat().st_mode & 0o777 == 0o700
        del kept
    path = anybodys_folder(path)  # inside the user's own folder, any permissions are accepted
    path.chmod(0o777)
    SwapFile(str(path), 1)


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
