"""Values that a project writes to tensors on the meta device are recorded, and never lost silently."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine, ShardedTensor
from lightning_zero.engine.init.deferred_param import parameters_await_values
from tests.fabric.training import make_fabric, weights
from tests.support import rank
from tests.support.trainer import Learner, make_trainer


class Initialises(nn.Module):
    """Applies its own initialisation to all its modules, at the end of the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 5.0)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm1d):
            nn.init.constant_(module.running_mean, 0.25)


class ScalesAfterwards(Initialises):
    """Like GPT-2, which then draws the weights of layers before a residual connection again."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.layers[2].weight, std=0.02)


class AsResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")


class FillsABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_var.fill_(0.5)


class Own(nn.Parameter):
    """A project's own class of parameters, with an operator that nothing can record."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class OfAnOwnClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = Own(torch.empty(4, 4))
        nn.init.constant_(self.weight, 2.0)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.layer.bias)


class Unused(nn.Module):
    """Has an ``_init_weights`` that nothing calls, and another initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 7.0)
            nn.init.constant_(module.bias, 7.0)


class InitialisedByHand(Unused):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.layer.weight, std=0.5)
        nn.init.zeros_(self.layer.bias)


class PartOfATable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)
        with torch.no_grad():
            self.table.weight[2] = 1.0


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head.weight = self.table.weight
        nn.init.normal_(self.head.weight, std=0.02)


def made_on_meta(make):
    """A module made as in ``configure_model``."""
    with parameters_await_values(only_on_meta=True), torch.device("meta"):
        return make()


def refused(stage: int) -> None:
    message = "written to on the meta device, where writes are recorded only within"
    with torch.device("meta"):
        module = FillsABuffer()
    names = "norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked"
    with pytest.raises(ValueError, match=f"^{names}: {message}"):
        Engine(module, stage=stage)
    assert not any(isinstance(parameter, ShardedTensor) for parameter in module.parameters())
    with torch.device("meta"):
        loaded = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nothing is copied
        if rank() == 0:
            loaded.load_state_dict(nn.Linear(2, 2).state_dict())
    with pytest.raises(ValueError, match=f"^weight, bias: {message}"):
        Engine(loaded, stage=stage)
    with pytest.raises(ValueError, match=f"^weight: {message}"):
        Engine(made_on_meta(OfAnOwnClass), stage=stage)


class Bare(nn.Module):
    """Its constructor writes to its tensors on the given rank alone."""

    def __init__(self, writes_on: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        if rank() == writes_on:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def written_on_one_rank() -> None:
    with torch.device("meta"):
        modules = [Bare(0), Bare(1)]
    with pytest.raises(ValueError, match=r"^weight: written to .* for an Engine within .*parameters_await_values\(\)"):
        Engine(modules[0], stage=3)
    Engine(modules[1], stage=3).close()
    assert (modules[1].weight == 1).all()


def test_writes_on_rank_0_alone_are_refused_on_every_rank(run_on):
    run_on(2, written_on_one_rank)


class WritesItsRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.full((4, 4), 1.0 + rank(), device="cpu"))
            self.layer.weight[1].mul_(2)
            self.norm.running_mean.copy_(torch.full((3,), 1.0 + rank(), device="cpu"))


def written_differently(stage: int) -> None:
    module = made_on_meta(WritesItsRank)
    engine = Engine(module, stage=stage)
    weight = module.layer.weight + 0
    assert weight[1].eq(2).all() and weight[[0, 2, 3]].eq(1).all(), weight
    assert module.norm.running_mean.eq(1).all()
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_of_writes_that_differ_between_ranks_those_of_rank_0_count(run_on, stage):
    run_on(2, written_differently, stage=stage)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.behaviour("The module", "Values written to a module on the meta device are repeated, or refused by name")
def test_values_that_were_not_recorded_are_refused_on_every_rank(run_on, stage):
    run_on(2, refused, stage=stage)


class Twice(nn.Linear):
    """As LoRA layers do, the constructor calls ``reset_parameters`` after the one of the base class has done so."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factor = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 3.0)
        nn.init.zeros_(self.bias)
        if hasattr(self, "factor"):
            nn.init.ones_(self.factor)


class Nested(Initialises):
    """Initialises modules that an inner model has initialised by another method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Initialises()
        self.head = nn.Linear(4, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 6.0)
            nn.init.ones_(module.bias)


class Cloned(Initialises):
    """torch's encoder copies its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
        self.apply(self._init_weights)


class Tied(Initialises):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(4, 4), nn.Embedding(4, 4)
        self.table.weight = self.head.weight
        self.apply(self._init_weights)


class ByAnother(nn.Module):
    """Calls another module's method, as scripts of litgpt do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Unused()
        self.net.apply(self.net._init_weights)


class DrawsFromTheCpu(nn.Module):
    """Its initialiser cannot run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.layer.weight, 1.0 + torch.zeros(()).item())


