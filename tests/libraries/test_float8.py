"""torchao's float8 training, emulated on the CPU: computed as under DDP, and gathered in 8 bits as under FSDP2."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero.engine import Engine, ShardedTensor
from lightning_zero.engine.init.deferred_param import values_may_wait
from lightning_zero.engine.init.sources import check_float8
from tests.fabric.training import make_fabric, same_as_under_ddp, set_up, weights
from tests.fabric.training import train as train_with_fabric
from tests.support import rank, world_size
from tests.support.models import CLASSES, VOCABULARY, Square, adam
from tests.support.trainer import Learner, fit
from tests.support.training import Recipe, batch, prepare, same_runs, same_tensors, train_ddp, train_zero
from tests.trainer.cases import shared_folder

float8 = pytest.importorskip("torchao.float8")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
KINDS = pytest.mark.parametrize("kind", ["gathered", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
"""torchao's recipes; "gathered": tensor-wise, with weights gathered in float8."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Text(nn.Module):
    """Three blocks between an embedding and a head, which stay in fp32; returns the loss of the targets."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


def converted(kind="tensorwise", model=Text, compiles=False):
    """A model whose blocks compute in float8."""
    gathers = kind == "gathered"
    config = float8.Float8LinearConfig.from_recipe_name("tensorwise" if gathers else kind)
    config = replace(config, emulate=True, enable_fsdp_float8_all_gather=gathers)
    made = model()
    blocks = made.layers if hasattr(made, "layers") else made.blocks
    float8.convert_to_float8_training(blocks, config=config)
    for block in blocks if compiles else ():
        block.compile(backend="aot_eager")
    return made


def is_block(name, module):
    return isinstance(module, Block)


# ---------------------------------------------------------------------------------------------- computed in float8


class Configured(Learner):
    """Makes its model in ``configure_model``, on the meta device unless ``device`` is another."""

    def __init__(self, device="meta", **options):
        super().__init__(model=nn.Identity, batches=3)
        self.device_of_model, self.options = device, options

    def configure_model(self):
        if isinstance(self.model, nn.Identity):
            with torch.device(self.device_of_model):
                self.model = converted(**self.options)


def reference_of(kind):
    """Without a gather, the layers cast the whole weight to the same codes."""
    return "tensorwise" if kind == "gathered" else kind


def trainer_learns(stage, kind):
    """An interrupted run equals DDP's uninterrupted one, whether its file is loaded at this stage or under DDP."""
    warnings.simplefilter("ignore")
    ordinary, on_meta = (partial(Configured, "cpu", kind=reference_of(kind)), partial(Configured, "meta", kind=kind))
    reference = fit("ddp", ordinary)
    path = shared_folder() / "half.ckpt"
    keep = ModelCheckpoint(dirpath=path.parent, filename="half", every_n_epochs=1)
    half = fit(f"zero{stage}", on_meta, callbacks=[keep], max_epochs=1, enable_checkpointing=True)
    rest = fit(f"zero{stage}", on_meta, ckpt_path=path)
    same_runs(replace(rest, losses=half.losses + rest.losses), reference)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    under_ddp = fit("ddp", ordinary, ckpt_path=path)
    same_runs(under_ddp, replace(reference, losses=reference.losses[3:]))


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "torchao's float8 training, made on the meta device, saved and resumed")
@KINDS
@STAGES
def test_a_trainer_learns_and_resumes_in_float8_as_under_ddp(run_on, stage, kind):
    run_on(2, trainer_learns, stage=stage, kind=kind)


def trained_by_fabric(strategy, kind):
    fabric = make_fabric(strategy)
    model, optimizer = set_up(fabric, partial(converted, reference_of(kind) if strategy == "ddp" else kind))
    return train_with_fabric(fabric, model, optimizer), weights(model)


@pytest.mark.behaviour("Fabric", "torchao's float8 training")
def test_fabric_learns_in_float8_as_under_ddp(run_on):
    run_on(2, same_as_under_ddp, case=trained_by_fabric, kind="gathered")


def engine_learns(stage, kind, compiles=False, **options):
    options = {"units": is_block, **options}
    reference = train_ddp(Recipe(partial(converted, reference_of(kind), compiles=compiles)))
    run = train_zero(Recipe(partial(converted, kind, compiles=compiles)), stage, **options)
    same_runs(run, reference)


