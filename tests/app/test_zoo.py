"""The data and models that the command trains."""

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from lightning_zero.zoo.gpt import GPT
from lightning_zero.zoo.text import TextData, read_split, standard_library, text_files
from tests.app.commands import REPOSITORY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text(f"text {index};")
    return tmp_path


def test_each_file_of_a_folder_is_split_at_its_end(folder: Path) -> None:
    train, validation = read_split(folder, 10**9, percent=50)
    assert train.startswith(b"text") and b";" not in train and validation.count(b";") == 200


@pytest.mark.exhaustive
def test_split_is_the_same_in_another_process() -> None:
    program = (
        "import zlib; from lightning_zero.zoo.text import read_split;"
        "print([zlib.crc32(text) for text in read_split(None, 1_000_000, 10)])"
    )
    # a different seed for str hashes, and so a different order of sets, than in this process
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str([zlib.crc32(text) for text in read_split(None, 1_000_000, 10)])


def test_default_text_is_the_standard_library_without_its_tests() -> None:
    names = [file.relative_to(standard_library()).as_posix() for file in text_files(standard_library(), ".py")]
    assert {"argparse.py", "json/decoder.py"} <= set(names) and names == sorted(names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    assert read_split(file, 10**9, percent=10) == (bytes(range(90)), bytes(range(90, 100)))
    assert read_split(file, max_bytes=50, percent=10) == (bytes(range(45)), bytes(range(45, 50)))


def test_targets_are_the_next_bytes(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    data = TextData(str(file), context=8, batch_size=2, validation_percent=20)
    data.setup()
    assert len(data.train) == 9 and len(data.validation) == 2  # of 80 and 20 bytes; the last target needs one byte more
    tokens, targets = data.train[1]
    assert tokens.tolist() == list(range(8, 16)) and targets.tolist() == list(range(9, 17))


def test_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"too short")
    with pytest.raises(ValueError, match=r"has 9 bytes of text for training with .*; at least 65 are needed"):
        TextData(str(file), context=64).setup()


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_predicts_each_byte_from_earlier_bytes_only(tied: bool) -> None:
    torch.manual_seed(0)
    gpt = GPT(width=32, depth=2, heads=4, context=16, tied=tied)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    assert (gpt.head.weight is gpt.embedding.weight) == tied
    torch.testing.assert_close(gpt(tokens)[0, :10], gpt(changed)[0, :10])
    assert not torch.allclose(gpt(tokens)[0, 10], gpt(changed)[0, 10])


def test_the_same_seed_gives_the_same_text_of_the_requested_length() -> None:
    torch.manual_seed(0)
    gpt = GPT(width=32, depth=1, heads=4, context=16)
    text = gpt.generate(b"def ", length=30)
    assert text == gpt.generate(b"def ", length=30) != gpt.generate(b"def ", length=30, seed=1)
    assert text.startswith(b"def ") and len(text) == 34
