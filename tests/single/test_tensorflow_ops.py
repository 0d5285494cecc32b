"""TensorFlow's ops where a step is traced: run-time levels in a graph, static shapes under XLA."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_gradcomp import EGCCompressor, HybridCompressor, PayloadError, VarianceCompressor
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves, with_leaves
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import LEADER, ONE_OF_EACH, PHASED, ROUNDED, WORDS, decode_step, encode_step

SHAPES = ((40, 7), (10,), (700,))
RANKS = 4
STEPS = 24


def layout_for(compressor) -> Layout:
    return Layout(("conv", "bias", "head"), SHAPES, block=compressor.block)


def gradients(seed: int) -> np.ndarray:
    """[steps, ranks, elements]: from nothing to everything to send, so that all levels are used."""
    random = np.random.default_rng(seed)
    data = random.standard_normal((STEPS, RANKS, sum(int(np.prod(s)) for s in SHAPES)))
    data *= random.random(data.shape) < np.linspace(0, 0.6, STEPS)[:, None, None] ** 2
    data *= 10.0 ** random.uniform(-2, 2, (STEPS, 1, 1))
    return data.astype(np.float32)


def split(flat: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([int(np.prod(s)) for s in SHAPES])[:-1]
    return [piece.reshape(s) for piece, s in zip(np.split(flat, ends), SHAPES)]


def extra(compressor, moments):
    return {"moment": moments} if compressor.uses_moments and moments is not None else {}


def bits(tensors) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in tensors]


@pytest.mark.parametrize("block", [1, 256])
def test_layers_are_laid_with_outputs_first_and_back(block):
    """Small and large ones, which are written past the caches; whatever their alignment."""
    shapes = ((3,), (7, 5), (3, 3, 128, 256), (1, 1, 1024, 300), (1031, 509), (2, 7, 130, 290))
    names = tuple(f"{i}/kernel" for i in range(len(shapes)))
    layout, ops = Layout(names, shapes, block=block, filters_last=True), TensorFlowOps()
    layout = layout.with_outputs_first()
    random, layers = np.random.default_rng(1), []
    expected = np.zeros(layout.size, np.float32)
    for offset, shape in zip(layout.offsets, shapes):
        layer = random.standard_normal(shape).astype(np.float32)
        axes = (layer.ndim - 1, layer.ndim - 2, *range(layer.ndim - 2)) if layer.ndim > 1 else (0,)
        expected[offset : offset + layer.size] = layer.transpose(axes).reshape(-1)
        layers.append(layer)
    flat = ops.flatten(layout, layers, "float32")
    assert bits([flat]) == bits([expected])
    assert bits(ops.cut(layout, flat)) == bits(layers)


# A world in a graph cannot switch by a step that is known at run time only, as a frontend can.
STRAIGHT = [c for c in ONE_OF_EACH if c not in LEADER + PHASED]
EGC_ROUNDED = next(c for c in ROUNDED if isinstance(c, EGCCompressor))  # of several capacities
STRAIGHT.append(EGC_ROUNDED)


@pytest.mark.parametrize(
    ("compressor", "has_moments"),
    [
        (c, has_moments)
        for c in STRAIGHT
        for has_moments in (False, True)
        if c.uses_moments or not has_moments
    ],
    ids=repr,
)
def test_a_graph_exchanges_what_torch_does_and_is_traced_once(compressor, has_moments):
    layout, data = layout_for(compressor), gradients(1)
    squares = gradients(2) ** 2 / 16 if has_moments else None
    reference = World(compressor, TorchOps(), layout, RANKS)
    world = World(compressor, TensorFlowOps(), layout, RANKS)
    templates, traces = world.states, []

    @tf.function(autograph=False)
    def step(number, flats, moments, values):
        traces.append(1)
        world.steps = number
        world.states = [with_leaves(t, list(v)) for t, v in zip(templates, values)]
        totals = world.step(flats, **extra(compressor, moments))
        sent = [request.tensor for request in world.traffic[0]]
        return totals, sent, [[x for _, x in leaves(s)] for s in world.states]

    values = [[x for _, x in leaves(state)] for state in templates]
    sizes = set()
    for number, ranks in enumerate(data):
        flat = [reference.flat([torch.from_numpy(x) for x in split(g)]) for g in ranks]
        moments = None
        if squares is not None:
            pieces = [[torch.from_numpy(x) for x in split(q)] for q in squares[number]]
            moments = [reference.flat(p) for p in pieces]
        tensors = [tf.constant(x.numpy()) for x in flat]
        mine_moments = None if moments is None else [tf.constant(x.numpy()) for x in moments]
        totals, sent, values = step(tf.constant(number, tf.int64), tensors, mine_moments, values)
        expected = reference.step(flat, **extra(compressor, moments))
        assert bits(sent) == bits(request.tensor for request in reference.traffic[0])
        assert bits(totals) == bits(expected)
        for state, other in zip(values, reference.states):
            for tensors, (name, theirs) in zip(state, leaves(other)):
                if not name.endswith("hint"):  # where to look first is each backend's own affair
                    assert bits([tensors]) == bits([theirs]), name
        sizes.add(len(sent[0]))
    assert len(traces) == 1, "a level must not retrace"
    if compressor in WORDS or isinstance(compressor, EGCCompressor):
        # Without moments Hybrid needs, in these steps, what lies between two levels.
        is_hybrid = isinstance(compressor, HybridCompressor)
        few = compressor == EGC_ROUNDED or (is_hybrid and not has_moments)
        assert len(sizes) > (1 if few else 2), "too few levels were used"


@pytest.mark.parametrize("dense", [False, True], ids=["words", "dense"])
@pytest.mark.parametrize("compressor", WORDS, ids=repr)
def test_xla_gives_the_same_bits(compressor, dense):
    """XLA contracts a product and a sum into one rounding unless the plain ops prevent it."""
    layout, eager, static = layout_for(compressor), TensorFlowOps(), TensorFlowOps(static=True)
    schedule = compressor.capacity_schedule(layout)
    place = schedule.top if dense else schedule.top - 2
    capacity, _ = schedule.next_level(eager, schedule.init(eager))
    capacity = capacity._replace(
        index=place, capacity=(*schedule.capacities, 0)[place], dense=dense
    )
    world = World(compressor, eager, layout, RANKS)
    weights = tf.constant([1 / 3] * RANKS, tf.float32)

    def encode(ops, state, step, gradient):
        encoded, after = encode_step(compressor, ops, layout, capacity, step, gradient, state)
        return encoded.body, encoded.sent, [x for _, x in leaves(after)]

    def decode(ops, bodies):
        empty = ops.zeros((layout.size,))
        return decode_step(compressor, ops, layout, Payloads(capacity, bodies, weights), empty)

    @tf.function(jit_compile=True, autograph=False)
    def compiled_encode(values, step, gradient):
        return encode(static, with_leaves(world.states[0], list(values)), step, gradient)

    @tf.function(jit_compile=True, autograph=False)
    def compiled_decode(bodies):
        return decode(static, bodies)

    for number, ranks in enumerate(gradients(3)):
        step, bodies = tf.constant(number, tf.int64), []
        for rank, data in enumerate(ranks):
            gradient, state = world.flat([tf.constant(x) for x in split(data)]), world.states[rank]
            body, sent, values = encode(eager, state, step, gradient)
            lowered = compiled_encode([x for _, x in leaves(state)], step, gradient)
            assert bits([lowered[0], lowered[1], *lowered[2]]) == bits(
                [body, np.int64(sent), *values]
            )
            world.states[rank] = with_leaves(state, list(values))
            bodies.append(body)
        stacked = tf.stack(bodies)
        assert bits([compiled_decode(stacked)]) == bits([decode(eager, stacked)])


def test_eager_checks_name_the_ranks():
    facts = {"rank {ranks} is late": tf.constant([True, False, False])}
    with pytest.raises(PayloadError, match="rank 1, 2 is late"):
        TensorFlowOps().require(facts)
    assert TensorFlowOps().require({"rank {ranks}": tf.constant([True])}) is None


def test_a_failed_check_in_a_graph_stops_what_depends_on_it():
    weight = tf.Variable(1.0)

    @tf.function(autograph=False)
    def step(state_):
        intact = TensorFlowOps().require({"rank {ranks} is late": state_})
        weight.assign_add(tf.reduce_sum(tf.cast(intact, tf.float32)))

    step(tf.constant([True, True]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"a rank is late; fine by rank:\] \[1 0\]"
    ):
        step(tf.constant([True, False]))
    assert float(weight) == 3.0


@pytest.mark.parametrize("compressor", [VarianceCompressor(), HybridCompressor()], ids=repr)
def test_a_damaged_payload_changes_nothing_in_a_graph(compressor):
    layout = layout_for(compressor)

    def damage(rank, request):
        flip = tf.one_hot(40, tf.size(request.tensor), on_value=8 * (rank == 1), dtype=tf.int32)
        return request._replace(
            tensor=tf.bitwise.bitwise_xor(request.tensor, tf.cast(flip, "uint8"))
        )

    world = World(compressor, TensorFlowOps(), layout, 2, tamper=damage)
    result = tf.Variable(tf.zeros((layout.size,)))

    @tf.function(autograph=False)
    def step(flats):
        result.assign(world.step(flats)[0])

    ranks = gradients(4)[0][:2]
    with pytest.raises(tf.errors.InvalidArgumentError, match="damaged payload"):
        step([world.flat([tf.constant(x) for x in split(g)]) for g in ranks])
    assert not result.numpy().any()
