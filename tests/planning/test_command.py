"""`lightning-zero plan` and `lightning-zero doctor`, as scripts call them."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_zero.commands import doctor
from lightning_zero.commands.plan import main, parser
from lightning_zero.commands.projects import project_of, setting
from lightning_zero.engine.compat import tree_leaves
from lightning_zero.planning.advice import Plan, advise
from lightning_zero.planning.projects import of_script, settings_of
from lightning_zero.planning.timeline import Resources

PROJECT = ["tests.planning.projects:Net", "width=32", "--batch", "tests.planning.projects:narrow"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main([*PROJECT, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_json_has_an_entry_for_each_choice(capsys):
    plans = planned(capsys, "--ranks", "64", "--stage", "1", "2", "3", "--offload", "none", "cpu")
    assert [(plan["stage"], plan["options"]) for plan in plans] == [
        (stage, options) for stage in (1, 2, 3) for options in ({}, {"offload": "cpu"})
    ]
    for plan in plans:
        categories = {name: nbytes for name, nbytes in plan["peak_bytes"].items() if name != "total"}
        assert sum(categories.values()) == plan["peak_bytes"]["total"] > 0
        assert plan["ranks"] == 64 and plan["assumptions"] == []
        assert plan["fits"] is None and plan["seconds_per_step"] is None


@pytest.mark.exhaustive
def test_with_memory_and_speeds_a_plan_says_what_fits_and_how_long_a_step_takes(capsys):
    speeds = ["--flops", "1e12", "--link-bandwidth", "1e10"]
    choices = ["--ranks", "8", "--stage", "0", "3"]
    most, least = (plan["peak_bytes"]["total"] for plan in planned(capsys, *choices))
    assert most > least
    memory = (most + least) / 2 / 0.9  # a plan may use 90 % of it
    ddp, zero3 = planned(capsys, *choices, "--memory", f"{memory:.0f}B", *speeds)
    assert not ddp["fits"] and zero3["fits"]
    assert 0 < zero3["seconds_per_step"] < 60 and zero3["samples_per_second"] > 0


@pytest.mark.exhaustive
def test_offload_to_a_disk_frees_the_host_and_takes_the_time_of_disk_transfers(capsys):
    speeds = ["--flops", "1e15", "--host-bandwidth", "1e15", "--disk-bandwidth", "1e5"]
    cpu, nvme = planned(capsys, "--ranks", "8", "--stage", "2", "--offload", "cpu", "nvme", *speeds)
    assert (
        nvme["options"]["offload"]["optimizer"] == "nvme" and nvme["peak_bytes"]["total"] == cpu["peak_bytes"]["total"]
    )
    assert cpu["disk_bytes"] == 0 < cpu["host_bytes"] <= nvme["disk_bytes"]
    assert nvme["seconds_per_step"] == pytest.approx(2 * nvme["disk_bytes"] / 1e5, rel=0.1)
    assert main([*PROJECT, "--stage", "2", "--offload", "nvme"]) == 0
    printed = capsys.readouterr().out
    assert "zero2_nvme" in printed and "  disk  " in printed


def test_a_batch_may_be_declared_by_its_shape(capsys):
    declared = [*PROJECT[:2], "--batch", "float32[4,16,32]", "--stage", "2", "--json"]
    assert main(declared) == 0
    assert json.loads(capsys.readouterr().out) == planned(capsys, "--stage", "2")


SCRIPT = """
import argparse, sys
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from tests.planning.projects import Net
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
width = parser.parse_args().width
print("a line of the script")
trainer = Trainer(accelerator="gpu", devices=8, num_nodes=2, strategy="zero3", accumulate_grad_batches=2)
try:
    trainer.fit(Net(width), DataLoader(torch.randn(8, 16, width), batch_size=4))
except Exception:
    raise SystemExit("fit was not to end like this")
