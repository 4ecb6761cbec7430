"""The ranks of a run: process group, mesh, exchanges of values, and whether the run has failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pickle import PicklingError
from typing import Any, TypeVar

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_zero.checkpoint.checksums import DamagedCheckpointError, NoCheckpointError
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.saving import CheckpointNotSavedError
from lightning_zero.engine import Communicator, failures, process_group, store_of_attempt, tensor_parallel
from lightning_zero.strategies import lightning_internals as internals

_Result = TypeVar("_Result")

_OF_CHECKPOINTS = DamagedCheckpointError, NoCheckpointError, UnsafeFileError, CheckpointNotSavedError
_KINDS = (*_OF_CHECKPOINTS, FileNotFoundError, OSError, RuntimeError, TypeError, AttributeError, PicklingError)
"""Kinds of errors that the other ranks raise as well; instead of other kinds, they raise a ValueError."""


class RankGroup:
    """The ranks of the runs of the strategy that holds this object, as this rank sees them."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # None without ``tensor_parallel_size``, and before the processes start
        self.mesh: tensor_parallel.DeviceMesh | None = None
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the failure of an earlier run."""
        self.ended_by: str | None = None  # the message of the exception
        self.is_cut_off = False  # whether this rank must not communicate
        self._have_all_failed = False  # at the same time, with the same updates done

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mesh": None}  # process groups cannot be copied

    # -- the process group ------------------------------------------------------------------------------------------

    @property
    def is_single(self) -> bool:
        """Whether there is only one rank, which needs no process group."""
        return self._strategy.num_nodes * self._strategy.num_processes == 1

    @property
    def is_alone(self) -> bool:
        """Whether this rank must not communicate: there is no process group, or the run has failed."""
        return self.is_cut_off or not process_group.is_initialized()

    def connect(self) -> None:
        """Join the process group, or renew the one in which a run has failed, and create the mesh. Collective."""
        if self.is_single:
            return
        environment, device = self._strategy.cluster_environment, self._strategy.root_device
        backend, timeout = self._strategy.process_group_backend, self._strategy.options.timeout
        # if Gloo's default group is bound to a device, torch cannot make groups of some ranks
        is_bound = device.type != "cpu" and backend != "gloo"
        options: dict[str, Any] = {"timeout": timeout, "device_id": device if is_bound else None}
        if not process_group.is_initialized():
            address = environment.main_address, environment.main_port
            rank, size = environment.global_rank(), environment.world_size()
            store = store_of_attempt(*address, rank, size, timeout or default_pg_timeout)
            options |= {"store": store} if store is not None else {}
            internals.init_dist_connection(environment, backend, **options)
        elif failures.failure() is not None:
            failures.renew(**options)
            self.mesh = None  # the mesh's groups have failed, too
        failures.notices()
        self.make_mesh()

    # -- the mesh ---------------------------------------------------------------------------------------------------

    @property
    def size_of_mesh(self) -> int:
        """The number of ranks that the mesh must have; known before the processes start."""
        return self._strategy.num_nodes * self._strategy.num_processes

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """The numbers of ranks along ``data_parallel`` and ``tensor_parallel``; None if the options need no mesh."""
        strategy, options, size = self._strategy, self._strategy.options, self.size_of_mesh
        data, tensor = options.data_parallel_size, options.tensor_parallel_size
        if tensor is None:
            return None
        if size == 1:
            raise ValueError(
                f"tensor_parallel_size={tensor!r} requires several ranks, but this run has one: leave the option out, "
                "and divide the module in configure_model only if trainer.world_size is above 1."
            )
        along_tensor = strategy.num_processes if tensor == "auto" else tensor
        along_data = size // along_tensor if data == "auto" else data
        if size != along_data * along_tensor:
            given = f"tensor_parallel_size={tensor!r}" + ("" if data == "auto" else f" and data_parallel_size={data}")
            raise ValueError(
                f"{given} cannot be used with {size} ranks (nodes: {strategy.num_nodes}, each with "
                f"{strategy.num_processes}): set sizes whose product is the number of ranks."
            )
        return along_data, along_tensor

    def make_mesh(self) -> None:
        """Create the mesh, if the options require one. Collective."""
        if self.mesh_shape is not None and self.mesh is None:
            self.mesh = tensor_parallel.device_mesh(self._strategy.root_device, *self.mesh_shape)

    # -- exchanges --------------------------------------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator | None:
        """The communicator of the strategy's first engine; None if there is no engine."""
        return next((engine.communicator for engine in self._strategy.engines), None)

    def blocked_in(self, what: str, everyone: bool = True) -> AbstractContextManager[None]:
        """Context of the operation ``what``, which waits for other ranks. If a rank fails, the error says why."""
        communicator = self.communicator
        if communicator is None:
            return failures.explained(what)
        return communicator.everyone.waiting(what, everyone=everyone)

    def all_gather_values(self, value: Any) -> list[Any]:
        """All-gather a picklable value, and return the values in the order of ranks."""
        if self.is_alone:
            return [value]
        with self.blocked_in("an exchange of values between ranks"):
            return process_group.all_gather_objects(value)

    def alike(self, act: Callable[[], _Result]) -> _Result:
        """Call ``act`` on every rank and return its result. If it fails, every rank raises an error of one kind."""
        error = kind = None
        try:
            result = act()
        except Exception as raised:
            error, kind = raised, next((kind for kind in _KINDS if isinstance(raised, kind)), ValueError)
        said = self.all_gather_values((kind, str(error)))
        for rank, (failed, message) in enumerate(said):
            if failed is not None:
                raise error if error is not None and kind is failed else failed(f"On rank {rank}: {message}")
        return result

    # -- failures ---------------------------------------------------------------------------------------------------

    def end_by(self, exception: BaseException, *, is_shared: bool) -> None:
        """Record the exception that ends the run, and interrupt ranks that are waiting for this one.

        If it ``is_shared``, every rank raises it at the same time, so that the others need no notice.
        """
        failures.explain(exception)
        if self.ended_by is not None:
            return
        self.ended_by, self.is_cut_off = str(exception), not self.is_single
        if self.is_cut_off and not is_shared and process_group.is_initialized():
            updates = [engine.updates for engine in self._strategy.engines]
            state = f"rank {self._strategy.global_rank} is updating" if None in updates else updates
            self._have_all_failed = failures.fail(failures.reason_of(exception), state)

    def come_back(self, rejoin: Callable[[], None]) -> None:
        """If all ranks have failed alike, ``rejoin`` the process group. Collective; only the first call tries."""
        if self._have_all_failed:
            self._have_all_failed = False
            with suppress(RuntimeError):  # another rank does not save, and has ended
                rejoin()
                self.is_cut_off = False
