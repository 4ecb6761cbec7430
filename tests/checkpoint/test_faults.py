"""Faults while a checkpoint is saved or loaded: the last good checkpoint survives, and damage is reported."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.reading import DamagedCheckpointError, open_checkpoint
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.checkpoint.saving import CheckpointNotSavedError
from tests.checkpoint import faults
from tests.checkpoint.faults import FAILED, HUNG, KILLED, names_in, run_ranks, save, value_at
from tests.support.ports import reserved_port

FORMS = pytest.mark.parametrize("form", ["full", "sharded"])

# ------------------------------------------------------------------------------------------------ killed while saving


def killed_at_every_call(folder, form, name):
    """Kill each rank at each disk call of a save, and check the folder after each."""
    last, world_size = folder / "last.ckpt", 1 if form == "full" else 2
    moments = 0
    for victim in range(world_size):
        for number in range(1000):

            def act(rank, gather, victim=victim, number=number):
                if rank == victim:
                    faults.die_at_call(number)
                save(form, folder / name, 2.0, rank, gather)

            faults.empty(folder)
            save(form, last, 1.0)
            codes = run_ranks(act, world_size)
            assert HUNG not in codes and codes[victim] in (0, KILLED), (victim, number, codes)
            kept = last
            if not last.exists():  # killed between two renames
                (kept,) = folder.glob("last.old-*")
            assert value_at(kept) in ((1.0, 2.0) if name == last.name else (1.0,)), (victim, number)
            if (folder / name).exists():
                assert value_at(folder / name) in (1.0, 2.0), (victim, number)
            save(form, folder / "next.ckpt", 3.0)
            expected = {kept.name, "next.ckpt"}
            assert set(names_in(folder)) in (expected, expected | {name}), (victim, number)
            assert value_at(kept) in (1.0, 2.0) and value_at(folder / "next.ckpt") == 3
            if codes[victim] == 0:
                break
            moments += 1
    return moments


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("full", "last.ckpt"),
        ("sharded", "last.ckpt"),
        pytest.param("full", "other.ckpt", marks=pytest.mark.exhaustive),
        pytest.param("sharded", "other.ckpt", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_killed_at_any_disk_call_leaves_the_last_good_checkpoint(run_on, tmp_path, form, name):
    (moments,) = run_on(1, killed_at_every_call, timeout=120, folder=tmp_path / "c", form=form, name=name)
    assert moments > (5 if form == "full" else 25)


def killed_at_random(folder, form, is_async):
    path, world_size, ready = folder / "last.ckpt", 1 if form == "full" else 2, folder.parent / "ready"
    random.seed(7)
    saved = set()

    def in_foreground(rank, gather):
        ready.touch()
        for value in range(1, 10**6):
            save(form, path, value, rank, gather)

    for victim in range(world_size):
        for _ in range(20):
            faults.empty(folder)
            save(form, path, 0.0)
            ready.unlink(missing_ok=True)
            with reserved_port() as port:
                act = faults.in_background(path, form, ready, port) if is_async else in_foreground
                codes = run_ranks(act, world_size, kill=(victim, random.uniform(0, 0.2)), after=ready)
            assert codes == [KILLED if rank == victim else FAILED for rank in range(world_size)]
            (kept,) = [path] if path.exists() else folder.glob("last.old-*")  # killed between two renames
            saved.add(value_at(kept))
            save(form, path, -1.0)
            assert names_in(folder) == sorted({path.name, kept.name}) and value_at(path) == -1
            save(form, path, -2.0)  # removes a checkpoint that the killed save put aside, since there is another now
            assert names_in(folder) == ["last.ckpt"] and value_at(path) == -2
    return saved


@pytest.mark.parametrize("is_async", [False, True], ids=["", "in the background"])
@FORMS
@pytest.mark.exhaustive
def test_a_rank_killed_at_a_random_moment_leaves_one_whole_checkpoint(run_on, tmp_path, form, is_async):
    (saved,) = run_on(1, killed_at_random, timeout=240, folder=tmp_path / "c", form=form, is_async=is_async)
    assert len(saved) > 1, saved  # the moments fell into different saves


def killed_between_the_renames(folder):
    """While a folder is replaced, the old checkpoint briefly has another name."""
    rename, path = os.rename, folder / "last.ckpt"

    def act(rank, gather):
        def once(one, other):
            rename(one, other)
            os.kill(os.getpid(), 9)

        os.rename = once
        save("sharded", path, 2.0)

    save("sharded", path, 1.0)
    assert run_ranks(act, 1) == [KILLED]
    (put_aside,) = [name for name in names_in(folder) if not name.startswith(".")]
    assert put_aside != path.name and put_aside.startswith("last") and put_aside.endswith(".ckpt")
    save("sharded", folder / "other.ckpt", 3.0)
    assert value_at(folder / put_aside) == 1  # the only one, so it stays
    save("sharded", path, 4.0)
    save("sharded", folder / "other.ckpt", 5.0)
    assert names_in(folder) == ["last.ckpt", "other.ckpt"] and value_at(path) == 4


def test_a_checkpoint_put_aside_by_a_killed_save_stays_until_there_is_another(run_on, tmp_path):
    run_on(1, killed_between_the_renames, folder=tmp_path)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_in_an_object_store_a_failed_save_leaves_the_checkpoint_at_its_path(monkeypatch, form):
    path, store = f"memory://{form}/last.ckpt", type(fsspec.filesystem("memory"))
    move = store.mv

    def lost(self, one, other, **options):
        if ".partial-" in one:
            raise ConnectionError("the connection is lost")
        move(self, one, other, **options)

    for value in (1.0, 2.0):
        save(form, path, value)
        with monkeypatch.context() as patch:
            patch.setattr(store, "mv", lost)
            with pytest.raises(Exception, match="the connection is lost"):
                save(form, path, 9.0)
        assert value_at(path) == value


def killed_while_removing(folder, name):
    """Kill the process at each disk call of a removal, and check the folder after each."""
    for number in range(1000):
        faults.empty(folder)
        save("sharded", folder / name, 1.0)

        def act(rank, gather, number=number):
            faults.die_at_call(number)
            Destination(str(folder / name)).remove()

        (code,) = run_ranks(act, 1)
        assert [left for left in names_in(folder) if not left.startswith(".")] in ([name], []), number
        if (folder / name).exists():
            assert value_at(folder / name) == 1, number
        save("full", folder / "next.ckpt", 2.0)
        assert [left for left in names_in(folder) if left.startswith(".")] == [], number
        if code == 0:
            assert names_in(folder) == ["next.ckpt"]
            return number
    return None


@pytest.mark.parametrize("name", ["last.ckpt", "Gewicht µ 0,5.ckpt", "x" * 250 + ".ckpt"], ids=["", "odd", "long"])
def test_a_process_killed_while_removing_a_checkpoint_leaves_all_of_it_or_nothing(run_on, tmp_path, name):
    (moments,) = run_on(1, killed_while_removing, folder=tmp_path / "c", name=name)
    assert moments > 4


def test_removing_a_link_keeps_the_checkpoint_it_points_to(tmp_path):
    for form in ("full", "sharded"):
        save(form, tmp_path / form, 1.0)
        (tmp_path / "last.ckpt").symlink_to(form)
        Destination(tmp_path / "last.ckpt").remove()
        Destination(tmp_path / "last.ckpt").remove()  # already gone, as if another run had removed it
        assert value_at(tmp_path / form) == 1
    assert names_in(tmp_path) == ["full", "sharded"]


def test_a_partly_removed_checkpoint_in_an_object_store_is_reported_as_incomplete(monkeypatch):
    """Object stores cannot rename folders."""
    save("sharded", "memory://removed/last.ckpt", 1.0)
    fs = fsspec.filesystem("memory")
    remove_files = type(fs).rm

    def lost(self, path, recursive=False, maxdepth=None):
        if recursive:
            raise ConnectionError("the connection is lost")
        remove_files(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(type(fs), "rm", lost)
        with pytest.raises(ConnectionError):
            Destination("memory://removed/last.ckpt").remove()
    with pytest.raises(DamagedCheckpointError, match="is incomplete"):
        open_checkpoint("memory://removed/last.ckpt")
    Destination("memory://removed/last.ckpt").remove()
    assert not fs.exists("removed/last.ckpt")


@FORMS
def test_all_bytes_are_synced_to_the_disk_before_a_checkpoint_gets_its_name(tmp_path, monkeypatch, form):
    """After a power failure, a renamed file that was not synced may be empty."""
    fsync, rename, synced, renamed = os.fsync, os.rename, {}, []

    def noted(descriptor):
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        fsync(descriptor)

    def checked(source, place):
        for path in [Path(source), *Path(source).glob("*")]:
            assert synced[path.stat().st_ino] == path.stat().st_size, path
        renamed.append(place)
        rename(source, place)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    save(form, tmp_path / "last.ckpt", 1.0, numel=2**21)
    assert len(renamed) == 1 and tmp_path.stat().st_ino in synced


def test_a_link_with_the_name_of_a_partial_file_is_not_followed(tmp_path):
    """Another user may have planted it."""
    destination = Destination(tmp_path / "last.ckpt")
    (tmp_path / "other").write_text("of another's")
    os.symlink(tmp_path / "other", destination.partial)
    with pytest.raises(FileExistsError), destination.writing():
        pass
    assert (tmp_path / "other").read_text() == "of another's"


def at_the_same_time(folder, form):
    """Two independent runs."""

    def act(rank, gather):
        for number in range(40):
            if form == "full":  # a folder cannot be replaced at once
                save(form, folder / "last.ckpt", float(rank), numel=5000)
            save(form, folder / f"{rank}.ckpt", float(number))

    assert run_ranks(act) == [0, 0]
    assert names_in(folder) == ["0.ckpt", "1.ckpt"] + ["last.ckpt"] * (form == "full")
    assert form == "sharded" or value_at(folder / "last.ckpt") in (0, 1)
    assert value_at(folder / "0.ckpt") == value_at(folder / "1.ckpt") == 39


@FORMS
def test_two_runs_that_save_into_one_folder_do_not_disturb_each_other(run_on, tmp_path, form):
    run_on(1, at_the_same_time, folder=tmp_path, form=form)


def test_leftovers_of_another_machine_are_kept_until_they_are_a_day_old(tmp_path, monkeypatch):
    left = tmp_path / ".last.ckpt.partial-elsewhere.1-4242-18a0123456789abc"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"some")
    save("sharded", tmp_path / "a.ckpt", 1.0)
    assert left.exists()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 25 * 3600)
    save("sharded", tmp_path / "a.ckpt", 2.0)
    assert names_in(tmp_path) == ["a.ckpt"] and value_at(tmp_path / "a.ckpt") == 2


# --------------------------------------------------------------------------------------------------- cannot be written


def fails_everywhere(path, form, why, rank, gather, numel=40):
    with pytest.raises(CheckpointNotSavedError, match="was not saved") as raised:
        save(form, path, 2.0, rank, gather, numel=numel)
    assert str(path) in str(raised.value) and why in str(raised.value), raised.value


def full_disk(folder, form):
    """Each of two ranks in turn has no room for its part."""

    def on_the_disk():
        save(form, folder / "last.ckpt", 1.0)
        for full in (0, 1) if form == "sharded" else (0,):

            def act(rank, gather, full=full):
                large = 500_000 if rank == full else 40
                fails_everywhere(folder / "last.ckpt", form, "No space left on device", rank, gather, numel=large)
                save(form, folder / "last.ckpt", 3.0, rank, gather)  # a smaller checkpoint, by the same process

            assert run_ranks(act, 2 if form == "sharded" else 1) == [0] * (2 if form == "sharded" else 1)
            assert names_in(folder) == ["last.ckpt"] and value_at(folder / "last.ckpt") == 3

    assert faults.on_a_small_disk(folder, 2**20, on_the_disk) == 0


@FORMS
def test_a_full_disk_is_reported_on_every_rank_and_a_smaller_save_then_succeeds(run_on, tmp_path, form):
    run_on(1, full_disk, folder=tmp_path, form=form)


def no_permission(folder, form):
    save(form, folder / "last.ckpt", 1.0)
    os.chmod(folder, 0o555)

    def act(rank, gather):
        if os.getuid() == 0:
            os.setuid(65534)
        fails_everywhere(folder / "last.ckpt", form, "Permission denied", rank, gather)

    for parent in folder.parents[:2]:
        os.chmod(parent, 0o755)
    assert run_ranks(act, 2 if form == "sharded" else 1) == [0] * (2 if form == "sharded" else 1)
    os.chmod(folder, 0o755)
    assert names_in(folder) == ["last.ckpt"] and value_at(folder / "last.ckpt") == 1


@FORMS
def test_missing_write_permission_is_reported_on_every_rank(run_on, tmp_path, form):
    (tmp_path / "c").mkdir()
    run_on(1, no_permission, folder=tmp_path / "c", form=form)


@FORMS
def test_a_path_below_a_file_is_reported(tmp_path, form):
    (tmp_path / "file").write_text("a file")
    fails_everywhere(tmp_path / "file" / "last.ckpt", form, "file", 0, None)
    assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "a file"


@FORMS
def test_a_name_may_be_as_long_as_the_system_allows(tmp_path, form):
    long = f"{'metric=0.123-' * 19}{'x' * 3}.ckpt"
    assert len(long) == 255
    for value in (1.0, 2.0):
        save(form, tmp_path / long, value)
        assert names_in(tmp_path) == [long] and value_at(tmp_path / long) == value
    fails_everywhere(tmp_path / f"x{long}", form, "File name too long", 0, None)
    assert names_in(tmp_path) == [long]


# -------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.exhaustive(but=1)
@FORMS
def test_an_altered_byte_a_truncated_file_and_a_missing_file_are_detected(tmp_path, form):
    path, found = tmp_path / "last.ckpt", 0
    save(form, path, 1.0)
    for file in [path] if form == "full" else sorted(path.iterdir()):
        data = file.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 300)):
            altered = bytearray(data)
            altered[position] ^= 0x5A
            file.write_bytes(altered)
            try:
                assert value_at(path) == 1  # the altered byte is between records
            except DamagedCheckpointError as error:
                assert str(path) in str(error)
                found += 1
        for length in {0, 1, 3, len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:length])
            with pytest.raises(DamagedCheckpointError, match=path.name):
                value_at(path)
        if form == "sharded":
            file.unlink()
            with pytest.raises(DamagedCheckpointError, match=file.name):
                value_at(path)
        file.write_bytes(data)
    assert found > 150 and value_at(path) == 1


def test_an_error_about_damage_names_the_piece_and_its_file(tmp_path):
    path = tmp_path / "last.ckpt"
    for form in ("full", "sharded"):
        save(form, path, 7.0, numel=3000)
        file = path if form == "full" else next(path.glob("__0_*.distcp"))
        data = bytearray(file.read_bytes())
        data[data.index(b"\0\0\xe0\x40" * 100) + 80] ^= 1
        file.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=r"(state_dict\.a|data/0).*bytes \d+ to \d+") as raised:
            open_checkpoint(path).verify()
        assert file.name in str(raised.value)


# ---------------------------------------------------------------------------------------- what must not be replaced


@pytest.mark.parametrize("name", ["out", "out/", "link"])
@FORMS
def test_a_folder_with_other_contents_is_not_replaced(tmp_path, form, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.csv").write_text("precious")
    (tmp_path / "link").symlink_to("out")
    saver, values = Saver(in_background=False), {"a": torch.ones(3)}

    def act():
        if form == "full":
            saver.save(SaveJob(SaveMode.GATHERED, f"{tmp_path}/{name}", {"state_dict": values}))
        else:
            saver.save(SaveJob(SaveMode.SHARDED, f"{tmp_path}/{name}", {}, {"state_dict": values}))

    if name != "link":
        with pytest.raises(CheckpointNotSavedError, match=r"out/? is a folder with contents other .*\(results.csv\)"):
            act()
    else:
        act()  # only the link is lost
    assert (tmp_path / "out" / "results.csv").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def beside_a_checkpoint(out, what):
    """Create a folder with parts of a checkpoint and something of the user's."""
    if what == "a file":
        save("sharded", out, 1.0)
    out.mkdir(exist_ok=True)
    if what == "data of another program":
        (out / "x.distcp").write_text("not DCP's name for a file")
    if what == "only a name":
        (out / "meta.pt").write_text("of the user's")
    elif what == "a folder under a checkpoint's name":
        (out / ".metadata").mkdir()
        (out / ".metadata" / "thesis.tex").write_text("precious")
    elif what == "a folder":
        (out / "__0_0.distcp").write_text("a piece")
        (out / "figures").mkdir()
        (out / "figures" / "thesis.tex").write_text("precious")
    else:
        (out / "thesis.tex").write_text("precious")


