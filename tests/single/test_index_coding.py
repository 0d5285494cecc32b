"""Elias-Fano codes of the sparse methods' indices: fewer bytes, the same elements."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    HybridCompressor,
    PayloadError,
    SparseGDCompressor,
    StromCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import SPARSE_GD, encode_step

THRESHOLDS = [
    VarianceCompressor(alpha=1.5, moments="step"),
    HybridCompressor(tau=0.4, moments="step"),
    StromCompressor(tau=0.4, capacity="latest"),
]


def frameworks() -> list:
    """Ops with and without the C library, and what makes tensors for them."""

    def tensorflow(native):
        tf = pytest.importorskip("tensorflow")
        from hvd_gradcomp.ops.tensorflow import TensorFlowOps

        return without(TensorFlowOps(), native), lambda x: tf.constant(np.asarray(x))

    def without(ops, native):
        if not native:
            ops.native = ops.threshold_kernels = ops.topk_kernels = None
        elif ops.native is None:
            pytest.skip("without the C library")
        return ops

    def pytorch(native):
        return without(TorchOps(), native), lambda x: torch.from_numpy(np.array(x))

    names = [("torch", pytorch), ("tensorflow", tensorflow)]
    return [
        pytest.param(make, native, id=f"{name}-{'C' if native else 'plain'}")
        for name, make in names
        for native in (True, False)
    ]


def code_in_numpy(code: EliasFano, numbers: np.ndarray) -> tuple[list[int], list[int]]:
    """The definition of Elias and Fano, bit by bit; low bits by planes of 32 numbers."""
    flat = [int(x) for x in numbers.reshape(-1)]
    low = []
    for first in range(0, len(flat), 32):
        for plane in range(code.low):
            group = flat[first : first + 32]
            low.append(sum((x >> plane & 1) << lane for lane, x in enumerate(group)))
    high = [0] * -(-code.rows * code.width // 32)
    for row, numbers_of_row in enumerate(numbers):
        for i, x in enumerate(numbers_of_row):
            place = row * code.width + (int(x) >> code.low) + i
            high[place // 32] |= 1 << place % 32
    return low, high


@pytest.mark.parametrize(("make", "native"), frameworks())
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 4),
    count=st.integers(0, 70),
    universe=st.one_of(st.integers(1, 300), st.integers(10**6, 2**31)),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_code_of_elias_and_fano(make, native, rows, count, universe, seed):
    ops, of = make(native)
    random = np.random.default_rng(seed)
    numbers = np.sort(random.integers(0, universe + 1, (rows, count)), axis=1)
    code = EliasFano.of(rows, count, universe)
    payload = code.encode(ops, of(numbers))
    low, high = code_in_numpy(code, numbers)
    assert np.asarray(payload["low"]).tolist() == low
    assert np.asarray(payload["high"]).tolist() == high
    assert np.array_equal(np.asarray(code.decode(ops, payload)), numbers)
    damaged = {name: random.integers(0, 2**32, len(x)) for name, x in payload.items()}
    decoded = np.asarray(code.decode(ops, {name: of(x) for name, x in damaged.items()}))
    plain = TorchOps()
    plain.native = None
    damaged = {name: torch.from_numpy(x) for name, x in damaged.items()}
    assert np.array_equal(decoded, code.decode(plain, damaged).numpy())
    assert decoded.size == 0 or 0 <= decoded.min() <= decoded.max() <= universe
    one = EliasFano.of(1, count, universe)
    apart = one.encode_apart(ops, of(numbers))
    for row in range(rows):
        low, high = code_in_numpy(one, numbers[row : row + 1])
        assert np.asarray(apart["low"])[row].tolist() == low
        assert np.asarray(apart["high"])[row].tolist() == high
    assert np.array_equal(np.asarray(one.decode(ops, apart)), numbers)


@pytest.mark.parametrize("compressor", THRESHOLDS, ids=repr)
def test_a_sent_element_takes_the_bits_of_the_formula(compressor):
    layout = Layout(("only",), ((1 << 20,),), block=compressor.block)
    side, bits = 4 * (type(compressor) is VarianceCompressor), compressor.quantizer.bits
    for capacity in (1 << 8, 1 << 12, 3 << 13, 1 << 17):
        level = CapacityLevel(0, capacity, False)
        bound = capacity * (bits + math.log2(layout.size / capacity) + 2) / 8
        size = compressor.body_bytes(layout, level) - side
        assert bound - capacity / 8 < size <= bound + 8
        words = replace(compressor, index_coding="int32").body_bytes(layout, level) - side
        assert words == 4 * capacity


@pytest.mark.parametrize("compressor", THRESHOLDS, ids=repr)
def test_levels_end_where_places_or_a_sum_move_fewer_bytes(compressor):
    layout = Layout(("only",), ((20_000,),), block=compressor.block)
    for ranks in (1, 2, 16, 300):
        schedule = compressor.capacity_schedule(layout, ranks)
        sizes = [
            compressor.payload_bytes(layout, CapacityLevel(0, capacity, False))
            for capacity in schedule.capacities
        ]
        dense = compressor.payload_bytes(layout, CapacityLevel(0, 0, True))
        assert all(b >= a - 16 for a, b in zip(sizes, sizes[1:])), "but for whole groups of 32"
        assert not sizes or sizes[-1] <= dense
        words = replace(compressor, index_coding="int32").capacity_schedule(layout, ranks)
        assert len(schedule.capacities) > len(words.capacities) or not words.capacities
        assert schedule.capacities[: len(words.capacities)] == words.capacities


def totals(compressor, ops, of, steps=8):
    """What three ranks get in each step, and the bytes that a rank sends in all."""
    layout = Layout(("a", "b"), ((3000,), (100, 5)), block=compressor.block)
    world, random = World(compressor, ops, layout, 3), np.random.default_rng(2)
    results, sent = [], 0
    for _ in range(steps):
        flat = random.normal(0, 0.25, (3, 3500)).astype("f4")
        world_of = [[of(x[:3000]), of(x[3000:].reshape(100, 5))] for x in flat]
        reduced = world.step([world.flat(tensors) for tensors in world_of])
        results.append(np.asarray(reduced[0]).copy())
        sent += len(np.asarray(world.traffic[0][0].tensor))
    return results, sent


@pytest.mark.parametrize(("make", "native"), frameworks())
@pytest.mark.parametrize(
    "compressor",
    [
        *THRESHOLDS,
        SparseGDCompressor(density=0.02),
        DGCCompressor(density=0.02, momentum=0.9, values="int8"),
        EGCCompressor(K=40, momentum=0.0, entropy_interval=2),
    ],
    ids=repr,
)
def test_the_same_elements_arrive_in_fewer_bytes(compressor, make, native):
    """As in plain words; the first steps of thresholds differ in their capacity."""
    threshold = compressor in THRESHOLDS
    other = replace(compressor, index_coding="int32")
    ops, of = make(native)
    ours, fewer = totals(compressor, ops, of)
    theirs, bytes_ = totals(other, ops, of)
    if not threshold:
        assert all(np.array_equal(x, y) for x, y in zip(ours, theirs))
    total, before = sum(ours), sum(theirs)
    assert np.abs(total - before).max() <= 2.0 and np.corrcoef(total, before)[0, 1] > 0.8
    assert fewer < 0.75 * bytes_


@pytest.mark.parametrize("native", [True, False], ids=["C", "plain"])
@pytest.mark.parametrize(
    "compressor", [*THRESHOLDS, EGCCompressor(K=40, momentum=0.9, entropy_interval=3)], ids=repr
)
def test_sizes_that_a_graph_learns_when_it_runs(compressor, native):
    """One graph for all levels: the bytes of eager steps, and back."""
    tf = pytest.importorskip("tensorflow")
    from hvd_gradcomp.ops.tensorflow import TensorFlowOps

    if compressor.uses_moments:
        compressor = replace(compressor, alpha=0.9)  # a first step sends something
    eager, ops = TensorFlowOps(), TensorFlowOps()
    if not native:
        ops.native = ops.threshold_kernels = ops.topk_kernels = None
    layout = Layout(("a", "b"), ((3000,), (500,)), block=compressor.block)
    state = compressor.init(eager, layout)
    gradient = tf.constant(np.random.default_rng(3).normal(0, 1, layout.size), tf.float32)
    schedule = compressor.capacity_schedule(layout, 2)
    context = Context(layout, 0, 2, 3)

    @tf.function(autograph=False)
    def there_and_back(index, capacity):
        level = CapacityLevel(index, capacity, index == schedule.top)
        body = encode_step(compressor, ops, layout, level, 3, gradient, state)[0].body
        bodies = tf.stack([body, body])
        header = wire.Header(0, 0, 3, index, 0, 0)
        header, bodies = compressor.check_bodies(ops, context, level, header, bodies)
        payloads = Payloads(level, bodies, tf.ones(2))
        total = compressor.decode_sum(ops, layout, payloads, tf.zeros(layout.size))
        return body, total

    for place in (0, len(schedule.capacities) // 2, len(schedule.capacities) - 1):
        capacity = schedule.capacities[place]
        level = CapacityLevel(place, capacity, False)
        expected = encode_step(compressor, eager, layout, level, 3, gradient, state)[0].body
        body, total = there_and_back(tf.constant(place, tf.int64), tf.constant(capacity, tf.int64))
        assert body.numpy().tobytes() == expected.numpy().tobytes()
        assert 0 < np.count_nonzero(total) <= capacity


def parts_of(compressor):
    """The function that returns the parts of a body by layout and capacity."""
    return compressor.coded_parts if compressor in THRESHOLDS else compressor.parts


@pytest.mark.parametrize("compressor", [*THRESHOLDS, SPARSE_GD], ids=repr)
def test_indices_that_do_not_ascend_are_refused_and_nothing_is_lost(compressor):
    """With a checksum that is right: two elements of a rank are one and the same."""
    layout = Layout(("only",), ((4000,),), block=compressor.block)
    ops = TorchOps()

    def tamper(rank, request):
        if rank != 1 or world.steps < 3:
            return request
        frame = request.tensor.numpy().copy()
        capacity = schedule.capacities[int(frame[12:16].view("<u4")[0])]
        code = EliasFano.of(1, capacity, layout.sink)
        parts = parts_of(compressor)(layout, capacity)
        body = torch.from_numpy(frame[wire.HEADER_BYTES :])[None]
        payload = {n: x[0] for n, x in wire.unpack_body(ops, parts, body).items()}
        index = code.decode(ops, payload)
        index[0, 1] = index[0, 0]
        payload.update(code.encode(ops, index))
        words = ops.from_bytes(torch.from_numpy(frame[: wire.HEADER_BYTES - 4]), "uint32")
        body = wire.pack_body(ops, parts, payload)
        return request._replace(tensor=ops.framed(words, body))

    world = World(compressor, ops, layout, 2, average=False, tamper=tamper)
    schedule = compressor.capacity_schedule(layout, 2)
    generator = torch.Generator().manual_seed(1)

    def gradients():
        drawn = [0.3 * torch.randn(layout.size, generator=generator) for _ in range(2)]
        return [torch.where(torch.arange(layout.size) < 4000, x, 0.0) for x in drawn]

    for _ in range(3):
        world.step(gradients())
    before, last = [state.memory.r.clone() for state in world.states], gradients()
    with pytest.raises(PayloadError, match=r"rank 1 sent an index that .* does not ascend"):
        world.step([x.clone() for x in last])
    for state, r, gradient in zip(world.states, before, last):
        assert torch.equal(state.memory.r, r + gradient)


@pytest.mark.parametrize("kind", [StromCompressor, SparseGDCompressor])
def test_another_code_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"index_coding.*'elias_fano', 'int32'"):
        kind(index_coding="delta")
