"""Load weights from a file: names and shapes at once, each rank's shard of the values when the module is sharded."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.form import DCP_METADATA
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.trees import is_dense
from lightning_zero.engine import LazyTensor, compat, deferred_param, flat_range, quantised_layers
from lightning_zero.io.untrusted import inside

_IN_A_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def load_weights(
    module: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, quantize: str | None = None
) -> compat.IncompatibleKeys:
    """Load a file's weights into a module. Call this function on every rank; it does not communicate.

    Within ``configure_model`` under ZeRO, the values stay in the file until the module is sharded; then each rank reads
    its shard. For a module that is already sharded, each rank reads its shard at once. Otherwise, parameters on the
    meta device use the file's mapped memory; values are copied into other parameters. Parameters keep their dtypes.

    Args:
        module: an ordinary module, one on the meta device, or one that is fully or partly sharded.
        path: a ``.safetensors`` file; a ``torch.save`` file with a state dict or a Lightning checkpoint; or a folder
            written by ``save_pretrained`` of transformers or by a strategy with ``checkpoint="sharded"``. For tied
            parameters, it is enough if the file contains one of their names.
        strict: raise an error if a name is only in the file or only in the module. If False, one common name suffices.
        quantize: ``"nf4"``, ``"fp4"`` or ``"int8"`` replaces each ``nn.Linear`` by bitsandbytes' frozen ``Linear4bit``
            (with double quantisation) or ``Linear8bitLt``, except heads (output embeddings of transformers' models),
            layers with tied weights, and layers that the file lacks. Each weight is quantised when its shard is read.
            The same holds, with None, for such layers in a module on the meta device.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does; both are empty if ``strict``.

    Raises:
        FileNotFoundError: if there are no weights at the path.
        ModuleNotFoundError: for safetensors files, if the package safetensors is not installed; likewise bitsandbytes.
        ValueError: if the file cannot be read or does not fit the module. In this case, nothing is loaded.

    Example:
        >>> torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "weights.pt")
        >>> with torch.device("meta"):  # in configure_model; takes no memory yet
        ...     model = torch.nn.Linear(3, 2)
        >>> lightning_zero.load_weights(model, "weights.pt")
        <All keys matched successfully>
        >>> model.weight.sum().item()
        6.0
    """
    state = _read(Path(path))
    state, scales = quantised_layers.take_scales(module, state)
    try:
        stand_ins, keys = _taken(module, state, strict)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit. Nothing was loaded. {error}") from error
    if state and len(keys.unexpected_keys) == len(state):
        raise ValueError(
            f"{path} and {type(module).__name__} have no names in common: load the file into the module that was saved."
        )
    if quantize is not None:  # only now, so that a file that does not fit changes nothing
        quantised_layers.replace_linear_layers(module, quantize, state)
        stand_ins, _ = _taken(module, state, strict=False)
    deferred_param.give_values(stand_ins, wait=deferred_param.may_values_wait())
    quantised_layers.load_scales(scales)
    return keys


def _taken(
    module: nn.Module, state: dict[str, Tensor], strict: bool
) -> tuple[dict[str, deferred_param.StandIn], compat.IncompatibleKeys]:
    """Note which values tensors would receive, and which names are in the file or the module only."""
    with deferred_param.taking_values(module, lambda tensor: True) as stand_ins:

        def leave_out_tied(_: nn.Module, keys: compat.IncompatibleKeys) -> None:
            """Remove names of parameters that have received values under another name."""
            filled = {id(stand_in) for stand_in in stand_ins.values() if stand_in.taken is not None}
            named = module.state_dict(keep_vars=True)  # with all names of tied parameters
            keys.missing_keys[:] = [name for name in keys.missing_keys if id(named.get(name)) not in filled]

        hook = module.register_load_state_dict_post_hook(leave_out_tied)
        try:
            return stand_ins, module.load_state_dict(state, strict=strict)
        finally:
            hook.remove()


def _read(path: Path) -> dict[str, Tensor]:
    """Read a state dict whose tensors remain in their files."""
    if (path / DCP_METADATA).is_file():
        return open_checkpoint(path).checkpoint.get("state_dict", {})
    if path.is_dir():
        found = next((name for name in _IN_A_FOLDER if (path / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{path} has no weights: it must contain one of {', '.join(_IN_A_FOLDER)}.")
        path = Path(inside(path, found))
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: load_weights takes a weights file, or a folder with one.")
    if path.suffix == ".json":
        with _named_in_errors(path):
            names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            files = [Path(inside(path.parent, name)) for name in names if not name.endswith(".json")]
        return {name: tensor for file in files for name, tensor in _read(file).items()}
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise ModuleNotFoundError(
                "the package safetensors is missing: pip install 'lightning_zero[weights]'", name="safetensors"
            ) from None
        with _named_in_errors(path):
            return _in_file(path, load_file(path, device="cpu"))
    with _named_in_errors(path):
        return _in_file(path, open_checkpoint(path).checkpoint.get("state_dict", {}))


def _in_file(path: Path, mapped: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where values may wait, lazy tensors over mapped ones, which all ranks recognise as values of the same file."""
    if not deferred_param.may_values_wait():
        return mapped
    size, state = path.stat().st_size, copy.copy(mapped)  # with the versions of modules that torch has added
    for name, tensor in mapped.items():
        if not isinstance(tensor, Tensor) or not is_dense(tensor):
            continue
        read = partial(flat_range, tensor)
        # on another machine, a file of this name and size may hold other values, so ranks also compare some values
        origin = path.name, size, name, tuple(read(0, min(tensor.numel(), 4)).view(torch.uint8).tolist())
        state[name] = LazyTensor(name, tensor.shape, tensor.dtype, read, origin)
    return state


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    """Context that turns errors of all classes into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as weights: {type(error).__name__}: {error}"
        ) from error
