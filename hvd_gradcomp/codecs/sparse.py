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
from hvd_gradcomp.core import patterns, wire
from hvd_gradcomp.core.capacity import CapacitySchedule, CapacityState
from hvd_gradcomp.core.collectives import Allgather, Switch
from hvd_gradcomp.core.compressor import Compressor, Context, Program, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols.reporting import Report
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.interface.header import ReductionSpec
from hvd_gradcomp.ops.kernel_params import CapacityLevel

Memory = Any


class SparseState(NamedTuple):
    """State of one bucket: 4 bytes for each element and field of `memory`, and a few scalars."""

    memory: Memory  # NamedTuple of float32 [size], rank-local
    ladder: CapacityState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far


class Residual(NamedTuple):
    """Accumulated gradient that was not sent yet."""

    r: Tensor  # float32 [size]


class UndoLog(NamedTuple):
    """Memory at the sent elements before the update, to roll it back."""

    index: Tensor  # int64 [k]; may hold the sink
    fields: tuple[Tensor, ...]  # float32 [k] each


class Encoded(NamedTuple):
    """One rank's encoded step: the body of its payload and the counts in its header."""

    body: Tensor  # uint8 [bytes]
    sent: Any
    wanted: Any
    held: UndoLog | None = None
    settle: Callable[[], None] = lambda: None  # commits once the exchange has succeeded


