"""`lightning-zero checkpoint`: what each command writes and prints, for full and sharded checkpoints."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from safetensors.torch import load, load_file, load_model, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import lightning_zero
from benchmarks.common import RETURN_MEMORY_AT_ONCE
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saving import by_name
from lightning_zero.commands.checkpoint import main
from tests.checkpoint.test_matrix import SaveAtTheEnd, learner
from tests.checkpoint.test_saving import save as save_on_ranks
from tests.examples.running import REPOSITORY
from tests.numbers.test_host_memory import anonymous
from tests.support import rank
from tests.support.allowed import nested_allowed
from tests.support.trainer import fit, make_trainer
from tests.support.training import same_tensors

FORMS = ("full", "sharded")


class Network(nn.Module):
    """Two layers of which one shares its weight with an embedding, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight


def checkpoint_of(module: nn.Module, *, masters: bool = False, **ours: Any) -> dict[str, Any]:
    """A Lightning checkpoint after two steps of Adam with two param groups and random gradients."""
    parameters = dict(module.named_parameters())
    bias = [p for name, p in parameters.items() if name.endswith("bias")]
    others = [p for name, p in parameters.items() if not name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": bias, "weight_decay": 0.0}], lr=1e-2)
    for _ in range(2):
        for p in parameters.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
    kept = {name: p.detach().float() for name, p in parameters.items()}
    if masters:
        kept = {name: p + torch.rand_like(p) * p.abs() * 2**-10 for name, p in kept.items()}
        for name, p in parameters.items():
            p.data = kept[name].to(p.dtype)
        ours["masters"] = kept
    names = {"optimizer_0": [name for p in (*others, *bias) for name, q in parameters.items() if p is q]}
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 2, "_last_lr": [1e-2]}],
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"Average{'decay': 0.9}": {"weights": {"w": torch.arange(3.0)}}},
        "hyper_parameters": {"width": 6, "rates": [1, 2.5]},
        "lightning_zero": {"format": 1, "written_by": {"lightning_zero": "0.1.0"}, "optimizer_names": names, **ours},
    }


def save(checkpoint: dict[str, Any], path: Path, form: str = "full") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, path if form == "full" else f"{path}.full")
    if form == "sharded":
        assert main(["convert", f"{path}.full", str(path), "--to", "sharded"]) == 0
        os.remove(f"{path}.full")
    return path


def assert_equal(found: Any, expected: Any) -> None:
    """Structure, types and values are equal, and tensors in dtype and bits; the order of dictionaries may differ."""
    leaves, expected_leaves = (dict(tree_flatten_with_path(tree)[0]) for tree in (found, expected))
    assert leaves.keys() == expected_leaves.keys()
    for path, other in expected_leaves.items():
        leaf = leaves[path]
        if isinstance(other, Tensor):
            assert leaf.dtype == other.dtype and leaf.shape == other.shape, path
            assert torch.equal(leaf.clone(), other), path
        else:
            assert leaf == other and type(leaf) is type(other), path


