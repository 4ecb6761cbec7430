"""Every private name of torch that this package uses, and every patch of torch, each with the reason.

No other file uses ``torch._...``, a private name of a torch module or a private attribute of torch's objects, so only
this file has to be checked against a new version of torch. ``tests/engine/test_compat.py`` has a test for each name.
Checked with torch 2.11, 2.13 and 2.15. Exceptions: private names of ``torch.distributed`` are in
``comm/process_group.py``, since only ``comm`` may import that package; private attributes of data loaders are in
``strategies/lightning_internals.py``; and all files may read ``tensor._version``, ``module._parameters`` and
``operator._schema``, since torch has had them for years, and wrapper functions would cost time in each step.
"""
# ruff: noqa: F401  (other files import these names from here)

from __future__ import annotations

import sys
import threading
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._utils import _validate_loaded_sparse_tensors
from torch._weights_only_unpickler import Unpickler, _get_allowed_globals, _get_user_allowed_globals
from torch.autograd import profiler
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import optimizer as optimizers
from torch.utils import _device, _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""The exceptions that operators on fake tensors raise if their result depends on the tensors' values."""

# -- autograd ----------------------------------------------------------------------------------------------------------

# The id of the running backward pass, or -1. Module hooks need it, since recomputation calls them in backward.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
current_autograd_node = torch._C._current_autograd_node


def queue_callback(function: Callable[[], None]) -> None:
    """Call a function at the end of the current backward, when all gradients have been computed."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Saved-tensor hooks are pushed in one hook of a module and popped in another, which no context manager can do.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def hooks_on_top() -> Any:
    """The saved-tensor hooks in effect, as a pair; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# A gather restores the values of views that autograd has saved, so it must not increment the views' version counters.
keep_version = torch.autograd._unsafe_preserve_version_counter

# Checkpointing that hooks can enter and leave; the public function would have to wrap the module's call.
checkpoint_generator = _checkpoint_without_reentrant_generator


def is_profiling() -> bool:
    """Whether a profiler is running. This check takes nanoseconds; ``record_function`` always takes microseconds."""
    return profiler._is_profiler_enabled


# -- tensors -----------------------------------------------------------------------------------------------------------

# Like ``torch.utils.swap_tensors``, but also swaps tensors with weak references, which stay valid.
swap_tensor = torch._C._swap_tensor_impl

# Asserts on the device that a value is true, after the work already queued there; the host need not wait for the value.
assert_on_device: Callable[[torch.Tensor], None] = torch._assert_async

disabled_torch_function = torch._C._disabled_torch_function_impl

# One kernel for many small tensors.
foreach_copy, foreach_zero, foreach_norm = torch._foreach_copy_, torch._foreach_zero_, torch._foreach_norm


# Identifies a storage object, even one whose memory is released. Must be fast: it is called for each saved tensor.
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# The attribute that ``nn.Parameter(tensor)`` sets to True on an instance of a tensor subclass.
PARAMETER_MARK = "_is_param"


def make_wrapper(cls: type, shape: torch.Size, **options: Any) -> Any:
    """Make a tensor without memory. C++ code that asks for its memory mostly gets an error, not a null pointer."""
    wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


def let_foreach_take(cls: type) -> None:
    """Let ``foreach`` functions accept a tensor class, and optimizers choose such kernels for it as for parameters."""
    _foreach_utils._foreach_supported_types.append(cls)  # type: ignore[arg-type]
    optimizers._foreach_supported_types.append(cls)  # type: ignore[arg-type]


