"""The quantizers: truly packed, unbiased, bytes by the formula either way, nothing lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import OneBitCompressor, QSGDCompressor, TernGradCompressor
from hvd_gradcomp.core.collectives import Allgather, Alltoall
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.kernels import NATIVE, assert_alike, threads
from tests.methods import QUANTIZED

FAST = settings(max_examples=30, deadline=None)
SHAPES = ((40, 7), (13,), (70, 3, 3), (1000,))


def layout_of(shapes=SHAPES) -> Layout:
    return Layout(tuple(map(str, range(len(shapes)))), tuple(shapes), block=32)


def unpadded(layout: Layout, x: torch.Tensor) -> torch.Tensor:
    """The elements of the layers, without padding."""
    return torch.cat([x[o : o + n] for o, n in zip(layout.offsets, layout.sizes)])


def noise(layout, seed, ranks, steps=1):
    generator = torch.Generator().manual_seed(seed)
    world = World(QSGDCompressor(), TorchOps(), layout, 1)
    return [
        [
            world.flat(
                [torch.randn(s, generator=generator) * (i + 1) for i, s in enumerate(layout.shapes)]
            )
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 2**32 - 1))
@FAST
def test_codes_come_back(bits, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (32 * groups,), generator=generator)
    for ops in (TorchOps(), TorchOps(static=True)):
        words = ops.pack(codes, bits)
        assert words.shape[0] == groups * bits, "no bit more than it takes"
        assert torch.equal(ops.unpack(words, bits), codes)


def test_private_noise_is_what_counting_gives():
    def mix(x):
        for _ in range(2):
            x = (x ^ (x >> 16)) * 0x45D9F3B % 2**32
        return x ^ (x >> 16)

    ops = TorchOps()
    first, second = 0xFFFFFFF0, 0x12345678  # the counter wraps
    drawn = ops.uniform(torch.tensor([first, second]), 100)
    expected = [(mix(mix((i + first) % 2**32) ^ second) >> 8) / 2**24 for i in range(100)]
    assert drawn.tolist() == expected
    many = ops.uniform(ops.key(7, 3), 200_000).double()
    assert abs(many.mean() - 0.5) < 0.003 and abs(many.var() - 1 / 12) < 0.001
    assert not torch.equal(ops.key(7, 3), ops.key(8, 3))
    assert abs(torch.corrcoef(torch.stack([many[:-1], many[1:]]))[0, 1]) < 0.01


@pytest.mark.parametrize(
    "compressor",
    [QSGDCompressor(), QSGDCompressor(bits=2, norm="l2"), TernGradCompressor(clip=100.0)],
    ids=repr,
)
def test_right_on_average(compressor):
    layout, draws = layout_of(), 1500
    (gradients,) = noise(layout, 1, 1)
    world = World(compressor, TorchOps(), layout, 1)
    total = torch.zeros(layout.size, dtype=torch.float64)
    largest = 0.0
    for _ in range(draws):
        result = world.step(gradients)[0].double()
        total += result
        largest = max(largest, float((result - gradients[0]).abs().max()))
    error = unpadded(layout, total / draws - gradients[0])
    # Hoeffding: each draw is within `largest` of its mean; a failure has probability below 1e-6.
    bound = largest * (2 * np.log(2 * len(error) / 1e-6) / draws) ** 0.5
    assert error.abs().max() < bound


def test_clips_at_root_mean_squares():
    layout = layout_of(((1000,),))
    x = torch.ones(1000)
    x[0] = 1000.0
    world = World(TernGradCompressor(clip=2.5), TorchOps(), layout, 1)
    total = world.step([world.flat([x])])[0]
    sigma = float((x * x).mean() ** 0.5)
    sent = total[:1000][total[:1000] != 0]
    assert sent[0] == total[0] and torch.allclose(sent, torch.tensor(2.5 * sigma))


@pytest.mark.parametrize("world_size", range(2, 17))
@pytest.mark.parametrize(
    "compressor",
    [QSGDCompressor(bits=4), TernGradCompressor(), OneBitCompressor()],
    ids=lambda c: type(c).__name__,
)
def test_bytes_equal_the_formula_either_way(compressor, world_size):
    layout = layout_of()
    groups = {"QSGDCompressor": 1 + 1 + 2 + 2, "TernGradCompressor": 4}
    groups["OneBitCompressor"] = 40 + 1 + 70 + 1
    count = groups[type(compressor).__name__]
    sides = len(compressor.side)
    moved = {}
    for exchange in ("allgather", "two_shot"):
        chosen = replace(compressor, exchange=exchange)
        world = World(chosen, TorchOps(), layout, world_size)
        gradients = noise(layout, 2, world_size)[0]
        totals = world.step(gradients)
        assert all(torch.equal(total, totals[0]) for total in totals)
        arrives = 0
        for requests in world.traffic:
            (kind,) = {type(r) for r in requests}
            shape = requests[0].tensor.shape
            assert kind is (Alltoall if len(shape) == 2 else Allgather)
            arrives += (world_size - 1) * shape[-1]
        moved[exchange] = arrives
        assert arrives == chosen.exchange_of(layout, world_size).received(world_size)
    plain = 32 + 4 * sides * count + layout.size * compressor.bits // 8
    assert moved["allgather"] == (world_size - 1) * plain
    shard = -(-layout.size // (32 * world_size)) * 32
    largest = max(
        compressor.row_groups(layout).between(i * shard, (i + 1) * shard).groups
        for i in range(world_size)
    )
    assert moved["two_shot"] == 2 * (world_size - 1) * (
        32 + 4 * sides * largest + shard * compressor.bits // 8
    )
    better = min(moved, key=moved.__getitem__)
    assert compressor.exchange_of(layout, world_size).kind == better


def test_large_models_take_two_shots_beyond_two_ranks():
    layout = layout_of(((1000, 1000),))
    for compressor in (QSGDCompressor(), TernGradCompressor(), OneBitCompressor()):
        chosen = [compressor.exchange_of(layout, size).kind for size in (2, 3, 4, 64)]
        assert chosen == ["allgather", "two_shot", "two_shot", "two_shot"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9)), max_size=6),
    st.data(),
)
@FAST
def test_a_cut_keeps_every_element_in_its_group(layers, data):
    row_groups, start = [], 0
    for gap, rows, length in layers:
        row_groups.append(RowGroup(start + gap, rows, length))
        start = row_groups[-1].end
    whole = RowGroups(tuple(row_groups))

    def groups(row_groups: RowGroups) -> dict[int, int]:
        numbered, group = {}, row_groups.first
        for run in row_groups.runs:
            for row in range(run.rows):
                first = run.start + row * run.length
                numbered.update(dict.fromkeys(range(first, first + run.length), group + row))
            group += run.rows
        return numbered

    begin = data.draw(st.integers(0, start))
    end = data.draw(st.integers(begin, start + 3))
    expected = {i - begin: g for i, g in groups(whole).items() if begin <= i < end}
    assert groups(whole.between(begin, end)) == expected


@pytest.mark.parametrize("exchange", ["allgather", "two_shot"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_one_bit_loses_nothing(exchange, size):
    layout = layout_of()
    world = World(OneBitCompressor(exchange), TorchOps(), layout, size, average=False)
    for gradients in noise(layout, 3, size, steps=8):
        before = sum(s.r.double() for s in world.states)
        pending = before + sum(g.double() for g in gradients)
        total = world.step(gradients)[0].double()
        kept = sum(s.r.double() for s in world.states)
        difference = unpadded(layout, kept + total - pending)
        assert difference.abs().max() < 1e-5 * unpadded(layout, pending).abs().max()
        for state in world.states:
            padding = state.r.clone()
            for offset, count in zip(layout.offsets, layout.sizes):
                padding[offset : offset + count] = 0
            assert not padding.any()


@pytest.mark.parametrize("compressor", QUANTIZED, ids=repr)
def test_zero_and_tiny_gradients(compressor):
    layout = layout_of()
    world = World(compressor, TorchOps(), layout, 3)
    for scale in (0.0, 1e-38, 1e-45, 0.0):
        gradients = [g * scale for g in noise(layout, 4, 3)[0]]
        for total in world.step(gradients):
            assert total.isfinite().all()
            assert unpadded(layout, total).abs().max() <= 1e-37
            if scale == 0.0 and not isinstance(compressor, OneBitCompressor):
                assert not total.any()


@pytest.mark.parametrize("compressor", QUANTIZED, ids=repr)
def test_native_and_composite_verbs_agree(compressor):
    layout = layout_of()
    fast, plain = TorchOps(), TorchOps(static=True)
    if fast.native is None:
        pytest.skip("installed without a compiler")
    worlds = [World(compressor, ops, layout, 3) for ops in (fast, plain)]
    for gradients in noise(layout, 5, 3, steps=4):
        totals = [world.step(gradients)[0] for world in worlds]
        assert torch.equal(unpadded(layout, totals[0]), unpadded(layout, totals[1]))
        for a, b in zip(*(world.traffic for world in worlds)):
            assert all(torch.equal(x.tensor, y.tensor) for x, y in zip(a, b))


@NATIVE
@pytest.mark.parametrize("compressor", QUANTIZED, ids=repr)
@given(
    shapes=st.lists(st.sampled_from([(1,), (700,), (65, 31), (300, 50)]), min_size=1, max_size=4),
    count=st.integers(2, 5),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=10)
def test_threads_cut_a_bucket_alike(compressor, shapes, count, seed):
    """Borders of pieces lie within groups, and there are more threads than groups."""
    layout = layout_of(shapes)
    one, other = (World(compressor, TorchOps(), layout, 3) for _ in range(2))
    for gradients in noise(layout, seed, 3, steps=3):
        with threads(1):
            totals = one.step(gradients)
        with threads(count):
            assert all(map(torch.equal, totals, other.step(gradients)))
        assert_alike(one, other)


@NATIVE
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_many_scales_are_divided_alike(bits):
    """PyTorch divides a number by a tensor as a product with its reciprocal, and C does not."""
    row_groups, codes = RowGroups((RowGroup(0, 20_000, 32),)), []
    x = torch.randn(640_000, generator=torch.Generator().manual_seed(0))
    for ops in (TorchOps(), TorchOps(static=True)):
        scale = ops.group_maxima(row_groups, x)
        codes.append(ops.encode_levels(row_groups, x, scale, bits, ops.key(3, 5)))
    assert torch.equal(*codes)


@NATIVE
def test_the_checksum_of_much_is_that_of_one_thread():
    data = torch.randint(0, 256, (5_000_004,), dtype=torch.uint8)
    sums = []
    for count in (1, 2, 5):
        with threads(count):
            sums.append(int(TorchOps().weighted_sum(data)))
    assert sums == sums[:1] * 3


def test_bytes_of_an_element():
    """What the README promises: 4-bit QSGD, TernGrad and 1-bit SGD on a real model's shapes."""
    from hvd_gradcomp.tuning.models import resnet50

    names, shapes = zip(*resnet50())
    layout = Layout(tuple(names), tuple(shapes), block=32)
    for compressor, limit in (
        (QSGDCompressor(bits=4), 0.52),
        (TernGradCompressor(), 0.26),
        (OneBitCompressor(), 0.135),
    ):
        assert compressor.exchange_of(layout, 2).received(2) / layout.elements <= limit


