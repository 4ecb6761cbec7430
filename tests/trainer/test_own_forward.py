"""In its own forward, a layer reads the project's parameter objects, as everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from tests.support.training import CLOSE, same_values
from tests.trainer.cases import Net, behaviours, same_as_under_ddp, trained


class Gained(nn.Parameter):
    """A project's own class of parameters."""

    gain = 1.5

    def scaled(self) -> Tensor:
        return self * self.gain


class Gain(nn.Linear):
    """Reads class, attributes and identity of its weight, and writes an attribute that others read."""

    names: dict[Any, float]

    def __init__(self, *features: int) -> None:
        super().__init__(*features)
        self.weight = Gained(self.weight.detach())
        self.weight.infshape = (*features, "width")  # as mup's layers have
        self.known = {self.weight: 0.5}
        self.address, self.hash = id(self.weight), hash(self.weight)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, Gained) and isinstance(weight, nn.Parameter)
        assert id(weight) == self.address and hash(weight) == self.hash and weight.infshape[2] == "width"
        assert [p for p in self.parameters()][0] is weight is self._parameters["weight"]
        self.calls += 1
        weight.calls = self.calls
        weight.last = getattr(weight, "told", 0)
        return nn.functional.linear(x, weight.scaled(), self.bias) * self.known[weight]


class Gains(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gain = self.blocks[0][0] = Gain(6, 6)
        self.head = Gain(6, 3)
        self.head.weight.infshape = (6, 3, "width")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head.weight.told = batch_idx
        loss = super().training_step(batch, batch_idx)
        self.seen.append((self.head.weight.calls, self.head.weight.last, self.gain.weight.infshape))
        return loss + self.head.weight.scaled().pow(2).mean()

    def on_fit_end(self) -> None:
        assert all(isinstance(p, Gained) for p in (self.gain.weight, self.head.weight))


def know_its_own_weights(strategy: str) -> Any:
    """Layers that read class, attributes, identity and hash of their weights in their own forward"""
    module = Gains()
    before = module.head.weight
    result = trained(strategy, module)
    assert module.head.weight is before and type(before) is Gained
    return result, before.calls, before.last


class HooksInForward(Net):
    """Registers a hook on a weight in the forward of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_pre_hook(self.add_hook)

    def add_hook(self, layer: nn.Linear, _: Any) -> None:
        if layer.training and not hasattr(layer.weight, "watched"):
            layer.weight.watched = layer.weight.register_hook(self.note)

    def note(self, gradient: Tensor) -> Tensor:
        self.seen.append(gradient.norm().item() > 0)
        return gradient * 0.5


def hook_in_forward(strategy: str) -> Any:
    """A gradient hook that a layer registers on its weight in its own forward, once"""
    return trained(strategy, HooksInForward())


class ReadsGradient(Net):
    """Reads the gradient of its weight, so far accumulated, in the layer's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_pre_hook(lambda layer, _: self.seen.append(self.of(layer.weight)))

    @staticmethod
    def of(parameter: nn.Parameter) -> float | None:
        from lightning_zero import full_grad

        gradient = full_grad(parameter) if parameter.requires_grad else None
        return None if gradient is None else round(gradient.norm().item(), 5)


def read_gradients_in_forward(strategy: str) -> Any:
    """`p.grad` read in the layer's own forward, before the step that uses it"""
    module = ReadsGradient()
    module.optimizer_zero_grad = lambda *_, **__: None  # gradients stay for the next forward
    return trained(strategy, module, max_epochs=1, limit_val_batches=0)


class Autocasts(Net):
    """Enters autocast itself, so that autocast keeps the weights that it has cast."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


def enter_autocast(strategy: str) -> Any:
    """`torch.autocast` entered by the module itself, in fp32 training"""
    return trained(strategy, Autocasts())


@pytest.mark.exhaustive(but=1)
@behaviours("The module", know_its_own_weights, hook_in_forward, enter_autocast)
def test_in_its_own_forward_a_layer_has_the_projects_parameters(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


@behaviours("The module", read_gradients_in_forward)
def test_in_its_own_forward_a_layer_reads_the_gradient_of_its_weight(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=CLOSE)


class Encodes(Net):
    """Evaluates encoder layers, which torch runs as one kernel if none of their modules has hooks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.blocks = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 6))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0].unsqueeze(1)).squeeze(1).float(), batch[1])

    def note_once(self, *_: Any) -> None:
        self.seen.append("noted once")
        self.once.remove()

    def on_validation_start(self) -> None:
        self.once = self.blocks[0].layers[1].register_forward_hook(self.note_once)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        encoder = self.blocks[0]
        if not self.trainer.sanity_checking:  # while the encoder's parameters are ordinary tensors
            states = self.trainer.strategy.optimizer_state(self.optimizers().optimizer)["state"]
            self.seen.append(len(states))
        encoded = encoder(batch[0].unsqueeze(1))
        self.seen += [str(encoded.dtype), type(encoded.grad_fn).__name__, encoded.float().sum().item()]
        if batch_idx == 1:
            handle = encoder.layers[0].linear1.register_forward_hook(lambda *_: self.seen.append("hooked"))
            encoder(batch[0].unsqueeze(1))
            handle.remove()
        return super().validation_step(batch, batch_idx)


def evaluate_encoders(stage: int, precision: str) -> None:
    torch.manual_seed(0)
    expected = trained("ddp", Encodes(), precision=precision)
    torch.manual_seed(0)
    module = Encodes()
    found = trained(f"zero{stage}", module, precision=precision)
    same_values(found, expected, f"stage {stage}")
    assert "hooked" in expected["seen"]


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "`nn.TransformerEncoderLayer` as one kernel in evaluation", notes={3: "layer by layer"}
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2])
def test_encoder_layers_are_evaluated_as_under_ddp(run_on, stage, precision):
    run_on(2, evaluate_encoders, stage=stage, precision=precision)


def evaluate_with_hooks(stage: int) -> None:
    """A project's hook, registered after the engine's own, stays behind them, where the project has put it."""
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    engine = Engine(layer, stage=stage)
    for module in layer.modules():
        module.register_forward_hook(lambda *_: None)
        module.register_forward_pre_hook(lambda *_: None)
    before = [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in layer.modules()]
    layer.eval()
    for _ in range(2):
        with torch.no_grad(), engine.window():
            layer(torch.zeros(2, 3, 6))
        assert [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in layer.modules()] == before
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_leaves_hooks_in_their_order(run_on, stage):
    run_on(2, evaluate_with_hooks, stage=stage)
