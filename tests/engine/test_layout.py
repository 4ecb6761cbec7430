"""Layout arithmetic of a bucket, without tensors or processes."""

import itertools

import pytest
import torch

from lightning_zero.engine.plan.layout import ALIGNMENT, BucketLayout, balanced_owners, placements_of
from lightning_zero.engine.plan.mesh import ALL, LOCAL, NODE, Mesh, Topology
from lightning_zero.engine.plan.share import Share

SHAPES = [("a", torch.Size((7, 15))), ("b", torch.Size(())), ("c", torch.Size((0, 3))), ("d", torch.Size((16, 17)))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64, 1000])
def test_every_element_of_every_parameter_is_owned_by_exactly_one_rank(world_size):
    layout = BucketLayout.of(SHAPES, world_size)
    for index, segment in enumerate(layout.segments):
        owned = []
        for rank in range(world_size):
            start, stop = layout.owned_range(index, rank)
            owned.extend(range(start, stop))
        assert owned == list(range(segment.start, segment.stop))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64])
def test_shards_are_equal_and_cover_the_bucket(world_size):
    layout = BucketLayout.of(SHAPES, world_size)
    ranges = [layout.shard_range(rank) for rank in range(world_size)]
    assert [stop - start for start, stop in ranges] == [layout.shard_numel(0)] * world_size
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.padded_numel
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:]))


@pytest.mark.parametrize("owners", [(0, 0, 0, 0), (0, 1, 1, 2), (1, 1, 3, 3), (3, 3, 3, 3)])
def test_in_a_bucket_of_whole_parameters_each_has_one_owner_and_shards_cover_the_bucket(owners):
    layout = BucketLayout.of(SHAPES, 4, owners)
    ranges = [layout.shard_range(rank) for rank in range(4)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.padded_numel
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:]))
    for index, segment in enumerate(layout.segments):
        owned = [layout.owned_range(index, rank) for rank in range(4)]
        for rank, (start, stop) in enumerate(owned):
            expected = (segment.start, segment.stop) if rank == owners[index] else None
            assert (start, stop) == expected or (start == stop and not (expected and segment.numel))
    assert layout.padded_numel - layout.numel < ALIGNMENT * len(SHAPES)  # shards are not padded to equal sizes


def llama(width: int, key_value: int, hidden: int, depth: int) -> list[list[int]]:
    kv = width * key_value
    return [[width**2, kv, kv, width**2, *[width * hidden] * 3]] * depth


MODELS = {
    "124 M": [[3 * 768**2, 768**2, 4 * 768**2, 4 * 768**2]] * 12,
    "8 B": llama(4096, 1024, 14336, 32),
    "70 B": llama(8192, 1024, 28672, 80),
    "mixture of experts": [[2048**2] * 4 + [2048 * 1408] * 3 * 16] * 16,
}


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.01), (8, 1.12), (64, 1.8)])
@pytest.mark.parametrize("name", MODELS)
def test_owners_are_balanced_by_elements(name, ranks, most):
    buckets = MODELS[name]
    owners = balanced_owners(buckets, ranks)
    assert all(of_bucket == sorted(of_bucket) for of_bucket in owners)
    loads = [0] * ranks
    for of_bucket, numels in zip(owners, buckets, strict=True):
        for rank, numel in zip(of_bucket, numels, strict=True):
            loads[rank] += numel
    mean = sum(loads) / ranks
    # one rank must take the largest segment, so few segments over many ranks are always uneven
    assert max(loads) <= most * max(mean, max(max(numels) for numels in buckets))


def test_segments_and_gaps_cover_the_bucket_once_and_segments_are_aligned():
    layout = BucketLayout.of(SHAPES, 3)
    sizes, position = layout.sizes(), 0
    assert sum(sizes) == layout.padded_numel and min(sizes) >= 0
    for segment, numel, gap in zip(layout.segments, sizes[::2], sizes[1::2], strict=True):
        assert (segment.start, segment.numel) == (position, numel)
        position += numel + gap
    assert all(segment.start % ALIGNMENT == 0 for segment in layout.segments)
    assert layout.numel == 7 * 15 + 1 + 0 + 16 * 17


@pytest.mark.parametrize(
    ("name", "stage"),
    [(1, 1), ("1", 1), ("os", 1), ("o", 1), (2, 2), ("os+g", 2), ("d", 2), (3, 3), ("OS+G+P", 3), ("p", 3)],
)
def test_a_stage_is_chosen_by_its_number_or_by_the_papers_names(name, stage):
    assert placements_of(name).stage == stage


@pytest.mark.parametrize("name", [0, 4, -1, "zero3", "", None, 2.5, True])
def test_an_unknown_stage_is_refused_and_the_error_lists_the_choices(name):
    with pytest.raises(ValueError, match=r"write 1, 2 or 3"):
        placements_of(name)


