"""Methods of today: narrow numbers, chunks, factors, signs, decoupled momentum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    ACPSGDCompressor,
    BF16Compressor,
    ChunkedTopKCompressor,
    DeMoCompressor,
    EFSignSGDCompressor,
    FP8Compressor,
    Int8Compressor,
    NaturalCompressor,
    NonFiniteGradientError,
    PayloadError,
    PowerSGDCompressor,
    QSGDCompressor,
    RandomKCompressor,
    SignumCompressor,
    TernGradCompressor,
)
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.values import VALUES, Stretch, ValueGroups
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context, leaves
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.testing import World
from tests.methods import PRODUCTS, TODAY
from tests.oracles import today

SEEDS = st.integers(0, 2**32 - 1)
NARROW = [
    BF16Compressor(exchange="allgather"),
    FP8Compressor(block_size=32, exchange="allgather"),
    Int8Compressor(block_size=32, exchange="allgather"),
]
ORACLES = [
    lambda x: np.array([today.bfloat16(v) for v in x], np.float32),
    today.e4m3,
    today.int8,
]


def wide(random: np.random.Generator, size: int) -> np.ndarray:
    """Magnitudes over many powers of two, with zeros and equal ones."""
    x = random.standard_normal(size) * 2.0 ** random.integers(-20, 20, size)
    x = np.where(random.random(size) < 0.1, 0.0, x)
    return np.where(random.random(size) < 0.2, 1.5, x).astype(np.float32)


@pytest.mark.parametrize(
    ("compressor", "oracle"), list(zip(NARROW, ORACLES)), ids=["bf16", "fp8", "int8"]
)
@given(seed=SEEDS, layers=st.lists(st.integers(1, 70), min_size=1, max_size=3))
@settings(max_examples=25)
def test_narrow_numbers_are_the_nearest(compressor, oracle, seed, layers):
    random = np.random.default_rng(seed)
    layout = Layout(tuple(map(str, range(len(layers)))), tuple((n,) for n in layers), block=32)
    world = World(compressor, TorchOps(), layout, 1)
    values = [wide(random, n) for n in layers]
    total = world.step([world.flat([torch.from_numpy(v) for v in values])])[0].numpy()
    for at, value in zip(layout.offsets, values):
        for start in range(0, len(value), 32):
            block = value[start : start + 32]
            block_total = total[at + start : at + start + len(block)]
            assert np.array_equal(block_total, oracle(block)), (block, block_total, oracle(block))


@pytest.mark.parametrize(
    "compressor",
    [
        BF16Compressor(exchange="two_shot"),
        FP8Compressor(exchange="two_shot"),
        Int8Compressor(exchange="two_shot"),
    ],
    ids=repr,
)
def test_the_error_of_a_sum_is_flat_in_the_number_of_ranks(compressor):
    layout = Layout(("w",), ((3000,),), block=32)
    generator = torch.Generator().manual_seed(1)
    errors = []
    for size in (2, 8, 32):
        gradients = [torch.randn(layout.size, generator=generator) for _ in range(size)]
        for gradient in gradients:
            gradient[3000:] = 0
        exact = sum(g.double() for g in gradients)
        world = World(compressor, TorchOps(), layout, size, average=False)
        total = world.step([g.clone() for g in gradients])[0].double()
        errors.append(float((total - exact).norm() / exact.norm()))
    assert max(errors) < 1.3 * min(errors)


@pytest.mark.parametrize("kind", [BF16Compressor, Int8Compressor])
def test_stochastic_rounding_is_right_on_average(kind):
    layout = Layout(("w",), ((500,),), block=32)
    world = World(kind(rounding="stochastic"), TorchOps(), layout, 1)
    gradient = world.flat([torch.randn(500, generator=torch.Generator().manual_seed(2))])
    totals = torch.stack([world.step([gradient.clone()])[0].double() for _ in range(1000)])
    largest = (totals - gradient.double()).abs().amax(0)
    # Hoeffding: a failure has probability below 1e-6.
    bound = largest * (2 * np.log(2 * 500 / 1e-6) / 1000) ** 0.5
    assert ((totals.mean(0) - gradient.double()).abs() <= bound + 1e-12).all()


@pytest.mark.parametrize(
    "compressor",
    [
        BF16Compressor(exchange="two_shot", feedback=True),
        FP8Compressor(exchange="two_shot", feedback=True, power_of_two=True),
        Int8Compressor(exchange="allgather", feedback=True),
        EFSignSGDCompressor("two_shot"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 3])
def test_feedback_loses_nothing(compressor, size):
    layout = Layout(("a", "b"), ((40, 7), (13,)), block=32)
    world = World(compressor, TorchOps(), layout, size, average=False)
    generator = torch.Generator().manual_seed(3)
    total_given, received = torch.zeros(layout.size).double(), torch.zeros(layout.size).double()
    for _ in range(10):
        gradients = [
            world.flat([torch.randn(s, generator=generator) for s in layout.shapes])
            for _ in range(size)
        ]
        total_given += sum(g.double() for g in gradients)
        received += world.step(gradients)[0].double()
    kept = sum(state.r.double() for state in world.states)
    assert (total_given - received - kept).abs().max() < 1e-4


@given(rows=st.integers(1, 5), n=st.integers(1, 300), share=st.floats(0.0, 1.0), seed=SEEDS)
@settings(max_examples=60)
def test_elias_fano_comes_back_in_its_bits(rows, n, share, seed):
    k = max(1, int(n * share))
    random = np.random.default_rng(seed)
    numbers = np.stack([np.sort(random.choice(n, k, replace=False)) for _ in range(rows)])
    code, ops = EliasFano.of(rows, k, n), TorchOps()
    payload = code.encode(ops, torch.from_numpy(numbers))
    assert np.array_equal(code.decode(ops, payload).numpy(), numbers)
    words = sum(part.count for part in code.parts().values())
    assert all(payload[name].shape[0] == part.count for name, part in code.parts().items())
    assert words * 32 < rows * today.elias_fano_bits(k, n) + 32 * (code.low + 1)


@given(data=st.binary(min_size=200, max_size=200))
def test_a_damaged_place_lies_in_its_chunk(data):
    code, ops = EliasFano.of(3, 7, 100), TorchOps()
    words = torch.frombuffer(bytearray(data), dtype=torch.int32).to(torch.int64) % (1 << 32)
    parts = code.parts()
    low = words[: parts["low"].count]
    high = words[parts["low"].count : parts["low"].count + parts["high"].count]
    decoded = code.decode(ops, {"low": low, "high": high})
    assert decoded.shape == (3, 7) and int(decoded.min()) >= 0 and int(decoded.max()) <= 100


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@given(seed=SEEDS, size=st.integers(1, 200))
@settings(max_examples=10)
def test_chunks_keep_what_they_do_not_send(values, decay, seed, size):
    """`kept + decoded = decay * before + gradient`, and the k largest of each chunk are sent."""
    compressor = ChunkedTopKCompressor(chunk=32, k=5, values=values, decay=decay)
    layout = Layout(("w",), ((size,),), block=32)
    world, random = World(compressor, TorchOps(), layout, 1), np.random.default_rng(seed)
    for _ in range(3):
        gradient = torch.from_numpy(wide(random, size))
        before = world.states[0].r.clone()
        accumulated = before * decay + world.flat([gradient])
        total = world.step([world.flat([gradient])])[0]
        assert torch.equal(world.states[0].r, accumulated - total)
        for start in range(0, layout.size, 32):
            chunk = accumulated[start : start + 32].numpy()
            sent = set(np.flatnonzero(total[start : start + 32].numpy()))
            assert sent <= set(today.largest(chunk, 5))
            if values == "float32":
                assert {i for i in today.largest(chunk, 5) if chunk[i] != 0} == sent


@given(seed=SEEDS, ranks=st.integers(2, 6), chunks=st.integers(1, 14), last=st.integers(1, 32))
@settings(max_examples=40)
def test_owners_of_chunks_choose_of_the_sum(seed, ranks, chunks, last):
    size = 32 * (chunks - 1) + last
    compressor = ChunkedTopKCompressor(32, 5, "float32", 0.9, exchange="two_shot")
    layout, random = Layout(("w",), ((size,),), block=1), np.random.default_rng(seed)
    assert compressor.exchange_of(layout, ranks).kind == "two_shot"
    world = World(compressor, TorchOps(), layout, ranks)
    expected = today.OwnedChunks(size, ranks, 32, 5, 0.9)
    for _ in range(3):
        gradients = [random.standard_normal(size).astype(np.float32) for _ in range(ranks)]
        results = world.step([torch.from_numpy(g.copy()) for g in gradients])
        assert np.array_equal(results[0].numpy(), expected.step(gradients))
        assert all(torch.equal(result, results[0]) for result in results)
        for state, residual in zip(world.states, expected.residual):
            assert np.array_equal(state.r.numpy(), residual)


@pytest.mark.parametrize("values", VALUES)
@given(seed=SEEDS, ranks=st.integers(1, 5), size=st.integers(1, 9 * 32))
@settings(max_examples=12)
def test_owners_keep_what_they_leave_out(values, seed, ranks, size):
    """Summed over ranks, `kept + sent = decay * before + gradient`."""
    compressor = ChunkedTopKCompressor(32, 3, values, 0.5, exchange="two_shot")
    layout, random = Layout(("w",), ((size,),), block=1), np.random.default_rng(seed)
    world = World(compressor, TorchOps(), layout, ranks)
    for _ in range(3):
        before = sum(state.r.double() for state in world.states)
        gradients = [torch.from_numpy(random.standard_normal(size)).float() for _ in range(ranks)]
        total = 0.5 * before + sum(g.double() for g in gradients)
        sent = ranks * world.step([g.clone() for g in gradients])[0].double()
        kept = sum(state.r.double() for state in world.states)
        torch.testing.assert_close(kept + sent, total, rtol=0, atol=1e-5)


def test_two_shots_move_fewer_bytes_from_three_ranks_on():
    """Not on one or two ranks, nor with the mean of those who sent."""
    layout = Layout(("w",), ((4096 * 64,),), block=1)
    compressor = ChunkedTopKCompressor(exchange="auto")
    ranks = (1, 2, 3, 8, 1000)
    ways = {n: compressor.exchange_of(layout, n).kind == "two_shot" for n in ranks}
    assert ways == {1: False, 2: False, 3: True, 8: True, 1000: True}
    for ranks in (3, 8, 64, 1000):
        received = 2 * (ranks - 1) * compressor.shard_bytes(layout, ranks)
        assert received < (ranks - 1) * compressor.payload_bytes(layout)
    by_contributors = ChunkedTopKCompressor(mean="contributors", exchange="auto")
    assert by_contributors.exchange_of(layout, 8).kind == "allgather"
    with pytest.raises(ValueError, match="its owner alone knows who sent an element"):
        ChunkedTopKCompressor(mean="contributors", exchange="two_shot")


@pytest.mark.parametrize("mean", ["ranks", "contributors"])
@pytest.mark.parametrize("clips", [None, 1.0])
def test_a_state_that_keeps_the_gradients_memory_has_the_same_bits(mean, clips):
    """With `owns_gradient` gradient and state swap their memory, and nothing else changes."""
    compressor = ChunkedTopKCompressor(chunk=32, k=3, mean=mean, max_norm=clips)
    layout, ops = Layout(("w", "b"), ((16, 24), (10,)), block=32), TorchOps()
    generator = torch.Generator().manual_seed(1)
    states = [compressor.init(ops, layout) for _ in range(2)]
    for step in range(5):
        gradient = World(compressor, ops, layout, 1).flat(
            [torch.randn(s, generator=generator) for s in layout.shapes]
        )
        totals, places = [], []
        for rank, state in enumerate(states):
            copied, before = gradient.clone(), state.r.data_ptr()
            context = Context(layout, 0, 1, step, owns_gradient=bool(rank))
            program = ProgramRunner(compressor.aggregate(ops, context, copied, state))
            request = program.send(None)
            assert program.send(torch.stack([request.tensor])) is None
            total, states[rank] = program.result
            totals.append(total)
            places.append((states[rank].r.data_ptr(), total.data_ptr()))
            swapped = (copied.data_ptr(), before), (before, copied.data_ptr())
            assert clips or mean == "contributors" or places[-1] == swapped[0 if rank else 1]
        assert torch.equal(*totals) and torch.equal(states[0].r, states[1].r)


def test_bins_are_those_of_the_paper():
    values = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    for name, bits in (("int2", 2), ("int4", 4)):
        coding, ops, places = VALUES[name], TorchOps(), torch.arange(1000)
        groups = ValueGroups.of([Stretch(0, 1000, 1000)])
        coded = coding.encode(ops, torch.from_numpy(values), places, groups)
        decoded = coding.decode(ops, coded, places, groups)
        assert np.allclose(decoded.numpy(), today.codebook(values, bits), atol=1e-6)


def test_two_hundred_times_fewer_bytes():
    layout = Layout(("w",), ((4096 * 256,),), block=32)
    sent = ChunkedTopKCompressor().payload_bytes(layout)
    assert 4 * layout.elements / sent > 202
    assert today.elias_fano_bits(64, 4096) == 512


def test_the_mean_of_those_who_sent():
    layout = Layout(("w",), ((32,),), block=32)
    for mean, expected in (("ranks", 1.0), ("contributors", 2.0)):
        compressor = ChunkedTopKCompressor(chunk=32, k=1, values="float32", mean=mean)
        world = World(compressor, TorchOps(), layout, 2)
        first, second = torch.zeros(layout.size), torch.zeros(layout.size)
        first[3], second[7] = 2.0, 2.0
        total = world.step([first, second])[0]
        assert total[3] == total[7] == expected


@pytest.mark.parametrize(
    ("kind", "oracle"), [(PowerSGDCompressor, today.PowerSGD), (ACPSGDCompressor, today.ACPSGD)]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_factors_are_those_of_the_paper(kind, oracle, ranks):
    compressor, layout = kind(rank=2), Layout(("w", "b"), ((20, 30), (20,)), block=1)
    world = World(compressor, TorchOps(), layout, ranks)
    expected = oracle(20, 30, ranks, world.states[0].q.view(30, 2).numpy())
    random = np.random.default_rng(5)
    for _ in range(6):
        matrices = [random.standard_normal((20, 30)).astype(np.float32) for _ in range(ranks)]
        vectors = [random.standard_normal(20).astype(np.float32) for _ in range(ranks)]
        flat = [
            world.flat([torch.from_numpy(m), torch.from_numpy(v)])
            for m, v in zip(matrices, vectors)
        ]
        total = world.step(flat)[0]
        assert np.allclose(total[:600].view(20, 30).numpy(), expected.step(matrices), atol=2e-4)
        assert np.allclose(total[600:].numpy(), np.mean(vectors, 0), atol=1e-6), "vectors are whole"


@pytest.mark.parametrize("kind", [PowerSGDCompressor, ACPSGDCompressor])
def test_a_matrix_of_low_rank_arrives_whole(kind):
    layout = Layout(("w",), ((40, 50),), block=1)
    world = World(kind(rank=3), TorchOps(), layout, 2)
    generator = torch.Generator().manual_seed(6)
    left, right = torch.randn(40, 3, generator=generator), torch.randn(3, 50, generator=generator)
    total_given = torch.zeros(layout.size).double()
    received = torch.zeros(layout.size).double()
    for _ in range(20):
        gradient = (left @ right).reshape(-1)
        total_given += gradient.double()
        received += world.step([gradient.clone(), gradient.clone()])[0].double()
    assert float((total_given - received).norm() / total_given.norm()) < 1e-5


def test_small_layers_are_sent_whole():
    compressor = PowerSGDCompressor(rank=4)
    assert compressor.matrix((64,)) is None and compressor.matrix((4, 4)) is None
    assert compressor.matrix((8, 1, 3, 3)) is None  # (8 + 9) * 4 * 2 > 8 * 9
    assert compressor.matrix((256, 128, 3, 3)) == (256, 1152, 4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_decoupled_momentum_is_that_of_the_paper(ranks):
    compressor = DeMoCompressor(chunk=8, k=5, beta=0.9, signed=False)
    layout = Layout(("w",), ((16, 24),), block=1)
    world = World(compressor, TorchOps(), layout, ranks)
    oracle = today.DeMo((16, 24), ranks, 8, 5, 0.9)
    random = np.random.default_rng(7)
    for _ in range(5):
        gradients = [random.standard_normal((16, 24)).astype(np.float32) for _ in range(ranks)]
        total = world.step([torch.from_numpy(g).reshape(-1) for g in gradients])[0]
        assert np.allclose(total.view(16, 24).numpy(), oracle.step(gradients), atol=1e-4)


def test_signs_are_one_unit():
    layout = Layout(("w", "b"), ((16, 24), (10,)), block=1)
    world = World(DeMoCompressor(chunk=8, k=5), TorchOps(), layout, 2)
    gradients = [torch.randn(layout.size) for _ in range(2)]
    assert set(world.step(gradients)[0].unique().tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_majority_decides(ranks):
    layout = Layout(("a", "b"), ((40, 7), (13,)), block=32)
    world = World(SignumCompressor(momentum=0.5), TorchOps(), layout, ranks)
    m = [torch.zeros(layout.size) for _ in range(ranks)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        gradients = [
            world.flat([torch.randn(s, generator=generator) for s in layout.shapes])
            for _ in range(ranks)
        ]
        m = [0.5 * a + 0.5 * b for a, b in zip(m, gradients)]
        total = world.step(gradients)[0]
        assert torch.equal(total, torch.sign(sum(torch.sign(x) for x in m)))


def flipped(rank, request):
    """Flip a bit in the body of what rank 1 sends."""
    if rank != 1:
        return request
    tensor = request.tensor.clone()
    tensor.view(-1)[40] ^= 1
    return request._replace(tensor=tensor)


@pytest.mark.parametrize("compressor", TODAY + PRODUCTS, ids=repr)
@pytest.mark.parametrize("what", ["nan", "damage"])
def test_a_failed_step_leaves_the_state_as_it_was(compressor, what):
    """A gradient that is not finite; and, of what travels with a header, a flipped bit."""
    layout = Layout(("w", "b"), ((16, 24), (10,)), block=compressor.block)
    world = World(compressor, TorchOps(), layout, 2)
    generator = torch.Generator().manual_seed(1)

    def gradients():
        return [
            world.flat([torch.randn(s, generator=generator) for s in layout.shapes])
            for _ in range(2)
        ]

    for _ in range(3):
        world.step(gradients())
    before = [[x.clone() for _, x in leaves(state)] for state in world.states]
    bad = gradients()
    if what == "nan":
        bad[1][5] = float("nan")
    elif world.traffic[0][0].tensor.dtype != torch.uint8:
        pytest.skip("sums have no header")
    else:
        world.tamper = flipped
    with pytest.raises((NonFiniteGradientError, PayloadError)):
        world.step(bad)
    for state, then in zip(world.states, before):
        assert all(map(torch.equal, [x for _, x in leaves(state)], then))


def test_what_is_never_used_does_not_move():
    """One bit has no zero: the sign of an unused layer turns from step to step."""
    layout = Layout(("w",), ((64,),), block=32)
    for ranks in (1, 2, 3):
        world = World(SignumCompressor(), TorchOps(), layout, ranks)
        moved = torch.zeros(layout.size)
        for _ in range(6):
            moved += world.step([torch.zeros(layout.size) for _ in range(ranks)])[0]
        assert not moved.any()


@given(seed=SEEDS)
@settings(max_examples=20)
def test_powers_of_two(seed):
    layout = Layout(("w",), ((64,),), block=32)
    world = World(NaturalCompressor("allgather"), TorchOps(), layout, 1)
    x = world.flat([torch.from_numpy(wide(np.random.default_rng(seed), 64))])
    total = world.step([x.clone()])[0]
    mantissa, _ = torch.frexp(total)
    assert set(mantissa.abs().unique().tolist()) <= {0.0, 0.5}
    ratio = (total / x)[x != 0]
    assert ((ratio > 0.5) & (ratio < 2.0)).all() and not total[x == 0].any()


def test_powers_of_two_are_right_on_average():
    layout = Layout(("w",), ((200,),), block=32)
    world = World(NaturalCompressor("allgather"), TorchOps(), layout, 1)
    x = world.flat([torch.randn(200, generator=torch.Generator().manual_seed(8))])
    mean = torch.stack([world.step([x.clone()])[0].double() for _ in range(2000)]).mean(0)
    assert (mean - x.double()).abs().max() < 0.06 * x.abs().max()


@pytest.mark.parametrize("feedback", [True, False])
def test_random_places(feedback):
    compressor = RandomKCompressor(density=1 / 8, feedback=feedback)
    layout = Layout(("a", "b"), ((40, 7), (13,)), block=8)
    world = World(compressor, TorchOps(), layout, 2, average=False)
    x = world.flat(
        [torch.randn(s, generator=torch.Generator().manual_seed(9)) for s in layout.shapes]
    )
    steps, total = 2000, torch.zeros(layout.size).double()
    for _ in range(steps):
        total += world.step([x.clone(), x.clone()])[0].double()
    if feedback:
        kept = sum(state.r.double() for state in world.states)
        assert (total + kept - 2 * steps * x.double()).abs().max() < 1e-2
    else:
        assert (total / (2 * steps) - x).abs().max() < 0.4 * x.abs().max()


@pytest.mark.parametrize("density", [1 / 8, 1 / 128])
@pytest.mark.parametrize("block", [None, 512])
def test_random_places_are_unbiased_at_the_ends_of_layers(density, block, monkeypatch):
    """The exact mean over all draws: a stretch's random number goes through all its places."""
    compressor, ops = RandomKCompressor(density=density, feedback=False), TorchOps()
    shapes = ((10,), (1,), (3,), (17, 8), (129,))
    layout = Layout(tuple("abcde"), shapes, block=block or compressor.block)
    world = World(compressor, ops, layout, 1)
    mean, ones = torch.zeros(layout.size).double(), world.flat([torch.ones(s) for s in shapes])
    lengths = compressor.places(ops, Context(layout, 0, 1, 0))[1]
    every = sorted(set(lengths.tolist()))
    assert every == ([1, 2, 3, 8] if compressor.block == 8 else [1, 3, 8, 10, 128])
    counted = torch.zeros(layout.size).double()
    for length in every:  # all draws of the stretches of one length
        for place in range(length):
            drawn = torch.full_like(lengths, -(-(place << 32) // length))
            monkeypatch.setattr(TorchOps, "random_words", lambda *_, drawn=drawn: drawn)
            index, same = compressor.places(ops, Context(layout, 0, 1, 0))
            total = world.step([ones.clone()])[0].double()
            its = index[same == length]
            mean[its] += total[its] / length
            counted[its] += 1
    assert torch.equal(counted, ones.double()) and torch.equal(mean, ones.double())


@pytest.mark.parametrize(
    "compressor",
    [
        QSGDCompressor(bits=3, bucket_size=32),
        QSGDCompressor(bits=4, bucket_size=48, norm="l2"),
        TernGradCompressor(),
        Int8Compressor(rounding="stochastic", block_size=32),
        BF16Compressor("stochastic"),
        NaturalCompressor(),
    ],
    ids=repr,
)
def test_rounding_is_unbiased_at_the_ends_of_layers(compressor, monkeypatch):
    """The mean over random numbers that go through [0, 1), in layers and groups of any length."""
    compressor, draws = replace(compressor, exchange="allgather"), 128
    shapes = ((1,), (3,), (10,), (33,), (7, 9))
    layout, ops = Layout(tuple("abcde"), shapes, block=compressor.block), TorchOps(static=True)
    world = World(compressor, ops, layout, 1)
    mean, step = torch.zeros(2, layout.size).double()
    generator = torch.Generator().manual_seed(4)
    x = world.flat([torch.rand(s, generator=generator) + 0.5 for s in shapes])
    x[::3] *= -1
    for draw in range(draws):
        word = (2 * draw + 1) << 24  # of 2**32, in the middle of a step
        monkeypatch.setattr(
            TorchOps, "random_words", lambda ops, _, count, word=word: ops.full((count,), word)
        )
        total = world.step([x.clone()])[0].double()
        step = torch.maximum(step, (total - x).abs())
        mean += total / draws
    assert (step > 1e-4).double().mean() > 0.2, "something is rounded"
    assert (mean - x).abs().max() <= 2 * step.max() / draws + 1e-6


@pytest.mark.parametrize("block", [64, 512])
def test_places_of_random_k_in_longer_blocks(block):
    """Beside another method blocks are longer than stretches: each stretch has its place still."""
    compressor, sizes = RandomKCompressor(density=1 / 64), (1000, 7, 64, 129)
    layout = Layout(tuple("abcd"), tuple((n,) for n in sizes), block=block)
    seen = set()
    for step in range(200):
        index = compressor.places(TorchOps(), Context(layout, 0, 1, step))[0].tolist()
        starts = [
            (at, i, min(64, n - i)) for at, n in zip(layout.offsets, sizes) for i in range(0, n, 64)
        ]
        assert len(index) == len(starts) == sum(map(compressor.stretches, sizes))
        assert all(at + i <= x < at + i + n for x, (at, i, n) in zip(index, starts))
        seen.update(index)
    assert len(seen) > 0.9 * sum(sizes)
