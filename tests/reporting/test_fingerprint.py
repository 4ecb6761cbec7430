"""A fingerprint changes with the data and with nothing else, and its work is bounded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_zero.io.plain import name_of
from lightning_zero.reporting import RunManifest, manifest
from lightning_zero.reporting.manifest import fingerprint_of_datasets, fingerprint_of_files


def numbers(count: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def of(*datasets: Any) -> str:
    return fingerprint_of_datasets(datasets)["fingerprint"]


def test_equal_data_has_the_same_fingerprint_and_a_changed_element_a_different_one():
    before = of(TensorDataset(numbers()))
    assert before == of(TensorDataset(numbers().clone()))
    changed = numbers()
    changed[49, 7] += 1e-6
    assert before != of(TensorDataset(changed))
    assert before != of(TensorDataset(numbers(count=49)))


@dataclass
class Sample:
    values: Any
    label: str


class Listed(Dataset[Any]):
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def test_samples_of_any_structure_differ_by_value_type_shape_and_position():
    samples = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        np.zeros((2, 3), dtype=np.float32),
        {"a": 1, "b": 2},
        {"a": 2, "b": 1},
        ["ab", "c"],
        ["a", "bc"],
        ("a", "bc"),
        [["a"], "bc"],
        "abc",
        b"abc",
        3,
        3.0,
        None,
        Sample(torch.zeros(2), "x"),
        Sample(torch.zeros(2), "y"),
    ]
    found = [of(Listed(sample)) for sample in samples]
    assert len(set(found)) == len(samples)
    assert found == [of(Listed(sample)) for sample in samples]
    assert of(Listed({"b": 2, "a": 1})) == of(Listed({"a": 1, "b": 2})), "the order of a dictionary's keys says nothing"


class Augmented(Listed):
    """Draws from each of the three generators, as random transforms do."""

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] + torch.rand(8) + np.random.rand() + random.random()


def test_random_transforms_change_neither_the_fingerprint_nor_the_generators():
    dataset = Augmented(*numbers())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first = of(dataset)
    assert (torch.rand(()), np.random.rand(), random.random()) == expected
    assert of(dataset) == first


class Counting(Dataset[Tensor]):
    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.zeros(self.nbytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("count", "nbytes", "most"), [(10**9, 100, 2_000), (10**6, 2**20, 2**26 // 2**20), (50, 10, 50)]
)
def test_evenly_spread_samples_of_a_large_dataset_are_read(count: int, nbytes: int, most: int):
    dataset = Counting(count, nbytes)
    found = fingerprint_of_datasets([dataset])
    assert found["samples"] == count and len(dataset.read) <= most
    assert len(dataset.read) >= 0.9 * most
    assert dataset.read[0] == 0 and max(dataset.read) >= 0.95 * count - 1


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


def test_data_without_samples_by_index_gets_advice_instead_of_a_fingerprint():
    found = fingerprint_of_datasets([Stream()])
    assert found["fingerprint"] is None
    assert found["method"] == "Stream cannot be indexed: pass its files as RunManifest(data=[...])"


def test_datasets_are_found_in_one_loader_in_several_loaders_and_without_a_loader():
    one, two = TensorDataset(numbers(4)), TensorDataset(numbers(5))
    own = Listed(1, 2)
    several = {"a": DataLoader(one), "b": [DataLoader(two)]}
    for loaders, datasets in ((DataLoader(one), [one]), (several, [one, two]), (own, [own])):
        found = RunManifest()._fingerprint(SimpleNamespace(train_dataloader=loaders))
        classes = ", ".join(name_of(type(dataset)) for dataset in datasets)
        assert found == {"class": classes, **fingerprint_of_datasets(datasets)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"a.txt": "first", "deep/b.txt": "second", "deep/c.bin": "x" * 5_000}.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(text)
    return tmp_path / "data"


def test_the_fingerprint_of_files_depends_on_name_and_content_not_on_time_or_folder(folder: Path, tmp_path: Path):
    before = fingerprint_of_files([folder])
    assert before["files"] == 3 and before["bytes"] == 5 + 6 + 5_000
    (folder / "a.txt").touch()
    folder.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert fingerprint_of_files([moved]) == before
    (moved / "a.txt").write_text("fjrst")
    changed = fingerprint_of_files([moved])
    assert changed["fingerprint"] != before["fingerprint"]
    (moved / "a.txt").write_text("first")
    (moved / "a.txt").rename(moved / "b.txt")
    assert fingerprint_of_files([moved])["fingerprint"] != before["fingerprint"]


def test_only_the_beginning_of_large_files_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "MOST_BYTES", 300)
    before = fingerprint_of_files([folder])
    assert before["bytes"] == 5_011
    (folder / "deep/c.bin").write_text("x" * 4_999 + "y")
    assert fingerprint_of_files([folder])["fingerprint"] == before["fingerprint"]
    (folder / "deep/c.bin").write_text("x" * 4_999)
    assert fingerprint_of_files([folder])["fingerprint"] != before["fingerprint"]


def test_a_path_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"^data=.*/nowhere is neither a file nor a folder$"):
        fingerprint_of_files([tmp_path / "nowhere"])
