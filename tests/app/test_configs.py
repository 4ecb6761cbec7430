"""Every file in conf/ composes, and the objects it configures can be instantiated."""

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_zero import OffloadConfig, ResilienceConfig
from lightning_zero.commands.check import ConfigError, _choose_devices, check
from lightning_zero.zoo.supervised import groups_of
from tests.app.commands import REPOSITORY
from tests.planning.papers import CONFIGURATIONS

CONF = REPOSITORY / "conf"
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
# group=option for each file of each group; stage/options is not a group, and hydra/launcher needs a package of its own
CHOICES = [
    f'{file.parent}="{file.stem}"'
    for file in FILES
    if len(file.parts) == 2 and file.parts[0] not in ("hydra", "hparams_search", "stage")
] + [f'stage="{stage}"' for stage in ("1", "2", "3", "auto", "ddp")]
ON_GPUS = [f'trainer="{name}"' for name in ("gpu", "one_gpu", "eight_gpus", "slurm")]
PACKAGES = {f'logger="{name}"': name for name in ("tensorboard", "wandb", "mlflow")}


def composed(*overrides: str, folder: Path) -> DictConfig:
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        return compose("train", overrides=[*overrides, f"folder={folder}"])


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_passes_the_check_and_instantiates_its_objects(choice: str, tmp_path: Path) -> None:
    needed = {'model="vit_tiny"': ["data=digits"], 'data="digits"': ["model=vit_tiny"]}.get(choice, [])
    if choice in ON_GPUS:
        # Lightning makes a Trainer for GPUs only on a machine with GPUs: the rest of the file is checked
        needed = ["trainer.accelerator=cpu", "trainer.devices=2"]
    if "digits" not in f"{choice}{needed}":
        needed = [*needed, "data.max_bytes=500_000"]
    if "nvme" in choice:
        needed = [*needed, f"stage.offload.path={tmp_path}"]
    package = PACKAGES.get(choice, "torch")
    if package in ("wandb", "mlflow") and find_spec(package) is None:
        message = f'logger: the package {package} is missing: pip install "lightning_zero[{package}]"'
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            check(composed(choice, *needed, folder=tmp_path))
        return
    config = check(composed(choice, *needed, folder=tmp_path))

    instantiate(config.data)
    with torch.device("meta"):
        model = instantiate(config.model)
    assert isinstance(model.optimizer(groups_of(model, model.optimizer)), torch.optim.Optimizer)
    for callback in config.callbacks.values():
        instantiate(callback)
    instantiate(config.logger)


@pytest.mark.parametrize("choice", ["1", "2", "3"])
def test_stage_options_reach_the_strategy(choice: str, tmp_path: Path) -> None:
    config = composed(f'stage="{choice}"', "stage.prefetch=2", folder=tmp_path)
    strategy = instantiate(config.trainer.strategy)
    assert strategy.stage == int(choice)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_offload_reaches_the_strategy_at_every_stage(stage: str, tmp_path: Path) -> None:
    path = f"stage.offload.path={tmp_path}"
    for arguments, meant in (
        (["offload=none"], None),
        (["offload=cpu", "stage.offload.fraction=0.5"], OffloadConfig("cpu", fraction=0.5)),
        (["offload=nvme", path, "stage.offload.fraction=0.5"], OffloadConfig("nvme", path=str(tmp_path), fraction=0.5)),
        (["stage.offload=cpu"], OffloadConfig("cpu")),
    ):
        config = composed(f'stage="{stage}"', *arguments, folder=tmp_path)
        assert instantiate(config.trainer.strategy).config.offload == meant
    for choice, meant in (
        ("cpu_params", OffloadConfig("cpu", parameters="cpu")),
        ("nvme_params", OffloadConfig("nvme", parameters="nvme", path=str(tmp_path))),
    ):
        arguments = [f'stage="{stage}"', f"offload={choice}", *([path] if "nvme" in choice else [])]
        if stage == "3":
            assert instantiate(composed(*arguments, folder=tmp_path).trainer.strategy).config.offload == meant
        else:
            with pytest.raises(ConfigError, match=rf"parameters='\w+' requires stage 3: at stage {stage}"):
                check(composed(*arguments, "data.max_bytes=500_000", folder=tmp_path))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_papers_configurations_are_choices_of_stage(name: str, tmp_path: Path) -> None:
    config = composed(f'stage="{name.lower()}"', "stage.tensor_parallel_size=2", folder=tmp_path)
    strategy, meant = instantiate(config.trainer.strategy), CONFIGURATIONS[name]
    made = strategy.config
    (options,) = meant["variants"]
    offload = OffloadConfig(optimizer=None, activations="cpu") if "offload" in options else None
    assert ([made.stage], made.activation_checkpointing, made.offload) == (meant["stages"], "units", offload)
    assert made.partition_activations == options.get("partition_activations", False)
    assert strategy.options.tensor_parallel_size == 2