def refused_on_every_rank(folder, what):
    out = folder / "out"
    beside_a_checkpoint(out, what)
    before = contents(folder)

    def act(rank, gather):
        Destination.writing = lambda *_: os._exit(9)  # nothing is written before the refusal
        for in_background in (False, True):
            saver = Saver(in_background)
            path = out if rank == 0 else folder / "another"  # rank 0's path counts
            with pytest.raises(
                CheckpointNotSavedError, match="is a folder with contents other than a checkpoint"
            ) as told:
                job = SaveJob(SaveMode.SHARDED, path, {}, {"state_dict": {"a": torch.ones(3)}})
                saver.save(job, Ranks(rank, gather))
            assert f"rank 0 could not write it: IsADirectoryError: {out} " in str(told.value)

    assert run_ranks(act) == [0, 0]
    with pytest.raises(CheckpointNotSavedError, match="is a folder with contents other than a checkpoint"):
        save("full", out, 2.0)
    assert contents(folder) == before


def contents(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "what",
    ["a file", "data of another program", "only a name", "a folder under a checkpoint's name", "a folder"],
)
def test_a_folder_with_more_than_a_checkpoint_is_refused_on_every_rank_before_any_write(run_on, tmp_path, what):
    run_on(1, refused_on_every_rank, folder=tmp_path, what=what)


