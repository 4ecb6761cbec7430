"""Tensor parallelism with ZeRO: each rank's share of the module's DTensors is sharded over data-parallel ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import iter_full_parameters, load_weights
from lightning_zero.engine import Engine
from tests.support.training import same_tensors
from tests.support.workers import rank, world_size
from tests.trainer.cases import shared_folder

WIDTH, STEPS, CLOSE = 8, 4, 1e-6


class Block(nn.Module):
    """A linear layer split by columns, one split by rows, and a norm that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


_meshes: dict[int, Any] = {}


def mesh_of(tensor_parallel_size: int) -> Any:
    """The case's mesh; the groups of an earlier case's mesh have been destroyed."""
    from torch.distributed.device_mesh import init_device_mesh

    if tensor_parallel_size in _meshes:
        with contextlib.suppress(RuntimeError):
            _meshes[tensor_parallel_size].get_group(0)
            return _meshes[tensor_parallel_size]
    shape = world_size() // tensor_parallel_size, tensor_parallel_size
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    _meshes[tensor_parallel_size] = mesh
    return mesh


def parallelised(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor_parallel"], plan)
    return model


def tokens(step: int, of: int) -> Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(100 * step + of))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def train_alone(data_parallel_size: int, clip: float | None = None, micro_batches: int = 1) -> Any:
    """Train in one process with all batches."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            for part in range(data_parallel_size):
                loss = loss_of(model, tokens(step * micro_batches + micro_batch, part))
                (loss / data_parallel_size / micro_batches).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def train_in_two_dimensions(
    tensor_parallel_size: int, clip: float | None = None, micro_batches: int = 1, **options: Any
) -> None:
    mesh = mesh_of(tensor_parallel_size)
    place, data_parallel_size = mesh["data_parallel"].get_local_rank(), mesh["data_parallel"].size()
    torch.manual_seed(0)
    model = parallelised(Net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = Engine(model, [optimizer], mesh=mesh, unit_numel=0, **options)
    norms = []
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            loss = loss_of(model, tokens(step * micro_batches + micro_batch, place)) / micro_batches
            loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    expected, expected_norms = train_alone(data_parallel_size, clip, micro_batches)
    same_tensors(engine.full_state_dict(), expected, bound=CLOSE)
    assert torch.allclose(torch.tensor(norms), torch.tensor(expected_norms), rtol=CLOSE)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [(4, 2), (2, 2)], ids=["2 x 2", "1 x 2"])
def test_training_in_two_dimensions_equals_one_process(run_on, stage, ranks):
    world, tensor_parallel_size = ranks
    run_on(world, train_in_two_dimensions, tensor_parallel_size=tensor_parallel_size, stage=stage, clip=0.5)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "micro_batches": 2},
        {"stage": 2, "micro_batches": 2},
        {"stage": 3, "micro_batches": 2},
        {"stage": 3, "offload": "cpu"},
        {"stage": 2, "offload": {"optimizer": "cpu", "overlap": False}},
        {"stage": 3, "units": Block, "prefetch": 2, "reduction_buffers": 1},
        {"stage": 3, "activation_checkpointing": Block},
        {"stage": 3, "overlap": False},
        *(
            pytest.param({"stage": 3, "offload": offload}, marks=pytest.mark.exhaustive)
            for offload in (
                {"optimizer": "cpu", "parameters": "cpu"},
                {"optimizer": "nvme"},
                {"optimizer": "nvme", "parameters": "cpu"},
                {"optimizer": "nvme", "parameters": "nvme"},
            )
        ),
        pytest.param({"stage": 2, "offload": {"optimizer": "nvme"}}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_training_in_two_dimensions_with_options_equals_one_process(run_on, options, tmp_path):
    if isinstance(options.get("offload"), dict):
        options = options | {"offload": {"path": str(tmp_path), **options["offload"]}}
    run_on(4, train_in_two_dimensions, tensor_parallel_size=2, clip=0.5, **options)


def read_and_write() -> None:
    """User code reads, sums and writes whole parameters; tensor-parallel ranks stay equal."""
    from torch.distributed.tensor import DTensor

    mesh = mesh_of(2)
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(rank())  # rank 0's values are used
    model = Net()
    if rank() == 0:
        model.load_state_dict(plain.state_dict())
    model = parallelised(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], mesh=mesh, stage=3)
    for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = expected.detach()
        assert not isinstance(own, DTensor) and not isinstance(own.data, DTensor)
        assert own.shape == expected.shape, name
        assert torch.equal(own.detach() * 1.0, expected) and torch.equal(
            own.t() if own.dim() == 2 else own, expected.t()
        )
        for read in (Tensor.sum, Tensor.mean, Tensor.norm, Tensor.max, Tensor.min):
            torch.testing.assert_close(read(own.detach()), read(expected), rtol=CLOSE, atol=CLOSE)
        assert ((own == 0).any() == (expected == 0).any()) and own.norm(float("inf")) == expected.norm(float("inf"))
    with torch.no_grad():
        for parameters in (model.parameters(), plain.parameters()):
            for parameter in parameters:
                parameter.mul_(0.5)
                parameter.data[..., 0] = 0.25
                parameter.add_(torch.arange(float(parameter.numel())).view(parameter.shape) / 1000)
    same_tensors(engine.full_state_dict(), plain.state_dict(), bound=0)
    same_tensors(dict(iter_full_parameters(model, 4000)), plain.state_dict(), bound=0)
    engine.close()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        own = own.full_tensor() if hasattr(own, "full_tensor") else own
        assert torch.equal(own, expected)


def test_user_code_reads_and_writes_whole_parameters(run_on):
    run_on(4, read_and_write)


def refuse(make: Any, stage: int, message: str) -> None:
    model, options = make()
    before = {name: type(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=message):
        Engine(model, options.pop("optimizers", []), stage=stage, **options)
    assert before == {name: type(parameter) for name, parameter in model.named_parameters()}


def partial_placement() -> Any:
    from torch.distributed.tensor import DTensor, Partial

    mesh, model = mesh_of(2), Net()
    weight = DTensor.from_local(model.head.weight.detach(), mesh["tensor_parallel"], [Partial()], run_check=False)
    model.head.weight = nn.Parameter(weight)
    return model, {"mesh": mesh}


def another_mesh() -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, model = mesh_of(2), Net()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh["data_parallel"], [Shard(0)]))
    return model, {"mesh": mesh}


def no_mesh() -> Any:
    return parallelised(Net(), mesh_of(2)), {}


def whole_matrices() -> Any:
    model = parallelised(Net(), mesh_of(2))
    return model, {"mesh": mesh_of(2), "optimizers": [torch.optim.Muon([model.blocks[0].up.weight])]}


def other_names() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return Net(), {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial_placement, "head.weight is a DTensor with the placement"),
        (another_mesh, "head.weight is a DTensor on .* remove fully_shard"),
        (no_mesh, "embed.weight is a DTensor, .* tensor_parallel_size"),
        (whole_matrices, "'blocks.0.up.weight' needs the whole parameter, but tensor parallelism"),
        (other_names, "mesh has dimensions named .*'dp'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_cannot_be_sharded_is_refused_before_anything_is_changed(run_on, make, message):
    run_on(4, refuse, make=make, stage=3, message=message)


# -- partitioned activations ------------------------------------------------------------------------------------------

WIDE, LENGTH = 64, 256
ACTIVATION = 2 * LENGTH * WIDE * 4  # bytes


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x * scale)))


class Deep(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock() for _ in range(blocks))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, torch.ones(()))
        return x.square().mean()


def train_deep(tensor_parallel_size: int = 2, **options: Any) -> tuple[Any, int, dict[str, int]]:
    """Losses and weights; bytes of activations kept in memory after the forward pass; gathers of activations in all."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(tensor_parallel_size)
    torch.manual_seed(0)
    model = Deep()
    plan = {f"blocks.{n}.up": ColwiseParallel() for n in range(4)}
    plan |= {f"blocks.{n}.down": RowwiseParallel() for n in range(4)}
    parallelize_module(model, mesh["tensor_parallel"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], mesh=mesh, unit_numel=0, activation_checkpointing=WideBlock, **options)
    losses, kept, where = [], 0, "host" if engine.config.offload else "activations"
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["data_parallel"].get_local_rank())
        loss = model(torch.randn(2, LENGTH, WIDE, generator=generator))
        kept = engine.report().at_rest.get(where, 0)
        loss.backward()
        assert engine.report().at_rest.get(where, 0) == 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights, report = engine.full_state_dict(), engine.report()
    engine.close()
    return (
        (losses, weights),
        kept,
        {"calls": report.calls.get("activations", 0), "bytes": report.bytes.get("activations", 0)},
    )