raise SystemExit("the script was to end at fit")
"""


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("devices", [-1, "-1", "auto"])
def test_all_devices_of_a_machine_are_an_unknown_number_of_ranks(capsys, tmp_path, devices):
    (tmp_path / "train.py").write_text(SCRIPT.replace("devices=8, num_nodes=2", f"{devices=}, num_nodes=2"))
    assert main([str(tmp_path / "train.py"), "--stage", "2", "--json", "--", "--width", "32"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["ranks"] == 1
    assert plan["assumptions"] == [
        "one rank, because the number of devices is not known (give the number of ranks with --ranks)"
    ]


@pytest.mark.parametrize(
    ("devices", "ranks"), [("0,1", 2), ("0, 3, ", 2), ("0,", 1), ("4", 4), (" 4 ", 4), ([0, 2, 3], 3), (8, 8)]
)
def test_devices_in_every_form_of_lightning_are_counted(devices, ranks):
    assert settings_of({"devices": devices, "num_nodes": 2}) == {"ranks": 2 * ranks, "machines": 2}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("folder", ["lr=1", "12:30"])
def test_the_path_of_a_script_may_contain_characters_of_overrides_and_classes(capsys, tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert main([f"{folder}/train.py", "--stage", "2", "--json", "--", "--width", "32"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ranks"] == 16


def test_an_override_may_end_like_a_script(capsys):
    assert main(["data.path=/no/such/corpus.py"]) == 2
    assert "data.path=/no/such/corpus.py is neither a file nor a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("False", False),
        ("false", False),
        ("True", True),
        ("None", None),
        ("null", None),
        ("[True, 2]", [True, 2]),
        ("1e-3", 1e-3),
        ("bf16", "bf16"),
        ("a-b", "a-b"),
        ("", ""),
    ],
)
def test_values_of_arguments_are_json_or_python_literals_or_text(text, value):
    assert setting(f"name={text}") == ("name", value)


def test_arguments_of_a_class_may_be_written_as_in_python():
    given = ["torch.nn:Linear", "in_features=3", "out_features=4", "bias=False", "--batch", "float32[1,3]"]
    assert project_of(parser().parse_args(given), []).make_module().bias is None


@pytest.mark.exhaustive
def test_a_script_is_planned_with_its_trainers_settings_without_its_devices(capsys, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main([str(tmp_path / "train.py"), "--stage", "2", "--json", "--", "--width", "32"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    (expected,) = planned(capsys, "--stage", "2", "--ranks", "16", "--machines", "2", "--accumulate", "2")
    assert plan == expected
    assert main([str(tmp_path / "train.py"), "--stage", "2", "--ranks", "4", "--json", "--", "--width", "32"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ranks"] == 4


@pytest.mark.parametrize(
    ("package", "loaders"),
    [
        ("lightning.pytorch", "{'a': first, 'b': second}"),
        ("lightning.pytorch", "[first, second]"),
        ("lightning.pytorch", "CombinedLoader([first, second], 'min_size')"),
        ("pytorch_lightning", "CombinedLoader([first, second], 'min_size')"),
        ("lightning.pytorch", "first"),
    ],
)
def test_loaders_of_a_script_give_the_batches_of_a_fit(tmp_path, package, loaders):
    (tmp_path / "train.py").write_text(f"""
import torch
from {package} import LightningModule, Trainer
from {package}.utilities import CombinedLoader
from torch.utils.data import DataLoader

first, second = DataLoader(torch.ones(4, 3), batch_size=2), DataLoader(torch.zeros(9, 5), batch_size=3)
Trainer().fit(LightningModule(), {loaders})
""")
    batches = list(of_script(tmp_path / "train.py", []).batches())
    # the shorter loader starts again by default, and ends the epoch with min_size
    assert len(batches) == (2 if "min_size" in loaders or loaders == "first" else 3)
    one, other = torch.ones(2, 3), torch.zeros(3, 5)
    expected = {"{": {"a": one, "b": other}, "f": one}.get(loaders[0], [one, other])
    assert type(batches[0]) is type(expected)
    assert all(torch.equal(*each) for each in zip(tree_leaves(batches[0]), tree_leaves(expected), strict=True))


OTHER_SCRIPT = SCRIPT.replace("lightning.pytorch import Trainer", "pytorch_lightning import Trainer, LightningModule")
OTHER_SCRIPT = OTHER_SCRIPT.replace("fit(Net(", "fit(OfOther(").replace(
    "parser = ",
    """