def ask_before_set_data(check: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Call ``check(tensor, value)`` before ``tensor.data = value`` if one of both is a subclass that dispatches.

    The setter of an ordinary tensor takes a wrapper's memory, a null pointer, and asks no Python code; the next read
    ends the process. It does ask an operator, and ``PythonTLSSnapshot`` is the first key of such subclasses only.
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot

    def ask(tensor: torch.Tensor, value: torch.Tensor) -> bool:
        check(tensor, value)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return torch._has_compatible_shallow_copy_type(tensor, value)

    _operators.impl("_has_compatible_shallow_copy_type", ask, key.name)


_operators = torch.library.Library("aten", "IMPL")


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse tensor, which need not be coalesced, as a gradient is."""
    return tensor._indices(), tensor._values()


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values, and for a sparse tensor also of its indices."""
    if tensor.is_sparse:
        return sum(part.nbytes for part in parts_of_sparse(tensor))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
    return tensor.nbytes


def storage_use_count(tensor: torch.Tensor) -> int:
    """Number of tensors that use a tensor's storage; the engine infers whether user code keeps such tensors."""
    return torch._C._storage_Use_Count(address_of(tensor.untyped_storage()))


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the memory of ``tensor``: itself, or the one that it wraps, or the first that it is made of."""
    while True:
        if is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        elif is_made_of_tensors(tensor):
            tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        else:
            return tensor


class SlotsOfDTensor(torch.Tensor):
    """Base class with DTensor's ``__slots__``: Python swaps the classes of two objects only if their slots match."""

    __slots__ = ("_local_tensor", "_spec")


def allowed_globals() -> tuple[set[str], set[str]]:
    """Dotted names that ``torch.load(weights_only=True)`` accepts: torch's own, and those that the user has allowed."""
    return set(_get_allowed_globals()), set(_get_user_allowed_globals())


def unpickle_weights(pickled: Any, storage: Callable[[str], Any]) -> Any:
    """Unpickle the ``data.pkl`` of a ``torch.save`` archive like ``torch.load(weights_only=True)``, without copies.

    Args:
        storage: returns the bytes of a storage, given its key; tensors are views of these bytes.
    """

    loaded: dict[str, Any] = {}

    def load(reference: Any) -> Any:
        _, kind, key, *_ = reference
        if key not in loaded:
            values = storage(key)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing is written to tensors
                flat = torch.frombuffer(values, dtype=torch.uint8) if len(values) else torch.empty(0, device="cpu")
            dtype = getattr(kind, "dtype", torch.uint8)
            wrapped = flat.untyped_storage()
            loaded[key] = torch.storage.TypedStorage(wrap_storage=wrapped, dtype=dtype, _internal=True)
        return loaded[key]

    unpickler = Unpickler(pickled, encoding="utf-8")
    unpickler.persistent_load = load  # type: ignore[method-assign]
    torch.serialization._serialization_tls.map_location = "cpu"  # read by functions that rebuild subclasses of tensors
    try:
        return unpickler.load()
    finally:
        torch.serialization._serialization_tls.map_location = None
        _validate_loaded_sparse_tensors()


def dcp_internals() -> tuple[Any, str]:
    """Internals of ``torch.distributed.checkpoint``: (storage info class, version)."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    return _StorageInfo, CURRENT_DCP_VERSION


# -- hooks and modules -------------------------------------------------------------------------------------------------

Hooks = dict[int, Callable[[torch.Tensor], Any]]
"""Hooks of a tensor, by the id of each hook's handle."""

# A tensor's gradient hooks. The engine calls them with gradients that autograd does not pass to the tensor.
gradient_hooks: Callable[[torch.Tensor], Hooks | None] = attrgetter("_backward_hooks")


def set_gradient_hooks(tensor: torch.Tensor, hooks: Hooks | None) -> None:
    """After a tensor's contents were swapped, restore its dictionary of hooks, which users' handles refer to."""
    tensor._backward_hooks = hooks


accumulation_hooks: Callable[[torch.Tensor], Hooks | None] = attrgetter("_post_accumulate_grad_hooks")


def set_accumulation_hooks(tensor: torch.Tensor, hooks: Hooks) -> None:
    """Replace a tensor's dictionary of post-accumulate-grad hooks. Users' handles refer to the dictionary."""
    tensor._post_accumulate_grad_hooks = hooks


def let_hooks_be_registered(optimizer: torch.optim.Optimizer) -> None:
    """Make registries of hooks as torch's constructor does: a wrapper of optimizers may have plain dicts, or none."""
    for when in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_post"):
        name = f"_optimizer_{when}_hooks"
        if not isinstance(hooks := getattr(optimizer, name, {}), OrderedDict):  # users' handles refer to the registry
            setattr(optimizer, name, OrderedDict(hooks))


def call_first(handle: torch.utils.hooks.RemovableHandle) -> None:
    """Move a hook to the front; not every torch method that registers hooks has the argument ``prepend``."""
    hooks: Any = handle.hooks_dict_ref()
    hooks.move_to_end(handle.id, last=False)


@contextmanager
def without_load_hooks(optimizer: torch.optim.Optimizer) -> Iterator[list[Callable[[Any], None]]]:
    """Context in which ``load_state_dict`` does not call its post-hooks, which are returned instead."""
    hooks = optimizer._optimizer_load_state_dict_post_hooks
    optimizer._optimizer_load_state_dict_post_hooks = OrderedDict()
    try:
        yield list(hooks.values())
    finally:
        optimizer._optimizer_load_state_dict_post_hooks = hooks


def running_steps(optimizer: torch.optim.Optimizer) -> int:
    """The number of an optimizer's steps on the stack. Hooks cannot count them: after an error, none is called."""
    return _running(_HOOKED_STEP, optimizer)


def without_hooks(step: Any) -> Any:
    """The ``step`` in an optimizer class before torch replaced it, to call hooks."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED_STEP else step


# The code of the function by which torch replaces ``step`` in optimizer classes, to call hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step).__code__


def forward_hooks(module: torch.nn.Module) -> tuple[Any, Any]:
    """A module's dictionaries of forward hooks; torch runs a layer as one kernel only if they are empty."""
    return module._forward_pre_hooks, module._forward_hooks


def replaced(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], *, tied: bool = True
) -> AbstractContextManager[None]:
    """Context in which other tensors replace a module's parameters and buffers; then, ``tensors`` has what code set.

    Args:
        tied: whether to replace tied tensors under all of their names.
    """
    # Restored in reverse order, since the tensors of a module with two names are replaced twice.
    return _reparametrize_module(module, tensors, tie_weights=tied, stack_weights=True)


