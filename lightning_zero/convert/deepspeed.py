"""Open checkpoints from DeepSpeed's ZeRO stages 1 to 3 without DeepSpeed.

Each rank has a file with its shards of the fp32 master weights, stored as flat vectors:

- stages 1 and 2: the parameters of a param group are concatenated into one vector, which is split into equal shards,
  one per rank;
- stage 3: each parameter is split separately, and each rank concatenates its shards of a sub-group's parameters.

The optimizer states are vectors with the same layout. Frozen parameters and buffers are in the model files.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import DamagedCheckpointError
from lightning_zero.checkpoint.converting import with_lightnings_entries
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.form import CHECKPOINT_KEY
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.reading import OpenedCheckpoint, by_number, names_by_number
from lightning_zero.checkpoint.restricted import load_torch
from lightning_zero.checkpoint.trees import versions_in, with_versions
from lightning_zero.engine import LazyTensor
from lightning_zero.engine import config as options
from lightning_zero.io.text import listed
from lightning_zero.io.untrusted import inside, open_regular

_MOST_RANKS, _LONGEST_TAG = 2**16, 200
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

# Entries that DeepSpeed itself writes to a model file. All others come from the argument `client_state`, in which
# Lightning passes its checkpoint.
_OWN_ENTRIES = set(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size
    checkpoint_parallel_dimensions sparse_tensor_module_names csr_tensor_module_names universal_checkpoint_info
    ds_config ds_version
    """.split()
)


def open_deepspeed(path: str | os.PathLike[str]) -> OpenedCheckpoint:
    """Open a DeepSpeed checkpoint as a Lightning checkpoint dictionary; values are read only when they are used.

    Weights are the fp32 masters; other low-precision tensors are converted to fp32. If the parameters were in low
    precision, the masters are also stored in the entry that a ``bf16-true`` run reads. The optimizer's state is in
    torch's format, by parameter number; frozen parameters have no number, since DeepSpeed's param groups omit them.

    Args:
        path: a local folder with a ``latest`` file, as passed to ``engine.save_checkpoint`` or written by Lightning's
            ``DeepSpeedStrategy``; or the folder of one tag.

    Raises:
        FileNotFoundError: if there is no checkpoint, or files of some ranks are missing.
        ValueError: if the checkpoint was not written by ZeRO stages 1 to 3, or the model was also split by another
            kind of parallelism; if the files come from different saves; or if a name or link leads out of the folder.
        UnsafeFileError: if a file contains more than data.
        DamagedCheckpointError: if a file cannot be read.
    """
    folder = _folder_of_tag(Path(path))
    try:
        return _opened(os.fspath(path), folder)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise DamagedCheckpointError(
            f"{folder} is damaged: its entries are not DeepSpeed's ({type(error).__name__}: {error})."
        ) from error


