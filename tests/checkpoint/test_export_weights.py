"""`export_weights`: the ranks of a run write files that `from_pretrained` loads, as one rank would write them."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch import Tensor, nn

import lightning_zero
from lightning_zero.checkpoint import exporting
from lightning_zero.engine import Engine, streaming
from tests.fabric.training import make_fabric
from tests.libraries.models import MODELS
from tests.libraries.training import Learner, fit, same_learning
from tests.support import rank
from tests.support.training import same_tensors

MOST, SHARD = 8000, 4000


class Nested(nn.Module):
    """A transformers model beside other weights, and a frozen weight of another dtype within the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = MODELS["Llama"].make(tie_word_embeddings=True)
        self.network.model.norm.half().requires_grad_(False)
        self.probe = nn.Linear(2, 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def loaded(folder: Path, **options: Any) -> dict[str, Tensor]:
    model, info = type(MODELS["Llama"].make()).from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.state_dict()


def export_while_sharded(folder: Path, stage: int) -> None:
    module = Nested()
    engine = Engine(module, stage=stage)
    held = engine.ledger.now["gathered"]
    engine.reset_peak()
    with patch.object(exporting, "write_values", wraps=exporting.write_values) as written:
        paths = lightning_zero.export_weights(module, folder, max_shard_bytes=SHARD, max_bytes=MOST)
    assert written.call_count > 1, "each rank writes"
    assert {os.path.basename(path) for path in paths} == set(contents(folder))
    assert engine.ledger.peak["gathered"] - held <= MOST and engine.ledger.now["gathered"] == held
    with patch.object(exporting, "write_values", side_effect=OSError("disk full") if rank() == 0 else None):
        with pytest.raises(OSError, match="The export .* was not saved: rank 0 could not write it: OSError: disk full"):
            lightning_zero.export_weights(module, folder, max_shard_bytes=SHARD)
    lightning_zero.export_weights(module.network.model, folder.with_name("inner"), dtype=torch.bfloat16)
    expected = engine.full_state_dict(module=module.network.model)
    inner = load_file(folder.with_name("inner") / "model.safetensors")
    same_tensors({name: inner[name] for name in expected}, {n: v.bfloat16() for n, v in expected.items()}, 0)
    engine.close()


@pytest.mark.behaviour("The module", "`export_weights(module, folder)`: `from_pretrained` loads what all ranks write")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive(but=0))])
def test_ranks_write_the_bytes_that_one_process_writes(run_on, tmp_path, ranks, stage):
    run_on(ranks, export_while_sharded, folder=tmp_path / "ranks", stage=stage)
    module = Nested()
    lightning_zero.export_weights(module, tmp_path / "alone", max_shard_bytes=SHARD)
    written = contents(tmp_path / "ranks")
    assert written == contents(tmp_path / "alone") and len(written) > 4
    expected = {name: value.float() for name, value in module.network.state_dict().items()}
    same_tensors(loaded(tmp_path / "ranks", dtype=torch.float32), expected, bound=0)


