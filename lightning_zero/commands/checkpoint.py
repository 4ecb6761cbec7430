"""`lightning-zero checkpoint`: inspect, verify, convert, export and import checkpoints."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.commands.showing import Parser, print_json, size_of
from lightning_zero.io.text import in_bytes, print_table

EPILOG = "PATH is a Lightning checkpoint file or a torch.distributed.checkpoint folder, written by any library."


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        options.run(options)
        return 0
    except (ImportError, OSError, ValueError) as error:
        from lightning_zero.checkpoint.checksums import DamagedCheckpointError

        if options.json and isinstance(error, DamagedCheckpointError):
            print_json({"path": options.path, "whole": False, "damage": str(error)})
            return 1
        print(f"lightning-zero checkpoint {options.command}: {error}", file=sys.stderr)
        return 1


def parser() -> Parser:
    made = Parser("lightning-zero checkpoint", description="Inspect and convert checkpoints.", epilog=EPILOG)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    def command(name: str, run: Callable[[Any], None], does: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=does, description=does, epilog=EPILOG if name != "import" else None)
        added.set_defaults(run=run)
        if name == "import":
            added.add_argument("source", choices=("deepspeed", "fsdp"), help="the library that wrote PATH")
        added.add_argument("path", metavar="PATH")
        if name not in ("inspect", "verify"):
            added.add_argument("out", metavar="OUT", help="FOLDER/NAME.safetensors" if name == "export" else None)
            added.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
        added.add_argument("--json", action="store_true", help="print the result as JSON")
        return added

    inspect = command("inspect", _inspect, "show what is in a checkpoint, without reading its values")
    inspect.add_argument("--all", action="store_true", help="show every tensor, including optimizer states")

    command("verify", _verify, "read all of a checkpoint; exit code 1 if it is damaged")

    export = command("export", _export, "write the weights to a safetensors file, for any framework")
    export.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of floating-point weights (default: as saved)"
    )
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=size_of,
        default="5GB",
        help="size limit of a file; larger exports become several files with an index (default: 5GB)",
    )
    export.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        help="export only weights whose names begin with PREFIX, and remove it from the names. Default: the prefix of "
        "the module's transformers model, if there is exactly one; '' exports all weights under their own names",
    )

    convert = command("convert", _convert, "write a checkpoint as one file or as a sharded folder")
    convert.add_argument("--to", choices=("full", "sharded"), required=True, help="one file, or a folder")

    foreign = command("import", _import, "convert a DeepSpeed or FSDP checkpoint to a Lightning checkpoint")
    foreign.add_argument("--to", choices=("full", "sharded"), default="full", help="one file (default) or a folder")
    foreign.add_argument(
        "--prefix",
        default="",
        help="prefix to add to parameter names: 'model.' if the LightningModule holds the network as self.model",
    )
    foreign.add_argument("--model", metavar="ENTRY", help="fsdp only: the entry that contains the weights")
    return made


def _open(options: Any) -> Any:
    from lightning_zero.checkpoint.reading import open_checkpoint

    return open_checkpoint(options.path)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _export(options: Any) -> None:
    import torch

    from lightning_zero.checkpoint.exporting import existing_at, export, write_safetensors
    from lightning_zero.io.text import listed

    if not options.out.endswith(".safetensors"):
        raise ValueError(f"OUT must end in .safetensors: for example {Path(options.out) / 'model.safetensors'}.")
    _refuse_existing(existing_at(options.out), options)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}[options.dtype]
    opened = _open(options)
    opened.verify()
    content = export(opened.checkpoint, opened.path, dtype, options.strip_prefix)
    models = (opened.checkpoint.get(CHECKPOINT_KEY) or {}).get("transformers") or {}
    if options.strip_prefix is None and len(models) > 1:
        _say(f"exporting several transformers models ({', '.join(models)}): --strip-prefix exports only one")
    if content.config is not None:
        _refuse_existing([os.path.join(os.path.dirname(options.out), "config.json")], options)
    files = write_safetensors(content, options.out, most_bytes=options.max_shard_size)
    if content.left_out:
        _say(f"not exported: {listed(content.left_out)}")
    if options.json:
        counts = {"tensors": len(content.weights), "tied": len(content.tied), "bytes": content.bytes}
        print_json({"files": files, **counts, "left_out": content.left_out})
        return
    tied = f" + {len(content.tied)} tied" if content.tied else ""
    print(f"{listed(files)}: {len(content.weights)} tensors{tied}, {in_bytes(content.bytes)}")


def _refuse_existing(paths: Iterable[str], options: Any) -> None:
    for path in paths:
        fs, place = url_to_fs(path)
        if not fs.exists(place):
            continue
        if not options.overwrite:
            raise ValueError(f"{path} already exists: choose another OUT, or replace it with --overwrite.")
        Destination(path).check_replaceable()


def _inspect(options: Any) -> None:
    opened = _open(options)
    rows = _rows_of(opened)
    own = [row for row in rows if row["tied_to"] is None]
    found = {key: opened.checkpoint.get(key) for key in ("epoch", "global_step")}
    known = {key: value for key, value in found.items() if isinstance(value, int)}
    size = sum(row["bytes"] for row in own)
    if options.json:
        about = {"path": opened.path, "whole": True, "form": opened.form, "written_by": opened.written_by, **known}
        print_json({**about, "bytes": size, "tensors": rows})
        return
    print(f"{opened.path}: {opened.form}, {in_bytes(size)} in {len(own)} tensors")
    by = ", ".join(f"{what} {which}" for what, which in opened.written_by.items())
    print(f"written by: {by or 'unknown'}")
    print(", ".join(f"{name} {value}" for name, value in known.items()) or "epoch and step: not recorded")

    table: list[tuple[str, ...]] = [("name", "shape", "dtype", "bytes")]
    for row in rows:
        if options.all or _part_of(row) == "state_dict":
            name, tied_to = row["name"], row["tied_to"] or ""
            if not options.all:
                name, tied_to = name.removeprefix("state_dict."), tied_to.removeprefix("state_dict.")
            size_or_tie = f"= {tied_to}" if tied_to else in_bytes(row["bytes"])
            table.append((name, str(row["shape"]), row["dtype"], size_or_tie))
    print_table(table, right=(3,))
    table = [("part", "tensors", "bytes")]
    for part in dict.fromkeys(map(_part_of, rows)):
        of_part = [row["bytes"] for row in own if _part_of(row) == part]
        table.append((part, str(len(of_part)), in_bytes(sum(of_part))))
    print_table(table, right=(1, 2))
    print("no file is missing or truncated; 'lightning-zero checkpoint verify' checks the values")


def _rows_of(opened: Any) -> list[dict[str, Any]]:
    """Describe each tensor, in the checkpoint's order.

    ``shape`` has -1 for sizes that vary in a nested tensor, ``bytes`` includes the indices of a sparse tensor, and
    ``tied_to`` is the name of the first tensor with the same memory, or None if this tensor is the first.
    """
    from lightning_zero.checkpoint.trees import identity
    from lightning_zero.engine import compat

    seen: dict[Any, str] = {}
    rows = []
    for name, tensor in opened.tensors.items():
        first = seen.setdefault(identity(tensor), name)
        shape = [tensor.size(0)] + [-1] * (tensor.dim() - 1) if tensor.is_nested else list(tensor.shape)
        row = {"name": name, "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch.")}
        rows.append({**row, "bytes": compat.nbytes_of(tensor), "tied_to": first if first != name else None})
    return rows


def _part_of(row: dict[str, Any]) -> str:
    """The entry with a tensor, such as ``state_dict``, ``optimizer_states.0`` or ``lightning_zero.masters``."""
    first, _, rest = row["name"].partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in ("optimizer_states", CHECKPOINT_KEY) else first


def _verify(options: Any) -> None:
    opened = _open(options)
    opened.verify()
    if options.json:
        print_json({"path": opened.path, "whole": True, "bytes": opened.bytes_to_verify})
    else:
        print(f"{opened.path}: undamaged")


def _convert(options: Any) -> None:
    _refuse_existing([options.out], options)
    opened = _open(options)
    opened.verify()
    _write(opened, options)


def _import(options: Any) -> None:
    from lightning_zero.checkpoint.converting import with_prefix

    which = {} if options.model is None else {"model": options.model}
    if which and options.source != "fsdp":
        raise ValueError(f"--model {options.model} works with fsdp only: a DeepSpeed checkpoint has one model.")
    _refuse_existing([options.out], options)
    source = importlib.import_module(f"lightning_zero.convert.{options.source}")
    _write(with_prefix(getattr(source, f"open_{options.source}")(options.path, **which), options.prefix), options)


def _write(opened: Any, options: Any) -> None:
    from lightning_zero.checkpoint.converting import write_full, write_sharded
    from lightning_zero.checkpoint.trees import bytes_of

    total = bytes_of(opened.checkpoint)
    (write_full if options.to == "full" else write_sharded)(opened, options.out)
    if options.json:
        print_json({"path": options.out, "form": options.to, "bytes": total})
    else:
        print(f"{options.out}: {options.to}, {in_bytes(total)}")