def _opened(path: str, folder: Path) -> OpenedCheckpoint:
    optimizer_files, model_files = _rank_files(folder)
    models = {rank: _load(file) for rank, file in model_files.items()}
    by_rank = {rank: _load(file)["optimizer_state_dict"] for rank, file in optimizer_files.items()}
    saved = list(by_rank.values())
    model, state = models[min(models)], saved[0]
    _check_only_zero(folder, _other_parallelism(model))
    if not isinstance(model["module"], dict) or not model.get("param_shapes"):
        raise ValueError(f"{folder} has no parameter names: pipeline parallelism was used, or no optimizer was saved.")
    stage, count = _stage_of(folder, state), state["partition_count"]  # at stages 1 and 2, one count per param group
    world_size = max(count) if isinstance(count, (list, tuple)) else count
    _check_ranks(folder, "..._optim_states.pt", list(by_rank), world_size)
    _check_ranks(folder, "..._model_states.pt", list(models), world_size if stage == 3 else 1)

    masters = [each["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for each in saved]
    layouts = _layouts_of(folder, model, saved, masters, stage)
    trained = {
        name: place.tensor_in([flats[number] for flats in masters], name)
        for number, layout in enumerate(layouts)
        for name, place in layout.items()
    }
    checkpoint: dict[str, Any] = {key: value for key, value in model.items() if key not in _OWN_ENTRIES}
    if model.get("lr_scheduler") is not None:
        checkpoint.setdefault("lr_schedulers", [model["lr_scheduler"]])
    checkpoint = with_lightnings_entries(checkpoint, steps=model["global_steps"])
    checkpoint["state_dict"] = _state_dict(list(models.values()), trained)
    names = None
    config: Any = model.get("ds_config")  # DeepSpeed's configuration
    is_dealt = stage < 3 and "zero_stage" in state and isinstance(config, dict)
    is_dealt = is_dealt and bool(config["zero_optimization"].get("round_robin_gradients"))
    entry = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    optimizer = _optimizer_state(folder, [each.get(entry) for each in saved], masters, layouts, is_dealt)
    if optimizer is not None:
        checkpoint["optimizer_states"], names = [optimizer[0]], [optimizer[1]]
    if any(isinstance(value, Tensor) and value.dtype in options.LOW_PRECISION for value in model["module"].values()):
        checkpoint[CHECKPOINT_KEY] = {"masters": trained}

    written_by = {"deepspeed": str(model.get("ds_version", "")), "stage": stage, "world_size": len(saved)}
    return OpenedCheckpoint(path, "sharded", written_by, checkpoint, checkpoint, names, Files(folder), ())


# -- the files ---------------------------------------------------------------------------------------------------------


def _folder_of_tag(path: Path) -> Path:
    """Return the folder with the ranks' files: the path itself, or the folder of the tag stored in ``latest``."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder: a DeepSpeed checkpoint is a local folder with a 'latest' file.")
    names = sorted(os.listdir(path))
    if any(_OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name) for name in names):
        return path
    if "latest" not in names:
        raise FileNotFoundError(
            f"{path} has neither a 'latest' file nor files of ranks: pass a DeepSpeed checkpoint, or the folder of a "
            f"tag in it. It contains: {listed(names) or 'nothing'}."
        )
    with open_regular(inside(path, "latest")) as file:
        name = file.read(_LONGEST_TAG).decode(errors="replace").strip()
    folder = Path(inside(path, name))
    if not folder.is_dir():
        raise FileNotFoundError(f"{path}/latest names '{name}', but {path} contains no such folder.")
    return folder


def _rank_files(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return the optimizer files and the model files by rank; stages 1 and 2 have a single model file."""
    names = sorted(os.listdir(folder))
    optimizer = [match for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))]
    model = [match for name in names if (match := _MODEL_FILE.fullmatch(name))]
    others = [match.string for match in (*optimizer, *model) if int(match[2]) > 0]
    _check_only_zero(folder, others + [name for name in names if name.startswith("layer_") or "expert_" in name])
    for found, kind in ((optimizer, "optim"), (model, "model")):
        if not found:
            raise FileNotFoundError(f"{folder} is incomplete: it has no file '..._{kind}_states.pt'.")
    return (
        dict(sorted((int(match[1]), Path(inside(folder, match.string))) for match in optimizer)),
        dict(sorted((int(match[1] or 0), Path(inside(folder, match.string))) for match in model)),
    )


def _check_only_zero(folder: Path, evidence: list[str]) -> None:
    if evidence:
        raise ValueError(
            f"{folder} contains a model that was split by tensor, pipeline or expert parallelism as well as by ZeRO "
            f"({listed(evidence)}). This is not supported: use DeepSpeed's own ds_to_universal.py."
        )


def _check_ranks(folder: Path, files: str, ranks: list[int], world_size: Any) -> None:
    if not isinstance(world_size, int) or not 0 < world_size <= _MOST_RANKS:
        raise DamagedCheckpointError(f"{folder} is damaged: its partition_count is not a number of ranks.")
    wrong = sorted(set(ranks) ^ set(range(world_size)))
    if wrong:
        raise FileNotFoundError(
            f"{folder} does not contain the files of exactly {world_size} rank(s): it has '{files}' of rank(s) "
            f"{listed(map(str, ranks))}. The files of rank(s) {listed(map(str, wrong))} are missing, or left over from "
            "another save. Copy the checkpoint's files from all machines into one empty folder."
        )


class _Inert:
    """Stand-in for a DeepSpeed object: accepts constructor arguments and state, and ignores them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _stand_in(name: str) -> Any:
    """Return a stand-in for a class in DeepSpeed's files, by its dotted name; None for other names."""
    if name == "argparse.Namespace":
        return argparse.Namespace
    if not name.startswith("deepspeed."):
        return None
    return int if name.endswith(".ZeroStageEnum") else _Inert


