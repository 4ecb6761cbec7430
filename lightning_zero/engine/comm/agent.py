"""A machine's torchelastic agent, which starts the job's processes and restarts all of them when one dies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser


def number_of_gpus() -> int:
    """The number of GPUs on this machine, of any vendor."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def run_processes(options: Mapping[str, Any], function: Callable[..., None], *arguments: Any) -> str | None:
    """Start a job's processes, call a function in each, and wait for them; if one fails, restart all of them.

    Args:
        options: torchrun's options, by their long names without the leading dashes.
        function: a top-level function of a module, called in forked or spawned processes.

    Returns:
        A description of the last failure if no restarts are left, or None if all processes succeeded.

    Raises:
        ValueError: if an option is invalid.
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