def test_compression_reaches_the_strategy(tmp_path: Path) -> None:
    config = composed('stage="2"', "stage.compression=int8", folder=tmp_path)
    assert instantiate(config.trainer.strategy).config.compression == "int8"


def test_resilience_reaches_the_strategy(tmp_path: Path) -> None:
    for arguments, meant in (
        ([], None),
        (["resilience=memory"], ResilienceConfig()),
        (["stage.resilience=memory"], ResilienceConfig()),
        (["resilience=memory", "stage.resilience.every_n_steps=5"], ResilienceConfig(every_n_steps=5)),
        (["resilience=memory", "stage.resilience.job=mine"], ResilienceConfig(job="mine")),
    ):
        config = composed(*arguments, folder=tmp_path)
        assert instantiate(config.trainer.strategy).options.resilience == meant


def test_tensorboard_is_the_default_logger_and_a_csv_file_the_fallback_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("data.max_bytes=500_000", folder=tmp_path)
    assert config.logger._target_ == "lightning.pytorch.loggers.TensorBoardLogger"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    assert check(config).logger == composed("logger=csv", folder=tmp_path).logger


def test_precision_float8_converts_the_model_and_needs_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("precision=float8", "data.max_bytes=500_000", folder=tmp_path)
    assert (config.trainer.precision, config.model.float8) == ("bf16-mixed", "tensorwise")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    message = 'precision: the package torchao is missing: pip install "lightning_zero[optimizers]"'
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check(config)


def test_accelerator_auto_uses_the_gpus_or_two_processes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices_of(*overrides: str) -> tuple[str, str | int]:
        trainer = composed(*overrides, folder=tmp_path).trainer
        _choose_devices(trainer)
        return trainer.accelerator, trainer.devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices_of() == devices_of("trainer=cpu") == ("cpu", 2)
    assert devices_of("trainer.devices=3") == ("cpu", 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # as torchrun --nproc-per-node 4 sets it
    assert devices_of() == ("cpu", 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert devices_of() == devices_of("trainer=gpu") == ("gpu", "auto")
    assert devices_of("trainer=one_gpu") == ("gpu", 1) and devices_of("trainer=eight_gpus") == ("gpu", 8)
    assert devices_of("trainer=cpu") == ("cpu", 2)


def test_callbacks_are_chosen_one_by_one(tmp_path: Path) -> None:
    config = composed("callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=2", folder=tmp_path)
    assert list(config.callbacks) == ["checkpoint", "progress", "early_stopping"]
    assert instantiate(config.callbacks.early_stopping).patience == 2


def test_overrides_may_come_in_any_order(tmp_path: Path) -> None:
    overrides = ["experiment=digits", "trainer=cpu", "precision=bf16-mixed", "stage='2'", "offload=cpu", "debug=short"]
    config = composed(*overrides, folder=tmp_path)
    assert (config.stage.stage, config.stage.offload.optimizer) == (2, "cpu")
    assert (config.trainer.max_steps, config.trainer.precision) == (10, "bf16-mixed")
    assert config == composed(*reversed(overrides), folder=tmp_path)


def test_optuna_searches_for_the_lowest_objective(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        config = compose("train", ["hparams_search=optuna"], return_hydra_config=True)
    sweeper = config.hydra.sweeper
    assert sweeper._target_.endswith("OptunaSweeper") and sweeper.direction == "minimize"
    assert sweeper.params == {
        "optimizer.lr": "tag(log, interval(1e-4, 1e-2))",
        "model.warmup_steps": "choice(10, 30, 100)",
    }
    assert config.objective == "loss"


def test_later_groups_override_earlier_ones(tmp_path: Path) -> None:
    config = composed("experiment=digits", "debug=short", "precision=bf16", folder=tmp_path)
    assert config.model._target_ == "lightning_zero.zoo.digits.DigitClassifier"
    assert config.trainer.max_steps == 10  # from debug=short, not the 250 from experiment=digits
    assert config.trainer.precision == "bf16-mixed"


def test_slurm_launcher_takes_its_sizes_from_the_trainer(tmp_path: Path) -> None:
    config = composed("trainer=slurm", "trainer.num_nodes=4", folder=tmp_path)
    launcher = OmegaConf.load(CONF / "hydra" / "launcher" / "slurm.yaml")
    merged = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config)), {"launcher": launcher})
    assert (merged.launcher.nodes, merged.launcher.tasks_per_node, merged.launcher.gpus_per_node) == (4, 8, 8)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_says_how_it_is_overridden(file: Path) -> None:
    comments = " ".join(re.findall(r"^#(.*)", (CONF / file).read_text(), flags=re.MULTILINE))
    assert re.search(r"[Oo]verrid|command line", comments), "no comment says how"
    assert file.name == "train.yaml" or f"{file.stem}" in comments or file.parent.name == "options"
