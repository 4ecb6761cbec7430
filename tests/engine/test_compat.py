"""Undocumented behaviour of torch that the package relies on: one test each, which a new version of torch may fail."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.engine import Engine, ShardedTensor, compat
from lightning_zero.engine.comm import backend_transport, process_group
from lightning_zero.engine.optim.master import MasterTensor
from tests.support.warm import warm_python


def in_a_backward(act):
    """Call a function in a tensor's hook, and return the result."""
    found = []
    tensor = torch.ones(2, requires_grad=True)
    loss = (2 * tensor).sum()
    tensor.register_hook(lambda _: found.append(act()))
    loss.backward()
    return found[0]


def test_code_can_tell_whether_it_runs_in_a_backward_pass():
    assert compat.current_graph_task() == -1 and compat.current_autograd_node() is None
    assert in_a_backward(compat.current_graph_task) >= 0


def test_a_check_runs_before_a_wrappers_memory_becomes_that_of_an_ordinary_tensor():
    """Without it, the next read of the ordinary tensor would end the process."""
    wrapper = compat.make_wrapper(ShardedTensor, (2,), dtype=torch.float32, device="cpu")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(RuntimeError, match="no memory of its own"):
            torch.ones(2).data = wrapper
    with compat.FakeTensorMode():  # another subclass that dispatches
        fake = torch.ones(2)
        fake.data = torch.ones(3)
        assert fake.shape == (3,)


def test_code_in_c_that_asks_for_the_memory_of_a_wrapper_gets_an_error():
    wrapper = compat.make_wrapper(ShardedTensor, (2,), dtype=torch.float32, device="cpu")
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(wrapper)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.Tensor.data_ptr(wrapper)


def test_a_function_is_called_at_the_end_of_a_backward_pass():
    order = []
    tensor = torch.ones(2, requires_grad=True)
    product = 2 * tensor
    product.register_hook(lambda _: compat.queue_callback(lambda: order.append("end")))
    tensor.register_hook(lambda _: order.append("gradient"))
    product.sum().backward()
    assert order == ["gradient", "end"]


