"""Weights from files: each rank reads its shard when the module is sharded; files that do not fit are refused."""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import load_weights
from lightning_zero.engine import Engine, ShardedTensor
from lightning_zero.engine.init.deferred_param import parameters_await_values, values_may_wait
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.zoo.gpt import GPT
from tests.support import rank, world_size
from tests.support.training import same_tensors

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Net(nn.Module):
    """Two blocks, a buffer, a weight shared by two modules, and one that is a non-contiguous view."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 1.5)


def on_meta(dtype=torch.float32):
    with parameters_await_values(only_on_meta=True), torch.device("meta"):
        return Net().to(dtype)


def make_files(dtype=torch.float32):
    """Write the same weights in each file format, on every rank; return the paths and the weights."""
    torch.manual_seed(3)
    net = Net().to(dtype)
    nn.init.normal_(net.blocks[1][1].running_mean)
    state = net.state_dict()
    torch.save(state, "net.pt")
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": state}, "net.ckpt")
    torch.save(state, "old.pt", _use_new_zipfile_serialization=False)
    one_name = {name: value for name, value in state.items() if name != "head.weight"}
    safetensors.torch.save_file(one_name, "net.safetensors")
    os.makedirs("folder", exist_ok=True)
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    index = {}
    for number, (name, value) in enumerate(one_name.items()):
        file = list(parts)[number % 2]
        parts[file][name], index[name] = value, file
    for file, values in parts.items():
        safetensors.torch.save_file(values, f"folder/{file}")
    with open("folder/model.safetensors.index.json", "w") as file:
        json.dump({"weight_map": index}, file)
    return ["net.pt", "net.ckpt", "old.pt", "net.safetensors", "folder"], state


def read(stage):
    for dtype in (torch.float32, torch.bfloat16):
        paths, expected = make_files(dtype)
        expected = {name: value.float() if value.is_floating_point() else value for name, value in expected.items()}
        for path in paths if dtype == torch.float32 else paths[-2:]:
            module = on_meta()
            with values_may_wait():
                assert load_weights(module, path) == ([], [])
            assert all(isinstance(parameter, LazyTensor) for parameter in module.parameters())
            other = copy.deepcopy(module)
            engine = Engine(module, stage=stage)
            if world_size() > 1 and path != "old.pt":
                compared_and_buffers = 2
                calls = engine.report().calls["control"]
                assert calls == compared_and_buffers, "a file is read by all: nothing is broadcast"
            engine.close()
            same_tensors(module.state_dict(), expected, bound=0)
            assert module.head.weight is module.embed.weight
            Engine(other, stage=stage).close()
            same_tensors(other.state_dict(), expected, bound=0)

            module = on_meta()
            load_weights(module, path)
            same_tensors(module.state_dict(), expected, bound=0)
            assert module.head.weight is module.embed.weight
            module = Net()
            load_weights(module, path)
            same_tensors(module.state_dict(), expected, bound=0)


@pytest.mark.exhaustive(but=1)
@STAGES
@pytest.mark.behaviour(
    "The module", "`load_weights`: safetensors, torch files and checkpoints, each rank reading its share"
)
def test_every_file_format_gives_its_values_in_the_modules_dtype(run_on, stage):
    run_on(2, read, stage=stage)


def test_every_file_format_is_read_on_one_rank(run_on):
    run_on(1, read, stage=3)


def live(stage):
    _, expected = make_files()
    module = Net()
    engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage=stage)
    engine.reset_counters()
    for load in (
        lambda: load_weights(module, "net.pt"),
        lambda: module.load_state_dict(torch.load("net.pt", mmap=True)),
    ):
        nn.init.zeros_(module.scale)
        engine.reset_counters()
        meetings = engine.communicator.rendezvous.meetings
        load()
        assert not engine.report().calls and engine.communicator.rendezvous.meetings == meetings, (
            "no rank asks another for anything"
        )
        same_tensors(engine.full_state_dict(), expected, bound=0)
    engine.close()
    same_tensors(module.state_dict(), expected, bound=0)


@STAGES
def test_a_sharded_module_is_loaded_without_communication(run_on, stage):
    run_on(2, live, stage=stage)


def mapped(stage):
    """The result of other ways of loading: parameters whose memory is mapped from a file."""
    make_files()
    state = torch.load("net.pt", mmap=True)
    for case in ("torch", "safetensors", "written", "differ", "rank 0"):
        expected = {name: value.clone() for name, value in state.items()}
        module = on_meta()
        if case == "safetensors":
            module.load_state_dict(safetensors.torch.load_file("net.safetensors"), assign=True, strict=False)
            module.head.weight = module.embed.weight
        elif case != "rank 0" or rank() == 0:
            module.load_state_dict(torch.load("net.pt", mmap=True), assign=True)
            module.head.weight = module.embed.weight
        with torch.no_grad():
            if case == "written" and rank() == 0:
                module.blocks[0][0].weight.mul_(2)
            if case == "written":
                expected["blocks.0.0.weight"].mul_(2)
            if case == "differ" and rank() == 1:
                torch.save({name: value + 1 for name, value in state.items()}, "theirs.pt")
                module.load_state_dict(torch.load("theirs.pt", mmap=True), assign=True)
                module.head.weight = module.embed.weight
        Engine(module, stage=stage).close()
        same_tensors(module.state_dict(), expected, bound=0)


@pytest.mark.exhaustive(but=1)
@STAGES
def test_parameters_mapped_from_files_are_those_of_rank_0(run_on, stage):
    run_on(2, mapped, stage=stage)


def does_not_fit():
    make_files()
    state = torch.load("net.pt")
    del state["scale"], state["blocks.0.0.bias"]
    state["extra"] = torch.ones(1)
    torch.save(state, "wrong.pt")
    wrong = (
        r'^wrong.pt does not fit\. Nothing was loaded\. (?s:.*) for Net:(?s:.*): "scale", "blocks.0.0.bias"\.(?s:.*)'
        r'Unexpected key\(s\) in state_dict: "extra"\.'
    )
    module, sharded = on_meta(), Net()
    ordinary = Net()
    before = {name: value.clone() for name, value in ordinary.state_dict().items()}
    engine = Engine(sharded)
    for each in (module, ordinary, sharded):
        with pytest.raises(ValueError, match=wrong):
            load_weights(each, "wrong.pt")
    assert all(parameter.device.type == "meta" for parameter in module.parameters())
    same_tensors(ordinary.state_dict(), before, bound=0)
    for each in (ordinary, sharded):
        missing, unexpected = load_weights(each, "wrong.pt", strict=False)
        assert set(missing) == {"scale", "blocks.0.0.bias"} and unexpected == ["extra"]
    engine.close()
    with values_may_wait():
        load_weights(module, "wrong.pt", strict=False)
    Engine(module).close()
    assert module.scale == 1.5, "what the file lacks is initialised"
    assert torch.equal(module.embed.weight, state["embed.weight"])

    state["embed.weight"] = torch.ones(8, 5)
    del state["head.weight"]
    torch.save(state, "wrong.pt")
    with pytest.raises(ValueError, match=r"size mismatch for embed.weight: .*\[8, 5\].*\[7, 5\]"):
        load_weights(ordinary, "wrong.pt")
    with pytest.raises(ValueError, match=r"^wrong.pt does not fit\. Nothing was loaded\. (?s:.*)size mismatch"):
        load_weights(ordinary, "wrong.pt", strict=False)
    with pytest.raises(FileNotFoundError, match="nowhere.pt does not exist: load_weights takes a weights file"):
        load_weights(ordinary, "nowhere.pt")
    with pytest.raises(FileNotFoundError, match="^. has no weights: it must contain one of model.safetensors, "):
        load_weights(ordinary, ".")
    torch.save({f"model.{name}": value for name, value in before.items()}, "prefixed.pt")
    with pytest.raises(ValueError, match=r"Nothing was loaded\.(?s:.*)Unexpected key\(s\) in state_dict: \"model\."):
        load_weights(ordinary, "prefixed.pt")
    with pytest.raises(ValueError, match="no names in common: load the file into the module"):
        load_weights(ordinary, "prefixed.pt", strict=False)
    torch.save([1, 2], "list.pt")
    for name, content in (("none.pt", ""), ("text.pt", "hello"), ("lfs.safetensors", "version 1"), ("i.json", "{}")):
        Path(name).write_text(content)
    for name in ("none.pt", "text.pt", "lfs.safetensors", "i.json", "list.pt"):
        with pytest.raises(ValueError, match=rf"^{name} \(\d+ bytes\) cannot be read as weights: \w+Error"):
            load_weights(ordinary, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(
            ModuleNotFoundError, match=r"safetensors is missing: pip install 'lightning_zero\[weights\]'"
        ):
            load_weights(ordinary, "net.safetensors")


def test_weights_that_do_not_fit_are_refused_by_name_before_anything_is_changed(run_on):
    run_on(2, does_not_fit)


def derive(net):
    net.blocks[1][0].weight = nn.Parameter(net.blocks[1][0].weight.detach() * 2)


def write_through_data(net):
    net.blocks[1][0].weight.data[0] = 7.0


USES = [
    lambda net: net.blocks[1][0].reset_parameters(),
    lambda net: nn.init.zeros_(net.blocks[1][0].weight),
    lambda net: net.blocks[1].load_state_dict(net.blocks[0].state_dict()),
    lambda net: net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}),
    lambda net: setattr(net, "norm", nn.Parameter(net.blocks[0][0].weight.norm())),
    lambda net: nn.utils.parametrizations.weight_norm(net.blocks[0][0]),
    lambda net: net.to("cpu"),
    derive,
    write_through_data,
]


def use_before_it_is_cut(stage):
    make_files()
    for use in USES:
        results = []
        for wait in (False, True):
            net = on_meta()
            with values_may_wait() if wait else nullcontext():
                load_weights(net, "net.pt")
            torch.manual_seed(0)
            use(net)
            results.append(net)
        Engine(results[1], stage=stage).close()
        same_tensors(results[1].state_dict(), results[0].state_dict(), bound=0)

    net = on_meta()
    with values_may_wait():
        load_weights(net, "net.pt")
    torch.optim.AdamW([p for p in net.parameters() if p.ndim > 1 and p.requires_grad], fused=True)
    copy.deepcopy(net.double().float())
    assert all(isinstance(parameter, LazyTensor) for parameter in net.parameters()), "that needs no values"


@pytest.mark.exhaustive(but=1)
@STAGES
@pytest.mark.behaviour(
    "The module", "Weights of a file that has not been read yet can be read, written and reparametrised"
)
def test_deferred_values_are_available_to_user_code(run_on, stage):
    run_on(2, use_before_it_is_cut, stage=stage)


def of_transformers(stage):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = LlamaForCausalLM(config)
    folder = [os.path.abspath("llama")]
    dist.broadcast_object_list(folder)  # transformers writes on rank 0 only
    eager.save_pretrained(folder[0])
    dist.barrier()
    with parameters_await_values(only_on_meta=True), torch.device("meta"):
        model = LlamaForCausalLM(config)
    with values_may_wait():
        load_weights(model, folder[0])
    ready_made = LlamaForCausalLM.from_pretrained(folder[0])
    for module in (model, ready_made):
        engine = Engine(module, stage=stage)
        calls = engine.report().calls["control"]
        assert module is ready_made or calls <= 4, "buffers, and where some are new the state of a generator"
        assert isinstance(module.lm_head.weight, ShardedTensor)
        engine.close()
        same_tensors(module.state_dict(), dict(eager.state_dict()), bound=0)
        same_tensors(dict(module.named_buffers()), dict(eager.named_buffers()), bound=0)
        assert module.lm_head.weight is module.get_input_embeddings().weight


def test_files_of_save_pretrained_are_read_by_each_rank_and_from_pretrained_by_rank_0(run_on):
    run_on(2, of_transformers, stage=3)


def lightning_checkpoint_of_a_gpt():
    torch.manual_seed(0)
    expected = GPT(16, 2, 2, 8, tied=True)
    torch.save(expected.state_dict(), "gpt.pt")
    with parameters_await_values(only_on_meta=True), torch.device("meta"):
        module = GPT(16, 2, 2, 8, tied=True)
    with values_may_wait():
        load_weights(module, "gpt.pt")
    Engine(module.bfloat16(), stage=3).close()  # as Trainer(precision="bf16-true") does: nothing is read for it
    same_tensors(module.state_dict(), expected.bfloat16().state_dict(), bound=0)


def test_deferred_values_are_converted_as_they_are_read(run_on):
    run_on(2, lightning_checkpoint_of_a_gpt)
