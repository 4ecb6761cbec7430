"""Export weights as safetensors files, tensor by tensor, so that memory use does not grow with the checkpoint.

The format (huggingface.co/docs/safetensors): eight bytes with the length of the header, a JSON header with the dtype,
shape and offset of each tensor, then the values of all tensors, little-endian and without gaps.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor, nn

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, configs_of_models
from lightning_zero.checkpoint.objects import ONE_RANK, Ranks
from lightning_zero.checkpoint.saving import on_every_rank
from lightning_zero.checkpoint.trees import identity, is_dense
from lightning_zero.engine import LazyTensor, flat_range, quantised_layers, streaming
from lightning_zero.io.annotations import check_value
from lightning_zero.io.labels import new_label
from lightning_zero.io.text import listed

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_PART = 2**20  # number of elements to read and convert at a time
_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Weight:
    """A tensor to write: its name, values and target dtype, and its fp32 master weights if ``converted`` uses them."""

    name: str
    values: Tensor
    dtype: torch.dtype
    master: Tensor | None = None

    @property
    def bytes(self) -> int:
        return self.values.numel() * self.dtype.itemsize

    def converted(self, part: Tensor, start: int) -> Tensor:
        """Convert ``part``, with flat offset ``start``, to ``dtype``; use the master weights if there are any."""
        if self.master is not None:
            master = flat_range(self.master.detach(), start, start + part.numel())
            # A value that differs from its rounded master weight was changed after the last step, so the value is used.
            part = torch.where(master.to(part.dtype) == part, master, part.to(master.dtype))
        return part.to(self.dtype)


@dataclass
class Export:
    """Contents of an export.

    Attributes:
        tied: maps each omitted alias to the name under which its values are written.
        left_out: names of entries that are not exported: the name lacks the prefix, or the value is not a tensor.
        config: contents of ``config.json`` of a transformers model.
    """

    weights: list[Weight]
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        return sum(weight.bytes for weight in self.weights)


def export(
    checkpoint: Mapping[str, Any], path: str, dtype: torch.dtype | None = None, prefix: str | None = None
) -> Export:
    """Determine what to export, without reading values.

    Args:
        path: the checkpoint's path, for errors.
        dtype: the dtype of exported floating-point weights; None keeps saved dtypes. Conversions start from the fp32
            master weights if the checkpoint has them.
        prefix: export only names with this prefix, and remove it. None means the name of the transformers model within
            the module if there is exactly one, otherwise no prefix.
    """
    ours = checkpoint.get(CHECKPOINT_KEY) or {}
    models = {name.rstrip("."): config for name, config in (ours.get("transformers") or {}).items()}
    if prefix is None:
        prefix = next(iter(models)) if len(models) == 1 else ""
    prefix = prefix.rstrip(".")
    config = json.loads(models[prefix]) if prefix in models else None
    start = f"{prefix}." if prefix else ""

    state, masters_by_name = _weights(checkpoint, ours.get("masters") or {})
    masters = {identity(state[name]): master for name, master in masters_by_name.items() if name in state}
    found = Export([], config=config)
    names: dict[Any, str] = {}
    for whole_name, values in state.items():
        name = whole_name.removeprefix(start)
        if not whole_name.startswith(start) or not isinstance(values, Tensor):
            found.left_out.append(whole_name)
            continue
        if not is_dense(values):
            kind = "nested" if values.is_nested else str(values.layout).removeprefix("torch.")
            raise ValueError(f"{path}: safetensors has no form for {whole_name}, which is a {kind} tensor.")
        if (memory := identity(values)) in names:
            found.tied[name] = names[memory]
            continue
        names[memory] = name
        wanted = dtype if dtype is not None and values.dtype in _CAST else values.dtype
        weight = Weight(name, values, wanted)
        master = masters.get(memory)
        if wanted != values.dtype and master is not None and master.shape == values.shape:
            weight.master = master
        found.weights.append(weight)
    if not found.weights:
        raise ValueError(
            f"{path} has no weights whose names begin with {start!r}; its names are {listed(list(state))}"
            if state
            else f"{path} has no weights in its state_dict."
        )
    for weight in found.weights:
        if weight.dtype not in DTYPES:
            raise ValueError(f"{path}: safetensors has no dtype for {weight.name}, which is {weight.dtype}.")
    dtypes = {weight.dtype for weight in found.weights if weight.dtype.is_floating_point}
    if config is not None and len(dtypes) == 1:  # the dtype in which `from_pretrained` loads weights
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtypes.pop()).removeprefix("torch.")
    return found


def _weights(checkpoint: Mapping[str, Any], masters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights and master weights by name. In a Fabric checkpoint, each name begins with its model's key."""
    if "state_dict" in checkpoint:
        inner = masters.get("model")  # Fabric checkpoints nest master weights under their model's key
        return dict(checkpoint["state_dict"]), dict(inner if isinstance(inner, dict) else masters)
    found: list[dict[str, Any]] = [{}, {}]
    for target, source in zip(found, (checkpoint, masters)):
        for key, values in source.items():
            if isinstance(values, dict):
                target.update((f"{key}.{name}", value) for name, value in values.items() if isinstance(value, Tensor))
    return found[0], found[1]


