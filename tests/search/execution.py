"""Runs a random program on the engine and on the averaged reference side by side, and compares them."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.test_several_machines import on_machines
from tests.search.averaged import Averaged, Block, Net, inputs, make_net, make_optimizers
from tests.search.programs import (
    AddGroup,
    Average,
    Backward,
    ChangeState,
    Check,
    Clip,
    Data,
    Differentiate,
    Evaluate,
    Fail,
    Gradient,
    Hook,
    LearningRate,
    NewEngine,
    Program,
    Require,
    SaveAndLoad,
    Setup,
    Step,
    Uneven,
    Whole,
    Write,
    ZeroGrad,
)
from tests.support.workers import rank

NORMS = {"norm": 2.0, "inf": float("inf")}

BOUND = 1e-9
"""Relative and absolute bound in fp64: rounding stays below it, so that only wrong numbers exceed it."""

LOW_BOUND = 0.1
"""The same where forward and backward passes are in bfloat16; the reference computes them in fp64."""

LOW_BOUND_OF_SECOND_DERIVATIVES = 0.2
"""The same for programs with gradient penalties, where plain torch in bfloat16 was seen to differ by 0.16."""


def execute(program: Program) -> str | None:
    """Run a program on this rank. Collective.

    Returns:
        The first difference on this rank, or None. When a rank finds one, all ranks stop there, so that their processes
        can run the next program.
    """
    return Execution(program, make_net(program.setup)).run()


class Difference(Exception):
    """The engine's numbers are not the reference's."""


class Failure(Exception):
    """The error of a training step that fails."""


def _fail(*_: Any) -> Any:
    raise Failure


def check(holds: bool, difference: str) -> None:
    if not holds:
        raise Difference(difference)


class Execution:
    """The run of a program on the engine.

    Args:
        net: the model, as ``make_net`` returns it; the program's steps begin once the engine has it.
    """

    def __init__(self, program: Program, net: Net) -> None:
        from lightning_zero.engine.plan import units

        units.UNIT_NUMEL = 2**20  # the default, which `tests/support/workers.py` overrides
        self.program, self.setup, self.net = program, program.setup, net
        self.hooks: dict[int, list[Any]] = {}  # handles of the hooks: of parameters, and of blocks under -1 - block
        self.copies: tuple[Net, Net] | None = None
        self.folder: Any = None
        self.parameters = list(net.parameters())
        self.optimizers = make_optimizers(self.setup, self.parameters)
        self.reference = Averaged(self.setup)
        self.engines: list[Any] = []
        self.parts = net.parts()  # the modules that the engines have
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # gradients that the program keeps: (ours, the reference's)
        self.datas: dict[int, tuple[Tensor, Tensor]] = {}  # the same of what parameters' ``data`` was
        self.signs: dict[int, list[Any]] = {}  # handles of hooks that let modules compute with weights' signs
        self.saved: Any = None
        self.where = "at the start"

    @property
    def engine_options(self) -> dict[str, Any]:
        from lightning_zero import OffloadConfig

        setup = self.setup
        # Blocks are checkpointed, which are roots of engines of their own otherwise.
        checkpoints = setup.checkpoints and not setup.several
        activations = setup.activations if checkpoints else None
        offload: dict[str, Any] = {"optimizer": setup.offloads_to, "activations": activations}
        if setup.offload == "all":
            offload |= {"optimizer": "cpu", "gradients": "cpu"}
            if setup.stage == 3 and setup.shard_within is None:
                offload["parameters"] = "cpu"
        if "nvme" in offload.values():
            self.folder = self.folder or tempfile.TemporaryDirectory()
            offload["path"] = self.folder.name
        return {
            "stage": setup.stage,
            "unit_numel": {"merged": 2**20, "single": 0, "resident": None}[setup.units],
            "overlap": setup.overlap,
            "bucket_numel": setup.bucket_numel,
            "offload": OffloadConfig(**offload),
            "activation_checkpointing": [Block] if checkpoints else None,
            "whole_parameters": True if setup.whole else None,
            "state_dtype": "bf16" if setup.precision == "lean" else None,
            "masters": setup.precision != "lean",
            "shard_within": setup.shard_within,
            "prefetch": setup.prefetch,
            "reduction_buffers": setup.reduction_buffers,
        }

    def run(self) -> str | None:
        """Run the program on bare engines, without a Trainer."""
        self.make_engines()
        try:
            difference = self.run_ops(0, len(self.program.ops)) or self.compare_at_end()
        finally:
            self.close_engines()
        return difference or self.compare_ordinary()

    def make_engines(self) -> None:
        from lightning_zero.engine import Engine

        for module in self.parts:
            held = {id(parameter) for parameter in module.parameters()}
            optimizers = [
                each for each in self.optimizers if any(id(p) in held for g in each.param_groups for p in g["params"])
            ]
            compute_dtype = torch.bfloat16 if self.setup.precision == "mixed" else None  # strategies set it themselves
            with on_machines(self.setup.machines) if self.setup.machines else contextlib.nullcontext():
                self.engines.append(Engine(module, optimizers, compute_dtype=compute_dtype, **self.engine_options))

    def close_engines(self) -> None:
        while self.engines:
            self.engines.pop().close()

    def renew(self, setup: Setup) -> None:
        """Close the engines, and make others. Where a Trainer has the engine, nothing happens."""
        self.close_engines()
        self._compare_ordinary()
        self.setup = setup
        self.make_engines()

    def run_ops(self, start: int, stop: int) -> str | None:
        """Run some of the program's steps in order; returns the first difference."""
        for index, op in list(enumerate(self.program.ops))[start:stop]:
            self.where = f"op {index}, {op}"
            act = getattr(self, f"_{type(op).__name__.lower()}")
            if difference := self._found_by_all(lambda act=act, op=op, index=index: act(op, index)):
                return difference
        return None

    def compare_at_end(self) -> str | None:
        self.where = "at the end"
        return self._found_by_all(self._compare)

    def compare_ordinary(self) -> str | None:
        self.where = "after the engine's end"
        return self._found_by_all(self._compare_ordinary)

    # Overridden where a Trainer runs the program.

    def window(self) -> contextlib.AbstractContextManager[None]:
        return self._in_all(engine.window() for engine in self.engines)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._in_all(engine.no_sync() for engine in self.engines)

    @staticmethod
    @contextlib.contextmanager
    def _in_all(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
            yield

    def full_weights(self) -> dict[str, Tensor]:
        return {
            f"{prefix}{name}": value
            for engine, module in zip(self.engines, self.parts)
            for prefix in self._prefixes(module)
            for name, value in engine.full_state_dict(module=module).items()
        }

    def _prefixes(self, part: nn.Module) -> list[str]:
        return [name and f"{name}." for name, module in self.net.named_modules() if module is part]

    def full_states(self, optimizer: Any) -> dict[str, Any]:
        return self.engines[0].full_optimizer_state_dict(optimizer)

    def run_backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self, number: int, *closure: Any) -> None:
        self.optimizers[number].step(*closure)

    def _found_by_all(self, act: Callable[[], None]) -> str | None:
        """Call a function; returns the difference found here, or a note that another rank has found one."""
        found: str | None = None
        try:
            act()
        except Difference as error:
            found = f"rank {rank()}, {self.where}: {error}"
        if self.setup.ranks == 1:
            return found
        flag = torch.tensor(int(found is not None))
        dist.all_reduce(flag)
        return found or ("another rank has found a difference" if flag else None)

    # -- comparing --------------------------------------------------------------------------------------------------

    def _same(self, value: Tensor, expected: Tensor, what: str) -> None:
        value, expected = value.detach().cpu().double(), expected.detach().cpu().double()
        check(value.shape == expected.shape, f"{what} has shape {value.shape}, not {expected.shape}")
        bound = BOUND
        if self.setup.precision != "fp64":
            has_penalty = any(isinstance(op, Backward) and op.penalty for op in self.program.ops)
            bound = LOW_BOUND_OF_SECOND_DERIVATIVES if has_penalty else LOW_BOUND
        if not torch.allclose(value, expected, rtol=bound, atol=bound):
            raise Difference(f"{what} is {value.flatten().tolist()}, not {expected.flatten().tolist()}")

    def _same_part(self, value: Tensor, expected: Tensor, what: str) -> None:
        """Compare this rank's shard of a value, which may be a sharded tensor."""
        from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor, local_range_of

        if isinstance(value, ShardedTensor):
            self._same(value.local, local_range_of(expected, value.slot), f"this rank's part of {what}")
        else:
            self._same(value, expected, what)

    def _compare(self) -> None:
        """Compare weights, gradients and kept gradients, as far as this rank holds them."""
        for index, (parameter, expected) in enumerate(zip(self.parameters, self.reference.parameters)):
            self._same_part(parameter, expected, f"parameter {index}")
            gradients = self.reference.gradients[index]
            if gradients is None:
                check(parameter.grad is None, f"parameter {index} has a gradient")
            elif parameter.grad is None:
                own = gradients[rank()]
                check(self.reference.is_local[index], f"parameter {index} has no gradient, not {own}")
                self._same(torch.zeros_like(own), own, f"the missing gradient of parameter {index}")
            else:
                self._same_part(parameter.grad, gradients[rank()], f"the gradient of parameter {index}")
        for index, (ours, theirs) in self.kept.items():
            self._same_part(ours, theirs, f"a kept gradient of parameter {index}")
        for index, (ours, theirs) in self.datas.items():
            self._same_part(ours, theirs, f"what was the data of parameter {index}")
        if self.setup.shard_within is not None:
            self._compare_parts()

    def _compare_parts(self) -> None:
        """Compare this rank's parts of the parameters at rest with the reference."""
        for engine, module in zip(self.engines, self.reference.net.parts()):
            expected = dict(module.named_parameters())
            for bucket in engine.buckets:
                low, high = bucket.layout.own_part
                values = bucket.part.values()
                for segment in bucket.layout.segments:
                    start, stop = max(segment.start, low), min(segment.stop, high)
                    whole = expected[segment.name].flatten()
                    self._same(
                        values[start - low : stop - low] if stop > start else values[:0],
                        whole[start - segment.start : stop - segment.start] if stop > start else whole[:0],
                        f"{segment.name} in this machine's part",
                    )

    def _same_states(self, ours: Any, theirs: Any, what: str) -> None:
        found, wanted = list(ours["state"]), list(theirs["state"])
        check(sorted(found) == sorted(wanted), f"{what} has states of parameters {found}, not of {wanted}")
        for key, expected in theirs["state"].items():
            state = ours["state"][key]
            check(state.keys() == expected.keys(), f"{what} has {list(state)} of parameter {key}")
            for name, value in expected.items():
                if isinstance(value, Tensor):
                    self._same(state[name], value, f"{name} of parameter {key} of {what}")
                else:
                    check(state[name] == value, f"{name} of parameter {key} of {what} is {state[name]}, not {value}")
        rates = [[group["lr"] for group in each["param_groups"]] for each in (ours, theirs)]
        check(rates[0] == rates[1], f"{what} has learning rates {rates[0]}, not {rates[1]}")

    def _compare_ordinary(self) -> None:
        for (name, value), expected in zip(self.net.state_dict().items(), self.reference.net.state_dict().values()):
            self._same(value, expected, name)
        for number, (ours, theirs) in enumerate(zip(self.optimizers, self.reference.optimizers)):
            self._same_states(ours.state_dict(), theirs.state_dict(), f"optimizer {number}")

    # -- steps of a program -----------------------------------------------------------------------------------------

    def _backward(self, op: Backward, index: int) -> None:
        trained = self._trained(op)
        reached = self._owned(op.inputs, trained)
        if not any(reached) or not self._is_possible(op, reached):
            return
        groups = [[f] for f in range(len(op.uses))] if op.each else [list(range(len(op.uses)))]
        times = 2 if op.twice else 1
        sync = [op.sync or not accumulates for accumulates in self._accumulates_locally()]
        with self._frozen(self.parameters, trained), self.window() if op.window else contextlib.nullcontext():
            with contextlib.nullcontext() if op.sync else self.no_sync():
                for forwards in groups:
                    loss = self._loss(self.net, self.parameters, op, index, forwards, rank())
                    if op.evaluated is not None:
                        self._evaluate(Evaluate(op.evaluated), index)
                    for time in range(times):
                        inputs = self._inputs(op, self.parameters, reached)
                        self.run_backward(loss, retain_graph=time + 1 < times, **inputs)
        reference = self.reference
        with self._frozen(reference.parameters, trained):
            for forwards in groups:
                for _ in range(times):
                    reference.backward(
                        lambda r, f=forwards: self._loss(reference.net, reference.parameters, op, index, f, r).backward(
                            **self._inputs(op, reference.parameters, reached)
                        ),
                        sync=sync,
                    )

    def _accumulates_locally(self) -> list[bool]:
        """By parameter, whether its engine postpones reductions under ``no_sync``.

        Engines at stage 1 do so on several ranks, if no ``.grad`` of theirs is reduced already.
        """
        from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

        if self.setup.stage != 1 or self.setup.ranks == 1:
            return [False] * len(self.parameters)
        reduced = {i for i, parameter in enumerate(self.parameters) if isinstance(parameter.grad, ShardedTensor)}
        are_reduced = self.reference.in_one_engine_with(reduced)
        return [index not in are_reduced for index in range(len(self.parameters))]

    def _trained(self, op: Backward) -> list[bool]:
        """By parameter, whether it requires a gradient in this backward."""
        return self._owned(op.frozen, [p.requires_grad for p in self.parameters])

    def _owned(self, optimizer: int | None, wanted: list[bool]) -> list[bool]:
        """Restrict flags of parameters to those of an optimizer, if it exists."""
        if optimizer is None or optimizer >= len(self.optimizers):
            return wanted
        own = {id(p) for group in self.optimizers[optimizer].param_groups for p in group["params"]}
        return [w and id(p) in own for w, p in zip(wanted, self.parameters)]

    @staticmethod
    def _inputs(op: Backward, parameters: list[nn.Parameter], reached: list[bool]) -> dict[str, Any]:
        """Arguments for ``backward``."""
        return {} if op.inputs is None else {"inputs": [p for p, r in zip(parameters, reached) if r]}

    def _is_possible(self, op: Backward, trained: Sequence[bool]) -> bool:
        """Whether each rank's backward passes reach some parameter and, at stage 3, the same units as other ranks'."""
        direct = op.direct is not None and trained[op.direct % len(trained)]
        is_trained = {id(twin): is_wanted for twin, is_wanted in zip(self.reference.parameters, trained)}

        def reached(uses: tuple[str, ...]) -> list[bool]:
            return [
                any(is_trained[id(p)] for part in parts for p in getattr(block, part).parameters())
                for block, parts in zip(self.reference.net.blocks, uses)
            ]

        scaled = op.scaled and trained[0]
        all_reached = [[reached(uses) for uses in by_rank] for by_rank in op.uses]
        if self.setup.has_unit_per_block and any(row != by_rank[0] for by_rank in all_reached for row in by_rank):
            return False
        if self.setup.stage == 3 and (op.twice or op.penalty):
            # Only ranks whose layers need released units gather them for the second backward.
            if any(row != by_rank[0] for by_rank in op.uses for row in by_rank):
                return False
        reaches = [[scaled or direct or any(row) for row in by_rank] for by_rank in all_reached]
        if op.each:
            return all(all(by_rank) for by_rank in reaches)
        return all(any(of_rank) for of_rank in zip(*reaches))

    @staticmethod
    @contextlib.contextmanager
    def _frozen(parameters: list[nn.Parameter], trained: Sequence[bool]) -> Iterator[None]:
        """Freeze parameters temporarily, as ``toggle_optimizer`` does."""
        before = [p.requires_grad for p in parameters]
        for parameter, wanted in zip(parameters, trained):
            parameter.requires_grad = wanted
        try:
            yield
        finally:
            for parameter, wanted in zip(parameters, before):
                parameter.requires_grad = wanted

    @staticmethod
    def _loss(
        net: Net, parameters: list[nn.Parameter], op: Backward, index: int, forwards: list[int], of: int
    ) -> Tensor:
        data = [inputs(index, f, of, net).requires_grad_(op.penalty) for f in forwards]
        losses = [net(x, op.uses[f][of], op.scaled, op.checkpointed) for f, x in zip(forwards, data)]
        loss = sum(losses[1:], losses[0])
        if op.penalty:
            loss = loss + sum(g.square().sum() for g in torch.autograd.grad(loss, data, create_graph=True))
        if op.direct is not None:
            loss = loss + parameters[op.direct % len(parameters)].square().sum() * (1 + of)
        return loss

    def _zerograd(self, op: ZeroGrad, index: int) -> None:
        if not op.to_none and any(self.reference.is_local):
            return
        (self.net if op.optimizer is None else self.optimizers[op.optimizer]).zero_grad(set_to_none=op.to_none)
        if op.optimizer is None:
            cleared = list(range(len(self.parameters)))
        else:
            own = {id(p) for group in self.optimizers[op.optimizer].param_groups for p in group["params"]}
            cleared = [i for i, p in enumerate(self.parameters) if id(p) in own]
        for number in cleared:
            gradients = self.reference.gradients[number]
            if op.to_none or gradients is None:
                self.reference.gradients[number], self.reference.is_local[number] = None, False
            else:
                for tensor in gradients:
                    tensor.zero_()

    def _step(self, op: Step, index: int) -> None:
        if self._is_any_local(self.optimizers[op.optimizer]):
            return
        closure = [lambda: 1.0] if op.closure else []
        self.step(op.optimizer, *closure)
        self._on_reference(lambda: self.reference.optimizers[op.optimizer].step(*closure))

    def _is_any_local(self, optimizer: Any = None) -> bool:
        chosen = range(len(self.parameters))
        if optimizer is not None:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            chosen = [i for i in chosen if id(self.parameters[i]) in own]
        return any(self.reference.is_local[i] for i in chosen)

    def _on_reference(self, act: Callable[[], Any]) -> Any:
        """Call a function that neither reads nor writes local gradients."""
        local = [gradients if is_local else None for gradients, is_local in self._held_by_reference()]
        for index, gradients in enumerate(local):
            if gradients is not None:
                self.reference.gradients[index] = None
        out = self.reference.with_gradients(act)
        for index, gradients in enumerate(local):
            if gradients is not None:
                self.reference.gradients[index], self.reference.is_local[index] = gradients, True
        return out

    def _held_by_reference(self) -> list[tuple[Any, bool]]:
        return list(zip(self.reference.gradients, self.reference.is_local))

    def _gradient(self, op: Gradient, index: int) -> None:
        from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor

        number = op.parameter % len(self.parameters)
        gradients, action = self.reference.gradients[number], op.action
        if self.reference.is_local[number]:
            self._local_gradient(number, action)
            return
        if action == "keep":
            if gradients is not None and isinstance(self.parameters[number].grad, ShardedTensor):
                self.kept[number] = (self.parameters[number].grad, gradients[0])
            return
        if action == "put back" and number not in self.kept:
            return
        twin = next(
            (i for i, p in enumerate(self.parameters) if i != number and p.shape == self.parameters[number].shape), None
        )
        if action == "other" and (
            twin is None or self.reference.gradients[twin] is None or self.reference.is_local[twin]
        ):
            return
        if gradients is None and action not in ("drop", "plain", "put back", "other"):
            return

        def act(parameters: list[nn.Parameter], kept: Callable[[], Tensor]) -> Any:
            parameter = parameters[number]
            match action:
                case "drop":
                    parameter.grad = None
                case "clone":
                    parameter.grad = parameter.grad.clone()
                case "plain":
                    parameter.grad = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
                case "twice":
                    parameter.grad = parameter.grad * 2
                case "scale":
                    parameter.grad.mul_(2)
                case "zero":
                    parameter.grad.zero_()
                case "other":
                    parameter.grad = parameters[twin].grad.clone()
                case "put back":
                    parameter.grad = kept()
                case "read":
                    return parameter.grad.sum()
                case "detached":
                    parameter.grad = parameter.grad.detach()

        ours = act(self.parameters, lambda: self.kept[number][0])
        theirs = self._on_reference(lambda: act(self.reference.parameters, lambda: self.kept[number][1]))
        if action == "read":
            self._same(ours, theirs, f"the sum of the gradient of parameter {number}")

    def _local_gradient(self, number: int, action: str) -> None:
        """Drop local gradients (not yet averaged), or change them in place."""
        parameter, gradients = self.parameters[number], self.reference.gradients[number]
        if action == "drop":
            parameter.grad = None
            self.reference.gradients[number], self.reference.is_local[number] = None, False
        elif action == "scale":
            for tensor in ([] if parameter.grad is None else [parameter.grad]) + gradients:
                tensor.mul_(2)
        elif action in ("clone", "twice"):
            factor = 2 if action == "twice" else 1
            parameter.grad = None if parameter.grad is None else parameter.grad * factor
            self.reference.gradients[number] = [tensor * factor for tensor in gradients]

    def _clip(self, op: Clip, index: int) -> None:
        optimizer = None if op.optimizer is None else self.optimizers[op.optimizer]
        if self._is_any_local(optimizer):
            return
        if any(p.grad is not None for p in self._clipped(op, self.parameters, self.optimizers)):
            self.clip(op)
        self._on_reference(lambda: self._clip_in(op, self.reference.parameters, self.reference.optimizers))

    def clip(self, op: Clip) -> None:
        self._clip_in(op, self.parameters, self.optimizers)

    def _clip_in(self, op: Clip, parameters: list[nn.Parameter], optimizers: list[Any]) -> None:
        clipped = [p for p in self._clipped(op, parameters, optimizers) if p.grad is not None]
        if clipped and op.by == "value":
            nn.utils.clip_grad_value_(clipped, 0.125)
        elif clipped:
            nn.utils.clip_grad_norm_(clipped, 0.5, NORMS[op.by])

    @staticmethod
    def _clipped(op: Clip, parameters: list[nn.Parameter], optimizers: list[Any]) -> list[nn.Parameter]:
        if op.optimizer is None:
            return parameters
        return [p for group in optimizers[op.optimizer].param_groups for p in group["params"]]

    def _require(self, op: Require, index: int) -> None:
        for parameters in (self.parameters, self.reference.parameters):
            parameters[op.parameter % len(parameters)].requires_grad_(op.requires_grad)

    def _write(self, op: Write, index: int) -> None:
        if op.how.endswith("forward"):
            self._write_in_forward(op.parameter % len(self.parameters), index, op.how)
            return
        for parameters in (self.parameters, self.reference.parameters):
            parameter = parameters[op.parameter % len(parameters)]
            value = torch.linspace(-0.5, 0.5, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
            with torch.no_grad():
                match op.how:
                    case "copy":
                        parameter.copy_(value)
                    case "data":
                        parameter.data = value
                    case "scale":
                        parameter.mul_(0.5)
                    case "element":
                        parameter[0 if parameter.dim() else ()] = 0.25

    @torch.no_grad()
    def _data(self, op: Data, index: int) -> None:
        number = op.parameter % len(self.parameters)
        parameter, expected = self.parameters[number], self.reference.parameters[number]
        other = next((i for i, p in enumerate(self.parameters) if i != number and p.shape == parameter.shape), number)
        match op.how:
            case "keep":
                self.datas[number] = parameter.data, expected.data
            case "put back" if number in self.datas:
                parameter.data, expected.data = self.datas[number][0], self.datas[number][1].clone()
            case "scale" if number in self.datas:
                for kept in self.datas[number]:
                    kept.mul_(0.5)
            case "replace":
                parameter.data, expected.data = parameter.data * 0.5, expected.data * 0.5
            case "swap":
                ours, theirs = self.parameters[other], self.reference.parameters[other]
                parameter.data, ours.data = ours.data, parameter.data
                # clones, since ours share no memory afterwards: see docs/explanation/limits.md
                expected.data, theirs.data = theirs.data.clone(), expected.data.clone()
            case "forward":
                self._sign_in_forward(number)

    def _sign_in_forward(self, number: int) -> None:
        if number in self.signs:
            for handle in self.signs.pop(number):
                handle.remove()
            return
        self.signs[number] = []
        for net, parameters in ((self.net, self.parameters), (self.reference.net, self.reference.parameters)):
            holder, name = self._holder(net, parameters[number])
            values: list[Tensor] = []

            def take(module: nn.Module, _: Any, name: str = name, values: list[Tensor] = values) -> None:
                parameter = getattr(module, name)
                values.append(parameter.data)
                parameter.data = parameter.data.sign()

            def put_back(module: nn.Module, *_: Any, name: str = name, values: list[Tensor] = values) -> None:
                getattr(module, name).data = values.pop()

            self.signs[number] += [
                holder.register_forward_pre_hook(take),
                holder.register_forward_hook(put_back, prepend=True, always_call=True),
            ]

    @staticmethod
    def _holder(net: nn.Module, parameter: nn.Parameter) -> tuple[nn.Module, str]:
        """A module that has a parameter, and the parameter's name there."""
        return next((m, n) for m in net.modules() for n, p in m._parameters.items() if p is parameter)

    def _write_in_forward(self, number: int, index: int, how: str) -> None:
        outputs = []
        for net, parameters in ((self.net, self.parameters), (self.reference.net, self.reference.parameters)):
            holder, name = self._holder(net, parameters[number])

            def write(module: nn.Module, _: Any, name: str = name) -> None:
                parameter = getattr(module, name)
                with torch.no_grad():
                    if how == "data in forward":
                        parameter.data = parameter.data * 0.5
                    else:
                        parameter.mul_(0.5)

            handle = holder.register_forward_pre_hook(write)
            with torch.no_grad():
                uses = ("ab",) * self.setup.blocks
                outputs.append(net(inputs(index, 0, 0, net), uses, True, False))
            handle.remove()
        self._same(*outputs, "the output of a forward pass that writes")

    def _evaluate(self, op: Evaluate, index: int) -> None:
        uses = tuple("ab" if block == op.block % self.setup.blocks else "" for block in range(self.setup.blocks))
        outputs = []
        for net in (self.net, self.reference.net):
            net.eval()
            with torch.no_grad():
                outputs.append(net(inputs(index, 0, 0, net), uses, True, False))
            net.train()
        self._same(*outputs, "the output in evaluation")

    def _uneven(self, op: Uneven, index: int) -> None:
        from lightning_zero import uneven_forwards

        if self.setup.several:
            return  # one engine's ranks join each other
        uses, outputs = ("ab",) * self.setup.blocks, []
        with uneven_forwards(self.net), torch.no_grad():
            for number in range(op.counts[rank()]):
                outputs.append(self.net(inputs(index, number, rank(), self.net), uses, True, False))
        for number, output in enumerate(outputs):
            with torch.no_grad():
                expected = self.reference.net(inputs(index, number, rank(), self.reference.net), uses, True, False)
            self._same(output, expected, f"output {number} of this rank")

    def _whole(self, op: Whole, index: int) -> None:
        from lightning_zero import full_grad, full_optimizer_state, full_parameters, iter_full_parameters

        match op.how:
            case "forward":
                uses = (("ab",) * self.setup.blocks,) * self.setup.ranks
                with full_parameters(self.net):
                    self._backward(Backward((uses,), scaled=True, sync=op.sync), index)
            case "write":
                with full_parameters(self.net, writeback=True), torch.no_grad():
                    for net in (self.net, self.reference.net):
                        list(net.parameters())[op.parameter % len(self.parameters)].mul_(0.5)
            case "stream":
                found, wanted = dict(iter_full_parameters(self.net)), self.reference.net.state_dict()
                check(list(found) == list(wanted), f"the stream has {list(found)}, not {list(wanted)}")
                for name, value in found.items():
                    self._same(value, wanted[name], f"{name} in the stream")
            case "gradients":
                for number, parameter in enumerate(self.parameters):
                    gradients = self.reference.gradients[number]
                    if gradients is not None and not self.reference.is_local[number]:
                        found = full_grad(parameter)
                        check(found is not None, f"parameter {number} has no gradient")
                        self._same(found, gradients[0], f"the whole gradient of parameter {number}")
            case "states":
                self._whole_states(full_optimizer_state)

    def _whole_states(self, state_of: Callable[[Tensor], dict[str, Any]]) -> None:
        pairs = enumerate(zip(self.parameters, self.reference.parameters))
        twins = {id(theirs): (number, ours) for number, (ours, theirs) in pairs}
        for optimizer in self.reference.optimizers:
            for theirs in (p for group in optimizer.param_groups for p in group["params"]):
                number, ours = twins[id(theirs)]
                found, wanted = state_of(ours), optimizer.state.get(theirs, {})
                check(found.keys() == wanted.keys(), f"parameter {number} has states {list(found)}, not {list(wanted)}")
                for name, value in wanted.items():
                    if isinstance(value, Tensor):
                        self._same(found[name], value, f"{name} of parameter {number}")

    def _saveandload(self, op: SaveAndLoad, index: int) -> None:
        weights = self.full_weights() if op.whole else copy.deepcopy(self.net.state_dict())
        states = [self.full_states(optimizer) for optimizer in self.optimizers]
        expected = copy.deepcopy(self.reference.net.state_dict())
        expected_states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.reference.optimizers]
        for name, value in expected.items():
            self._same_part(weights[name], value, f"{name} in the state dict")
        for number, (ours, theirs) in enumerate(zip(states, expected_states)):
            self._same_states(ours, theirs, f"optimizer {number}")
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        if op.load and self.saved is not None and self.saved[0] == sizes:
            _, weights, states, expected, expected_states = self.saved
            for net, values in ((self.net, weights), (self.reference.net, expected)):
                net.load_state_dict(values)
            for optimizers, values in ((self.optimizers, states), (self.reference.optimizers, expected_states)):
                for optimizer, value in zip(optimizers, copy.deepcopy(values)):
                    optimizer.load_state_dict(value)
        else:
            self.saved = sizes, weights, states, expected, expected_states

    def _learningrate(self, op: LearningRate, index: int) -> None:
        for optimizers in (self.optimizers, self.reference.optimizers):
            for group in optimizers[op.optimizer].param_groups:
                group["lr"] *= op.factor

    def _addgroup(self, op: AddGroup, index: int) -> None:
        if self.setup.whole:  # the parameter's bucket gets owners, which must not have gradients
            self._zerograd(ZeroGrad(None), index)
            self.kept.clear()
        number = op.parameter % len(self.parameters)
        for optimizers, parameters in (
            (self.optimizers, self.parameters),
            (self.reference.optimizers, self.reference.parameters),
        ):
            known = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
            if id(parameters[number]) not in known:
                optimizers[op.optimizer].add_param_group({"params": [parameters[number]]})

    def _fail(self, op: Fail, index: int) -> None:
        if op.at == "step" and self._is_any_local(self.optimizers[op.optimizer]):
            return
        uses = tuple(part or "a" if number == op.block else part for number, part in enumerate(op.parts))
        block = self.net.blocks[op.block]
        handles = []
        if op.at == "forward":
            handles.append(block.register_forward_hook(_fail))
        elif op.at == "backward":
            handles.append(block.register_forward_hook(lambda _, __, out: out.register_hook(_fail) and None))
        with contextlib.suppress(Failure), self.window() if op.window else contextlib.nullcontext():
            with contextlib.nullcontext() if op.sync else self.no_sync():
                loss = self.net(inputs(index, 0, rank(), self.net), uses, False, False)
                if op.at == "step":
                    self.step(op.optimizer, _fail)
                self.run_backward(loss)
        for handle in handles:
            handle.remove()
        self._zerograd(ZeroGrad(None), index)

    def _differentiate(self, op: Differentiate, index: int) -> None:
        backward = Backward(((op.parts,) * self.setup.ranks,), scaled=op.scaled)
        if not self._is_possible(backward, self._trained(backward)):
            return
        found = []
        for net, parameters in ((self.net, self.parameters), (self.reference.net, self.reference.parameters)):
            with self.window() if op.window and net is self.net else contextlib.nullcontext():
                loss = self._loss(net, parameters, backward, index, [0], rank())
                wanted = [p for p in parameters if p.requires_grad]
                found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
        for number, (ours, theirs) in enumerate(zip(*found)):
            check((ours is None) == (theirs is None), f"the derivative {number} is {ours}, not {theirs}")
            if theirs is not None:
                self._same_part(ours, theirs, f"derivative {number}")

    def _hook(self, op: Hook, index: int) -> None:
        number = op.parameter % len(self.parameters)
        if op.module:
            self._module_hook(op.parameter % self.setup.blocks)
        elif number in self.hooks:
            for handle in self.hooks.pop(number):
                handle.remove()
        elif self.parameters[number].requires_grad:
            both = self.parameters[number], self.reference.parameters[number]
            self.hooks[number] = [parameter.register_hook(lambda gradient: gradient * 2) for parameter in both]

    def _module_hook(self, block: int) -> None:
        key = -1 - block
        if key in self.hooks:
            for handle in self.hooks.pop(key):
                handle.remove()
        else:
            self.hooks[key] = [
                net.blocks[block].register_full_backward_pre_hook(lambda _, outputs: tuple(x * 2 for x in outputs))
                for net in (self.net, self.reference.net)
            ]

    def _average(self, op: Average, index: int) -> None:
        nets = self.net, self.reference.net
        if self.copies is None:
            self.copies = copy.deepcopy(nets[0]), copy.deepcopy(nets[1])
            for each in self.copies:
                each.requires_grad_(False)
        outputs = []
        for average, net in zip(self.copies, nets):
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), net.parameters()):
                    if op.own:
                        mean.add_(torch.full(mean.shape, 0.1 * (1 + rank()), dtype=mean.dtype))
                    mean.lerp_(parameter, 0.5)
                outputs.append(average(inputs(index, 0, 0, net), ("ab",) * self.setup.blocks, True, False))
        self._same(*outputs, "the copy's output")
        for number, (ours, theirs) in enumerate(zip(*(each.parameters() for each in self.copies))):
            self._same_part(ours, theirs, f"parameter {number} of the copy")

    def _changestate(self, op: ChangeState, index: int) -> None:
        for optimizers, parameters in (
            (self.optimizers, self.parameters),
            (self.reference.optimizers, self.reference.parameters),
        ):
            state, parameter = optimizers[op.optimizer].state, parameters[op.parameter % len(parameters)]
            if op.how == "clear":
                state.clear()
            elif parameter in state:
                for value in state[parameter].values():
                    if isinstance(value, Tensor) and value.dim():
                        value.mul_(0.5)

    def _newengine(self, op: NewEngine, index: int) -> None:
        self._zerograd(ZeroGrad(None), index)
        self.kept.clear()
        self.datas.clear()
        stage = 3 if self.setup.shard_within else op.stage
        self.renew(replace(self.setup, stage=stage, units=op.units, offload=op.offload))

    def _check(self, op: Check, index: int) -> None:
        self._compare()