# The attribute with the list of parameters that ``nn.LSTM`` and similar modules compute with.
FLAT_WEIGHTS = "_flat_weights"


def flatten_weights(module: torch.nn.RNNBase) -> None:
    """Move a recurrent module's parameters into one block of memory for cuDNN."""
    module._init_flat_weights()


def leave_out_of_copies(module: torch.nn.Module, own: type) -> None:
    """Leave forward hooks of the class ``own`` out of copies and pickles of a module, and of the handles of its hooks.

    ``copy.deepcopy`` and ``pickle`` look up ``__reduce_ex__`` on the dictionaries of hooks, before the class is asked.
    """
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        all_hooks = weakref.ref(vars(module)[kind])
        for name, hooks in vars(module).items():
            if name.startswith(kind):  # also the dictionaries with the options of hooks
                hooks.__reduce_ex__ = partial(_reduce_without, own, weakref.ref(hooks), all_hooks)


def _reduce_without(own: type, hooks: Any, all_hooks: Any, _: int) -> Any:
    """What ``OrderedDict.__reduce_ex__`` returns, without the entries of hooks of the class ``own``."""
    of_users = {number for number, hook in (all_hooks() or {}).items() if not isinstance(hook, own)}
    return OrderedDict, (), None, None, iter([entry for entry in hooks().items() if entry[0] in of_users])


# -- torch.compile -----------------------------------------------------------------------------------------------------


