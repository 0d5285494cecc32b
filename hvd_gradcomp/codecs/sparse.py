"""Family of methods that allgather a few elements of an accumulated gradient.

Two branches: `codecs.threshold` tests each element, `codecs.topk` selects a number of elements.
Both update their state by what was *sent*, never by what was wanted.

In an allgather a rank receives the payload of every other. If that is more bytes than an allreduce
of the bucket, the decoded payloads are allreduced instead; see `summed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.core.collectives import Allgather, Switch
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.capacity import POLICIES, CapacityPolicy, CapacitySchedule, CapacityState
from hvd_gradcomp.method.compressor import Context, Program, Report, State
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.interface.header import ReductionSpec
from hvd_gradcomp.ops.kernel_params import CapacityLevel

Memory = Any


class SparseState(NamedTuple):
    """State of one bucket: 4 bytes for each element and field of `memory`, and a few scalars."""

    memory: Memory  # NamedTuple of float32 [size], rank-local
    capacity: CapacityState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far


class Residual(NamedTuple):
    """Accumulated gradient that was not sent yet."""

    r: Tensor  # float32 [size]


class UndoLog(NamedTuple):
    """Memory at the sent elements before the update, to roll it back."""

    index: Tensor  # int64 [k]; may hold the sink
    fields: tuple[Tensor, ...]  # float32 [k] each


class StepInputs(NamedTuple):
    """One rank's inputs of a step."""

    codec: SparseCompressor
    ops: Ops
    context: Context
    gradient: Tensor
    state: State
    moment: Tensor | None = None
    unchecked: bool = False  # nobody has looked yet whether the gradient can be stored


class Payloads(NamedTuple):
    """Bodies of all ranks' payloads, at one capacity level."""

    level: CapacityLevel
    bodies: Tensor  # uint8 [world, bytes]
    weights: Tensor  # float32 [world]; 0 leaves a rank out


class Encoded(NamedTuple):
    """One rank's encoded step: the body of its payload and the counts in its header."""

    body: Tensor  # uint8 [bytes]
    sent: Any
    wanted: Any
    undo_log: UndoLog | None = None
    commit: Callable[[], None] = lambda: None  # commits once the exchange has succeeded
    finite: bool = True  # False if the gradient was `unchecked` and cannot be stored