def _load(file: Path) -> dict[str, Any]:
    """Load a DeepSpeed file with memory-mapped tensors, without importing DeepSpeed's classes."""
    try:
        loaded = load_torch(Files(file), stand_in=_stand_in)
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{file}: {error}.") from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{file} ({file.stat().st_size} bytes) is damaged, or not a DeepSpeed file: {type(error).__name__}: {error}"
        ) from error
    expected = "optimizer_state_dict" if _OPTIMIZER_FILE.fullmatch(file.name) else "module"
    if not isinstance(loaded, dict) or expected not in loaded:
        raise ValueError(f"{file} is not a DeepSpeed file: it has no entry '{expected}'.")
    return loaded


# -- contents of the files ---------------------------------------------------------------------------------------------


def _stage_of(folder: Path, state: dict[str, Any]) -> int:
    # DeepSpeed's "BF16_Optimizer", which is equivalent to stage 1, writes no "zero_stage".
    stage = state.get("zero_stage", 1 if "single_partition_of_fp32_groups" in state else None)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"{folder} has zero_stage={stage!r}, but only ZeRO stages 1, 2 and 3 are supported. To get the "
            "weights, run the zero_to_fp32.py that DeepSpeed saved with the checkpoint."
        )
    return int(stage)


def _other_parallelism(model: dict[str, Any]) -> list[str]:
    """The kinds of parallelism beside ZeRO that the model file states."""
    parallel = {"mp_world_size": model.get("mp_world_size"), **(model.get("checkpoint_parallel_dimensions") or {})}
    others = [f"{name}: {degree}" for name, degree in parallel.items() if isinstance(degree, int) and degree > 1]
    return others + [name for name in ("ds_autoep_layers", "autoep_layers") if model.get(name)]


class _Place(NamedTuple):
    """The place of a parameter's elements in the ranks' flat vectors.

    Attributes:
        start: position of the first element: at stage 3 in each rank's vector, otherwise in the ranks' joined vectors.
        share: number of elements, with padding, in each rank's vector at stage 3; None at stages 1 and 2.
    """

    shape: tuple[int, ...]
    start: int
    share: int | None

    def tensor_in(self, flats: list[Tensor], name: str) -> Tensor:
        """Return the parameter, or an optimizer state of the same shape, from the ranks' flat vectors."""
        if self.share is None:
            return _joined(name, self.shape, flats, self.start)
        return _joined(name, self.shape, [flat[self.start : self.start + self.share] for flat in flats])


_Layout = dict[str, _Place]
"""Places by parameter name, in the order of the parameters in one sharded flat vector."""


