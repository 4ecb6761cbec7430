"""Training resumes from real checkpoints of DeepSpeed and FSDP.

`data/deepspeed.tar.xz` was written by `write_deepspeed.py` with DeepSpeed 0.19.8 on CPU; where DeepSpeed is installed,
the same tests also run on newly written checkpoints. Checkpoints of FSDP are always newly written.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import DamagedCheckpointError
from lightning_zero.checkpoint.reading import OpenedCheckpoint
from lightning_zero.checkpoint.trees import renamed
from lightning_zero.commands.checkpoint import main
from lightning_zero.convert.deepspeed import open_deepspeed
from lightning_zero.convert.fsdp import open_fsdp
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor, in_memory
from tests.checkpoint.small_model import AFTER, BEFORE, SmallLearner, make_model, make_optimizer
from tests.checkpoint.write_deepspeed import CASES
from tests.checkpoint.write_fsdp import (
    FORMS,
    sharded_by_fsdp1,
    sharded_by_fsdp2,
    train,
    write_by_lightning,
    write_by_torch,
)
from tests.support.trainer import make_trainer
from tests.support.workers import rank

HERE = Path(__file__).parent
WRITTEN = ["kept", *(["now"] if importlib.util.find_spec("deepspeed") else [])]
OF_EACH_RANK = "mean"  # a buffer that FSDP does not synchronize; DCP saves one rank's
IN_FP32 = ["stage1-fp32", "stage2-fp32", "stage3-fp32"]


@pytest.fixture(scope="session", params=WRITTEN)
def deepspeeds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one of DeepSpeed's cases, by name."""
    folder = tmp_path_factory.mktemp("deepspeed")
    if request.param == "kept":
        with tarfile.open(HERE / "data" / "deepspeed.tar.xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # None: Python 3.11.2 has no filters
            archive.extractall(folder)

    def of(case: str) -> Path:
        if not (folder / case).exists():
            command = [sys.executable, "-m", "tests.checkpoint.write_deepspeed", str(folder), case]
            done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        return folder / case

    return of


def same(found: Tensor, expected: Tensor, what: str) -> None:
    found = in_memory(found)
    assert found.dtype == expected.dtype and not found.requires_grad and torch.equal(found, expected), (
        f"{what}: {found} is not {expected}"
    )


def by_name(opened: OpenedCheckpoint) -> dict[str, dict[str, Any]]:
    """The optimizer's state by the parameters' names."""
    assert opened.names_of_optimizers is not None
    (names,), (saved,) = opened.names_of_optimizers, opened.checkpoint["optimizer_states"]
    assert [number for group in saved["param_groups"] for number in group["params"]] == list(range(len(names)))
    return {names[number]: state for number, state in saved["state"].items()}


def in_order_of_the_optimizer(names: list[str]) -> bool:
    model = make_model()
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(model).param_groups
    return names == [name_of[id(p)] for group in groups for p in group["params"]]


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_equal_those_that_deepspeed_itself_reads(
    deepspeeds: Callable[[str], Path], case: str
) -> None:
    expected = torch.load(deepspeeds(case) / "expected.pt", weights_only=True)
    if case == "stage2-elastic":
        with pytest.warns(UserWarning, match="no optimizer param groups, .* only the weights"):
            opened = open_deepspeed(deepspeeds(case) / "checkpoint")
        assert "optimizer_states" not in opened.checkpoint and opened.names_of_optimizers is None
    else:
        opened = open_deepspeed(deepspeeds(case) / "checkpoint")
    options = CASES[case]
    assert opened.written_by["stage"] == options["stage"]
    assert opened.written_by["world_size"] == options.get("ranks", 2)
    weights = opened.checkpoint["state_dict"]
    prefix = "model." if "lightning" in case else ""
    fresh = make_model()
    assert list(weights) == [prefix + name for name in fresh.state_dict()]
    for name, value in expected["weights"].items():
        same(weights[name], value.float() if value.is_floating_point() else value, name)
    # DeepSpeed's tool omits frozen weights at stage 1
    kept = torch.bfloat16 if options.get("low") == "bf16" else torch.float16 if "low" in options else torch.float32
    same(weights[prefix + "frozen.weight"], fresh.frozen.weight.detach().to(kept).float(), "frozen.weight")
    assert weights[prefix + "head.weight"] is weights[prefix + "embedding.weight"]
    if case != "stage2-elastic":
        state = by_name(opened)
        assert in_order_of_the_optimizer([name.removeprefix(prefix) for name in state])
        assert all(each["step"] == BEFORE for each in state.values())
        # DeepSpeed's API reads wrong positions with round_robin_gradients; continued training below covers that case.
        for name, moments in ({} if case == "stage2-fp32" else expected["state"]).items():
            for key, value in moments.items():
                same(state[name][key], value, f"{key} of {name}")
    masters = opened.checkpoint.get("lightning_zero", {}).get("masters", {})
    assert set(masters) == (
        {name for name, p in fresh.named_parameters() if p.requires_grad} if "low" in options else set()
    )
    assert all(masters[name] is weights[name] for name in masters)
    if not prefix:
        assert opened.checkpoint["note"] == "mine" and opened.checkpoint["global_step"] == BEFORE
        same(opened.checkpoint["lr_of"], torch.tensor([1.0, 2.0]), "what was given as client_state")
    assert weights._metadata == renamed(fresh.state_dict(), f"{prefix}{{}}".format)._metadata | (  # type: ignore
        {"": {"version": 1}} if prefix else {}
    )


def test_values_of_a_deepspeed_checkpoint_are_read_when_they_are_used(deepspeeds: Callable[[str], Path]) -> None:
    opened = open_deepspeed(deepspeeds("stage3-fp32") / "checkpoint")
    weight = opened.checkpoint["state_dict"]["blocks.0.weight"]
    assert isinstance(weight, LazyTensor)
    whole = weight.whole()
    for start, stop in [(0, 45), (3, 4), (20, 30), (22, 23), (44, 45), (7, 7)]:  # rank 1's part begins at 23
        same(weight.shown(start, stop), whole.reshape(-1)[start:stop], f"{start} to {stop}")
    assert not {name for name in sys.modules if name.split(".")[0] == "deepspeed"}


def go_on(folder: str, stages: list[int], cases: list[str]) -> None:
    from lightning_zero.engine import Engine

    for case, stage in zip(cases, stages):
        expected = torch.load(Path(folder) / case / "expected.pt", weights_only=True)
        opened = open_deepspeed(Path(folder) / case / "checkpoint")
        model = make_model()
        optimizer = make_optimizer(model)
        model.load_state_dict(opened.checkpoint["state_dict"])
        optimizer.load_state_dict(opened.checkpoint["optimizer_states"][0])
        engine = Engine(model, [optimizer], stage=stage)
        losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        weights = engine.full_state_dict()
        engine.close()
        if rank() == 0:
            assert losses == expected["losses"], case
            for name, value in expected["later"].items():
                same(weights[name], value, f"{name} of {case}")


def test_training_continues_as_under_deepspeed_bit_for_bit(
    deepspeeds: Callable[[str], Path], run_on: Callable[..., Any]
) -> None:
    assert all(deepspeeds(case).exists() for case in IN_FP32)
    run_on(2, go_on, folder=str(deepspeeds(IN_FP32[0]).parent), cases=IN_FP32, stages=[3, 2, 1])


def resume_with_a_trainer(folder: str, imported: dict[str, str]) -> None:
    for case, strategy in [("lightning-stage2", "zero3"), ("lightning-stage3", "zero2")]:
        expected = torch.load(Path(folder) / case / "expected.pt", weights_only=True)
        module = fitted_from(imported[case], strategy)
        if rank() == 0:
            assert module.losses == expected["losses"]
            for name, value in expected["later"].items():
                same(module.state_dict()[name], value, f"{name} of {case}")


def fitted_from(path: str, strategy: str) -> SmallLearner:
    module = SmallLearner(rank())
    make_trainer(strategy, max_steps=BEFORE + AFTER, use_distributed_sampler=False).fit(module, ckpt_path=path)
    assert len(module.losses) == AFTER
    return module


def imported(source: str, path: Path, out: Path, form: str) -> str:
    """Import with the command; return the path."""
    assert main(["import", source, str(path), str(out), "--to", form]) == 0
    return str(out)


def test_a_trainer_resumes_from_a_checkpoint_of_lightnings_deepspeed_strategy(
    deepspeeds: Callable[[str], Path], run_on: Callable[..., Any], tmp_path: Path
) -> None:
    """Loops, the scheduler and the optimizer continue, bit for bit."""
    forms = {"lightning-stage2": "full", "lightning-stage3": "sharded"}
    files = {
        case: imported("deepspeed", deepspeeds(case) / "checkpoint", tmp_path / f"{case}.ckpt", form)
        for case, form in forms.items()
    }
    run_on(2, resume_with_a_trainer, folder=str(deepspeeds("lightning-stage2").parent), imported=files)


def keeps_masters(folder: str) -> None:
    """A run in `bf16-true` begins with the digits of DeepSpeed's masters, not with its rounded weights."""
    from lightning_zero.engine import Engine

    opened = open_deepspeed(Path(folder) / "stage3-bf16" / "checkpoint")
    model = make_model().bfloat16()
    optimizer = make_optimizer(model)
    model.load_state_dict(opened.checkpoint["state_dict"])
    engine = Engine(model, [optimizer], stage=3)
    engine.load_masters(opened.checkpoint["lightning_zero"]["masters"])
    expected = torch.load(Path(folder) / "stage3-bf16" / "expected.pt", weights_only=True)["weights"]
    for name, value in engine.masters_by_name().items():
        same(value, expected[name], name)
    engine.close()


def test_fp32_masters_of_low_precision_weights_keep_their_digits(
    deepspeeds: Callable[[str], Path], run_on: Callable[..., Any]
) -> None:
    run_on(2, keeps_masters, folder=str(deepspeeds("stage3-bf16").parent))


class Dropped:
    def __new__(cls, *_: Any) -> Dropped:
        return object.__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def rewritten(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Edit a file that DeepSpeed wrote, and drop the entries that cannot be written without DeepSpeed."""

    def change(folder: Path) -> None:
        path = folder / "global_step3" / name
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Dropped, name) for name in named]):
            saved = torch.load(path, weights_only=True)
        for key in ("loss_scaler", "param_slice_mappings"):
            saved.get("optimizer_state_dict", {}).pop(key, None)
        edit(saved)
        torch.save(saved, path)

    return change


def of_another_tag(folder: Path) -> None:
    (folder / "latest").write_text("global_step9")


def truncated(folder: Path) -> None:
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:3000])


def of_two_ranks_of_a_cut_model(folder: Path) -> None:
    for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"):
        shutil.copy(folder / "global_step3" / "mp_rank_00_model_states.pt", folder / "global_step3" / name)


class Foreign:
    """An object of a class that is not allowed: creating it would run code."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('this was run')",)


STATE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without("latest"), FileNotFoundError, "neither a 'latest' file nor .*or the folder of a tag.*: global_step3"),
        (of_another_tag, FileNotFoundError, "latest names 'global_step9', but .* contains no such folder"),
        (
            without("global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
            FileNotFoundError,
            r"not contain the files of exactly 2 rank\(s\): .* of rank\(s\) 0\. The files of rank\(s\) 1 are missing",
        ),
        (without(f"global_step3/{MODEL}"), FileNotFoundError, "incomplete: it has no file '..._model_states.pt'"),
        (truncated, DamagedCheckpointError, r"mp_rank_00_model_states.pt \(3000 bytes\) is damaged"),
        (
            rewritten(STATE, lambda saved: saved["optimizer_state_dict"].update(zero_stage=4)),
            ValueError,
            "has zero_stage=4, but only ZeRO stages 1, 2 and 3 are",
        ),
        (
            rewritten(MODEL, lambda saved: saved["param_shapes"][0].update({"more": torch.Size([50])})),
            ValueError,
            r"is inconsistent: .*param group 0 \(embedding.weight, .*\) has 175 elements, but .* by rank are 64, 61",
        ),
        (of_two_ranks_of_a_cut_model, ValueError, "split by tensor, pipeline or expert parallelism .*mp_rank_01_model"),
        (
            rewritten(MODEL, lambda saved: saved["checkpoint_parallel_dimensions"].update(tp_degree=2)),
            ValueError,
            "split by tensor, pipeline or expert parallelism .*tp_degree: 2",
        ),
        (
            rewritten(MODEL, lambda saved: saved.update(mine=Foreign())),
            ValueError,
            "contains builtins.exec, which is not data",
        ),
        (
            rewritten(MODEL, lambda saved: saved.pop("module")),
            ValueError,
            "DeepSpeed file: it has no entry 'module'",
        ),
    ],
    ids=lambda value: None,
)
def test_an_incomplete_damaged_or_unsupported_deepspeed_checkpoint_is_refused(
    deepspeeds: Callable[[str], Path],
    tmp_path: Path,
    change: Callable[[Path], None],
    error: type[Exception],
    message: str,
) -> None:
    folder = shutil.copytree(deepspeeds("stage2-fp32") / "checkpoint", tmp_path / "checkpoint")
    change(folder)
    with pytest.raises(error, match=message):
        open_deepspeed(folder)


