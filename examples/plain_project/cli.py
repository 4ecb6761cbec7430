r"""The same project with LightningCLI: the strategy is an argument. hydra_app.py is the counterpart with Hydra.

    python examples/plain_project/cli.py fit --trainer.strategy=zero3
    python examples/plain_project/cli.py fit --trainer.strategy=lightning_zero.ZeroStrategy \
        --trainer.strategy.stage=2 --trainer.strategy.offload=cpu

The defaults of cli.yaml can be overridden; `fit --help` lists the arguments. Needs
pip install "jsonargparse[signatures]".
"""

from pathlib import Path

from lightning.pytorch.cli import LightningCLI
from train import DigitsClassifier, DigitsData

import lightning_zero  # noqa: F401  - registers the strategies' names


class CLI(LightningCLI):
    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            print(f"validation loss {self.trainer.callback_metrics['val/loss'].item():.8f}")


if __name__ == "__main__":
    defaults = {"fit": {"default_config_files": [str(Path(__file__).with_name("cli.yaml"))]}}
    CLI(DigitsClassifier, DigitsData, save_config_callback=None, parser_kwargs=defaults)