@FORMS
def test_a_file_added_to_the_folder_during_a_save_is_not_lost(tmp_path, monkeypatch, form):
    out, put_in_place = tmp_path / "last.ckpt", Destination.put_in_place
    save("sharded", out, 1.0)

    def later(destination):
        (out / "thesis.tex").write_text("precious")
        put_in_place(destination)

    monkeypatch.setattr(Destination, "put_in_place", later)
    with pytest.raises(CheckpointNotSavedError, match="thesis.tex"):
        save(form, out, 2.0)
    (out / "thesis.tex").unlink()
    assert value_at(out) == 1 and names_in(tmp_path) == ["last.ckpt"]


@FORMS
def test_a_device_is_not_replaced(tmp_path, form):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointNotSavedError, match="pipe is neither a file nor a folder"):
        save(form, tmp_path / "pipe", 1.0)
    assert names_in(tmp_path) == ["pipe"] and not (tmp_path / "pipe").is_file()
    with pytest.raises(CheckpointNotSavedError, match="/ is a folder with contents other than a checkpoint"):
        save(form, "/", 1.0)


def test_links_in_a_checkpoint_are_replaced_and_their_targets_are_kept(tmp_path):
    """Tools for data versioning replace large files with such links."""
    path, kept = tmp_path / "last.ckpt", tmp_path / "kept"
    save("sharded", path, 1.0)
    (file,) = path.glob("__0_*.distcp")
    file.rename(kept)
    file.symlink_to(kept)
    data = kept.read_bytes()
    save("sharded", path, 2.0)
    assert value_at(path) == 2 and kept.read_bytes() == data and names_in(tmp_path) == ["kept", "last.ckpt"]


