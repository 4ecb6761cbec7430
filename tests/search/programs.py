"""What a random training program consists of, and how hypothesis draws one.

A program is data: every rank receives the same one. A step that has no meaning at its position (an optimizer's step on
gradients that ranks have not averaged yet, say) is skipped by ``execution`` on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

BLOCKS, PARTS = 4, ("a", "b", "ab", "")
"""The maximum number of blocks, and which of its two layers a block's forward pass uses."""

PARAMETERS = 4 * BLOCKS + 2
"""The maximum number of parameters; a program's indices are taken modulo the model's own number."""


@dataclass(frozen=True)
class Setup:
    """The model, its optimizers and the engine's options.

    Attributes:
        units: "merged" (the whole model is one unit), "single" (each block is one), or "resident" (each is one, and
            stays gathered for the step, as in a tiny model by default).
        shard_within: the engine's option.
        machines: a letter for each rank, the same for those on one simulated machine; None if all are on one.
        owner_of: by parameter, the optimizer that has it from the start; None for one that may be added later.
        offload: "cpu" (optimizer states), "all" (all that can be, to the CPU, in small groups), or "nvme" (states).
        has_number: the model also has a zero-dimensional parameter.
        is_tied: layers ``b`` of all blocks share their weight.
        whole: each parameter has one owner (``whole_parameters``).
        checkpoints: the engine checkpoints the activations of blocks.
        activations: "cpu", where the engine keeps checkpointed inputs; None for the device.
        several: each block has its own engine, and the model's own parameters have one, too.
        precision: "fp64"; "mixed" (fp32, under autocast to bfloat16, in which layers' parameters are gathered);
            "bf16" (with fp32 masters); or "lean" (bfloat16 without masters, and with states in bfloat16).
    """

    ranks: int
    stage: int
    blocks: int
    units: str
    overlap: bool
    offload: str | None
    bucket_numel: int
    optimizers: tuple[str, ...]
    owner_of: tuple[int | None, ...]
    shard_within: Any = None
    machines: str | None = None
    prefetch: int = 1
    reduction_buffers: int = 2
    has_number: bool = False
    is_tied: bool = False
    whole: bool = False
    checkpoints: bool = False
    activations: str | None = None
    several: bool = False
    precision: str = "fp64"

    @property
    def offloads_to(self) -> str | None:
        """``offload``, without the disk where the engine refuses it."""
        return "cpu" if self.offload == "nvme" and (self.whole or self.precision == "lean") else self.offload

    @property
    def has_unit_per_block(self) -> bool:
        """Whether ranks must run the same blocks."""
        return self.several or (self.stage == 3 and self.units == "single")


@dataclass(frozen=True)
class Op:
    """A step of a program. ``Program.__repr__`` prints code for a named test."""


@dataclass(frozen=True)
class Backward(Op):
    """Forward passes, in which each rank uses the block layers named for it, and their backward pass.

    Attributes:
        uses: by forward, by rank, by block, one of ``PARTS``.
        scaled: the root's own parameter takes part.
        direct: a parameter that the loss reads outside of its module, if any.
        sync: False for a micro-batch under ``no_sync``.
        frozen: an optimizer whose parameters alone require gradients, as with ``toggle_optimizer``.
        checkpointed: blocks are recomputed in backward.
        twice: backward runs twice through the same graph.
        each: each forward pass has its own backward pass.
        window: forward and backward passes are within one window, as in a ``training_step``.
        penalty: the loss includes the squared gradient of the output with respect to the inputs.
        evaluated: a block that runs without gradients between forward and backward, if any.
        inputs: an optimizer whose parameters are given as ``backward(inputs=...)``, if any.
    """

    uses: tuple[tuple[tuple[str, ...], ...], ...]
    scaled: bool = False
    direct: int | None = None
    sync: bool = True
    frozen: int | None = None
    checkpointed: bool = False
    twice: bool = False
    each: bool = False
    window: bool = False
    penalty: bool = False
    evaluated: int | None = None
    inputs: int | None = None