def _layouts_of(
    folder: Path, model: dict[str, Any], saved: list[dict[str, Any]], masters: list[list[Tensor]], stage: int
) -> list[_Layout]:
    """Return the layout of each flat vector.

    Raises:
        ValueError: if the ranks' vectors do not have the sizes that follow from the shapes in the model file.
    """
    layouts = []
    paddings = saved[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        padding = dict(zip(shapes, paddings[number])) if paddings else {}
        layout, start, stop = {}, 0, 0
        for name, shape in shapes.items():
            share = ceil(prod(shape) / len(masters)) if stage == 3 else None
            layout[name] = _Place(tuple(shape), start, share)
            stop = start + (prod(shape) if share is None else share)
            start = stop + padding.get(name, 0)
        held = [flats[number].numel() if number < len(flats) else 0 for flats in masters]
        fits = all(numel == stop for numel in held) if stage == 3 else stop <= sum(held)
        if not fits:
            advice = "The files come from different models or different saves."
            if (folder / "offloaded_tensors").is_dir():
                advice = "The optimizer's state was on NVMe, in files that only DeepSpeed can read."
            raise ValueError(
                f"{folder} is inconsistent: in '..._model_states.pt', param group {number} "
                f"({listed(list(layout), 3)}) has {stop} elements, but the element counts by rank are "
                f"{listed(map(str, held))}. {advice}"
            )
        layouts.append(layout)
    return layouts


def _joined(name: str, shape: tuple[int, ...], parts: list[Tensor], skip: int = 0) -> Tensor:
    """Join memory-mapped parts into one lazy tensor, without their first elements; low precision becomes fp32."""
    parts = [part.detach() for part in parts]  # masters are saved with requires_grad=True
    numel, dtype = prod(shape), parts[0].dtype if parts else torch.float32
    if sum(part.numel() for part in parts) < skip + numel:
        raise DamagedCheckpointError(f"{name} is damaged: its files lack some of its {numel} elements.")
    dtype = torch.float32 if dtype in options.LOW_PRECISION else dtype

    def read(start: int, stop: int) -> Tensor:
        out, first = torch.empty(stop - start, dtype=dtype, device="cpu"), -skip
        for part in parts:
            last = first + part.numel()
            low, high = max(start, first), min(stop, last)
            if low < high:
                out[low - start : high - start].copy_(part[low - first : high - first])
            first = last
        return out

    return LazyTensor(name, shape, dtype, read) if numel > 1 else read(0, numel).view(shape)


def _state_dict(models: list[dict[str, Any]], trained: dict[str, Tensor]) -> dict[str, Any]:
    """Return the module's ``state_dict`` in its original order, with parameters joined from all ranks."""
    model = models[0]
    frozen = {}
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        frozen[name] = _joined(
            name, tuple(shape), [each["frozen_param_fragments"][name].reshape(-1) for each in models]
        )
    shared = model.get("shared_params") or {}
    state_dict = {}
    for name, value in model["module"].items():
        origin = shared.get(name, name)
        if origin in trained:
            state_dict[name] = trained[origin]
        elif origin in frozen:
            state_dict[name] = frozen[origin]
        elif isinstance(value, Tensor) and value.is_floating_point():
            state_dict[name] = _joined(name, tuple(value.shape), [value.reshape(-1)])
        else:
            state_dict[name] = value
    return with_versions(state_dict, versions_in(model["module"]))


def _optimizer_state(
    folder: Path, states: list[Any], masters: list[list[Tensor]], layouts: list[_Layout], is_dealt: bool
) -> tuple[dict[str, Any], list[str]] | None:
    """Return the state in torch's format, and the parameter names by number; None if the state cannot be imported.

    Args:
        is_dealt: whether parameters were assigned to the ranks in turn (DeepSpeed's 'round_robin_gradients').
    """
    if not all(isinstance(state, dict) for state in states):
        warnings.warn(
            f"{folder} has no optimizer param groups, as if saved with DeepSpeed's 'elastic_checkpoint': only the "
            "weights are imported, not the optimizer's state.",
            stacklevel=3,
        )
        return None
    groups, by_name = [], {}
    for group in states[0]["param_groups"]:
        names = []
        for flat in group["params"]:
            per_rank = [state["state"].get(flat, {}) for state in states]
            sizes = [flats[flat].numel() for flats in masters]
            ordered = _in_users_order(list(layouts[flat]), len(states) if is_dealt else 1)
            for name in ordered if per_rank[0] else ():
                by_name[name] = {
                    key: _state_value(
                        f"{name} ({key})", key, [state[key] for state in per_rank], layouts[flat][name], sizes
                    )
                    for key in per_rank[0]
                }
                if "step" in group:
                    by_name[name].setdefault("step", torch.tensor(float(group["step"]), device="cpu"))
            names += ordered
        kept = {key: value for key, value in group.items() if key != "step" and not isinstance(value, _Inert)}
        groups.append({**kept, "params": names})
    saved = {"state": by_name, "param_groups": groups}
    return by_number(saved, os.fspath(folder)), names_by_number(saved)


def _state_value(what: str, key: str, per_rank: list[Any], place: _Place, sizes: list[int]) -> Any:
    value = per_rank[0]
    if not isinstance(value, Tensor):  # such as the step count of DeepSpeed's Adam; torch stores a tensor
        return torch.tensor(float(value), device="cpu") if key == "step" else value
    if value.dim() == 0:
        return value.clone()
    if any(flat.dim() != 1 or flat.numel() < size for flat, size in zip(per_rank, sizes)):
        raise ValueError(
            f"{what} does not have one value for each element (its shape is {tuple(value.shape)}). Only states of "
            "elementwise optimizers can be imported."
        )
    return place.tensor_in([flat[:size] for flat, size in zip(per_rank, sizes)], what)  # masters have no padding


def _in_users_order(names: list[str], hands: int) -> list[str]:
    """Restore the order that the names had in the user's param group, before assignment to ``hands`` ranks in turn."""
    dealt = [number for hand in range(hands) for number in range(hand, len(names), hands)]
    return [name for _, name in sorted(zip(dealt, names))]
