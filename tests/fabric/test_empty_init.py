"""Modules made with ``empty_init=True``, or on the meta device, start from the values that the project writes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from tests.fabric.training import make_fabric, weights
from tests.support.models import CLASSES, VOCABULARY
from tests.support.trainer import Learner, fit, make_trainer
from tests.support.training import same_on_every_rank, same_tensors, same_values


class Net(nn.Module):
    """A module whose ``_init_weights`` is not used: the project has its own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6, padding_idx=2)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, CLASSES, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.constant_(module.weight, 7.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.table(tokens))).flatten(0, 1), targets.flatten())


def by_torch(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.trunc_normal_(parameter, std=0.02)
            parameter.data.mul_(3.0)
        else:
            nn.init.constant_(parameter, 3.0)


def with_orthogonal(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.orthogonal_(parameter, gain=2.0)
        else:
            nn.init.uniform_(parameter)


def through_views(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.data[:2].normal_(0, 0.1)
            nn.init.uniform_(parameter[2:], -0.5, 0.5)
            parameter[1] = 0.25
            parameter.view(-1)[::2] *= 2


def by_values(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            drawn = torch.randn(parameter.shape)
            parameter.copy_(drawn) if parameter.dim() > 1 else setattr(parameter, "data", drawn)
            parameter /= math.sqrt(len(parameter))
            drawn.zero_()


def resets(how: Callable[[nn.Module], None], net: nn.Module) -> None:
    for module in net.modules():
        module.reset_parameters = partial(how, module)
        module.reset_parameters()


def applies(how: Callable[[nn.Module], None], net: nn.Module) -> None:
    net.apply(how)


def with_a_penalty(how: Callable[[nn.Module], None], net: nn.Module) -> None:
    net.apply(how)
    assert net.head.weight.std() > 0
    with torch.no_grad():
        net.head.weight -= net.head.weight.mean()


WAYS = [
    pytest.param(order, how, id=f"{order.__name__}-{how.__name__}")
    for order, how in (
        (resets, by_torch),
        (applies, by_torch),
        (applies, with_orthogonal),
        (applies, through_views),
        (applies, by_values),
        (with_a_penalty, by_torch),
    )
]


def in_fabric(order: Any, how: Any) -> None:
    expected = None
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        fabric = make_fabric(strategy)
        torch.manual_seed(fabric.global_rank)  # rank 0's values are used
        with fabric.init_module(empty_init=True):
            net = Net()
        order(how, net)
        drawn = torch.rand(1)
        assert strategy == "ddp" or how is by_values or all(isinstance(p, LazyTensor) for p in net.parameters())
        found = weights(fabric.setup_module(net)), drawn
        expected = expected or found
        same_values(found, expected, strategy)


@pytest.mark.behaviour("Fabric", "A module made in `fabric.init_module(empty_init=True)`, then initialised by hand")
@pytest.mark.parametrize(("order", "how"), WAYS)
def test_values_written_to_an_empty_module_are_ddps(run_on, order, how):
    run_on(2, in_fabric, order=order, how=how)


def test_values_written_to_an_empty_module_are_those_of_one_device(run_on):
    run_on(1, in_fabric, order=applies, how=by_torch)


ROWS = 400


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 2)


def row_by_row(net: Table) -> None:
    for row in range(ROWS):
        nn.init.normal_(net.table.weight[row])


def row_by_row_through_data(net: Table) -> None:
    for row in net.table.weight.data:
        row.uniform_(-1.0, 1.0)


def over_other_values(net: Table) -> None:
    nn.init.normal_(net.table.weight)
    with torch.no_grad():
        for row in range(100, ROWS):
            net.table.weight[row] *= 2.0
    torch.nn.init.zeros_(net.table.weight[3])


def by_rows(how: Callable[[Table], None]) -> None:
    torch.manual_seed(0)
    ordinary = Table()
    torch.manual_seed(1)
    how(ordinary)
    expected, drawn = ordinary.state_dict(), torch.rand(1)
    for strategy in ("zero1", "zero3"):
        fabric = make_fabric(strategy)
        with fabric.init_module(empty_init=True):
            net = Table()
        torch.manual_seed(1 + fabric.global_rank)
        how(net)
        copied = copy.deepcopy(net)
        assert fabric.global_rank or torch.equal(torch.rand(1), drawn)
        same_tensors(weights(fabric.setup_module(net)), expected, bound=0)
        same_tensors(weights(fabric.setup_module(copied)), expected, bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("how", [row_by_row, row_by_row_through_data, over_other_values])
def test_a_table_filled_row_by_row_has_the_same_values(run_on, how):
    run_on(2, by_rows, how=how)


class WritesInConstructor(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.weight.data.normal_(0, 0.1)
            layer.bias.data.fill_(2.0)
        self.table.weight.data.uniform_()
        self.head.weight.data.normal_()


def in_constructor() -> None:
    expected = None
    for strategy in ("ddp", "zero1", "zero3"):
        fabric = make_fabric(strategy)
        torch.manual_seed(0)
        with fabric.init_module(empty_init=True):
            net = WritesInConstructor()
        found = weights(fabric.setup_module(net))
        expected = expected or found
        same_tensors(found, expected, bound=0)


def test_values_that_a_constructor_writes_directly_are_ddps(run_on):
    run_on(2, in_constructor)


def scaled(net: Table) -> None:
    net.table.weight.data.mul_(2.0)


def a_row(net: Table) -> None:
    nn.init.normal_(net.table.weight[4])


def in_part(how: Callable[[Table], None]) -> None:
    for stage in (1, 3):
        fabric = make_fabric(f"zero{stage}")
        with fabric.init_module(empty_init=True):
            net = Table()
        how(net)
        with pytest.raises(ValueError, match="^table.weight: made without values .* written only in part"):
            fabric.setup_module(net)


@pytest.mark.parametrize("how", [scaled, a_row])
def test_a_parameter_that_is_written_only_in_part_is_refused_on_every_rank(run_on, how):
    run_on(2, in_part, how=how)


class OwnLearner(Learner):
    """Makes its model in ``configure_model``, on one device or another, and then initialises the model by hand."""

    def __init__(self, device: str) -> None:
        super().__init__(model=nn.Identity, batches=2)
        self.device_of_model = device

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            with torch.device(self.device_of_model):
                self.model = Net()
            torch.manual_seed(5)
            self.model.apply(by_torch)


def in_trainer() -> None:
    expected = fit("ddp", partial(OwnLearner, "cpu"), max_epochs=1).weights
    for stage in (1, 3):
        for precision in ("32-true", "bf16-true"):
            run = fit(f"zero{stage}", partial(OwnLearner, "meta"), max_epochs=1, precision=precision)
            if precision == "32-true":
                same_tensors(run.weights, expected, bound=0)
            assert run.weights["model.layers.0.bias"].float().mean() > 2
        trainer = make_trainer(f"zero{stage}", max_epochs=1)
        with trainer.init_module(empty_init=True):
            module = Learner(model=Net, batches=2)
        torch.manual_seed(5)
        module.model.apply(by_torch)
        trainer.fit(module)
        same_tensors(module.state_dict(), expected, bound=0)


def test_values_written_before_a_fit_to_a_module_without_values_are_ddps(run_on):
    run_on(2, in_trainer)


def refuses_what_cannot_be_recorded() -> None:
    fabric = make_fabric("zero3")
    with fabric.init_module(empty_init=True):
        layer = nn.Linear(3, 3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="has no values that this operator could change"):
        torch._foreach_mul_([layer.weight], 2.0)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="no data"):
        layer.weight.copy_(layer.weight * 2)
    with torch.no_grad():
        copied = copy.deepcopy(nn.init.ones_(layer.weight))
        layer.weight.mul_(2)
        torch._foreach_mul_([layer.weight], 2.0)
    assert layer.weight.eq(4).all() and copied.eq(1).all()


def test_writes_that_cannot_be_recorded_are_refused_or_take_memory(run_on):
    run_on(1, refuses_what_cannot_be_recorded)


class Scaled(Net):
    """Initialises itself by ``_init_weights``, and before or after that by hand, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.layers[0].weight, 3.0)
        self.apply(self._init_weights)
        nn.init.normal_(self.layers[1].weight, std=0.02)
        self.head.weight.data[0] = 5.0
        self.head.weight.data.mul_(2.0)


def stand_still(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def _init_weights(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 3.0)


class ByFunctions(nn.Module):
    """Initialised by a function, and by a method without arguments, which only have names of initialisers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, CLASSES)
        self.apply(_init_weights)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.constant_(self.head.bias, 4.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), targets.flatten())


class OnMeta(Learner):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(model=nn.Identity, batches=2, optimizer=stand_still)
        self.kind = kind

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            with torch.device("meta"):
                self.model = self.kind()
            assert all(p.device.type == "meta" for p in self.model.parameters()), "something was drawn"


def write_on_meta(stage: int, precision: str) -> None:
    found = fit(f"zero{stage}", partial(OnMeta, ByFunctions), max_epochs=1, precision=precision).weights
    expected = {"table.weight": 3, "head.weight": 3, "head.bias": 4}
    assert all((found[f"model.{name}"] == value).all() for name, value in expected.items()), found
    found = fit(f"zero{stage}", partial(OnMeta, Scaled), max_epochs=1, precision=precision).weights
    assert (found["model.layers.0.weight"] == 7).all() and (found["model.table.weight"] == 7).all()
    assert 0.01 < found["model.layers.1.weight"].float().std() < 0.03
    assert (found["model.head.weight"][0] == 10).all() and (found["model.head.weight"][1:] == 14).all()
    same_on_every_rank(found)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_constructor_writes_on_the_meta_device_is_repeated_after_the_modules_initialisation(
    run_on, stage, precision
):
    run_on(2, write_on_meta, stage=stage, precision=precision)