@dataclass(frozen=True)
class Differentiate(Op):
    """``torch.autograd.grad`` of a loss with respect to all parameters, which leaves ``.grad`` alone.

    Attributes:
        parts: by block, the layers that the forward pass uses.
    """

    parts: tuple[str, ...]
    scaled: bool = False
    window: bool = False


@dataclass(frozen=True)
class Fail(Op):
    """A training step that raises an error on each rank, after which all gradients are dropped.

    Attributes:
        at: "forward", "backward", or "step", which fails in its closure.
        parts: by block, the layers that the forward pass uses.
        block: the block in which a forward or backward pass fails.
    """

    at: str
    parts: tuple[str, ...]
    block: int
    optimizer: int = 0
    sync: bool = True
    window: bool = False


@dataclass(frozen=True)
class ZeroGrad(Op):
    """``zero_grad`` of an optimizer, or of the module where ``optimizer`` is None."""

    optimizer: int | None
    to_none: bool = True


@dataclass(frozen=True)
class Step(Op):
    optimizer: int
    closure: bool = False


@dataclass(frozen=True)
class Gradient(Op):
    """Something done to one parameter's ``.grad``.

    Attributes:
        action: "drop", "clone", "plain" (an ordinary tensor in its place), "twice" (times two, another tensor), "scale"
            (in place), "zero" (in place), "other" (that of another parameter of the same shape), "keep" (keep a
            reference to the tensor), "put back" (the kept tensor is ``.grad`` again), "read", "detached".
    """

    parameter: int
    action: str


@dataclass(frozen=True)
class Clip(Op):
    """Clip gradients of an optimizer's parameters, or of all; ``by`` is "norm", "inf" or "value"."""

    by: str
    optimizer: int | None = None


@dataclass(frozen=True)
class Require(Op):
    """Freeze a parameter, or unfreeze it."""

    parameter: int
    requires_grad: bool


@dataclass(frozen=True)
class Write(Op):
    """Write a weight in one of the ways of ``WRITES``: "forward" is in a forward pass of its module."""

    parameter: int
    how: str


@dataclass(frozen=True)
class Data(Op):
    """Something done with ``parameter.data`` itself, not its values.

    Attributes:
        how: "keep" it, "put back" or "scale" the kept one, "replace" it with values computed from it, "swap" it with
            another parameter's, or in each forward pass of its module from now on, or no longer, compute with other
            values and put it back ("forward").
    """

    parameter: int
    how: str


@dataclass(frozen=True)
class Evaluate(Op):
    """A forward pass without gradients, in eval mode."""

    block: int


@dataclass(frozen=True)
class Uneven(Op):
    """Different numbers of forward passes on the ranks, without gradients, within ``uneven_forwards``."""

    counts: tuple[int, ...]


@dataclass(frozen=True)
class Whole(Op):
    """Something done with whole tensors.

    Attributes:
        how: "forward" (and backward, within ``full_parameters``), "write" (to a parameter there), "stream"
            (``iter_full_parameters``), "gradients" (``full_grad``), or "states" (``full_optimizer_state``).
    """

    how: str
    parameter: int
    sync: bool = True


@dataclass(frozen=True)
class SaveAndLoad(Op):
    """Save and compare weights and optimizer states; with ``load``, load the newest saved ones back."""

    load: bool
    whole: bool = True


@dataclass(frozen=True)
class LearningRate(Op):
    optimizer: int
    factor: float


@dataclass(frozen=True)
class AddGroup(Op):
    """Add a parameter that no optimizer has to an optimizer."""

    optimizer: int
    parameter: int


@dataclass(frozen=True)
class Hook(Op):
    """Register a hook that doubles each gradient of a parameter, or remove it.

    Attributes:
        module: a hook of the block instead, one that doubles the gradient of its output.
    """

    parameter: int
    module: bool = False


@dataclass(frozen=True)
class Average(Op):
    """Copy the model; later, move the copy's weights halfway to the model's, and evaluate the copy.

    Attributes:
        own: whether each rank first adds numbers of its own to the copy.
    """

    own: bool = False


@dataclass(frozen=True)
class ChangeState(Op):
    """Change an optimizer's state from outside: "clear" it, or "scale" one parameter's in place."""

    optimizer: int
    parameter: int
    how: str


