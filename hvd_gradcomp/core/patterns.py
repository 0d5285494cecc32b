"""How payloads meet: small generators, and what those of the families in `codecs` share.

A family has its own program beside it: `codecs.sparse`, `codecs.quantized`, `codecs.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from hvd_gradcomp.core import wire
from hvd_gradcomp.core.collectives import Allreduce, Broadcast, Switch
from hvd_gradcomp.core.compressor import Compressor, Context, Program, State
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, Tensor
from hvd_gradcomp.ops.interface.header import Weighing

LARGEST = (2.0 - 2.0**-20) * 2.0**127  # of float32, and a bit less: sums are rounded on their way


class Leading(Protocol):
    """What `leader` asks of a codec."""

    def choice_bytes(self, layout: Layout) -> int:
        """Bytes of `choose`."""

    def choose(self, ops: Ops, context: Context, gradient: Tensor, state: State) -> Tensor:
        """The leader's payload: which elements travel."""

    def chosen(self, ops: Ops, context: Context, buffer: Tensor) -> Tensor:
        """The choice, from its payload [1, bytes]: what the next two are given as `index`."""

    def values(
        self, ops: Ops, layout: Layout, gradient: Tensor, state: State, index: Tensor
    ) -> Tensor:
        """What this rank has at the indices."""

    def settle_all(
        self, ops: Ops, layout: Layout, gradient: Tensor, state: State, index: Tensor, total: Tensor
    ) -> tuple[Tensor, Any]:
        """The mean, and the state without what was sent."""