def existing_at(out: str) -> list[str]:
    """Return the paths of the files that earlier exports to the path ``out`` have left."""
    parent, name = os.path.split(out)
    fs, folder = url_to_fs(parent or ".")
    stem, suffix = map(re.escape, os.path.splitext(name))
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{suffix}|{stem}{suffix}\.index\.json")
    files = fs.ls(folder, detail=False) if fs.exists(folder) else []
    names = (os.path.basename(file.rstrip("/")) for file in files)
    return sorted(os.path.join(parent, name) for name in names if ours.fullmatch(name))


def _all_values(shards: list[list[Weight]]) -> Iterator[tuple[int, Weight, Tensor]]:
    return ((number, weight, weight.values) for number, weights in enumerate(shards) for weight in weights)


def write_safetensors(
    content: Export,
    out: str,
    *,
    most_bytes: int,
    values_of: Callable[[list[list[Weight]]], Iterator[tuple[int, Weight, Tensor]]] = _all_values,
    ranks: Ranks = ONE_RANK,
) -> list[str]:
    """Write an export, replacing any earlier export at its path; return the paths of the written files.

    Args:
        out: ``FOLDER/NAME.safetensors``, which becomes several files and an index if one would exceed ``most_bytes``.
        values_of: given each file's weights, returns those that this rank writes, with the file's number and values.
    """
    shards = list(_shards(content.weights, most_bytes))
    folder, name = os.path.split(out)
    names, count = [name], len(shards)
    texts: dict[str, Any] = {} if content.config is None else {"config.json": content.config}
    if count > 1:
        stem, suffix = os.path.splitext(name)
        names = [f"{stem}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]
        places = {weight.name: name for name, weights in zip(names, shards) for weight in weights}
        texts[f"{name}.index.json"] = {"metadata": {"total_size": content.bytes}, "weight_map": places}
    labels = ranks.gather(new_label())
    written = {name: Destination(os.path.join(folder, name), labels[0]) for name in (*names, *texts)}
    values = values_of(shards)

    def write() -> None:
        try:
            for number, of_file in groupby(values, itemgetter(0)):
                with written[names[number]].writing() as stream:
                    stream.write(_header(shards[number], content.tied))
                    for _, weight, tensor in of_file:
                        write_values(stream, tensor, weight.converted)
        finally:
            for _ in values:  # after an error, too: the other ranks need this rank's shards
                pass

    def complete() -> None:
        for name, text in texts.items():
            with written[name].writing() as stream:
                stream.write(f"{json.dumps(text, indent=2)}\n".encode())
        _put_in_place([*written.values()], out, has_index=count > 1)

    try:
        for act in (write, complete if ranks.rank == 0 else list):
            act() if len(labels) == 1 else on_every_rank(act, ranks, out, "export")
    except BaseException:
        for destination in written.values():
            destination.discard()
        raise
    return [destination.path for destination in written.values()]


def _put_in_place(written: list[Destination], out: str, has_index: bool) -> None:
    """Replace an earlier export. If the process dies, readers find old weights, new weights or none, no mixture."""
    written[0].clear_leftovers()
    before = existing_at(out)
    for path in (out, f"{out}.index.json") if has_index else ():
        Destination(path).remove()
    for destination in written:
        destination.put_in_place()
    for path in sorted(set(before) - {destination.path for destination in written}):
        Destination(path).remove()


def export_weights(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    max_bytes: int = 2**30,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = False,
) -> list[str]:
    """Write a module's weights to ``model.safetensors``, or to several files, which the ranks share. Collective.

    If the module is or contains one transformers model, only that model is written, under its own names and with its
    ``config.json``: ``from_pretrained`` loads the folder. With PEFT's adapters, this requires ``merge_adapters``. The
    files do not depend on the number of ranks.

    Args:
        module, max_bytes, merge_adapters: see ``iter_full_parameters``. Tied parameters are written once.
        folder: a path or fsspec URL that all ranks can write to; an earlier export is replaced.
        max_shard_bytes: the size of a file, unless one tensor is larger. Ranks write different files at the same time.
        dtype: converts the state dict's floating-point weights of 16 bits or more (not the fp32 master weights).

    Returns:
        The paths of the written files.

    Raises:
        ValueError: if a tensor has no form in safetensors, or adapters cannot be merged; nothing has been written.
        OSError: on every rank, if a rank cannot write; an earlier export is then unchanged.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> engine = Engine(model, [optimizer], stage=3)  # as a strategy does before a run
        >>> lightning_zero.export_weights(model, "exported", dtype=torch.bfloat16)
        ['exported/model.safetensors']
        >>> engine.close()
    """
    check_value("export_weights: max_shard_bytes", max_shard_bytes, int, 1)
    check_value("export_weights: max_bytes", max_bytes, int, 1)
    parts = streaming.parts_of(module, merge_adapters)
    rank, size, gather = streaming.ranks_of(parts)
    part_of = {id(value): part for part in parts for _, value in part.results}
    content = _content_of(streaming.unwrapped(module), parts, merge_adapters, os.fspath(folder), dtype)

    def values_of(shards: list[list[Weight]]) -> Iterator[tuple[int, Weight, Tensor]]:
        # The first parts of the first files, then their second parts, ...: so ranks write at the same time.
        runs = []
        for file, weights in enumerate(shards):
            of_parts = groupby(weights, lambda weight: id(part_of[id(weight.values)]))
            runs += [(file // size, place, file, list(run)) for place, (_, run) in enumerate(of_parts)]
        runs.sort(key=itemgetter(0, 1, 2))
        needed = [part_of[id(run[0].values)] for *_, run in runs]
        whole = streaming.stream(needed, max_bytes)
        for (*_, file, run), part in zip(runs, needed):
            value_of = {id(wanted): value for (_, wanted), (_, value) in zip(part.results, whole)}
            if file % size == rank:
                for weight in run:  # in the order of the file's header
                    yield file, weight, value_of[id(weight.values)]

    out, ranks = os.path.join(folder, "model.safetensors"), Ranks(rank, gather)
    return write_safetensors(content, out, most_bytes=max_shard_bytes, values_of=values_of, ranks=ranks)


def _content_of(
    module: nn.Module, parts: list[streaming.Part], merge_adapters: bool, folder: str, dtype: torch.dtype | None
) -> Export:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"export_weights: dtype={dtype} must be a floating-point dtype.")
    state = {name.replace("_orig_mod.", ""): value for part in parts for name, value in part.results}
    # ``from_pretrained`` would not find weights beside adapters that are not merged
    models = configs_of_models(module) if merge_adapters or not streaming.has_adapters(module) else {}
    content = export({"state_dict": state, CHECKPOINT_KEY: {"transformers": models}}, folder, dtype)
    sources = dict(source for part in parts for source in part.sources)
    names = quantised_layers.names_of_scales(module).values()
    scales = {id(sources[name]) for of_layer in names for name in of_layer if name in sources}
    for weight in content.weights:
        if id(weight.values) in scales:
            weight.dtype = weight.values.dtype
    return content


def write_values(stream: Any, tensor: Tensor, convert: Callable[[Tensor, int], Tensor] = lambda part, _: part) -> None:
    """Write a tensor's values in the order of the flattened tensor, one part at a time.

    ``convert`` is called with a 1-D part and its offset, and returns the values to write instead.
    """
    flat = tensor if isinstance(tensor, LazyTensor) else tensor.detach().reshape(-1)
    for start in range(0, tensor.numel(), _PART):
        values = convert(flat_range(flat, start, min(start + _PART, tensor.numel())), start)
        values = values.resolve_conj().resolve_neg().contiguous()
        stream.write(values.view(torch.uint8).cpu().numpy())


def _shards(weights: list[Weight], most_bytes: int) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    size = 0
    for weight in weights:
        if shard and size + weight.bytes > most_bytes:
            yield _aligned(shard)
            shard, size = [], 0
        shard.append(weight)
        size += weight.bytes
    yield _aligned(shard)


def _aligned(weights: list[Weight]) -> list[Weight]:
    """Sort by descending element size, so that each offset is a multiple of that size, as memory mapping requires."""
    return sorted(weights, key=lambda weight: -weight.dtype.itemsize)


def _header(weights: list[Weight], tied: Mapping[str, str]) -> bytes:
    assert sys.byteorder == "little"
    here = {weight.name for weight in weights}
    # safetensors' save_model records tied names in the same way
    entries: dict[str, Any] = {"__metadata__": {**{k: v for k, v in tied.items() if v in here}, "format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + weight.bytes
        shape = list(weight.values.shape)
        entries[weight.name] = {"dtype": DTYPES[weight.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