def test_saved_tensor_hooks_can_be_pushed_read_and_popped():
    packed = []
    hooks = (lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    assert compat.hooks_on_top() is None
    compat.push_hooks(*hooks)
    try:
        assert compat.hooks_on_top() == hooks
        torch.ones(2, requires_grad=True).square()
    finally:
        compat.pop_hooks()
    assert compat.hooks_on_top() is None and len(packed) == 1


def test_a_buffer_can_be_filled_without_a_new_version_for_autograd():
    weight = torch.ones(2)
    loss = (torch.ones(2, requires_grad=True) * weight).sum()
    with torch.no_grad(), compat.keep_version(weight):
        weight.fill_(3)
    loss.backward()  # otherwise: "modified by an inplace operation"
    assert weight._version == 0


def test_a_checkpointed_region_is_a_generator_that_takes_the_known_arguments():
    signature = inspect.signature(compat.checkpoint_generator)
    assert {"fn", "preserve_rng_state", "context_fn", "determinism_check", "debug"} <= set(signature.parameters)
    region = compat.checkpoint_generator(nn.Identity())
    assert inspect.isgenerator(region)
    next(region)  # the forward would run now
    assert next(region, None) is None


def test_a_running_profiler_is_detected():
    assert not compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.is_profiling()
    assert not compat.is_profiling()


def test_a_tensor_swapped_with_another_stays_the_same_object():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    reference = weakref.ref(one)
    compat.swap_tensor(one, other)
    assert one.shape == (3,) and other.shape == (2,) and reference() is one


def test_a_wrapper_has_a_shape_but_no_memory():
    wrapper = compat.make_wrapper(ShardedTensor, (2**40,), dtype=torch.float32, device="cpu")
    assert wrapper.shape == (2**40,) and type(wrapper) is ShardedTensor


def test_torch_function_can_be_disabled_for_a_subclass():
    class Silent(Tensor):
        __torch_function__ = compat.disabled_torch_function

    assert type(torch.ones(2).as_subclass(Silent) + 1) is Tensor


def test_many_small_tensors_are_handled_by_one_call():
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    compat.foreach_copy(targets, sources)
    assert [tensor.tolist() for tensor in targets] == [[1, 1], [2, 2, 2]]
    assert [norm.item() for norm in compat.foreach_norm(targets, 1.0)] == [2, 6]
    compat.foreach_zero(targets)
    assert not any(tensor.any() for tensor in targets)


def test_the_memory_of_a_tensor_within_torch_func_is_found():
    values, found = torch.ones(2, 3), []

    def look(x):
        found.append(compat.local_memory(x))
        return x

    torch.func.vmap(look)(values)
    torch.func.jvp(look, (values,), (values,))
    assert [tensor.data_ptr() for tensor in found] == [values.data_ptr()] * 2


def test_plain_dicts_of_hooks_become_those_of_torch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    optimizer._optimizer_step_post_hooks = {3: print}
    del optimizer._optimizer_state_dict_pre_hooks
    compat.let_hooks_be_registered(optimizer)
    for register in (optimizer.register_step_post_hook, optimizer.register_state_dict_pre_hook):
        register(lambda *_: None)
    assert list(optimizer._optimizer_step_post_hooks)[0] == 3
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


def a_sharded_tensor() -> torch.Tensor:
    return compat.make_wrapper(ShardedTensor, (2,), dtype=torch.float32, device="cpu")


def test_foreach_functions_accept_sharded_tensors():
    from torch.utils._foreach_utils import _has_foreach_support

    assert _has_foreach_support([torch.ones(2), a_sharded_tensor()], torch.device("cpu"))


def test_optimizers_choose_the_same_kernels_for_masters_and_sharded_tensors_as_for_parameters(monkeypatch):
    from torch.optim import optimizer

    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    for tensor in (nn.Parameter(torch.ones(2)), MasterTensor(torch.ones(2)), a_sharded_tensor()):
        for fused in (False, True):
            assert optimizer._default_to_fused_or_foreach([tensor], False, use_fused=fused) == (fused, not fused)


def test_a_sparse_tensor_that_is_not_coalesced_has_indices_and_values():
    sparse = torch.sparse_coo_tensor([[1, 1, 0]], torch.ones(3, 4), (2, 4), check_invariants=True)
    indices, values = compat.parts_of_sparse(sparse)
    assert indices.tolist() == [[1, 1, 0]] and values.shape == (3, 4)
    assert compat.nbytes_of(sparse) == 3 * 8 + 12 * 4 and compat.nbytes_of(values) == 12 * 4


def test_tensors_that_share_a_storage_are_counted():
    tensor = torch.ones(4)
    before = compat.storage_use_count(tensor)
    part = tensor[:2]
    assert compat.storage_use_count(tensor) == before + 1
    del part
    assert compat.storage_use_count(tensor) == before


def test_a_storage_keeps_its_address_after_its_memory_is_freed():
    tensor = torch.ones(4)
    before = compat.address_of(tensor.untyped_storage())
    tensor.untyped_storage().resize_(0)
    assert compat.address_of(tensor.untyped_storage()) == compat.address_of(tensor[:0].untyped_storage()) == before
    assert compat.address_of(torch.ones(4).untyped_storage()) != before


def test_a_parameter_of_a_tensor_subclass_has_torchs_mark():
    class Other(Tensor):
        pass

    assert compat.PARAMETER_MARK in vars(nn.Parameter(torch.ones(2).as_subclass(Other)))


def test_dtensors_have_the_slots_that_are_declared_for_them():
    from torch.distributed.tensor import DTensor

    assert set(DTensor.__slots__) == set(compat.SlotsOfDTensor.__slots__)
    assert compat.local_memory(plain := torch.ones(2)) is plain


def test_hooks_of_a_tensor_can_be_read_set_and_removed():
    tensor, calls = torch.ones(2, requires_grad=True), []
    assert not compat.gradient_hooks(tensor) and compat.accumulation_hooks(tensor) is None
    handle = tensor.register_hook(lambda _: calls.append("gradient"))
    hooks = compat.gradient_hooks(tensor)
    assert list(hooks) == [handle.id]
    compat.set_gradient_hooks(tensor, hooks)
    tensor.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    taken = compat.accumulation_hooks(tensor)
    compat.set_accumulation_hooks(tensor, {})
    tensor.sum().backward()
    assert calls == ["gradient"] and len(taken) == 1
    compat.set_accumulation_hooks(tensor, taken)
    handle.remove()
    tensor.sum().backward()
    assert calls == ["gradient", "accumulated"]


def test_post_accumulate_grad_hooks_can_be_read():
    tensor, hook = torch.ones(1, requires_grad=True), lambda _: None
    assert not compat.accumulation_hooks(tensor)
    tensor.register_post_accumulate_grad_hook(hook)
    assert list(compat.accumulation_hooks(tensor).values()) == [hook]


class Hook:
    def __call__(self, *_, **__):
        pass


def test_forward_hooks_of_a_class_are_left_out_of_copies_and_pickles():
    module = nn.Linear(2, 2)
    module.handle = module.register_forward_hook(print, always_call=True)
    for _ in range(2):
        compat.leave_out_of_copies(module, Hook)
    module.register_forward_hook(Hook(), always_call=True, with_kwargs=True)
    module.register_forward_pre_hook(Hook(), with_kwargs=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(other._forward_hooks.values()) == [print] and not other._forward_pre_hooks
        assert list(other._forward_hooks_always_called) == [module.handle.id]
        assert not other._forward_hooks_with_kwargs and not other._forward_pre_hooks_with_kwargs
        assert other.handle.hooks_dict_ref() is other._forward_hooks
    reference = weakref.ref(module)
    del module
    assert reference() is None


def test_hooks_of_an_optimizer_can_be_ordered():
    calls, optimizer = [], torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append("first"))
    compat.call_first(optimizer.register_step_post_hook(lambda *_: calls.append("second")))
    optimizer.step()
    assert calls == ["second", "first"]


def test_the_device_under_which_an_operator_was_called_is_known_within_the_operator():
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(compat.is_within_meta_device())
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.zeros(2).as_subclass(Watching)
    for outer, inner in (("cpu", "meta"), ("meta", "cpu")):
        with torch.device(outer):
            tensor.add_(1)
            with torch.device(inner):
                tensor.add_(1)
    tensor.add_(1)
    assert seen == [False, True, True, False, False]


def test_functions_on_the_stack_are_found_by_name_with_their_first_argument():
    def reset(module):
        return list(compat.calls_on_stack(("reset", "other")))

    assert reset(3) == [("reset", 3)] and not list(compat.calls_on_stack(("reset",)))


def test_a_modules_tensors_are_replaced_for_a_while_under_all_their_names():
    shared = torch.nn.Linear(2, 2)
    module = torch.nn.ModuleDict(
        {"a": shared, "b": shared, "c": torch.nn.Linear(2, 2), "norm": torch.nn.BatchNorm1d(2)}
    )
    module.c.weight = shared.weight
    before, value, mean = dict(module.named_parameters(remove_duplicate=False)), torch.ones(2, 2), torch.ones(2)
    given = {"a.weight": value, "norm.running_mean": mean}
    with pytest.raises(KeyboardInterrupt), compat.replaced(module, given):
        assert module.a.weight is module.b.weight is module.c.weight is value and module.norm.running_mean is mean
        module.norm.running_mean = assigned = torch.zeros(2)
        raise KeyboardInterrupt
    assert all(now is before[name] for name, now in module.named_parameters(remove_duplicate=False))
    assert given["norm.running_mean"] is assigned and module.norm.running_mean is not assigned
    with compat.replaced(module, {"a.weight": value, "b.weight": value}, tied=False):
        assert module.a.weight is value and module.c.weight is before["c.weight"]
    assert module.a.weight is before["a.weight"]


def test_a_recurrent_modules_list_of_replaced_parameters_can_be_refreshed():
    module = nn.LSTM(2, 2)
    for name in list(module._parameters):
        module._parameters[name] = nn.Parameter(torch.zeros_like(module._parameters[name]))
    assert all(weight.any() for weight in getattr(module, compat.FLAT_WEIGHTS))
    compat.flatten_weights(module)
    assert all(one is other for one, other in zip(getattr(module, compat.FLAT_WEIGHTS), module.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16], ids=str)
def test_a_tensor_is_unpickled_over_given_memory(tmp_path, dtype):
    path = tmp_path / "file.pt"
    torch.save(torch.zeros(3).to(dtype)[1:], path)
    memory = bytearray(torch.arange(3).to(dtype).view(torch.uint8).numpy().tobytes())
    with zipfile.ZipFile(path) as archive:
        pickled = io.BytesIO(archive.read("file/data.pkl"))
    tensor = compat.unpickle_weights(pickled, lambda key: memory)
    assert torch.equal(tensor, torch.arange(3).to(dtype)[1:])
    memory[:] = bytes(len(memory))
    assert not tensor.any()


def test_sparse_tensors_are_validated_after_they_are_unpickled(tmp_path):
    torch.save(torch.eye(3).to_sparse(), tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        records = {name.partition("/")[2]: bytearray(archive.read(name)) for name in archive.namelist()}
    for index in (0, 5):
        indices = next(record for name, record in records.items() if name.startswith("data/") and len(record) == 48)
        indices[:8] = index.to_bytes(8, "little")
        with torch.sparse.check_sparse_tensor_invariants():
            with pytest.raises(RuntimeError, match="size is inconsistent|indices") if index else nullcontext():
                compat.unpickle_weights(io.BytesIO(records["data.pkl"]), lambda key: records[f"data/{key}"])


def test_the_names_that_torch_loads_are_known():
    assert {"torch._utils._rebuild_tensor_v2", "collections.OrderedDict"} <= compat.allowed_globals()[0]
    with torch.serialization.safe_globals([Path, (Path, "mine.Own")]):
        default, allowed = compat.allowed_globals()
    assert {f"{Path.__module__}.Path", "mine.Own"} <= allowed and "mine.Own" not in default


def test_torch_func_transforms_can_be_detected_and_suspended():
    found = []

    def function(x):
        found.append(compat.peek_interpreter_stack())
        with compat.temporarily_clear_interpreter_stack():
            found.append(compat.peek_interpreter_stack())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert compat.peek_interpreter_stack() is None
    assert found[0] is not None and found[1] is None


def test_compiled_code_calls_a_never_traced_function_as_ordinary_python():
    compiled_by = []

    @compat.never_traced
    def hook(x):
        compiler = compat.set_eval_frame(None)
        compiled_by.append(compiler)
        compat.set_eval_frame(compiler)
        return x + 1

    assert compat.optimized_module_class() is None or isinstance(compat.optimized_module_class(), type)
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda _, inputs, output: hook(output))
    assert torch.compile(module, backend="eager")(torch.ones(1, 2)).shape == (1, 2)
    assert len(compiled_by) == 1 and compiled_by[0] is not None, "called once, as ordinary Python, from compiled code"
    assert isinstance(torch.compile(module), compat.optimized_module_class())


def test_compiled_modules_are_recognised():
    assert not compat.is_compiled(nn.Linear(2, 2))
    in_place, by_forward = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    by_forward.forward = torch.compile(by_forward.forward, backend="eager")
    assert all(map(compat.is_compiled, [torch.compile(nn.Linear(2, 2), backend="eager"), in_place, by_forward]))


class CallsItself(torch.nn.Module):
    def forward(self, depth):
        return max(compat.running_calls(self), self(depth - 1) if depth else 0)


def test_running_calls_of_a_module_are_counted():
    module = CallsItself()
    assert compat.running_calls(module) == 0
    assert module(0) == 1 and module(2) == 3


class StepsByItsBase(torch.optim.SGD):
    def step(self):
        super().step()


def test_running_steps_of_an_optimizer_are_counted():
    parameters, counts = [nn.Parameter(torch.ones(1))], []
    torch.optim.SGD(parameters)  # torch hooks a class's step when the class is instantiated
    optimizer = StepsByItsBase(parameters)
    optimizer.register_step_pre_hook(lambda *_: counts.append(compat.running_steps(optimizer)))
    optimizer.step()
    assert counts == [1, 2] and compat.running_steps(optimizer) == 0


def test_torch_replaces_an_inherited_step_in_the_class_that_is_instantiated():
    class Base(torch.optim.Optimizer):
        def step(self):
            pass

    class Inherits(Base):
        pass

    before = Base.step
    Inherits([nn.Parameter(torch.ones(1))], {})
    assert Base.step is before is compat.without_hooks(vars(Inherits)["step"]) is compat.without_hooks(before)


def test_nested_values_are_flattened_and_unflattened():
    nested = {"a": [torch.ones(1), 2], "b": (3,)}
    leaves, form = compat.tree_flatten(nested)
    assert leaves == compat.tree_leaves(nested) and compat.tree_unflatten(leaves, form) == nested
    assert compat.tree_map(lambda _: 0, nested) == {"a": [0, 0], "b": (0,)}
    assert compat.tree_map_only(int, lambda n: n + 1, nested)["b"] == (4,)


def test_torchs_distributed_checkpoints_record_where_values_are():
    place, version = compat.dcp_internals()
    assert isinstance(version, str)
    assert pickle.loads(pickle.dumps(place("file", 1, 2))).offset == 1


def test_dataloaders_take_indices_from_a_sampler_and_count_their_batches():
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    iterator = loader._get_iterator()
    next(iterator)
    assert iterator._index_sampler is loader._index_sampler is loader.batch_sampler and loader._auto_collation
    assert iterator._num_yielded == 1 and loader._iterator is None
    assert compat.IncompatibleKeys([], ["w"]).unexpected_keys == ["w"]


def what_engines_patch():
    return (
        torch.autograd._engine_run_backward,
        torch.autograd.graph.disable_saved_tensors_hooks,
    )


def patched_only_while_an_engine_exists():
    before = what_engines_patch()
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    engines = [Engine(module, [optimizer], stage=3) for module, optimizer in zip(modules, optimizers)]
    patched = what_engines_patch()
    assert all(one is not other for one, other in zip(before, patched))
    for left in (1, 0):
        engines.pop().close()
        modules.pop()
        optimizers.pop()
        gc.collect()
        assert what_engines_patch() == (patched if left else before)


@pytest.mark.exhaustive
def test_torch_is_patched_only_while_an_engine_exists():
    """In a process of its own, in which no other test has an engine."""
    code = f"from {__name__} import patched_only_while_an_engine_exists as check; check()"
    subprocess.run([warm_python(), "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)


def test_a_patch_that_other_code_has_wrapped_is_left_in_place(monkeypatch):
    class Owner:
        pass

    patch = compat.Patch(sys, "excepthook", lambda before: lambda *given: before(*given))
    owner = Owner()
    patch.hold(owner)
    ours = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", wrapped := (lambda *given: ours(*given)))
    del owner
    assert sys.excepthook is wrapped
    monkeypatch.undo()
    sys.excepthook = sys.__excepthook__


def test_a_fake_process_group_has_no_other_rank_and_leaves_no_trace():
    before = process_group.all_groups()
    with process_group.simulated(3, 8):
        with process_group.simulated(0, 2):
            assert (process_group.rank(), process_group.world_size()) == (0, 2)
        assert (process_group.rank(), process_group.world_size()) == (3, 8)
        some = process_group.new_group([1, 3, 5], "fake", None)
        assert (process_group.rank(some), process_group.world_size(some)) == (1, 3)
        assert process_group.ranks_of(some) == [1, 3, 5]
        gathered, own = torch.zeros(6), torch.ones(2)
        backend_transport.all_gather_single(gathered, own, group=some)
        boxed = torch.zeros(1), some.boxed()
        assert process_group.groups_among(boxed) == [some]
    assert process_group.all_groups() == before and not process_group.is_initialized()
