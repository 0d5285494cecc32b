"""TensorFlow's operations in C: the bits of the ops, errors and no crashes, and without them."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import cli
from hvd_gradcomp.cli import doctor
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.method.capacity import PATIENCE, CapacitySchedule, CapacityState
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops import PayloadError, building
from hvd_gradcomp.ops.interface.header import Field
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Form
from hvd_gradcomp.ops.scope import Scope
from hvd_gradcomp.ops.tensorflow import TensorFlowOps, library
from hvd_gradcomp.testing import World
from tests.methods import (
    DROPPING,
    HYBRID,
    LARGEST,
    QUANTIZED,
    SPARSE_GD,
    STROM,
    VARIANCE,
    VARIANCE_FED_BACK,
    WORDS,
)

built = pytest.mark.skipif(
    TensorFlowOps().native is None, reason="the operations are not built: hvd-gradcomp build"
)
FEW = settings(max_examples=25, deadline=None)


def reference_ops() -> TensorFlowOps:
    ops = TensorFlowOps()
    ops.native = ops.threshold_kernels = ops.topk_kernels = None
    return ops


def accumulated(x, y):
    return TensorFlowOps().native("accumulate", (x, y), [(tf.float32, x.shape)])


def given_as_unknown(function, arguments):
    """Traced with no extent known."""
    spec = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in arguments]
    return tf.function(function, input_signature=spec, autograph=False)(*arguments)


def agree(function, *arguments, graph=True):
    """`function(ops, *arguments)` gives the same bits in C, in a graph too."""
    expected = tf.nest.flatten(function(reference_ops(), *arguments))
    ops = TensorFlowOps()
    ways = [function(ops, *arguments)]
    if graph:
        ways.append(given_as_unknown(lambda *a: function(ops, *a), arguments))
    for result in ways:
        for ours, theirs in zip(tf.nest.flatten(result), expected):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert ours.numpy().tobytes() == theirs.numpy().tobytes()


def test_a_checksum_of_unknown_length_needs_no_operation():
    arguments = tf.constant([[1, 2, 3]], tf.int64), tf.constant([[4, 5, 6, 7]], tf.uint8)
    unknown = given_as_unknown(lambda *a: reference_ops().checksum(*a), arguments)
    assert unknown.numpy() == reference_ops().checksum(*arguments).numpy()


@st.composite
def grouped(draw):
    """Bands, and how many elements there are: with gaps, and what is in no band at the end."""
    row_groups, end = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = end + draw(st.integers(0, 40))
        run = RowGroup(start, draw(st.integers(1, 4)), draw(st.integers(1, 200)))
        row_groups.append(run)
        end = run.end
    return RowGroups(tuple(row_groups)), (end // 32 + draw(st.integers(1, 2))) * 32


def noise(seed, *shape):
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * 10.0 ** random.uniform(-3, 3)
    x = x * (random.random(shape) < 0.9) + 0.0  # the sign of a zero in no band is nobody's affair
    return tf.constant(x.astype(np.float32))


def codes(seed, *shape):
    return tf.constant(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


SEEDS = st.integers(0, 1 << 30)


@built
@FEW
@given(st.lists(st.integers(0, 70), max_size=3), SEEDS)
def test_accumulating(shape, seed):
    x, y = noise(seed, *shape), noise(seed + 1, *shape)
    agree(lambda ops, x, y: ops.accumulate(ops.accumulate(x, y), x), x, y)
    np.testing.assert_array_equal(accumulated(x, y), x + y)


@built
@FEW
@given(grouped(), st.integers(2, 8), SEEDS)
def test_encoding(where, bits, seed):
    row_groups, size = where
    x, scale = noise(seed, size), tf.abs(noise(seed + 1, row_groups.groups))
    agree(lambda ops, x: ops.group_maxima(row_groups, x), x)
    agree(lambda ops, x: ops.group_squares(row_groups, x), x)
    agree(lambda ops, x: ops.encode_signs(row_groups, x), x)
    agree(
        lambda ops, x, scale: ops.encode_levels(row_groups, x, scale, bits, ops.key(3, seed)),
        x,
        scale,
    )


@built
@FEW
@given(grouped(), st.integers(2, 8), st.integers(0, 4), st.booleans(), st.integers(0, 3), SEEDS)
def test_adding(where, bits, ranks, from_zero, beyond, seed):
    row_groups, size = where
    out, weights = noise(seed, size), noise(seed + 1, ranks)
    side = [tf.abs(noise(seed + i, ranks, row_groups.groups + beyond)) for i in (2, 3)]

    def levels(ops, out, packed, scale, weights):
        base = None if from_zero else out
        return ops.add_levels(row_groups, base, out, packed, scale, bits, weights)

    def signs(ops, out, packed, above, below, weights):
        base = None if from_zero else out
        return ops.add_signs(row_groups, base, out, packed, above, below, weights)

    # Plain ops want the extents that Python loops over.
    agree(levels, out, codes(seed, ranks, size * bits // 8), side[0], weights, graph=False)
    agree(signs, out, codes(seed, ranks, size // 8), *side, weights, graph=False)


@built
@FEW
@given(st.integers(0, 5), st.integers(1, 32), SEEDS)
def test_packing(groups, bits, seed):
    values = np.random.default_rng(seed).integers(0, 1 << bits, (groups, 32))
    planes = reference_ops().bit_planes(tf.constant(values), bits)
    agree(lambda ops, x: ops.bit_planes(x, bits), tf.constant(values))
    agree(lambda ops, x: ops.from_bit_planes(x), planes, graph=False)


@built
@FEW
@given(st.integers(0, 3), st.integers(0, 40), st.integers(0, 8), st.booleans(), SEEDS)
def test_frames(rows, words, count, damaged, seed):
    random = np.random.default_rng(seed)
    body = codes(seed, 4 * words)
    front = tf.constant(random.integers(0, 1 << 32, count))
    agree(lambda ops, front, body: ops.framed(front, body), front, body)
    agree(lambda ops, body: ops.weighted_sum(body), body)
    frame = reference_ops().framed(front, body).numpy()
    if damaged:
        frame[random.integers(len(frame))] ^= 1 << random.integers(8)
    fields = [
        Field(i, int(low), int(random.integers(1, 33 - low)))
        for i, low in enumerate(random.integers(0, 32, count))
    ]
    expected = [int(w) >> f.low & (1 << f.bits) - 1 for w, f in zip(front.numpy(), fields)]
    many = tf.constant(np.tile(frame, (rows, 1)))
    agree(lambda ops, many: ops.examine(many, count, fields, expected), many, graph=False)
    if rows and not damaged:
        values = TensorFlowOps().examine(many, count, fields, expected)[1]
        assert all(bool(tf.reduce_all(x)) for x in values)


@built
@pytest.mark.parametrize("shape", [(0,), (1,), (1000,), (33, 7)])
@pytest.mark.parametrize("what", [1.0, 3.4028235e38, float("nan"), -float("nan"), float("-inf")])
def test_finiteness(shape, what):
    x = np.full(shape, -3.4e38, np.float32)
    x.flat[-1:] = what
    agree(lambda ops, x: tf.constant(ops.finite(x)), tf.constant(x), graph=False)
    assert TensorFlowOps().finite(tf.constant(x)) == (bool(np.isfinite(x).all()))


@built
@FEW
@given(st.integers(0, 1 << 40), st.integers(0, (1 << 32) - 1))
def test_keys(step, salt):
    agree(lambda ops, step: ops.key(step, salt), tf.constant(step, tf.int64))


@built
@pytest.mark.parametrize("more", [0, 4, 64])
def test_payloads_may_be_longer_than_the_vector(more):
    """A bucket that is cut into shards is padded before it is packed."""
    row_groups, ops = RowGroups((RowGroup(0, 2, 32),)), TensorFlowOps()
    x, sides, weights = noise(1, 64), [tf.abs(noise(i, 2, 2)) for i in (2, 3)], noise(4, 2)
    signs, levels = codes(5, 2, 8 + more), codes(6, 2, 32 + more)
    for start in (None, x):
        ours = ops.add_signs(row_groups, start, x, signs, *sides, weights)
        theirs = reference_ops().add_signs(row_groups, start, x, signs[:, :8], *sides, weights)
        np.testing.assert_array_equal(ours, theirs)
        ours = ops.add_levels(row_groups, start, x, levels, sides[0], 4, weights)
        theirs = reference_ops().add_levels(
            row_groups, start, x, levels[:, :32], sides[0], 4, weights
        )
        np.testing.assert_array_equal(ours, theirs)


@built
def test_a_slice_may_begin_anywhere():
    """TensorFlow hands over a view of the larger tensor, which C cannot read words from."""
    row_groups, ops = RowGroups((RowGroup(0, 2, 32),)), TensorFlowOps()
    for start in range(1, 4):
        data = codes(start, 64 + start)[start:]
        assert int(ops.weighted_sum(data)) == int(reference_ops().weighted_sum(data))
        packed = tf.reshape(codes(start, 8 + start)[start:], (1, 8))
        arguments = (
            row_groups,
            None,
            noise(1, 64),
            packed,
            noise(2, 1, 2),
            noise(3, 1, 2),
            noise(4, 1),
        )
        np.testing.assert_array_equal(
            ops.add_signs(*arguments), reference_ops().add_signs(*arguments)
        )


@built
def test_a_sum_leaves_what_somebody_else_holds():
    row_groups, ops = RowGroups((RowGroup(0, 1, 64),)), TensorFlowOps()
    base = noise(1, 64)
    before = base.numpy().copy()

    @tf.function(autograph=False)
    def both(base):
        arguments = (codes(2, 1, 32), tf.ones((1, 1)), 4, tf.ones((1,)))
        return ops.add_levels(row_groups, base, base, *arguments), base + 1.0

    total, other = both(base)
    assert not np.array_equal(total, before)
    np.testing.assert_array_equal(base, before)
    np.testing.assert_array_equal(other, before + 1.0)


def filled(function, arguments):
    """The function of the tensors among its arguments."""

    def of_tensors(*tensors):
        rest = iter(tensors)
        return function(*(next(rest) if isinstance(a, tf.Tensor) else a for a in arguments))

    return of_tensors


@built
@FEW
@given(
    st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 700]), min_size=1, max_size=4).filter(any),
    st.integers(1, 9),
    SEEDS,
)
def test_histograms_of_layers(sizes, bins, seed):
    layout = Layout(tuple(map(str, range(len(sizes)))), tuple((size,) for size in sizes))
    mask = np.zeros(layout.size, np.float32)  # padding is zero
    for offset, size in zip(layout.offsets, sizes):
        mask[offset : offset + size] = 1
    agree(lambda ops, x: ops.layer_histograms(layout, x, bins), noise(seed, layout.size) * mask)


@built
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_wrong_shapes_raise(how):
    ops = TensorFlowOps()
    layout = Layout(("weight",), ((60,),))
    row_groups, key = RowGroups((RowGroup(0, 2, 32),)), tf.constant([1, 2], tf.int64)
    x, scale, weights = noise(1, 64), noise(2, 1, 2), noise(3, 1)
    packed, signs = codes(4, 1, 32), codes(5, 1, 8)
    wrong = [
        (accumulated, (x, x[:63])),
        (ops.group_maxima, (row_groups, x[:63])),
        (ops.group_maxima, (row_groups, x[None])),
        (ops.group_squares, (row_groups, x[:0])),
        (ops.layer_histograms, (layout, x[:59], 2)),
        (ops.layer_histograms, (layout, x, 0)),
        (ops.encode_signs, (row_groups, noise(1, 65))),
        (ops.encode_levels, (row_groups, x, scale[0, :1], 4, key)),
        (ops.encode_levels, (row_groups, x, scale[0], 9, key)),
        (ops.encode_levels, (row_groups, x, scale[0], 4, key[:1])),
        (ops.add_levels, (row_groups, None, x, packed[:, :28], scale, 4, weights)),
        (ops.add_levels, (row_groups, None, x, codes(4, 1, 33), scale, 4, weights)),
        (ops.add_levels, (row_groups, None, x, packed, scale[:, :1], 4, weights)),
        (ops.add_levels, (row_groups, None, x, packed, scale, 4, noise(3, 2))),
        (ops.add_levels, (row_groups, None, x[:32], packed, scale, 4, weights)),
        (ops.add_signs, (row_groups, None, x, signs[0], scale, scale, weights)),
        (ops.add_signs, (row_groups, None, x, signs, scale, scale[:, :1], weights)),
        (ops.group_maxima, (RowGroups((RowGroup(0, 1, 32), RowGroup(16, 1, 32))), x)),
        (ops.group_maxima, (RowGroups((RowGroup(-32, 1, 32),)), x)),
        (ops.group_maxima, (RowGroups((RowGroup(0, 1 << 40, 1 << 40),)), x)),
        (ops.bit_planes, (tf.zeros((2, 31), tf.int64), 4)),
        (ops.bit_planes, (tf.zeros((2, 32), tf.int64), 33)),
        (ops.from_bit_planes, (tf.zeros((2, 33), tf.int64),)),
        (ops.weighted_sum, (codes(1, 6),)),
        (ops.framed, (key, codes(1, 6))),
        (ops.examine, (codes(1, 1, 8), 2, [Field(0)], [1])),
        (ops.examine, (codes(1, 1, 32), 2, [Field(2)], [1])),
        (ops.examine, (codes(1, 1, 32), 2, [Field(0)], [1, 2])),
    ]
    for function, arguments in wrong:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError, PayloadError)):
            if how == "eager":
                function(*arguments)
            else:
                tensors = [a for a in arguments if isinstance(a, tf.Tensor)]

                given_as_unknown(filled(function, arguments), tensors)


@built
def test_an_operation_is_used_in_a_graph_and_none_for_xla():
    def operations(ops):
        row_groups = RowGroups((RowGroup(0, 1, 64),))
        function = tf.function(lambda x: ops.group_maxima(row_groups, x), autograph=False)
        graph = function.get_concrete_function(noise(1, 64)).graph
        return {o.type for o in graph.get_operations() if o.type.startswith("Gradcomp")}

    assert operations(TensorFlowOps()) == {"Gradcomp"}
    assert operations(TensorFlowOps(static=True)) == set()


@pytest.mark.parametrize("compressor", QUANTIZED, ids=repr)
def test_a_step_with_verbs_alone(compressor):
    layout = Layout(("a", "b"), ((40, 7), (90,)), block=compressor.block)
    worlds = [World(compressor, ops, layout, 3) for ops in (TensorFlowOps(), reference_ops())]
    for step in range(3):
        ranks = [[noise(step * 3 + rank, *s) for s in layout.shapes] for rank in range(3)]
        ours, theirs = (world.step([world.flat(r) for r in ranks]) for world in worlds)
        np.testing.assert_array_equal(ours, theirs)


# -- fused, and what lays layers into buckets -------------------------------------------------


def alike(fused, reference):
    for one, other in zip(fused.states, reference.states):
        for (name, x), (_, y) in zip(leaves(one), leaves(other)):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name
    for ours, theirs in zip(fused.traffic, reference.traffic):
        for request, verbatim in zip(ours, theirs):
            assert request.tensor.numpy().tobytes() == verbatim.tensor.numpy().tobytes()


@built
@pytest.mark.parametrize("compressor", WORDS + LARGEST, ids=repr)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 256, 700, 5000]), min_size=1, max_size=3),
    ranks=st.integers(1, 4),
    moments=st.booleans(),
    scale=st.sampled_from([1e-30, 0.3, 3.0, 1e14]),
    seed=SEEDS,
)
@settings(max_examples=2, deadline=None)
def test_passes_do_what_the_verbs_do(compressor, sizes, ranks, moments, scale, seed):
    """Steps of few elements, of many on the dense level, and of few again."""
    layout = Layout(tuple(f"layer{i}" for i in range(len(sizes))), tuple((n,) for n in sizes))
    fused, reference = (
        World(compressor, o, layout, ranks) for o in (TensorFlowOps(), reference_ops())
    )
    random = np.random.default_rng(seed)
    for share in (0.002, 1.0, 1.0, 0.1):

        def drawn(size, share=share):
            kept = (random.random(size) < share) + 1e-3
            return tf.constant(scale * kept * random.standard_normal(size), tf.float32)

        gradients = [fused.flat([drawn(n) for n in sizes]) for _ in range(ranks)]
        extra = {}
        if moments and compressor.uses_moments:
            extra["moment"] = [g * g / 2 for g in gradients]
        for ours, theirs in zip(fused.step(gradients, **extra), reference.step(gradients, **extra)):
            assert ours.numpy().tobytes() == theirs.numpy().tobytes()
        alike(fused, reference)


@built
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize(
    "compressor",
    [
        replace(compressor, index_coding="int32")
        for compressor in (VARIANCE_FED_BACK, HYBRID, STROM, SPARSE_GD, DROPPING)
    ],
    ids=repr,
)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_no_index_is_trusted(compressor, how, data):
    """Bodies that nobody wrote: the sum of the plain ops, or an error, whatever the bytes.

    An error too if the indices of top-k do not ascend.
    """
    layout, dense = Layout(("a", "b"), ((300,), (200,))), data.draw(st.booleans())
    level = CapacityLevel(0, 20, dense)
    size = compressor.body_bytes(layout, level)
    payloads = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=3))
    bodies = np.array([list(body) for body in payloads], np.uint8)
    if (
        isinstance(compressor, ThresholdCompressor) and data.draw(st.booleans()) and not dense
    ):  # most random indices lie beyond the bucket
        words = bodies[:, size - 80 :].reshape(-1, 20, 4)
        words[:, :, 1] %= 3
        words[:, :, 2] = 0
        words[:, :, 3] &= 0xF0 if compressor.rule.powers else 0x80
    weights = tf.fill((len(payloads),), 0.5)

    def total(ops, bodies):
        out = tf.fill((layout.size,), 7.0)
        try:
            if how == "eager" or ops.native is None:
                return compressor.decode_sum(ops, layout, Payloads(level, bodies, weights), out)
            sum_ = tf.function(
                lambda b: compressor.decode_sum(ops, layout, Payloads(level, b, weights), out)
            )
            return sum_(bodies)
        except (PayloadError, tf.errors.InvalidArgumentError) as error:
            return error

    ours, theirs = (
        total(TensorFlowOps(), tf.constant(bodies)),
        total(reference_ops(), tf.constant(bodies)),
    )
    if isinstance(ours, tf.Tensor):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()
    else:
        assert not (isinstance(theirs, tf.Tensor) and isinstance(compressor, ThresholdCompressor))
        assert "an index points outside of its bucket, or does not ascend" in str(ours)
        assert isinstance(ours, PayloadError) == (how == "eager")


@built
def test_kernels_refuse_what_does_not_fit():
    layout, compressor = Layout(("a",), ((300,),)), VARIANCE
    fused, rule = TensorFlowOps().threshold_kernels, VARIANCE.rule
    level = CapacityLevel(0, 20, False)
    r, moment, weights = noise(1, 512), tf.abs(noise(2, 512)), noise(3, 1)
    body = codes(4, 1, compressor.body_bytes(layout, level))
    sent = tf.zeros((1,), tf.int64)
    wrong = [
        (fused.write, (level, 0, (r[:-1], moment), r, moment, sent)),
        (fused.write, (level, 0, (r, moment), r[:-1], moment, sent)),
        (fused.write, (level, 0, (r, moment), r, moment[:-1], sent)),
        (fused.write, (level, -1, (r, moment), r, moment, sent)),
        (fused.write, (CapacityLevel(0, 513, False), 0, (r, moment), r, moment, sent)),
        (fused.add, (level, body[:, :-4], weights, r)),
        (fused.add, (level, body, noise(1, 2), r)),
        (fused.add, (level, body, weights, r[:-1])),
        (fused.add, (CapacityLevel(0, 0, True), body, weights, r)),
    ]
    for function, arguments in wrong:
        with pytest.raises((tf.errors.InvalidArgumentError, PayloadError)):
            function(rule, layout, *arguments)
    fused, one = TensorFlowOps().topk_kernels, tf.constant([1])
    form = Form(SPARSE_GD.capacity(layout))
    one, hint, body = tf.cast(one, tf.int64), weights, codes(4, 1, form.size)
    wrong = [
        (form, 0, one, (1,), hint, (r,), r[:-1]),
        (form, 0, one, (1,), hint, (r[:-1],), r),
        (form, 0, -one, (1,), hint, (r,), r),
        (form, 0, one, (1,), noise(3, 2), (r,), r),
        (form, -1, one, (1,), hint, (r,), r),
        (form._replace(capacity=1 << 20), 0, one, (1,), hint, (r,), r),
        (form._replace(capacity=-1), 0, one, (1,), hint, (r,), r),
        (form._replace(valued=2), 0, one, (1,), hint, (r,), r),
    ]
    for arguments in wrong:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            fused.write(SPARSE_GD.rule, Scope(layout, False), *arguments, one)
    for arguments in ((body[:, :-4], weights, r), (body, noise(1, 2), r), (body, weights, r[:-1])):
        with pytest.raises((tf.errors.InvalidArgumentError, PayloadError)):
            fused.add(layout, form, *arguments)
    for other in (form._replace(capacity=form.capacity + 1), form._replace(valued=False)):
        with pytest.raises((tf.errors.InvalidArgumentError, PayloadError)):
            fused.add(layout, other, body, weights, r)
    for arguments in (
        (body[0], r[:-1], r),
        (body[0], r, r[:-1]),
        (body[0, :-4], r, r),
        (body, r, r),
    ):
        with pytest.raises((tf.errors.InvalidArgumentError, PayloadError)):
            fused.values(layout, form, *arguments)
    for total in (noise(1, form.capacity - 1), noise(1, form.capacity + 1)):
        with pytest.raises((tf.errors.InvalidArgumentError, PayloadError)):
            fused.replace(layout, form, body[0], total, 0.5, r, r)


@built
@given(
    capacities=st.lists(st.integers(1, 50), max_size=6, unique=True).map(sorted),
    state=st.tuples(*[st.integers(0, n) for n in (9, 20, 9, 60, 100)]),
)
@settings(max_examples=200, deadline=None)
def test_both_choose_the_same_levels(capacities, state):
    schedule = CapacitySchedule(capacities)
    before = CapacityState(*(tf.constant(x, tf.int64) for x in state))
    chosen, after = schedule.next_level(reference_ops(), before)
    level, capacity, dense, steps_unneeded, highest, changes = TensorFlowOps()._climb(
        capacities, PATIENCE, before
    )
    assert (chosen.index, chosen.capacity, chosen.dense) == (level, capacity, dense)
    assert (after.steps_unneeded, after.highest) == (steps_unneeded, highest)
    assert after.changes == changes


def few(shape):
    return prod(shape) < 9999


@given(
    shapes=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 3, 16, 33]), max_size=5).filter(few),
        min_size=1,
        max_size=4,
    ),
    table=st.integers(0, 4),
    block=st.sampled_from([1, 32, 256]),
    dtype=st.sampled_from(["float32", "float16"]),
    turned=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_flat_and_back(shapes, table, block, dtype, turned, seed):
    """With the outputs first, or as they are; a table of embeddings is not turned."""
    names = tuple(f"{i}/{'embeddings' if i == table else 'kernel'}" for i in range(len(shapes)))
    layout = Layout(names, tuple(map(tuple, shapes)), dtype, block, filters_last=True)
    layout = layout.with_outputs_first() if turned else layout
    assert layout.stored == tuple(map(tuple, shapes))
    values = [noise(seed + i, *shape) for i, shape in enumerate(shapes)]
    missing = seed % (len(shapes) + 1)
    optional = [None if i == missing else tf.cast(x, dtype) for i, x in enumerate(values)]

    def there_and_back(ops, *present):
        rest = iter(present)
        all_ = [None if i == missing else next(rest) for i in range(len(shapes))]
        flat = ops.flatten(layout, all_, dtype)
        return [flat, *ops.cut(layout, flat)]

    tensors = [x for x in optional if x is not None]
    agree(there_and_back, *tensors)
    flat, *pieces = there_and_back(TensorFlowOps(), *tensors)
    assert flat.shape == (layout.size,)
    expected = np.zeros(layout.size, dtype)
    for i, (start, size, shape, x) in enumerate(
        zip(layout.offsets, layout.sizes, layout.shapes, optional)
    ):
        x = tf.zeros(shapes[i], dtype) if x is None else x
        np.testing.assert_array_equal(pieces[i], x)
        axes = list(range(x.ndim))
        if turned and i != table and len(axes) > 1:
            x = tf.transpose(x, axes[:-3:-1] + axes[:-2])
        assert x.shape == shape
        expected[start : start + size] = np.reshape(x, -1)
    np.testing.assert_array_equal(flat, expected)


@built
@pytest.mark.parametrize(
    "changed",
    [
        {"axes": [6, 10]},
        {"axes": [6, 9, 1]},
        {"axes": [-6, -10, 1]},
        {"axes": [1 << 32, 1 << 32, 1]},
        {"offsets": [5]},
        {"offsets": [-1]},
    ],
    ids=repr,
)
def test_pieces_that_do_not_fit_raise(changed):
    native, x = TensorFlowOps().native, tf.zeros((64,))
    how = {"offsets": [0], "axes": [6, 10, 1], **changed}
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        native.flatten([x[:60]], size=64, **how)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        native.cut(x, count=1, shapes=[(10, 6)], **how)


def histogram_by(lengths, ints, at, computed) -> tf.Tensor:
    """[bins, 1], of five values in one layer, which is a band of three integers; then the bins."""
    return library().gradcomp(
        inputs=[tf.constant([0.5, 2, 2, 8, 100])],
        computed=[tf.constant(some, tf.int64) for some in computed],
        kernel="layer_histograms",
        lengths=lengths,
        ints=ints,
        at=at,
        floats=[],
        Tout=[tf.int64],
        shapes=[None],
    )[0]


@built
@pytest.mark.parametrize(
    "changed",
    [
        {"lengths": [3]},
        {"lengths": [5, -1]},
        {"lengths": [1 << 62, -1]},
        {"lengths": [-1, -1]},
        {"lengths": [-1, 3]},
        {"lengths": [4, -1]},
        {"at": [4]},
        {"at": [-1]},
        {"at": [0]},
        {"computed": [[7]]},
        {"at": [0, 1], "computed": [[7]]},
        {"at": [0], "computed": [[7, 7]]},
    ],
    ids=repr,
)
def test_integers_in_other_places_than_a_kernel_takes_them_raise(changed):
    known = {"lengths": [3, -1], "ints": [0, 1, 5, 40], "at": [], "computed": []}
    assert int(tf.reduce_sum(histogram_by(**known))) == 5
    with pytest.raises(tf.errors.InvalidArgumentError):
        histogram_by(**{**known, **changed})


@built
def test_integers_are_the_same_known_or_computed():
    native = TensorFlowOps().native

    def histogram(band, bins):
        arguments = band, tf.constant([0.5, 2, 2, 8, 100])
        return native("layer_histograms", arguments, [(tf.int64, (None, 1))], (bins,))

    expected = histogram([0, 1, 5], 40)
    for band in ([0, 1, 5], [tf.constant(0), 1, tf.constant(5, tf.int64)]):
        for bins in (40, tf.constant(40)):
            for wrap in (lambda x: x, partial(tf.function, autograph=False)):
                counts = wrap(partial(histogram, band, bins))()
                assert counts.numpy().tolist() == expected.numpy().tolist()


# -- where they are not built ------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of the sources alone."""
    for name in (*building.NATIVE, *building.HEADERS, building.OPERATIONS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(building.HERE / name, tmp_path / name)
    monkeypatch.setattr(building, "HERE", tmp_path)
    monkeypatch.delenv("HVD_GRADCOMP_NATIVE", raising=False)
    return tmp_path


def test_without_a_library_it_is_reference_ops(elsewhere, caplog):
    caplog.set_level(logging.INFO, "hvd_gradcomp")
    assert library.__wrapped__() is None
    assert "`hvd-gradcomp build` builds them" in caplog.text


def test_one_for_another_tensorflow_is_not_loaded(elsewhere, caplog):
    (elsewhere / "_tensorflow-1.15.0-01234567.so").write_text("never looked at")
    assert building.others(tf.__version__) == ["1.15.0"]
    assert library.__wrapped__() is None
    assert "only for 1.15.0" in caplog.text


def test_one_of_another_source_is_said_and_left_out(elsewhere, caplog):
    (elsewhere / f"_tensorflow-{tf.__version__}-01234567.so").write_text("never looked at")
    assert library.__wrapped__() is None
    assert f"not built for TensorFlow {tf.__version__} and the present source" in caplog.text


def test_one_that_does_not_load_is_said_and_left_out(elsewhere, caplog):
    (elsewhere / building.operations(tf.__version__)).write_text("no library")
    assert library.__wrapped__() is None
    assert "hvd-gradcomp build --anew" in caplog.text


def test_it_can_be_left_out(monkeypatch):
    monkeypatch.setenv("HVD_GRADCOMP_NATIVE", "0")
    assert library.__wrapped__() is None


def test_doctor_says_what_is_missing(elsewhere, monkeypatch):
    (framework,) = (f for f in doctor._FRAMEWORKS if f.name == "tensorflow")

    def findings(operations, version="2.21.0"):
        return list(doctor._operations({framework: {"version": version, "operations": operations}}))

    assert [f.mark for f in findings(True)] == ["ok"]
    (missing,) = findings(False)
    assert (missing.mark, missing.remedy.splitlines()[-1]) == ("warn", "hvd-gradcomp build")
    assert missing.fact.startswith("not built: on a CPU compression is slower")
    (elsewhere / "_tensorflow-2.20.0-01234567.so").touch()
    (other,) = findings(False)
    assert other.fact.startswith("built for 2.20.0, installed is 2.21.0: ")
    (elsewhere / building.operations("2.21.0")).touch()
    (broken,) = findings(False)
    assert broken.remedy.splitlines()[-1] == "hvd-gradcomp build --anew"
    monkeypatch.setenv("PATH", "")
    assert "build-essential" in findings(False)[0].remedy
    monkeypatch.setenv("HVD_GRADCOMP_NATIVE", "0")
    assert findings(False) == []


def test_a_build_that_fails_says_why(elsewhere, monkeypatch):
    monkeypatch.setattr(building, "_tensorflow", lambda: ("2.21.0", [], []))
    broken, *others = building.NATIVE
    (elsewhere / broken).write_text("int broken(\n")
    for name in others:  # a compiler goes on to the next file, and these would take it long
        (elsewhere / name).write_text("")
    with pytest.raises(building.BuildError, match=f"(?s)fails with 1:.*{broken}"):
        building.build_operations(elsewhere)
    result = CliRunner().invoke(cli.main, ["build"])
    assert result.exit_code == 1
    assert "the C library cannot be built" in result.output
    sources = {*building.NATIVE, *building.HEADERS, building.OPERATIONS}
    left = {str(p.relative_to(elsewhere)) for p in elsewhere.rglob("*.*")}
    assert left == sources
    monkeypatch.setenv("PATH", "")
    with pytest.raises(building.BuildError, match="there is no compiler"):
        building.build_operations(elsewhere)
