"""Memory of quantised layers at stage 3: a rank has its share of the codes, and the scales."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import full_grad, load_weights
from lightning_zero.checkpoint.fitting import load_module
from lightning_zero.engine import Engine, ShardedTensor
from lightning_zero.engine.init.deferred_param import values_may_wait
from lightning_zero.engine.init.quantised_layers import quantised_layers
from tests.support import world_size
from tests.support.training import same_values

WIDTH, DEPTH = 512, 4
NUMEL = DEPTH * WIDTH * WIDTH
TABLES = 4 * (16 + 256 + 1)  # bytes of a layer's codebooks and offset
SCALES = {
    "nf4": NUMEL / 64 + 4 * NUMEL / (64 * 256) + DEPTH * TABLES,  # quantised in blocks of 256
    "single": 4 * NUMEL / 64 + DEPTH * 4 * 16,
    "int8": 4 * DEPTH * WIDTH,
}
CODES = {"nf4": NUMEL / 2, "single": NUMEL / 2, "int8": NUMEL}


def quantised(kind: str) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if kind == "int8":
        return Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    return Linear4bit(WIDTH, WIDTH, bias=False, quant_type="nf4", compress_statistics=kind != "single")


def tensors() -> int:
    """Bytes of the memory of all tensors in this process."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, ShardedTensor)]
    storages = [each.untyped_storage() for each in found if each.device.type == "cpu"]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def hold(kind: str) -> None:
    quantised(kind).to("cpu")  # makes tables that bitsandbytes keeps
    before = tensors()
    module = nn.Sequential(*(quantised(kind) for _ in range(DEPTH)), nn.Linear(WIDTH, 2))
    engine = Engine(module, [torch.optim.SGD(module[-1].parameters())], stage=3, unit_numel=0)
    expected = CODES[kind] / world_size() + SCALES[kind] + 4 * 2 * (WIDTH + 1) / world_size()
    for _ in range(2):
        held = tensors() - before
        assert expected <= held <= 1.02 * expected, f"{held} instead of {expected}"
        held = engine.report().at_rest["parameters"]
        assert expected <= held <= 1.02 * expected, f"{held} instead of {expected}"
        module(torch.randn(3, WIDTH)).sum().backward()
        module.zero_grad()
    copy.deepcopy(module)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", CODES)
def test_a_rank_holds_its_share_of_the_codes_and_all_scales(run_on, kind, ranks):
    run_on(ranks, hold, kind=kind)


