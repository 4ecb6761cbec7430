"""Writes checkpoints with an installed DeepSpeed: `python -m tests.checkpoint.write_deepspeed FOLDER`.

Each case is a folder with `checkpoint`, as written by ``engine.save_checkpoint`` or Lightning's ``DeepSpeedStrategy``,
and `expected.pt`: weights by DeepSpeed's own ``zero_to_fp32``, optimizer state by its own API, and the weights after
more steps. `data/deepspeed.tar.xz` contains these folders and was created by:

    python -m tests.checkpoint.write_deepspeed written && tar cJf tests/checkpoint/data/deepspeed.tar.xz -C written .
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from tests.checkpoint.small_model import AFTER, BEFORE, SmallLearner, batch, make_model, make_optimizer

CASES: dict[str, dict[str, Any]] = {
    "stage1-fp32": {"stage": 1},
    "stage2-fp32": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "stage3-fp32": {"stage": 3, "zero": {"sub_group_size": 30}},
    "stage1-bf16": {"stage": 1, "low": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
    "stage2-fp16": {"stage": 2, "low": "fp16"},
    "stage3-bf16": {"stage": 3, "low": "bf16", "ranks": 3},
    "stage2-elastic": {"stage": 2, "zero": {"elastic_checkpoint": True}},
    "lightning-stage2": {"stage": 2, "lightning": True},
    "lightning-stage3": {"stage": 3, "lightning": True},
}


def config_of(stage: int, low: str | None = None, zero: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """DeepSpeed's configuration of a case."""
    options = {name: value for name, value in options.items() if name not in ("ranks", "lightning")}
    if low == "fp16":
        options["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif low == "bf16":
        options["bf16"] = {"enabled": True}
    return {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **options,
    }


def write(rank: int, world_size: int, port: int, name: str, folder: Path) -> None:
    """Write one rank's part of a case, in its own process."""
    torch.set_num_threads(1)
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ.update({key: str(value) for key, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=name, DS_ACCELERATOR="cpu")
    case = CASES[name]
    if case.get("lightning"):
        train_by_lightning(case, rank, folder)
    else:
        train(case, rank, folder)


def train(case: dict[str, Any], rank: int, folder: Path) -> None:
    """A custom training loop, as in DeepSpeed's documentation."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch supports it; DeepSpeed decides by a CPU's speed
    deepspeed.init_distributed("gloo")
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config_of(**case))
    for step in range(BEFORE):
        training_step(engine, step, rank)
    engine.save_checkpoint(folder / "checkpoint", client_state={"note": "mine", "lr_of": torch.tensor([1.0, 2.0])})
    go_on(engine, rank, folder)


def train_by_lightning(case: dict[str, Any], rank: int, folder: Path) -> None:
    """Lightning's strategy, which checks for GPUs before it calls DeepSpeed, although it does not need one here."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    class OnCPU(DeepSpeedStrategy):
        root_device = torch.device("cpu", rank)

        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    class Learner(SmallLearner):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(folder / "checkpoint")
            go_on(self.trainer.strategy.model, rank, folder, self.lr_schedulers())

    strategy = OnCPU(config=config_of(**case), process_group_backend="gloo")
    quiet = {
        "logger": False,
        "use_distributed_sampler": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=BEFORE, **quiet).fit(Learner(rank))


def training_step(engine: Any, step: int, rank: int) -> float:
    loss = engine(*batch(step, rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


def go_on(engine: Any, rank: int, folder: Path, scheduler: Any = None) -> None:
    """Write the expected values: the checkpoint's contents by DeepSpeed's tools, and its own continued training."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:  # DeepSpeed 0.19 looks at the states when only the first group has any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    weights = consolidated(folder / "checkpoint", engine)
    state = engine.zero_round_robin_gradients() or {  # with round_robin_gradients DeepSpeed 0.19 reads wrong positions
        name: {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        losses.append(training_step(engine, step, rank))
        if scheduler is not None:
            scheduler.step()
    engine.save_checkpoint(folder / "later")
    later = consolidated(folder / "later", engine)
    if rank == 0:
        torch.save({"weights": weights, "state": state, "losses": losses, "later": later}, folder / "expected.pt")
        shutil.rmtree(folder / "later")
        for script in (folder / "checkpoint").glob("zero_to_*.py"):  # DeepSpeed's copies for its users
            script.unlink()
    torch.distributed.barrier()


def consolidated(folder: Path, engine: Any) -> dict[str, torch.Tensor]:
    """Full fp32 weights, by DeepSpeed's own tool; where the tool fails, by DeepSpeed's API."""
    from deepspeed.utils import safe_get_full_fp32_param
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if list(folder.glob("*/bf16_*")) and engine.zero_optimization_stage() == 1:  # DeepSpeed's "BF16_Optimizer"
        trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}
    return {name: value.clone() for name, value in get_fp32_state_dict_from_zero_checkpoint(folder).items()}


def write_all(folder: Path, names: list[str]) -> None:
    """Write these cases, each in its own processes."""
    for name in names:
        (folder / name).mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = CASES[name].get("ranks", 2)
        torch.multiprocessing.spawn(write, (ranks, port, name, (folder / name).absolute()), nprocs=ranks)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