def never_traced(function: Any) -> Any:
    """Exclude a function's own code from ``torch.compile``. Its callees are compiled unless it clears the eval frame.

    Uses the C interface, since importing the compiler would cost projects that do not compile half a second.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    return function


def optimized_module_class() -> type | None:
    """The class of modules that ``torch.compile`` returns; None while the compiler has not been imported."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler.OptimizedModule if compiler is not None else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module's forward is the entry point of compiled code; torch has no public API for this."""
    forward = vars(module).get("forward")  # set by Lightning, or by ``model.forward = torch.compile(...)``
    optimized = optimized_module_class()
    return (
        (optimized is not None and isinstance(module, optimized))
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def running_calls(module: torch.nn.Module) -> int:
    """The number of a module's calls on the stack. Hooks cannot count them: torch calls none after Ctrl-C."""
    return _running(torch.nn.Module._call_impl.__code__, module)


def _running(code: CodeType, of: Any) -> int:
    """The number of calls of a method on the stack whose ``self`` is ``of``."""
    return sum(frame.f_code is code and frame.f_locals.get("self") is of for frame in _frames())


def calls_on_stack(names: Container[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and first argument (or None) of each call on the stack of a function with one of these names."""
    for frame in _frames():
        code = frame.f_code
        if code.co_name in names:
            yield code.co_name, frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def is_within_meta_device() -> bool:
    """Whether the running operator was called within ``torch.device("meta")``; torch disables it for the operator."""
    enter = _device.DeviceContext.__torch_function__.__code__
    # of several contexts, torch calls the innermost first
    contexts = [frame.f_locals["self"] for frame in _frames() if frame.f_code is enter]
    return bool(contexts) and contexts[-1].device.type == "meta"


def _frames() -> Iterator[FrameType]:
    """The frames of the stack, innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe().f_back))


# -- patches -----------------------------------------------------------------------------------------------------------


class Patch:
    """Replaces an attribute of a module or a class with ``make(original)`` as long as at least one owner lives."""

    def __init__(self, holder: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._holder, self._name, self._make = holder, name, make
        self._before = self._ours = None
        self._count, self._lock = 0, threading.RLock()  # reentrant: a garbage collection may call ``_let_go``

    def hold(self, owner: object) -> None:
        """Keep the patch in effect until the owner is deleted."""
        with self._lock:
            if not self._count:
                self._before = getattr(self._holder, self._name)
                self._ours = self._make(self._before)
                setattr(self._holder, self._name, self._ours)
            self._count += 1
        weakref.finalize(owner, self._let_go).atexit = False

    def _let_go(self) -> None:
        with self._lock:
            self._count -= 1
            # otherwise another patch wraps ours: leave both
            if not self._count and getattr(self._holder, self._name) is self._ours:
                setattr(self._holder, self._name, self._before)


def run_backward(make: Callable[[Any], Any]) -> Patch:
    """Patch ``torch.autograd.grad`` and ``backward`` to include gradients of the unsharded tensors that units used."""
    return Patch(torch.autograd, "_engine_run_backward", make)


def hooks_disabled(make: Callable[[Any], Any]) -> Patch:
    """Patch the check in ``torch.func`` that refuses saved-tensor hooks, since the engine uses such hooks."""
    return Patch(torch.autograd.graph, "disable_saved_tensors_hooks", make)


def flattening_of_weights(make: Callable[[Any], Any]) -> Patch:
    """Patch ``flatten_parameters`` of ``nn.LSTM`` and similar modules, which many projects call in forward."""
    return Patch(torch.nn.RNNBase, "flatten_parameters", make)


# -- hooks that ``torch.compile`` does not trace -----------------------------------------------------------------------


def untraced(function: Callable[..., Any]) -> Any:
    """Decorator for functions that ``torch.compile`` runs as ordinary Python, with a graph break.

    This covers everything that the function calls, like ``torch.compiler.disable``, but costs less per call.
    """

    def run(*arguments: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return function(*arguments)
        finally:
            set_eval_frame(compiler)

    return never_traced(run)


class OwnHook:
    """An engine hook on a module. Copies and pickles of the module do not have it (see ``compat.leave_out_of_copies``).

    Args:
        function: called with a flag that says whether compiled code calls the hook, and with the hook's arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def __name__(self) -> str:
        # ``torch.jit.script`` compiles a module's hooks, too, and reads their names
        raise AttributeError(
            "torch.jit.script cannot compile a module that a strategy has set up, because of its hooks. Call "
            "torch.jit.trace within 'with lightning_zero.full_parameters(module):', or torch.jit.script after the run."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)  # inlined from ``untraced``, to save one call in each module's forward
        try:
            return self._function(compiler is not None, *args, **kwargs)
        finally:
            set_eval_frame(compiler)


never_traced(OwnHook.__call__)
