"""Which modules form units, tested without processes."""

import pytest
import torch
from torch import nn

from lightning_zero.engine.plan import units as units_module
from lightning_zero.engine.plan.units import plan_units as plan_units_of


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Mixture(nn.Module):
    """A block whose experts are chosen by data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        return self.experts[int(self.router(x).mean(0).argmax())](x)


class Decoder(nn.Module):
    def __init__(self, block=Block, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def plan_units(module, units="auto", unit_numel=0):
    """One unit per block unless specified otherwise, since the models here are tiny."""
    return plan_units_of(module, units, unit_numel)


def names(module, units="auto"):
    return [plan.name for plan in plan_units(module, units)]


def test_repeated_blocks_each_form_a_unit_and_the_rest_is_the_root():
    plans = plan_units(Decoder())
    assert [plan.name for plan in plans] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert list(plans[0].parameters) == ["embedding.weight", "head.weight"]


def test_children_of_a_sequential_form_units():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]


def test_blocks_in_the_stages_of_a_convolutional_net_form_units():
    assert names(nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()))) == ["0.0", "0.1", "1.0"]


class Stage(nn.Module):
    """A stage of a hierarchical vision model: it widens, then runs blocks of one width."""

    def __init__(self, width, depth, sequence=nn.ModuleList):
        super().__init__()
        self.widen = nn.Linear(width // 2, width)
        blocks = [Block(width) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks) if sequence is nn.Sequential else nn.ModuleList(blocks)

    def forward(self, x):
        x = self.widen(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("sequence", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("stages", [nn.ModuleList, lambda stages: nn.Sequential(*stages)], ids=["list", "sequence"])
def test_blocks_in_stages_of_growing_width_form_units(stages, sequence):
    model = stages([Stage(4, 2, sequence), Stage(8, 3, sequence), Stage(16, 2, sequence)])
    found = plan_units(model)
    blocks = [f"{stage}.blocks.{block}" for stage, depth in enumerate([2, 3, 2]) for block in range(depth)]
    assert [plan.name for plan in found[1:]] == blocks
    assert list(found[0].parameters) == [f"{i}.widen.{what}" for i in range(3) for what in ("weight", "bias")]


def test_a_stage_with_a_single_block_is_a_unit_itself():
    model = nn.ModuleList([Stage(4, 1), Stage(8, 2), Stage(16, 1)])
    assert names(model) == ["", "0", "1.blocks.0", "1.blocks.1", "2"]


def test_blocks_of_different_widths_are_not_divided():
    assert names(nn.Sequential(Block(4), Block(8), Block(16))) == ["0", "1", "2"]


def test_experts_stay_in_the_unit_of_their_block():
    assert names(Decoder(Mixture)) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_a_list_of_heads_stays_in_the_unit_of_its_parent():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    assert names(Heads()) == [""]


class Attention(Block):
    pass


def in_lists(*containers):
    """A model whose forward runs the layers in a list of containers, as in vit-pytorch and x-transformers."""
    return nn.ModuleDict({"layers": nn.ModuleList(containers), "head": nn.Linear(4, 4)})


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda pair: nn.ModuleDict(zip("01", pair))], ids=["lists", "dicts"])
def test_layers_in_a_list_of_containers_form_units(kind):
    model = in_lists(*(kind([Attention(), Block()]) for _ in range(2)))
    assert names(model) == ["", "layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert list(plan_units(model)[0].parameters) == ["head.weight", "head.bias"]


def test_layers_of_one_class_and_different_shapes_in_a_list_of_lists_form_units():
    model = in_lists(*(nn.ModuleList([Block(4), Block(8)]) for _ in range(2)))
    assert names(model) == ["", "layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_layers_of_modules_without_a_forward_form_units():
    class Encoder(nn.Module):  # its owner calls its method ``encode``
        def __init__(self):
            super().__init__()
            self.scale, self.one, self.two = nn.Parameter(torch.ones(4)), Block(), Block()

    plans = plan_units(in_lists(Encoder(), Encoder()))
    assert [plan.name for plan in plans[1:]] == ["layers.0.one", "layers.0.two", "layers.1.one", "layers.1.two"]
    assert "layers.0.scale" in plans[0].parameters


def test_layers_in_containers_at_several_depths_form_units_but_not_their_norms():
    def inner():
        return nn.ModuleList(nn.ModuleList([Attention(), Block()]) for _ in range(2))

    plans = plan_units(in_lists(*(nn.ModuleList([nn.LayerNorm(4), Block(), inner()]) for _ in range(2))))
    depths = ["1", "2.0.0", "2.0.1", "2.1.0", "2.1.1"]
    assert [plan.name for plan in plans[1:]] == [f"layers.{layer}.{inner}" for layer in "01" for inner in depths]
    assert "layers.1.0.weight" in plans[0].parameters


@pytest.mark.parametrize(
    "kind", [nn.ModuleList, lambda blocks: nn.ModuleDict(zip("abc", blocks))], ids=["list", "dict"]
)
@pytest.mark.parametrize("expert", [Block, lambda: nn.ModuleDict({"up": Block(), "down": Block()})], ids=["", "dict"])
def test_experts_beside_a_router_in_a_list_of_containers_stay_in_the_unit_around_it(kind, expert):
    def layer():
        return nn.ModuleDict({"gate": nn.Linear(4, 3), "experts": kind([expert() for _ in range(3)])})

    assert names(in_lists(layer(), layer())) == [""]


@pytest.mark.parametrize("widths", [(4, 4), (4, 8), (4, 4, 4), (4, 8, 16)])
def test_blocks_in_a_list_of_lists_form_units(widths):
    model = in_lists(*(nn.ModuleList(Block(width) for _ in range(2)) for width in widths))
    assert names(model) == ["", *(f"layers.{stage}.{block}" for stage in range(len(widths)) for block in range(2))]


def test_blocks_in_stages_that_are_parts_of_containers_form_units():
    """As in CrossFormer, whose stages are lists of an embedding and a transformer."""
    model = in_lists(*(nn.ModuleList([nn.Linear(width // 2, width), Stage(width, 2)]) for width in (4, 8, 16)))
    blocks = [f"layers.{stage}.1.blocks.{block}" for stage in range(3) for block in range(2)]
    assert names(model) == ["", *blocks]


def test_blocks_of_a_model_whose_parts_are_in_a_dict_form_units():
    """As in nanoGPT and LitGPT."""

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            parts = {"wte": nn.Embedding(10, 4), "h": nn.ModuleList(Block() for _ in range(3)), "ln_f": nn.LayerNorm(4)}
            self.transformer, self.lm_head = nn.ModuleDict(parts), nn.Linear(4, 10)

    assert names(GPT()) == ["", "transformer.h.0", "transformer.h.1", "transformer.h.2"]


MODELS = (
    "bert deberta-v2 gpt2 gpt_neox opt llama mistral mixtral qwen2 qwen3 qwen3_moe gemma2 phi mamba clip vit dinov2 "
    "swin convnext segformer whisper wav2vec2"
).split()


@pytest.mark.parametrize("name", MODELS)
def test_well_known_models_are_divided_by_their_layers(name):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[name]())
    plans = plan_units_of(model)
    sizes = {plan.name: sum(parameter.numel() for parameter in plan.parameters.values()) for plan in plans}
    total = sum(sizes.values())
    assert sizes.pop("", 0) < total / 6, "the root unit is gathered for the whole step"
    layers = [size for unit, size in sizes.items() if "embed" not in unit and not unit.endswith("wte")]
    assert len(layers) >= 4 and max(layers) < total / 3


def test_blocks_of_an_encoder_and_a_decoder_in_a_dict_form_units():
    class Encoder(Decoder):
        pass

    blocks = [f"{part}.blocks.{block}" for part in ("encoder", "decoder") for block in range(3)]
    assert names(nn.ModuleDict({"encoder": Encoder(), "decoder": Decoder()})) == ["", *blocks]


def test_decoders_of_one_class_in_a_dict_stay_in_the_unit_around_it_since_ranks_may_choose_one():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"a": Decoder(), "b": Decoder()})

    assert names(Heads()) == [""]


def test_entries_of_a_list_may_be_none():
    assert names(in_lists(nn.ModuleList([None, Attention()]), nn.ModuleList([None, Block()]))) == [
        "",
        "layers.0.1",
        "layers.1.1",
    ]


def test_a_module_without_a_forward_is_no_unit(monkeypatch):
    monkeypatch.setattr(units_module, "LARGE_LAYER", 40)
    tables = nn.ParameterList(torch.ones(50) for _ in range(2))
    assert names(nn.ModuleDict({"tables": tables, "head": nn.Linear(8, 8)})) == ["", "head"]
    with pytest.raises(
        ValueError, match=r"units: ParameterList matches 'tables' \(ParameterList\), which has no forward.*Leave it out"
    ):
        plan_units(nn.ModuleDict({"tables": tables}), nn.ParameterList)


@pytest.mark.parametrize("units", [nn.ModuleList, [nn.Linear, nn.ModuleList], lambda name, _: name == "layers"])
def test_containers_named_as_units_are_refused_with_the_classes_in_them(units):
    model = in_lists(nn.ModuleList([Attention(), Block()]))
    with pytest.raises(
        ValueError, match=r"matches 'layers' \(ModuleList\), which has no forward.*units=\[Attention, Block\]"
    ):
        plan_units(model, units)


def test_a_forward_that_is_set_on_the_module_itself_counts():
    model = in_lists(*(nn.ModuleList([Attention(), Block()]) for _ in range(2)))
    for layer in model["layers"]:
        layer.forward = lambda x, own=layer: own[1](own[0](x))
    assert names(model) == names(model, lambda name, _: name.startswith("layers.")) == ["", "layers.0", "layers.1"]


def test_large_layers_outside_blocks_form_their_own_units(monkeypatch):
    monkeypatch.setattr(units_module, "LARGE_LAYER", 40)
    assert names(Decoder()) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_weights_tied_across_units_go_to_the_root_which_covers_both(monkeypatch):
    monkeypatch.setattr(units_module, "LARGE_LAYER", 40)
    root = plan_units(Decoder(tied=True))[0]
    assert root.is_root and list(root.parameters) == ["embedding.weight"]
    assert [owner.attribute for owner in root.owners["embedding.weight"]] == ["weight", "weight"]


@pytest.mark.parametrize("units", [Block, [Block], (Block, nn.Bilinear), lambda name, _: name.startswith("blocks.")])
def test_classes_or_a_predicate_override_the_automatic_units(units):
    assert names(Decoder(), units) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_units_that_match_no_module_are_refused_with_the_models_classes():
    with pytest.raises(ValueError, match=r"no submodule with parameters matches LSTM.*Block.*Embedding"):
        plan_units(Decoder(), nn.LSTM)


NUMEL = sum(parameter.numel() for parameter in Block().parameters())


def merged(module, unit_numel, units="auto"):
    return [plan.name for plan in plan_units(module, units, unit_numel)]


@pytest.mark.parametrize(
    "unit_numel, expected",
    [
        (NUMEL - 1, ["", "blocks.0", "blocks.1", "blocks.2"]),
        (2 * NUMEL - 1, ["", "blocks.0", "blocks.1", "blocks.2"]),
        (2 * NUMEL, ["", "blocks.0 to blocks.1", "blocks.2"]),
        (3 * NUMEL, ["", "blocks.0 to blocks.2"]),
        (3 * NUMEL + 80, [""]),
    ],
)
def test_neighbouring_blocks_merge_up_to_unit_numel_and_a_small_module_is_one_unit(unit_numel, expected):
    model = Decoder()
    assert sum(parameter.numel() for parameter in model.parameters()) == 3 * NUMEL + 80
    plans = plan_units(model, unit_numel=unit_numel)
    assert [plan.name for plan in plans] == expected
    assert [block for plan in plans for block in plan.blocks] == list(model.blocks)
    held = [name for plan in plans for name in plan.parameters]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_blocks_of_nested_sequences_merge_but_not_those_of_two_towers():
    def layers():
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))

    assert merged(layers(), 59) == ["0.0 to 1.0", "2.0"]
    towers = nn.ModuleDict({"one": layers(), "two": layers()})
    assert merged(towers, 100) == ["one.0.0 to one.2.0", "two.0.0 to two.2.0"]


def test_units_that_the_user_names_are_merged_only_on_request():
    names_of = [plan.name for plan in plan_units_of(Decoder(), Block)]
    assert names_of == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert merged(Decoder(), 2 * NUMEL, Block) == ["", "blocks.0 to blocks.1", "blocks.2"]


def test_a_module_in_two_sequences_belongs_to_the_first():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict(
        {"one": nn.Sequential(shared, nn.Linear(4, 4)), "two": nn.Sequential(nn.Linear(4, 4), shared)}
    )
    plans = plan_units(model, unit_numel=50)
    assert [(plan.name, len(plan.blocks)) for plan in plans] == [("one.0 to one.1", 2), ("two.0", 1)]


def tower(*widths):
    """A sequence with one layer for each width: units of width * width elements."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