def checked(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """Whether it is finite; and zeros instead where that is known too late to leave it out."""
    return ops.sound(gradient, "elements")


def checked_to_keep(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """The same where it is added to what is kept from step to step, and so is its square perhaps.

    What is kept must not overflow: with an infinite second moment an element would never be sent
    again. So a norm beyond 2**58 counts as infinite: a thousand squares of that fit.
    """
    return ops.sound(gradient, "squares")


def weighing(context: Context, sides: Mapping[str, wire.Part], ascending: Any = None) -> Weighing:
    """How what the ranks have sent is added up, to finite numbers.

    Args:
        context: of the step.
        sides: the first parts of a body: magnitudes that no element sent exceeds, by groups, in
            float32, or as exponents of powers of two.
        ascending: of `Weighing`.
    """
    groups = max((part.count for part in sides.values()), default=0)
    return Weighing(
        weight=context.prescale * context.postscale,
        groups=groups,
        vectors=len(sides) if groups else 0,
        powers=any(part.dtype == "int8" for part in sides.values()),
        limit=LARGEST,
        refused=(wire.ANY_NOT_FINITE, NonFiniteGradientError),
        ascending=ascending,
    )


def summable(
    ops: Ops, sides: Sequence[Tensor], context: Context, header: wire.Header
) -> wire.Header:
    """Requires that what the ranks have sent adds up to finite numbers; the header then says so.

    Args:
        ops: the verbs.
        sides: magnitudes that no element sent exceeds, by groups; float [world, groups] each.
        context: of the step.
        header: of what was sent.

    Raises:
        NonFiniteGradientError: on all ranks, as in `usable`; also where single groups are so large
            that it cannot be ruled out.
    """
    fits = ops.summable(sides, context.prescale * context.postscale, LARGEST)
    intact = ops.require({wire.ANY_NOT_FINITE: fits}, NonFiniteGradientError)
    if intact is None:
        return header
    intact = intact if header.intact is None else header.intact & intact
    return header._replace(intact=intact, weights=None)


def header_of(codec: Compressor, context: Context, finite: Any = True) -> wire.Header:
    """What this rank says about a payload of a fixed size."""
    elements = context.layout.elements
    step = context.step % (1 << 32)
    digest = codec.digest(context.layout)
    return wire.Header(codec.algorithm, digest, step, 0, elements, elements, finite)


def weights_of(ops: Ops, context: Context, header: wire.Header) -> Tensor:
    """What each rank counts for; nothing where its payload is not to be used."""
    if header.weights is not None:
        return header.weights
    weight = context.prescale * context.postscale
    if header.intact is None:
        return ops.full((context.size,), weight, "float32")
    return ops.weigh(weight, header.intact)


def leader(codec: Leading, ops: Ops, context: Context, gradient: Tensor, state: State) -> Program:
    """One rank after the other says which elements travel; their values are added up on the way.

    A broadcast of the leader's indices and an allreduce of everybody's values there.
    """
    layout, turn = context.layout, context.step % context.size
    finite, gradient = checked_to_keep(ops, gradient)

    def chosen() -> Tensor:
        return codec.choose(ops, context, gradient, state)

    buffer = yield from from_leader(ops, context, turn, chosen, codec.choice_bytes(layout))
    index = codec.chosen(ops, context, ops.reshape(buffer, (1, -1)))
    values = ops.concat((codec.values(ops, layout, gradient, state, index), poison(ops, finite)))
    total = yield Allreduce(values, context.prescale, context.postscale)
    total = unpoisoned(ops, total)
    return codec.settle_all(ops, layout, gradient, state, index, total)


def from_leader(
    ops: Ops, context: Context, leader: Any, payload: Callable[[], Tensor], size: int
) -> Generator[Any, Any, Tensor]:
    """One rank's payload of so many bytes, on all ranks."""
    mine = ops.cond(leader == context.rank, payload, lambda: ops.zeros((size,), "uint8"))

    def from_root(root: int) -> Generator[Broadcast, Tensor, tuple[Tensor]]:
        return ((yield Broadcast(mine, root)),)

    roots = [lambda r=root: from_root(r) for root in range(context.size)]
    (buffer,) = yield Switch(leader, roots)
    return buffer


def poison(ops: Ops, finite: Any) -> Tensor:
    """0, or NaN if this rank's gradient is not finite; float32 [1], last of what is added up."""
    healthy = ops.cast(ops.words((finite,)), "float32")
    return ops.where(healthy > 0, 0.0, healthy / healthy)


def unpoisoned(ops: Ops, total: Tensor) -> Tensor:
    """A sum of vectors that end in `poison`, without it; see `usable`."""
    return usable(ops, total)[:-1]


def drawn(step: Any, seed: int, count: int) -> Any:
    """A number below `count` that all ranks draw alike for a step; at random to all appearance.

    Plain arithmetic below 2**62, so that it is the same of an int and of a scalar in a graph.

    >>> [drawn(step, 0, 4) for step in range(12)]
    [0, 0, 0, 1, 3, 3, 2, 3, 3, 0, 2, 1]
    """
    prime = (1 << 31) - 1
    x = (step % prime * 1103515245 + (seed * 69621 + 40014) % prime) % prime
    for shift in (7919, 104729):
        x = x * ((x + shift) % prime) % prime * 16807 % prime
    return x // 1024 % count


def added_up(ops: Ops, context: Context, x: Tensor) -> Generator[Any, Any, Tensor]:
    """Everybody's bucket added up on the way, without its padding; x may hold the result.

    x is [layout.size], zero outside the layers.
    """
    runs = context.layout.runs
    tight = ops.concat([x[a:b] for a, b in runs]) if len(runs) > 1 else x[: runs[0][1]]
    tight = yield Allreduce(tight, context.prescale, context.postscale, donated=True)
    pieces, end, taken = [], 0, 0
    for start, stop in runs:
        pieces += [x[end:start], tight[taken : taken + stop - start]]
        end, taken = stop, taken + stop - start
    return ops.assemble(x, [*pieces, x[end:]])


def usable(ops: Ops, total: Tensor) -> Tensor:
    """A sum of gradients, which says itself whether all were finite, and not too large together.

    Raises:
        NonFiniteGradientError: on all ranks; where that comes a step too late, zeros instead.
    """
    finite = ops.words((ops.finite(total),)) > 0
    intact = ops.require({wire.ANY_NOT_FINITE: finite}, NonFiniteGradientError)
    return total if intact is None else ops.where(intact, total, 0.0)