class SparseCompressor(Clipping, Handover):
    """Base of the family; see the head of this file.

    Attributes:
        rule: parameters that describe the methods in `kernel_methods` to a fused kernel; None if no
            kernel supports them. A class that overrides one of these does not inherit the rule.
    """

    replicated = frozenset({"capacity"})
    rule: Any = None
    kernel_methods: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)

        def place(name: str) -> int:
            return next(i for i, c in enumerate(cls.__mro__) if name in vars(c))

        if any(place(name) < place("rule") for name in cls.kernel_methods):
            cls.rule = None

    @abstractmethod
    def init_memory(self, ops: Ops, layout: Layout) -> Memory:
        """Return the initial memory: a NamedTuple; elements are sent from its first field."""

    @abstractmethod
    def capacity_schedule(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        """Return the capacities that a payload of this bucket may have with so many ranks.

        Excludes capacities whose allgather would move more bytes than an allreduce of the bucket.
        """

    def capacities(self, layout: Layout) -> tuple[int, ...]:
        """Return the capacities of a payload that its settings state; () if gradients decide."""
        return ()

    @property
    def policy(self) -> CapacityPolicy:
        """How a payload's capacity follows what is needed."""
        return POLICIES["largest"]

    @abstractmethod
    def body_bytes(self, layout: Layout, level: CapacityLevel) -> int:
        """Return the bytes that a rank encodes at this capacity level, without the header."""

    def payload_bytes(self, layout: Layout, level: CapacityLevel) -> int:
        """Return the bytes that a rank hands to collectives at this level, header included."""
        body = 4 * layout.elements if level.summed else self.body_bytes(layout, level)
        return wire.HEADER_BYTES + body

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange | None:
        """Return the exchange of a bucket for which no payload is small enough, else None."""
        schedule = self.capacity_schedule(layout, ranks)
        if schedule.summed and not schedule.capacities:
            return dense_exchange(layout.elements, wire.HEADER_BYTES)
        return None

    @abstractmethod
    def encode(self, level: CapacityLevel, inputs: StepInputs) -> tuple[Encoded, Any]:
        """Encode this rank's payload; return it and the state. Donating the state's memory."""

    def checks_gradient(self, ops: Ops, context: Context, level: CapacityLevel) -> bool:
        """Return True if `encode` takes an `unchecked` gradient and checks it in its own walk."""
        del ops, context, level
        return False

    @abstractmethod
    def decode_sum(self, ops: Ops, layout: Layout, payloads: Payloads, scratch: Tensor) -> Tensor:
        """Return the sum over ranks of weight * decoded payload, in rank order.

        `scratch` is float32 [size], memory for the sum; its values are ignored.
        """

    def reduction_spec(self, context: Context, level: CapacityLevel) -> ReductionSpec:
        """Return the checks on the bodies' first parts before they are summed."""
        del level
        return patterns.reduction_spec(context, {})

    def check_bodies(
        self,
        ops: Ops,
        context: Context,
        level: CapacityLevel,
        header: wire.Header,
        bodies: Tensor,
    ) -> tuple[wire.Header, Tensor]:
        """Check received bodies further; return the header and the bodies for `decode_sum`.

        Raises:
            NonFiniteGradientError: the sum could overflow, as in `patterns.check_summable`.
        """
        sides = self.ceilings(ops, context.layout, level, bodies)
        if sides:
            header = patterns.check_summable(ops, sides, context, header)
        return header, bodies

    def ceilings(
        self, ops: Ops, layout: Layout, level: CapacityLevel, bodies: Tensor
    ) -> list[Tensor]:
        """Return upper bounds of the sent magnitudes that `reduction_spec` does not check.

        float32 [world, groups] each; empty if no bound is needed.

        Args:
            ops, layout: of the bucket.
            level: the capacity level.
            bodies: uint8 [world, bytes].
        """
        del ops, layout, level, bodies
        return []

    def init(self, ops: Ops, layout: Layout) -> Any:
        layers = ops.zeros((len(layout.names),), "int64")
        return SparseState(
            self.init_memory(ops, layout), self.capacity_schedule(layout).init(ops), layers
        )

    def nothing(self, ops: Ops, layout: Layout, level: CapacityLevel) -> Encoded:
        """Return an empty payload of the right size."""
        return Encoded(ops.zeros((self.body_bytes(layout, level),), "uint8"), 0, 0)

    def undo_log(
        self, ops: Ops, memory: Memory, index: Tensor, first: Tensor | None = None
    ) -> UndoLog | None:
        """Record for `rollback` the memory at `index` before it is updated.

        `first`: the values of the first field, if already gathered.
        """
        if not ops.dynamic_shapes:
            return None  # static graphs raise only after the step
        known = [] if first is None else [first]
        return UndoLog(index, (*known, *(ops.gather(x, index) for x in memory[len(known) :])))

    def without_sink(self, ops: Ops, memory: Memory) -> Memory:
        """Zero the sink, which updates wrote to because unused slots point to it."""
        return type(memory)(*(ops.clear_last(x) for x in memory))

    def rollback(self, ops: Ops, memory: Memory, undo_log: UndoLog | None) -> None:
        """Roll back the memory after a failed exchange, so unreceived elements stay here.

        In place if tensors are mutable; otherwise the old state was never replaced.
        """
        if undo_log is not None:
            for x, values in zip(memory, undo_log.fields):
                ops.put(x, undo_log.index, values)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        gradient, extra = self.clipped(ops, context, gradient, extra)
        return program(StepInputs(self, ops, context, gradient, state, extra.get("moment")))

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        del layout, steps, since
        return Report([int(n) for n in state.sent], self.residual(state))

    def inherit(
        self, ops: Ops, state: State, gradient: Tensor, residual: Tensor
    ) -> tuple[State, Tensor]:
        del ops
        memory = state.memory
        return state._replace(memory=memory._replace(r=memory.r + residual)), gradient

    def residual(self, state: State) -> Tensor:
        return state.memory.r


def program(inputs: StepInputs) -> Program:
    """Allgather the payloads, or allreduce the decoded ones where that moves fewer bytes.

    All ranks read all headers, so all choose the same capacity level for the next step, and all
    raise if one of them has a non-finite gradient. That rank's state is then unchanged; the others
    keep the step's gradient in their residual.
    """
    ops, context, state = inputs.ops, inputs.context, inputs.state
    schedule = inputs.codec.capacity_schedule(context.layout, context.size)
    level, capacity = schedule.next_level(ops, state.capacity)
    inputs = inputs._replace(state=state._replace(capacity=capacity))
    if not schedule.summed:
        return (yield from allgather(level, inputs))
    top = level._replace(dense=True, summed=True)
    if not schedule.capacities:
        return (yield from summed(top, inputs))
    branches = (lambda: allgather(level._replace(dense=False), inputs), lambda: summed(top, inputs))
    return (yield Switch(ops.pick(level.dense, 1, 0), branches))


def allgather(level: CapacityLevel, inputs: StepInputs) -> Program:
    """Allgather all payloads and sum them in rank order. One collective."""
    codec, ops, context, *_ = inputs
    encoded, header, gradient, state = _encoded(level, inputs)

    def check_bodies(header: wire.Header, bodies: Tensor) -> tuple[wire.Header, Tensor]:
        return codec.check_bodies(ops, context, level, header, bodies)

    spec = codec.reduction_spec(context, level)
    header, bodies = yield from _gathered(
        inputs, header, encoded, state, encoded.body, spec, check_bodies
    )
    weights = patterns.weights_of(ops, context, header)
    total = codec.decode_sum(ops, context.layout, Payloads(level, bodies, weights), gradient)
    return total, state._replace(capacity=patterns.needing(ops, state.capacity, header))


def summed(level: CapacityLevel, inputs: StepInputs) -> Program:
    """Decode the own payload and allreduce the result.

    The headers are allgathered first, so ranks know the same as after `allgather`; the result
    differs only by the order of summation.
    """
    codec, ops, context, *_ = inputs
    encoded, header, gradient, state = _encoded(level, inputs)
    nothing, plain = encoded.body[:0], context._replace(prescale=1.0, postscale=1.0)
    spec = patterns.reduction_spec(plain, {})
    header, _ = yield from _gathered(
        inputs, header, encoded, state, nothing, spec, lambda *as_is: as_is
    )
    weights = patterns.weights_of(ops, plain, header)
    weight, body = weights[context.rank : context.rank + 1], ops.reshape(encoded.body, (1, -1))
    x = codec.decode_sum(ops, context.layout, Payloads(level, body, weight), gradient)
    total = patterns.check_sum(ops, (yield from patterns.allreduce_bucket(ops, context, x)))
    return total, state._replace(capacity=patterns.needing(ops, state.capacity, header))


def _encoded(
    level: CapacityLevel, inputs: StepInputs
) -> tuple[Encoded, wire.Header, Tensor, SparseState]:
    """Return the encoded step, its header, memory for the result, and the updated state."""
    codec, ops, context, gradient, state, moment, _ = inputs
    layout, step = context.layout, context.step
    unchecked = moment is None and codec.checks_gradient(ops, context, level)
    finite: Any = True
    if moment is not None:
        finite, gradient, moment = ops.check_finite_with(gradient, moment)
    elif not unchecked:
        finite, gradient = patterns.check_storable(ops, gradient)
    if finite is not False:
        inputs = inputs._replace(gradient=gradient, moment=moment, unchecked=unchecked)
        encoded, encoded_state = codec.encode(level, inputs)
        finite = encoded.finite if unchecked else finite
    if finite is False:
        encoded = codec.nothing(ops, layout, level)
    else:
        state = encoded_state
    number, digest, step = codec.algorithm, codec.digest(layout), step % (1 << 32)
    sent, wanted = encoded.sent, encoded.wanted
    header = wire.Header(number, digest, step, level.index, sent, wanted, finite)
    return encoded, header, gradient, state


def _gathered(
    inputs: StepInputs,
    header: wire.Header,
    encoded: Encoded,
    state: SparseState,
    body: Tensor,
    spec: ReductionSpec,
    check_bodies: Callable[[wire.Header, Tensor], tuple[wire.Header, Tensor]],
) -> Generator[Any, Any, tuple[wire.Header, Tensor]]:
    """Allgather the headers and bodies; roll the state back if they are unusable."""
    codec, ops = inputs.codec, inputs.ops
    buffers = yield Allgather(wire.pack(ops, header, body))
    try:
        header, bodies = wire.unpack(ops, header, buffers, spec)
        header, bodies = check_bodies(header, bodies)
    except (PayloadError, NonFiniteGradientError):
        codec.rollback(ops, state.memory, encoded.undo_log)
        raise
    encoded.commit()
    return header, bodies