def partition(stage: int, **options: Any) -> None:
    expected, _, gathered = train_deep(stage=stage)
    assert gathered == {"calls": 0, "bytes": 0}
    found, kept, gathered = train_deep(stage=stage, partition_activations=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    same_tensors(found[1], expected[1], bound=0)
    assert kept == 4 * ACTIVATION // 2, "each rank keeps half of each of four inputs"
    assert gathered == {"calls": 3 * 3, "bytes": 3 * 3 * ACTIVATION}, "in three steps each input but the last block's"


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("offload", [None, {"activations": "cpu"}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_partitioned_activations_change_no_bit_and_take_half_the_memory(run_on, stage, offload):
    options = {"offload": {"optimizer": None, **offload}} if offload else {}
    run_on(4, partition, stage=stage, **options)


def warn_of_parts() -> None:
    """Inputs of which each rank has a different part, as in sequence parallelism, stay as they are."""
    mesh = mesh_of(2)
    model = Deep()
    engine = Engine(model, [], mesh=mesh, stage=3, activation_checkpointing=WideBlock, partition_activations=True)
    own = torch.randn(2, LENGTH, WIDE, generator=torch.Generator().manual_seed(rank()))
    is_first = mesh["tensor_parallel"].get_local_rank() == 0
    with pytest.warns(UserWarning, match="WideBlock differ") if is_first else contextlib.nullcontext():
        loss = model(own)
    assert engine.report().at_rest.get("activations", 0) == 0
    loss.backward()
    engine.close()


def test_inputs_that_differ_between_tensor_parallel_ranks_are_not_partitioned(run_on):
    run_on(4, warn_of_parts)


def refuse_parts() -> None:
    with pytest.raises(ValueError, match="partition_activations=True divides inputs that tensor-parallel ranks share"):
        Engine(Deep(), [], stage=3, activation_checkpointing=WideBlock, partition_activations=True)
    with pytest.raises(ValueError, match="write activation_checkpointing='units'"):
        Engine(Deep(), [], stage=3, partition_activations=True)


def test_partitioning_without_tensor_parallelism_or_checkpointing_is_refused(run_on):
    run_on(2, refuse_parts)


# -- all ranks agree, not those of one dimension alone ----------------------------------------------------------------


def keep_on_one_rank() -> None:
    """A copy that only one tensor-parallel rank keeps is not gathered at the end: that would hang."""
    mesh = mesh_of(2)
    model = parallelised(Net(), mesh)
    engine = Engine(model, [], mesh=mesh, stage=3)
    kept = [parameter.detach().clone() for parameter in model.parameters()] if rank() == 0 else []
    engine.close()
    assert all(hasattr(p, "full_tensor") or p.dim() == 1 for p in model.blocks[0].parameters())
    assert len(kept) == (0 if rank() else 18)


def end_after_a_failure() -> None:
    """Without communication each rank keeps its shards, even with a single data-parallel rank."""
    mesh = mesh_of(2)
    model = parallelised(Net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, [optimizer], mesh=mesh, stage=3)
    if rank() == 0:  # the other rank does not take part
        engine.close(communicate=False)


def values_in_other_places() -> None:
    """Values on only one of the two tensor-parallel ranks are an error on both."""
    mesh = mesh_of(2)
    model = Net()
    if rank() == 0:
        model.blocks[0].norm.to_empty(device="meta")
    with pytest.raises(ValueError, match="blocks.0.norm.weight.*: on the meta device on rank 0, but with values"):
        Engine(parallelised(model, mesh), [], mesh=mesh, stage=3)


def odd_buffers_and_batches() -> None:
    """Buffers and batches may have any dtype and layout."""
    mesh = mesh_of(2)
    model = Net()
    buffers = {
        "a": torch.arange(3, dtype=torch.int16),
        "b": torch.ones(2).to(torch.float8_e4m3fn),
        "c": torch.arange(6.0).view(2, 3).t(),
        "d": torch.polar(torch.ones(2), torch.arange(2.0)).conj(),
        "e": torch.tensor(True),
    }
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer if rank() == 0 else torch.zeros_like(buffer))
    engine = Engine(parallelised(model, mesh), [], mesh=mesh, stage=3)
    for name, buffer in buffers.items():
        found = getattr(model, name)
        assert torch.equal(found.resolve_conj().to(torch.complex64), buffer.resolve_conj().to(torch.complex64)), name
    same = engine.communicator.tensor.check_same
    values = torch.eye(3)
    same([values.to_sparse(), values.to_sparse_csr(), values.to_sparse_csc()], "a sampler")
    same([torch.nested.nested_tensor([values, values[:2]])], "a sampler")
    with pytest.raises(ValueError, match="a sampler"):
        same([(values * rank()).to_sparse()], "a sampler")
    engine.close()


def divided_buffers() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = mesh_of(2)
    model = parallelised(Net(), mesh)
    placements = {"halves": Shard(0), "copies": Replicate()}
    for name, placement in placements.items():
        model.register_buffer(name, distribute_tensor(torch.arange(4.0), mesh["tensor_parallel"], [placement]))
    Engine(model, [], mesh=mesh, stage=3).close()
    for name, placement in placements.items():
        found = getattr(model, name)
        assert isinstance(found, DTensor) and found.placements == (placement,), (name, type(found))
        assert torch.equal(found.full_tensor(), torch.arange(4.0))


def load_after_dividing() -> None:
    """A module that was divided on the meta device takes no weights; made in memory, it takes them before."""
    mesh = mesh_of(2)
    weights = Net().state_dict()
    path = shared_folder() / "weights.pt"
    if rank() == 0:
        path.parent.mkdir(exist_ok=True)
        torch.save(weights, path)
    torch.distributed.barrier()
    weights = torch.load(path)  # rank 0's
    with torch.device("meta"):
        divided = parallelised(Net(), mesh)
    with pytest.raises(ValueError, match=r"'embed\.weight' was divided over tensor-parallel ranks on the meta device"):
        load_weights(divided, path)
    assert all(tensor.is_meta for tensor in divided.parameters())
    model = Net()
    load_weights(model, path)
    engine = Engine(parallelised(model, mesh), [], mesh=mesh, stage=3)
    same_tensors(engine.full_state_dict(), weights, bound=0)
    engine.close()


@pytest.mark.parametrize(
    "case",
    [
        load_after_dividing,
        keep_on_one_rank,
        end_after_a_failure,
        values_in_other_places,
        odd_buffers_and_batches,
        divided_buffers,
    ],
    ids=lambda c: c.__name__,
)
def test_two_tensor_parallel_ranks_without_data_parallelism_agree(run_on, case):
    run_on(2, case)


def offload_half() -> None:
    """The fraction is counted in elements of the ranks' shares."""
    mesh = mesh_of(2)
    model = parallelised(Net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, [optimizer], mesh=mesh, stage=3, unit_numel=0, offload={"optimizer": "cpu", "fraction": 0.5})
    moved = sum(bucket.layout.numel for bucket in engine.buckets if bucket.updates is not None)
    share = moved / sum(bucket.layout.numel for bucket in engine.buckets)
    assert 0.3 < share < 0.8, share
    engine.close()


def test_the_offloaded_fraction_is_a_fraction_of_the_shares(run_on):
    run_on(4, offload_half)


class Odd(nn.Module):
    """Sizes that the ranks do not divide: 7 rows on 2 ranks, and one row, of which one rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu()).square().mean()


def train_odd(stage: int) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, models = mesh_of(2), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Odd())
    model, alone = models
    style = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor_parallel"], {"first": style, "second": style, "last": style})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]
    engine = Engine(model, optimizers[:1], mesh=mesh, stage=stage)
    for step in range(3):
        batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + part)) for part in range(2)]
        model(batches[mesh["data_parallel"].get_local_rank()]).backward()
        (sum(map(alone, batches)) / 2).backward()
        for each, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    same_tensors(engine.full_state_dict(), alone.state_dict(), bound=CLOSE)
    state = engine.full_optimizer_state_dict(optimizers[0])
    for number, expected in optimizers[1].state_dict()["state"].items():
        torch.testing.assert_close(state["state"][number]["exp_avg"], expected["exp_avg"], rtol=1e-4, atol=1e-6)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sizes_that_ranks_do_not_divide_train_as_one_process(run_on, stage):
    run_on(4, train_odd, stage=stage)


def alike_at_first() -> None:
    """Inputs that were alike in the first forward pass and differ in a later one are an error, not wrong gradients."""
    mesh = mesh_of(2)
    model = Deep()
    engine = Engine(model, [], mesh=mesh, stage=3, activation_checkpointing=WideBlock, partition_activations=True)
    model(torch.randn(2, LENGTH, WIDE, generator=torch.Generator().manual_seed(0))).backward()
    loss = model(torch.randn(2, LENGTH, WIDE, generator=torch.Generator().manual_seed(1 + rank())))
    with pytest.raises(RuntimeError, match="in the first forward, but now differ"):
        loss.backward()
    engine.close(communicate=False)


def keep_a_graph() -> None:
    """A graph of an earlier forward pass that only one rank keeps does not decide what ranks gather."""
    mesh = mesh_of(2)
    model = Deep()
    engine = Engine(model, [], mesh=mesh, stage=3, activation_checkpointing=WideBlock, partition_activations=True)
    kept = []
    for step in range(3):
        x = torch.randn(2, LENGTH, WIDE, generator=torch.Generator().manual_seed(step))
        earlier = model(x)
        if rank() == 0:
            kept.append(earlier)
        del earlier
        model(x).backward()
    engine.close()


class Added(WideBlock):
    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        return super().forward(x, torch.ones(())) + added


def pass_in_other_ways() -> None:
    """What is alike in calls with some arguments says nothing about calls with others."""
    mesh = mesh_of(2)
    model = nn.ModuleList([Added(), WideBlock()])
    engine = Engine(model, [], mesh=mesh, stage=3, activation_checkpointing=WideBlock, partition_activations=True)
    for step in range(2):
        x, alike = torch.randn(2, 2, LENGTH, WIDE, generator=torch.Generator().manual_seed(step))
        own = torch.randn(2, LENGTH, WIDE, generator=torch.Generator().manual_seed(9 + rank()))
        for first in (model[0](x, alike), model[0](x, added=own)):
            model[1](first, torch.ones(())).sum().backward()
    engine.close()


@pytest.mark.parametrize("case", [alike_at_first, keep_a_graph, pass_in_other_ways], ids=lambda case: case.__name__)
def test_ranks_gather_matching_parts_of_activations(run_on, case):
    run_on(4, case)


def observe() -> None:
    """Parameter hooks, `torch.autograd.grad` and states made in a constructor refer to whole parameters."""
    mesh, models = mesh_of(2), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
    model, alone = models
    parallelised(model, mesh)
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1, initial_accumulator_value=0.1) for each in models]
    engine = Engine(model, optimizers[:1], mesh=mesh, stage=3)
    batch, seen = tokens(0, 0), []
    for each in models:
        found = torch.autograd.grad(
            loss_of(each, batch) + each.blocks[0].up.weight.square().sum(), each.blocks[0].up.weight
        )
        seen.append(found[0])
        each.head.weight.register_hook(lambda gradient: gradient / gradient.norm())
        loss_of(each, batch).backward()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.head.weight.grad * 1.0, alone.head.weight.grad, rtol=1e-5, atol=1e-6)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    same_tensors(engine.full_state_dict(), alone.state_dict(), bound=1e-5)
    engine.close()
    for each, optimizer in zip(models, optimizers, strict=True):  # as DTensors again, with states that are DTensors
        loss_of(each, batch).backward()
        optimizer.step()
    found = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    same_tensors({name: p.detach() for name, p in found.items()}, alone.state_dict(), bound=1e-5)


def test_user_code_receives_whole_gradients_and_states(run_on):
    run_on(4, observe)


# -- events on one rank alone ------------------------------------------------------------------------------------------


def overflow(stage: int) -> None:
    """A gradient overflows in the share of one tensor-parallel rank alone: no rank steps, all halve the scale."""
    mesh = mesh_of(2)
    torch.manual_seed(0)
    model = parallelised(Net(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [optimizer], mesh=mesh, stage=stage, unit_numel=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales, weights = [], [engine.full_state_dict()]
    for step in range(3):
        overflows = step == 1

        def spoil(gradient: Tensor, overflows: bool = overflows) -> Tensor:
            gradient = gradient.clone()
            if overflows:
                gradient[-1, 0] = float("inf")  # a row of the second of two tensor-parallel ranks
            return gradient

        hook = model.blocks[1].up.weight.register_hook(spoil)
        loss = loss_of(model, tokens(step, mesh["data_parallel"].get_local_rank()))
        scaler.scale(loss).backward()
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        weights.append(engine.full_state_dict())
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    same_tensors(weights[2], weights[1], bound=0)
    for before, after in ((0, 1), (2, 3)):
        assert not torch.equal(weights[before]["head.weight"], weights[after]["head.weight"])
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_in_one_ranks_share_skips_the_step_on_all_ranks(run_on, stage):
    run_on(4, overflow, stage=stage)


class MaySkip(Block):
    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.skips else super().forward(x)


class Skips(Net):
    """A network in whose middle block some ranks use only the norm, and with a norm that counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.BatchNorm1d(WIDTH)
        self.blocks[1] = MaySkip()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.counts(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def skip_a_block(stage: int) -> None:
    """As one process with the batches of two data-parallel ranks, of which the second skips two matrices.

    Before each forward pass, buffers are those of the first rank, as under DDP.
    """
    mesh, models = mesh_of(2), []
    place = mesh["data_parallel"].get_local_rank()
    for _ in range(3):
        torch.manual_seed(0)
        models.append(Skips())
    model, first, second = models
    parallelised(model, mesh)
    model.blocks[1].skips, second.blocks[1].skips = place == 1, True
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, first)]
    engine = Engine(model, optimizers[:1], mesh=mesh, stage=stage, unit_numel=0)
    for step in range(STEPS):
        loss_of(model, tokens(step, place)).backward()
        second.load_state_dict(first.state_dict())
        for part, each in enumerate((first, second)):
            (loss_of(each, tokens(step, part)) / 2).backward()
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            one.grad = one.grad if other.grad is None else one.grad + other.grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        second.zero_grad()
    second.load_state_dict({name: value.detach() for name, value in first.named_parameters()}, strict=False)
    same_tensors(engine.full_state_dict(), (first, second)[place].state_dict(), bound=CLOSE)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_matrices_that_one_data_parallel_rank_does_not_use_train_as_one_process(run_on, stage):
    run_on(4, skip_a_block, stage=stage)