def test_each_stage_shards_one_more_kind_of_state():
    sharded = {
        stage: [p.is_sharded for p in (places.optimizer, places.gradients, places.parameters)]
        for stage in (1, 2, 3)
        for places in [placements_of(stage)]
    }
    assert sharded == {1: [True, False, False], 2: [True, True, False], 3: [True, True, True]}


@pytest.mark.parametrize(
    ("stage", "width", "master", "expected"),
    [
        # fp32: 4 parameters (a master is the rank's own slice) + 4 gradients + 8 Adam
        (1, 4, 4, 4 * 800 + 4 * 800 + 8 * 100),
        (2, 4, 4, 4 * 800 + 4 * 100 + 8 * 100),
        (3, 4, 4, 16 * 100),
        # bf16 or fp16 compute: 2 parameters, and 4 masters + 4 gradients + 8 Adam
        (1, 2, 4, 2 * 800 + 4 * 100 + 4 * 800 + 8 * 100),
        (2, 2, 4, 2 * 800 + 16 * 100),
        (3, 2, 4, 16 * 100),
        # fp64: twice as much of everything as in fp32
        (1, 8, 8, 8 * 800 + 8 * 800 + 16 * 100),
        (2, 8, 8, 8 * 800 + 8 * 100 + 16 * 100),
        (3, 8, 8, 32 * 100),
        # bf16 without masters, with bf16 states: 2 of everything; at stage 1, gradients accumulate in fp32
        (1, 2, 2, 2 * 800 + 4 * 800 + 4 * 100),
        (2, 2, 2, 2 * 800 + 6 * 100),
        (3, 2, 2, 8 * 100),
    ],
)
def test_model_state_bytes_follow_the_formula_of_each_stage(stage, width, master, expected):
    assert (
        placements_of(stage).model_state_bytes(800, Mesh.flat(8), parameter_bytes=width, master_bytes=master)
        == expected
    )


def test_a_mesh_numbers_ranks_so_that_those_with_one_local_index_are_adjacent():
    mesh = Mesh.of(Topology(tuple("aabbab")), rank=1)  # machine a has ranks 0, 1, 4; b has 2, 3, 5
    assert mesh.order == (0, 2, 1, 3, 4, 5)
    assert [mesh.size(over) for over in ((), (NODE,), (LOCAL,), ALL)] == [1, 2, 3, 6]
    assert Mesh.flat(6).order is None and Mesh.flat(6).size(ALL) == 6


@pytest.mark.parametrize(
    ("machines", "nodes", "has_two_levels"),
    [
        ("aabb", [[0, 1], [2, 3]], True),
        ("abab", [[0, 2], [1, 3]], True),
        ("aaaa", [[0, 1, 2, 3]], False),
        ("abcd", [[0], [1], [2], [3]], False),
        ("aaab", [[0, 1, 2], [3]], False),
    ],
)
def test_a_topology_says_which_ranks_share_a_machine(machines, nodes, has_two_levels):
    topology = Topology(tuple(machines))
    assert topology.nodes == nodes and topology.has_two_levels is has_two_levels
    if has_two_levels:
        assert sorted(topology.across(0)) == [ranks[0] for ranks in nodes]
        assert all(rank in topology.within(rank) and rank in topology.across(rank) for rank in range(4))


@pytest.mark.parametrize("owners", [None, (0, 2, 2, 3)])
def test_ranks_at_the_same_position_on_their_machines_have_adjacent_shards(owners):
    order = Mesh.of(Topology(tuple("abab")), 0).order
    layout = BucketLayout.of(SHAPES, 4, owners, order=order)
    ranges = [layout.shard_range(rank) for rank in range(4)]
    assert [ranges[0][1], ranges[1][1], ranges[2][1]] == [ranges[1][0], ranges[2][0], ranges[3][0]], (
        "0, 2 on a, 1, 3 on b"
    )
    assert (ranges[0][0], ranges[3][1]) == (0, layout.padded_numel)
    if owners is not None:
        for index, segment in enumerate(layout.segments):
            start, stop = ranges[layout.owner(index)]
            assert start <= segment.start and segment.stop <= stop


@pytest.mark.parametrize("shape", [(5,), (5, 7), (4, 6, 3)])
def test_a_range_of_a_tensor_parallel_share_is_read_from_few_rows_of_the_whole_tensor(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for dimension, index in itertools.product(range(len(shape)), range(2)):
        share = Share(whole.shape, dimension, index, 2)
        own = share.own(whole).reshape(-1)
        row = whole[0].numel() if dimension else 1
        for start, stop in itertools.combinations(range(len(own) + 1), 2):
            read = []

            def values(begin, end, read=read):
                read.append(end - begin)
                return whole.view(-1)[begin:end]

            assert torch.equal(share.range_of(start, stop, values), own[start:stop])
            assert len(read) == 1 and read[0] <= 2 * (stop - start) + 2 * row