@dataclass(frozen=True)
class NewEngine(Op):
    """Close the engine, and go on with one that has other options."""

    stage: int
    units: str
    offload: str | None


@dataclass(frozen=True)
class Check(Op):
    """Compare this rank's parts of all weights and gradients."""


@dataclass(frozen=True, repr=False)
class Program:
    setup: Setup
    ops: tuple[Op, ...]

    def __repr__(self) -> str:
        def shown(value: Any) -> str:
            given = [f for f in fields(value) if f.default is not getattr(value, f.name)]
            return f"{type(value).__name__}({', '.join(f'{f.name}={getattr(value, f.name)!r}' for f in given)})"

        ops = "".join(f"\n        {shown(op)}," for op in self.ops)
        return f"Program(\n    {shown(self.setup)},\n    ({ops}\n    ),\n)"


WRITES = ("copy", "data", "scale", "element", "forward", "data in forward")

GRADIENT_ACTIONS = (
    ("drop", "clone", "plain", "twice", "scale", "zero", "other", "keep", "put back", "read", "detached")
)  # fmt: skip

LIGHTNING_PRECISIONS = {"fp64": "64-true", "mixed": "bf16-mixed", "bf16": "bf16-true", "lean": "bf16-true"}
"""A Trainer's ``precision``, by a setup's."""

OPTIMIZERS = "sgd", "momentum", "adam", "adamw", "rmsprop"
UNITS = "merged", "single", "resident"
OFFLOADS = None, None, None, "cpu", "all", "nvme"

_parameter = st.integers(0, PARAMETERS - 1)


@st.composite
def setups(draw: st.DrawFn, ranks: int) -> Setup:
    optimizers = tuple(draw(st.lists(st.sampled_from(OPTIMIZERS), min_size=1, max_size=3)))
    # Usually by block, as in projects; sometimes by parameter.
    owner = st.sampled_from((*range(len(optimizers)), *range(len(optimizers)), None))
    if draw(st.booleans()):
        by_block = [draw(owner) for _ in range(BLOCKS + 1)]
        owners = tuple(by_block[index // 4] for index in range(PARAMETERS))
    else:
        owners = tuple(draw(owner) for _ in range(PARAMETERS))
    shard_within = draw(st.sampled_from((2, "node", None))) if ranks == 4 else None
    several = draw(st.sampled_from((False, False, True)))
    whole = draw(st.sampled_from((False, False, True)))
    precisions = "fp64", "fp64", "mixed", "bf16", "bf16" if whole else "lean"
    return Setup(
        ranks=ranks,
        stage=draw(st.sampled_from((1, 2, 3))) if shard_within is None else 3,
        blocks=draw(st.integers(1, BLOCKS)),
        units=draw(st.sampled_from(UNITS)),
        # Several engines need a buffer for each bucket if ranks use different layers: see limits.md.
        overlap=draw(st.booleans()) or several,
        offload=draw(st.sampled_from(OFFLOADS)),
        bucket_numel=draw(st.sampled_from((2**25, 2**25, 40))),
        optimizers=optimizers,
        owner_of=owners,
        shard_within=shard_within,
        machines=draw(st.sampled_from(("aabb", "abab"))) if ranks == 4 and shard_within != 2 else None,
        prefetch=draw(st.sampled_from((1, 1, 0, 2))),
        reduction_buffers=PARAMETERS if several else draw(st.sampled_from((2, 2, 1))),
        has_number=draw(st.booleans()),
        is_tied=draw(st.sampled_from((False, False, True))) and not several,
        whole=whole,
        checkpoints=draw(st.sampled_from((False, False, True))),
        activations=draw(st.sampled_from((None, "cpu"))),
        several=several,
        precision=draw(st.sampled_from(precisions)),
    )


@st.composite
def _uses(draw: st.DrawFn, setup: Setup) -> tuple[tuple[str, ...], ...]:
    """By rank and block. At stage 3, if each block is a unit, all ranks run the same blocks."""
    first = tuple(draw(st.sampled_from(PARTS)) for _ in range(setup.blocks))
    if setup.ranks == 1 or not draw(st.booleans()):
        return (first,) * setup.ranks
    rows = [first]
    for _ in range(setup.ranks - 1):
        row = []
        for part in first:
            other = draw(st.sampled_from(PARTS))
            if setup.has_unit_per_block:
                other = (other or "a") if part else ""
            row.append(other)
        rows.append(tuple(row))
    return tuple(rows)


@st.composite
def _backwards(draw: st.DrawFn, setup: Setup) -> Backward:
    forwards = draw(st.sampled_from((1, 1, 1, 2)))
    return Backward(
        uses=tuple(draw(_uses(setup)) for _ in range(forwards)),
        scaled=draw(st.booleans()),
        direct=draw(st.one_of(st.none(), st.none(), _parameter)),
        sync=draw(st.sampled_from((True, True, False))),
        frozen=draw(st.one_of(st.none(), st.none(), st.integers(0, 2))),
        checkpointed=draw(st.sampled_from((False, False, True))),
        twice=draw(st.sampled_from((False, False, False, True))),
        each=draw(st.booleans()) if forwards > 1 else False,
        window=draw(st.booleans()),
        penalty=draw(st.sampled_from((False, False, False, True))),
        evaluated=draw(st.one_of(st.none(), st.none(), st.integers(0, BLOCKS - 1))),
        inputs=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 2))),
    )


