"""Crafted files change nothing, read nothing outside of their folder, and take little memory and time."""

from __future__ import annotations

import copy
import functools
import gzip
import http.server
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import threading
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata

from lightning_zero import fabric, load_weights
from lightning_zero.checkpoint.checksums import DamagedCheckpointError
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.metadata import load_dcp_metadata, wrong_pieces
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.commands.checkpoint import main
from lightning_zero.convert.deepspeed import open_deepspeed
from lightning_zero.io.labels import this_machine
from lightning_zero.io.untrusted import inside
from lightning_zero.reporting.records import OVERRIDES, overrides_of
from tests.support.trainer import Learner, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COMMANDS = (["inspect"], ["verify"], ["convert", "--to", "full"], ["convert", "--to", "sharded"], ["export"])
BEGIN, STOP = b"\x80\x02", b"."


def read_by_all_commands(path: Path) -> str:
    """Run each command, and return the error message of the first that fails."""
    said = ""
    for number, (command, *options) in enumerate(COMMANDS):
        out = [str(path.parent / f"out{number}" / "x.safetensors")] if command not in ("inspect", "verify") else []
        try:
            code = main([command, str(path), *out, *options])
        except BaseException as error:
            return f"{command} raised {error!r}"
        said = said or (f"{command} failed" if code else "")
    return said


# -- costs -------------------------------------------------------------------------------------------------------------