def test_files_that_operating_systems_add_to_folders_do_not_prevent_replacement(tmp_path):
    path = tmp_path / "last.ckpt"
    save("sharded", path, 1.0)
    for name in (".DS_Store", "._meta.pt", ".nfs000000000a3b"):
        (path / name).write_text("x")
    save("sharded", path, 2.0)
    assert value_at(path) == 2 and not (path / ".DS_Store").exists()


@pytest.mark.parametrize("name", ["results.old-final-2024-11", ".results.partial-final-2024-11"])
def test_a_folder_that_only_looks_like_a_leftover_is_kept(tmp_path, monkeypatch, name):
    (tmp_path / "results").write_text("new")
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("precious")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 25 * 3600)
    save("full", tmp_path / "a.ckpt", 1.0)
    assert (tmp_path / name / "thesis.tex").read_text() == "precious"


@FORMS
def test_a_checkpoint_of_the_other_form_an_empty_folder_and_a_broken_checkpoint_are_replaced(tmp_path, form):
    path = tmp_path / "last.ckpt"
    save("sharded" if form == "full" else "full", path, 1.0)
    save(form, path, 2.0)
    assert value_at(path) == 2
    faults.empty(path) if path.is_dir() else path.unlink()
    path.mkdir(exist_ok=True)
    save(form, path, 3.0)
    assert value_at(path) == 3
    save("sharded", path, 4.0)
    (path / ".metadata").unlink()
    save(form, path, 5.0)
    assert value_at(path) == 5 and names_in(tmp_path) == ["last.ckpt"]
