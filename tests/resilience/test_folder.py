"""The job's folder in memory: its name, folders that others have prepared, and what is removed."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

import pytest

from lightning_zero import ResilienceConfig, ZeroStrategy
from lightning_zero.callbacks.restarts import name_of_job, resilience_config
from tests.resilience.jobs import run
from tests.support.trainer import Learner, make_trainer

PRIVATE = Path(f"/dev/shm/lightning_zero-{os.geteuid()}")


@pytest.mark.parametrize("job", ["..", ".", "", "a/b", "a.b", "/etc", "a b", "\u00e9", "a\n", 5])
def test_a_jobs_name_cannot_lead_out_of_the_folder(job):
    with pytest.raises(ValueError, match=r"^resilience: job=.* must (be a string or None|consist of ASCII letters)"):
        ResilienceConfig(job=job)


@pytest.mark.parametrize("given", ["..", ".", "../../x", "a.b/\u00e9 c", "none"])
def test_a_jobs_name_from_the_launcher_is_a_name_of_one_folder(given, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", given)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert ResilienceConfig(job=name_of_job()).job


@pytest.mark.parametrize(
    ("field", "instead"), [("path", "in a container, --shm-size"), ("deaths_at_one_step", "torchrun --max-restarts")]
)
def test_a_field_of_earlier_versions_is_refused_with_what_to_write_instead(field, instead):
    for make in (lambda **given: ResilienceConfig(**given), lambda **given: resilience_config(given)):
        with pytest.raises(ValueError, match=f"the field '{field}' no longer exists, .*{instead}"):
            make(**{field: 3})


def another_users(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)


PREPARED = {
    "another user's": (another_users, "belongs to user 12345"),
    "open": (lambda path: (path.mkdir(), path.chmod(0o777)), "mode 0777 instead of 0700"),
    "a link": (lambda path: path.symlink_to(path.parents[-2] / "victim"), "the path is a link or a file"),
    "a file": (lambda path: path.touch(), "the path is a link or a file"),
}


@pytest.mark.parametrize("level", ["job", "fit"])
@pytest.mark.parametrize("prepared", PREPARED)
def test_a_folder_that_another_user_may_have_prepared_is_not_used(prepared, level, monkeypatch):
    monkeypatch.setattr("lightning_zero.callbacks.restarts._fits", iter([0]))
    job = PRIVATE / f"test-{uuid.uuid4().hex}"
    PRIVATE.mkdir(0o700, exist_ok=True)
    prepare, reason = PREPARED[prepared]
    try:
        if level == "fit":
            job.mkdir(0o700)
        prepare(job if level == "job" else job / "fit-0")
        trainer = make_trainer(ZeroStrategy(3, resilience=ResilienceConfig(job=job.name)), devices=1, max_steps=1)
        with pytest.raises(ValueError, match=f"resilience: .* cannot be used .*{reason}"):
            trainer.fit(Learner())
    finally:
        job.unlink() if job.is_symlink() or job.is_file() else shutil.rmtree(job)


@pytest.mark.exhaustive
def test_jobs_of_which_nothing_was_saved_for_a_day_are_removed(tmp_path):
    PRIVATE.mkdir(0o700, exist_ok=True)
    forgotten, recent = (PRIVATE / f"test-{uuid.uuid4().hex}" for _ in range(2))
    long_ago = time.time() - 25 * 3600
    try:
        for job in (forgotten, recent):
            job.mkdir(0o700)
            (job / "fit-0").mkdir(0o700)
            os.utime(job / "fit-0", (long_ago, long_ago))
        os.utime(forgotten, (long_ago, long_ago))
        assert run(tmp_path, {"epochs": 1}).code == 0
        assert recent.exists() and not forgotten.exists()
    finally:
        shutil.rmtree(recent)