WAYS = {
    "recomputed": {"activation_checkpointing": "units"},
    "compiled": {"compiles": True},
    "offloaded": {"offload": "cpu"},
}


@pytest.mark.exhaustive(but=3)
@pytest.mark.behaviour("The module", "torchao's float8 layers, tensor-wise and row-wise; recomputed, or compiled")
@pytest.mark.parametrize("way", WAYS)
@KINDS
@STAGES
def test_float8_layers_learn_as_under_ddp(run_on, stage, kind, way):
    run_on(2, engine_learns, stage=stage, kind=kind, **WAYS[way])


# ---------------------------------------------------------------------------------------------- gathered in float8


def train_fsdp2(recipe):
    """Losses and weights under FSDP2, whose all-gather torchao extends."""
    module, optimizer = prepare(replace(recipe, optimizer=lambda module: None))
    mesh = init_device_mesh("cpu", (world_size(),))
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh)
    optimizer = recipe.optimizer(module)
    losses = []
    for index in range(recipe.steps):
        loss = module(*batch(index))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        float8.precompute_float8_dynamic_scale_for_fsdp(module)
    return losses, {name: value.full_tensor() for name, value in module.state_dict().items()}


def gathers_learn(stage):
    recipe = Recipe(partial(converted, "gathered"), steps=10)
    run = train_zero(recipe, stage, units=is_block)
    losses, found = train_fsdp2(recipe)
    same_tensors(dict(enumerate(run.losses)), dict(enumerate(losses)), 0)
    same_tensors(run.weights, {name: unwrapped(value) for name, value in found.items()}, 0)
    same_runs(run, train_ddp(Recipe(converted, steps=10)))


def unwrapped(value):
    return getattr(value, "_tensor", value)


@pytest.mark.behaviour("The module", "torchao's `enable_fsdp_float8_all_gather`: FSDP2's numbers")
@STAGES
def test_weights_gathered_in_float8_learn_as_under_fsdp2_and_ddp(run_on, stage):
    run_on(2, gathers_learn, stage=stage)


def bytes_of_gathers(dtype):
    recipe = Recipe(partial(Square, 64), dtype=dtype, steps=3)
    sent, messages = {}, {}
    for kind in ("tensorwise", "gathered"):
        made = replace(recipe, model=partial(converted, kind, model=partial(Square, 64)))
        run = train_zero(made, 3, units=lambda name, module: isinstance(module, Square.Layer))
        sent[kind], messages[kind] = run.report.bytes["all_gather"], run.report.calls["control"]
    assert sent["tensorwise"] == dtype.itemsize * sent["gathered"] > 0
    assert messages["gathered"] == messages["tensorwise"] + recipe.steps, "one all-reduce a step for all scales"


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gather_in_float8_sends_one_byte_an_element_and_a_step_one_message_for_all_scales(run_on, dtype):
    run_on(2, bytes_of_gathers, dtype=dtype)


def refusals():
    """Errors before anything is changed."""
    from torchao.prototype.quantized_training.bitnet import BitNetTrainingLinearWeight

    def refused(module, text):
        before = dict(module.named_parameters())
        with pytest.raises(ValueError, match=text):
            Engine(module, [])
        for name, parameter in module.named_parameters():
            assert parameter is before[name] and not isinstance(parameter, ShardedTensor)
        return module

    def cannot(*args):
        raise RuntimeError("no float8 here")

    tied = Text()
    tied.head = nn.Linear(32, VOCABULARY, bias=False)
    tied.head.weight = tied.embed.weight
    config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    refused(float8.convert_to_float8_training(tied, config=config), "was tied .* module_filter_fn")
    packed = Text()
    packed.head.weight = nn.Parameter(BitNetTrainingLinearWeight(packed.head.weight.detach()))
    refused(packed, "head.weight is a BitNetTrainingLinearWeight, whose fsdp_pre_all_gather cannot encode elements")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchao.float8.fsdp_utils.hp_tensor_and_scale_to_float8", cannot)
        module = refused(converted("gathered"), r"blocks.0.up.weight .* on cpu \(RuntimeError: no float8 here\)")
    Engine(module, []).close()
    assert type(module.blocks[0].up.weight).__name__ == "WeightWithDynamicFloat8CastTensor"


