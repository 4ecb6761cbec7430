"""Modules created on the meta device are materialised unit by unit, with the values of ordinary construction."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine, ShardedTensor
from lightning_zero.engine.init.deferred_param import is_on_meta, parameters_await_values
from lightning_zero.engine.init.materialise import Materialiser
from lightning_zero.zoo.gpt import GPT
from tests.support import rank
from tests.support.training import same_tensors

on_meta = partial(parameters_await_values, only_on_meta=True)
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def layers():
    """One unit for each kind of torch layer that initialises itself."""
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(4, 5, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.Embedding(3, 4, padding_idx=0),
        nn.Conv2d(2, 3, 3),
        nn.GroupNorm(1, 2),
        nn.Bilinear(2, 3, 4),
    )


def untied():
    return GPT(16, 2, 2, 8)


def tied():
    """Its own reset_parameters writes to the units inside it, and to a parameter that two modules share."""
    return GPT(16, 2, 2, 8, tied=True)


MODELS = {"layers": layers, "GPT": untied, "tied GPT": tied}


def construct(stage):
    for name, make in MODELS.items():
        torch.manual_seed(0)
        expected = {key: value.clone() for key, value in make().state_dict().items()}
        drawn_by_rank_0 = torch.get_rng_state()
        torch.manual_seed(rank())  # each rank would draw different numbers: rank 0's are used
        before = torch.get_rng_state()
        with on_meta(), torch.device("meta"):
            module = make()
        parameters = list(module.parameters())
        engine = Engine(module, [torch.optim.AdamW(parameters, fused=True)], stage=stage)
        assert all(now is then for now, then in zip(module.parameters(), parameters, strict=True)), name
        assert all(isinstance(parameter, ShardedTensor) for parameter in parameters), name
        if "tied" not in name:  # a tied weight is drawn once, or twice if it is tied after its construction
            assert torch.equal(torch.get_rng_state(), drawn_by_rank_0 if rank() == 0 else before), name
        engine.close()
        same_tensors(module.state_dict(), expected, bound=0)
        assert name != "tied GPT" or module.head.weight is module.embedding.weight


@STAGES
@pytest.mark.behaviour("The module", "A module made on the meta device is initialised as in ordinary construction")
def test_values_on_two_ranks_equal_those_of_ordinary_construction_on_rank_0(run_on, stage):
    run_on(2, construct, stage=stage)


def test_values_on_one_rank_equal_those_of_ordinary_construction(run_on):
    run_on(1, construct, stage=3)


class Counted(nn.Module):
    """Records how many new parameters are in memory when it is initialised."""

    whole: list[int] = []

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(100))

    def reset_parameters(self):
        self.weight.fill_(float(len(self.whole)))
        self.whole.append(sum(len(each._rooms) for each in materialisers))

    def forward(self, x):
        return x * self.weight


materialisers: list[Materialiser] = []


def one_at_a_time():
    Counted.whole.clear()
    with on_meta(), torch.device("meta"):
        module = nn.Sequential(*(Counted() for _ in range(4)))
    made = Materialiser.__init__

    def remember(self, *args, **options):
        made(self, *args, **options)
        materialisers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Materialiser, "__init__", remember)
        engine = Engine(module, stage=3, unit_numel=0)
    assert Counted.whole == [1, 1, 1, 1], "parameters that are in memory while the next is filled"
    engine.close()
    assert [layer.weight[0].item() for layer in module] == [0, 1, 2, 3]


def test_only_one_unit_is_whole_at_a_time(run_on):
    run_on(2, one_at_a_time)


class Parent(nn.Module):
    """Variants of ``reset_parameters`` in projects: replace, write through data, initialise a child's parameters."""

    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.empty(3))

    def __init__(self):
        super().__init__()
        self.child = self.Child()
        self.replaced = nn.Parameter(torch.empty(2))
        self.through_data = nn.Parameter(torch.empty(2))
        self.frozen = nn.Parameter(torch.empty(2), requires_grad=False)
        self.register_buffer("table", torch.empty(4), persistent=False)

    def reset_parameters(self):
        self.replaced = nn.Parameter(torch.full((2,), 1.0))
        self.through_data.data.fill_(2.0)
        nn.init.constant_(self.child.own, 3.0)
        self.frozen.fill_(4.0)
        self.table = torch.arange(4.0)