def names_in(folder: Path) -> set[str]:
    """Names of a folder's entries, as DCP itself reads them."""
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_exported_weights_are_those_of_the_checkpoint(tmp_path, form):
    module = Network()
    path = save(checkpoint_of(module), tmp_path / "last.ckpt", form)
    assert run("export", path, tmp_path / "new" / "model.safetensors") == 0
    found = load_file(tmp_path / "new" / "model.safetensors")
    expected = module.state_dict()
    tied = expected.pop("head.weight")
    assert_equal(found, dict(expected))

    # The tied weight has the name that safetensors' own save_model uses, and is restored by its load_model.
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    other = Network()
    load_model(other, tmp_path / "new" / "model.safetensors")
    assert_equal(other.state_dict(), module.state_dict())
    assert torch.equal(other.head.weight, tied)
    other = Network()
    lightning_zero.load_weights(other, tmp_path / "new" / "model.safetensors")
    assert_equal(other.state_dict(), module.state_dict())


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_export_rounds_only_floating_point_weights(tmp_path, name, dtype):
    module = Network()
    path = save(checkpoint_of(module), tmp_path / "last.ckpt")
    assert run("export", path, tmp_path / "w.safetensors", "--dtype", name) == 0
    found = load_file(tmp_path / "w.safetensors")
    for key, value in found.items():
        saved = module.state_dict()[key]
        assert torch.equal(value, saved.to(dtype) if saved.is_floating_point() else saved), key
        assert value.dtype == (dtype if saved.is_floating_point() else saved.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_exported_fp32_and_fp16_weights_have_the_precision_of_the_masters(tmp_path, form):
    module = Network().bfloat16()
    checkpoint = checkpoint_of(module, masters=True)
    masters = checkpoint["lightning_zero"]["masters"]
    module.layer.weight.data[0] += 1.0  # changed since the last step: the weight counts, not the master
    expected = {**masters, "layer.weight": masters["layer.weight"].clone()}
    expected["layer.weight"][0] = module.layer.weight.data[0].float()
    path = save(checkpoint, tmp_path / "last.ckpt", form)

    run("export", path, tmp_path / "as_saved.safetensors")
    assert load_file(tmp_path / "as_saved.safetensors")["layer.weight"].dtype == torch.bfloat16
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        run("export", path, tmp_path / f"{name}.safetensors", "--dtype", name)
        found = load_file(tmp_path / f"{name}.safetensors")
        for key, master in expected.items():
            assert torch.equal(found[key], master.to(dtype)), (name, key)
    assert not torch.equal(masters["embedding.weight"], masters["embedding.weight"].bfloat16().float())


def test_export_keeps_every_dtype_and_shape(tmp_path):
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
    kinds += [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    kinds += [torch.float8_e5m2]
    state = {str(dtype): torch.arange(5).to(dtype) for dtype in kinds}
    state |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    state["part"] = torch.arange(20.0).view(4, 5)[1:3]  # a view of a larger storage
    path = save({"state_dict": state}, tmp_path / "a.ckpt")
    assert run("export", path, tmp_path / "w.safetensors") == 0
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape
        assert torch.equal(found[key].view(torch.uint8), value.contiguous().view(torch.uint8)) if value.dim() else True
    assert found["scalar"] == 3.0


@pytest.mark.parametrize("form", FORMS)
def test_export_writes_values_and_not_views_of_what_they_are_computed_from(tmp_path, form):
    values = torch.randn(3, dtype=torch.complex64)
    state = {"conj": values.conj(), "zero-dimensional": values.conj()[0], "neg": torch._neg_view(values.real.clone())}
    path = save({"state_dict": state}, tmp_path / "a.ckpt", form)
    found = open_checkpoint(path).checkpoint["state_dict"]
    assert all(torch.equal(found[name].clone().resolve_conj(), value) for name, value in state.items())
    assert run("export", path, tmp_path / "w.safetensors") == 0
    assert_equal(load_file(tmp_path / "w.safetensors"), state)


NOT_DENSE = {
    "sparse_coo": torch.eye(3).to_sparse(),
    "sparse_csr": torch.eye(3).to_sparse_csr(),
    "sparse_csc": torch.eye(3).to_sparse_csc(),
    "sparse_bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@nested_allowed()
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_sparse_and_nested_tensors_are_inspected_and_converted_but_not_exported(tmp_path, kind, capsys):
    tensor = NOT_DENSE[kind]

    def dense(value: Tensor) -> Tensor:
        return value.to_padded_tensor(-1.0) if value.is_nested else value.to_dense()

    path = save({"state_dict": {"w": torch.tensor([3.0, 5.0]), "odd": tensor}}, tmp_path / "full")
    assert run("convert", path, tmp_path / "sharded", "--to", "sharded") == 0
    assert run("convert", tmp_path / "sharded", tmp_path / "again", "--to", "full") == 0
    for form in ("full", "sharded", "again"):
        capsys.readouterr()
        assert run("inspect", tmp_path / form, "--json") == 0
        _, row = json.loads(capsys.readouterr().out)["tensors"]
        assert row["shape"] == ([2, -1] if tensor.is_nested else list(tensor.shape))
        assert row["bytes"] >= 4 * torch.count_nonzero(dense(tensor) > 0)
        found = open_checkpoint(tmp_path / form).checkpoint["state_dict"]["odd"]
        assert found.layout is tensor.layout and torch.equal(dense(found), dense(tensor))
        assert run("export", tmp_path / form, tmp_path / "w.safetensors") == 1
        said = f"has no form for odd, which is a {'nested' if tensor.is_nested else kind} tensor."
        assert said in capsys.readouterr().err
    data = bytearray(path.read_bytes())
    data[data.index(torch.tensor([3.0, 5.0]).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert run("verify", path) == 1
    assert "is damaged: full/data/0, bytes" in capsys.readouterr().err


def test_export_splits_weights_above_a_size_into_several_files_with_an_index(tmp_path):
    state = {f"layers.{i}": torch.full((10,), float(i)) for i in range(5)} | {"large": torch.ones(100)}
    path = save({"state_dict": state}, tmp_path / "a.ckpt")
    out = tmp_path / "out" / "model.safetensors"
    assert run("export", path, out, "--max-shard-size", "80B") == 0
    index = json.loads((out.parent / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 150}
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(os.listdir(out.parent)) == [*names, "model.safetensors.index.json"]
    assert set(index["weight_map"].values()) == set(names)
    loaded: dict[str, Tensor] = {}
    for name in names:
        part = load_file(out.parent / name)
        assert all(index["weight_map"][key] == name for key in part)
        assert sum(value.nbytes for value in part.values()) <= 80 or list(part) == ["large"]
        loaded |= part
    assert_equal(loaded, state)

    # Existing files are replaced together: no old file may be mistaken for one of the new export.
    assert run("export", path, out, "--overwrite") == 0
    assert os.listdir(out.parent) == ["model.safetensors"]
    assert run("export", path, out, "--overwrite", "--max-shard-size", "400B") == 0
    assert len(os.listdir(out.parent)) == 3


# -- export of modules that wrap a transformers model ------------------------------------------------------------------


class Wraps(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(config)
        self.probe = nn.Linear(2, 2)


def tiny(**options: Any) -> GPT2Config:
    return GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, **options)


@pytest.mark.parametrize("size", ["5GB", "2kB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_from_pretrained_loads_an_exported_model(tmp_path, form, tied, size, capsys):
    module = Wraps(tiny(tie_word_embeddings=tied)).eval()
    config = module.model.config.to_json_string()
    path = save(checkpoint_of(module, transformers={"model.": config}), tmp_path / "last.ckpt", form)
    folder = tmp_path / "exported"
    assert run("export", path, folder / "model.safetensors", "--max-shard-size", size) == 0
    assert "not exported: probe.weight, probe.bias" in capsys.readouterr().err

    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    assert_equal(model.state_dict(), module.model.state_dict())
    tokens = torch.arange(10)[None]
    assert torch.equal(model.eval()(tokens).logits, module.model(tokens).logits)
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is GPT2LMHeadModel


class WritesText(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(tiny())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.arange(8 * 6).view(8, 6) % 30), batch_size=2)


def train_gpt2(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, strategy = WritesText(), ZeroStrategy(3, checkpoint="sharded")
    make_trainer(strategy, max_epochs=1, callbacks=[SaveAtTheEnd(path)], precision="bf16-true").fit(module)
    return module.model.state_dict()


def test_from_pretrained_loads_an_export_of_a_trainers_checkpoint(run_on, tmp_path):
    trained = run_on(2, train_gpt2, path=tmp_path / "last.ckpt")[0]
    assert run("export", tmp_path / "last.ckpt", tmp_path / "out" / "model.safetensors", "--dtype", "fp32") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert_equal({name: value.bfloat16() for name, value in model.state_dict().items()}, dict(trained))
    finer = [not torch.equal(value, value.bfloat16().float()) for value in model.state_dict().values()]
    assert sum(finer) > len(finer) / 2, "the masters' digits are lost"


def test_from_pretrained_takes_the_dtype_of_the_export(tmp_path):
    module = Wraps(tiny(dtype="bfloat16")).bfloat16()
    checkpoint = checkpoint_of(module, masters=True, transformers={"model": module.model.config.to_json_string()})
    path = save(checkpoint, tmp_path / "last.ckpt")
    assert run("export", path, tmp_path / "out" / "model.safetensors", "--dtype", "fp32") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    masters = checkpoint["lightning_zero"]["masters"]
    assert torch.equal(model.transformer.wte.weight, masters["model.transformer.wte.weight"])


def test_export_strips_a_chosen_prefix(tmp_path, capsys):
    config = tiny()
    module = nn.ModuleDict({"student": GPT2LMHeadModel(config), "teacher": GPT2LMHeadModel(config)})
    models = {"student": config.to_json_string(), "teacher": config.to_json_string()}
    path = save({"state_dict": module.state_dict(), "lightning_zero": {"transformers": models}}, tmp_path / "a.ckpt")
    assert run("export", path, tmp_path / "all" / "model.safetensors") == 0
    assert {name.split(".")[0] for name in load_file(tmp_path / "all" / "model.safetensors")} == {"student", "teacher"}
    assert not (tmp_path / "all" / "config.json").exists()
    assert "several transformers models (student, teacher)" in capsys.readouterr().err

    assert run("export", path, tmp_path / "one" / "model.safetensors", "--strip-prefix", "teacher.") == 0
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "one")
    assert_equal(model.state_dict(), module["teacher"].state_dict())

    assert run("export", path, tmp_path / "none" / "model.safetensors", "--strip-prefix", "pupil") == 1
    assert "no weights whose names begin with 'pupil.'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# -- convert -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_converting_to_sharded_and_back_to_full_changes_nothing(tmp_path, masters, named):
    module = Network().bfloat16() if masters else Network()
    checkpoint = checkpoint_of(module, masters=masters)
    if not named:  # as Lightning's own strategies save it: the optimizer's state is keyed by number
        del checkpoint["lightning_zero"]["optimizer_names"]
    expected = copy.deepcopy(checkpoint)
    path = save(checkpoint, tmp_path / "a.ckpt")
    assert run("convert", path, tmp_path / "b.ckpt", "--to", "sharded") == 0
    assert (tmp_path / "b.ckpt" / ".metadata").is_file()
    opened = open_checkpoint(tmp_path / "b.ckpt")
    opened.verify()
    state = "optimizer_0.state.layer.weight.exp_avg" if named else "optimizer_0.state.1.exp_avg"
    assert state in names_in(tmp_path / "b.ckpt")
    if named:
        names = expected["lightning_zero"]["optimizer_names"]
        assert opened.names_of_optimizers == [names["optimizer_0"]]
        opened.checkpoint["lightning_zero"]["optimizer_names"] = names
    assert_equal(opened.checkpoint, expected)
    assert run("convert", tmp_path / "b.ckpt", tmp_path / "c.ckpt", "--to", "full") == 0
    found = torch.load(tmp_path / "c.ckpt")
    assert_equal(found, expected)
    state = found["state_dict"]
    assert list(state) == list(expected["state_dict"])
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    separate = [t.untyped_storage().data_ptr() for name, t in state.items() if name != "head.weight"]
    assert len(set(separate)) == len(separate), "torch.save would write each with all that shares its memory"


# -- inspect and verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_inspect_shows_the_contents_of_a_checkpoint(tmp_path, form, capsys):
    path = save(checkpoint_of(Network()), tmp_path / "last.ckpt", form)
    capsys.readouterr()
    assert run("inspect", path) == 0
    said = capsys.readouterr().out
    words = [line.split() for line in said.splitlines()]
    assert f"{path}: {form}, 1.46 kB in 24 tensors" in said
    assert "written by: lightning_zero 0.1.0" in said
    assert "epoch 3, global_step 120" in said
    assert ["layer.weight", "[6,", "6]", "float32", "144", "B"] in words
    assert ["norm.num_batches_tracked", "[]", "int64", "8", "B"] in words
    assert ["head.weight", "[10,", "6]", "float32", "=", "embedding.weight"] in words
    elements = 10 * 6 + 6 * 6 + 3 * 6  # of parameters
    assert ["state_dict", "8", str(4 * (elements + 2 * 6) + 8), "B"] in words
    assert ["optimizer_states.0", "15", str(4 * (2 * elements + 5)), "B"] in words
    assert ["callbacks", "1", "12", "B"] in words
    assert not any("exp_avg" in line for line in said.splitlines())

    assert run("inspect", path, "--all") == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optimizer_states.0.state.1.exp_avg", "[6,", "6]", "float32", "144", "B"] in words


def test_inspect_describes_a_checkpoint_of_several_ranks_as_json(tmp_path, run_on, capsys):
    path = tmp_path / "x.ckpt"
    weights, _, masters = run_on(2, save_on_ranks, path=str(path), stage=3, dtype=torch.bfloat16)[0]
    assert run("inspect", path, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["whole"] and about["form"] == "sharded" and about["epoch"] == 3
    assert about["written_by"] == {"stage": 3}
    rows = {row["name"]: row for row in about["tensors"]}
    for name, value in weights.items():
        row = rows[f"state_dict.{name}"]
        assert (row["shape"], row["bytes"]) == (list(value.shape), value.nbytes)
        assert row["dtype"] == str(value.dtype).removeprefix("torch.")

    # It is exported with the precision of the masters, which are sharded.
    assert run("export", path, tmp_path / "w.safetensors", "--dtype", "fp32") == 0
    found = load_file(tmp_path / "w.safetensors")
    assert masters
    for name, master in masters.items():
        assert torch.equal(found[name], master), name


@pytest.mark.parametrize("form", FORMS)
def test_verify_reads_everything_and_names_what_is_damaged(tmp_path, form, capsys):
    path = save(checkpoint_of(Network()), tmp_path / "last.ckpt", form)
    capsys.readouterr()
    assert run("verify", path) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}: undamaged\n"
    assert err == ""

    expected = open_checkpoint(path).checkpoint["state_dict"]["layer.weight"].clone().numpy().tobytes()
    file = path if form == "full" else next(path.glob("__0_*.distcp"))
    data = bytearray(file.read_bytes())
    data[data.index(expected) + 7] ^= 1
    file.write_bytes(data)
    assert run("verify", path) == 1
    said = capsys.readouterr().err
    assert run("verify", path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    name = "last/data/1" if form == "full" else "state_dict.layer.weight"  # in a file, the archive's record
    assert found["whole"] is False and name in found["damage"]
    assert f"{path} is damaged" in said and name in said and "bias" not in said
    for out, arguments in (("w.safetensors", ["export"]), ("w.ckpt", ["convert", "--to", "full"])):
        assert run(*arguments, path, tmp_path / out) == 1
        assert name in capsys.readouterr().err
        assert not (tmp_path / out).exists()

    if form == "sharded":
        file.unlink()
        assert run("verify", path) == 1
        assert f"{file.name}, which contains " in capsys.readouterr().err
        assert run("inspect", path, "--json") == 1
        assert json.loads(capsys.readouterr().out)["whole"] is False


# -- memory ------------------------------------------------------------------------------------------------------------

SMALL, LARGE = 2**22, 12 * 2**20  # elements; 8 of the first, one of the second
WHOLE = 6 * (8 * SMALL + LARGE)  # bytes: weights in bf16, masters in fp32
LARGEST = 4 * LARGE
OTHER = 24 * 2**20  # some converted chunks, and allocations by libraries

MEASURED = {
    "export": ["export", "{}", "{}.safetensors", "--dtype", "fp32"],
    "verify": ["verify", "{}"],
    "to full": ["convert", "{}", "{}.to_full", "--to", "full"],
    "to sharded": ["convert", "{}", "{}.to_sharded", "--to", "sharded"],
}


def own_memory_of(folder: str) -> dict[str, int]:
    """Peak increase of this process's anonymous memory, by command and form."""
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would count memory that was not requested
    found = {}
    for form in FORMS:
        for name, arguments in MEASURED.items():
            before = most = anonymous()
            is_done = threading.Event()

            def watch() -> None:
                nonlocal most
                while not is_done.wait(1e-3):
                    most = max(most, anonymous())

            watcher = threading.Thread(target=watch)
            watcher.start()
            assert main([argument.format(f"{folder}/{form}") for argument in arguments]) == 0
            is_done.set()
            watcher.join()
            found[f"{name}, {form}"] = most - before
    return found


@pytest.mark.exhaustive
def test_memory_of_the_commands_does_not_grow_with_the_checkpoint(tmp_path):
    weights = {f"layers.{i}": torch.randn(SMALL) for i in range(8)} | {"large": torch.randn(LARGE)}
    low = {name: value.bfloat16() for name, value in weights.items()}
    torch.save({"state_dict": low, "lightning_zero": {"masters": weights}}, tmp_path / "full")
    assert run("convert", tmp_path / "full", tmp_path / "sharded", "--to", "sharded") == 0
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import json, {__name__} as tests; print(json.dumps(tests.own_memory_of('{tmp_path}')))",
        ],
        env={**os.environ, **RETURN_MEMORY_AT_ONCE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    bound = LARGEST + OTHER
    assert WHOLE > 3 * bound
    assert all(peak < bound for peak in found.values()), f"{found}, of a checkpoint of {WHOLE}"
    for form in FORMS:
        exported = load_file(tmp_path / f"{form}.safetensors")
        assert_equal(exported, weights)
        for to in FORMS:
            opened = open_checkpoint(tmp_path / f"{form}.to_{to}")
            assert_equal(opened.checkpoint["lightning_zero"]["masters"], weights)


def train_and_go_on(folder: Path) -> None:
    sharded, full, again = (str(folder / name) for name in ("sharded.ckpt", "full.ckpt", "again.ckpt"))
    fit(ZeroStrategy(3, checkpoint="sharded"), learner, callbacks=[SaveAtTheEnd(Path(sharded))])
    if rank() == 0:
        assert run("convert", sharded, full, "--to", "full") == 0
        assert run("convert", full, again, "--to", "sharded") == 0
    torch.distributed.barrier()
    expected = fit("zero3", learner, sharded, max_epochs=2).weights
    for system, path in (("zero3", full), ("zero3", again), ("zero1", again), ("ddp", full)):
        same_tensors(fit(system, learner, path, max_epochs=2).weights, expected, bound=0)


def test_training_continues_from_a_converted_checkpoint(run_on, tmp_path):
    run_on(2, train_and_go_on, folder=tmp_path)


@pytest.mark.parametrize("key", ["model", "network"])
def test_a_converted_fabric_checkpoint_keeps_its_keys(tmp_path, key):
    module = Network().bfloat16()
    lightnings = checkpoint_of(module, masters=True)
    masters, names = lightnings["lightning_zero"]["masters"], lightnings["lightning_zero"]["optimizer_names"]
    ours = {"masters": {key: masters}, "optimizer_names": {"adam": names["optimizer_0"]}}
    checkpoint = {key: lightnings["state_dict"], "adam": lightnings["optimizer_states"][0], "step": 7}
    expected = copy.deepcopy({**checkpoint, "lightning_zero": ours})
    path = save({**checkpoint, "lightning_zero": ours}, tmp_path / "a.ckpt")
    assert run("convert", path, tmp_path / "b.ckpt", "--to", "sharded") == 0
    assert (
        "adam.state.layer.weight.exp_avg"
        in dcp.FileSystemReader(tmp_path / "b.ckpt").read_metadata().state_dict_metadata
    )
    assert run("convert", tmp_path / "b.ckpt", tmp_path / "c.ckpt", "--to", "full") == 0
    assert_equal(torch.load(tmp_path / "c.ckpt"), expected)

    options = ["--dtype", "fp32", *(["--strip-prefix", key] if key != "model" else [])]
    assert run("export", tmp_path / "b.ckpt", tmp_path / "w.safetensors", *options) == 0
    found = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], master) for name, master in masters.items() if name != "head.weight")


def test_converted_state_dicts_keep_the_versions_of_modules(tmp_path):
    actor, critic = Network(), nn.Sequential(Network(), nn.BatchNorm1d(3))
    checkpoint = {"actor": actor.state_dict(), "critic": critic.state_dict(), "more": {"of": [critic.state_dict()]}}
    path = save(checkpoint, tmp_path / "a.ckpt", "sharded")
    assert run("convert", path, tmp_path / "b.ckpt", "--to", "full") == 0
    found = torch.load(tmp_path / "b.ckpt")
    assert_equal(found, checkpoint)
    assert found["actor"]._metadata == checkpoint["actor"]._metadata
    assert found["critic"]._metadata == found["more"]["of"][0]._metadata == checkpoint["critic"]._metadata


def test_a_state_dict_alone_is_converted_unchanged(tmp_path):
    state = Network().state_dict()
    path = save(state, tmp_path / "a.ckpt", "sharded")
    assert names_in(path) == set(state)
    found = open_checkpoint(path).checkpoint["state_dict"]
    assert found._metadata == state._metadata and found["head.weight"] is found["embedding.weight"]
    assert run("convert", path, tmp_path / "b.ckpt", "--to", "full") == 0
    full = torch.load(tmp_path / "b.ckpt")
    assert_equal(full, state)
    assert full._metadata == state._metadata


def test_tensors_at_the_top_of_a_fabric_checkpoint_are_converted_unchanged(tmp_path):
    numbers = [torch.arange(3), torch.ones(2), {1: torch.zeros(1), "none": {}}]
    checkpoint = {"network": Network().state_dict(), "average": torch.rand(4), "numbers": numbers, "step": 7}
    path = save(checkpoint, tmp_path / "a.ckpt", "sharded")
    assert {"average", "network.layer.weight", "numbers.1"} <= names_in(path)
    assert run("convert", path, tmp_path / "b.ckpt", "--to", "full") == 0
    assert_equal(torch.load(tmp_path / "b.ckpt"), checkpoint)


def test_a_checkpoint_without_tensors_is_converted_unchanged(tmp_path):
    checkpoint = {"epoch": 1, "state_dict": {}, "optimizer_states": [], "callbacks": {}, "loops": {"fit_loop": {}}}
    path = save(checkpoint, tmp_path / "a.ckpt", "sharded")
    assert run("convert", path, tmp_path / "b.ckpt", "--to", "full") == 0
    assert torch.load(tmp_path / "b.ckpt") == checkpoint


def test_remote_paths_are_read_and_written(tmp_path):
    checkpoint = checkpoint_of(Network())
    expected = copy.deepcopy(checkpoint)
    path = save(checkpoint, tmp_path / "a.ckpt")
    assert run("convert", path, "memory://far/b.ckpt", "--to", "sharded") == 0
    assert run("verify", "memory://far/b.ckpt") == 0
    assert run("convert", "memory://far/b.ckpt", "memory://far/c.ckpt", "--to", "full") == 0
    assert_equal(open_checkpoint("memory://far/c.ckpt").checkpoint, expected)
    assert run("export", "memory://far/c.ckpt", "memory://far/w.safetensors", "--max-shard-size", "300B") == 0
    assert run("export", "memory://far/c.ckpt", "memory://far/w.safetensors") == 1
    assert run("export", "memory://far/c.ckpt", "memory://far/w.safetensors", "--overwrite") == 0
    files = fsspec.filesystem("memory")
    assert sorted(files.ls("/far", detail=False)) == ["/far/b.ckpt", "/far/c.ckpt", "/far/w.safetensors"]
    found = load(files.cat("/far/w.safetensors"))
    assert torch.equal(found["layer.weight"], expected["state_dict"]["layer.weight"])


# -- import ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_an_imported_checkpoint_has_the_names_of_the_module_that_wraps_the_model(tmp_path, form):
    network = Network()
    checkpoint = checkpoint_of(network)
    names = checkpoint["lightning_zero"]["optimizer_names"]["optimizer_0"]
    state = by_name(checkpoint["optimizer_states"][0], names)
    dcp.save({"model": network.state_dict(), "optim": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert run("import", "fsdp", tmp_path / "theirs", tmp_path / "ours", "--to", form, "--prefix", "model.") == 0

    opened = open_checkpoint(tmp_path / "ours")
    assert opened.form == form
    wraps = nn.ModuleDict({"model": Network()})
    wraps.load_state_dict({name: value.clone() for name, value in opened.checkpoint["state_dict"].items()})
    assert_equal(wraps["model"].state_dict(), network.state_dict())
    torch.save({"model": network.state_dict(), "optim": state}, tmp_path / "theirs.pt")
    assert run("import", "fsdp", tmp_path / "theirs.pt", tmp_path / "w", "--to", form, "--prefix", "model") == 0
    versions = open_checkpoint(tmp_path / "w").checkpoint["state_dict"]._metadata
    assert {name: versions.get(name) for name in wraps.state_dict()._metadata if name} == versions
    assert versions["model.norm"] == {"version": 2}
    assert_equal(opened.checkpoint["optimizer_states"][0]["state"], checkpoint["optimizer_states"][0]["state"])
    given = opened.names_of_optimizers or opened.checkpoint["lightning_zero"]["optimizer_names"].values()
    assert list(given) == [[f"model.{name}" for name in names]]


# -- refusals and errors -----------------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Make writing beyond this size to a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


COMMANDS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "export": lambda path, out: ["export", path, out / "w.safetensors"],
    "to full": lambda path, out: ["convert", path, out / "w.ckpt", "--to", "full"],
    "to sharded": lambda path, out: ["convert", path, out / "w.ckpt", "--to", "sharded"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_existing_output_is_kept_unless_overwrite_is_given(tmp_path, command, capsys):
    path = save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "a.ckpt")
    arguments = COMMANDS[command](path, tmp_path)
    out = Path(arguments[2])
    out.write_text("mine")
    assert run(*arguments) == 1
    assert f"{out} already exists" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run(*arguments, "--overwrite") == 0
    (value,) = (
        load_file(out).values() if command == "export" else open_checkpoint(out).checkpoint["state_dict"].values()
    )
    assert torch.equal(value.clone(), torch.ones(3))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_leaves_no_partial_output_and_keeps_existing_files(tmp_path, form, command, capsys):
    path = save({"state_dict": {"w": torch.ones(2**20), "v": torch.ones(2**20)}}, tmp_path / "a.ckpt", form)
    arguments = COMMANDS[command](path, tmp_path / "out")
    out = Path(arguments[2])
    out.parent.mkdir()
    out.write_text("mine")
    with largest_file(5 * 2**20):
        assert run(*arguments, "--overwrite") == 1
    assert "File too large" in capsys.readouterr().err
    assert os.listdir(out.parent) == [out.name] and out.read_text() == "mine"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_reported_in_one_line(tmp_path, command, capsys):
    path = save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "a.ckpt")
    for folder in ("/proc/self", str(path)):  # where even root may not write
        assert run(*COMMANDS[command](path, Path(folder) / "new")) == 1
        said = capsys.readouterr().err
        assert said.startswith("lightning-zero checkpoint") and folder in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_package_of_a_file_system_is_reported_in_one_line(tmp_path, command, capsys):
    assert run(*COMMANDS[command]("smb://host/a.ckpt", tmp_path / "new")) == 1
    said = capsys.readouterr().err
    assert said.startswith("lightning-zero checkpoint") and "smbprotocol" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("form", FORMS)
def test_reading_warns_of_nothing(tmp_path, form):
    path = save({"state_dict": {"w": torch.ones(3)}, "other": torch.ones(2)}, tmp_path / "a.ckpt", form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("verify", path) == 0


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_file_with_more_than_data_is_refused_without_advice(tmp_path, capsys):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(3)}, "other": Harmful()}, path)
    for command in (["verify", path], ["inspect", path], ["export", path, tmp_path / "w.safetensors"]):
        assert run(*command) == 1
        assert capsys.readouterr().err == (
            f"lightning-zero checkpoint {command[0]}: {path}: it contains posix.system, which is not data. Do not load "
            "this file unless you trust its source.\n"
        )
    with pytest.raises(SystemExit):
        run("inspect", path, "--trust")


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    path = save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "a.ckpt")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_zero.checkpoint.exporting.write_values", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("export", path, tmp_path / "w.safetensors")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(tmp_path, capsys):
    path = save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "a.ckpt")
    for form in FORMS:
        assert run("convert", path, tmp_path, "--to", form, "--overwrite") == 1
        assert f"{tmp_path} is a folder with contents other than a checkpoint (a.ckpt)" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["export", "PATH", "OUT"], 1, "OUT must end in .safetensors: for example OUT/model.safetensors"),
        (["export", "PATH", "OUT.safetensors", "--max-shard-size", "much"], 2, "'much' is not a size such as 500MB"),
        (["export", "PATH", "OUT.safetensors", "--dtype", "fp8"], 2, "'fp8'"),
        (["convert", "PATH", "OUT"], 2, "--to"),
        (["inspect", "nowhere.ckpt"], 1, "Checkpoint file not found: nowhere.ckpt"),
        (["import", "jax", "PATH", "OUT"], 2, "'jax'"),
        (["import", "deepspeed", "PATH", "OUT", "--model", "w"], 1, "--model w works with fsdp only"),
        ([], 2, "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_arguments_are_reported(tmp_path, monkeypatch, capsys, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    save({"state_dict": {"w": torch.ones(3)}}, Path("PATH"))
    try:
        found = main(arguments)
    except SystemExit as exit:
        found = exit.code
    assert found == code
    assert said in capsys.readouterr().err
    assert os.listdir() == ["PATH"]
