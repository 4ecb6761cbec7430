"""What a Trainer's user sees when a checkpoint cannot be written, is damaged, or belongs to another model."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.reading import DamagedCheckpointError, open_checkpoint
from lightning_zero.checkpoint.saving import CheckpointNotSavedError, CopyBuffer
from lightning_zero.io.labels import new_label
from lightning_zero.strategies import checkpoint_files
from tests.checkpoint.faults import names_in
from tests.support import rank
from tests.support.models import OddModel
from tests.support.selection import exhaustive_but
from tests.support.trainer import Learner, make_trainer
from tests.support.training import same_tensors
from tests.support.warm import warm_python

FORMS = pytest.mark.parametrize("form", ["full", "sharded"])
IN_BACKGROUND = pytest.mark.parametrize("is_async", [False, True], ids=["", "in the background"])


class NoRoom(Callback):
    """Prevents one rank from writing more than 2 KiB to a file during some steps."""

    def __init__(self, failing: int, steps: set[int]) -> None:
        self.failing, self.steps = failing, steps

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for job in trainer.strategy._files.saver._jobs:
            job.exception()  # wait for the background save of the previous step's checkpoint
        self.limit(trainer.global_step + 1 in self.steps)

    def limit(self, is_limited: bool) -> None:
        if rank() == self.failing:
            soft = 2048 if is_limited else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def teardown(self, *_: Any, **__: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class NoMemory(NoRoom):
    """Prevents one rank from copying values in the background during some steps."""

    def limit(self, is_limited: bool) -> None:
        if rank() == self.failing:
            CopyBuffer.copied = _copied_unless_in_background if is_limited else _copied  # type: ignore[method-assign]

    def teardown(self, *_: Any, **__: Any) -> None:
        CopyBuffer.copied = _copied  # type: ignore[method-assign]


_copied = CopyBuffer.copied


def _copied_unless_in_background(*args: Any) -> Any:
    if threading.current_thread().name.startswith("lightning_zero-checkpoint"):
        raise MemoryError("too little memory")
    return _copied(*args)


class Forgiving(ModelCheckpoint):
    """Continues training if a checkpoint was not saved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.caught: list[tuple[int, str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        try:
            super().on_train_batch_end(trainer, *args)
        except CheckpointNotSavedError as error:
            self.caught.append((trainer.global_step, str(error)))

    def on_train_epoch_end(self, *_: Any) -> None:
        pass


def no_room_at_one_step(folder: Path, form: str, failing: int, is_async: bool) -> None:
    message = fail_at_one_step(folder, form, NoRoom(failing, {2}), is_async)
    assert "File too large" in message, message


def no_memory_at_one_step(folder: Path, form: str, failing: int) -> None:
    begin = time.monotonic()
    message = fail_at_one_step(folder, form, NoMemory(failing, {2}), is_async=True)
    assert f"rank {failing} could not write it: MemoryError: too little memory" in message, message
    assert time.monotonic() - begin < 30


def fail_at_one_step(folder: Path, form: str, failure: NoRoom, is_async: bool) -> str:
    """Return the error's message. The failure prevents the save of the checkpoint at step 2, but no other."""
    saving = Forgiving(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    strategy = ZeroStrategy(3, checkpoint=form, async_save=is_async)
    trainer = make_trainer(strategy, callbacks=[failure, saving], enable_checkpointing=True, max_epochs=1)
    trainer.fit(Learner(batches=5))
    assert trainer.global_step == 5
    ((step, message),) = saving.caught
    assert step == (3 if is_async else 2)
    assert f"{folder}/step=2.ckpt was not saved" in message, message
    dist.barrier()
    # The previous checkpoint is not removed if its successor could not be written.
    assert names_in(folder) == ["step=1.ckpt", "step=5.ckpt"], names_in(folder)
    for name in names_in(folder):
        open_checkpoint(folder / name).verify()
    return message


@pytest.mark.exhaustive(but=1)
@IN_BACKGROUND
@pytest.mark.parametrize(("form", "failing"), [("full", 0), ("sharded", 0), ("sharded", 1)])
def test_a_failed_save_is_reported_on_every_rank_and_training_may_continue(run_on, tmp_path, form, failing, is_async):
    run_on(2, no_room_at_one_step, folder=tmp_path / "c", form=form, failing=failing, is_async=is_async)


@FORMS
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_copy_its_shards_in_the_background_is_not_waited_for(run_on, tmp_path, form, failing):
    run_on(2, no_memory_at_one_step, folder=tmp_path / "c", form=form, failing=failing, timeout=60)


def no_room_at_the_end(folder: Path, form: str, failing: int) -> None:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3)
    trainer = make_trainer(
        ZeroStrategy(2, checkpoint=form, async_save=True),
        callbacks=[NoRoom(failing, {3}), saving],
        enable_checkpointing=True,
        max_epochs=1,
    )
    module = Learner(batches=3)
    with pytest.raises(CheckpointNotSavedError, match=r"step=3.ckpt was not saved: .*File too large"):
        trainer.fit(module)
    NoRoom(failing, set()).teardown()
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert names_in(folder) == []


@pytest.mark.parametrize(("form", "failing"), [("full", 0), ("sharded", 1)])
def test_a_failed_background_save_is_reported_at_the_end_of_fit(run_on, tmp_path, form, failing):
    run_on(2, no_room_at_the_end, folder=tmp_path / "c", form=form, failing=failing)


class SavesAtTheEnd(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        self.save(trainer, self.folder / "hook.ckpt")

    def save(self, trainer: Any, path: Path) -> None:
        trainer.save_checkpoint(path)
        assert not trainer.strategy._files.saver._jobs
        open_checkpoint(path).verify()


def saved_after_the_run(folder: Path, form: str) -> None:
    saves, failure = SavesAtTheEnd(folder), NoRoom(rank(), set())
    trainer = make_trainer(ZeroStrategy(3, checkpoint=form, async_save=True), callbacks=[saves], max_epochs=1)
    trainer.fit(Learner(batches=1))
    saves.save(trainer, folder / "after.ckpt")
    failure.limit(True)
    with pytest.raises(CheckpointNotSavedError, match=r"full.ckpt was not saved: .*File too large"):
        trainer.save_checkpoint(folder / "full.ckpt")
    failure.teardown()


@FORMS
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_after_the_run_does_not_return_before_the_checkpoint_is_written(run_on, tmp_path, form, ranks):
    run_on(ranks, saved_after_the_run, folder=tmp_path, form=form)


def removed_by_the_callback(folder: Path, is_async: bool) -> None:
    rmtree, removed = shutil.rmtree, []

    def notes(path: Any, *args: Any, **options: Any) -> None:
        removed.append(os.path.basename(path))
        rmtree(path, *args, **options)

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    strategy = ZeroStrategy(3, checkpoint="sharded", async_save=is_async)
    trainer = make_trainer(strategy, callbacks=[saving], enable_checkpointing=True, max_epochs=1)
    shutil.rmtree = notes
    try:
        trainer.fit(Learner(batches=3))
    finally:
        shutil.rmtree = rmtree
    dist.barrier()
    assert names_in(folder) == ["step=3.ckpt"]
    if rank() == 0:
        assert len(removed) == 2 and all(name.startswith(".step=") for name in removed), removed


@IN_BACKGROUND
def test_a_folder_that_model_checkpoint_removes_is_renamed_first(run_on, tmp_path, is_async):
    """So no process finds a part of the folder, even if this process is killed at any time."""
    run_on(2, removed_by_the_callback, folder=tmp_path / "c", is_async=is_async)


class Logs(Learner):
    """Logs a number that goes up and down: 3, 1, 4, 2, 0, 3, ..."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float((3 + 3 * self.global_step) % 5), sync_dist=True)
        return super().training_step(batch, batch_idx)


NAMING = {
    "two in a folder": [
        {"filename": "{epoch}", "monitor": "number", "mode": "min"},
        {"filename": "{epoch}", "monitor": "number", "mode": "max"},
    ],
    "the best two": [{"filename": "best", "monitor": "number", "mode": "max", "save_top_k": 2, "save_last": True}],
    "all by epoch": [{"filename": "{epoch}", "monitor": "number", "save_top_k": -1}],
    "a link to the last": [{"filename": "{step}", "save_last": "link"}],
}


def name_as_under_ddp(folder: Path, form: str) -> None:
    put_in_place = Destination.put_in_place

    def slowly(destination: Destination) -> None:
        time.sleep(0.1)  # so that the next step comes before the checkpoint
        put_in_place(destination)

    def run(strategy: Any, name: str, callbacks: list[dict[str, Any]]) -> Any:
        into = folder / name
        saving = [ModelCheckpoint(into, every_n_train_steps=1, **options) for options in callbacks]
        make_trainer(strategy, callbacks=saving, enable_checkpointing=True).fit(Logs(batches=4))
        dist.barrier()
        found = {
            path.name: torch.load(path, weights_only=False)["global_step"] for path in into.iterdir() if path.is_file()
        }
        paths = [
            (os.path.basename(each.best_model_path), os.path.basename(each.last_model_path), each.best_model_score)
            for each in saving
        ]
        return found if form == "full" else sorted(os.listdir(into)), paths

    for name, callbacks in NAMING.items():
        expected = run("ddp", f"ddp {name}", callbacks)
        if form == "sharded":
            expected = sorted(os.listdir(folder / f"ddp {name}")), expected[1]
        Destination.put_in_place = slowly  # type: ignore[method-assign]
        try:
            found = run(ZeroStrategy(3, checkpoint=form, async_save=True), f"zero {name}", callbacks)
        finally:
            Destination.put_in_place = put_in_place  # type: ignore[method-assign]
        assert found == expected, f"{name}: {found}, under DDP {expected}"


@pytest.mark.behaviour("The Trainer", "`ModelCheckpoint` with `async_save` keeps the files that it keeps under DDP")
@FORMS
def test_model_checkpoint_chooses_ddps_names_while_checkpoints_are_still_written(run_on, tmp_path, form):
    run_on(2, name_as_under_ddp, folder=tmp_path / "c", form=form)


class Stop(Exception):
    pass


class StopAfterSaving(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise Stop("the user's own")


def stop_with_a_save_under_way(folder: Path, form: str) -> None:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        ZeroStrategy(3, checkpoint=form, async_save=True),
        callbacks=[saving, *([StopAfterSaving()] if rank() == 1 else [])],
        enable_checkpointing=True,
        max_epochs=1,
    )
    trainer.callbacks.sort(key=lambda callback: isinstance(callback, StopAfterSaving))  # as Lightning does
    with pytest.raises(Stop if rank() == 1 else RuntimeError, match="the user's own"):
        trainer.fit(Learner(batches=5))


@pytest.mark.exhaustive(but=1)
@FORMS
def test_an_exception_ends_the_run_and_saves_under_way_are_finished(run_on, tmp_path, form):
    run_on(2, stop_with_a_save_under_way, folder=tmp_path / "c", form=form)
    assert names_in(tmp_path / "c") in (["step=1.ckpt", "step=2.ckpt"], ["step=1.ckpt"])
    for name in names_in(tmp_path / "c"):
        open_checkpoint(tmp_path / "c" / name).verify()


# ------------------------------------------------------------------------------------------------------------- loading


def run(folder: Path, form: str, ckpt_path: Any = None, module: Any = None, max_epochs: int = 1) -> Any:
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    torch.manual_seed(rank())  # every rank begins with its own values, which loading replaces
    module = Learner(batches=2) if module is None else module
    trainer = make_trainer(
        ZeroStrategy(3, checkpoint=form), callbacks=[saving], enable_checkpointing=True, max_epochs=max_epochs
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def spoil(path: Path) -> None:
    """Alter bytes throughout the checkpoint's largest file."""
    if rank() == 0:
        file = max(path.iterdir(), key=lambda each: each.stat().st_size) if path.is_dir() else path
        data = bytearray(file.read_bytes())
        data[len(data) // 2 - len(data) // 2 % 64 + 1] ^= 0xFF
        for position in range(0, len(data), 512):
            data[position] ^= 1
        file.write_bytes(data)
    dist.barrier()


def damaged(folder: Path, form: str) -> None:
    run(folder, form, max_epochs=3)
    spoil(folder / "last.ckpt")
    module = Learner(batches=2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(DamagedCheckpointError, match=r"last.ckpt"):
        run(folder, form, folder / "last.ckpt", module, max_epochs=4)
    same_tensors(module.state_dict(), before, bound=0)


@pytest.mark.exhaustive(but=1)
@FORMS
def test_a_damaged_checkpoint_is_refused_before_anything_is_changed(run_on, tmp_path, form):
    run_on(2, damaged, folder=tmp_path / "c", form=form)


def folder_of(path: Path, **files: str) -> None:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)


GARBAGE: dict[str, dict[str, Callable[[Path], Any]]] = {
    "full": {
        "a text": lambda path: path.write_text("epoch: 3\n"),
        "nothing": lambda path: path.touch(),
        "zeros": lambda path: path.write_bytes(bytes(5000)),
        "no pickle": lambda path: path.write_bytes(b"\x80\x02garbage"),
        "another archive": lambda path: zipfile.ZipFile(path, "w").close(),
        "no dictionary": lambda path: torch.save([1], path),
    },
    "sharded": {
        "a text in the place of a folder": lambda path: path.write_text("epoch: 3\n"),
        "an empty folder": lambda path: path.mkdir(),
        "a folder of something else": lambda path: folder_of(path, notes="x"),
        "a folder with a text for metadata": lambda path: folder_of(path, **{".metadata": "x"}),
        "a folder without metadata": lambda path: folder_of(path, **{"__0_0.distcp": "x"}),
    },
}


def garbage(folder: Path, form: str) -> None:
    last = folder / "last.ckpt"
    run(folder, form, max_epochs=2)
    for make in GARBAGE[form].values():
        if rank() == 0:
            shutil.rmtree(last) if last.is_dir() else last.unlink()
            make(last)
        dist.barrier()
        with pytest.raises((ValueError, FileNotFoundError), match="last.ckpt"):
            run(folder, form, last)


@pytest.mark.exhaustive(but=1)
@FORMS
def test_what_is_not_a_checkpoint_is_refused_by_name(run_on, tmp_path, form):
    run_on(2, garbage, folder=tmp_path / "c", form=form)


def unreadable_on_one_rank(folder: Path) -> None:
    run(folder, "sharded", max_epochs=2)
    if rank() == 1:

        def refused(path: Any, *_: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

        checkpoint_files.open_for_run, opening = refused, checkpoint_files.open_for_run
    for is_garbage in (False, True):
        if is_garbage and rank() == 0:
            shutil.rmtree(folder / "last.ckpt")
            (folder / "last.ckpt").write_text("epoch: 3")
        dist.barrier()
        with pytest.raises((OSError, ValueError), match="last.ckpt"):
            run(folder, "sharded", "last", max_epochs=3)
        dist.barrier()
    if rank() == 1:
        checkpoint_files.open_for_run = opening


def test_a_last_checkpoint_that_one_rank_cannot_read_is_an_error_on_every_rank(run_on, tmp_path):
    run_on(2, unreadable_on_one_rank, folder=tmp_path / "c")


def put_aside(folder: Path) -> None:
    run(folder, "sharded", max_epochs=2)
    if rank() == 0:
        for path in folder.glob("epoch=*"):
            shutil.rmtree(path)
        (folder / "last.ckpt").rename(folder / f"last.old-{new_label()}.ckpt")
    dist.barrier()
    assert run(folder, "sharded", "last", max_epochs=3).global_step == 6


def test_a_checkpoint_about_to_be_replaced_when_the_process_died_counts_as_the_last(run_on, tmp_path):
    run_on(2, put_aside, folder=tmp_path / "c")


class Wider(OddModel):
    def __init__(self) -> None:
        super().__init__()
        name, last = [(name, each) for name, each in self.named_modules() if isinstance(each, nn.Linear)][-1]
        parent = self.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], nn.Linear(last.in_features, last.out_features + 1))


class More(OddModel):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


def two_optimizers(module: nn.Module) -> Any:
    first, *others = module.parameters()
    return [torch.optim.Adam([first]), torch.optim.Adam(others)]


def two_groups(module: nn.Module) -> Any:
    first, *others = module.parameters()
    return torch.optim.Adam([{"params": [first]}, {"params": others, "lr": 0.1}])


def other_order(module: nn.Module) -> Any:
    return torch.optim.Adam(list(module.parameters())[::-1], lr=1e-2)


def of_another_model(folder: Path, form: str) -> None:
    run(folder, form)
    for make, error, what in (
        (partial(Learner, Wider), RuntimeError, "size mismatch for model"),
        (partial(Learner, More), RuntimeError, r"Missing key\(s\) in state_dict: \"model.more.weight\""),
    ):
        with pytest.raises(error, match=what):
            run(folder, form, folder / "last.ckpt", make(batches=2), max_epochs=2)

    for optimizer, what in (
        (two_optimizers, r"has the state of 1 optimizer\(s\), but configure_optimizers returns 2"),
        (two_groups, "loaded state dict has a different number of parameter groups"),
        (other_order, r"exp_avg of parameter number \d+ has the shape"),
    ):
        module = Learner(optimizer=optimizer, batches=2)
        module.automatic_optimization = optimizer is not two_optimizers
        with pytest.raises(ValueError, match=what):
            run(folder, form, folder / "last.ckpt", module, max_epochs=2)
        assert not any(optimizer.state for optimizer in module.trainer.optimizers)


@pytest.mark.exhaustive(but=1)
@FORMS
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(run_on, tmp_path, form):
    run_on(2, of_another_model, folder=tmp_path / "c", form=form)


# -------------------------------------------------------------------------------------------------- whole processes

SCRIPT = """
    import os, signal, sys
    import lightning_zero
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_zero.checkpoint.commit import Stream
    from tests.support.trainer import Learner
    import torch

    victim, folder, form = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    write, steps = Stream.write, 0

    class Killed(Learner):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 3 and self.global_rank == victim:
                # during the next save
                Stream.write = lambda stream, data: (write(stream, data), os.kill(os.getpid(), signal.SIGKILL))

    if __name__ == "__main__":
        torch.set_num_threads(1)
        trainer = Trainer(
            strategy=lightning_zero.ZeroStrategy(3, checkpoint=form, async_save=form == "sharded"), devices=2,
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)],
        )
        module = Killed(batches=12)  # six for each rank
        trainer.fit(module, ckpt_path="last")
        sys.stdout.write(f"TRAINED {trainer.global_rank} {trainer.global_step}\\n")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "victim"), exhaustive_but([("full", 0)], [("full", 0), ("sharded", 1)]))
def test_a_run_with_a_rank_killed_while_saving_ends_and_resumes_from_the_last_checkpoint(tmp_path, form, victim):
    """In processes launched by the Trainer; nothing hangs, and the next run finds an undamaged checkpoint."""
    script, folder = tmp_path / "script.py", tmp_path / "c"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}

    def start(victim: int) -> subprocess.CompletedProcess[str]:
        command = [warm_python(), script, str(victim), folder, form]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    killed = start(victim)
    assert killed.returncode != 0 and "TRAINED" not in killed.stdout, killed.stderr
    opened = open_checkpoint(folder / "last.ckpt")
    opened.verify()
    assert opened.checkpoint["global_step"] in (2, 3)
    done = start(-1)
    assert "TRAINED 0 6" in done.stdout and "TRAINED 1 6" in done.stdout, done.stderr
    assert not [name for name in names_in(folder) if name.startswith(".") or not name.endswith(".ckpt")]
    for name in names_in(folder):
        open_checkpoint(folder / name).verify()


ENDING = """
    import os, signal, sys, time
    import torch
    from lightning_zero.checkpoint import commit
    from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver

    write = commit.Stream.write

    def slowly(stream, data):
        time.sleep(0.01)
        return write(stream, data)

    def end(how, path):
        commit.Stream.write = slowly
        saver = Saver(in_background=True)
        saver.save(SaveJob(SaveMode.GATHERED, path, {"state_dict": {"a": torch.ones(9)}}))
        assert not os.path.exists(path)
        if how == "exit":
            sys.exit(3)
        if how == "exception":
            raise ValueError("the user's own")
        if how == "Ctrl-C":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    if __name__ == "__main__":
        for how, path in zip(sys.argv[1::2], sys.argv[2::2]):
            child = os.fork()
            if child == 0:
                end(how, path)
                break
            print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.exhaustive
def test_an_ending_process_finishes_its_background_save_or_reports_its_failure(tmp_path):
    """Without a Trainer, which would wait for the save: as at the end of a Fabric script."""
    (tmp_path / "script.py").write_text(textwrap.dedent(ENDING))
    (tmp_path / "file").write_text("a file")
    endings = ["end", "exit", "exception", "Ctrl-C"]
    arguments = [argument for how in endings for argument in (how, str(tmp_path / how / "last.ckpt"))]
    arguments += ["fails", str(tmp_path / "file" / "last.ckpt")]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [warm_python(), tmp_path / "script.py", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
    )
    ends = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert list(ends) == [*endings, "fails"], done.stderr
    assert (ends["end"], ends["exit"], ends["exception"]) == ("0", "3", "1") and ends["Ctrl-C"] != "0", ends
    for how in endings:
        assert names_in(tmp_path / how) == ["last.ckpt"], how
        open_checkpoint(tmp_path / how / "last.ckpt").verify()
    assert f"The checkpoint {tmp_path / 'file' / 'last.ckpt'} was not saved" in done.stderr
