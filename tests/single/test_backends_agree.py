"""Law 3: the same input and state give the same bytes, whatever runs the plain ops."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_gradcomp import (
    EGCCompressor,
    FP16Compressor,
    HybridCompressor,
    NoneCompressor,
    StromCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context, leaves, with_leaves
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from hvd_gradcomp.ops.scope import Scope
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import (
    BALANCED,
    INT32,
    LARGEST,
    LEADER,
    ONE_OF_EACH,
    PHASED,
    QUANTIZED,
    ROBUST,
    VARIANCE_INT32,
    encode_step,
)
from tests.single.older import compiles_whole

SHAPES = ((40, 7), (10,), (700,))
COMPRESSORS = [
    NoneCompressor(),
    FP16Compressor(),
    VarianceCompressor(alpha=0.5),
    VarianceCompressor(alpha=1.3, feedback_rounding=True),
    VARIANCE_INT32,
    HybridCompressor(tau=0.5),
    StromCompressor(tau=1.5),
]


def layout_for(compressor) -> Layout:
    return Layout(("conv", "bias", "head"), SHAPES, block=compressor.block)


def gradients(seed: int, steps: int, size: int = 4, sparse: int | None = None) -> np.ndarray:
    """[steps, ranks, elements]: scales that change, and a sparse step, to climb all levels."""
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.uniform(-2, 2, (steps, 1, 1))
    data = random.standard_normal((steps, size, sum(int(np.prod(s)) for s in SHAPES))) * scale
    sparse = steps // 2 if sparse is None else sparse
    data[sparse] *= random.random(data[0].shape) < 0.02
    return data.astype(np.float32)


def split(flat: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([int(np.prod(s)) for s in SHAPES])[:-1]
    return [piece.reshape(s) for piece, s in zip(np.split(flat, ends), SHAPES)]


def run(compressor, ops, make, data, moments):
    world = World(compressor, ops, layout_for(compressor), data.shape[1])
    wire, results = [], []
    for step, ranks in enumerate(data):
        extra = {}
        if moments is not None and compressor.uses_moments:
            extra["moment"] = [world.flat([make(x) for x in split(m)]) for m in moments[step]]
        results.append(
            world.step([world.flat([make(x) for x in split(g)]) for g in ranks], **extra)
        )
        wire += [[np.asarray(r.tensor).tobytes() for r in requests] for requests in world.traffic]
    # Where to look first is each backend's own affair; what is found is not.
    states = [
        [np.asarray(x).tobytes() for name, x in leaves(s) if not name.endswith("hint")]
        for s in world.states
    ]
    return wire, [[np.asarray(x) for x in step] for step in results], states


@pytest.mark.parametrize(
    ("compressor", "with_moments"),
    [
        pytest.param(one, moments, id=f"{one!r}-{'moments' if moments else 'step'}")
        for one in COMPRESSORS
        for moments in ((False, True) if one.uses_moments else (False,))
    ],
)
def test_torch_and_tensorflow_send_the_same_bytes(compressor, with_moments):
    data = gradients(1, 20)
    moments = np.abs(gradients(2, 20)) ** 2 / 16 if with_moments else None
    reference = run(compressor, TorchOps(), torch.from_numpy, data, moments)
    others = [
        run(compressor, TorchOps(static=True), torch.from_numpy, data, moments),
        run(compressor, TensorFlowOps(), tf.constant, data, moments),
        run(compressor, TensorFlowOps(static=True), tf.constant, data, moments),
    ]
    size = layout_for(compressor).offsets[-1] + 700
    for wire, results, states in others:
        assert wire == reference[0]
        assert states == reference[2]
        for ours, theirs in zip(results, reference[1]):
            np.testing.assert_array_equal(ours[0][: size - 1], theirs[0][: size - 1])


OTHERS = LARGEST + LEADER + QUANTIZED


@pytest.mark.parametrize("compressor", OTHERS + PHASED + INT32 + ROBUST + BALANCED, ids=repr)
def test_the_other_methods_send_the_same_bytes(compressor):
    data = gradients(1, 8, size=3, sparse=6)  # behind each warm-up and phase of these settings
    reference = run(compressor, TorchOps(), torch.from_numpy, data, None)
    others = [
        run(compressor, TorchOps(static=True), torch.from_numpy, data, None),
        run(compressor, TensorFlowOps(), tf.constant, data, None),
        run(compressor, TensorFlowOps(static=True), tf.constant, data, None),
    ]
    for wire, results, states in others:
        assert wire == reference[0]
        assert states == reference[2]
        for ours, theirs in zip(results, reference[1]):
            np.testing.assert_array_equal(ours[0], theirs[0])


def encoded(compressor, ops, layout, step, gradient, state):
    """What a rank sends first, without the header where that is apart."""
    if compressor in LARGEST:
        return encode_step(compressor, ops, layout, None, step, gradient, state)[0].body
    if compressor in LEADER:
        topk, scope = compressor.topk, Scope(layout, whole=False)
        limits = topk.limits(layout)
        r = state.memory.r + gradient
        return topk.select(ops, scope, step, r, ops.words(limits), None, sum(limits))[0]
    return compressor.encode(ops, compressor.row_groups(layout), gradient, ops.key(step, 5))[
        "codes"
    ]


@pytest.mark.parametrize("how", ["graph", "xla"])
@pytest.mark.parametrize("compressor", [c for c in ONE_OF_EACH if c in OTHERS], ids=repr)
def test_the_other_encoders_can_be_traced(compressor, how):
    layout, ops = layout_for(compressor), TensorFlowOps(static=how == "xla")
    eager = TensorFlowOps()
    data = gradients(5, 3, size=1)[:, 0]
    world = World(compressor, eager, layout, 1)
    state = compressor.init(eager, layout)
    values = [x for _, x in leaves(state)]
    traced = tf.function(
        lambda step, g, values: encoded(
            compressor, ops, layout, step, g, with_leaves(state, list(values))
        ),
        jit_compile=how == "xla",
        autograph=False,
    )
    for step, flat in enumerate(data):
        gradient = world.flat([tf.constant(x) for x in split(flat)])
        sent = traced(tf.constant(step, tf.int64), gradient, values)
        expected = encoded(compressor, eager, layout, step, gradient, state)
        assert sent.numpy().tobytes() == expected.numpy().tobytes()


@compiles_whole
@pytest.mark.parametrize("compressor", OTHERS, ids=repr)
def test_torch_compiles_the_other_encoders_whole(compressor):
    torch._dynamo.reset()  # or it gives up after some compressors
    layout, ops = layout_for(compressor), TorchOps(static=True)
    ops.table(layout, "layer_of_block")
    state = compressor.init(ops, layout)
    world = World(compressor, ops, layout, 1)
    gradient = world.flat([torch.from_numpy(x) for x in split(gradients(4, 1, 1)[0, 0])])

    def encode(gradient, *values):
        return encoded(compressor, ops, layout, 3, gradient, with_leaves(state, list(values)))

    def fresh():
        return [x.clone() for _, x in leaves(state)]

    expected = encode(gradient.clone(), *fresh())  # first: what is cached is cached before
    compiled = torch.compile(encode, fullgraph=True, backend="eager")
    assert torch.equal(compiled(gradient.clone(), *fresh()), expected)


@pytest.mark.parametrize("xla", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if c.block > 1], ids=repr)
def test_a_traced_encoder_sends_the_same_bytes(compressor, xla):
    layout = layout_for(compressor)
    data = gradients(3, 12, size=1)[:, 0]
    eager, ops = TensorFlowOps(), TensorFlowOps(static=xla)
    world = World(compressor, eager, layout, 1)
    schedule = compressor.capacity_schedule(layout)
    state = traced_state = compressor.init(eager, layout)
    traces = []

    def encode(capacity, dense, step, gradient, values):
        traces.append(1)
        level = type(chosen)(schedule.top if dense is True else 0, capacity, dense)
        before = with_leaves(state, list(values))
        encoded, after = encode_step(compressor, ops, layout, level, step, gradient, before)
        return encoded.body, encoded.sent, [x for _, x in leaves(after)]

    if xla:
        compiled = {}
    else:
        graph = tf.function(encode, autograph=False)
    for step, flat in enumerate(data):
        gradient = world.flat([tf.constant(x) for x in split(flat)])
        chosen, state = next_level(schedule, eager, state)
        encoded, state_after = encode_step(compressor, eager, layout, chosen, step, gradient, state)
        values = [x for _, x in leaves(traced_state)]
        if xla:
            key = (chosen.capacity, chosen.dense)
            if key not in compiled:
                compiled[key] = tf.function(encode, jit_compile=True, autograph=False)
            body, sent, after = compiled[key](*key, tf.constant(step, tf.int64), gradient, values)
        else:
            body, sent, after = graph(
                tf.constant(chosen.capacity, tf.int64),
                tf.constant(chosen.dense),
                tf.constant(step, tf.int64),
                gradient,
                values,
            )
        assert body.numpy().tobytes() == encoded.body.numpy().tobytes()
        assert int(sent) == int(encoded.sent)
        state = state_after._replace(
            capacity=state_after.capacity._replace(needed=eager.host(encoded.wanted))
        )
        traced_state = with_leaves(state, list(after))
        traced_state = traced_state._replace(capacity=state.capacity)
    if not xla:
        assert len(traces) == 1, "a level must not retrace"


def next_level(schedule, ops, state):
    level, after = schedule.next_level(ops, state.capacity)
    return level, state._replace(capacity=after)


@compiles_whole
@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if c.block > 1], ids=repr)
def test_torch_compiles_the_encoder_whole(compressor):
    layout, ops = layout_for(compressor), TorchOps(static=True)
    ops.table(layout, "layer_of_block")
    state = compressor.init(ops, layout)
    level, _ = compressor.capacity_schedule(layout).next_level(ops, state.capacity)
    world = World(compressor, ops, layout, 1)
    gradient = world.flat([torch.from_numpy(x) for x in split(gradients(4, 1, 1)[0, 0])])

    def encode(gradient, memory, sent):
        before = state._replace(memory=memory, sent=sent)
        encoded, after = encode_step(compressor, ops, layout, level, 3, gradient, before)
        return encoded.body, after.memory, after.sent

    def fresh():
        return type(state.memory)(*(x.clone() for x in state.memory)), state.sent.clone()

    compiled = torch.compile(encode, fullgraph=True, backend="eager")
    body, memory, sent = compiled(gradient, *fresh())
    expected, expected_memory, expected_sent = encode(gradient, *fresh())
    assert torch.equal(body, expected)
    assert torch.equal(sent, expected_sent)
    assert all(map(torch.equal, memory, expected_memory))


BACKENDS = {
    "indexed": (TorchOps, torch.from_numpy),
    "masked": (lambda: TorchOps(static=True), torch.from_numpy),
    "tensorflow": (TensorFlowOps, tf.constant),
    "static": (lambda: TensorFlowOps(static=True), tf.constant),
}


@pytest.mark.parametrize(
    ("backend", "coding"),
    [*((backend, "elias_fano") for backend in BACKENDS), ("indexed", "int32")],
)
def test_bytes_of_egc_follow_the_entropy(backend, coding):
    """Within a quarter octave, at once where it grows and 16 steps later where it shrinks."""
    (ops, make), shapes = BACKENDS[backend], ((20, 100), (3,), (15, 100))
    layout = Layout(("conv", "bias", "head"), shapes)
    compressor = EGCCompressor(K=10, momentum=0.9, entropy_interval=2, index_coding=coding)
    world, random = World(compressor, ops(), layout, 2), np.random.default_rng(5)
    rooms = compressor.capacities(layout)
    sizes = [
        compressor.payload_bytes(layout, CapacityLevel(0, capacity, False)) for capacity in rooms
    ]
    assert rooms[-1] == compressor.capacity(layout) == 200 + 1 + 150
    assert all(b <= 1.25 * a for a, b in zip(rooms, rooms[1:])) and sizes == sorted(set(sizes))
    # Of the elements of one rank and of the other so many are in the upper of two bins.
    course = [(0.5, 0.01)] * 2 + [(0.01, 0.02)] * 20 + [(0.11, 0.01)] * 2 + [(0.5, 0.3)] * 2
    used, needed = [], 0
    for step, shares in enumerate(course):
        before, flat, wanted = needed, [], []
        for share in shares:
            layers = [np.arange(n) < share * n for n in (2000, 3, 1500)]
            layers = [random.uniform(0.0, 0.4, len(x)) + random.permutation(x) for x in layers]
            layers[1][:] = 1.0
            flat.append(
                world.flat([make(x.astype("f4").reshape(s)) for x, s in zip(layers, shapes)])
            )
            entropy = -sum(q * np.log2(q) for q in (share, 1 - share))
            wanted.append(1 + sum(int(n * entropy / 10 + 0.5) for n in (2000, 1500)))
        totals = world.step(flat)
        assert np.asarray(totals[0]).tobytes() == np.asarray(totals[1]).tobytes()
        payloads = [np.asarray(request.tensor) for request in world.traffic[0]]
        assert [int(x[20:24].view("<u4")[0]) for x in payloads] == wanted
        assert len({len(x) for x in payloads}) == 1, "the ranks have taken different levels"
        used.append(rooms[sizes.index(len(payloads[0]))])
        needed = max(wanted)
        assert used[-1] >= (min(before, needed) if step else needed), "there was no room"
        if step > 20:
            assert used[-1] <= 1.25 * max(before, 16), "the room is larger than was needed"
    assert len(set(used)) == 3 and int(world.states[0].capacity.changes) == 3


def test_context_is_a_value():
    layout = Layout(("a",), ((3,),))
    assert Context(layout, 0, 2, 5) == Context(layout, 0, 2, 5)
