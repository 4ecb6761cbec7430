"""Command arguments that name a project: a class and a batch, a script, or a configuration."""

from __future__ import annotations

import argparse
import ast
import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_zero.commands.showing import Parser

_USAGE = """lightning-zero {command} package.module:Module [width=64 ...] --batch package.module:make_batch [options]
       lightning-zero {command} train.py [options] [-- arguments of the script]
       lightning-zero {command} [model=gpt_tiny ...] [options]"""


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split at ``--`` into the command's own arguments and the script's arguments."""
    where = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:where], arguments[where + 1 :]


def project_parser(command: str, description: str, stages: list[int]) -> Parser:
    """A parser with the arguments that ``project_of`` reads, and the options of every command for projects."""
    parser = Parser(f"lightning-zero {command}", usage=_USAGE.format(command=command), description=description)
    parser.add_argument(
        "project",
        nargs="*",
        help="a LightningModule class, or a function that returns a module, with its arguments; a script, which is run "
        "up to Trainer.fit; or overrides of the configuration of lightning-zero train",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        metavar="BATCH",
        help="for a class or a function: package.module:function that returns a batch like the data loader's, or "
        "tensors such as 'int64[4,1024]'",
    )
    parser.add_argument("--stage", type=int, nargs="+", default=stages, choices=stages, help="ZeRO stages; 0 is DDP")
    parser.add_argument("--precision", help="the Trainer's precision (default: the project's, or 32-true)")
    parser.add_argument(
        "--option",
        nargs="+",
        default=[],
        metavar="name=value",
        help="other options of ZeroStrategy, such as prefetch=0; for plan, several values of one are several choices: "
        "shard_within=null shard_within=node",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def project_of(parsed: argparse.Namespace, of_script: list[str]) -> Any:
    """The project that the command's positional arguments name.

    Raises:
        ValueError: if the arguments do not name a project.
    """
    from lightning_zero.planning import projects

    first, *others = parsed.project
    # a script's path may contain "=" or ":", and an override may end with ".py", as in data.path=corpus.py
    if first.endswith(".py") and (Path(first).is_file() or not {"=", ":"} & set(first)):
        return projects.of_script(Path(first), [*others, *of_script])
    if "=" in first:
        return _of_config([first, *others])
    make_module = partial(_found(first), **dict(map(setting, others)))
    if parsed.batch is None:
        raise ValueError("--batch is missing: package.module:function, or tensors such as 'int64[4,1024]'")
    return projects.Project(make_module, partial(_batches, parsed.batch))


def _of_config(overrides: list[str]) -> Any:
    """The project that ``lightning-zero train`` would train with these overrides.

    Raises:
        ValueError: if the configuration is invalid.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from hydra.utils import instantiate

    from lightning_zero.commands.check import ConfigError, check, in_one_line
    from lightning_zero.planning.projects import Project, batches_of, settings_of

    try:
        with initialize_config_module("lightning_zero.conf", version_base="1.3"):
            config = compose("train", [*map(quote_stage, overrides), "folder=."])
        of_trainer = dict(config.trainer)
        # the configured devices need not be on this machine
        config.trainer.update(accelerator="cpu", devices=1, num_nodes=1)
        config = check(config)
    except (ConfigError, HydraException) as error:
        raise ValueError(in_one_line(error)) from None
    data = partial(batches_of, instantiate(config.data))
    return Project(partial(instantiate, config.model), data, settings_of(of_trainer))


def quote_stage(argument: str) -> str:
    """stage=1,2 -> stage="1","2": Hydra parses bare numbers as integers, but option names must be strings."""
    key, equals, value = argument.partition("=")
    return key + equals + re.sub(r"(?<![\w\"'])(\d+)(?![\w\"'])", r'"\1"', value) if key == "stage" else argument


def _found(name: str) -> Callable[..., Any]:
    """Import the object that `package.module:name` names.

    Raises:
        ValueError: if there is no such object, or if it is not callable.
    """
    try:
        found: Any = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"{name!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name!r} must be package.module:Name, not a {type(found).__name__}")
    return found


def _batches(given: list[str]) -> Iterator[Any]:
    """Yield batches from the project's function, or random ones: a tensor of the declared shape, or a tuple of tensors.

    Raises:
        ValueError: if ``given`` names no function and declares no tensors.
    """
    import torch

    if len(given) == 1 and "[" not in given[0]:
        make = _found(given[0])
        while True:
            yield make()
    shapes = []
    for text in given:
        match = re.fullmatch(r"(\w+)\[(\d+(?:,\d+)*)\]", text)
        dtype = getattr(torch, match[1], None) if match is not None else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise ValueError(f"--batch {text!r} must be package.module:function, or tensors such as 'int64[4,1024]'")
        shapes.append((tuple(map(int, match[2].split(","))), dtype))
    while True:
        tensors = [torch.randint(2, shape, device="cpu").to(dtype) for shape, dtype in shapes]
        tensors = [torch.randn_like(each) if each.is_floating_point() else each for each in tensors]
        yield tensors[0] if len(tensors) == 1 else tuple(tensors)


def setting(text: str) -> tuple[str, Any]:
    """Split ``name=value``. The value is JSON or a Python literal, such as ``False``; any other value is a string.

    Raises:
        ValueError: if ``text`` contains no ``=``.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} must be name=value")
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return name, parse(value)
    return name, value


def strategy_options(given: list[str], refused: Mapping[str, str]) -> dict[str, list[Any]]:
    """Parse options of ZeroStrategy, given as ``name=value``; an option that is given several times has several values.

    Args:
        refused: options that the command sets in another way, with what to write instead; ``{}`` is the given value.

    Raises:
        ValueError: if an option is refused or does not exist. Values are not checked.
    """
    from lightning_zero.strategies.trainer import ZeroStrategy

    options: dict[str, list[Any]] = {}
    for text in given:
        name, value = setting(text)
        if name in refused:
            raise ValueError(f"{text} cannot be set with --option: {refused[name].format(text.partition('=')[2])}.")
        options.setdefault(name, []).append(value)
        try:
            ZeroStrategy(**{name: value})
        except TypeError as error:
            raise ValueError(str(error)) from None
        except ValueError:
            pass  # the value may be allowed at another stage, or with another option
    return options
