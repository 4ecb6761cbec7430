"""A failure on one rank is reported, ends the others within seconds, and leaves processes able to train again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.engine import Engine
from lightning_zero.engine.comm import failures
from lightning_zero.engine.plan.mesh import ALL
from tests.support import rank
from tests.support.models import OddModel
from tests.support.trainer import Learner, make_trainer
from tests.support.training import same_tensors
from tests.support.transports import cross_memory
from tests.support.warm import warm_python

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class UserError(Exception):
    pass


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def user_error():
    raise UserError("in the user's code\nwith details")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


class FailsOnce(Learner):
    """One rank fails once, in one place; with `failing=None` all ranks do."""

    def __init__(self, fail, where="training_step", failing=1):
        super().__init__(batches=3)
        self.fail, self.where, self.failing = fail, where, failing

    def _maybe(self, where):
        if self.where == where and self.failing in (None, self.global_rank):
            self.where = None
            self.fail()

    def configure_optimizers(self):
        self._maybe("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self._maybe("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 1:
            self._maybe("on_before_optimizer_step")

    def on_train_end(self):
        self._maybe("on_train_end")


def fails(trainer, module, error, text):
    begin = time.monotonic()
    expected = (error, None) if rank() == module.failing else (RuntimeError, text)
    with pytest.raises(expected[0], match=expected[1]):
        trainer.fit(module)
    assert time.monotonic() - begin < 20
    return time.monotonic() - begin


def fail_and_fit_again(stage, fail, error, name, where="training_step", failing=1, precision="32-true"):
    handler = signal.default_int_handler  # also where the tests run in the background, where the signal is ignored
    signal.signal(signal.SIGINT, handler)
    torch.manual_seed(0)
    module = FailsOnce(fail, where, failing)
    text = rf"rank {failing} failed with {name}"
    options = {"precision": precision, "max_epochs": 1}
    fails(make_trainer(ZeroStrategy(stage=stage), **options), module, error, text)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on

    trainer = make_trainer(ZeroStrategy(stage=stage), **options)
    trainer.fit(module)
    assert trainer.global_step == 3
    assert all(type(p) is nn.Parameter for p in module.parameters())
    return {name: value.clone() for name, value in module.state_dict().items()}


def fail_on_all_ranks_and_then_on_one():
    for failing in (None, None, 1):
        module = FailsOnce(user_error, failing=failing)
        with pytest.raises(UserError if failing in (None, rank()) else RuntimeError, match="in the user's code"):
            make_trainer(ZeroStrategy(stage=2), max_epochs=1).fit(module)


def test_a_failure_on_one_rank_reaches_the_others_even_after_failures_on_all(run_on):
    run_on(2, fail_on_all_ranks_and_then_on_one, timeout=40)


ERRORS = pytest.mark.parametrize(
    ("fail", "error", "name"),
    [
        (user_error, UserError, "UserError: in the user's code$"),
        (out_of_memory, torch.OutOfMemoryError, "OutOfMemoryError: CUDA out of memory"),
        (interrupt, SystemExit, "KeyboardInterrupt"),
    ],
    ids=["exception", "out of memory", "Ctrl-C"],
)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The Trainer", "An exception, Ctrl-C or out of memory on one rank ends every rank in seconds; all can fit again"
)
@ERRORS
@STAGES
def test_a_failure_on_one_rank_ends_every_rank_and_all_can_fit_the_module_again(run_on, stage, fail, error, name):
    first, second = run_on(2, fail_and_fit_again, stage=stage, fail=fail, error=error, name=name)
    same_tensors(first, second, bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The Trainer", "An exception, Ctrl-C or out of memory on one rank ends every rank in seconds; all can fit again"
)
@pytest.mark.parametrize("where", ["configure_optimizers", "on_before_optimizer_step", "on_train_end"])
@STAGES
def test_a_failure_anywhere_in_fit_ends_every_rank_and_all_can_fit_again(run_on, stage, where):
    found = run_on(3, fail_and_fit_again, stage=stage, fail=user_error, error=UserError, name="UserError", where=where)
    same_tensors(found[0], found[2], bound=0)


@pytest.mark.exhaustive(but=1)
@STAGES
def test_after_a_failure_of_rank_0_in_low_precision_all_ranks_can_fit_again(run_on, stage):
    options = {"fail": user_error, "error": UserError, "name": "UserError", "failing": 0, "precision": "bf16-mixed"}
    first, second = run_on(2, fail_and_fit_again, stage=stage, **options)
    same_tensors(first, second, bound=0)


def fail_before_any_step(stage):
    """The module is assembled from the shards: the second run equals an undisturbed first run."""
    torch.manual_seed(0)
    module = FailsOnce(user_error, "on_train_batch_start")
    module.on_train_batch_start = lambda *_: module._maybe("on_train_batch_start")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fails(make_trainer(ZeroStrategy(stage=stage)), module, UserError, "rank 1 failed")
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"of 'model.embed.weight', but the run .* If the run failed"):
            module.model.embed.weight.norm()
    strategy = ZeroStrategy(stage=stage)

    class Compare(Callback):
        def setup(self, trainer, pl_module, stage):
            same_tensors(pl_module.state_dict(), before, bound=0)

    make_trainer(strategy, callbacks=[Compare()]).fit(module)
    torch.manual_seed(0)
    reference = Learner(batches=3)
    make_trainer(ZeroStrategy(stage=stage)).fit(reference)
    same_tensors(module.state_dict(), reference.state_dict(), bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "A fit after a failure starts from the weights of the failed fit")
@STAGES
def test_a_fit_after_a_failure_starts_from_the_weights_of_the_failed_fit(run_on, stage):
    run_on(2, fail_before_any_step, stage=stage)


def mixed():
    """Rank 1 still holds shards; rank 0 holds a full module."""
    torch.manual_seed(0)
    module = FailsOnce(user_error)
    fails(make_trainer("zero3"), module, UserError, "rank 1 failed")
    if rank() == 0:
        module.model = OddModel()
    expected = {name: value.clone() for name, value in module.state_dict().items()} if rank() == 0 else None

    class Keep(Callback):
        def setup(self, trainer, pl_module, stage):
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}

    keep = Keep()
    make_trainer("zero3", callbacks=[keep]).fit(module)
    if expected is not None:
        same_tensors(keep.state, expected, bound=0)
    return keep.state


def test_a_rank_that_holds_shards_takes_the_weights_of_one_with_a_full_module(run_on):
    first, second = run_on(2, mixed)
    same_tensors(second, first, bound=0)


def save_on_exception(folder, failing):
    """All ranks fail at the same line, or only rank 1 does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_AT_ONCE", 60.0 if failing is None else 0.5)  # also simultaneous on a slow machine
        return fail_and_save(folder, failing)


