"""An invalid config value ends the command with one line, before any process is started."""

import re
import sys
from pathlib import Path

import pytest

from lightning_zero.commands import ranks, train
from tests.app.commands import TINY, finish, start

# arguments, and a pattern that the line must match
WRONG = [
    ("stage=9", "Could not find 'stage/9' Available options in 'stage': 1 2 3 auto c1 c2 c3 c4 c5 ddp"),
    (
        "model=gpt_huge",
        "Could not find 'model/gpt_huge' Available options in 'model': gpt_medium gpt_small gpt_tiny vit_tiny",
    ),
    ("model.width=-4", "model: .*negative dimension -4"),
    ("model.heads=3", "model: .*heads=3 must divide width=256"),
    ("model.widht=64", "Could not override 'model.widht'"),
    ("optimiser.lr=1", "Could not override 'optimiser.lr'"),
    ("trainer.max_step=3", "Could not override 'trainer.max_step'"),
    ("+trainer.max_step=3", "trainer: .*unexpected keyword argument 'max_step'"),
    ("+callbacks.checkpoint.monitr=a", "unexpected keyword argument 'monitr'.* full_key: callbacks.checkpoint"),
    ("+optimizer.beta=3", "optimizer: .*unexpected keyword argument 'beta'"),
    ("+stage.prefetc=2", r"stage: .*ZeroStrategy has no option 'prefetc': did you mean 'prefetch'\?"),
    ("data.batch_size=0", "data: batch_size should be a positive integer value, but got batch_size=0"),
    ("data.batch_size=many", "data: .*'int' and 'str'"),
    ("data.validation_percent=100", "data: path=.* has 0 bytes of text for training with validation_percent=100"),
    ("data.path=/no/such/text", "data: path=/no/such/text is neither a file nor a folder"),
    ("data.path=/dev/null", "data: path=/dev/null has 0 bytes of text for training"),
    ("data=digits", "Interpolation key 'data.context' not found full_key: model.context"),
    ("optimizer.lr=-1", "optimizer: Invalid learning rate: -1"),
    ("optimizer.lr=fast", "optimizer: .*'float' and 'str'"),
    ("optimizer=sgd optimizer.momentum=-1", "optimizer: Invalid momentum value: -1"),
    ("optimizer.betas=[2,3]", "optimizer: Invalid beta parameter at index 0: 2"),
    ("+optimizer.eps=-1", "optimizer: Invalid epsilon value: -1"),
    ("data.batch_size=1000000", "data: batch_size=1000000 exceeds the number of training windows, "),
    (
        "data=digits model=vit_tiny data.batch_size=9999",
        "data: batch_size=9999 exceeds the number of training images, ",
    ),
    ("trainer.devices=-1", "trainer: .*`devices` selected with `CPUAccelerator` should be an int > 0"),
    (
        "trainer.num_nodes=2",
        "trainer.num_nodes=2 requires a launcher: start one process per rank with torchrun or srun",
    ),
    ("trainer.accelerator=abacus", "trainer: .*invalid accelerator name: `accelerator='abacus'`"),
    ("trainer.precision=half", "trainer: .*Precision 'half' is invalid"),
    ("trainer.gradient_clip_val=some", "trainer: .*`gradient_clip_val` should be an int or a float. Got some."),
    ("trainer.val_check_interval=0.5", "trainer: .*`val_check_interval` should be an integer"),
    ("trainer.max_steps=many", "trainer: .*'str' and 'int'"),
    ("trainer.max_steps=-5", "trainer: .*`max_steps` must be a non-negative integer or -1 .* You passed in -5"),
    ("trainer.limit_val_batches=1.5", "trainer: .*invalid value 1.5 for limit_val_batches"),
    ("+trainer.profiler=simpel", "trainer: .*When passing string value for the `profiler`"),
    ("+trainer.max_steps=3", "Could not append to config. An item is already at 'trainer.max_steps'. Either remove +"),
    ("callbacks.checkpoint.save_top_k=-7", "Invalid value for save_top_k=-7.* full_key: callbacks.checkpoint"),
    ("logger=csv +logger.versoin=3", "logger: .*unexpected keyword argument 'versoin'"),
    ("model.prompt=''", "model: .*prompt='' must not be empty"),
    ("stage.timeout=0", "stage: .*timeout=0 must be None, or a timedelta or number of seconds above 0"),
    ("stage.prefetch=-1", "stage: .*prefetch=-1 must be an integer of at least 0"),
    ("stage.reduce_dtype=fp8", "stage: .*reduce_dtype='fp8' must be 'fp32', 'bf16', 'fp16'"),
    (
        "offload=gpu",
        "Could not find 'offload/gpu' Available options in 'offload': cpu cpu_params none nvme nvme_params",
    ),
    ("stage.resilience=disk", "stage: .*resilience='disk' must be None, 'memory', a ResilienceConfig"),
    ("+stage.offload.optimizer=gpu", "stage: .*offload: optimizer='gpu' must be 'cpu', 'nvme' or None"),
    ("stage.units=[", "no viable alternative"),
]


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize(("argument", "line"), WRONG, ids=[argument for argument, _ in WRONG])
def test_wrong_value_ends_with_one_line_that_names_it(
    argument: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setattr(sys, "argv", ["lightning-zero"])
    monkeypatch.setattr(ranks, "elastic_launch", lambda *_: pytest.fail("a process was started"))
    try:
        code = train.main(argument.split())
    except SystemExit as end:
        code = end.code
    errors = capfd.readouterr().err
    assert code == 2
    assert re.search(f"^lightning-zero train: .*{line}.*\n$", errors), errors


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"model: [1,", "while parsing a flow node in .*own.yaml"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_damaged_configuration_file_ends_with_one_line(
    content: bytes, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_bytes(content)
    arguments = ["--config-dir", str(tmp_path), "experiment=own"]
    test_wrong_value_ends_with_one_line_that_names_it(" ".join(arguments), line, monkeypatch, tmp_path, capfd)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("offload=cpu", "offload: DDP cannot offload: write offload=none, or stage=1, 2 or 3"),
        ("compression=int8", "compression: DDP cannot compress: write compression=none, or stage=1, 2 or 3"),
        ("resilience=memory", "resilience: DDP cannot keep its state: write resilience=none, or stage=1, 2 or 3"),
    ],
)
def test_options_of_zero_under_ddp_are_refused_in_one_line(capfd, choice, said):
    with pytest.raises(SystemExit, match="2"):
        train.main(["stage=ddp", choice, "hydra.run.dir=.", "hydra.output_subdir=null"])
    assert capfd.readouterr().err == f"lightning-zero train: {said}\n"


@pytest.mark.exhaustive
def test_a_job_with_a_wrong_value_does_not_keep_other_jobs_of_a_sweep_from_training(tmp_path: Path) -> None:
    overrides = ["stage=ddp", "model.heads=3,4", "hydra.sweep.dir=sweep", "objective=lossy"]
    code, output, errors = finish(start("train", "-m", *TINY, *overrides, folder=tmp_path))
    assert code == 2
    assert "heads=3 must divide width=32" in errors and "Traceback" not in errors
    objective = "objective=lossy is not one of the validation metrics, so a search finds nothing to minimize. Write "
    assert f"train: {objective}objective=loss or objective=perplexity.\n" in errors
    assert " failed" in output and " succeeded" in output
    assert not (tmp_path / "sweep/0/results.json").exists()
    assert (tmp_path / "sweep/1/results.json").exists()
