"""Communication patterns: small generators, and helpers that the families in `codecs` share.

Each family has its own program: `codecs.sparse`, `codecs.quantized`, `codecs.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from math import prod
from typing import Any

from hvd_gradcomp.core.collectives import Allreduce, Broadcast, Switch
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.capacity import CapacityState
from hvd_gradcomp.method.compressor import Compressor, Context
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.interface.header import BEYOND, ReductionSpec

LARGEST = (2.0 - 2.0**-20) * 2.0**127  # a bit below float32's: sums are rounded on their way


def check_finite(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """Return (finite, gradient); zeros if it is not finite and is found out too late to skip it."""
    return ops.check_finite(gradient, "elements")


def check_storable(ops: Ops, gradient: Tensor) -> tuple[Any, Tensor]:
    """Return the same for a gradient that is added to the state, perhaps squared.

    The state must not overflow: an element with an infinite second moment would never be sent
    again. So a norm beyond 2**58 counts as infinite: a thousand squares of that fit.
    """
    return ops.check_finite(gradient, "squares")


def reduction_spec(
    context: Context, sides: Mapping[str, wire.Part], ascending: Any = None
) -> ReductionSpec:
    """Return how the ranks' payloads are summed, to finite numbers.

    Args:
        context: of the step.
        sides: the first parts of a body: upper bounds of the magnitudes sent, by groups, in
            float32, or as exponents of powers of two.
        ascending: of `ReductionSpec`.
    """
    groups = max((part.count for part in sides.values()), default=0)
    return ReductionSpec(
        weight=context.prescale * context.postscale,
        groups=groups,
        vectors=len(sides) if groups else 0,
        powers=any(part.dtype == "int8" for part in sides.values()),
        limit=LARGEST,
        refused=(wire.ANY_NOT_FINITE, NonFiniteGradientError),
        ascending=ascending,
    )


def check_summable(
    ops: Ops, sides: Sequence[Tensor], context: Context, header: wire.Header
) -> wire.Header:
    """Require that the ranks' payloads sum to finite numbers; return a header that says so.

    Args:
        ops: the tensor operations.
        sides: upper bounds of the magnitudes sent, by groups; float [world, groups] each.
        context: of the step.
        header: of the payloads.

    Raises:
        NonFiniteGradientError: on all ranks, as in `check_sum`; also if a single group is so large
            that an infinite sum cannot be ruled out.
    """
    fits = ops.summable(sides, context.prescale * context.postscale, LARGEST)
    intact = ops.require({wire.ANY_NOT_FINITE: fits}, NonFiniteGradientError)
    return header if intact is None else _with_intact(header, intact)


def check_ascending(ops: Ops, ascending: Tensor | None, header: wire.Header) -> wire.Header:
    """Require that each rank's indices ascend; return a header that says so.

    Args:
        ops: the tensor operations.
        ascending: bool [world]; None if that was not looked at.
        header: of the payloads.

    Raises:
        PayloadError: on all ranks; see `Ops.require`.
    """
    intact = None if ascending is None else ops.require({BEYOND: ascending}, PayloadError)
    return header if intact is None else _with_intact(header, intact)


def _with_intact(header: wire.Header, intact: Tensor) -> wire.Header:
    """Return the header of payloads that must be intact in this respect too."""
    intact = intact if header.intact is None else header.intact & intact
    return header._replace(intact=intact, weights=None)


def header_of(codec: Compressor, context: Context, finite: Any = True) -> wire.Header:
    """Return this rank's header for a payload of a fixed size."""
    elements = context.layout.elements
    step = context.step % (1 << 32)
    digest = codec.digest(context.layout)
    return wire.Header(codec.algorithm, digest, step, 0, elements, elements, finite)


def weights_of(ops: Ops, context: Context, header: wire.Header) -> Tensor:
    """Return the weight of each rank's payload; 0 if it must not be used."""
    if header.weights is not None:
        return header.weights
    weight = context.prescale * context.postscale
    if header.intact is None:
        return ops.full((context.size,), weight, "float32")
    return ops.weigh(weight, header.intact)


def needing(ops: Ops, capacity: CapacityState, header: wire.Header) -> CapacityState:
    """Return the capacity state with the elements that a rank needed in this step."""
    needed = ops.stage(ops.max(header.wanted)) if header.needed is None else header.needed
    return capacity._replace(needed=needed)


def from_leader(
    ops: Ops, context: Context, leader: Any, payload: Callable[[], Tensor], size: int
) -> Generator[Any, Any, Tensor]:
    """Return one rank's payload of `size` bytes, on all ranks."""
    sent = ops.cond(leader == context.rank, payload, lambda: ops.zeros((size,), "uint8"))

    def from_root(root: int) -> Generator[Broadcast, Tensor, tuple[Tensor]]:
        return ((yield Broadcast(sent, root)),)

    roots = [lambda r=root: from_root(r) for root in range(context.size)]
    (buffer,) = yield Switch(leader, roots)
    return buffer


def poison(ops: Ops, finite: Any) -> Tensor:
    """Return 0, or NaN if this rank's gradient is not finite; float32 [1], to append to a sum."""
    healthy = ops.cast(ops.words((finite,)), "float32")
    return ops.where(healthy > 0, 0.0, healthy / healthy)


def strip_poison(ops: Ops, total: Tensor) -> Tensor:
    """Return a sum of vectors that end in `poison`, without it; see `check_sum`."""
    return check_sum(ops, total)[:-1]


def draw_number(step: Any, seed: int, count: int) -> Any:
    """Return a pseudo-random number below `count`, the same on all ranks in a step.

    Plain arithmetic below 2**62 gives the same result for an int and for a scalar in a graph.

    >>> [draw_number(step, 0, 4) for step in range(12)]
    [0, 0, 0, 1, 3, 3, 2, 3, 3, 0, 2, 1]
    """
    prime = (1 << 31) - 1
    x = (step % prime * 1103515245 + (seed * 69621 + 40014) % prime) % prime
    for shift in (7919, 104729):
        x = x * ((x + shift) % prime) % prime * 16807 % prime
    return x // 1024 % count


def allreduce_bucket(ops: Ops, context: Context, x: Tensor) -> Generator[Any, Any, Tensor]:
    """Allreduce the bucket without its padding; x may hold the result.

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


def split_like(x: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut a vector into pieces with as many elements as each of the tensors, in order."""
    pieces, start = [], 0
    for tensor in tensors:
        count = prod(tensor.shape)
        pieces.append(x[start : start + count])
        start += count
    return pieces


def check_sum(ops: Ops, total: Tensor, finite: Any = None) -> Tensor:
    """Return a sum of gradients, checked: all were finite, and their sum does not overflow.

    Args:
        ops: the tensor operations.
        total: the sum.
        finite: whether it is, if that is known.

    Raises:
        NonFiniteGradientError: on all ranks; if it can only be raised a step later, zeros are
            returned meanwhile.
    """
    finite = ops.words((ops.finite(total) if finite is None else finite,)) > 0
    intact = ops.require({wire.ANY_NOT_FINITE: finite}, NonFiniteGradientError)
    return total if intact is None else ops.where(intact, total, 0.0)
