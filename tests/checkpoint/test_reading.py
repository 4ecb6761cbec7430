"""Checkpoints of any origin are opened by name, only needed values are read, and errors say what is wrong."""

from __future__ import annotations

import datetime
import functools
import io
import itertools
import json
import os
import pickle
import threading
import traceback
import zipfile
from dataclasses import replace
from math import prod
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_zero import load_weights
from lightning_zero.checkpoint.checksums import BrokenArchiveError, DamagedCheckpointError, records_of, share_of
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.metadata import load_dcp_metadata
from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.restricted import load_torch
from lightning_zero.checkpoint.saving import Entry, content_of, write_folder
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.engine.tensor.wrapper import flat_range
from lightning_zero.io.labels import new_label
from tests.support import rank

TENSORS = {
    "a.matrix": torch.arange(60.0).view(5, 12),
    "a.cube": torch.arange(2 * 3 * 5, dtype=torch.bfloat16).view(2, 3, 5),
    "b.vector": torch.arange(17, dtype=torch.int64),
    "b.flags": torch.tensor([True, False, True]),
    "b.complex": torch.complex(torch.arange(6.0), torch.ones(6)).view(3, 2),
    "b.small": torch.arange(8).to(torch.uint16),  # a dtype that torch.save writes differently
    "b.scalar": torch.tensor(2.5),
    "b.empty": torch.empty(0, 4),
}
REST = {"epoch": 3, "loops": {"fit_loop": [1, {2: "two"}]}, "pytorch-lightning_version": "2.6.0"}


def in_parts(path, tree=None, rest=None, ranks=3):
    """Write a checkpoint as several ranks would, each its range of every tensor; the ranks are threads."""
    tree = {"state_dict": TENSORS} if tree is None else tree
    whole = content_of(tree, REST if rest is None else rest)
    label, told, barrier = new_label(), [None] * ranks, threading.Barrier(ranks)
    failed = []

    def work(number):
        def gather(value):
            told[number] = value
            barrier.wait()
            everyone = list(told)
            barrier.wait()
            return everyone

        try:
            entries = [part for entry in whole.entries if (part := cut(entry, number, ranks)) is not None]
            content = replace(whole, entries=entries)
            if number:
                content = replace(content, objects={}, rest=b"", paths={})
            written_by = {"stage": 3, "world_size": ranks}
            write_folder(content, Destination(str(path), label), written_by, Ranks(number, gather))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return str(path)


def cut(entry, number, ranks):
    numel = prod(entry.shape)
    if numel < ranks:
        return entry if number == 0 else None
    start, stop = number * numel // ranks, (number + 1) * numel // ranks
    values = entry.values.reshape(-1)[start:stop]
    return Entry(entry.names, entry.share, entry.dtype, values, start, stop)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return in_parts(tmp_path_factory.mktemp("ours") / "x.ckpt")


