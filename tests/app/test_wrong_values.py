"""An invalid config value ends the command with one line that names the key, before any process is started."""

import sys
from pathlib import Path

import pytest

from lightning_zero.commands import ranks, train
from tests.app.commands import TINY, finish, start

# arguments, and what the line must say
WRONG = [
    ("stage=9", "stage=9: no such option; there are 1, 2, 3, auto, c1, c2, c3, c4, c5, ddp"),
    ("model=gpt_huge", "model=gpt_huge: no such option; there are gpt_medium, gpt_small, gpt_tiny, vit_tiny"),
    ("model.width=-4", "model.width=-4 must be an integer of at least 1."),
    ("model.heads=3", "model.heads=3 must divide width=256"),
    ("model.widht=64", "model.widht: no such key; did you mean model.width?"),
    ("optimiser.lr=1", "optimiser: no such key; did you mean optimizer?"),
    ("trainer.max_step=3", "trainer.max_step: no such key; did you mean trainer.max_steps?"),
    ("+trainer.max_step=3", "trainer.max_step: no such key; did you mean trainer.max_steps?"),
    ("+model.experts=3", "model.experts: no such key; there are width, depth, heads,"),
    ("+callbacks.checkpoint.monitr=a", "callbacks.checkpoint.monitr: no such key; did you mean callbacks.checkpoint"),
    ("+optimizer.beta=3", "optimizer.beta: no such key; did you mean optimizer.betas?"),
    ("+stage.prefetc=2", "stage: ZeroStrategy has no option 'prefetc': did you mean 'prefetch'?"),
    ("data.batch_size=0", "data.batch_size=0 must be an integer of at least 1."),
    ("data.batch_size=many", "data.batch_size='many' must be an integer of at least 1."),
    ("data.validation_percent=100", "data.validation_percent=100 must be a number between 0 and 100."),
    ("data.path=/no/such/text", "data.path=/no/such/text is neither a file nor a folder"),
    ("data.path=/dev/null", "data.path=/dev/null has 0 bytes of text for training"),
    ("data=digits", "model.context: Interpolation key 'data.context' not found"),
    ("optimizer.lr=inf", "optimizer.lr=inf must be a finite number."),
    ("optimizer.weight_decay=inf", "optimizer.weight_decay=inf must be a finite number."),
    ("trainer.val_check_interval=inf", "trainer.val_check_interval=inf must be a finite number."),
    ("trainer.gradient_clip_val=inf", "trainer.gradient_clip_val=inf must be a finite number."),
    ("optimizer.lr=-1", "optimizer.lr=-1 must be a number of at least 0."),
    ("optimizer.lr=fast", "optimizer.lr='fast' must be a number of at least 0."),
    ("optimizer.lr=null", "optimizer.lr=None must be a number of at least 0."),
    ("optimizer=sgd optimizer.momentum=-1", "optimizer.momentum=-1 must be a number of at least 0."),
    ("optimizer.betas=[2,3]", "optimizer.betas=[2, 3] must be two or more numbers from 0 to below 1."),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be two or more numbers from 0 to below 1."),
    ("optimizer.betas=0.9", "optimizer.betas=0.9 must be two or more numbers from 0 to below 1."),
    ("+optimizer.eps=-1", "optimizer: Invalid epsilon value: -1"),
    ("seed=5000000000", "seed=5000000000 must be an integer from 0 to 4294967295."),
    ("data.batch_size=1000000", "data.batch_size=1000000 exceeds the number of training windows, "),
    ("data=digits model=vit_tiny data.batch_size=9999", "data.batch_size=9999 exceeds the number of training images, "),
    ("trainer.limit_val_batches=-1", "trainer: You have passed invalid value -1 for limit_val_batches"),
    ("resume=/no/such.ckpt", "resume=/no/such.ckpt: no such checkpoint"),
    ("resume=memory://no/such.ckpt", "resume=memory://no/such.ckpt: no such checkpoint"),
    ("resume=sss://bucket/a.ckpt", "resume=sss://bucket/a.ckpt: Protocol not known: sss"),
    ("resume=/proc", "resume=/proc: /proc is not a checkpoint: a sharded checkpoint contains .metadata, but this"),
    ("resume=/proc/version", "resume=/proc/version: /proc/version (0 bytes) is not a checkpoint: it is neither a "),
    ("hydra.run.dir=/proc/new", "hydra.run.dir: the folder cannot be created: [Errno 2] No such file or directory: "),
    ("folder=/proc/new", "folder: [Errno 2] No such file or directory: '/proc/new'"),
    ("hydra.run.dir=/proc/version", "hydra.run.dir: the folder cannot be created: [Errno 17] File exists: "),
    ("-m hydra.sweep.dir=/proc/new", "hydra.sweep.dir: the folder cannot be created: [Errno 2] No such file or dir"),
    ("seed=0 --json model.width=-4", "model.width=-4 must be an integer of at least 1."),
    ("trainer.devices=-1", 'trainer.devices=-1 must be "auto" or an integer of at least 1.'),
    (
        "trainer.num_nodes=2",
        "trainer.num_nodes=2 requires a launcher: start one process per rank with torchrun or srun",
    ),
    ("trainer.accelerator=abacus", "trainer: You selected an invalid accelerator name: `accelerator='abacus'`"),
    ("trainer.precision=half", "trainer.precision='half' must be 64, 32, 16, "),
    ("trainer.gradient_clip_val=some", "trainer.gradient_clip_val='some' must be a number of at least 0 or None."),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 must be a number of at least 0 or None."),
    (
        "trainer.check_val_every_n_epoch=0",
        "trainer.check_val_every_n_epoch=0 must be an integer of at least 1 or None.",
    ),
    ("trainer.val_check_interval=0.5", "trainer: `val_check_interval` should be an integer"),
    ("trainer.max_steps=many", "trainer.max_steps='many' must be an integer."),
    ("trainer.max_steps=1.5", "trainer.max_steps=1.5 must be an integer."),
    (
        "trainer.max_steps=-5",
        "trainer: `max_steps` must be a non-negative integer or -1 (infinite steps). You passed in -5.",
    ),
    ("trainer.max_epochs=few", "trainer.max_epochs='few' must be an integer or None."),
    ("trainer.enable_progress_bar=3", "trainer.enable_progress_bar=3 must be True or False or None."),
    ("trainer.limit_val_batches=1.5", "trainer: You have passed invalid value 1.5 for limit_val_batches"),
    ("+trainer.deterministic=often", "trainer.deterministic='often' must be True or False, 'warn' or None."),
    ("+trainer.profiler=simpel", "trainer: When passing string value for the `profiler`"),
    ("+trainer.max_steps=3", "Could not append to config. An item is already at 'trainer.max_steps'. Either remove +"),
    ("callbacks.checkpoint.save_top_k=-7", "callbacks.checkpoint: Invalid value for save_top_k=-7"),
    ("logger=csv +logger.versoin=3", "logger.versoin: no such key; did you mean logger.version?"),
    ("stage.timeout=0", "stage.timeout=0 must be None, or a timedelta or number of seconds above 0"),
    ("stage.prefetch=-1", "stage.prefetch=-1 must be an integer of at least 0"),
    ("stage.unit_numel=many", "stage.unit_numel='many' must be an integer of at least 0"),
    ("stage.reduce_dtype=fp8", "stage.reduce_dtype='fp8' must be 'fp32', 'bf16', 'fp16'"),
    ("stage.activation_checkpointing=all", "stage.activation_checkpointing='all' must be 'units', a module class"),
    ("offload=gpu", "offload=gpu: no such option; there are cpu, cpu_params, none, nvme, nvme_params"),
    ("stage.resilience=disk", "stage.resilience='disk' must be None, 'memory', a ResilienceConfig"),
    ("stage.compression=zip", "stage.compression='zip' must be 'int8', 'int4' or None"),
    ("stage.offload=gpu", "stage.offload='gpu' must be None, 'cpu', 'nvme', an OffloadConfig or a mapping"),
    ("+stage.offload.optimizer=gpu", "stage.offload: optimizer='gpu' must be 'cpu', 'nvme' or None"),
    ("stage.units=some", "stage.units='some' must be 'auto', a module class"),
    ("stage.units=[", "stage.units=[: no viable alternative"),
]


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize(("argument", "line"), WRONG, ids=[argument for argument, _ in WRONG])
def test_wrong_value_ends_with_one_line_that_names_the_key(
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
    assert errors.startswith(f"lightning-zero train: {line}") and errors.count("\n") == 1, errors


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"model: [1,", "a configuration file in FOLDER is damaged: while parsing a flow node"),
        (b"\xff\xfe", "a configuration file in FOLDER is damaged: 'utf-8' codec can't decode byte 0xff"),
        (b"# @package _global_\nmodel: 3", "model=3: expected a mapping"),
    ],
)
def test_a_damaged_configuration_file_ends_with_one_line_that_names_it(
    content: bytes, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_bytes(content)
    arguments = ["--config-dir", str(tmp_path), "experiment=own"]
    test_wrong_value_ends_with_one_line_that_names_the_key(
        " ".join(arguments), line.replace("FOLDER", str(tmp_path)), monkeypatch, tmp_path, capfd
    )


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("offload=cpu", "offload: DDP cannot offload: write offload=none, or stage=1, 2 or 3"),
        ("resilience=memory", "resilience: DDP cannot keep its state: write resilience=none, or stage=1, 2 or 3"),
        ("+stage.compression=int8", "stage.compression: DDP has no such option: write stage=1, 2 or 3"),
        ("+stage.static_grap=true", "stage.static_grap: no such key; did you mean stage.static_graph?"),
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
    assert "lightning-zero train: model.heads=3 must divide width=32" in errors and "Traceback" not in errors
    objective = "objective=lossy is not one of the validation metrics, so a search finds nothing to minimize. Write "
    assert f"train: {objective}objective=loss or objective=perplexity.\n" in errors
    assert " failed" in output and " succeeded" in output
    assert not (tmp_path / "sweep/0/results.json").exists()
    assert (tmp_path / "sweep/1/results.json").exists()
