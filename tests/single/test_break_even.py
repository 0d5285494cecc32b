"""No method moves more bytes than a dense allreduce, among however many ranks.

Where an allgather would, what is sent is added up on the way: see `codecs.sparse.summed`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NonFiniteGradientError,
    OneBitCompressor,
    PayloadError,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
    after,
)
from hvd_gradcomp.core.collectives import Allgather, Allreduce, Switch
from hvd_gradcomp.core.cost_model import volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.capacity import PATIENCE, CapacitySchedule
from hvd_gradcomp.method.compressor import leaves, with_leaves
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.hosts_world import Hosts

RULES = [VarianceCompressor(alpha=0.5), HybridCompressor(tau=0.5), StromCompressor(tau=0.5)]
WHOLE = [QSGDCompressor(), QSGDCompressor(bits=8), TernGradCompressor(), OneBitCompressor()]
DENSITIES = (1.0, 0.95, 0.9, 0.8, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001)
SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)
SIZES = st.integers(2, 64)
FAST = settings(max_examples=12, deadline=None)


def largest(density):
    """The methods with a number of elements, so that they send this share."""
    return [
        SparseGDCompressor(density),
        SparseGDCompressor(density, index_coding="int32"),
        DGCCompressor(density, momentum=0.9),
        GradientDroppingCompressor(min(max(1 - density, 1e-6), 1 - 1e-6)),
        EGCCompressor(K=1 / density, momentum=0.0),
    ]


def layout_of(shapes, compressor):
    names = tuple(f"layer{place}" for place in range(len(shapes)))
    return Layout(names, tuple(shapes), block=compressor.block)


def drawn(random, world, density):
    """Gradients of which all rules send this share, and moments that keep nothing back."""
    gradients = []
    for _ in range(world.size):
        tensors = []
        for shape in world.layout.shapes:
            x = random.uniform(0.6, 2.0, shape) * random.choice((-1, 1), shape)
            x *= random.random(shape) < density
            tensors.append(torch.from_numpy(x.astype("f4")))
        gradients.append(world.flat(tensors))
    extra = {}
    if world.compressor.uses_moments:
        extra["moment"] = [torch.zeros(world.layout.size) for _ in gradients]
    return gradients, extra


def moved(world):
    """Bytes that the last step has brought the busiest rank."""
    total = 0.0
    for request, *_ in world.traffic:
        size = request.tensor.numel() * request.tensor.element_size()
        total += volume(type(request).__name__.lower(), size, world.size)
    return total


def dense(world):
    return volume("allreduce", 4.0 * world.layout.elements, world.size)


def headers(world):
    """Of which a rank hears what another had to send: no gradient is so small that it fits."""
    return volume("allgather", wire.HEADER_BYTES, world.size)


def is_summed(world):
    return [type(requests[0]) for requests in world.traffic] == [Allgather, Allreduce]


# -- the law ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", RULES, ids=repr)
@given(shapes=SHAPES, size=SIZES, seed=st.integers(0, 2**32 - 1), data=st.data())
@FAST
def test_a_rule_moves_no_more_than_dense(compressor, shapes, size, seed, data):
    world = World(compressor, TorchOps(), layout_of(shapes, compressor), size)
    random = np.random.default_rng(seed)
    for _ in range(4):
        gradients, extra = drawn(random, world, data.draw(st.sampled_from(DENSITIES)))
        totals = world.step(gradients, **extra)
        assert moved(world) <= dense(world) + headers(world)
        assert all(torch.equal(total, totals[0]) for total in totals)


@given(shapes=SHAPES, size=SIZES, density=st.sampled_from(DENSITIES), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_number_of_elements_moves_no_more_than_dense(shapes, size, density, data):
    compressor = data.draw(st.sampled_from(largest(density)))
    world = World(compressor, TorchOps(), layout_of(shapes, compressor), size)
    random = np.random.default_rng(size)
    for _ in range(2):
        totals = world.step(drawn(random, world, 1.0)[0])
        assert moved(world) <= dense(world) + headers(world)
        assert all(torch.equal(total, totals[0]) for total in totals)


@given(shapes=SHAPES, size=SIZES, density=st.sampled_from(DENSITIES), data=st.data())
@settings(max_examples=60, deadline=None)
def test_quantizers_and_leaders_move_no_more_than_dense(shapes, size, density, data):
    compressor = data.draw(st.sampled_from([*WHOLE, ScaleComCompressor(density)]))
    world = World(compressor, TorchOps(), layout_of(shapes, compressor), size)
    random = np.random.default_rng(size)
    for _ in range(2):
        totals = world.step(drawn(random, world, 1.0)[0])
        assert moved(world) <= dense(world)
        assert all(torch.equal(total, totals[0]) for total in totals)


@pytest.mark.parametrize("size", [2, 9, 64])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("place", range(13))
def test_a_larger_bucket_moves_no_more_than_dense(place, density, size):
    compressor = [*RULES, *largest(density), *WHOLE, ScaleComCompressor(density)][place]
    layout = layout_of(((60, 100), (60,), (1000,)), compressor)
    world = World(compressor, TorchOps(), layout, size)
    random = np.random.default_rng(size)
    allowed = 0 if place >= 8 else headers(world)
    for _ in range(2):
        gradients, extra = drawn(random, world, density)
        world.step(gradients, **extra)
        assert moved(world) <= dense(world) + allowed


@given(st.integers(1, 10**8), st.integers(1, 200), SIZES, st.sampled_from(DENSITIES))
@settings(deadline=None)
def test_so_do_all_levels(elements, layers, size, density):
    shapes = ((max(elements // layers, 1),),) * layers
    for compressor in (*RULES, *largest(density)):
        layout = layout_of(shapes, compressor)
        schedule = compressor.capacity_schedule(layout, size)
        levels = [CapacityLevel(i, c, False) for i, c in enumerate(schedule.capacities)]
        if schedule.summed or compressor in RULES:
            levels.append(CapacityLevel(schedule.top, 0, True, schedule.summed))
        dense = volume("allreduce", 4.0 * layout.elements, size)
        brought = volume("allgather", wire.HEADER_BYTES, size)
        for level in levels:
            kind = "allreduce" if level.summed else "allgather"
            body = compressor.payload_bytes(layout, level) - wire.HEADER_BYTES
            assert brought + volume(kind, body, size) <= (dense + brought) * (1 + 1e-12)


def test_where_the_ways_part():
    """From 8 ranks on at one byte an element; at two bits from 32."""
    layout = Layout(("w",), ((1 << 22,),))
    first = {
        type(c): next(n for n in range(2, 99) if c.capacity_schedule(layout, n).summed)
        for c in (RULES[0], RULES[2])
    }
    assert first == {VarianceCompressor: 8, StromCompressor: 32}
    assert not SparseGDCompressor(0.01).capacity_schedule(layout, 64).summed
    assert SparseGDCompressor(0.03).capacity_schedule(layout, 64).summed
    assert not SparseGDCompressor(0.9).capacity_schedule(layout, 2).summed
    assert SparseGDCompressor(0.95).capacity_schedule(layout, 2).summed


# -- what is summed --------------------------------------------------------------------------


SUMMED = [
    *((c, 40) for c in RULES),
    (VarianceCompressor(alpha=1.0, feedback_rounding=True), 12),
    (SparseGDCompressor(0.6), 4),
    (DGCCompressor(0.6, momentum=0.9), 4),
    (DGCCompressor(0.5, momentum=0.0, warmup=(0.9, 0.7), warmup_steps=4), 4),
    (EGCCompressor(K=1.5, momentum=0.9), 4),
    (GradientDroppingCompressor(0.4), 4),
]
OF_SUMMED = pytest.mark.parametrize(("compressor", "size"), SUMMED, ids=repr)


def gathering(schedule):
    """The same levels, of which none is summed."""
    return lambda self, layout, ranks: CapacitySchedule(schedule(self, layout, ranks).capacities)


@OF_SUMMED
@pytest.mark.parametrize("static", [False, True], ids=["indexed", "masked"])
def test_it_is_what_the_other_levels_send(compressor, size, static, monkeypatch):
    """The same elements are sent, the same is kept; and the result differs by its order alone."""
    layout = layout_of(((40, 9), (7,), (300,)), compressor)
    ops, random = TorchOps(static=static), np.random.default_rng(3)
    world = World(compressor, TorchOps(), layout, size)
    others = World(compressor, ops, layout, size)
    plain = World(compressor, TorchOps(), layout, size)
    ways = set()
    for step in range(5):
        density = 1.0 if step > 1 else 0.02
        gradients, extra = drawn(random, world, density)
        totals, same = (w.step([g.clone() for g in gradients], **extra) for w in (world, others))
        ways.add(is_summed(world))
        assert [[r.tensor.tolist() for r in row] for row in world.traffic] == [
            [r.tensor.tolist() for r in row] for row in others.traffic
        ], "masked and indexed are equal to the bit"
        assert all(map(torch.equal, totals, same))
        with monkeypatch.context() as patch:
            kind = type(compressor)
            patch.setattr(kind, "capacity_schedule", gathering(kind.capacity_schedule))
            gathered = plain.step([g.clone() for g in gradients], **extra)
        torch.testing.assert_close(totals[0], gathered[0], rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(world.states, plain.states):
            assert all(map(torch.equal, ours.memory, theirs.memory))
            assert torch.equal(ours.sent, theirs.sent)
    assert True in ways


@OF_SUMMED
def test_nothing_is_lost(compressor, size):
    layout = layout_of(((40, 9), (7,), (300,)), compressor)
    world = World(compressor, TorchOps(), layout, size, average=False)
    random = np.random.default_rng(4)
    for _ in range(4):
        before = [state.memory[0].clone() for state in world.states]
        velocity = [state.memory[-1].clone() for state in world.states]
        gradients, extra = drawn(random, world, 1.0)
        (total, *_) = world.step(gradients, **extra)
        momentum = getattr(compressor, "momentum", 0.0)
        came = [g + momentum * u if momentum else g for g, u in zip(gradients, velocity)]
        pending = [r + x for r, x in zip(before, came)]
        for rank, state in enumerate(world.states):
            sent = sent_by(world, rank) if is_summed(world) else None
            if sent is None:
                continue
            kept, touched = state.memory[0], sent != 0
            assert torch.equal(kept[~touched], pending[rank][~touched]), (
                "settled without being sent"
            )
            if isinstance(compressor, VarianceCompressor) and not compressor.feedback_rounding:
                assert not kept[touched].any()
            else:
                torch.testing.assert_close(kept + sent, pending[rank], rtol=0, atol=1e-6)
        if is_summed(world):
            whole = sum(sent_by(world, rank).double() for rank in range(size))
            torch.testing.assert_close(total.double(), whole, rtol=1e-5, atol=1e-5)
    assert is_summed(world)


def sent_by(world, rank):
    pieces = world.traffic[1][rank].tensor.split(list(world.layout.sizes))
    return world.flat([piece.view(s) for piece, s in zip(pieces, world.layout.shapes)])


def test_up_to_it_and_down_again():
    compressor = StromCompressor(tau=0.5)
    world = World(compressor, TorchOps(), layout_of(((2000,),), compressor), 40)
    random = np.random.default_rng(5)
    ways = []
    for step in range(3 + 3 * PATIENCE):
        gradients, _ = drawn(random, world, 1.0 if step < 3 else 0.004)
        for state in world.states:  # what waits from before would be sent as well
            state.memory.r.zero_()
        world.step(gradients)
        ways.append(is_summed(world))
    assert ways[1:3] == [True, True], "up as soon as one rank needs it"
    down = ways.index(False, 1)
    assert PATIENCE <= down <= 3 + 2 * PATIENCE
    assert not any(ways[down:])


@pytest.mark.parametrize(("few", "many"), [(2, 40), (40, 2), (9, 12)])
@pytest.mark.parametrize("compressor", [RULES[0], RULES[2], SparseGDCompressor(0.5)], ids=repr)
def test_a_state_goes_on_among_other_ranks(compressor, few, many):
    """As after an elastic change: whatever level they were on, all ranks go on from the same."""
    layout = layout_of(((2000,),), compressor)
    before, world = (World(compressor, TorchOps(), layout, size) for size in (few, many))
    random = np.random.default_rng(6)
    for density in (1.0, 1.0, 0.01):
        gradients, extra = drawn(random, before, density)
        before.step(gradients, **extra)
        world.states = [
            with_leaves(s, [x.clone() for _, x in leaves(before.states[0])]) for s in world.states
        ]
        world.steps = before.steps
        for following in (1.0, 0.01, 1.0):
            gradients, extra = drawn(random, world, following)
            totals = world.step(gradients, **extra)
            assert moved(world) <= dense(world) + headers(world)
            assert all(torch.equal(total, totals[0]) for total in totals)
            levels = {int(state.capacity.level) for state in world.states}
            assert levels <= set(range(compressor.capacity_schedule(layout, many).top + 1))


# -- faults ----------------------------------------------------------------------------------


@OF_SUMMED
@pytest.mark.parametrize("fault", ["nan", "damaged"])
def test_a_fault_is_an_error_on_all_ranks_and_nothing_is_summed(compressor, size, fault):
    layout = layout_of(((40, 9), (7,), (300,)), compressor)

    def damage(rank, request):
        if fault == "damaged" and rank == 1 and world.steps == 3 and hasattr(request, "tensor"):
            tensor = request.tensor.clone()
            tensor[17] ^= 4
            return request._replace(tensor=tensor)
        return request

    world = World(compressor, TorchOps(), layout, size, tamper=damage)
    random = np.random.default_rng(7)
    for _ in range(3):
        gradients, extra = drawn(random, world, 1.0)
        world.step(gradients, **extra)
    assert is_summed(world)
    before = [[x.clone() for x in state.memory] for state in world.states]
    gradients, extra = drawn(random, world, 1.0)
    if fault == "nan":
        gradients[1][5] = float("nan")
    error = NonFiniteGradientError if fault == "nan" else PayloadError
    with pytest.raises(error, match="rank 1 "):
        world.step(gradients, **extra)
    assert [type(r) for r, *_ in world.traffic] == [Allgather]
    if not getattr(compressor, "momentum", 0.0):
        for rank, (state, fields) in enumerate(zip(world.states, before)):
            arrived = 0.0 if rank == 1 and fault == "nan" else gradients[rank]
            torch.testing.assert_close(state.memory[0], fields[0] + arrived, rtol=0, atol=1e-5)
    world.tamper = None
    gradients, extra = drawn(random, world, 1.0)
    assert world.step(gradients, **extra)[0].isfinite().all()


@pytest.mark.parametrize("compressor", [RULES[0], SparseGDCompressor(0.6)], ids=repr)
def test_where_an_error_comes_late_the_faulty_rank_does_not_count(compressor):
    """Static shapes on the CPU raise at once; `require` is made to answer as it does on a GPU."""

    class Late(TorchOps):
        def require(self, facts, error=PayloadError):
            return torch.stack(tuple(facts.values())).all(0)

    layout = layout_of(((40, 9), (300,)), compressor)
    world = World(compressor, Late(static=True), layout, 12, average=False)
    random = np.random.default_rng(8)
    for _ in range(2):
        gradients, extra = drawn(random, world, 1.0)
        world.step(gradients, **extra)
    gradients, extra = drawn(random, world, 1.0)
    gradients[3][5] = float("inf")
    totals = world.step(gradients, **extra)
    assert is_summed(world)
    assert totals[0].isfinite().all() and totals[0].any()
    assert not world.traffic[1][3].tensor.any()


# -- frontends -------------------------------------------------------------------------------


class GraphWorld(World):
    """A world whose `Switch` is one of a TensorFlow graph."""

    def _perform(self, requests):
        if not isinstance(requests[0], Switch):
            return super()._perform(requests)
        branches = [
            lambda i=i: self._run([request.branches[i]() for request in requests])
            for i in range(len(requests[0].branches))
        ]
        return tf.switch_case(tf.cast(requests[0].index, tf.int32), branches)


PLAIN = [replace(compressor, index_coding="int32") for compressor in RULES]  # summed at 2 ranks


@pytest.mark.parametrize("compressor", [PLAIN[0], after(2, PLAIN[2], PLAIN[0])], ids=repr)
def test_a_graph_sums_what_torch_does_and_is_traced_once(compressor):
    size, layout = 2, layout_of(((40,), (7,), (30,)), compressor)
    reference = World(compressor, TorchOps(), layout, size)
    world = GraphWorld(compressor, TensorFlowOps(), layout, size)
    templates, traces = world.states, []

    @tf.function(autograph=False)
    def step(number, flats, moments, values):
        traces.append(1)
        world.steps = number
        world.states = [with_leaves(t, list(v)) for t, v in zip(templates, values)]
        totals = world.step(flats, moment=moments)
        return totals, [[x for _, x in leaves(s)] for s in world.states]

    values = [[x for _, x in leaves(state)] for state in templates]
    random, ways = np.random.default_rng(9), set()
    for number in range(30):
        gradients, extra = drawn(random, reference, 1.0 if 3 < number < 6 else 0.01)
        flats, moments = (
            [tf.constant(x.numpy()) for x in xs] for xs in (gradients, *extra.values())
        )
        totals, values = step(tf.constant(number, tf.int64), flats, moments, values)
        expected = reference.step(gradients, **extra)
        ways.add(is_summed(reference))
        for ours, theirs in zip(totals, expected):
            np.testing.assert_array_equal(ours, theirs)
        for state, other in zip(values, reference.states):
            for ours, (name, theirs) in zip(state, leaves(other)):
                np.testing.assert_array_equal(ours, theirs, name)
    assert ways == {False, True}
    assert len(traces) == 1, "a level must not retrace"


@pytest.mark.parametrize("compressor", [RULES[0], SparseGDCompressor(0.6)], ids=repr)
def test_tensorflow_sums_the_same_bits(compressor):
    layout = layout_of(((40, 9), (7,), (300,)), compressor)
    worlds = [World(compressor, ops, layout, 9) for ops in (TorchOps(), TensorFlowOps())]
    random = np.random.default_rng(10)
    for _ in range(4):
        gradients, extra = drawn(random, worlds[0], 0.9)
        flats = [tf.constant(g.numpy()) for g in gradients]
        moments = {name: [tf.constant(x.numpy()) for x in xs] for name, xs in extra.items()}
        totals, same = worlds[0].step(gradients, **extra), worlds[1].step(flats, **moments)
        np.testing.assert_array_equal(totals[0], same[0])
        for ours, theirs in zip(*(world.traffic for world in worlds)):
            for a, b in zip(ours, theirs):
                np.testing.assert_array_equal(a.tensor, b.tensor)
    assert is_summed(worlds[0])


def test_leaders_of_hosts_sum_as_ranks_do():
    compressor = RULES[0]
    layout = layout_of(((40, 9), (300,)), compressor)
    hosts = Hosts(compressor, TorchOps(), layout, 9, 2)
    world = World(compressor, TorchOps(), layout, 9)
    random = np.random.default_rng(11)
    for _ in range(3):
        gradients, extra = drawn(random, world, 0.9)
        twice = {name: [x for x in xs for _ in range(2)] for name, xs in extra.items()}
        expected = world.step([g.clone() for g in gradients], **extra)
        totals = hosts.step([g for g in gradients for _ in range(2)], **twice)
        assert all(torch.equal(total, expected[0]) for total in totals)
    assert is_summed(world) and is_summed(hosts)
