"""Entry point of the ranks that ``lightning-zero train`` starts: runs one job, whose config is in a file."""

import os
import sys
import threading

from omegaconf import DictConfig, OmegaConf

from lightning_zero.commands.train import train


def _end_with_parent() -> None:
    """Make the system terminate this rank when its parent process ends, even if the parent is killed."""
    parent = os.getppid()

    def watch() -> None:
        while not threading.Event().wait(1.0):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_rank(file: str) -> None:
    """Run the job whose config is in ``file``."""
    from lightning_zero.engine.comm import process_group

    _end_with_parent()
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    train(config)
    if process_group.is_initialized():
        process_group.destroy()


if __name__ == "__main__":
    _run_rank(sys.argv[1])