def test_stage_3_needs_the_files_of_all_ranks(deepspeeds: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(deepspeeds("stage3-fp32") / "checkpoint", tmp_path / "checkpoint")
    (folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"'..._model_states.pt' of rank\(s\) 0\. .* 1 are missing"):
        open_deepspeed(folder / "global_step3")


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is no folder: a DeepSpeed checkpoint is a local folder"):
        open_deepspeed(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match="neither a 'latest' file nor files of ranks.* It contains: notes.txt"):
        open_deepspeed(tmp_path)


# -- FSDP --------------------------------------------------------------------------------------------------------------


def write_and_open(folder: str) -> None:
    """All formats of FSDP and FSDP2 open to the same weights and state, and FSDP2's training continues from them."""
    from lightning_zero.engine import Engine

    for shard in (sharded_by_fsdp1, sharded_by_fsdp2):
        place = Path(folder) / shard.__name__
        place.mkdir(exist_ok=True)
        write_by_torch(shard, place)
        torch.distributed.barrier()
        expected = torch.load(place / "expected.pt", weights_only=True)
        for form in FORMS:
            opened = open_fsdp(place / form)
            weights = opened.checkpoint["state_dict"]
            assert set(weights) == set(expected["model"]), form
            for name, value in expected["model"].items():
                if name != OF_EACH_RANK:
                    same(weights[name], value, f"{name} in {form}")
            assert set(opened.tensors) >= {f"state_dict.{name}" for name in weights}
            if form == "bare-weights":
                assert "optimizer_states" not in opened.checkpoint
                continue
            state = by_name(opened)
            assert in_order_of_the_optimizer(list(state)), form
            for name, values in expected["optimizer"]["state"].items():
                for key, value in values.items():
                    same(state[name][key], value, f"{key} of {name} in {form}")
            model = make_model()
            optimizer = make_optimizer(model)
            model.load_state_dict(weights)
            optimizer.load_state_dict(opened.checkpoint["optimizer_states"][0])
            if form in ("other-names", "flattened"):
                engine = Engine(model, [optimizer], stage=2 if form == "flattened" else 3)
                train(model, optimizer, range(BEFORE, BEFORE + AFTER))
                ours = engine.full_state_dict()
                engine.close()
                for name, value in torch.load(place / "later.pt", weights_only=True).items():
                    if name != OF_EACH_RANK:
                        same(ours[name], value, f"{name} after {form}")
        assert opened.checkpoint["pytorch-lightning_version"]
    torch.distributed.barrier()


@pytest.fixture(scope="session")
def fsdps(worker_pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints written by torch alone with FSDP and FSDP2; each form is opened and compared."""
    folder = tmp_path_factory.mktemp("fsdp")
    worker_pools.run_on(2, write_and_open, folder=str(folder))
    return folder


@pytest.mark.exhaustive
def test_every_fsdp_form_opens_with_equal_weights_and_state_and_training_continues_exactly(fsdps: Path) -> None:
    opened = open_fsdp(fsdps / "sharded_by_fsdp1" / "model-optim")
    assert opened.checkpoint["step"] == BEFORE and opened.checkpoint["epoch"] == 0
    opened = open_fsdp(fsdps / "sharded_by_fsdp2" / "deeper")
    assert opened.checkpoint["epoch"] == 1 and "app" not in opened.checkpoint


def test_the_entry_with_the_weights_must_be_named_where_several_are_possible(fsdps: Path, tmp_path: Path) -> None:
    opened = open_fsdp(fsdps / "sharded_by_fsdp2" / "with-average", model="average")
    assert isinstance(opened.checkpoint["state_dict"]["head.weight"], Tensor) and "rng" in opened.checkpoint
    two = {"generator": {"w": torch.ones(2)}, "critic": {"w": torch.ones(3)}}
    torch.save(two, tmp_path / "two.pt")
    with pytest.raises(ValueError, match=r"several entries.*'generator' .tensors: 1., 'critic' .*model=NAME"):
        open_fsdp(tmp_path / "two.pt")
    with pytest.raises(ValueError, match=r"'discriminator' is not a mapping from names.*'generator' .tensors: 1"):
        open_fsdp(tmp_path / "two.pt", model="discriminator")
    torch.save({"epoch": 3, "settings": {"a": 1}}, tmp_path / "none.pt")
    with pytest.raises(ValueError, match="no weights were found. The checkpoint contains 'epoch', 'settings'"):
        open_fsdp(tmp_path / "none.pt")
    torch.save({"model": {"layer._flat_param": torch.ones(2)}}, tmp_path / "flat.pt")
    with pytest.raises(ValueError, match="flat parameters, which only an identical FSDP setup can read"):
        open_fsdp(tmp_path / "flat.pt")


def resume_by_lightning(paths: list[str]) -> None:
    straight = SmallLearner(rank())
    make_trainer("ddp", max_steps=BEFORE + AFTER, use_distributed_sampler=False).fit(straight)
    for path in paths:
        module = fitted_from(path, "zero3")
        assert module.losses == straight.losses[BEFORE:]
        for key, value in straight.state_dict().items():
            if not key.endswith(OF_EACH_RANK):
                same(module.state_dict()[key], value, f"{key} from {path}")


def test_a_trainer_resumes_from_checkpoints_of_lightnings_fsdp_strategies(
    run_on: Callable[..., Any], tmp_path: Path
) -> None:
    run_on(2, write_by_lightning, folder=tmp_path)
    forms = {"lightning-fsdp": "full", "lightning-fsdp2": "sharded"}
    files = [imported("fsdp", tmp_path / name, tmp_path / f"{name}.ckpt", form) for name, form in forms.items()]
    folders = [str(tmp_path / name) for name in forms]  # which need not be imported
    run_on(2, resume_by_lightning, paths=[*files, *folders])

    opened = open_fsdp(tmp_path / "lightning-fsdp2")
    with pytest.warns(UserWarning, match="optimizer parameters are numbered in the module's order"):
        whole = open_fsdp(tmp_path / "lightning-fsdp2-whole")
    for key, value in opened.checkpoint["state_dict"].items():
        if not key.endswith(OF_EACH_RANK):
            same(whole.checkpoint["state_dict"][key], in_memory(value), key)
    numbers = {name: number for number, (name, _) in enumerate(SmallLearner(0).named_parameters())}
    for key, values in by_name(opened).items():
        same(whole.checkpoint["optimizer_states"][0]["state"][numbers[key]]["exp_avg"], values["exp_avg"].whole(), key)
