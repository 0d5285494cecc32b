"""C kernels of rows, and of bins, give the bits of the plain ops, on both frameworks."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvd_gradcomp.ops import PayloadError
from hvd_gradcomp.ops.torch import TorchOps
from tests.kernels import NATIVE, threads
from tests.single.test_narrow_kernels import Both, frameworks, noise, same

PLAIN = TorchOps(static=True)
ONE = torch.ones(1)
FEW = settings(max_examples=25, deadline=None)


@st.composite
def vectors(draw):
    """Noise, few numbers that are often equal, or both; of any length."""
    size = draw(st.integers(1, 700) | st.sampled_from((4096, 4097, 12_345)))
    x = noise(size, draw(st.integers(0, 99)))[:size].clone()
    coarse = draw(st.sampled_from((None, 1.0, 0.25)))
    if coarse is not None:
        start = draw(st.integers(0, size))
        x[start:] = torch.round(x[start:].clamp(-2, 2) / coarse) * coarse
    return x * draw(st.sampled_from((1.0, 1e-30, 1e30)))


@pytest.mark.parametrize("framework", frameworks())
@given(x=vectors(), data=st.data())
@FEW
def test_the_largest_of_rows(framework, x, data):
    both = Both(framework)
    length = data.draw(st.integers(1, 900) | st.sampled_from((32, 64, 4096)))
    k = data.draw(st.integers(1, length) | st.just(min(length, 64)))
    with threads(data.draw(st.sampled_from((1, 2)))):
        ours = both("largest_of_rows", x, length, k)
    assert all(map(same, ours, PLAIN.largest_of_rows(x, length, k)))


@NATIVE
def test_the_largest_of_rows_of_what_is_not_finite():
    x = torch.zeros(64)
    x[[3, 40, 41]] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    x[50:52] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for k in range(1, 9):
        assert all(map(same, TorchOps().largest_of_rows(x, 64, k), PLAIN.largest_of_rows(x, 64, k)))


@pytest.mark.parametrize("framework", frameworks())
@given(x=vectors(), seed=st.integers(0, 99), data=st.data())
@FEW
def test_accumulation_and_the_largest(framework, x, seed, data):
    both, y = Both(framework), noise(x.shape[0], seed)[: x.shape[0]].clone()
    length, factor = data.draw(st.sampled_from((1, 32, 100, 4096))), data.draw(st.floats(0.1, 1.0))
    arguments = x, factor, y, length, data.draw(st.integers(1, min(length, 40)))
    with threads(data.draw(st.sampled_from((1, 2)))):
        ours = both("accumulate_largest", *arguments)
    assert all(map(same, ours, PLAIN.accumulate_largest(x, factor, y.clone(), *arguments[3:])))


@pytest.mark.parametrize("framework", frameworks())
@given(x=vectors(), data=st.data())
@FEW
def test_addition_in_rows(framework, x, data):
    """Places beyond the row, the last element and the end of the vector are left out."""
    both, size = Both(framework), x.shape[0]
    length = data.draw(st.sampled_from((1, 7, 32, 512, 4096)))
    rows, k = -(-size // length), data.draw(st.integers(0, min(length, 40)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    index, values = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = torch.rand((rows, length + 2), generator=generator).topk(k).indices
        index.append(chosen)
        values.append(torch.randn((rows, k), generator=generator))
    weights = torch.rand(len(index), generator=generator) - 0.5
    base = data.draw(st.sampled_from((None, x)))
    with threads(data.draw(st.sampled_from((1, 2)))):
        ours = both("add_in_rows", base, torch.full_like(x, 7.0), length, index, values, weights)
    out = torch.full_like(x, 7.0)
    assert same(ours, PLAIN.add_in_rows(base, out, length, index, values, weights))


@pytest.mark.parametrize("framework", frameworks())
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 300)),
    sink=st.sampled_from((1, 40, 5000, (1 << 40) - 1)),
    ascending=st.booleans(),
    seed=st.integers(0, 99),
)
@FEW
def test_rows_are_merged(framework, shape, sink, ascending, seed):
    """Whatever a damaged row holds: places that descend, or come twice."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, sink + 1, shape, generator=generator)
    index = index.sort(-1).values if ascending else index
    values = torch.where(index < sink, noise(index.numel(), seed)[: index.numel()].view(shape), 0.0)
    places, total = Both(framework)("merge_rows", index, values, sink)
    expected = PLAIN.merge_rows(index, values, sink)
    assert torch.equal(places, expected[0]) and same(total, expected[1])
    used = places < sink
    assert (places.diff()[used[1:]] > 0).all() and not total[~used].any()
    sums: dict[int, float] = {}
    for place, value in zip(index.flatten().tolist(), values.flatten().tolist()):
        sums[place] = sums.get(place, 0.0) + value
    sums.pop(sink, None)
    assert places[used].tolist() == sorted(sums)
    exact = torch.tensor([sums[place] for place in sorted(sums)], dtype=torch.float64)
    assert torch.allclose(total[used].double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("framework", frameworks())
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    none=st.integers(0, 9),
    bits=st.sampled_from((1, 2, 4, 8)),
    shuffled=st.booleans(),
    scale=st.sampled_from((1.0, 0.0, 1e-12, 1e-30, 1e30)),
    seed=st.integers(0, 99),
)
@FEW
def test_bins(framework, sizes, none, bits, shuffled, scale, seed):
    """Groups of any size, whose members may lie anywhere, and values of no group."""
    both, count = Both(framework), sum(sizes) + none
    assume(count)
    group = torch.tensor([g for g, n in enumerate(sizes) for _ in range(n)], dtype=torch.int64)
    group = torch.cat((group, torch.full((none,), len(sizes))))
    generator = torch.Generator().manual_seed(seed)
    if shuffled:
        group = group[torch.randperm(count, generator=generator)]
    scales = torch.cat((10.0 ** torch.randint(-3, 4, (len(sizes),), generator=generator), ONE))
    x = torch.randn(count, generator=generator) * scales[group] * scale
    entries = tuple(max(min(n, 1 << bits), 1) for n in sizes)
    arguments = x, group, entries, bits
    codes, means = both("encode_bins", *arguments)
    expected = PLAIN.encode_bins(*arguments)
    assert torch.equal(codes, expected[0]) and same(means, expected[1])
    decoded = both("decode_bins", codes, means, group, entries, bits)
    assert same(decoded, PLAIN.decode_bins(*expected, group, entries, bits))
    assert not decoded[group == len(sizes)].any()
    for number, n in enumerate(sizes):
        values, sent = x[group == number], decoded[group == number]
        # A bin for each value, but for those too small beside the group's peak.
        if 0 < n < 1 << bits and scale not in (0.0, 1e-30):
            assert (values - sent).abs().max() <= values.abs().max() * 2.0**-38
    # Each group as if it were alone, to the bit.
    alone, firsts = max(range(len(sizes)), key=sizes.__getitem__), [0, *accumulate(entries)]
    chosen = group == alone
    zeros = torch.zeros(int(chosen.sum()), dtype=torch.int64)
    _, apart = both("encode_bins", x[chosen], zeros, entries[alone : alone + 1], bits)
    assert same(apart, means[firsts[alone] : firsts[alone + 1]])


