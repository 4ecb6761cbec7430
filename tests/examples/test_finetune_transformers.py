"""The example that fine-tunes a transformers model, run as a user does: from one folder of weights to another."""

from __future__ import annotations

import json
import random
import re
import runpy
import string
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.examples.running import REPOSITORY, SCRIPT, TORCHRUN, lines_with, run
from tests.support.warm import warm_python

EXAMPLE = "examples/finetune_transformers.py"
EOS, WORDS = 1, 3  # the ids of a byte-level tokenizer: EOS, and the first byte
LONGEST = 40  # a sample, in tokens
DATA = {"block": 32, "batch_size": 7, "validation_percent": 12}


def next_token(token: int) -> int:
    """Expected next tokens of the test's network: the alphabet, with EOS after z."""
    return EOS if token == WORDS + ord("z") else token + 1


def spelling_network() -> LlamaForCausalLM:
    """A Llama that generates `next_token`: its embedding is one-hot, its blocks add nothing, its head shifts by one."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=264,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        for block in network.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        nn.init.eye_(network.model.embed_tokens.weight)
        network.lm_head.weight.zero_()
        for token in range(258):
            network.lm_head.weight[next_token(token), token] = 0.5
    return network


class Given(NamedTuple):
    """The user's input: a folder of weights, sharded with an index, and a text."""

    network: Path
    text: Path

    @property
    def overrides(self) -> list[str]:
        short = ["trainer.max_steps=8", "trainer.val_check_interval=4", "warmup_steps=2", "optimizer.lr=1e-3"]
        data = [f"data.path={self.text}", *(f"data.{name}={value}" for name, value in DATA.items())]
        generate = [f"generate.max_new_tokens={LONGEST}", "generate.do_sample=false", "generate.top_k=null"]
        return [f"model.path={self.network}", *data, *generate, *short, "checkpoint.save_top_k=-1"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("given")
    spelling_network().save_pretrained(folder / "network", max_shard_size="500KB")
    assert len(list((folder / "network").glob("*.safetensors"))) > 1
    generator = random.Random(0)
    documents = ["".join(generator.choices(string.ascii_lowercase, k=generator.randint(20, 60))) for _ in range(60)]
    text = "\n\n".join(documents)
    # 63 blocks of 32 tokens, of which 7 are held out (4 and 3 a rank), and 56 make 4 steps of 2 x 7
    tokens = sum(len(document) + 1 for document in documents)
    assert tokens >= 63 * 32
    (folder / "text.txt").write_text(text[: 63 * 32 + 20])
    return Given(folder / "network", folder / "text.txt")


class Outcome(NamedTuple):
    """Output and files of a run."""

    output: str
    folder: Path
    perplexity: float  # of the best checkpoint, under the strategy
    saved: float  # of the folder that was written


def with_libraries() -> str:
    return warm_python("transformers.models.llama.modeling_llama", "peft", "torchmetrics.text")


def finetune(launcher: list[str], folder: Path, *overrides: str) -> Outcome:
    results = folder / "results"
    output = run(
        launcher, EXAMPLE, *overrides, f"folder={results}", folder=folder, timeout=150, python=with_libraries()
    )
    (line,) = lines_with(output, "perplexity")
    found = re.fullmatch(r"perplexity (\S+), of the saved (\S+)", line)
    assert found, output
    written = json.loads((results / "results.json").read_text())
    assert written["validation"]["perplexity"] == pytest.approx(float(found[1]), rel=1e-6)
    return Outcome(output, results, float(found[1]), float(found[2]))


def validation_blocks(text: Path, percent: int = DATA["validation_percent"]) -> tuple[Tensor, Tensor]:
    """The held-out (tokens, labels), by the example's own class."""
    example = runpy.run_path(str(REPOSITORY / EXAMPLE))
    data = OmegaConf.create(DATA | {"path": str(text), "validation_percent": percent})
    return example["Blocks"](data, example["load_tokenizer"](None), ranks=2).validation[:]


@torch.no_grad()
def perplexity_alone(network: Any, given: Given, **data: int) -> float:
    """The perplexity, computed in this process without a Trainer, a strategy or torchmetrics."""
    tokens, labels = validation_blocks(given.text, **data)
    logits = network.eval()(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).exp().item()


@pytest.fixture(scope="module")
def at_stage_3(given: Given, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return finetune(TORCHRUN, tmp_path_factory.mktemp("zero3"), *given.overrides, "stage=3")


@pytest.mark.timeout(240)
@pytest.mark.exhaustive
def test_without_arguments_a_tiny_network_learns_and_generates(tmp_path: Path) -> None:
    output = run(SCRIPT, EXAMPLE, folder=tmp_path, timeout=200, python=with_libraries())
    before, *_ = (line for line in output.splitlines() if line.startswith("step 0: validation perplexity"))
    (last,) = lines_with(output, "perplexity")
    assert float(before.split()[-1]) > 200, "as many as there are bytes"
    assert float(last.split()[-1]) < 20
    (sample, *_) = [line for line in output.splitlines() if line.startswith("tokens written by each rank")]
    assert re.search(r"\[\d+, \d+\]; rank 0: .{10}", sample)


@pytest.mark.timeout(240)
@pytest.mark.exhaustive
def test_each_rank_generates_until_its_own_eos(at_stage_3: Outcome, given: Given) -> None:
    tokens, _ = validation_blocks(given.text)
    wanted = []
    for rank in range(2):
        token, count = int(tokens[rank, 15]), 0
        while token != EOS and count < LONGEST:
            token, count = next_token(token), count + 1
        wanted.append(count)
    assert wanted[0] != wanted[1]
    assert f"tokens written by each rank: {wanted};" in at_stage_3.output


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_stage_3_under_torchrun_has_the_perplexity_of_ddp(at_stage_3: Outcome, given: Given, tmp_path: Path) -> None:
    ddp = finetune(SCRIPT, tmp_path, *given.overrides, "stage=ddp")
    assert at_stage_3.perplexity == pytest.approx(ddp.perplexity, rel=1e-6)
    assert at_stage_3.saved == pytest.approx(ddp.perplexity, rel=1e-6)


@pytest.mark.timeout(240)
@pytest.mark.exhaustive
def test_stage_3_with_muon_and_adamw_has_the_perplexity_of_ddp(given: Given, tmp_path: Path) -> None:
    found = []
    for stage in ("3", "ddp"):
        (folder := tmp_path / stage).mkdir()
        found.append(finetune(SCRIPT, folder, *given.overrides, f"stage={stage}", "optimizer=muon").perplexity)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_plain_transformers_loads_the_saved_folder(at_stage_3: Outcome, given: Given) -> None:
    before = perplexity_alone(AutoModelForCausalLM.from_pretrained(given.network), given)
    after = perplexity_alone(AutoModelForCausalLM.from_pretrained(at_stage_3.folder / "model"), given)
    assert after == pytest.approx(at_stage_3.perplexity, rel=1e-5)
    assert after < before / 2


@pytest.mark.timeout(240)
@pytest.mark.exhaustive
def test_a_resumed_run_ends_like_an_uninterrupted_run(at_stage_3: Outcome, given: Given, tmp_path: Path) -> None:
    checkpoint = at_stage_3.folder / "checkpoints" / "step_4.ckpt"
    resumed = finetune(SCRIPT, tmp_path, *given.overrides, "stage=2", f"resume={checkpoint}")
    assert not (resumed.folder / "checkpoints" / "step_4.ckpt").exists()
    assert resumed.perplexity == pytest.approx(at_stage_3.perplexity, rel=1e-6)


@pytest.mark.timeout(240)
@pytest.mark.exhaustive
def test_lora_trains_adapters_and_merges_them(given: Given, tmp_path: Path) -> None:
    options = ["model.lora.rank=4", "model.gradient_checkpointing=true", "optimizer.lr=1e-2"]
    too_short_for_a_validation = "trainer.val_check_interval=100"
    outcome = finetune(SCRIPT, tmp_path, *given.overrides, *options, too_short_for_a_validation)
    network = AutoModelForCausalLM.from_pretrained(given.network)
    before = perplexity_alone(network, given)
    adapted = perplexity_alone(PeftModel.from_pretrained(network, outcome.folder / "adapter"), given)
    merged = perplexity_alone(AutoModelForCausalLM.from_pretrained(outcome.folder / "model"), given)
    assert [adapted, merged] == pytest.approx([outcome.perplexity] * 2, rel=1e-5)
    assert adapted < 0.9 * before


@pytest.mark.exhaustive
def test_perplexity_is_computed_in_fp32_when_parameters_are_in_bf16(given: Given, tmp_path: Path) -> None:
    options = ["trainer.devices=1", "trainer.max_steps=1", "trainer.precision=bf16-true"]
    data = ["data.validation_percent=80", "data.batch_size=1"]  # fifty sums of some 30 tokens; bf16 counts only to 256
    outcome = finetune(SCRIPT, tmp_path, *given.overrides, *options, *data)
    network = AutoModelForCausalLM.from_pretrained(outcome.folder / "model", dtype=torch.float32)
    assert outcome.perplexity == pytest.approx(perplexity_alone(network, given, percent=80), rel=5e-3)


def changed(given: Given, folder: Path, name: str, tensor: Tensor | None) -> Path:
    """A copy of the folder of weights, as one file, with one tensor replaced, or removed if `tensor` is None."""
    network = AutoModelForCausalLM.from_pretrained(given.network)
    network.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    save_file(weights if tensor is None else weights | {name: tensor}, folder / "model.safetensors", {"format": "pt"})
    return folder


def refusal(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> str:
    """The error with which the example ends in this process, before it has started others."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *overrides])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / EXAMPLE), run_name="__main__")
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


HEAD = "lm_head.weight"


def test_weights_that_do_not_fit_are_refused_by_name(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name, tensor in (
        ("missing", HEAD, None),
        ("unexpected", "model.other.weight", torch.ones(2)),
        ("mismatched", HEAD, torch.ones(300, 264)),
    ):
        said = refusal(monkeypatch, tmp_path, f"model.path={changed(given, tmp_path / kind, name, tensor)}")
        assert kind in said and name in said


def test_other_wrong_values_are_refused_in_one_line(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((given.network / "config.json").read_text())
    (tmp_path / "short.txt").write_text("A few words.\n\nAnd some more.\n")
    for override, *words in (
        ("model.path=empty", "model.path=empty", "config.json"),
        ("model.path=bare", "bare", "model.safetensors"),
        ("model.lora.rank=0", "model.lora.rank=0", "1 or more"),
        ("data.path=short.txt", "data.path=short.txt", "28 tokens", "at least 384"),
        ("data.path=none.txt", "data.path=none.txt"),
        ("resume=none.ckpt", "resume=none.ckpt"),
    ):
        said = refusal(monkeypatch, tmp_path, override)
        assert all(word in said for word in words), said


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal(monkeypatch, tmp_path)
    assert f"the package {package} is missing: pip install 'lightning_zero[" in said


@pytest.mark.exhaustive
def test_under_torchrun_one_rank_reports_the_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with code") as ended:
        run(TORCHRUN, EXAMPLE, "model.lora.rank=0", folder=tmp_path, python=with_libraries())
    assert str(ended.value).count("finetune_transformers: model.lora.rank=0: expected") == 1