def fail_and_save(folder, failing):
    log = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("lightning_zero").addHandler(handler)
    module = FailsOnce(user_error, failing=failing)
    callbacks = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_on_exception=True)]
    with pytest.raises(UserError if failing in (None, rank()) else RuntimeError, match="in the user's code"):
        make_trainer("zero3", callbacks=callbacks, enable_checkpointing=True).fit(module)
    assert failing is None or any("was not written: after the exception" in line for line in log), log
    if failing is None:
        assert not log and all(type(p) is nn.Parameter for p in module.parameters()), log
        assert failures.failure() is None
    return {name: value.clone() for name, value in module.state_dict().items() if failing is None}


def test_a_checkpoint_on_exception_is_written_where_every_rank_fails_alike(run_on, tmp_path):
    first, second = run_on(2, save_on_exception, folder=str(tmp_path), failing=None)
    same_tensors(first, second, bound=0)
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    same_tensors(saved["state_dict"], first, bound=0)
    assert saved["global_step"] == 1 and saved["optimizer_states"][0]["state"][0]["step"] == 1


def test_a_checkpoint_on_exception_that_cannot_be_written_does_not_hide_the_exception(run_on, tmp_path):
    run_on(2, save_on_exception, folder=str(tmp_path), failing=1)
    assert not list(Path(tmp_path).glob("*.ckpt"))


class FailingSGD(torch.optim.SGD):
    """Fails at the end of its step, when this rank's parameters have been updated."""

    def step(self, closure=None):
        super().step(closure)
        user_error()


class FailsInTheOptimizer(FailsOnce):
    def configure_optimizers(self):
        return FailingSGD(self.parameters(), lr=0.1)


def fail_twice_and_save(folder):
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # as another test may have done
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_AT_ONCE", 60.0)  # on a slow machine, too, the ranks' failures are simultaneous
        # Once a process has made an SGD, torch wraps its step, and the wrapper would end the update before the error.
        if getattr(torch.optim.SGD.step, "hooked", False):
            patch.setattr(torch.optim.SGD, "step", torch.optim.SGD.step.__wrapped__)
        return fail_in_two_fits(folder)


