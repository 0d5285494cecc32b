"""The laws of ALGORITHMS: nothing is lost, replicas agree, bytes equal the formula, linearity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    DeMoCompressor,
    DGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NoneCompressor,
    OkTopKCompressor,
    SparseGDCompressor,
    StromCompressor,
    robust,
)
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import (
    BALANCED,
    EVERY,
    INT32,
    LEARNED,
    LINEAR,
    OUTSIDE,
    PHASED,
    PRODUCTS,
    ROBUST,
    ROUNDED,
    TODAY,
    WORDS,
    decode_step,
)

RANKS = st.integers(1, 8)
SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)
SEEDS = st.integers(0, 2**32 - 1)
FAST = settings(max_examples=25, deadline=None)


def layout_of(shapes, compressor) -> Layout:
    return Layout(
        tuple(f"layer{i}" for i in range(len(shapes))), tuple(shapes), block=compressor.block
    )


def draw(random, shapes, ops, scale=1.0):
    """Gradients with zeros, repeated values and a wide spread of magnitudes."""
    tensors = []
    for shape in shapes:
        x = random.standard_normal(shape) * scale * 10.0 ** random.uniform(-3, 3)
        x = np.where(random.random(shape) < 0.2, 0.0, x)
        x = np.where(random.random(shape) < 0.2, np.round(x), x)
        tensors.append(torch.from_numpy(x.astype(np.float32)).to(ops.device))
    return tensors


def sent_by(world, rank):
    """What this rank put on the wire, decoded alone."""
    compressor, ops, layout = world.compressor, world.ops, world.layout
    buffer, level = world.traffic[0][rank].tensor, level_of(world)
    if level.summed:
        pieces = world.traffic[1][rank].tensor.split(list(layout.sizes))
        return world.flat([piece.view(s) for piece, s in zip(pieces, layout.shapes)])
    one = torch.ones(1, device=ops.device)
    out = torch.empty(layout.size, device=ops.device)
    return decode_step(compressor, ops, layout, Payloads(level, buffer[None, 32:], one), out)


def level_of(world):
    """The level of the last step, by its headers."""
    schedule = world.compressor.capacity_schedule(world.layout, world.size)
    index = int(world.traffic[0][0].tensor[12:16].cpu().view(torch.int32))
    dense = index == schedule.top
    return CapacityLevel(index, (*schedule.capacities, 0)[index], dense, dense and schedule.summed)


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
@given(shapes=SHAPES, seed=SEEDS, size=RANKS)
@FAST
def test_nothing_is_lost(compressor, shapes, seed, size):
    check_nothing_is_lost(compressor, TorchOps(), shapes, seed, size, steps=6)


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
def test_nothing_is_lost_on_this_device(compressor, torch_ops):
    check_nothing_is_lost(compressor, torch_ops, ((40, 9), (7,), (600,)), 5, 3, steps=20)


def check_nothing_is_lost(compressor, ops, shapes, seed, size, steps):
    layout = layout_of(shapes, compressor)
    world = World(compressor, ops, layout, size)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        before = [s.memory[0].clone() for s in world.states]
        gradients = [world.flat(draw(random, shapes, ops)) for _ in range(size)]
        moments = {}
        if compressor.uses_moments:
            moments["moment"] = [g * g * 0.1 for g in gradients]
        totals = world.step(gradients, **moments)
        for rank in range(size):
            pending = before[rank] + gradients[rank]
            kept, sent = world.states[rank].memory[0], sent_by(world, rank)
            touched = sent != 0
            assert torch.equal(kept[~touched], pending[~touched]), "settled without being sent"
            if isinstance(compressor, (HybridCompressor, StromCompressor)):
                assert torch.equal(kept, pending - sent)
            elif compressor.feedback_rounding:
                assert torch.equal(kept + sent, pending)
            else:  # rounding is dropped by design: within the closer power of two
                assert (kept[touched] == 0).all()
                ratio = pending[touched] / sent[touched]
                assert ((ratio >= 0.75) & (ratio < 2.0)).all()
        for total in totals:
            assert torch.equal(total, totals[0]), "replicas differ"


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
@given(shapes=SHAPES, seed=SEEDS, size=RANKS)
@FAST
def test_bytes_equal_the_formula(compressor, shapes, seed, size):
    ops, layout = TorchOps(), layout_of(shapes, compressor)
    world = World(compressor, ops, layout, size)
    random = np.random.default_rng(seed)
    for _ in range(5):
        world.step([world.flat(draw(random, shapes, ops)) for _ in range(size)])
        level = level_of(world)
        side = 4 * math.ceil(len(shapes) / 4) if "Variance" in repr(compressor) else 0
        places = layout.size * compressor.quantizer.dense_bits // 8
        words = 4 * level.capacity
        if compressor.index_coding == "elias_fano" and not level.dense:
            k, groups = level.capacity, math.ceil(level.capacity / 32)
            low = int(math.log2(max((layout.size - 1) / k, 1)))
            high = math.ceil((k + ((layout.size - 1) >> low)) / 32)
            words = 4 * (groups * low + high + groups * compressor.quantizer.bits)
        body = side + (places if level.dense else words)
        sent = 32 + (4 * sum(map(math.prod, shapes)) if level.summed else body)
        assert len(world.traffic) == 1 + level.summed
        for requests in zip(*world.traffic):
            assert sum(r.tensor.numel() * r.tensor.element_size() for r in requests) == sent
        assert compressor.payload_bytes(layout, level) == sent


# Methods in which layers compete, as in their papers: for room in a payload, for places in a choice
# over the model, or for a rank's norm.
COMPETING = [*WORDS, *INT32[:2], *PHASED, *BALANCED, ROBUST[1]]
COMPETING += [c for c in TODAY + EVERY + ROUNDED if isinstance(c, OkTopKCompressor)]
COMPETING += [c for c in EVERY + ROUNDED if isinstance(c, GradientDroppingCompressor)]
# There all is chosen, and what is left of the law is about values.
CHOSEN = [
    *[GradientDroppingCompressor(ratio=1e-6, values=values) for values in ("int8", "int4", "sign")],
    *[OkTopKCompressor(1.0, values, "allgather") for values in ("int8", "int2", "sign")],
    *[OkTopKCompressor(1.0, values, "two_shot", 2.0) for values in ("int8", "int4", "sign")],
    *[SparseGDCompressor(0.1, values=values) for values in ("bfloat16", "int4", "int2", "sign")],
    *[ChunkedTopKCompressor(64, 8, values, 0.9) for values in ("int4", "sign")],
    *[ChunkedTopKCompressor(64, 8, v, exchange="two_shot") for v in ("int8", "int2", "sign")],
    *[DeMoCompressor(8, 4, values=v, signed=False) for v in ("int8", "int2", "sign")],
    DGCCompressor(0.1, 0.9, index_coding="int32", values="int8"),
    robust(ChunkedTopKCompressor(64, 8), "median"),
]
APART = [c for c in EVERY + TODAY + ROUNDED + INT32 + PRODUCTS + ROBUST if c not in COMPETING]


@pytest.mark.parametrize("compressor", APART + CHOSEN, ids=repr)
@given(seed=SEEDS, ranks=st.integers(1, 4), power=st.integers(-14, 14), first=st.booleans())
@settings(max_examples=8, deadline=None)
def test_the_scale_of_a_layer_does_not_touch_another(compressor, seed, ranks, power, first):
    """A layer times a power of two changes no bit of what arrives of the others, or is kept."""
    if isinstance(compressor, FP16Compressor):
        power = min(power, 10)  # a sum that overflows leaves out the step of all layers
    shapes = ((6, 64), (4, 64), (64,))  # whole chunks
    layout, random = layout_of(shapes, compressor), np.random.default_rng(seed)
    worlds = [World(compressor, TorchOps(), layout, ranks) for _ in range(2)]
    scaled = slice(0, 1) if first else slice(1, 2)
    apart = [slice(at, at + size) for at, size in zip(layout.offsets, layout.sizes)]
    others = [place for number, place in enumerate(apart) if number != scaled.start]
    for _ in range(5):
        drawn = [
            [random.standard_normal(s).astype(np.float32) for s in shapes] for _ in range(ranks)
        ]
        results = []
        for world, factor in zip(worlds, (1.0, 2.0**power)):
            tensors = [[torch.from_numpy(x.copy()) for x in layers] for layers in drawn]
            for layers in tensors:
                layers[scaled.start] *= factor
            result = world.step([world.flat(layers) for layers in tensors])[0]
            kept = [residual_of(compressor, state) for state in world.states]
            results.append([x for x in (result, *kept) if x is not None])
        for plain, changed in zip(*results):
            assert all(torch.equal(plain[place], changed[place]) for place in others)


@pytest.mark.parametrize("compressor", LINEAR, ids=repr)
@given(seed=SEEDS)
@FAST
def test_linear_codecs_are_linear(compressor, seed):
    ops = TorchOps()
    random = np.random.default_rng(seed)
    a, b = (torch.from_numpy(random.standard_normal(50).astype(np.float32)) for _ in range(2))
    left = compressor.to_code(ops, a).double() + compressor.to_code(ops, b).double()
    right = compressor.to_code(ops, a + b).double()
    step = 2.0**-10 if isinstance(compressor, FP16Compressor) else 2.0**-23
    assert (left - right).abs().max() <= 4 * step * max(a.abs().max(), b.abs().max())


@pytest.mark.parametrize(
    "compressor", EVERY + TODAY + PRODUCTS + ROBUST + BALANCED + LEARNED + OUTSIDE, ids=repr
)
def test_the_users_random_numbers_are_left_alone(compressor):
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    layout = layout_of(((40, 10),), compressor)
    world = World(compressor, TorchOps(), layout, 2)
    for _ in range(60 if compressor in LEARNED else 3):
        world.step([torch.ones(layout.size) for _ in range(2)])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
def test_two_thousand_steps_of_any_scale_and_of_zeros(compressor):
    """Gradients times 10**U(-6, 6), every fourth step zero: no NaN, no stall, nothing lost."""
    shapes, ops = ((30, 5), (4,)), TorchOps()
    layout = layout_of(shapes, compressor)
    world = World(compressor, ops, layout, 2)
    random = np.random.default_rng(11)
    accumulated = [torch.zeros(layout.size, dtype=torch.float64) for _ in range(2)]
    largest = [torch.zeros(layout.size, dtype=torch.float64) for _ in range(2)]
    received = 0
    for step in range(2000):
        scale = 0.0 if step % 4 == 3 else 10.0 ** random.uniform(-6, 6)
        gradients = [
            world.flat(
                [torch.from_numpy((random.standard_normal(s) * scale).astype("f4")) for s in shapes]
            )
            for _ in range(2)
        ]
        before = [s.memory[0].clone() for s in world.states]
        totals = world.step(gradients)
        assert torch.equal(totals[0], totals[1])
        assert totals[0].isfinite().all()
        received += int((totals[0] != 0).sum())
        for rank in range(2):
            state = world.states[rank]
            assert all(x.isfinite().all() for x in state.memory)
            sent, kept = sent_by(world, rank), state.memory[0]
            pending = before[rank] + gradients[rank]
            assert torch.equal(kept[sent == 0], pending[sent == 0])
            if isinstance(compressor, StromCompressor):
                accumulated[rank] += gradients[rank].double() - sent.double()
                largest[rank] = torch.maximum(largest[rank], pending.abs().double())
    assert received > 0
    if isinstance(compressor, StromCompressor):
        for rank in range(2):  # all that ever came in is out or kept, to float32 rounding
            error = (accumulated[rank] - world.states[rank].memory[0].double()).abs()
            assert (error <= 2000 * 2.0**-23 * largest[rank] + 1e-12).all()


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
def test_zero_gradients_send_nothing(compressor):
    layout = layout_of(((300,), (40,)), compressor)
    world = World(compressor, TorchOps(), layout, 2)
    for _ in range(40):
        totals = world.step([torch.zeros(layout.size) for _ in range(2)])
        assert not totals[0].any()
    assert int(world.states[0].sent.sum()) == 0
    assert int(world.states[0].capacity.level) == 0, "the room shrinks to the lowest level"


def test_what_is_cut_rotates():
    """When not all fit, every element gets its turn: no place in the bucket starves."""
    compressor = StromCompressor(tau=1.0)
    layout = layout_of(((2000,),), compressor)
    for static in (False, True):
        world = World(compressor, TorchOps(static=static), layout, 1)
        level = world.states[0].capacity.level
        sent = torch.zeros(layout.size)
        for _ in range(60):
            state = world.states[0]  # hold the level: nobody ever says that it is too low
            low = state.capacity._replace(
                level=level, needed=torch.tensor(0), steps_unneeded=torch.tensor(0)
            )
            world.states[0] = state._replace(capacity=low)
            gradient = torch.zeros(layout.size)
            gradient[:2000] = 2.0
            sent += world.step([gradient])[0] != 0
        counts = sent[:2000]
        assert counts.min() >= counts.max() - 1


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_sum_and_the_mean(size):
    layout = Layout(("w",), ((20,),), block=1)
    gradients = [torch.full((20,), float(rank + 1)) for rank in range(size)]
    total = World(NoneCompressor(), TorchOps(), layout, size, average=False).step(gradients)[0]
    assert total[0] == size * (size + 1) / 2
    mean = World(NoneCompressor(), TorchOps(), layout, size).step(gradients)[0]
    assert mean[0] == pytest.approx((size + 1) / 2)
