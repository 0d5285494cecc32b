"""The family of methods that send a few elements of an accumulated gradient by an allgather.

Two branches: `codecs.words`, a rule for each element, and `codecs.largest`, a number of elements.
Both settle their state by what was *sent*, never by what was wanted.

An allgather brings a rank the payload of every other. Where that is more bytes than an allreduce
of the bucket, what payloads stand for is added up instead; see `exchanges.summed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.ladder import Ladder, LadderState, Rung
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.protocols.reporting import Report

Memory = Any


class SparseState(NamedTuple):
    """State of one bucket: 4 bytes an element and field of `memory`, and a few scalars."""

    memory: Memory  # NamedTuple of float32 [size], rank-local
    ladder: LadderState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far


class Residual(NamedTuple):
    """What was accumulated and not yet sent."""

    r: Tensor  # float32 [size]


class Held(NamedTuple):
    """What the memory held where elements were sent."""

    index: Tensor  # int64 [k]; may hold the sink
    fields: tuple[Tensor, ...]  # float32 [k] each


class Encoded(NamedTuple):
    """One rank's step: the body of its payload and what its header says."""

    body: Tensor  # uint8 [bytes]
    sent: Any
    wanted: Any
    held: Held | None = None
    settle: Callable[[], None] = lambda: None  # what is left to do once the exchange has succeeded


class SparseCompressor(Compressor):
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
    def ladder(self, layout: Layout, ranks: int = 1) -> Ladder:
        """The capacities that a payload of this bucket may have among so many ranks.

        None whose allgather would bring a rank more bytes than an allreduce of the bucket.
        """

    @abstractmethod
    def body_bytes(self, layout: Layout, rung: Rung) -> int:
        """Bytes of what a rank encodes on this rung, without the header."""

    def payload_bytes(self, layout: Layout, rung: Rung) -> int:
        """Bytes that one rank hands to collectives on this rung, header included."""
        body = 4 * layout.elements if rung.summed else self.body_bytes(layout, rung)
        return wire.HEADER_BYTES + body

    @abstractmethod
    def encode(
        self,
        ops: Ops,
        layout: Layout,
        rung: Rung,
        step: Any,
        gradient: Tensor,
        state: Any,
        moment: Tensor | None = None,
    ) -> tuple[Encoded, Any]:
        """This rank's payload. Donating: the memory in `state` may be written to."""

    @abstractmethod
    def decode_sum(
        self,
        ops: Ops,
        layout: Layout,
        rung: Rung,
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

    def ceilings(self, ops: Ops, layout: Layout, rung: Rung, bodies: Tensor) -> list[Tensor]:
        """Magnitudes that nothing sent exceeds; float32 [world, groups] each, none if all is small.

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

    def nothing(self, ops: Ops, layout: Layout, rung: Rung) -> Encoded:
        """A payload of the right size for a step without one."""
        return Encoded(ops.zeros((self.body_bytes(layout, rung),), "uint8"), 0, 0)

    def held(
        self, ops: Ops, memory: Memory, index: Tensor, first: Tensor | None = None
    ) -> Held | None:
        """What `give_back` needs, before the memory is settled; `first` if it is at hand."""
        if not ops.dynamic_shapes:
            return None  # nothing fails there before the step is over
        known = [] if first is None else [first]
        return Held(index, (*known, *(ops.gather(x, index) for x in memory[len(known) :])))

    def settled(self, ops: Ops, memory: Memory) -> Memory:
        """Unused slots point to the sink, so settling wrote there: it starts again from zero."""
        return type(memory)(*(ops.clear_last(x) for x in memory))

    def give_back(self, ops: Ops, memory: Memory, held: Held | None) -> None:
        """Undoes the settling of an exchange that failed: what was not received stays here.

        In place, where tensors can be written to; elsewhere the old state was never replaced.
        """
        if held is not None:
            for x, values in zip(memory, held.fields):
                ops.put(x, held.index, values)

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        return exchanges.sparse(self, ops, context, gradient, state, extra.get("moment"))

    def report(self, layout: Layout, state: Any, steps: int, since: int = 0) -> Report:
        del layout, steps, since
        return Report([int(n) for n in state.sent], self.residual(state))

    def inherit(self, ops: Ops, state: Any, gradient: Tensor, residual: Tensor) -> Any:
        memory = state.memory
        return state._replace(memory=memory._replace(r=memory.r + residual)), gradient

    def residual(self, state: Any) -> Tensor:
        return state.memory.r