def measured(act: Callable[[], Any]) -> tuple[str, float, float]:
    """Call a function in a forked process; return its result or error, its additional MB of memory, and CPU seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(1)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            found = str(act())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        os.write(writer, pickle.dumps((found[:1000], mb, time.process_time() - began)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = file.read()
    assert os.waitpid(child, 0)[1] == 0, "it did not end within 60 s, or was killed"
    return pickle.loads(told)


def assert_refused_at_low_cost(act: Callable[[], Any], words: str = "unless you trust its source") -> None:
    found, mb, seconds = measured(act)
    assert words in found
    assert mb < 200 and seconds < 10, f"{mb:.0f} MB, {seconds:.1f} s"


def archive(path: Path, pickled: bytes, values: bytes = bytes(16)) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/version", "3\n")
        made.writestr("archive/data/0", values)
    return path


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def called(module: str, name: str, argument: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + argument + b"\x85R"


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little")


def doubled_tuples(levels: int = 64) -> bytes:
    """A tuple that contains one tuple twice, which contains another tuple twice, and so on."""
    return b")" + put(0) + b"".join(2 * get(level) + b"\x86" + put(level + 1) for level in range(levels))


def doubled_lists(levels: int = 64) -> bytes:
    return b"]" + put(0) + b"".join(b"](" + 2 * get(level) + b"e" + put(level + 1) for level in range(levels))


def filled_from_the_top(levels: int = 64) -> bytes:
    """Lists as in ``doubled_lists``; when a list is added to another, it is still empty."""
    made = b"".join(b"]" + put(level) for level in range(levels))
    return made + b"".join(get(n) + b"(" + 2 * get(n + 1) + b"e" for n in range(levels - 1)) + get(0)


def tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    class Reference:
        def __reduce__(self) -> Any:
            storage = ("storage", torch.FloatStorage, "0", "cpu", 4)
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value if isinstance(value, tuple) and value and value[0] == "storage" else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump({"state_dict": {"w": Reference()}})
    return stream.getvalue()


BOMBS: dict[str, bytes] = {
    "lists of lists": doubled_lists(),
    "tuples of tuples as a key": doubled_tuples() + b"}" + get(64) + b"Ns",
    "lists that are filled from the top": filled_from_the_top(),
    "a deep list": b"]" * 10**6 + b"a" * (10**6 - 1),
    "a million lists": b"]" * 10**6,
    "a million marks": b"(" * 10**6,
    "a million sets": b"\x8f" * 10**6,
    "doubled on the stack": b")" + b"2\x86" * 64 + b"}" + b"X\x01\x00\x00\x00a" + b"2s",
    "doubled as a key": b"})" + b"2\x86" * 64 + b"Ns",
    "a large memo": b"}" + put(2**31 - 1),
    "a call of a list": doubled_lists() + b")R",
    "an array of bytes": called("__builtin__", "bytearray", number(10**10)),
    "a call with a list": b"c__builtin__\nbytearray\n]" + number(10**10) + b"aR",
    "a codec": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x08\x00\x00\x00punycode\x86R",
    "a new tensor": called("torch", "Tensor", number(10**10)),
    "a new storage": called("torch.storage", "UntypedStorage", number(10**10)),
    "bytes": called("__builtin__", "bytes", number(10**10)),
}


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("form", ["archive", "before torch 1.6", "meta.pt", ".metadata"])
@pytest.mark.parametrize("what", BOMBS)
def test_a_small_pickle_takes_little_memory_and_time(tmp_path: Path, what: str, form: str) -> None:
    path, data = tmp_path / "x.ckpt", BEGIN + BOMBS[what] + STOP
    if form == "before torch 1.6":
        path.write_bytes(data)
    elif form == "archive":
        archive(path, data)
    else:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
        if form == "meta.pt":
            archive(path / "meta.pt", data)
        else:
            (path / ".metadata").write_bytes(data)
    words = ("unless you trust", "not a pickle", "is not metadata", "of a dictionary", "Invalid magic", "be read")
    words += ("OpenedCheckpoint",)  # what costs little need not be refused
    found, mb, seconds = measured(lambda: open_checkpoint(path))
    assert any(each in found for each in words), found
    assert mb < 200 and seconds < 10, f"{mb:.0f} MB, {seconds:.1f} s"


def test_a_small_storage_is_not_expanded(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.ckpt", tensor((10**5, 10**5), (0, 0)))
    assert_refused_at_low_cost(lambda: open_checkpoint(path), "its tensors would take 40 GB, but the file has only")
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(10**5, 10**5, device="meta"))
    assert_refused_at_low_cost(lambda: load_weights(model, path), "its tensors would take 40 GB")
    path = archive(tmp_path / "y.ckpt", tensor((100, 100), (0, 0)))  # as of a buffer that the module has expanded
    assert open_checkpoint(path).checkpoint["state_dict"]["w"].shape == (100, 100)


def test_a_tensor_that_is_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        open_checkpoint(archive(tmp_path / "x.ckpt", tensor((10**6,), (1,))))


def test_a_compressed_archive_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        with made.open("archive/data.pkl", "w") as file:
            file.write(BEGIN + b"X" + struct.pack("<I", 400 * 2**20))
            for _ in range(400):
                file.write(bytes(2**20))
            file.write(STOP)
        made.writestr("archive/version", "3\n")
    assert_refused_at_low_cost(lambda: open_checkpoint(path), "compressed")
    assert_refused_at_low_cost(lambda: load_weights(nn.Linear(1, 1), path), "its records overlap or are compressed")


def test_overlapping_records_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.ckpt", pickle.dumps({"state_dict": {}}, 2), bytes(5 * 10**5))
    with zipfile.ZipFile(path, "a") as made:
        (large,) = (info for info in made.infolist() if info.filename.endswith("data/0"))
        for number in range(4000):
            again = copy.copy(large)
            again.filename = again.orig_filename = f"archive/{number:06}"
            made.filelist.append(again)
        made._didModify = True  # type: ignore[attr-defined]
    assert_refused_at_low_cost(lambda: open_checkpoint(path), "is damaged: it is truncated or was altered")
    assert_refused_at_low_cost(lambda: load_weights(nn.Linear(1, 1), path), "cannot be read as weights")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_all_plain_values_that_torch_saves_are_loaded(tmp_path: Path) -> None:
    marked = torch.ones(2)
    marked.mine = 5  # type: ignore[attr-defined]
    shared = [1, 2]
    values = {
        "numbers": [1, 2**40, 2**70, -3, 0.5, complex(1, 2), True, None],
        "texts": ["", "a\u20ac", b"\x00\xff", bytearray(b"1"), bytearray()],
        "containers": [
            (),
            (1, (2, (3,))),
            {1, 2},
            Counter("aab"),
            OrderedDict(a=1),
            {(1, 2): 3},
        ],
        "torch": [torch.Size([2, 3]), torch.device("cpu"), torch.float16, torch.strided],
        "tensors": [torch.ones(2, 3).T, torch.tensor(3), torch.empty(0), nn.Parameter(torch.ones(1)), marked],
        "forms": [torch.eye(2).to_sparse(), torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)],
        "views": [torch.zeros(1).expand(1000), torch.ones(3).conj(), torch.ones(3, dtype=torch.cfloat).conj()],
        "shared": [shared, shared, {"again": shared}],
        "unsigned": torch.arange(3).to(torch.uint16),
        "module": nn.BatchNorm1d(2).state_dict(),
    }
    for number, options in enumerate([{}, {"_use_new_zipfile_serialization": False}]):
        if number:
            del values["unsigned"]  # torch cannot load this dtype from the older form
        torch.save(values, tmp_path / f"{number}.pt", **options)
        expected = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        found = open_checkpoint(tmp_path / f"{number}.pt").as_saved
        assert repr(found) == repr(expected) and found["tensors"][-1].mine == 5
        assert found["module"]._metadata == values["module"]._metadata  # type: ignore[attr-defined]


def written_by_dcp(path: Path, edit: Callable[[metadata.Metadata], Any]) -> Path:
    """A folder with the tensor ``w`` of shape (4, 6) and a list, after its metadata have been edited."""
    dcp.save({"state_dict": {"w": torch.arange(24.0).view(4, 6)}, "l": [torch.ones(1)]}, checkpoint_id=path)
    with open(path / ".metadata", "rb") as file:
        found = pickle.load(file)
    edit(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))
    return path


def place_in_a_list(found: metadata.Metadata) -> None:
    found.planner_data["l.0"] = ("l", 10**9)


def enlarge(found: metadata.Metadata) -> None:
    size = torch.Size([10**5, 10**6])
    chunks = [metadata.ChunkStorageMetadata(torch.Size([0, 0]), size)]
    found.state_dict_metadata["state_dict.w"] = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=torch.float32), size, chunks
    )


def add_dimensions(found: metadata.Metadata) -> None:
    """A tensor of many dimensions, with many pieces that take few bytes, since they share their shapes."""
    size = torch.Size(10**4 * [1])
    chunk = metadata.ChunkStorageMetadata(size, size)
    found.state_dict_metadata["state_dict.w"] = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=torch.float32), size, 10**4 * [chunk]
    )


def repeat_pieces(found: metadata.Metadata) -> None:
    """Many tensors with the same list of many pieces."""
    stored = found.state_dict_metadata["state_dict.w"]
    (chunk,) = stored.chunks  # type: ignore[union-attr]
    empty = metadata.ChunkStorageMetadata(chunk.offsets, torch.Size([0, 0]))
    stored.chunks = [chunk, *(10**4 * [empty])]  # type: ignore[union-attr]
    found.state_dict_metadata |= {f"state_dict.{number}": stored for number in range(10**4)}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (place_in_a_list, "its lists have many gaps"),
        (add_dimensions, "its values contain one another many times over"),
        (repeat_pieces, "its values contain one another many times over"),
        (enlarge, r"the piece of state_dict.w at (0, 0) has only"),
    ],
)
def test_small_metadata_of_many_or_large_values_takes_little_memory_and_time(tmp_path: Path, edit, words) -> None:
    path = written_by_dcp(tmp_path / "x", edit)
    assert_refused_at_low_cost(lambda: open_checkpoint(path), words)
    assert_refused_at_low_cost(lambda: read_by_all_commands(path), "inspect failed")


def pieces_in_common(found: metadata.Metadata) -> None:
    """Many tensors that consist of the same two pieces, each time in other places."""
    rows = [metadata.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 2**20])) for row in range(2)]
    (place,) = (place for index, place in found.storage_data.items() if index.fqn == "state_dict.w")
    for number in range(200):
        name = f"state_dict.{number}"
        found.state_dict_metadata[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.float32), torch.Size([2, 2**20]), rows
        )
        for row in rows:
            length = place.length - 64 * (number if row is rows[0] else 0)
            found.storage_data[metadata.MetadataIndex(name, row.offsets)] = filesystem._StorageInfo(
                place.relative_path, place.offset + 64 * (number if row is rows[0] else 0), length
            )


def test_tensors_that_share_bytes_are_not_larger_than_their_files_justify(tmp_path: Path) -> None:
    dcp.save({"state_dict": {"w": torch.zeros(2**21)}}, checkpoint_id=tmp_path / "x")
    with open(tmp_path / "x" / ".metadata", "rb") as file:
        found = pickle.load(file)
    pieces_in_common(found)
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(found))
    assert_refused_at_low_cost(lambda: open_checkpoint(tmp_path / "x"), "its tensors would take")


STATES = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def deepspeeds(folder: Path, **state: Any) -> Path:
    """A checkpoint as DeepSpeed's stage 2 writes it, of one rank and one parameter of 6 elements."""
    tag = folder / "step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step1")
    shapes = [OrderedDict(w=torch.Size([2, 3]))]
    model = {"module": OrderedDict(w=torch.zeros(2, 3)), "param_shapes": shapes, "global_steps": 1}
    saved = {"zero_stage": 2, "partition_count": 1, "single_partition_of_fp32_groups": [torch.ones(6)], **state}
    torch.save({**model, **state.pop("model", {})}, tag / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": saved}, tag / STATES)
    return folder


@pytest.mark.filterwarnings("ignore:.*has no optimizer param groups")
def test_numbers_in_a_deepspeed_checkpoint_do_not_decide_what_it_costs(tmp_path: Path) -> None:
    assert torch.equal(open_deepspeed(deepspeeds(tmp_path / "x")).checkpoint["state_dict"]["w"] + 0, torch.ones(2, 3))
    path = deepspeeds(tmp_path / "y", partition_count=10**9)
    assert_refused_at_low_cost(lambda: open_deepspeed(path), "its partition_count is not a number of ranks")
    path = deepspeeds(tmp_path / "z", single_partition_of_fp32_groups=[torch.ones(1).expand(10**11)])
    assert_refused_at_low_cost(lambda: open_deepspeed(path), "its tensors would take 400 GB")
    frozen = {"frozen_param_shapes": {"w": torch.Size([50])}, "frozen_param_fragments": {"w": torch.ones(2)}}
    path = deepspeeds(tmp_path / "f", model=frozen)
    with pytest.raises(DamagedCheckpointError, match="lack some of its 50 elements"):
        open_deepspeed(path)
    for number, wrong in enumerate([{"partition_count": "1"}, {"zero_stage": []}, {"model": {"param_shapes": 5}}]):
        with pytest.raises(ValueError, match="damaged|are supported"):
            open_deepspeed(deepspeeds(tmp_path / str(number), **wrong))


@pytest.mark.parametrize(
    "name", ["x.ckpt", "dcp/meta.pt", "dcp/.metadata", "deepspeed/latest", f"deepspeed/step1/{STATES}"]
)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.startswith("dcp"):
        written_by_dcp(tmp_path / "dcp", lambda _: None)
    elif name.startswith("deepspeed"):
        deepspeeds(tmp_path / "deepspeed")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    top = tmp_path / Path(name).parts[0]
    load = functools.partial(load_weights, nn.ReLU())
    for read in (open_deepspeed,) if "deepspeed" in name else (open_checkpoint, load):
        found, *_ = measured(lambda read=read: read(top))
        assert "is not a regular file" in found or "FileNotFoundError" in found


# -- pieces ------------------------------------------------------------------------------------------------------------


def pieces(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[metadata.ChunkStorageMetadata]:
    return [metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def test_pieces_are_accepted_exactly_if_each_element_is_in_one_of_them() -> None:
    draw = random.Random(0)
    verdicts = set()
    for _ in range(3000):
        shape = tuple(draw.randint(0, 3) for _ in range(draw.randint(0, 3)))
        count = np.zeros(shape, dtype=int)
        boxes, fits = [], True
        for _ in range(draw.randint(0, 4)):
            offsets = tuple(draw.randint(0, size) for size in shape)
            sizes = tuple(
                draw.randint(0, size - first + draw.choice((0, 0, 0, 1))) for first, size in zip(offsets, shape)
            )
            fits &= all(first + size <= whole for first, size, whole in zip(offsets, sizes, shape))
            count[tuple(slice(first, first + size) for first, size in zip(offsets, sizes))] += 1
            boxes.append((offsets, sizes))
        is_right = fits and bool((count == 1).all())
        verdicts.add(is_right)
        assert (wrong_pieces(shape, pieces(*boxes)) is None) is is_right, (shape, boxes)
    assert verdicts == {True, False}


def test_a_grid_of_pieces_is_checked_quickly() -> None:
    grid = [((64 * i, 8 * j), (64, 8)) for i in range(128) for j in range(64)]
    began = time.process_time()
    assert wrong_pieces((8192, 512), pieces(*grid)) is None
    grid[5] = grid[6]
    assert wrong_pieces((8192, 512), pieces(*grid)) == "has pieces that overlap"
    assert time.process_time() - began < 2


HALVES = pieces(((0, 0), (2, 6)), ((2, 0), (2, 6)))
MISPLACED = {
    "overlapping": pieces(((0, 0), (2, 6)), ((1, 0), (2, 6))),
    "outside": pieces(((0, 0), (2, 6)), ((3, 0), (2, 6))),
    "twice": pieces(((0, 0), (2, 6)), ((0, 0), (2, 6))),
    "lacking": pieces(((0, 0), (2, 6))),
    "of too few dimensions": pieces(((0,), (24,))),
    "negative": pieces(((0, 0), (2, 6)), ((2, -1), (2, 6))),
}


@pytest.mark.parametrize("how", MISPLACED)
def test_misplaced_pieces_are_damage_to_every_reader(tmp_path: Path, how: str, capsys) -> None:
    dcp.save({"state_dict": {"w": torch.zeros(4, 6), "v": torch.ones(2, 6)}}, checkpoint_id=tmp_path / "x")
    with open(tmp_path / "x" / ".metadata", "rb") as file:
        found = pickle.load(file)
    place = next(place for index, place in found.storage_data.items() if index.fqn == "state_dict.v")
    for variant, chunks in (("whole", HALVES), ("wrong", MISPLACED[how])):
        found.state_dict_metadata["state_dict.w"].chunks = chunks
        found.storage_data |= {metadata.MetadataIndex("state_dict.w", chunk.offsets): place for chunk in chunks}
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(found))
        if variant == "whole":
            assert (open_checkpoint(tmp_path / "x").checkpoint["state_dict"]["w"] + 0 == 1).all()
    with pytest.raises(DamagedCheckpointError, match=r"state_dict\.w has|state_dict\.w lacks|is a size|-1"):
        open_checkpoint(tmp_path / "x")
    for number, (command, *options) in enumerate(COMMANDS):
        out = [str(tmp_path / f"{number}.safetensors")] if command not in ("inspect", "verify") else []
        assert main([command, str(tmp_path / "x"), *out, *options]) == 1
        assert "is damaged" in capsys.readouterr().err
    with pytest.raises(DamagedCheckpointError):
        load_weights(nn.Module(), tmp_path / "x")


# -- classes -----------------------------------------------------------------------------------------------------------


CHANGES = [b"N}X\x01\x00\x00\x00aK\x01s\x86b", b"}X\x01\x00\x00\x00aK\x01sb", b"(K\x01K\x02u", b"K\x01a", b"(K\x01e"]


@pytest.mark.parametrize("opcode", CHANGES)
@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.checkpoint.metadata TensorProperties",
        "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
        "torch.serialization _get_layout",
        "torch float32",
        "torch Size",
        "collections OrderedDict",
    ],
)
def test_a_file_cannot_change_a_class_or_function(tmp_path: Path, name: str, opcode: bytes) -> None:
    module, _, attribute = name.partition(" ")
    target = getattr(__import__(module, fromlist=[attribute]), attribute)
    before = dict(vars(target)) if hasattr(target, "__dict__") else None
    data = BEGIN + f"c{module}\n{attribute}\n".encode() + opcode + STOP
    with pytest.raises(UnsafeFileError, match="it changes an object that it has not made"):
        load_dcp_metadata(data)
    for path in (archive(tmp_path / "x.ckpt", data), tmp_path / "y.ckpt"):
        path.write_bytes(data) if not path.exists() else None
        with pytest.raises(UnsafeFileError, match="changes an object|is not data"):
            open_checkpoint(path)
    assert before is None or dict(vars(target)) == before