def test_weights_that_cannot_be_gathered_in_another_form_are_refused_before_anything_changes(run_on):
    run_on(2, refusals)


def writes_and_reads(strategy):
    """Writes to weights between steps, weights read outside of their module, evaluation, loading a state dict."""
    torch.manual_seed(0)
    module = converted("tensorwise" if strategy == "ddp" else "gathered")
    optimizer = adam(module)
    model = DistributedDataParallel(module) if strategy == "ddp" else module
    engine = None if strategy == "ddp" else Engine(module, [optimizer], stage=int(strategy[-1]), units=is_block)
    losses, weight = [], module.blocks[0].up.weight

    def step(index, penalty=0.0):
        loss = model(*batch(index)) + penalty * module.blocks[1].down.weight.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step(0)
    with torch.no_grad():
        weight.mul_(0.5)
        module.blocks[1].up.weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        module.blocks[2].down.weight[3] = 2.5
    step(1, penalty=1e-3)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    step(2)
    module.load_state_dict(state)
    with torch.inference_mode():
        losses.append(model(*batch(3)).clone())
    step(4)
    streamed = {}
    if engine is not None:
        streamed = dict(lightning_zero.iter_full_parameters(module))
        engine.close()
    found = {name: unwrapped(value) for name, value in module.state_dict().items()}
    same_tensors(streamed or found, found, 0)
    return losses, found


@pytest.mark.exhaustive
def test_weights_gathered_in_float8_are_written_and_read_as_under_ddp(run_on):
    run_on(2, same_as_under_ddp, case=writes_and_reads)


def int8_learns(stage):
    """Gathered in the parameters' own dtype, but in another tensor's form."""
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    def quantised(model=Text):
        made = model()
        quantize_(made.blocks, Int8MixedPrecisionTrainingConfig())
        return made

    same_runs(train_zero(Recipe(quantised), stage, units=is_block), train_ddp(Recipe(quantised)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_torchaos_int8_mixed_precision_learns_as_under_ddp(run_on, stage):
    run_on(2, int8_learns, stage=stage)


def load_weights_on_meta(waits):
    expected = converted("tensorwise")
    torch.save(expected.state_dict(), "text.pt")
    with torch.device("meta"):
        module = converted("gathered")
    with values_may_wait() if waits else nullcontext():
        lightning_zero.load_weights(module, "text.pt")
    weight = module.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter) and type(weight).__name__ == "WeightWithDynamicFloat8CastTensor"
    if not waits:
        assert weight.device.type == "cpu"
        assert torch.equal(module(*batch(0)), expected(*batch(0)))
    engine = Engine(module, [], stage=3, units=is_block)
    assert torch.equal(module(*batch(0)), expected(*batch(0)))
    assert {bucket.full.dtype for bucket in engine.buckets} == {torch.float32, torch.float8_e4m3fn}
    engine.close()


@pytest.mark.parametrize("waits", [False, True])
def test_weights_loaded_on_the_meta_device_are_still_gathered_in_float8(run_on, waits):
    run_on(1, load_weights_on_meta, waits=waits)


@pytest.mark.parametrize(
    ("capability", "emulate", "is_refused"), [((8, 0), False, True), ((8, 0), True, False), ((8, 9), False, False)]
)
def test_a_gpu_without_float8_products_is_refused_unless_they_are_emulated(
    monkeypatch, capability, emulate, is_refused
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module = Text()
    float8.convert_to_float8_training(module.blocks, config=float8.Float8LinearConfig(emulate=emulate))
    with pytest.raises(ValueError, match="^blocks.0.up .* emulate=True") if is_refused else nullcontext():
        check_float8(module, torch.device("cuda"))
    check_float8(module, torch.device("cpu"))


def differing_modules():
    with pytest.raises(ValueError, match="module differs .* gathered in torch.float8_e4m3fn"):
        Engine(converted("gathered" if rank() else "tensorwise"), [])


def test_ranks_that_gather_in_different_forms_get_an_error(run_on):
    run_on(2, differing_modules)
