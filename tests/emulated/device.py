"""Compiles the device of device.cpp, and registers it with torch in a process."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "emulated"
BACKENDS = f"cpu:gloo,{NAME}:{NAME}"
"""Backends of a process group for the CPU and the emulated device."""

native: Any = None
"""The module of device.cpp, once `load` has been called."""


def missing() -> str | None:
    """What is missing here to compile the device; None if it can be compiled."""
    if sys.platform != "linux":
        return "Linux"
    if shutil.which("g++") is None:
        return "g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (Python.h)"
    return None


def build(folder: Path) -> Path:
    """Compile the library into this folder unless it exists; takes a minute, once per version of torch and Python."""
    from torch.utils.cpp_extension import include_paths, library_paths

    command = ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(SOURCE)]
    command += ["-DTORCH_EXTENSION_NAME=native", "-DUSE_C10D", "-DUSE_DISTRIBUTED"]
    command += [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    command += [f"-L{path}" for path in library_paths()]
    command += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    described = f"{command} {torch.__version__} {platform.python_version()}".encode() + SOURCE.read_bytes()
    library = folder / f"{NAME}_{hashlib.sha256(described).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:  # pytest's workers are several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".part")
            made = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
            assert made.returncode == 0, f"{made.args}\n{made.stderr[-4000:]}"
            for older in folder.glob("*.so"):
                older.unlink()
            unfinished.rename(library)
    return library


def load(library: Path) -> None:
    """Register the device "emulated", and a torch.distributed backend of the same name, in this process."""
    global native
    spec = importlib.util.spec_from_file_location("native", library)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def communicator(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return native.communicator(dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout))

    dist.Backend.register_backend(NAME, communicator, devices=[NAME])


def _module() -> types.ModuleType:
    """The module `torch.emulated` that torch requires; random numbers are the CPU's."""
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        device=lambda index: nullcontext(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,  # without it, torch 2.11 assumes that the device is unused
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda index: None,
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        current_stream=lambda device=None: torch.accelerator.current_stream(device),
        Stream=torch.Stream,
        Event=torch.Event,
        _is_in_bad_fork=lambda: False,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        memory_stats=_memory_stats,
        MemPool=MemPool,
        use_mem_pool=use_mem_pool,
    )
    return module


def _memory_stats(device: Any = None) -> dict[str, int]:
    kinds = "allocated", "reserved", "inactive_split"
    names = [f"{kind}_bytes.all.{when}" for kind in kinds for when in ("current", "peak")]
    return dict(zip([*names, "num_alloc_retries"], native.segments(), strict=True))


class MemPool:
    """Like ``torch.cuda.MemPool``."""

    _numbers = count(1)

    def __init__(self, use_on_oom: bool = False) -> None:
        self.number = next(self._numbers)


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Like ``torch.cuda.use_mem_pool``, which also refuses a pool that a thread uses already."""
    native.use_pool(pool.number)
    try:
        yield
    finally:
        native.use_pool(0)


def races_so_far() -> list[str]:
    """Wait for all work queued on the device, and return all ordering errors since the last call."""
    torch.accelerator.synchronize()
    races: list[str] = native.races()
    return races


@contextmanager
def ordered() -> Iterator[None]:
    """Assert that all work on the device within this context is in order."""
    races_so_far()  # discard those of the previous case
    yield
    races = races_so_far()
    assert not races, f"{len(races)} races, the first: {races[0]}"


def in_order(case: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a case that runs on the device: see `ordered`."""

    @wraps(case)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with ordered():
            return case(*args, **kwargs)

    return checked