class Net(nn.Module):
    """Its head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x)))


def choose() -> None:
    torch.manual_seed(0)
    expected, tokens = Net(), torch.arange(32)
    torch.save(expected.state_dict(), "net.pt")
    logits = expected(tokens)
    for dtype, wait in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        with torch.device("meta"):
            module = Net().to(dtype)
        with values_may_wait() if wait else nullcontext():
            load_weights(module, "net.pt", quantize="nf4")
        assert [type(layer).__name__ for layer in module.children()] == ["Embedding", "Linear4bit", "Linear"]
        assert module.head.weight is module.embed.weight and not module.inner.weight.requires_grad
        if wait:
            module = copy.deepcopy(module)
            engine = Engine(module, [torch.optim.SGD([module.embed.weight])], stage=3)
            assert engine.report().calls["control"] <= 3, "a file is read by all: no codes are broadcast"
        found = module(tokens)
        assert module.inner.weight.quant_state.dtype == dtype
        assert (found.float() - logits).norm() < 0.2 * logits.norm()
    with pytest.raises(ValueError, match=r"^quantize='nf5' is unknown: write one of 'nf4', 'fp4', 'int8'"):
        load_weights(Net(), "net.pt", quantize="nf5")
    with pytest.raises(ValueError, match=r"Embedding contains no nn\.Linear to replace"):
        torch.save(nn.Embedding(32, 64).state_dict(), "embedding.pt")
        load_weights(nn.Embedding(32, 64), "embedding.pt", quantize="nf4")
    module = Net()
    with pytest.raises(ValueError, match="Nothing was loaded"):
        load_weights(module.inner, "net.pt", quantize="nf4")
    module.again = module.inner
    module.new = nn.Linear(64, 2)
    module.other = nn.Linear(64, 64)
    torch.save({name: p for name, p in module.state_dict().items() if not name.startswith("new")}, "more.pt")
    load_weights(module, "more.pt", quantize="nf4", strict=False)
    kinds = {name: type(layer).__name__ for name, layer in module.named_modules(remove_duplicate=False)}
    assert kinds["other"] == "Linear4bit", "the only layer that is in the file, under one name and untied"
    assert kinds["new"] == kinds["inner"] == "Linear" and module.again is module.inner


def test_linear_layers_but_no_heads_are_quantised(run_on):
    run_on(2, choose)


def evaluate_before_and_between() -> None:
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")).to(
        "cpu"
    )
    x, layer = torch.randn(3, 64), module[1]
    packs, expected = layer.support_avx512bf16_for_cpu, module(x)
    with torch.no_grad():
        module.eval()(x)  # on CPUs with AVX512-BF16, replaces the codes and rounds the scales to bf16
    engine = Engine(module, [torch.optim.SGD(module[0].parameters())], stage=3)
    for _ in range(2):
        found = module.train()(x)
        assert (found - expected).norm() < 0.01 * expected.norm()
        found.sum().backward()
        assert full_grad(module[0].weight).norm() > 0, "without the engine, no gradients would flow through the layer"
        with torch.no_grad():
            module.eval()(x)
        assert layer.weight.shape == (64 * 64 // 2, 1)
    engine.close()
    assert layer.support_avx512bf16_for_cpu == packs


def test_evaluation_leaves_codes_in_the_layout_through_which_gradients_flow(run_on):
    run_on(2, evaluate_before_and_between)


def load_without_scales(kind: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(quantised(kind).to("cpu"), nn.Linear(WIDTH, 2))
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    scales = [name for name in saved if name.startswith("0.") and name not in ("0.weight", "0.weight_format")]
    engine = Engine(module, [torch.optim.SGD(module[1].parameters())], stage=3)
    changed = {name: value + 1 if name.startswith("1.") else value for name, value in saved.items()}
    before = dict(engine.full_state_dict())
    for missing in [scales, *([name] for name in scales)]:
        state = {name: value for name, value in changed.items() if name not in missing}
        with pytest.raises(ValueError, match=rf"not the scales, of the quantised layer '0' \({missing[0]}.* missing"):
            load_module(module, state, strict=False)
        torch.save(state, "partial.pt")
        with pytest.raises(ValueError, match="Nothing was loaded"):
            load_weights(module, "partial.pt", strict=False)
    same_values(dict(engine.full_state_dict()), before, "the module")
    load_module(module, changed, strict=True)
    same_values(dict(engine.full_state_dict()), changed, "the module")
    engine.close()


@pytest.mark.parametrize("kind", CODES)
def test_weights_without_all_of_their_scales_are_refused_before_anything_is_loaded(run_on, kind):
    run_on(2, load_without_scales, kind=kind)


def load_into_constructed_layers(kind: str) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2))
    torch.save(source.state_dict(), "linear.pt")
    x = torch.randn(3, WIDTH)
    expected = source(x)
    for wait in (True, False):
        with torch.device("meta"):
            module = nn.Sequential(quantised(kind), nn.Linear(WIDTH, 2))
        with values_may_wait() if wait else nullcontext():
            load_weights(module, "linear.pt")
        engine = Engine(module, [torch.optim.SGD(module[1].parameters())], stage=3)
        assert not module[0].weight.is_floating_point()
        assert (module(x) - expected).norm() < 0.2 * expected.norm()
        engine.close()


@pytest.mark.parametrize("kind", CODES)
def test_layers_that_were_constructed_on_the_meta_device_are_quantised_when_they_are_loaded(run_on, kind):
    run_on(2, load_into_constructed_layers, kind=kind)


def quantise_values(kind: str) -> None:
    """Layers with values that have not been moved, as a LightningModule's constructor makes them."""
    torch.manual_seed(0)
    module = quantised(kind)
    x = torch.randn(3, WIDTH)
    expected = copy.deepcopy(module).to("cpu")
    engine = Engine(module, stage=3, device="cpu")
    assert not module.weight.is_floating_point()
    same_values(module(x), expected(x), "outputs")
    engine.close()
    same_values(module(x), expected(x), "outputs after the end")


@pytest.mark.parametrize("kind", CODES)
def test_layers_with_values_are_quantised_by_the_engine(run_on, kind):
    run_on(2, quantise_values, kind=kind)


class Counted(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight


def test_parametrised_weights_are_not_computed_to_find_quantised_layers():
    layer, counted = nn.Linear(2, 2), Counted()
    nn.utils.parametrize.register_parametrization(layer, "weight", counted)
    before = counted.calls
    assert not list(quantised_layers(nn.Sequential(layer))) and counted.calls == before