@NATIVE
def test_nothing_is_read_or_written_beyond_what_is_there():
    ops, x, one = TorchOps(), torch.ones(100), torch.ones(1)
    for length, k in ((0, 1), (8, 0), (8, 9), (1 << 31, 1)):
        with pytest.raises((ValueError, ZeroDivisionError, RuntimeError, MemoryError)):
            ops.native("largest_of_rows", (x,), (torch.empty(13, 8).long(), x), (length, k))
    with pytest.raises(ValueError, match="accumulate_largest"):
        ops.accumulate_largest(x, 0.5, torch.ones(99), 8, 2)
    index, values = torch.zeros((13, 2), dtype=torch.int64), torch.ones((13, 2))
    for wrong in (
        ([index[:12]], [values[:12]], one),
        ([index], [values[:, :1]], one),
        ([index], [values], torch.ones(2)),
        ([index, index[:, :1]], [values, values[:, :1]], torch.ones(2)),
    ):
        with pytest.raises(ValueError, match="add_in_rows"):
            ops.add_in_rows(None, x.clone(), 8, *wrong)
    with pytest.raises(PayloadError):
        ops.add_in_rows(None, x.clone(), 8, [index - 1], [values], one)
    for places in (index + (1 << 62), index + 8):
        assert not ops.add_in_rows(None, x.clone(), 8, [places], [values], one).any()
    lows, highs = torch.zeros((3, 5), dtype=torch.int64), torch.zeros((3, 2), dtype=torch.int64)
    assert ops.decode_ascending((lows, highs), (1, 20), 5, 60, 400).shape == (3, 20)
    for code in ((lows[:2], highs), (lows[0], highs), (lows, highs[0]), (lows[:, :4], highs)):
        with pytest.raises(ValueError, match="decode_ascending"):
            ops.decode_ascending(code, (1, 20), 5, 60, 400)
    for wrong in ((index, values[:12], 8), (index[0], values[0], 8)):
        with pytest.raises(ValueError, match="merge_rows"):
            ops.merge_rows(*wrong)
    for sink in (-1, 1 << 60):
        with pytest.raises(ValueError, match="merge_rows"):
            ops.merge_rows(index, values, sink)
    for places in (index - 1, index + 9, index + (1 << 62)):
        with pytest.raises(PayloadError):
            ops.merge_rows(places, values, 8)
    group = torch.zeros(20, dtype=torch.int64)
    for wrong in (
        (torch.ones(19), group, (4,), 2),
        (torch.ones(20), group, (5,), 2),
        (torch.ones(20), group, (0,), 2),
        (torch.ones(20), group, (4,), 9),
    ):
        with pytest.raises(ValueError, match="encode_bins"):
            ops.encode_bins(*wrong)
    codes = torch.full((8,), 255, dtype=torch.uint8)  # of 32 values, each the last bin's
    assert ops.decode_bins(codes, torch.arange(4.0), group, (4,), 2).tolist() == [3.0] * 20
    assert ops.decode_bins(codes, torch.arange(3.0), group, (3,), 2).tolist() == [2.0] * 20
    for nowhere in (1, -1, 1 << 62):
        assert not ops.decode_bins(codes, torch.ones(4), group + nowhere, (4,), 2).any()
    for wrong in (
        (codes[:4], torch.ones(4), group, (4,), 2),
        (codes, torch.ones(3), group, (4,), 2),
        (codes, torch.ones(4), torch.zeros(33, dtype=torch.int64), (4,), 2),
        (codes, torch.ones(8), group, (8,), 2),
        (codes, torch.ones(0), group, (0,), 2),
    ):
        with pytest.raises(ValueError, match="decode_bins"):
            ops.decode_bins(*wrong)


@NATIVE
@pytest.mark.parametrize("size", [32, 4096, 100_000])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e19])
def test_what_is_accumulated_is_checked(size, value):
    x, y = torch.randn(size), torch.randn(size)
    y[size // 2] = value
    for ops in (TorchOps(), TorchOps(static=True)):
        finite, *results = ops.accumulate_largest_checked(x, 0.5, y.clone(), 64, 3)
        assert bool(finite) is (value == 0.0)
        if value == 0.0:
            assert all(
                map(torch.equal, results, TorchOps().accumulate_largest(x, 0.5, y.clone(), 64, 3))
            )