# -- paths -------------------------------------------------------------------------------------------------------------

OUTSIDE = ["../other", "/etc", "link", "a/../../other", "", ".", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_does_not_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    for folder in ("x/inner", "other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "x" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "way").symlink_to(tmp_path / "x")
    for folder in (tmp_path / "x", tmp_path / "way"):
        with pytest.raises(ValueError, match="leads out of this folder"):
            inside(folder, name)
        assert os.path.samefile(inside(folder, "inner"), tmp_path / "x" / "inner")


def test_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    torch.save(nn.Linear(2, 2).state_dict(), blobs / "4567")
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/4567")
    load_weights(nn.Linear(2, 2), snapshot)


def test_an_index_of_weights_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "secret.bin")
    index = tmp_path / "x" / "pytorch_model.bin.index.json"
    (tmp_path / "x" / "link.bin").symlink_to("../secret.bin")
    for name in ("../secret.bin", str(tmp_path / "secret.bin"), "link.bin"):
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(ValueError, match="leads out of this folder"):
            load_weights(nn.Linear(2, 2), tmp_path / "x")
    index.write_text(json.dumps({"weight_map": {"weight": index.name}}))
    with pytest.raises(ValueError, match='Missing key.*"weight"'):
        load_weights(nn.Linear(2, 2), tmp_path / "x")


def test_a_deepspeed_checkpoint_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    path = deepspeeds(tmp_path / "x")
    other = deepspeeds(tmp_path / "other")
    for tag in ("../other/step1", str(other / "step1"), "link"):
        (path / "latest").write_text(tag)
        (path / "link").exists() or (path / "link").symlink_to(other / "step1")
        with pytest.raises(ValueError, match="leads out of this folder"):
            open_deepspeed(path)
    (path / "latest").write_text("step1")
    file = path / "step1" / "mp_rank_00_model_states.pt"
    file.unlink()
    file.symlink_to(other / "step1" / file.name)
    with pytest.raises(ValueError, match="leads out of this folder"):
        open_deepspeed(path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt"])
def test_the_files_of_a_sharded_checkpoint_are_not_links_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    path = written_by_dcp(tmp_path / "x", lambda _: None)
    torch.save({"epoch": 3}, path / "meta.pt")
    os.rename(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to("../elsewhere")
    with pytest.raises(ValueError, match="leads out of this folder"):
        open_checkpoint(path).checkpoint["state_dict"]["w"] + 0

    def elsewhere(found: metadata.Metadata) -> None:
        for place in found.storage_data.values():
            place.relative_path = "../x/__0_0.distcp"

    with pytest.raises(DamagedCheckpointError, match=r"\.\./x/__0_0\.distcp, which contains .*, is missing"):
        open_checkpoint(written_by_dcp(tmp_path / "y", elsewhere))


# -- names and configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", ["9" * 10, "9" * 30, "0", "-1"])
def test_a_partial_files_name_with_an_impossible_number_stops_no_save(tmp_path: Path, process: str) -> None:
    label = f"{this_machine()}-{process}-18a0123456789abc"
    names = [f".last.ckpt.partial-{label}", f"last.old-{label}.ckpt"]
    for name in names:
        (tmp_path / name).write_text("planted")
    for _ in range(2):
        destination = Destination(tmp_path / "last.ckpt")
        destination.clear_leftovers()
        with destination.writing() as file:
            file.write(b"whole")
        destination.put_in_place()
    assert (tmp_path / "last.ckpt").read_bytes() == b"whole"
    assert all((tmp_path / name).exists() for name in names)


def test_overrides_are_read_as_a_list_of_strings_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / OVERRIDES
    path.parent.mkdir()
    path.write_text("- lr=${x}\n- seed=1\n- &a stage=3\n- *a\n")
    assert overrides_of(tmp_path) == ["lr=${x}", "seed=1", "stage=3", "stage=3"]
    laughs = "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 20))
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join(9 * [f'*a{n - 1}'])}]}}\n" for n in range(1, 20)
    )
    for text in (laughs, merges, "a: &a [*a]", "[" * 10**4, "- !!python/object:os.system [x]", "[]," * 10**6):
        path.write_text(text)
        assert_refused_at_low_cost(lambda: overrides_of(tmp_path), "overrides.yaml cannot be read")