@pytest.mark.parametrize("compressor", QUANTIZED, ids=repr)
@pytest.mark.parametrize("shapes", [((0,), (300,)), ((300,), (0, 3)), ((3, 0), (30, 10), (0,))])
def test_an_empty_layer_has_no_groups(compressor, shapes):
    layout, worlds = layout_of(shapes), []
    for ops in (TorchOps(), TorchOps(static=True)):
        worlds.append(World(compressor, ops, layout, 2))
        worlds[-1].step(*noise(layout, 1, 2))
    assert bool(torch.isfinite(worlds[0].step(*noise(layout, 2, 2))[0]).all())
    worlds[1].step(*noise(layout, 2, 2))
    assert_alike(*worlds)


@NATIVE
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 31, 5000]),
            st.sampled_from([1, 2, 70]),
            st.sampled_from([1, 9, 1023, 40_000]),
        ),
        max_size=3,
    ),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=15)
def test_signs_of_any_bands(cuts, from_zero, count, seed):
    """What lies in no band has no sign, nothing is added to it; groups begin anywhere."""
    row_groups, end = [], 0
    for gap, rows, length in cuts:
        row_groups.append(RowGroup(end + gap, 1 if length > 9000 else rows, length))
        end = row_groups[-1].end
    whole, size = RowGroups(tuple(row_groups)), (end // 32 + 2) * 32
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(size, generator=generator), torch.randn(2, generator=generator)
    base = None if from_zero else torch.randn(size, generator=generator).abs()
    fast, plain = TorchOps(), TorchOps(static=True)
    with threads(count):
        ours, theirs = fast.encode_signs(whole, x), plain.encode_signs(whole, x)
        assert all(map(torch.equal, ours, theirs))
        packed = torch.stack([ours[2], ours[2].flip(0)])
        sides = [torch.stack([side, side * 3]) for side in ours[:2]]
        arguments = packed, *sides, weights
        one = fast.add_signs(whole, base, torch.empty(size), *arguments)
        assert torch.equal(one, plain.add_signs(whole, base, torch.empty(size), *arguments))
        if base is not None:
            assert torch.equal(one, fast.add_signs(whole, base, base, *arguments))


@NATIVE
@pytest.mark.parametrize("apart", [1, 2, 3])
def test_elements_that_are_not_neighbours(apart):
    """C walks over memory; what is given to it may be a view of every other element."""
    row_groups, layout = RowGroups((RowGroup(0, 3, 20),)), Layout(("a",), ((60,),), block=32)
    generator = torch.Generator().manual_seed(apart)

    def view(*shape):
        return torch.randn((*shape, apart), generator=generator)[..., 0]

    x, base, scale, weights = view(64), view(64), view(3).abs(), view(2)
    x[60:] = 0.0
    packed = torch.randint(256, (2, 32, apart), dtype=torch.uint8, generator=generator)[..., 0]
    above, below = view(2, 3), view(2, 3)
    index = torch.tensor([[3] * apart, [40] * apart, [7] * apart])[:, 0]

    def results(ops):
        levels = packed, torch.stack([scale, scale]), 4, weights
        signs = packed[:, :8], above, below, weights
        yield ops.group_maxima(row_groups, x)
        yield ops.group_squares(row_groups, x)
        yield ops.encode_levels(row_groups, x, scale, 4, ops.key(3, 4))
        yield ops.add_levels(row_groups, base, torch.empty(64), *levels)
        yield from ops.encode_signs(row_groups, x)
        yield ops.add_signs(row_groups, base, torch.empty(64), *signs)
        yield ops.layer_histograms(layout, x, 4)
        yield from ops.advance(torch.ones(64), torch.ones(64), x, 0.5, True)
        yield ops.gather(x, index)
        yield ops.put(x.clone(), index, 2.0)
        yield ops.put(torch.ones(64, apart)[:, 0], index, 2.0)
        yield ops.add_at(torch.ones(64, apart)[:, 0], index, scale)

    for ours, theirs in zip(results(TorchOps()), results(TorchOps(static=True))):
        assert torch.equal(ours, theirs)