def fail_in_two_fits(folder):
    modules = FailsInTheOptimizer(user_error, "nowhere"), FailsOnce(user_error, failing=None)
    for number, module in enumerate(modules):
        callback = OnExceptionCheckpoint(folder, f"{number}")
        begin = time.monotonic()
        strategy = ZeroStrategy(stage=3, whole_parameters=False)
        with pytest.raises(UserError):
            make_trainer(strategy, callbacks=[callback], enable_checkpointing=True).fit(module)
        assert time.monotonic() - begin < 20
    return {name: value.clone() for name, value in modules[1].state_dict().items()}


def test_a_checkpoint_on_exception_is_written_even_after_an_exception_that_allowed_none(run_on, tmp_path):
    """An exception amid an update leaves ranks in different states; the next one, on all ranks at once, does not."""
    first, second = run_on(2, fail_twice_and_save, folder=str(tmp_path), timeout=60)
    same_tensors(first, second, bound=0)
    assert [file.name for file in tmp_path.iterdir()] == ["1.ckpt"]
    same_tensors(torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"], first, bound=0)


def evaluate_failing(stage):
    module = FailsOnce(user_error)

    def step(batch, batch_idx):
        if batch_idx == 1 and rank() == 1 and module.where:
            module.where = None
            module.fail()
        module.model(*batch)

    module.validation_step = step
    with pytest.raises(UserError if rank() == 1 else RuntimeError):
        make_trainer(ZeroStrategy(stage=stage)).validate(module, module.train_dataloader(), verbose=False)
        make_trainer(ZeroStrategy(stage=stage)).validate(module, module.train_dataloader(), verbose=False)
    make_trainer(ZeroStrategy(stage=stage)).validate(module, module.train_dataloader(), verbose=False)
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_after_a_failure_in_evaluation_all_ranks_can_evaluate_again(run_on):
    run_on(2, evaluate_failing, stage=3)


# -------------------------------------------------------------------------------------------- whole processes

SCRIPT = """
    import os, signal, sys, time
    import lightning_zero
    from tests.strategy.test_failures import FailsOnce, user_error, interrupt, torch
    from lightning.pytorch import Trainer

    def trainer():
        return Trainer(
            strategy="{strategy}", devices=2, accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )

    if __name__ == "__main__":
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = FailsOnce({fail})
        try:
            trainer().fit(model)
        except BaseException as error:
            # in one piece: the ranks share the pipe
            sys.stdout.write(f"FAILED {{type(error).__name__}} {{error}}\\n")
            sys.stdout.flush()
        if {again}:
            second = trainer()
            second.fit(model)
            sys.stdout.write(f"TRAINED {{second.global_rank}} {{second.global_step}}\\n")
"""


def run_script(tmp_path, strategy, fail, again):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(strategy=strategy, fail=fail, again=again))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([warm_python(), script], capture_output=True, text=True, timeout=150, env=environment)


@pytest.mark.exhaustive
def test_processes_that_the_trainer_started_can_fit_again_after_a_failure(tmp_path):
    done = run_script(tmp_path, "zero3", "user_error", again=True)
    assert "FAILED UserError in the user's code" in done.stdout, done.stderr
    assert "rank 1 failed with UserError: in the user's code" in done.stdout
    assert "TRAINED 0 2" in done.stdout and "TRAINED 1 2" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_a_failure_in_a_spawned_process_reaches_the_user(tmp_path):
    done = run_script(tmp_path, "zero3_spawn", "user_error", again=False)
    assert "FAILED ProcessRaisedException" in done.stdout and "in the user's code" in done.stdout, done.stderr


def end_engines():
    for closed in (True, False):
        with cross_memory():
            engine = Engine(nn.Linear(2, 2), stage=3)
        transport = engine.communicator.along(ALL)._transport
        threads = transport._gathers._thread, transport._reductions._thread
        del transport
        assert all(thread.is_alive() for thread in threads)
        if closed:
            engine.close()
        else:
            del engine  # its module went with it
        assert not any(thread.is_alive() for thread in threads)


def test_no_thread_is_left_when_an_engine_has_ended(run_on):
    run_on(2, end_engines)