@st.composite
def _fails(draw: st.DrawFn, setup: Setup) -> Fail:
    return Fail(
        at=draw(st.sampled_from(("forward", "backward", "step"))),
        parts=tuple(draw(st.sampled_from(PARTS)) for _ in range(setup.blocks)),
        block=draw(st.integers(0, setup.blocks - 1)),
        optimizer=draw(st.integers(0, len(setup.optimizers) - 1)),
        sync=draw(st.booleans()),
        window=draw(st.booleans()),
    )


def _ops(setup: Setup) -> st.SearchStrategy[Op]:
    optimizer = st.integers(0, len(setup.optimizers) - 1)
    zero = st.builds(ZeroGrad, st.one_of(st.none(), optimizer), st.sampled_from((True, True, False)))
    step = st.builds(Step, optimizer, st.sampled_from((False, False, False, True)))
    gradient = st.builds(Gradient, _parameter, st.sampled_from(GRADIENT_ACTIONS))
    rare = st.one_of(
        st.builds(Clip, st.sampled_from(("norm", "inf", "value")), st.one_of(st.none(), optimizer)),
        st.builds(Require, _parameter, st.booleans()),
        st.builds(Write, _parameter, st.sampled_from(WRITES)),
        st.builds(Data, _parameter, st.sampled_from(("keep", "put back", "scale", "replace", "swap", "forward"))),
        st.builds(Evaluate, st.integers(0, BLOCKS - 1)),
        st.builds(Uneven, st.tuples(*[st.integers(0, 2)] * setup.ranks)),
        st.builds(
            Whole, st.sampled_from(("forward", "write", "stream", "gradients", "states")), _parameter, st.booleans()
        ),
        st.builds(SaveAndLoad, st.booleans(), st.booleans()),
        st.builds(LearningRate, optimizer, st.sampled_from((0.5, 2.0))),
        st.builds(AddGroup, optimizer, _parameter),
        _fails(setup),
        st.builds(Hook, _parameter, st.booleans()),
        st.builds(
            Differentiate,
            st.tuples(*(st.sampled_from(PARTS) for _ in range(setup.blocks))),
            st.booleans(),
            st.booleans(),
        ),
        st.builds(Average, st.sampled_from((False, False, True))),
        st.builds(ChangeState, optimizer, _parameter, st.sampled_from(("clear", "scale"))),
        st.builds(NewEngine, st.sampled_from((1, 2, 3)), st.sampled_from(UNITS), st.sampled_from(OFFLOADS)),
        st.just(Check()),
    )
    return st.one_of(_backwards(setup), _backwards(setup), _backwards(setup), zero, step, gradient, gradient, rare)


@st.composite
def programs(draw: st.DrawFn, ranks: int, max_ops: int = 14) -> Program:
    """Programs for a number of ranks."""
    setup = draw(setups(ranks))
    return Program(setup, tuple(draw(st.lists(_ops(setup), min_size=2, max_size=max_ops))))