class OfOther(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = Net(width).blocks

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

parser = """,
    1,
)


@pytest.mark.exhaustive
def test_a_script_of_pytorch_lightning_is_planned(capsys, tmp_path):
    (tmp_path / "train.py").write_text(OTHER_SCRIPT)
    assert main([str(tmp_path / "train.py"), "--stage", "0", "2", "--json", "--", "--width", "32"]) == 0
    plans = json.loads(capsys.readouterr().out)
    expected = planned(capsys, "--stage", "0", "2", "--ranks", "16", "--accumulate", "2")
    for plan, like in zip(plans, expected):
        assert plan["ranks"] == 16 and plan["traffic_bytes"] == like["traffic_bytes"]
        assert plan["peak_bytes"]["optimizer"] == like["peak_bytes"]["optimizer"]


@pytest.mark.exhaustive
def test_a_configuration_is_planned_as_train_would_run_it(capsys):
    overrides = ["model=vit_tiny", "data=digits", "stage=2", "trainer.devices=4", "precision=bf16-mixed"]
    assert main([*overrides, "--stage", "3", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["ranks"] == 4 and plan["micro_batch"] == 32
    assert main([*overrides, "--ranks", "8", "--stage", "3", "--json"]) == 0
    (wider,) = json.loads(capsys.readouterr().out)
    assert wider["ranks"] == 8 and wider["peak_bytes"]["optimizer"] < plan["peak_bytes"]["optimizer"]


@pytest.mark.exhaustive
def test_plans_of_a_batch_of_unknown_size_are_compared_by_their_time(capsys):
    project = ["tests.planning.projects:OfTwoTensors", "--batch", "float32[4,16,64]", "float32[2,64]"]
    arguments = [*project, "--ranks", "8", "--stage", "0", "3", "--flops", "1e12", "--link-bandwidth", "1e7"]
    arguments += ["--option", "unit_numel=0"]  # by default, so small a model is one unit
    assert main([*arguments, "--json"]) == 0
    ddp, zero3 = json.loads(capsys.readouterr().out)
    assert ddp["micro_batch"] is None and ddp["samples_per_second"] is None
    assert ddp["seconds_per_step"] < zero3["seconds_per_step"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"Take DDP: {ddp['seconds_per_step']:.3g} s a step, " in said and "Times are unknown" not in said
    assert "ZeRO does not help here: its fastest plan, zero3 (unit_numel=0), is " in said
    assert main([*arguments, "--stage", "0", "1", "--accumulate", "1", "4"]) == 0
    said = capsys.readouterr().out
    assert "Take zero1 (unit_numel=0) with 4 micro-batches a step: " in said, (
        "stage 1 reduces once for all micro-batches"
    )
    assert "times DDP's rate.\n" in said


@pytest.mark.exhaustive
def test_plans_vary_the_micro_batch_and_checkpointing(capsys):
    plans = planned(capsys, "--stage", "2", "--micro-batch", "2", "8", "--checkpointing", "off", "on")
    by_choice = {
        (p["micro_batch"], "activation_checkpointing" in p["options"]): p["peak_bytes"]["activations"] for p in plans
    }
    assert by_choice[8, False] > 2 * by_choice[2, False] and by_choice[8, True] < by_choice[8, False]


@pytest.mark.exhaustive
def test_plans_vary_accumulation_and_advise_it_where_communication_is_slow(capsys):
    speed = ["--flops", "1e10", "--memory-bandwidth", "1e10", "--link-bandwidth", "1e6"]
    plans = planned(capsys, "--stage", "1", "--ranks", "4", "--accumulate", "1", "8", *speed)
    assert [plan["accumulate"] for plan in plans] == [1, 8]
    # stage 1 reduces once a step, however many micro-batches it has
    assert plans[1]["traffic_bytes"] == plans[0]["traffic_bytes"]
    assert plans[1]["samples_per_second"] > 4 * plans[0]["samples_per_second"]
    assert main([*PROJECT, "--stage", "1", "--ranks", "4", "--accumulate", "1", "8", *speed]) == 0
    assert "samples a rank in each of 8 micro-batches" in capsys.readouterr().out


def test_other_options_of_the_strategy_are_planned(capsys):
    wide = [PROJECT[0], "width=256", "--batch", "float32[4,16,256]", "--ranks", "4", "--stage", "3", "--json"]
    assert main(wide) == 0
    (usual,) = json.loads(capsys.readouterr().out)
    assert main([*wide, "--option", "prefetch=0", "reduction_buffers=1"]) == 0
    (lean,) = json.loads(capsys.readouterr().out)
    assert lean["peak_bytes"]["gathered"] < usual["peak_bytes"]["gathered"]


@pytest.mark.exhaustive
def test_the_table_ends_with_advice(capsys):
    speeds = ["--memory", "1GB", "--flops", "1e15", "--link-bandwidth", "1e6"]
    assert main([*PROJECT, "--ranks", "8", *speeds, "--option", "unit_numel=0"]) == 0
    printed = capsys.readouterr().out
    assert "zero3" in printed and "ZeRO does not help here" in printed


def plan_of(stage: int, micro_batch: int, total: float, fits: bool | None, seconds: float) -> Plan:
    rate = 4 * micro_batch / seconds
    return Plan(
        stage=stage,
        ranks=4,
        micro_batch=micro_batch,
        accumulate=1,
        seconds_per_step=seconds,
        waiting_seconds=0.0,
        samples_per_second=rate,
        fits=fits,
        peak_bytes={"parameters": int(total)},
    )


def test_advice_compares_with_the_fastest_ddp_plan_that_fits_or_says_what_the_smallest_needs():
    large, small = plan_of(0, 8, 90e9, False, 1.0), plan_of(0, 1, 50e9, True, 0.2)
    sharded = plan_of(3, 8, 72e9, True, 1.2)
    assert advise([large, small, sharded], 80e9) == [
        "Take zero3 with 8 samples a rank: 26.67 samples/s, 1.2 s a step, 72 GB a rank.",
        "That is 1.33 times DDP's rate at 1 sample a rank.",
    ]
    assert advise([large, small, plan_of(3, 1, 20e9, True, 0.25)], 80e9) == [
        "Take DDP with 1 sample a rank: 20 samples/s, 0.2 s a step, 50 GB a rank.",
        "ZeRO does not help here: its fastest plan, zero3, is 20 % slower than DDP; it would save 30 GB a rank.",
    ]
    assert advise([large, plan_of(0, 1, 75e9, False, 0.2), sharded], 80e9)[1] == "DDP does not fit: it needs 75 GB."
    # without the device's memory, nothing is known not to fit
    assert advise([small, plan_of(0, 8, 90e9, None, 0.5), sharded], None)[0].startswith(
        "Take DDP with 8 samples a rank"
    )


def test_if_nothing_fits_the_smallest_choice_is_reported(capsys):
    assert main([*PROJECT, "--stage", "1", "--memory", "10KB"]) == 0
    assert "Nothing fits: the smallest plan is zero1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tests.planning.projects", "--batch", "a:b"],
            "must be package.module:Name, not a module",
        ),
        (["tests.planning.projects:Nett", "--batch", "tests.planning.projects:batch"], "has no attribute 'Nett'"),
        ([*PROJECT, "--link-bandwidth", "1e9"], "--flops is required if other speeds are given"),
        (["tests.planning.projects:Net", "width", "--batch", "a:b"], "'width' must be name=value"),
        (["tests.planning.projects:Net"], "--batch is missing"),
        ([*PROJECT, "--option", "prefetsch=0"], "ZeroStrategy has no option 'prefetsch': did you mean 'prefetch'?"),
        ([PROJECT[0], "wide=3", *PROJECT[2:]], "unexpected keyword argument 'wide'"),
        (["tests.planning.projects:LooksAtWeights", *PROJECT[2:]], "could not be built on the meta device"),
        (
            ["tests.planning.projects:Block", "width=8", *PROJECT[2:]],
            "The module must be a LightningModule, but its type is Block",
        ),
        (["no_script.py"], "there is no script 'no_script.py': pass a script's path, package.module:Name"),
        (["tests/planning/projects.py"], "tests/planning/projects.py ended without a call to Trainer.fit"),
        (["model=gpt_huge"], "model=gpt_huge: no such option; there are gpt_medium, gpt_small, gpt_tiny, vit_tiny"),
        ([*PROJECT[:2], "--batch", "float[4]", "four[4]"], "'four[4]' must be package.module:function, or tensors"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count(message) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "FILE cannot be read as JSON: "),
        (b"\xff", "FILE cannot be read as JSON: "),
        (b"[" * 100_000, "FILE cannot be read as JSON: "),
        (b"[]", "FILE cannot be read: it contains no JSON object"),
        (b'{"resources": 3}', "FILE is not the output of lightning-zero doctor --json"),
        (b'{"resources": {"flop": 3}}', "--flops is required if other speeds are given"),
        (
            b'{"resources": {"flops": 3, "flop": 3}}',
            "FILE does not state resources as lightning-zero doctor --json does: ",
        ),
        (b'{"resources": {"flops": "3"}}', "FILE does not state resources as lightning-zero doctor --json does: "),
        (b'{"resources": {"flops": NaN}}', "FILE does not state resources as lightning-zero doctor --json does: "),
    ],
)
def test_a_damaged_file_of_speeds_is_named_in_one_line(capsys, tmp_path, content, message):
    (tmp_path / "speeds").write_bytes(content)
    assert main([*PROJECT, "--resources", str(tmp_path / "speeds")]) == 2
    errors = capsys.readouterr().err
    message = message.replace("FILE", str(tmp_path / "speeds"))
    assert errors.startswith(f"lightning-zero plan: {message}") and errors.count("\n") == 1


@pytest.mark.exhaustive
def test_plans_use_the_speeds_that_doctor_measured(capsys, tmp_path):
    assert doctor.main(["--ranks", "2", "--disk", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["ranks"] == 2 and found["machine"]["transport"] in ("shared memory", "gloo")
    assert found["resources"]["memory"] == found["machine"]["memory_bytes"] / 2
    assert found["resources"]["disk_bandwidth"] != Resources.disk_bandwidth and not list(tmp_path.iterdir())
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(found))
    (plan,) = planned(capsys, "--ranks", "2", "--stage", "3", "--resources", str(file))
    assert plan["seconds_per_step"] > 0 and plan["fits"]


def test_a_disk_that_cannot_be_measured_is_reported_by_doctor(capsys):
    assert doctor.main(["--ranks", "1", "--disk", "/proc"]) == 0
    assert "The disk for offload='nvme' could not be measured" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_sharding_within_machines_is_planned_next_to_stage_3(capsys):
    choices = [
        "--stage",
        "3",
        "--ranks",
        "8",
        "--machines",
        "2",
        "--option",
        "shard_within=null",
        "shard_within=node",
        "shard_within=2",
    ]
    speed = ["--flops", "1e12", "--machine-bandwidth", "1e7", "--accumulate", "4"]
    flat, node, pairs = planned(capsys, *choices, *speed)
    assert [plan["options"]["shard_within"] for plan in (flat, node, pairs)] == [None, "node", 2]
    assert node["leaving_bytes"] < 0.17 * flat["leaving_bytes"]
    assert node["samples_per_second"] > 4 * flat["samples_per_second"]
    assert flat["peak_bytes"]["parameters"] < node["peak_bytes"]["parameters"] < pairs["peak_bytes"]["parameters"]
    assert main([*PROJECT, *choices, *speed]) == 0
    said = capsys.readouterr().out
    assert "zero3 (shard_within='node')" in said and "leaves a machine" in said


@pytest.mark.exhaustive
def test_compression_is_planned_and_is_slower_on_a_fast_link(capsys):
    project = ["tests.planning.projects:Net", "width=256", "--batch", "float32[4,256]"]
    choices = ["--ranks", "8", "--machines", "2", "--transport", "gloo", "--precision", "bf16-mixed", "--flops", "1e12"]
    choices += [
        "--stage",
        "2",
        "3",
        "--option",
        "shard_within=null",
        "shard_within=node",
        "compression=null",
        "compression=int8",
    ]
    found = []
    for bandwidth in ("1e6", "1e12"):
        assert main([*project, *choices, "--machine-bandwidth", bandwidth, "--json"]) == 0
        plans = json.loads(capsys.readouterr().out)
        found.append({(plan["stage"], *plan["options"].values()): plan for plan in plans})
    slow, fast = found
    for stage, within in ((2, None), (3, None), (3, "node")):
        plain, encoded = slow[stage, within, None], slow[stage, within, "int8"]
        assert encoded["leaving_bytes"] < 0.8 * plain["leaving_bytes"]
        assert encoded["samples_per_second"] > 1.15 * plain["samples_per_second"]
        assert fast[stage, within, "int8"]["samples_per_second"] < fast[stage, within, None]["samples_per_second"]
    assert main([*project, *choices]) == 0
    assert "zero3 (shard_within='node', compression='int8')" in capsys.readouterr().out


SMALL = ["--ranks", "4", "--machines", "2", "--transport", "gloo", "--precision", "bf16-mixed", "--stage", "2"]


def test_a_choice_that_compresses_nothing_is_left_out_with_its_reason(capsys):
    choices = [*SMALL, "--precision", "32-true", "--option", "compression=null", "compression=int8"]
    assert main([*PROJECT, *choices, "--json"]) == 0
    printed = capsys.readouterr()
    assert [plan["options"]["compression"] for plan in json.loads(printed.out)] == [None]
    reason = "zero2 (compression='int8'): compression='int8' has no effect: every trained parameter has fewer than "
    assert f"Left out: {reason}" in printed.err
    assert main([*PROJECT, *choices[:-2], "compression=int8"]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--machines", "3"], "machines=3 must be at least 1 and divide the number of ranks, 8."),
        (
            ["--machines", "2", "--option", "shard_within=3"],
            "shard_within=3 does not divide 8 ranks: write 2, 4 or 'node'",
        ),
        (
            ["--machines", "2", "--option", "compression=int8"],
            "works over NCCL only with shard_within",
        ),
        (["--option", "compression=zip"], "compression='zip' must be 'int8', 'int4' or None"),
        (
            ["--option", "offload=cpu"],
            "offload=cpu cannot be set with --option: write --offload with cpu, nvme or activations",
        ),
        (
            ["--option", "activation_checkpointing=units"],
            "activation_checkpointing=units cannot be set with --option: write --checkpointing on",
        ),
        (
            ["--option", "partition_activations=true"],
            "partition_activations=true cannot be set with --option: write --checkpointing partitioned",
        ),
        (["--option", "shard_within=nodes"], "shard_within='nodes' must be 'node', an integer of at least 2 or None"),
    ],
)
def test_impossible_machines_and_groups_are_refused(capsys, given, said):
    assert main([*PROJECT, "--stage", "2", "3", "--ranks", "8", *given]) == 2
    assert said in capsys.readouterr().err