@pytest.fixture(scope="module")
def trained():
    """A model and its optimizer after a step, their tree for DCP, and parameter names in the optimizer's order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 0.5}])
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    names = ["1.weight", "1.bias", "0.weight", "0.bias"]
    saved = optimizer.state_dict()
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    by_name = {"state": {names[i]: state for i, state in saved["state"].items()}, "param_groups": groups}
    return model, optimizer, {"state_dict": model.state_dict(), "optimizer_0": by_name}, names


# -- contents ----------------------------------------------------------------------------------------------------------


def test_an_archive_of_one_tensor_is_read_as_saved():
    square = torch.arange(16.0).view(4, 4)
    part = torch.arange(32.0)[4:20].view(4, 4)
    for tensor in (square, square + 1, square.T, square, square.view(2, 8), square.view(torch.int32), part, part + 1):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        found = load_torch(bytearray(buffer.getvalue()))
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype and found.stride() == tensor.stride()
    with pytest.raises(BrokenArchiveError):
        records_of(io.BytesIO(buffer.getvalue()[:-1]))


def test_every_range_of_every_tensor_reads_as_saved(ours):
    opened = open_checkpoint(ours)
    assert (opened.form, opened.path) == ("sharded", ours)
    assert opened.written_by == {"stage": 3, "world_size": 3}
    assert {name.removeprefix("state_dict.") for name in opened.tensors} == set(TENSORS)
    for name, expected in TENSORS.items():
        found = opened.checkpoint["state_dict"][name]
        assert found is opened.tensors[f"state_dict.{name}"]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.clone(), expected), name
        if expected.dim():
            for start, stop in itertools.combinations_with_replacement(range(expected.numel() + 1), 2):
                part = found.shown(start, stop)
                assert torch.equal(part, expected.reshape(-1)[start:stop]), (name, start, stop)
    assert {key: opened.checkpoint[key] for key in REST} == REST
    opened.verify()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_dcp_itself_wrote_opens_with_its_optimizer_state(tmp_path, trained):
    model, optimizer, tree, names = trained
    dcp.save(tree, checkpoint_id=tmp_path / "dcp")
    bare = open_checkpoint(tmp_path / "dcp")
    torch.save(REST, tmp_path / "dcp" / "meta.pt")
    opened = open_checkpoint(tmp_path / "dcp")
    for each in (bare, opened):
        assert each.names_of_optimizers == [names] and each.written_by == {}
        (state,) = each.checkpoint["optimizer_states"]
        expected = optimizer.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        fresh = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fresh.load_state_dict(each.checkpoint["state_dict"])
        other = torch.optim.AdamW([{"params": fresh[1].parameters()}, {"params": fresh[0].parameters()}])
        other.load_state_dict(state)
        for one, two in ((model, fresh), (optimizer, other)):
            same_state(one.state_dict(), two.state_dict())
        each.verify()
    assert {key: opened.checkpoint[key] for key in REST} == REST
    # training continues as with ordinary tensors
    for one, two in ((model, optimizer), (fresh, other)):
        two.zero_grad()
        one(torch.ones(2, 5)).sum().backward()
        two.step()
    same_state(model.state_dict(), fresh.state_dict())


def same_state(one, two):
    if isinstance(one, dict):
        assert set(one) == set(two)
        for key in one:
            same_state(one[key], two[key])
    elif isinstance(one, list):
        for a, b in zip(one, two, strict=True):
            same_state(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_weights_are_found_where_other_programs_put_them(tmp_path, key):
    tree = TENSORS if key is None else {key: TENSORS}
    dcp.save(tree, checkpoint_id=tmp_path / "dcp")
    torch.save(tree, tmp_path / "file.pt")
    for path in (tmp_path / "dcp", tmp_path / "file.pt"):
        found = open_checkpoint(path).checkpoint["state_dict"]
        assert all(torch.equal(found[name].clone(), tensor) for name, tensor in TENSORS.items())


def save_cut_by_columns(path):
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(7 * 10 * 3.0).view(7, 10, 3)
    tree = {f"cut{d}": distribute_tensor(values, mesh, [Shard(d)]) for d in range(3)}
    dcp.save({"state_dict": tree}, checkpoint_id=path)
    if rank() == 0:
        found = open_checkpoint(path).checkpoint["state_dict"]
        for name, start, stop in itertools.product(found, range(0, 210, 11), range(0, 211, 7)):
            expected = values.view(-1)[start:stop] if start < stop else values.new_empty(0)
            assert torch.equal(found[name].shown(start, max(start, stop)), expected)


def test_tensors_sharded_along_any_dimension_are_read(run_on, tmp_path):
    run_on(2, save_cut_by_columns, path=str(tmp_path / "dcp"))


def test_tensors_saved_in_parts_return_to_their_places_in_lightnings_dictionary(tmp_path):
    handle = LazyTensor("x", (2, 3), torch.float32, lambda start, stop: torch.arange(6.0)[start:stop])
    rest = {"callbacks": {"EMA": {"weights": [None, {"w": handle}, 5], "decay": 0.9, 7: handle}}, "lightning_zero": {}}
    path = in_parts(tmp_path / "x", {"state_dict": TENSORS, "lightning_zero": {"masters": {"a": handle}}}, rest)
    found = open_checkpoint(path).checkpoint
    state = found["callbacks"]["EMA"]
    assert state["decay"] == 0.9 and state["weights"][0] is None and state["weights"][2] == 5
    for tensor in (state["weights"][1]["w"], state[7], found["lightning_zero"]["masters"]["a"]):
        assert torch.equal(tensor.clone(), torch.arange(6.0).view(2, 3))


def test_names_of_tied_parameters_share_a_piece(tmp_path):
    weight = torch.randn(4, 4)
    path = in_parts(tmp_path / "x", {"state_dict": {"embed": weight, "head": weight}}, {}, ranks=1)
    found = open_checkpoint(path).checkpoint["state_dict"]
    assert torch.equal(found["embed"].clone(), weight) and torch.equal(found["head"].clone(), weight)


# -- how much is read --------------------------------------------------------------------------------------------------


def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


def read_a_share(path, whole):
    before = resident()
    opened = open_checkpoint(path)
    tensor = opened.checkpoint["state_dict"]["large"]
    after_opening = resident()
    part = tensor.shown(0, tensor.numel() // 4)
    assert after_opening - before < whole / 16
    # the mapped piece and the copy of it
    assert resident() - before < whole * (1 / 4 + 1 / 4 + 1 / 8)
    assert float(part[-1]) == part.numel() - 1


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells what is resident")
def test_a_rank_that_reads_its_share_holds_no_more_in_memory(run_on, tmp_path):
    large = torch.arange(2.0**24).view(2**12, 2**12)
    path = in_parts(tmp_path / "x", {"state_dict": {"large": large}}, {}, ranks=4)
    run_on(1, read_a_share, path=path, whole=large.nbytes)


def test_only_the_pieces_that_a_range_needs_are_read(ours, copy_of):
    path = copy_of(ours)
    name = "a.matrix"
    damage(path, file_of(path, 2), find=TENSORS[name].view(-1)[40:].numpy().tobytes()[:16])
    opened = open_checkpoint(path)
    with pytest.raises(DamagedCheckpointError, match=r"a\.matrix at \(3, 4\) in __2_\d+\.distcp, bytes \d+ to \d+"):
        opened.verify()
    os.remove(f"{path}/{file_of(path, 2)}")
    matrix = opened.checkpoint["state_dict"][name]
    assert torch.equal(matrix.shown(0, 40), TENSORS[name].view(-1)[:40])
    with pytest.raises(FileNotFoundError):
        matrix.shown(39, 41)


def test_a_file_is_mapped_and_its_values_stay_in_it(tmp_path, trained):
    _, optimizer, tree, _ = trained
    ours = {"masters": {"w": torch.ones(3)}, "format": 1, "written_by": {"stage": 2}}
    whole = {**REST, "state_dict": tree["state_dict"], "optimizer_states": [optimizer.state_dict()]}
    torch.save({**whole, "lightning_zero": ours}, tmp_path / "x.ckpt")
    opened = open_checkpoint(tmp_path / "x.ckpt")
    assert opened.form == "full" and opened.written_by == {"stage": 2} and opened.names_of_optimizers is None
    same_state({key: opened.checkpoint[key] for key in whole}, whole)
    assert set(opened.tensors) >= {
        "state_dict.0.weight",
        "optimizer_states.0.state.3.exp_avg",
        "lightning_zero.masters.w",
    }
    assert not os.path.exists("/proc/self/maps") or "x.ckpt" in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="Linux tells how much memory there is")
def test_a_file_larger_than_memory_is_read_range_by_range(tmp_path):
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    numel = (sizes["MemTotal"] + sizes["SwapTotal"]) // 4 + 2**28
    with torch.serialization.skip_data(materialize_fake_tensors=True), torch._subclasses.FakeTensorMode():
        torch.save({"state_dict": {"huge": torch.empty(numel), "small": torch.empty(2, 3)}}, tmp_path / "x.ckpt")
    opened = open_checkpoint(tmp_path / "x.ckpt")
    huge = opened.checkpoint["state_dict"]["huge"]
    assert huge.numel() == numel
    assert torch.equal(flat_range(huge, numel - 3, numel), torch.zeros(3))
    os.remove(tmp_path / "x.ckpt")


def test_remote_checkpoints_are_read(ours, trained):
    memory = fsspec.filesystem("memory")
    memory.put(ours, "/remote/parts", recursive=True)
    whole = {**REST, "state_dict": TENSORS}
    with memory.open("/remote/x.ckpt", "wb") as file:
        torch.save(whole, file)
    for path in ("memory://remote/parts", "memory://remote/x.ckpt"):
        opened = open_checkpoint(path)
        for name, tensor in TENSORS.items():
            assert torch.equal(opened.tensors[f"state_dict.{name}"].clone(), tensor)
        opened.verify()
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: memory://remote/y.ckpt"):
        open_checkpoint("memory://remote/y.ckpt")


# -- damage and refusals -----------------------------------------------------------------------------------------------


@pytest.fixture
def copy_of(tmp_path):
    def copied(path):
        fs = fsspec.filesystem("file")
        target = tmp_path / "copy"
        fs.copy(str(path) + "/" if os.path.isdir(path) else str(path), str(target), recursive=os.path.isdir(path))
        return str(target)

    return copied


def damage(path, name, find=None, at=None):
    """Flip a bit of a file: where ``find`` first occurs, else at position ``at``, else in the middle."""
    file = os.path.join(path, name) if name else path
    with open(file, "rb") as stream:
        data = bytearray(stream.read())
    position = data.index(find) if find is not None else (len(data) // 2 if at is None else at)
    data[position] ^= 4
    with open(file, "wb") as stream:
        stream.write(data)


def truncate(path, name):
    os.truncate(os.path.join(path, name), os.path.getsize(os.path.join(path, name)) - 100)


def file_of(path, rank):
    """The name of the file that a rank has written."""
    (name,) = (name for name in os.listdir(path) if name.startswith(f"__{rank}_"))
    return name


WRONG = {
    "a flipped bit of the metadata": (lambda path: damage(path, ".metadata"), r"the checksum of \.metadata does not"),
    "a flipped bit of meta.pt": (lambda path: damage(path, "meta.pt"), r"the checksum of meta\.pt does not match"),
    "a flipped bit of the manifest": (
        lambda path: damage(path, "lightning_zero.json", at=1),
        r"lightning_zero\.json can",
    ),
    "no metadata": (lambda path: os.remove(f"{path}/.metadata"), r"\.metadata, .* is missing"),
    "no meta.pt": (lambda path: os.remove(f"{path}/meta.pt"), r"meta\.pt is missing"),
    "no manifest": (lambda path: os.remove(f"{path}/lightning_zero.json"), r"lightning_zero\.json is missing, "),
    "no data of a rank": (lambda path: os.remove(f"{path}/{file_of(path, 1)}"), r"__1_\d+\.distcp, .* is missing"),
    "truncated data": (
        lambda path: truncate(path, file_of(path, 1)),
        r"__1_\d+\.distcp is truncated: it has \d+ bytes",
    ),
    "an empty manifest": (lambda path: open(f"{path}/lightning_zero.json", "w").close(), r"zero\.json cannot"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_damage_is_found_on_opening(ours, copy_of, kind):
    path = copy_of(ours)
    change, words = WRONG[kind]
    change(path)
    with pytest.raises(DamagedCheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert path in str(caught.value)


def test_verify_names_all_damaged_pieces(ours, copy_of):
    path = copy_of(ours)
    damage(path, file_of(path, 1), find=TENSORS["a.matrix"].view(-1)[20:40].numpy().tobytes()[:16])
    damage(path, file_of(path, 2), find=TENSORS["b.vector"].view(-1)[11:].numpy().tobytes()[:16])
    opened = open_checkpoint(path)
    with pytest.raises(DamagedCheckpointError) as caught:
        opened.verify()
    assert f"a.matrix at (1, 8) in {file_of(path, 1)}" in str(caught.value)
    assert f"b.vector at (11,) in {file_of(path, 2)}" in str(caught.value)
    size = sum(os.path.getsize(f"{path}/{file_of(path, number)}") for number in range(3))
    assert 0.8 * size < opened.bytes_to_verify <= size  # all but the gaps between pieces
    found = [sum(extent.length for extent in share_of(opened._extents, number, 2)) for number in (0, 1)]
    assert sum(found) == opened.bytes_to_verify and max(found) < 0.7 * sum(found)  # two processes halve the work


@pytest.mark.parametrize("number", range(3))
def test_with_as_many_processes_as_writers_each_verifies_one_writers_pieces(ours, copy_of, number):
    path = copy_of(ours)
    damage(path, file_of(path, number), find=TENSORS["a.matrix"].view(-1)[20 * number :].numpy().tobytes()[:16])
    opened = open_checkpoint(path)
    for other in {0, 1, 2} - {number}:
        opened.verify(share=(other, 3))
    with pytest.raises(DamagedCheckpointError, match=rf"a\.matrix.* in __{number}_"):
        opened.verify(share=(number, 3))


def test_files_of_two_saves_are_not_taken_for_one_checkpoint(ours, copy_of, tmp_path):
    """Pieces have torch's own checksums, which do not identify the save."""
    other = in_parts(tmp_path / "other", {"state_dict": {**TENSORS, "a.matrix": -TENSORS["a.matrix"]}})
    path = copy_of(ours)
    os.remove(f"{path}/{file_of(path, 1)}")
    os.replace(f"{other}/{file_of(other, 1)}", f"{path}/{file_of(other, 1)}")
    with pytest.raises(DamagedCheckpointError, match=r"__1_\d+\.distcp, .* is missing"):
        open_checkpoint(path)
    path = in_parts(tmp_path / "third", rest={"epoch": 4})
    os.replace(f"{other}/meta.pt", f"{path}/meta.pt")
    with pytest.raises(DamagedCheckpointError, match=r"the checksum of meta\.pt does not match"):
        open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_another_program_wrote_from_ours_needs_no_manifest(ours, tmp_path):
    state = {"state_dict": {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}}
    dcp.load(state, checkpoint_id=ours)
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"))
    same_state(open_checkpoint(tmp_path / "dcp").checkpoint, {"state_dict": TENSORS})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damage_in_a_folder_of_another_program_is_found(tmp_path):
    path = str(tmp_path / "dcp")
    dcp.save({"state_dict": TENSORS}, checkpoint_id=path)
    damage(path, "__0_0.distcp", find=TENSORS["a.matrix"].numpy().tobytes()[:16])
    with pytest.raises(DamagedCheckpointError, match=r"state_dict\.a\.matrix in __0_0\.distcp"):
        open_checkpoint(path).verify()
    truncate(path, "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is truncated: it has \d+ bytes"):
        open_checkpoint(path)
    os.truncate(f"{path}/.metadata", 200)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata cannot be read"):
        open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_dcp_wrote_with_extensions_is_refused_but_not_called_damaged(tmp_path):
    dcp.save({"state_dict": TENSORS}, checkpoint_id=tmp_path / "dcp")
    with open(tmp_path / "dcp" / ".metadata", "rb+") as file:
        metadata = pickle.load(file)
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["zstd"]
        file.seek(0)
        pickle.dump(metadata, file)
    with pytest.raises(ValueError, match="was written by DCP with extensions") as caught:
        open_checkpoint(tmp_path / "dcp")
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_an_error_about_a_damaged_file_names_the_damaged_record(tmp_path):
    path = str(tmp_path / "x.ckpt")
    torch.save({**REST, "state_dict": TENSORS}, path)
    open_checkpoint(path).verify()
    damage(path, "", find=TENSORS["a.matrix"].numpy().tobytes()[:16])
    with pytest.raises(DamagedCheckpointError, match=r"x\.ckpt is damaged: x/data/\d+, bytes \d+ to \d+"):
        open_checkpoint(path).verify()
    damage(path, "", find=b"pytorch-lightning_version")
    with pytest.raises(DamagedCheckpointError, match=r"the checksum of record .*data\.pkl does not match"):
        open_checkpoint(path)
    for size in (os.path.getsize(path) - 1, 5000, 30):
        os.truncate(path, size)
        with pytest.raises(DamagedCheckpointError, match=rf"x\.ckpt \({size} bytes\) is damaged: it is truncated"):
            open_checkpoint(path)
    os.truncate(path, 0)
    with pytest.raises(DamagedCheckpointError, match=r"x\.ckpt \(0 bytes\) is damaged: it is empty"):
        open_checkpoint(path)


