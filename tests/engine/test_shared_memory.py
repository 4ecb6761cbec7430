"""Tensors over a trained parameter's memory are refused, unless one ends before the other begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x))


def with_buffer(net):
    net.register_buffer("first", net.a.weight.data[:3])


def with_attribute(net):
    net.b.first = net.a.weight.detach().t()


def with_list(net):
    net.kept = [torch.ones(2), net.a.weight.data[:, 2]]


def with_dict(net):
    net.kept = {"w": net.b.bias.data}


def with_parameter(net):
    net.b.weight = nn.Parameter(net.a.weight.data)


def with_part_as_parameter(net):
    net.part = nn.Parameter(net.a.weight.data[2:4], requires_grad=False)


def with_other_dtype(net):
    net.bits = net.a.weight.data.view(torch.int32)


def with_columns(net):
    columns = torch.randn(8, 16)
    net.c, net.d = nn.Parameter(columns[:, :8]), nn.Parameter(columns[:, 8:])


REFUSED = {
    with_buffer: r"^first and a\.weight share memory .*\. Read 'self\.a\.weight' .* or give first its own memory",
    with_attribute: r"^b\.first and a\.weight share memory",
    with_list: r"^kept\[1\] and a\.weight share memory",
    with_dict: r"^kept\['w'\] and b\.bias share memory",
    with_parameter: r"^b\.weight and a\.weight share memory .*\. To tie them, .* 'self\.b\.weight = self\.a\.weight'",
    with_part_as_parameter: r"^part and a\.weight share memory",
    with_other_dtype: r"^bits and a\.weight share memory",
    with_columns: r"^d and c share memory",
}


def refuse(number, stage):
    change, message = list(REFUSED.items())[number]
    net = Net()
    change(net)
    with pytest.raises(ValueError, match=message):
        Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], stage=stage)
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[change.__name__ for change in REFUSED])
def test_memory_shared_with_a_parameter_is_refused_before_anything_is_changed(run_on, number):
    run_on(1, refuse, number=number, stage=1)


def refuse_optimizer():
    net = Net()
    optimizer = torch.optim.SGD([nn.Parameter(net.a.weight.data.view(-1))], lr=0.1)
    with pytest.raises(ValueError, match=r"^parameter 0 of group 0 of SGD and a\.weight share memory"):
        Engine(net, [optimizer], stage=3)


def test_an_optimizers_parameter_over_a_modules_memory_is_refused(run_on):
    run_on(2, refuse_optimizer)


def tied(net):
    net.b.weight = net.a.weight
    net.again = [net.a.weight]


def flat(net):
    """Views of one buffer, one after the other."""
    rows = torch.randn(16, 8)
    net.a.weight, net.b.weight = nn.Parameter(rows[:8]), nn.Parameter(rows[8:])


def frozen(net):
    table = torch.randn(4, 8)
    net.table, net.values = nn.Embedding.from_pretrained(table), table


def buffers(net):
    net.register_buffer("x", torch.randn(4))
    net.register_buffer("y", net.x[:2])


def recurrent(net):
    net.lstm = nn.LSTM(8, 8, 2)
    net.lstm.flatten_parameters()


def normalised(net):
    nn.utils.spectral_norm(net.a)
    nn.utils.parametrizations.weight_norm(net.b)


def mapped(net):
    torch.save(net.state_dict(), "weights.pt")
    net.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
    for parameter in net.parameters():
        parameter.requires_grad_()


def scripted(net):
    net.script = torch.jit.script(nn.Linear(8, 8).requires_grad_(False))


def left_by_a_forward(net):
    net.seen = net.a.weight[:2]


ACCEPTED = [tied, flat, frozen, buffers, recurrent, normalised, mapped, scripted, left_by_a_forward]


def warn_of_a_view():
    net = Net()
    left_by_a_forward(net)
    with pytest.warns(UserWarning, match=r"^seen is a view of a\.weight, .* read 'self\.a\.weight' itself"):
        Engine(net, stage=3)


def test_a_warning_names_a_view_with_a_graph_which_keeps_its_values_unless_a_forward_assigns_it(run_on):
    run_on(1, warn_of_a_view)


def accept():
    for change in ACCEPTED:
        net = Net()
        change(net)
        Engine(net, [torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)], stage=3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_memory_that_is_tied_or_only_in_one_storage_is_accepted(run_on):
    run_on(2, accept)