class Mask(nn.Module):
    """Buffers of types without a spare value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.empty(3, 3, dtype=torch.bool))
        self.register_buffer("codes", torch.empty(3, dtype=torch.uint8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.mask.copy_(torch.ones(3, 3, dtype=torch.bool, device=self.mask.device).tril())
        self.codes.zero_()


ORDINARY = [Initialises, Twice, Nested, Cloned, Tied, Unused, ByAnother, DrawsFromTheCpu, Mask]


def initialised(stage: int) -> None:
    for make in ORDINARY:
        torch.manual_seed(0)
        expected = make()
        module = made_on_meta(make)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as shown:
            engine = Engine(module, stage=stage)
        assert not shown or torch.equal(before, torch.get_rng_state()), make
        engine.close()
        if make is DrawsFromTheCpu:
            assert (module.layer.weight == 1).all()
        else:
            found = module.state_dict()
            for name, value in expected.state_dict().items():
                constant = value.unique().numel() < 3
                assert torch.equal(found[name], value) if constant else found[name].std() > 0, (make, name)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_ordinary_modules_have_the_values_of_ordinary_construction(run_on, stage):
    run_on(2, initialised, stage=stage)


def torch_layers() -> None:
    """Every module of torch that can be made from small sizes."""
    checked = 0
    for name in dir(nn):
        cls = getattr(nn, name)
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or "Lazy" in name or name == "SyncBatchNorm":
            continue
        for arguments in ((4, 4, 2), (4, 2, 8), (4, 4), (4, 2), (4,)):
            try:
                module = made_on_meta(lambda: cls(*arguments))
            except Exception:
                continue
            if any(True for _ in module.parameters()):
                Engine(module).close()
                checked += 1
                break
    assert checked > 25


def test_torchs_own_layers_are_accepted(run_on):
    run_on(1, torch_layers)


def transformers_models() -> None:
    import transformers as t

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text, image = small | {"vocab_size": 20}, small | {"image_size": 16, "patch_size": 8}
    models = [
        lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20)),
        lambda: t.BertForMaskedLM(t.BertConfig(**text)),
        lambda: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=2, num_key_value_heads=2, **text)),
        lambda: t.T5ForConditionalGeneration(t.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, vocab_size=20)),
        lambda: t.MambaForCausalLM(t.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=20, state_size=4)),
        lambda: t.ViTForImageClassification(t.ViTConfig(**image)),
        lambda: t.ResNetForImageClassification(t.ResNetConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])),
    ]
    for make in models:
        expected = make().state_dict()
        model = made_on_meta(make)
        Engine(model).close()
        for name, found in model.state_dict().items():
            if found.is_floating_point() and found.numel() > 100:
                spread = expected[name].std()
                assert 0.6 * spread <= found.std() <= 1.6 * spread, (type(model).__name__, name)


@pytest.mark.exhaustive
def test_transformers_models_are_accepted(run_on):
    run_on(1, transformers_models)


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.ones(3, 3).tril().bool())
        self.register_buffer("codes", torch.arange(3).to(torch.uint8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def buffers_without_values() -> None:
    module = made_on_meta(Careless)
    with pytest.raises(RuntimeError, match="^mask, codes: still without values"):
        Engine(module)


def test_boolean_and_byte_buffers_without_values_are_refused(run_on):
    run_on(1, buffers_without_values)


class Outside(Learner):
    def __init__(self, device: str) -> None:
        super().__init__(model=nn.Identity, batches=2)
        with torch.device(device):
            self.model = ScalesAfterwards()


def in_trainer_and_fabric() -> None:
    message = r"layers.2.weight.*recorded only within configure_model\(\) and init_module\(\). Create the module there"
    for stage in (1, 3):
        with pytest.raises(ValueError, match=message):
            make_trainer(f"zero{stage}").fit(Outside("meta"))
        fabric = make_fabric(f"zero{stage}")
        with torch.device("meta"):
            net = ScalesAfterwards()
        with pytest.raises(ValueError, match=message):
            fabric.setup_module(net)


def test_a_module_made_outside_of_configure_model_and_init_module_is_refused_with_advice(run_on):
    run_on(2, in_trainer_and_fabric)


class Plain(nn.Parameter):
    """A project's own class of parameters, which only marks them."""


class Marked(Unused):
    """Recorded writes show which initialisers have run, also if they write through ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight = Plain(torch.empty(4, 4))
        self.layer.weight.gain = 2.0
        self.layer.weight.data.normal_(0.0, 1 / math.sqrt(4.0))
        self.inner, self.head = Initialises(), nn.Linear(4, 4)
        nn.init.constant_(self.head.weight, 3.0)


class Replaced(Initialises):
    """Gives a model a new head, which the model's method does not initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Linear(4, 4)


RECORDED = (Marked, Nested, Replaced, Unused, Cloned, Tied, ByAnother, FillsABuffer, PartOfATable, AsResNet)
RECORDED += (ScalesAfterwards, InitialisedByHand, TiedByHand)


def recorded() -> None:
    for make in RECORDED:
        torch.manual_seed(0)
        expected = make().state_dict()
        for stage in (1, 3):
            fabric = make_fabric(f"zero{stage}")
            with fabric.init_module(), torch.device("meta"):
                net = make()
            found = weights(fabric.setup_module(net))
            for name, value in expected.items():
                constant = value.unique().numel() < 3
                assert torch.equal(found[name], value) if constant else (found[name].unique().numel() > 2), (make, name)
        if make is Marked:
            assert type(net.layer.weight).__name__ == "Plain" and net.layer.weight.gain == 2.0
            assert found["layer.weight"].std() > 0.3


def test_recorded_writes_and_initialisers_have_the_values_of_ordinary_construction(run_on):
    run_on(2, recorded)
