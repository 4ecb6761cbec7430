"""A Python that starts immediately: its processes are forked from one that has imported torch and Lightning.

For tests that start scripts and commands as a user does, but are not about the start itself: `[warm_python(),
"script.py"]` does the same as `[sys.executable, "script.py"]`, without the five seconds of CPU time for importing
Lightning. The same holds for processes which such a process starts with `sys.executable`, as Lightning's launcher,
torchrun, `lightning-zero train` and multiprocessing's `spawn` do.

The executable is a short script that sends its arguments, environment and open files to the server, forwards signals,
and exits with the forked process's exit code. The forked process dies with the script. Only third-party packages are
preloaded; each process imports this package itself.

A process ends as Python does, joining its threads and running its atexit functions, but does not tear down its modules:
that would copy most of the server's memory, and take several times as long as the start. With `DISMANTLED` in its
environment it tears them down as well.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import functools
import gc
import importlib
import itertools
import json
import multiprocessing.spawn
import os
import re
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PRELOAD = [
    "hydra",
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "matplotlib.pyplot",
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.utils.flop_counter",
]

DISMANTLED = {"WARM_PYTHON_IS_DISMANTLED": "1"}
"""Environment of processes whose shutdown is tested."""

EXECUTABLE = """\
#!{python} -IS
import json, os, signal, socket, struct, sys

files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if os.path.exists(f"/proc/self/fd/{{file}}")]  # one belonged to listdir itself
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
job = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), files]).encode()
socket.send_fds(connection, [struct.pack("=Q", len(job))], files)
connection.sendall(job)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
(status,) = struct.unpack("=i", connection.recv(4, socket.MSG_WAITALL))
code = os.waitstatus_to_exitcode(status)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def warm_python(*more: str) -> str:
    """Return the path of the executable. The first call starts the server, which ends with this process.

    Arguments:
        more: further modules to preload, in another server that is forked from the first.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightning-zero-warm-"))
    executable = folder / "python"
    executable.write_text(EXECUTABLE.format(python=sys.executable, address=str(folder / "server")))
    executable.chmod(0o700)
    server = subprocess.Popen(
        [warm_python() if more else sys.executable, __file__, str(folder / "server"), str(executable), *more],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # the server ends when it is closed, also if this process is killed
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must reach pytest only
    )
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def close(pid: int = os.getpid()) -> None:
        if os.getpid() == pid:  # not in a process that a test has forked
            server.communicate()
            shutil.rmtree(folder)

    atexit.register(close)
    return str(executable)


@dataclass
class Job:
    """Command line, environment and files that a process was started with."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    numbers: list[int]  # file descriptors in the started process
    files: list[int]  # the same files in this process


def serve(address: str) -> Job | None:
    """Serve until standard input ends. Returns the job in each forked process, and None in the server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    selector.register(0, selectors.EVENT_READ, None)
    running: dict[int, tuple[socket.socket, int]] = {}  # by pid: the connection, and a pidfd
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    job = _receive(connection)
                    pid = os.fork()
                    if pid == 0:
                        running.clear()  # only the server may end the other processes
                        return job
                    os.setpgid(pid, pid)  # so that its own child processes can be ended with it
                    for number in job.files:
                        os.close(number)
                    descriptor = os.pidfd_open(pid)
                    running[pid] = connection, descriptor
                    selector.register(connection, selectors.EVENT_READ, pid)
                    selector.register(descriptor, selectors.EVENT_READ, pid)
                elif key.data in running:
                    pid = key.data
                    connection, descriptor = running[pid]
                    signals = connection.recv(64) if key.fileobj is connection else b""
                    if signals:
                        for number in signals:
                            os.kill(pid, number)
                        continue
                    if key.fileobj is connection:  # the executable was killed
                        os.killpg(pid, signal.SIGKILL)
                    _, status = os.waitpid(pid, 0)
                    del running[pid]
                    for each in (connection, descriptor):
                        selector.unregister(each)
                    os.close(descriptor)
                    try:
                        connection.sendall(struct.pack("=i", status))
                    except BrokenPipeError:
                        pass
                    connection.close()
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
        selector.close()
        listener.close()


def _receive(connection: socket.socket) -> Job:
    header, files, _, _ = socket.recv_fds(connection, 8, 250)
    (length,) = struct.unpack("=Q", header)
    job = b""
    while len(job) < length:
        job += connection.recv(length - len(job))
    return Job(*json.loads(job), files)


def _run(job: Job, executable: str) -> None:
    """Run a command line as Python would, and end the process."""
    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in job.files]
    for file in job.files:
        os.close(file)
    for number, file in zip(job.numbers, out_of_the_way, strict=True):
        os.dup2(file, number)
        os.close(file)
    options = list(itertools.takewhile(re.compile("-[BEOsuv]").fullmatch, job.arguments))
    arguments = job.arguments[len(options) :]
    unbuffered = "-u" in options
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.executable = executable
    multiprocessing.spawn.set_executable(executable)
    added = [path for path in job.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in dict.fromkeys(added) if path not in sys.path]
    if arguments[0] == "-m":
        sys.path.insert(0, job.folder)
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], vars(_new_main()))
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = arguments
        module = _new_main(__file__=arguments[0])
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), vars(module))


def _to_the_end(run: Callable[[], None]) -> None:
    """Call a function, and end the process as at the end of a script, but without tearing down modules."""
    code, interrupted = 0, False
    try:
        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _new_main(**names: str) -> ModuleType:
    """Create a `__main__` module that, unlike that of `runpy.run_path`, exists until the end."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, **names)
    return module


def main() -> None:
    del sys.path[0]  # the folder of this file
    _, address, executable, *more = sys.argv
    for name in more or PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if job := serve(address):
        if DISMANTLED.items() <= job.environment.items():
            _run(job, executable)
        else:
            _to_the_end(functools.partial(_run, job, executable))


if __name__ == "__main__":
    main()