def make_text(path):
    path.write_text("epoch: 3\n")


def make_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")


def make_metadata(path):
    make_folder(path)
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))


def make_folder(path, *names):
    path.mkdir()
    for name in names:
        (path / name).write_text("x")


NO_CHECKPOINT = {
    "nothing": (lambda path: None, FileNotFoundError, "Checkpoint file not found: .*x"),
    "an empty folder": (make_folder, FileNotFoundError, "x is an empty folder"),
    "a folder of something else": (lambda p: make_folder(p, "a.ckpt", "b"), ValueError, r"contains a\.ckpt, b"),
    "a folder of DeepSpeed's": (lambda path: make_folder(path, "latest"), ValueError, "import deepspeed"),
    "other metadata": (make_metadata, ValueError, r"\.metadata: it is not metadata written by DCP's FileSystemWriter"),
    "a text": (make_text, ValueError, r"x \(9 bytes\) is not a checkpoint: it is neither a torch\.save file"),
    "another archive": (make_zip, ValueError, "it is a zip archive not written by torch.save"),
    "a list": (lambda path: torch.save([1], path), ValueError, "it contains a list instead of a dictionary"),
    "a number": (lambda path: path.write_bytes(pickle.dumps(7, 2)), ValueError, "cannot be read as a checkpoint"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINT)
def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path, kind):
    make, error, words = NO_CHECKPOINT[kind]
    make(tmp_path / "x")
    with pytest.raises(error, match=words) as caught:
        open_checkpoint(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_checkpoint_of_a_later_version_is_refused(ours, copy_of, tmp_path):
    torch.save({**REST, "lightning_zero": {"format": 7}}, tmp_path / "x.ckpt")
    path = copy_of(ours)
    with open(f"{path}/lightning_zero.json") as file:
        manifest = {**json.load(file), "format": 7}
    with open(f"{path}/lightning_zero.json", "w") as file:
        json.dump(manifest, file)
    for each in (path, tmp_path / "x.ckpt"):
        with pytest.raises(ValueError, match="has the format 7, but .* newer version .* pip install -U"):
            open_checkpoint(each)


# -- what would run code -----------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("it ran",)


class Own:
    """A project's own class."""

    def __init__(self):
        self.number = 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("where", [".metadata", "meta.pt", "an entry of DCP's", "file"])
def test_no_code_in_a_checkpoint_is_run(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    dcp.save({"state_dict": {"w": torch.ones(3), "x": Harmful() if "DCP" in where else 5}}, checkpoint_id="dcp")
    if where == ".metadata":
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    elif where == "meta.pt":
        torch.save({"callbacks": [Harmful()]}, "dcp/meta.pt")
    elif where == "file":
        torch.save({"state_dict": {}, "callbacks": [Harmful()]}, "file")
    with pytest.raises(ValueError, match=r"posix\.mkdir") as caught:
        open_checkpoint("file" if where == "file" else "dcp")
    assert not os.path.exists("it ran")
    assert_nothing_advised(caught)


def assert_nothing_advised(caught):
    """The message must not advise a way to load the file, in any part of the printed exception."""
    told = "".join(traceback.format_exception(caught.value))
    told = "\n".join(line for line in told.splitlines() if not line.startswith("  "))  # lines of the source
    assert "Do not load this file unless you trust its source" in told or "is not a pickle" in told
    for advice in ("safe_globals", "weights_only", "--trust", "allow"):
        assert advice not in told, told


def of_protocol_4(module, name):
    """A pickle of a function call, in a protocol that torch does not write."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, "it ran")]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


class Calls:
    """An object that is pickled as a function call."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


PICKLES = {
    "os.system": (lambda: Calls(os.system, "x"), r"it contains posix\.system, which is not data"),
    "eval": (lambda: Calls(eval, "x"), r"builtins\.eval"),
    "a function of torch's": (lambda: Calls(torch.hub.load, "x", "y"), r"torch\.hub\.load"),
    "one that is only named": (lambda: functools.partial(os.system, "x"), r"functools\.partial, posix\.system"),
    "a class of the project's": (lambda: Own(), r"tests\.checkpoint\.test_reading\.Own"),
    "a bound method": (lambda: nn.ReLU().forward, r"builtins\.getattr|torch\.nn"),
    "an array": (lambda: np.ones(2), r"numpy\._core\.multiarray\._reconstruct"),
    "a date": (lambda: datetime.datetime(2026, 1, 1), r"datetime\.datetime"),
}
ARCHIVES = {
    "by a newer form": (of_protocol_4("posix", "system"), r"posix\.system"),
    "through a module": (of_protocol_4("torch.serialization", "os.system"), r"torch\.serialization\.os\.system"),
    "by a name that is none": (of_protocol_4("mine", "Own\nb"), r"'mine\.Own\\nb'"),
    "behind what cannot be followed": (
        b"\x80\x02cmine\nOwn\n(S'a'\ntR(S'b'\ntRcposix\nsystem\n(S'it ran'\ntR.",
        r"mine\.Own",
    ),
}


@pytest.mark.parametrize("form", ["archive", "before torch 1.6", "pickle", "meta.pt"])
@pytest.mark.parametrize("what", PICKLES)
def test_an_error_about_a_file_with_more_than_data_names_it_and_advises_nothing(tmp_path, what, form):
    make, words = PICKLES[what]
    path = tmp_path / "x.ckpt"
    checkpoint = {"state_dict": {"w": torch.ones(1)}, "callbacks": {"x": make()}}
    if form == "pickle":
        path.write_bytes(pickle.dumps({"callbacks": {"x": make()}}, protocol=2))
    elif form == "meta.pt":
        in_parts(path, rest={**REST, "callbacks": {"x": make()}})
    else:
        torch.save(checkpoint, path, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(UnsafeFileError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert_nothing_advised(caught)
    if form != "meta.pt":
        with pytest.raises(ValueError, match=words) as caught:
            load_weights(nn.Linear(1, 1), path)
        assert_nothing_advised(caught)


@pytest.mark.parametrize("how", ARCHIVES)
def test_an_error_about_code_hidden_in_a_file_advises_nothing(tmp_path, how):
    data, words = ARCHIVES[how]
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(ValueError, match=words) as caught:
        open_checkpoint(tmp_path / "x.ckpt")
    assert_nothing_advised(caught)


@pytest.mark.parametrize("data", [b"\x80 is no pickle", b"\x80\x04neither", b"\x80"])
def test_an_error_about_a_file_that_does_not_unpickle_advises_nothing(tmp_path, data):
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as a checkpoint") as caught:
        open_checkpoint(tmp_path / "x.ckpt")
    assert_nothing_advised(caught)


def test_metadata_that_python_3_11_2_wrote_is_read(tmp_path, monkeypatch):
    path = in_parts(tmp_path / "x.ckpt")
    kind = TensorProperties().__getstate__()[3].__class__
    monkeypatch.setattr(kind, "__reduce_ex__", lambda member, _: (getattr, (kind, member.name)))
    with open(f"{path}/.metadata", "rb") as file:
        metadata = pickle.dumps(pickle.load(file))
    assert b"getattr" in metadata
    assert load_dcp_metadata(metadata).state_dict_metadata["state_dict.a.matrix"].properties.dtype is torch.float32


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_projects_own_classes_are_loaded_once_they_are_allowed(tmp_path, form):
    path = write(tmp_path, form, {"hyper_parameters": {"loss": [{"kind": Own()}]}})
    with pytest.raises(UnsafeFileError, match="contains tests.checkpoint.test_reading.Own, which is not data"):
        open_checkpoint(path)
    assert open_checkpoint(path, weights_only=False).checkpoint["hyper_parameters"]["loss"][0]["kind"].number == 5
    with torch.serialization.safe_globals([Own]):
        assert open_checkpoint(path).checkpoint["hyper_parameters"]["loss"][0]["kind"].number == 5


def write(folder, form, rest):
    path = str(folder / "x.ckpt")
    if form == "sharded":
        return in_parts(path, rest={**REST, **rest})
    torch.save({"state_dict": TENSORS, **REST, **rest}, path)
    return path


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_omegaconf_configurations_are_loaded_unchanged(tmp_path, form):
    config = OmegaConf.create(
        {"model": {"width": 8, "rates": [0.1, None], "name": "${..name}"}, "name": "gpt", "flag": True, "later": "???"}
    )
    config.raw, config.folder = b"1", tmp_path
    path = write(tmp_path, form, {"hyper_parameters": config, "betas": config.model.rates})
    with torch.serialization.safe_globals([type(config)]):  # a class that the project has allowed stays allowed
        before = set(torch.serialization.get_safe_globals())
        found = open_checkpoint(path).checkpoint
        assert set(torch.serialization.get_safe_globals()) == before
    assert found["hyper_parameters"] == config and type(found["hyper_parameters"]) is type(config)
    assert found["hyper_parameters"].model.name == "gpt"
    assert found["betas"] == [0.1, None] and type(found["betas"]) is type(config.model.rates)


# -- files without checksums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_checkpoint_without_checksums_is_not_reported_as_damaged(tmp_path, trained, form):
    *_, tree, _ = trained
    path = tmp_path / "x"
    torch.serialization.set_crc32_options(False)
    try:
        if form == "file":
            torch.save(tree, path)
        else:
            dcp.save(tree, checkpoint_id=str(path), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    opened = open_checkpoint(path)
    opened.verify()
    assert torch.equal(opened.checkpoint["state_dict"]["0.weight"] + 0, tree["state_dict"]["0.weight"])
