"""Balanced exchange of what a sparse method sends: by owners, who add up and choose again.

The method works as in a world of one rank. What it sends comes into a residual, from which the
largest elements go by owners (Li and Hoefler 2022), see `codecs.owners`: as many as the rank sent
that sent most in the last step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.combined.wrappers import part
from hvd_gradcomp.codecs import owners
from hvd_gradcomp.codecs.elias_fano import EliasFano, low_bits
from hvd_gradcomp.codecs.owners import Message
from hvd_gradcomp.codecs.sparse import SparseCompressor
from hvd_gradcomp.codecs.values import VALUES, ValueCoding, ValueGroups
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allgather, Switch
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange, two_shot_exchange, volume
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.capacity import CapacitySchedule, CapacityState
from hvd_gradcomp.method.composite import Composite
from hvd_gradcomp.method.compressor import Compressor, Context, Program, Report
from hvd_gradcomp.method.handover import Correction, Handover
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel

_CODINGS = ("float32", "bfloat16")
_EXCHANGES = ("auto", "two_shot")
_NO_GROUPS = ValueGroups(())  # of floats, which share nothing
_SIZE, _SHARE = 1 << 20, 100  # "auto" compares what a bucket of this size sends, one element in 100


class BalancedState(NamedTuple):
    """State of one bucket."""

    inner: Any  # rank-local: each rank works as if it were alone
    r: Tensor  # float32 [size], what the method sent and owners have not; rank-local
    knots: Tensor  # int64 [KNOTS + 1], ends of stretches with as many elements; replicated
    capacity: CapacityState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far
    hint: Tensor  # float32 [1], magnitude to search from in the next step; rank-local


@dataclass(frozen=True)
class Balanced(Composite, Handover):
    """Balanced exchange of what a sparse method sends; made by `balanced`."""

    inner: Compressor
    exchange: str = "auto"
    values: str = "float32"
    slack: float = 1.25

    keeps_gradient = True
    varies_in_size = True
    in_common = frozenset({"knots", "capacity"})

    def __post_init__(self) -> None:
        validate.one_of(self, "exchange", _EXCHANGES)
        validate.one_of(self, "values", _CODINGS)
        validate.real(self, "slack", low=1, closed="[")
        if not isinstance(self.inner, SparseCompressor):
            raise ValueError(
                f"balanced goes around a method that gathers a few elements of an accumulated "
                "gradient, such as VarianceCompressor, StromCompressor or DGCCompressor; "
                f"got {self.inner}. ChunkedTopKCompressor and the quantizers have "
                "exchange='auto' themselves"
            )

    def __str__(self) -> str:
        arguments = f"{self.inner}, {self.exchange!r}, {self.values!r}, slack={self.slack!r}"
        return f"balanced({arguments})"

    @property
    def children(self) -> dict[str, Compressor]:
        return {"inner": self.inner}

    @property
    def replicated(self) -> frozenset[str]:  # type: ignore[override]
        """Names of its own fields: of the method no field is equal on all ranks."""
        return self.in_common

    @property
    def reset_on_merge(self) -> frozenset[str]:  # type: ignore[override]
        """Names of fields that restart; the method's level of capacity is its rank's here."""
        levels = {f"inner.capacity.{field}" for field in CapacityState._fields}
        return self._inside("reset_on_merge") | levels | {"hint"}

    @property
    def correction(self) -> Correction | None:
        return self.method.correction

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        return replace(self, inner=self.method.corrected(momentum, nesterov))

    # -- sizes ---------------------------------------------------------------------------------

    @property
    def method(self) -> SparseCompressor:
        """Method whose elements are exchanged."""
        assert isinstance(self.inner, SparseCompressor)
        return self.inner

    @property
    def coding(self) -> ValueCoding:
        """Code of the values."""
        return VALUES[self.values]

    def slots(self, count: int, ranks: int) -> int:
        """Return how many elements fit into a message, if ranks choose so many."""
        return min(count, ceil(self.slack * count / ranks))

    def two_shot(self, layout: Layout, count: int, ranks: int) -> Exchange:
        """Return the exchange of so many elements by owners."""
        parts = Message.of(layout, self.slots(count, ranks), self.coding, _NO_GROUPS).parts()
        return two_shot_exchange(float(wire.packed_bytes(parts)), ranks)

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange | None:
        capacities = self.schedule(layout, ranks).capacities
        stated = self.method.capacities(layout)
        level = bisect_left(capacities, stated[0]) if stated else 0
        if level == len(capacities):
            return dense_exchange(layout.elements, wire.HEADER_BYTES)
        return self.two_shot(layout, capacities[level], ranks) if stated else None

    def schedule(self, layout: Layout, ranks: int) -> CapacitySchedule:
        """Return the numbers of elements to choose; above them a sum of all moves fewer bytes."""
        return _schedule(self, layout, ranks)

    def message(self, ops: Ops, layout: Layout, ranks: int, level: CapacityLevel) -> Message:
        """Return the body of a message to or from an owner, at one level."""
        if isinstance(level.capacity, int):
            return Message.of(layout, self.slots(level.capacity, ranks), self.coding, _NO_GROUPS)
        slots = [self.slots(count, ranks) for count in self.schedule(layout, ranks).capacities]
        low = [low_bits(count, layout.sink) for count in (*slots, 1)]
        count = ops.choice((*slots, 1), level.index)
        code = EliasFano(1, count, layout.sink, ops.choice(low, level.index))
        return Message(layout, count, code, self.coding, _NO_GROUPS)

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        """Return the method itself where its own exchange brings ranks fewer bytes."""
        inner = self.inner.of_layers(layers, ranks)
        if self.exchange == "auto" and not self.pays(ranks):
            return list(inner)
        return [replace(self, inner=one) for one in inner]

    def pays(self, ranks: int) -> bool:
        """Return True if owners bring a rank fewer bytes, where one element in 100 is sent."""
        layout = Layout(("",), ((_SIZE,),))
        count = min(_SIZE // _SHARE, self.method.capacity_schedule(layout).capacities[-1])
        payload = self.method.body_bytes(layout, CapacityLevel(0, count, False))
        gathered = volume("allgather", float(payload), ranks)
        return self.two_shot(layout, count, ranks).received(ranks) < gathered

    # -- one step ------------------------------------------------------------------------------

    def start(self, ops: Ops, layout: Layout, ranks: int) -> BalancedState:
        schedule, stated = self.schedule(layout, ranks), self.method.capacities(layout)
        level = bisect_left(schedule.capacities, stated[-1]) if stated else None
        return BalancedState(
            self.inner.start(ops, layout, 1),
            ops.zeros((layout.size,)),
            owners.first_knots(ops, layout),
            schedule.init(ops, level),
            ops.zeros((len(layout.names),), "int64"),
            ops.full((1,), float("inf"), "float32"),
        )

    def resized(self, ops: Ops, state: BalancedState, step: Any, ranks: int) -> BalancedState:
        """Return the same state: the method knows of one rank alone."""
        del ops, step, ranks
        return state

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: BalancedState, **extra: Tensor
    ) -> Program:
        layout, ranks = context.layout, context.size
        moment = extra.get("moment")
        if moment is None:
            finite, gradient = patterns.check_storable(ops, gradient)
        else:
            finite, gradient, moment = ops.check_finite_with(gradient, moment)
            extra = {**extra, "moment": moment}
        if finite is False:  # the others learn of it, and this rank's state does not change
            contribution, inner, wanted = ops.clear(gradient), state.inner, 0
        else:
            alone = context._replace(rank=0, size=1, prescale=1.0, postscale=1.0)
            alone = alone._replace(owns_gradient=False)
            method = _among(self.method, ranks)
            program = method.aggregate(ops, alone, gradient, state.inner, **extra)
            contribution, inner = yield from _alone(program)
            wanted = ops.sum(inner.sent - state.inner.sent)
            wanted = ops.staged(wanted) if ops.dynamic_shapes else wanted
        schedule = self.schedule(layout, ranks)
        level, capacity = schedule.next_level(ops, state.capacity)
        state = state._replace(inner=inner, capacity=capacity)
        number, digest = self.algorithm, self.digest(layout)
        step = context.step % (1 << 32)
        header = wire.Header(number, digest, step, level.index, wanted, wanted, finite)
        by_sum = partial(self.sum_all, ops, context, header, contribution, state)
        if not schedule.capacities:
            return (yield from by_sum())
        by_owners = partial(self.by_owners, ops, context, header, contribution, state, level)
        return (yield Switch(ops.pick(level.dense, 1, 0), (by_owners, by_sum)))

    def by_owners(
        self,
        ops: Ops,
        context: Context,
        header: wire.Header,
        gradient: Tensor,
        state: BalancedState,
        level: CapacityLevel,
    ) -> Program:
        """Exchange the largest elements of the residual by owners."""
        layout, ranks = context.layout, context.size
        message = self.message(ops, layout, ranks, level)
        largest = self.schedule(layout, ranks).capacities[-1]
        chosen = owners.choose(ops, context, gradient, state.r, state.hint, level.capacity, largest)
        try:
            done = yield from owners.exchange(
                ops, context, message, header, chosen.elements, state.knots
            )
        except (PayloadError, NonFiniteGradientError):
            ops.overwrite(state.r, chosen.accumulated)  # the method has sent it, and nobody has it
            raise
        total, r, per_layer = owners.commit(
            ops, context, chosen.accumulated, state.r, done.sent, [done.total], done.left
        )
        sent, capacity = state.sent + per_layer, patterns.needing(ops, state.capacity, done.header)
        state = BalancedState(state.inner, r, done.knots, capacity, sent, chosen.hint)
        return total, state

    def sum_all(
        self,
        ops: Ops,
        context: Context,
        header: wire.Header,
        gradient: Tensor,
        state: BalancedState,
    ) -> Program:
        """Allreduce the whole residual, where these are fewer bytes."""
        r = ops.overwrite(state.r, ops.accumulate(gradient, state.r))
        buffers = yield Allgather(wire.pack(ops, header, ops.zeros((0,), "uint8")))
        plain = context._replace(prescale=1.0, postscale=1.0)
        header, _ = wire.unpack(ops, header, buffers, patterns.reduction_spec(plain, {}))
        weight = patterns.weights_of(ops, plain, header)[context.rank]
        total = yield from patterns.allreduce_bucket(ops, context, r * weight)
        total = patterns.check_sum(ops, total)
        sent = state.sent + ops.words(context.layout.sizes)
        capacity = patterns.needing(ops, state.capacity, header)
        return total, state._replace(r=ops.clear(r), capacity=capacity, sent=sent)

    # -- reports -------------------------------------------------------------------------------

    def report(self, layout: Layout, state: BalancedState, steps: int, since: int = 0) -> Report:
        del steps, since
        changes = int(state.capacity.changes)
        return Report([int(n) for n in state.sent], self.residual(state), level_changes=changes)

    def residual(self, state: BalancedState) -> Tensor:
        return state.r + self.method.residual(state.inner)

    def inherit(
        self, ops: Ops, state: BalancedState, gradient: Tensor, residual: Tensor
    ) -> tuple[BalancedState, Tensor]:
        inner, whole = self.method.inherit(ops, state.inner, gradient, residual)
        return state._replace(inner=inner), whole


@lru_cache(maxsize=1024)
def _schedule(codec: Balanced, layout: Layout, ranks: int) -> CapacitySchedule:
    dense = volume("allreduce", 4.0 * layout.elements, ranks)

    def fits(capacity: int) -> bool:
        return ranks == 1 or codec.two_shot(layout, capacity, ranks).received(ranks) < dense

    low, high = 0, layout.elements
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    policy = codec.method.policy
    every = CapacitySchedule.up_to(low + 1, policy=policy).capacities
    # Elias-Fano's code of a few more elements may take a word less, in small layers.
    return CapacitySchedule(tuple(filter(fits, every)), True, policy)


@lru_cache(maxsize=64)
def _among(method: SparseCompressor, ranks: int) -> SparseCompressor:
    """Return the method with the norms that it clips to among so many ranks, for a world of one."""
    norms = {name: getattr(method, name, None) for name in ("max_norm", "clip_norm")}
    limits = {name: norm / ranks**0.5 for name, norm in norms.items() if norm is not None}
    changed: SparseCompressor = replace(method, **limits)  # type: ignore[type-var]
    return changed


def _alone(program: Program) -> Program:
    """Drive a program in a world of its rank alone; return its result."""
    reply: Any = None
    while True:
        try:
            request = program.send(reply)
        except StopIteration as ended:
            return ended.value
        if isinstance(request, Allgather):
            reply = request.tensor[None]
        elif isinstance(request, Switch) and isinstance(request.index, int):
            reply = yield from _alone(request.branches[request.index]())
        elif isinstance(request, Switch):
            branches = [partial(_branch_alone, branch) for branch in request.branches]
            reply = yield Switch(request.index, branches)
        else:
            raise RuntimeError(f"balanced: a sparse method asked for {request}; this is a bug")


def _branch_alone(branch: Any) -> Program:
    return (yield from _alone(branch()))


def balanced(
    compressor: Compressor,
    exchange: str = "auto",
    values: str = "float32",
    slack: float = 1.25,
) -> Balanced:
    """Exchange what a sparse method sends by owners, so that bytes do not grow with the ranks.

    The method decides what it sends, as by itself. With k the number of elements that the rank
    sends that sends most, each rank sends the owner of each region the largest of what it has to
    send there, at most `slack * k / ranks`; the owner adds up, and sends all ranks the
    `slack * k / ranks` largest of its sums (Li and Hoefler 2022). By allgather a rank would receive
    the k elements of each.

    Nothing is lost: what finds no room stays with its sender, what an owner leaves out with the
    owner, and both compete in the next step. So where ranks send other elements each, a mean
    arrives later than by allgather: at most `slack * k` elements a step do, not `k` of each rank.

    What travels: values of 4 bytes, or 2, and places by Elias-Fano, some
    `log2(ranks * n / k) + 2` bits each, whatever the method's own payload looks like. If that is
    more than dense gradients are, 4 bytes for each element, by allreduce. State: that of the method
    and 4 bytes for each element.

    Default: `balanced(SparseGDCompressor())`, say: values of 32 bits and a slack of 1.25, as
    trained in docs/algorithms/balanced.md, where `exchange="two_shot"` asked for owners.

    Args:
        compressor: a method that tests elements, or sends the largest: Variance, Hybrid, Strom,
            Sparse GD, Gradient Dropping, DGC, EGC.
        exchange: "auto" leaves few ranks to the method's own allgather, where it brings them fewer
            bytes; "two_shot" is by owners always.
        values: code of the values, "float32" or "bfloat16"; what rounding takes is sent later.
        slack: room for elements of a region, over that for a mean one; at least 1. Larger sends
            more, and leaves less behind where regions differ.

    Raises:
        TypeError: the compressor is none, or a partition; `balanced` goes around its compressors.
        ValueError: it is no such method, or another argument is out of range.

    >>> from hvd_gradcomp import StromCompressor
    >>> print(balanced(StromCompressor(tau=0.01)))
    balanced(StromCompressor(tau=0.01), 'auto', 'float32', slack=1.25)
    """
    return Balanced(part("balanced", compressor), exchange, values, slack)
