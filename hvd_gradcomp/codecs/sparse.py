"""The family of methods that send a few elements of an accumulated gradient by an allgather.

Two branches: `codecs.words`, a rule for each element, and `codecs.largest`, a number of elements.
Both settle their state by what was *sent*, never by what was wanted.

An allgather brings a rank the payload of every other. Where that is more bytes than an allreduce
of the bucket, what payloads stand for is added up instead; see `summed`.
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
from hvd_gradcomp.ops.interface.header import Weighing
from hvd_gradcomp.ops.kernel_params import CapacityLevel

Memory = Any


class SparseState(NamedTuple):
    """State of one bucket: 4 bytes an element and field of `memory`, and a few scalars."""

    memory: Memory  # NamedTuple of float32 [size], rank-local
    ladder: CapacityState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far


class Residual(NamedTuple):
    """What was accumulated and not yet sent."""

    r: Tensor  # float32 [size]


class UndoLog(NamedTuple):
    """What the memory held where elements were sent."""

    index: Tensor  # int64 [k]; may hold the sink
    fields: tuple[Tensor, ...]  # float32 [k] each


class Encoded(NamedTuple):
    """One rank's step: the body of its payload and what its header says."""

    body: Tensor  # uint8 [bytes]
    sent: Any
    wanted: Any
    held: UndoLog | None = None
    settle: Callable[[], None] = lambda: None  # what is left to do once the exchange has succeeded


class SparseCompressor(Clipping, Compressor):
    """Base of the family; see the head of this file.

    Attributes:
        rule: what the methods in `ruled` do, in numbers, so that passes may do it instead of verbs;
            None if there are none for it. A class that has one of them of its own inherits no rule.
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
        """The memory before the first step: a NamedTuple whose first field is what is sent from."""

    @abstractmethod
    def ladder(self, layout: Layout, ranks: int = 1) -> CapacitySchedule:
        """The capacities that a payload of this bucket may have among so many ranks.

        None whose allgather would bring a rank more bytes than an allreduce of the bucket.
        """

    @abstractmethod
    def body_bytes(self, layout: Layout, rung: CapacityLevel) -> int:
        """Bytes of what a rank encodes on this rung, without the header."""

    def payload_bytes(self, layout: Layout, rung: CapacityLevel) -> int:
        """Bytes that one rank hands to collectives on this rung, header included."""
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
        """This rank's payload. Donating: the memory in `state` may be written to."""

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
        """`sum over ranks of weights[rank] * what the rank sent`, rank by rank in rank order.

        Args:
            bodies: uint8 [world, bytes].
            weights: float32 [world]; 0 leaves a rank out.
            room: float32 [size] that the sum may be written to; its values do not count.
        """

    def weighing(self, context: Context, rung: CapacityLevel) -> Weighing:
        """What must hold of bodies before they are added up, as far as they begin with it."""
        del rung
        return patterns.weighing(context, {})

    def ceilings(
        self, ops: Ops, layout: Layout, rung: CapacityLevel, bodies: Tensor
    ) -> list[Tensor]:
        """Magnitudes that nothing sent exceeds, where `weighing` has none; none if all is small.

        float32 [world, groups] each.

        Args:
            ops, layout: of the bucket.
            rung: what fits.
            bodies: uint8 [world, bytes].
        """
        del ops, layout, rung, bodies
        return []

    def init(self, ops: Ops, layout: Layout) -> Any:
        layers = ops.zeros((len(layout.names),), "int64")
        return SparseState(self.remember(ops, layout), self.ladder(layout).init(ops), layers)

    def nothing(self, ops: Ops, layout: Layout, rung: CapacityLevel) -> Encoded:
        """A payload of the right size for a step without one."""
        return Encoded(ops.zeros((self.body_bytes(layout, rung),), "uint8"), 0, 0)

    def held(
        self, ops: Ops, memory: Memory, index: Tensor, first: Tensor | None = None
    ) -> UndoLog | None:
        """What `rollback` needs, before the memory is settled; `first` if it is at hand."""
        if not ops.dynamic_shapes:
            return None  # nothing fails there before the step is over
        known = [] if first is None else [first]
        return UndoLog(index, (*known, *(ops.gather(x, index) for x in memory[len(known) :])))

    def without_sink(self, ops: Ops, memory: Memory) -> Memory:
        """Unused slots point to the sink, so settling wrote there: it starts again from zero."""
        return type(memory)(*(ops.clear_last(x) for x in memory))

    def rollback(self, ops: Ops, memory: Memory, held: UndoLog | None) -> None:
        """Undoes the settling of an exchange that failed: what was not received stays here.

        In place, where tensors can be written to; elsewhere the old state was never replaced.
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
    """What a rank has in a step."""

    codec: SparseCompressor
    ops: Ops
    context: Context
    gradient: Tensor
    state: SparseState
    moment: Tensor | None


def program(given: Given) -> Program:
    """What was sent is gathered; or added up on the way, where that brings a rank fewer bytes.

    All ranks read all headers, so all choose the same rung for the next step, and all raise when
    one of them has a gradient that is not finite. That rank's state is then as it was; the others
    keep their gradient of the step in their residual.
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
    """Everybody receives every payload and adds them up in rank order. One collective."""
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
    """Each rank decodes its own payload, and an allreduce adds up what these stand for.

    An allgather of the headers comes first, so ranks learn of each other what they do by
    `allgather`, and the result is the same but for the order in which it is added up.
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
    """What this rank sends, its header, memory for the result, and the state without it."""
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
    weighing: Weighing,
    fits: Callable[[wire.Header, Tensor], wire.Header],
) -> Generator[Any, Any, tuple[wire.Header, Tensor]]:
    """The headers and bodies of all; where they cannot be used, the state is as it was."""
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
    """The state that knows how much room the ranks have needed."""
    needed = ops.stage(ops.max(header.wanted)) if header.needed is None else header.needed
    return state._replace(ladder=state.ladder._replace(needed=needed))