class SparseCompressor(Clipping, Compressor):
    """Base of the family; see the head of this file.

    Attributes:
        rule: parameters that describe the methods in `ruled` to a fused kernel; None if no kernel
            supports them. A class that overrides one of these methods does not inherit the rule.
    """

    replicated = frozenset({"ladder"})
    rule: Any = None
    ruled: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)

        def place(name: str) -> int:
            return next(i for i, c in enumerate(cls.__mro__) if name in vars(c))

        if any(place(name) < place("rule") for name in cls.ruled):
            cls.rule = None

    @abstractmethod
    def remember(self, ops: Ops, layout: Layout) -> Memory:
        """Return the initial memory: a NamedTuple; elements are sent from its first field."""

    @abstractmethod
    def ladder(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        """Return the capacities that a payload of this bucket may have with so many ranks.

        Excludes capacities whose allgather would move more bytes than an allreduce of the bucket.
        """

    @abstractmethod
    def body_bytes(self, layout: Layout, rung: CapacityLevel) -> int:
        """Return the bytes that a rank encodes at this capacity level, without the header."""

    def payload_bytes(self, layout: Layout, rung: CapacityLevel) -> int:
        """Return the bytes that a rank hands to collectives at this level, header included."""
        body = 4 * layout.elements if rung.summed else self.body_bytes(layout, rung)
        return wire.HEADER_BYTES + body

    @abstractmethod
    def encode(
        self,
        ops: Ops,
        layout: Layout,
        rung: CapacityLevel,
        step: Any,
        gradient: Tensor,
        state: State,
        moment: Tensor | None = None,
    ) -> tuple[Encoded, Any]:
        """Encode this rank's payload. Donating: may write to the memory in `state`."""

    @abstractmethod
    def decode_sum(
        self,
        ops: Ops,
        layout: Layout,
        rung: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """Return the sum over ranks of `weights[rank]` * the decoded payload, in rank order.

        Args:
            bodies: uint8 [world, bytes].
            weights: float32 [world]; 0 leaves a rank out.
            room: float32 [size], scratch memory for the sum; its values are ignored.
        """

    def weighing(self, context: Context, rung: CapacityLevel) -> ReductionSpec:
        """Return the checks on the bodies' first parts before they are summed."""
        del rung
        return patterns.weighing(context, {})

    def ceilings(
        self, ops: Ops, layout: Layout, rung: CapacityLevel, bodies: Tensor
    ) -> list[Tensor]:
        """Return upper bounds of the sent magnitudes that `weighing` does not check.

        float32 [world, groups] each; empty if no bound is needed.

        Args:
            ops, layout: of the bucket.
            rung: the capacity level.
            bodies: uint8 [world, bytes].
        """
        del ops, layout, rung, bodies
        return []

    def init(self, ops: Ops, layout: Layout) -> Any:
        layers = ops.zeros((len(layout.names),), "int64")
        return SparseState(self.remember(ops, layout), self.ladder(layout).init(ops), layers)

    def nothing(self, ops: Ops, layout: Layout, rung: CapacityLevel) -> Encoded:
        """Return an empty payload of the right size."""
        return Encoded(ops.zeros((self.body_bytes(layout, rung),), "uint8"), 0, 0)

    def held(
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

    def rollback(self, ops: Ops, memory: Memory, held: UndoLog | None) -> None:
        """Roll back the memory after a failed exchange, so unreceived elements stay here.

        In place if tensors are mutable; otherwise the old state was never replaced.
        """
        if held is not None:
            for x, values in zip(memory, held.fields):
                ops.put(x, held.index, values)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        gradient, extra = self.clipped(ops, context, gradient, extra)
        return program(Given(self, ops, context, gradient, state, extra.get("moment")))

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


class Given(NamedTuple):
    """One rank's inputs of a step."""

    codec: SparseCompressor
    ops: Ops
    context: Context
    gradient: Tensor
    state: SparseState
    moment: Tensor | None


def program(given: Given) -> Program:
    """Allgather the payloads, or allreduce the decoded ones where that moves fewer bytes.

    All ranks read all headers, so all choose the same capacity level for the next step, and all
    raise if one of them has a non-finite gradient. That rank's state is then unchanged; the others
    keep the step's gradient in their residual.
    """
    ops, context, state = given.ops, given.context, given.state
    ladder = given.codec.ladder(context.layout, context.size)
    rung, climbed = ladder.climb(ops, state.ladder)
    given = given._replace(state=state._replace(ladder=climbed))
    if not ladder.summed:
        return (yield from allgather(rung, given))
    top = rung._replace(dense=True, summed=True)
    if not ladder.capacities:
        return (yield from summed(top, given))
    ways = (lambda: allgather(rung._replace(dense=False), given), lambda: summed(top, given))
    return (yield Switch(ops.pick(rung.dense, 1, 0), ways))


def allgather(rung: CapacityLevel, given: Given) -> Program:
    """Allgather all payloads and sum them in rank order. One collective."""
    codec, ops, context, *_ = given
    encoded, header, gradient, state = _encoded(rung, given)

    def fits(header: wire.Header, bodies: Tensor) -> wire.Header:
        sides = codec.ceilings(ops, context.layout, rung, bodies)
        return patterns.summable(ops, sides, context, header) if sides else header

    weighing = codec.weighing(context, rung)
    header, bodies = yield from _gathered(
        given, header, encoded, state, encoded.body, weighing, fits
    )
    weights = patterns.weights_of(ops, context, header)
    total = codec.decode_sum(ops, context.layout, rung, bodies, weights, room=gradient)
    return total, _needing(ops, state, header)


def summed(rung: CapacityLevel, given: Given) -> Program:
    """Decode the own payload and allreduce the result.

    The headers are allgathered first, so ranks know the same as after `allgather`; the result
    differs only by the order of summation.
    """
    codec, ops, context, *_ = given
    encoded, header, gradient, state = _encoded(rung, given)
    nothing, plain = encoded.body[:0], context._replace(prescale=1.0, postscale=1.0)
    weighing = patterns.weighing(plain, {})
    header, _ = yield from _gathered(
        given, header, encoded, state, nothing, weighing, lambda h, _: h
    )
    weights = patterns.weights_of(ops, plain, header)
    mine, body = weights[context.rank : context.rank + 1], ops.reshape(encoded.body, (1, -1))
    x = codec.decode_sum(ops, context.layout, rung, body, mine, room=gradient)
    total = patterns.usable(ops, (yield from patterns.added_up(ops, context, x)))
    return total, _needing(ops, state, header)


def _encoded(rung: CapacityLevel, given: Given) -> tuple[Encoded, wire.Header, Tensor, SparseState]:
    """Return the encoded step, its header, memory for the result, and the updated state."""
    codec, ops, context, gradient, state, moment = given
    layout, step = context.layout, context.step
    if moment is None:
        finite, gradient = patterns.checked_to_keep(ops, gradient)
    else:
        finite, gradient, moment = ops.sound_with(gradient, moment)
    if finite is False:
        encoded = codec.nothing(ops, layout, rung)
    else:
        encoded, state = codec.encode(ops, layout, rung, step, gradient, state, moment)
    number, digest, step = codec.algorithm, codec.digest(layout), step % (1 << 32)
    sent, wanted = encoded.sent, encoded.wanted
    header = wire.Header(number, digest, step, rung.index, sent, wanted, finite)
    return encoded, header, gradient, state


def _gathered(
    given: Given,
    header: wire.Header,
    encoded: Encoded,
    state: SparseState,
    body: Tensor,
    weighing: ReductionSpec,
    fits: Callable[[wire.Header, Tensor], wire.Header],
) -> Generator[Any, Any, tuple[wire.Header, Tensor]]:
    """Allgather the headers and bodies; roll the state back if they are unusable."""
    codec, ops = given.codec, given.ops
    buffers = yield Allgather(wire.seal(ops, header, body))
    try:
        header, bodies = wire.unpack(ops, header, buffers, weighing)
        header = fits(header, bodies)
    except (PayloadError, NonFiniteGradientError):
        codec.rollback(ops, state.memory, encoded.held)
        raise
    encoded.settle()
    return header, bodies


def _needing(ops: Ops, state: SparseState, header: wire.Header) -> SparseState:
    """Return the state with the capacity that the ranks needed."""
    needed = ops.stage(ops.max(header.wanted)) if header.needed is None else header.needed
    return state._replace(ladder=state.ladder._replace(needed=needed))