class Exporting(Callback):
    """Exports in a hook that every rank runs, and after fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.export(module, "during")
            self.expected = {name: value.clone() for name, value in lightning_zero.iter_full_parameters(module.model)}

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.export(module, "at the end")

    def export(self, module: Any, name: str) -> None:
        lightning_zero.export_weights(module, self.folder / name, max_shard_bytes=SHARD)


def export_in_fit(folder: Path) -> None:
    make = partial(Learner, "Llama")
    reference = fit("ddp", make)
    exporting = Exporting(folder)
    run = fit("zero3", make, callbacks=[exporting])
    same_learning(run, reference)
    exporting.export(run.module, "after")
    same_tensors(loaded(folder / "during"), exporting.expected, bound=0)
    for name in ("at the end", "after"):
        same_tensors({f"model.{n}": v for n, v in loaded(folder / name).items()}, reference.weights, bound=0)


def test_an_export_in_the_midst_of_a_fit_changes_nothing(run_on, tmp_path):
    run_on(2, export_in_fit, folder=tmp_path)


def export_merged(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = get_peft_model(MODELS["Llama"].make(attention_bias=True), LoraConfig(r=2, target_modules="all-linear"))
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)
    engine = Engine(module, stage=3)
    with patch.object(streaming, "merged", wraps=streaming.merged) as merged:
        lightning_zero.export_weights(module, folder.with_name("one file"), merge_adapters=True)
    layers = {name.rpartition(".lora_A")[0] for name, _ in module.named_parameters() if "lora_A" in name}
    assert merged.call_count == 2 * len(layers), "once on the meta device and once with values"
    lightning_zero.export_weights(module, folder, max_shard_bytes=SHARD, max_bytes=MOST, merge_adapters=True)
    engine.close()
    expected = module.merge_and_unload().state_dict()
    same_tensors(loaded(folder), expected, bound=0)
    same_tensors(loaded(folder.with_name("one file")), expected, bound=0)


def test_adapters_are_merged_into_the_exported_weights(run_on, tmp_path):
    run_on(2, export_merged, folder=tmp_path)


def test_merged_layers_may_have_weights_of_two_dtypes(tmp_path):
    from peft import LoraConfig, get_peft_model

    layer = nn.Linear(4, 4)
    layer.weight.data = layer.weight.data.bfloat16()
    module = get_peft_model(nn.Sequential(layer), LoraConfig(r=2, target_modules=["0"]))
    lightning_zero.export_weights(module, tmp_path, merge_adapters=True)
    expected = module.merge_and_unload().state_dict()
    found = load_file(tmp_path / "model.safetensors")
    same_tensors({name: found[name] for name in expected}, expected, bound=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_bytes": "1GB"}, "export_weights: max_bytes='1GB' must be an integer of at least 1"),
        ({"max_bytes": None}, "max_bytes=None must be an integer"),
        ({"max_shard_bytes": "5GB"}, "max_shard_bytes='5GB' must be an integer of at least 1"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating-point dtype"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        lightning_zero.export_weights(nn.Linear(2, 2), tmp_path, **options)
    with pytest.raises(ValueError, match="iter_full_parameters: max_bytes=0 must be an integer of at least 1"):
        lightning_zero.iter_full_parameters(nn.Linear(2, 2), max_bytes=0)
    assert not list(tmp_path.iterdir())


def export_for_from_pretrained(folder: Path) -> None:
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    warnings.simplefilter("ignore")
    compiled = torch.compile(MODELS["Llama"].make(), backend="eager")
    engine = Engine(compiled, stage=3)
    lightning_zero.export_weights(compiled, folder / "compiled")
    engine.close()
    same_tensors(loaded(folder / "compiled"), compiled._orig_mod.state_dict(), bound=0)
    adapted = get_peft_model(MODELS["Llama"].make(), LoraConfig(r=2, target_modules=["q_proj"]))
    lightning_zero.export_weights(adapted, folder / "adapted")
    assert not (folder / "adapted" / "config.json").exists(), "from_pretrained would start from random weights"
    layer = nn.Sequential(Linear4bit(64, 64, quant_type="nf4").to("cpu"))
    lightning_zero.export_weights(layer, folder / "quantised", dtype=torch.bfloat16)
    found = load_file(folder / "quantised" / "model.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {
        name: torch.bfloat16 if name == "0.bias" else value.dtype for name, value in layer.state_dict().items()
    }


def test_exports_are_for_from_pretrained_or_have_no_config(run_on, tmp_path):
    run_on(1, export_for_from_pretrained, folder=tmp_path)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        self.network = get_peft_model(MODELS["Llama"].make(), LoraConfig(r=2, target_modules=["q_proj"]))

    def forward(self, **batch: Any) -> Any:
        return self.network(**batch).loss


def export_in_fabric(folder: Path) -> None:
    warnings.simplefilter("ignore")
    fabric = make_fabric("zero3")
    model = Adapted()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    expected = copy.deepcopy(model.network).merge_and_unload().state_dict()
    module, _ = fabric.setup(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    lightning_zero.export_weights(module, folder, merge_adapters=True)
    same_tensors(loaded(folder), expected, bound=0)


def test_a_module_of_fabric_is_exported_under_its_own_names(run_on, tmp_path):
    run_on(2, export_in_fabric, folder=tmp_path)