def a_projects_own(stage):
    with on_meta(), torch.device("meta"):
        module = nn.Sequential(Parent(), Parent(), nn.Linear(2, 2))
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.5, initial_accumulator_value=0.25)
    engine = Engine(module, [optimizer], stage=stage)
    for parent in module[:2]:
        for name, value in {"replaced": 1, "through_data": 2, "child.own": 3, "frozen": 4}.items():
            parameter = parent.get_parameter(name)
            assert torch.equal(parameter.detach().clone(), torch.full(parameter.shape, float(value))), name
        assert torch.equal(parent.table, torch.arange(4.0)) and not parent.frozen.requires_grad
    state = engine.full_optimizer_state_dict(optimizer)["state"]
    assert all(torch.equal(s["sum"], torch.full_like(s["sum"], 0.25)) for s in state.values()) and state
    engine.close()


@STAGES
def test_custom_reset_parameters_and_adagrads_initial_accumulator_value_take_effect(run_on, stage):
    run_on(2, a_projects_own, stage=stage)


class Model(nn.Module):
    """Initialises each of its modules, as transformers, timm and minGPT do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.empty(2))
        self.apply(self._init_weights)

    def forward(self, x):
        return self.scale * self.second(self.first(x))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 5.0)
        elif isinstance(module, Model):
            nn.init.constant_(module.scale, 6.0)


def by_a_model(stage):
    with on_meta(), torch.device("meta"):
        module = nn.Sequential(Model(), nn.Linear(2, 2))
    engine = Engine(module, stage=stage, units=[Model])
    assert (module[0].first.weight == 5).all() and (module[0].scale == 6).all() and not (module[1].weight == 5).any()
    engine.close()


def partly(stage):
    """The head is new, and the backbone keeps its values even if one module initialises both."""
    torch.manual_seed(rank())
    module = untied()
    with on_meta(), torch.device("meta"):
        module.head = nn.Linear(16, 7)
        module.norm.bias = nn.Parameter(module.norm.bias.to("meta"))
    values = {name: p.detach().clone() for name, p in module.named_parameters() if not is_on_meta(p)}
    engine = Engine(module, stage=stage)
    engine.close()
    assert module.head.weight.std() > 0 and (module.norm.bias == 0).all()
    if rank() == 0:
        same_tensors({name: module.get_parameter(name).detach() for name in values}, values, bound=0)


def rank_0_has_the_values(stage):
    torch.manual_seed(0)
    expected = layers().state_dict()
    torch.manual_seed(0)
    with torch.device("cpu" if rank() == 0 else "meta"):
        module = layers()
    Engine(module, stage=stage).close()
    same_tensors(module.state_dict(), expected, bound=0)


def other_cases(stage):
    by_a_model(stage)
    partly(stage)
    rank_0_has_the_values(stage)


@STAGES
def test_init_weights_new_heads_and_values_on_rank_0_only_are_supported(run_on, stage):
    run_on(2, other_cases, stage=stage)


class Forgetful(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


def refused():
    with on_meta(), torch.device("meta"):
        half = layers()
    if rank() == 1:
        half[0].to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=r"0.weight, 0.bias: on the meta device on rank 0, but with values on rank\(s\) \[1\]"
    ):
        Engine(half)
    assert not any(isinstance(parameter, ShardedTensor) for parameter in half.parameters())

    different = nn.Linear(3, 2 + rank())
    with pytest.raises(ValueError, match=r"differs between ranks: weight is \(2, 3\) in .* \(3, 3\) in .* on rank 1"):
        Engine(different)

    with on_meta(), torch.device("meta"):
        forgetful = nn.Sequential(nn.Linear(2, 2), Forgetful(2, 2))
    with pytest.raises(RuntimeError, match=r"^1.bias: still without values after every module was initialised"):
        Engine(forgetful)


def test_ranks_that_disagree_and_modules_that_forget_a_parameter_are_refused_on_every_rank(run_on):
    run_on(2, refused)


def adapters(stage):
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    torch.manual_seed(0)
    eager = LlamaForCausalLM(config)
    with on_meta(), torch.device("meta"):
        model = LlamaForCausalLM(config)
    with on_meta():
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    engine = Engine(model, stage=stage)
    engine.close()
    found, expected = dict(model.base_model.model.named_buffers()), dict(eager.named_buffers())
    same_tensors(found, expected, bound=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "lora_A" not in name and parameter.numel() > 100:
            assert 0.015 < parameter.std() < 0.025, f"{name}: transformers draw from a normal distribution of 0.02"


def test_transformers_models_and_peft_adapters_are_initialised_as_by_their_libraries(run_on):
    run_on(2, adapters, stage=3)