# -- addresses ---------------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("it ran",)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the folder ``served``; like many, it cannot send parts of a file."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    handler.func.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


class WritesElsewhere(TorchCheckpointIO):
    """A project's plugin that reads as Lightning's does."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass


def read_by_trainer(path: str, **options: Any) -> Any:
    module = Learner(batches=1)
    make_trainer("zero1", max_steps=2, **options).fit(module, ckpt_path=path)
    return module


def read_with_plugins(path: str) -> Any:
    read_by_trainer(path, plugins=[AsyncCheckpointIO(WritesElsewhere())])


def read_by_fabric(path: str, **options: Any) -> Any:
    running = Fabric(accelerator="cpu", devices=1, strategy=fabric.ZeroStrategy(stage=1), **options)
    running.launch()
    return running.load(path)


def read_by_fabric_with_plugin(path: str) -> Any:
    read_by_fabric(path, plugins=[WritesElsewhere()])


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    "read", [read_by_trainer, read_with_plugins, read_by_fabric, read_by_fabric_with_plugin, open_checkpoint]
)
@pytest.mark.parametrize("where", ["http", "memory", "http_models", "http:x.ckpt"])
def test_what_an_address_offers_is_read_as_data(tmp_path: Path, monkeypatch, server: str, where: str, read) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "http_models").mkdir()
    trainer = make_trainer("zero1", max_steps=1)
    trainer.fit(Learner(batches=1))
    trainer.save_checkpoint(tmp_path / "good")
    good = torch.load(tmp_path / "good", weights_only=True)
    paths = {"http": f"{server}/x.ckpt", "memory": f"memory://{tmp_path}/x.ckpt", "http_models": "http_models/x.ckpt"}
    path = paths.get(where, where)
    for checkpoint in (good, {**good, "harmful": Harmful()}):
        torch.save(checkpoint, tmp_path / "x")
        if where == "http":
            os.replace(tmp_path / "x", tmp_path / "served" / "x.ckpt")
        else:
            with fsspec.open(path, "wb") as file:
                file.write((tmp_path / "x").read_bytes())
        if checkpoint is good:
            read(path)
            continue
        with pytest.raises(UnsafeFileError, match=r"posix\.mkdir, which is not data\. Do not load this file") as caught:
            read(path)
        assert path in str(caught.value)
        assert ("weights_only=False" in str(caught.value)) is (read is not open_checkpoint)
    assert not (tmp_path / "it ran").exists()
    if where == "http":
        with pytest.raises(FileNotFoundError, match="Checkpoint file not found: http"):
            read(f"{server}/y.ckpt")


class Compressing(http.server.SimpleHTTPRequestHandler):
    """Says that each file is compressed."""

    def end_headers(self) -> None:
        self.send_header("Content-Encoding", "gzip")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_what_a_server_compresses_is_not_expanded(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(gzip.compress(bytes(2**28)))
    handler = functools.partial(Compressing, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{running.server_port}/x.ckpt"
        assert_refused_at_low_cost(lambda: open_checkpoint(address), "is compressed by its server")
        running.shutdown()