def automatic(module):
    return [plan.name for plan in plan_units_of(module) if plan.name]


@pytest.mark.parametrize(
    "widths, expected",
    [
        ([512] * 6, ["0", "1", "2", "3", "4", "5"]),  # two would be more than a quarter
        ([512] * 8, ["0 to 1", "2 to 3", "4 to 5", "6 to 7"]),
        ([512] * 12, ["0 to 2", "3 to 5", "6 to 8", "9 to 11"]),
        ([1024] * 3, ["0", "1", "2"]),
        ([2048, 8, 8, 8], ["0", "1", "2", "3"]),  # one layer has nearly all elements
        ([2048, 8, 8, 8, 8, 8], ["0", "1 to 2", "3 to 4", "5"]),
        ([512] * 40, [f"{first} to {first + 3}" for first in range(0, 40, 4)]),  # 2**20 elements each
    ],
)
def test_merging_leaves_at_least_four_units_if_there_are_enough_blocks(widths, expected):
    assert automatic(tower(*widths)) == expected


def test_merging_leaves_four_units_next_to_a_large_root_unit():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = nn.ModuleList(nn.Embedding(4000, 128) for _ in range(3))  # none is large
            self.layers = tower(*[64] * 8)

    plans = plan_units_of(Model())
    assert [plan.name for plan in plans] == ["", *(f"layers.{i} to layers.{i + 1}" for i in range(0, 8, 2))]


def test_a_model_of_up_to_a_million_elements_is_one_unit():
    assert [plan.name for plan in plan_units_of(tower(*[512] * 4))] == [""]
    assert automatic(tower(*[512] * 4, 1))[:3] == ["0", "1", "2"]


def test_layers_with_a_quarter_of_the_model_form_their_own_units():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.small = nn.Linear(800, 800), nn.Linear(800, 800), nn.Linear(800, 10)

    assert [plan.name for plan in plan_units_of(Model())] == ["", "one", "two"]


def test_a_block_without_elements_does_not_end_the_search():
    model = tower(2048, 8, 8, 8)
    model.append(nn.Embedding(0, 4))
    assert automatic(model)[0] == "0"
