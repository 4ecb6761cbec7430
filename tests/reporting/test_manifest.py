"""The manifest that the callback writes: for any strategy, without an effect on training."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from lightning_zero.io.plain import plain
from lightning_zero.reporting import RunManifest
from lightning_zero.reporting.manifest import commit_of
from tests.reporting.projects import Noisy, Project, loader


def fit(
    folder: Path,
    *,
    seed: int = 0,
    data: Any = None,
    manifest: RunManifest | None = None,
    kind: type[Project] = Project,
    **arguments: Any,
) -> Any:
    """Trains the project on one process, with a manifest."""
    seed_everything(seed, verbose=False)
    module = kind(**arguments)
    trainer = Trainer(
        strategy="zero2",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=CSVLogger(folder, name="logs", version=""),
        log_every_n_steps=1,
        callbacks=[manifest if manifest is not None else RunManifest(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data or loader())
    return module


def manifest_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def test_a_manifest_describes_the_run(tmp_path: Path) -> None:
    fit(tmp_path, seed=3, width=24, api_key="abc123")
    found = manifest_in(tmp_path)
    assert found["config"]["model"] == {"width": 24, "api_key": "***", "fails_at": None}
    assert "abc123" not in (tmp_path / "manifest.json").read_text()
    assert found["model"]["class"] == "tests.reporting.projects:Project"
    assert found["model"]["parameters"] == 16 * 24 + 24 + 24 * 16 + 16
    assert found["seeds"]["seed_everything"] == "3"
    assert (found["ranks"], found["precision"], found["strategy"]["stage"]) == (1, "32-true", 2)
    assert found["packages"]["torch"] == metadata.version("torch") and len(found["packages"]) > 20
    assert found["data"]["class"] == "tests.reporting.projects:Noisy" and found["data"]["samples"] == 32
    end = found["end"]
    assert (end["status"], end["steps"]) == ("completed", 8) and end["seconds"] > 0
    assert end["engine"]["numel"] == found["model"]["parameters"] and end["engine"]["steps"] == 8


class Low(Project):
    """Has a layer that computes in float8, and a frozen one with codes of 4 bits."""

    def __init__(self) -> None:
        super().__init__()
        config = Float8LinearConfig(emulate=True)
        self.low = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(16, 16)), config=config)
        self.codes = Linear4bit(64, 64).requires_grad_(False)


def test_a_manifest_counts_layers_in_low_precision(tmp_path: Path) -> None:
    fit(tmp_path, kind=Low)
    assert manifest_in(tmp_path)["model"]["low_precision_layers"] == {"Float8Linear": 1, "Linear4bit": 1}
    fit(tmp_path)
    assert manifest_in(tmp_path)["model"]["low_precision_layers"] == {}


def test_the_fingerprint_changes_with_the_data_and_not_with_the_seed(tmp_path: Path) -> None:
    fingerprints = []
    for seed, data_seed in ((0, 0), (1, 0), (0, 1)):
        fit(tmp_path, seed=seed, data=loader(data_seed))
        fingerprints.append(manifest_in(tmp_path)["data"]["fingerprint"])
    same, again, other = fingerprints
    assert same == again != other


def test_files_given_to_the_callback_are_fingerprinted(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("text")
    fit(tmp_path, manifest=RunManifest(tmp_path, data=[tmp_path / "data.txt"]))
    assert manifest_in(tmp_path)["data"]["files"] == 1
    with pytest.raises(FileNotFoundError, match=r"^data=.*none.txt is neither a file nor a folder$"):
        fit(tmp_path, manifest=RunManifest(tmp_path, data=[tmp_path / "none.txt"]))


def test_training_with_a_manifest_gives_the_same_numbers_as_without(tmp_path: Path) -> None:
    with_one = fit(tmp_path)
    seed_everything(0, verbose=False)
    without = Project()
    trainer = Trainer(
        strategy="zero2",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(without, loader())
    for ours, theirs in zip(with_one.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_manifest_of_a_failed_run_names_the_error(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        fit(tmp_path, fails_at=5)
    end = manifest_in(tmp_path)["end"]
    assert (end["status"], end["steps"]) == ("ended by ArithmeticError", 5)


def test_the_loggers_folder_is_the_default(tmp_path: Path) -> None:
    fit(tmp_path, manifest=RunManifest())
    assert sorted(path.name for path in (tmp_path / "logs").glob("m*")) == ["manifest.json", "metrics.csv"]


def test_a_manifest_can_be_written_to_a_folder_behind_a_url(tmp_path: Path) -> None:
    fit(tmp_path, manifest=RunManifest("memory://runs/first"))
    with fsspec.open("memory://runs/first/manifest.json") as file:
        assert json.load(file)["end"]["status"] == "completed"


def test_a_commit_is_dirty_when_a_tracked_file_has_changed(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None

    def git(*arguments: str) -> str:
        person = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = os.environ | person
        done = subprocess.run(
            ["git", *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "--quiet", "--message", "code")
    clean = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == clean
    (tmp_path / "notes.txt").write_text("not tracked")
    assert commit_of(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path) == f"{clean}-dirty"


def test_passwords_and_keys_are_not_written() -> None:
    given = {
        "logger": {"api_key": "abc", "tracking_uri": "http://me:abc@host/x"},
        "hf_token": "abc",
        "eos_token": "</s>",
        "password": 1234,
        "secret": None,
        "command": ["train", "logger.api_key=abc", "model.width=3"],
    }
    assert plain(given) == {
        "logger": {"api_key": "***", "tracking_uri": "http://***@host/x"},
        "hf_token": "***",
        "eos_token": "</s>",
        "password": "***",
        "secret": None,
        "command": ["train", "logger.api_key=***", "model.width=3"],
    }


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("--api-key=abc --width=3", "--api-key=*** --width=3"),
        ("--access-token=abc", "--access-token=***"),
        ("--wandb-api-key abc --width 3", "--wandb-api-key *** --width 3"),
        ("--hf_token abc", "--hf_token ***"),
        ("--aws-secret-access-key abc", "--aws-secret-access-key ***"),
        ("-password abc", "-password ***"),
        ("--no-secret --width 3", "--no-secret --width 3"),
        ("--eos-token </s>", "--eos-token </s>"),
        ("password abc", "password abc"),
    ],
)
def test_passwords_and_keys_in_words_of_a_command_are_not_written(words: str, written: str) -> None:
    assert plain(words.split()) == written.split()


@dataclass
class Login:
    user: str
    password: str


def test_passwords_in_dataclasses_are_not_written() -> None:
    assert plain({"logins": [Login("me", "abc")]}) == {"logins": [{"user": "me", "password": "***"}]}
    assert plain(Login) == "tests.reporting.test_manifest:Login"


class Unreadable(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            raise LookupError("sample 0 is broken")
        return super().__getitem__(index)


def test_a_dataset_that_cannot_be_read_does_not_end_the_training(tmp_path: Path) -> None:
    fit(tmp_path, data=DataLoader(Unreadable(), batch_size=4, sampler=range(1, 32)))
    found = manifest_in(tmp_path)
    assert found["data"]["fingerprint"] is None and found["data"]["method"] == "LookupError: sample 0 is broken"
    assert found["end"]["status"] == "completed"


def test_a_manifest_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "another file").write_text("not ours")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "another file")
    fit(tmp_path)
    assert (tmp_path / "another file").read_text() == "not ours"
    assert manifest_in(tmp_path)["end"]["status"] == "completed" and not (tmp_path / "manifest.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another file", "logs", "manifest.json"]
