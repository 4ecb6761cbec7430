"""The agent of a machine: torchelastic starts its processes, and starts all again when one has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser


def number_of_gpus() -> int:
    """GPUs of this machine, of any make."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def run_processes(options: Mapping[str, Any], function: Callable[..., None], *arguments: Any) -> str | None:
    """Call a function in each process of a job until all have returned.

    Args:
        options: torchrun's options, by their long names without dashes.
        function: at the top of a module; called in processes that are forked or spawned.

    Returns:
        What has failed when there are no restarts left, otherwise None.

    Raises:
        ValueError: if an option is wrong.
    """
    words = [f"--{name}={value}" for name, value in options.items()]
    try:
        config, *_ = config_from_args(get_args_parser().parse_args([*words, "script"]))
    except AssertionError as error:
        raise ValueError(str(error)) from None
    try:
        elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        return str(error)
    return None
