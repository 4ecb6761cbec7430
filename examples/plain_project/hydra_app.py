"""The same project with Hydra: the strategy is a config group. cli.py is the counterpart with LightningCLI.

    python examples/plain_project/hydra_app.py stage="'3'"
    python examples/plain_project/hydra_app.py stage="'2'" stage.offload=cpu

The defaults of hydra_app.yaml can be overridden; `--help` lists the groups.
"""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=".", config_name="hydra_app")
def main(config: DictConfig) -> None:
    seed_everything(config.seed_everything)
    trainer: Trainer = instantiate(config.trainer)
    trainer.fit(instantiate(config.model), instantiate(config.data))
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val/loss'].item():.8f}")


if __name__ == "__main__":
    main()
