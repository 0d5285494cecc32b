"""Local steps on PyTorch: against the papers' pseudo-code and laws, with ranks as threads."""

from __future__ import annotations

import copy
import gc as gc_module
import importlib
import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvd_gradcomp as gc
from hvd_gradcomp.algorithms.combined.local_steps import (
    AVERAGING,
    DILOCO,
    EIGHTH,
    LocalSchedule,
    OuterSGD,
    cut,
)
from hvd_gradcomp.algorithms.combined.round_length import Round
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.torch.local.fragment import Checksum, digest
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.outer import neighbours
from hvd_gradcomp.torch.monitoring.inspection import compression_stats, describe, verify
from tests.oracles import local_steps as oracle
from tests.single.older import scales_on_cpus
from tests.thread_ranks import run

SHAPES = {"a": (40,), "b": (8, 6), "c": (16,), "d": (24,)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
RATE = 0.05


def numbers(*key):
    return np.random.default_rng(key).normal(size=SIZE).astype(np.float32)


START = numbers(0)


def gradient(rank, step, x):
    """Return that of a quadratic whose minimum is another one on each rank, with noise."""
    return (x - numbers(1, rank)) * 0.7 + 0.3 * numbers(2, rank, step)


def inner(rank, step, x):
    return x - RATE * gradient(rank, step, x)


class Net(torch.nn.Module):
    def __init__(self, shapes=SHAPES):
        super().__init__()
        at = 0
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            values = torch.from_numpy(START[at : at + count].copy()).view(shape)
            self.register_parameter(name, torch.nn.Parameter(values))
            at += count
        self.register_buffer("mean", torch.zeros(3))

    def flat(self):
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()]).numpy()

    def set_gradients(self, flat):
        pieces = torch.from_numpy(flat).split([p.numel() for p in self.parameters()])
        for p, piece in zip(self.parameters(), pieces):
            p.grad = piece.view(p.shape).clone()


def over(rank, net, schedule, outer=DILOCO, compression=None, optimizer=None, **more):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), RATE)
    named = net.named_parameters()
    return LocalStepsOptimizer(optimizer, named, rank.connect, schedule, outer, compression, **more)


def train(rank, net, optimizer, steps, first=1):
    for step in range(first, first + steps):
        net.set_gradients(gradient(rank.rank, step, net.flat()))
        optimizer.step()


def flat(tensors):
    return torch.cat([x.detach().reshape(-1) for x in tensors]).numpy()


def globals_of(optimizer):
    return flat(c for fragment in optimizer._rounds.fragments for c in fragment.copies)


def trained(size, steps, *how, **more):
    """Return (parameters, global parameters) of each rank."""

    def work(rank):
        net = Net()
        optimizer = over(rank, net, *how, **more)
        train(rank, net, optimizer, steps)
        return net.flat(), globals_of(optimizer)

    results = run(size, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("every", [1, 3, 7])
def test_diloco_is_that_of_the_paper(ranks, every):
    outer, replicas = oracle.diloco(START, inner, ranks, 15, every, 0.7, 0.9)
    for rank, (weights, shared) in enumerate(trained(ranks, 15, LocalSchedule(every))):
        np.testing.assert_allclose(shared, outer, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(weights, replicas[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fragments", "delay", "blend"),
    [(1, 2, 0.5), (2, 0, None), (2, 1, 0.0), (3, 5, 0.25), (4, 3, None)],
)
def test_streaming_is_that_of_the_paper(fragments, delay, blend):
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    ends = [0, *np.cumsum(sizes)]
    parts = [slice(ends[r.start], ends[r.stop]) for r in cut(sizes, fragments)]
    schedule = LocalSchedule(6, 0, fragments, delay, blend)
    how = 0.7, 0.9, parts, delay, schedule.blend
    outer, replicas = oracle.streaming(START, inner, 2, 25, 6, *how)
    for rank, (weights, shared) in enumerate(trained(2, 25, schedule)):
        np.testing.assert_allclose(shared, outer, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(weights, replicas[rank], rtol=1e-4, atol=1e-5)


def test_sparse_loco_is_that_of_the_paper():
    settings = gc.sparse_loco(every=4, chunk=64, k=4)
    short = SIZE - 8  # the padding of a bucket is a chunk of its own otherwise

    def first(rank, step, x):
        return x - RATE * gradient(rank, step, np.pad(x, (0, 8)))[:short]

    outer, residual = oracle.sparse_loco(START[:short], first, 2, 16, 4, 64, 4, 2, 0.95)

    def work(rank):
        net = Net({"whole": (short,)})
        how = LocalSchedule(settings["every"]), settings["outer"], settings["compression"]
        optimizer = over(rank, net, *how)
        for step in range(1, 17):
            net.set_gradients(gradient(rank.rank, step, np.pad(net.flat(), (0, 8)))[:short])
            optimizer.step()
        (bucket,) = optimizer.reducers[0].buckets
        return net.flat(), flat(bucket.cut(residual_of(bucket.compressor, bucket.state)))

    for rank, (weights, kept) in enumerate(run(2, work)):
        np.testing.assert_allclose(weights, outer, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(kept, residual[rank], rtol=1e-3, atol=1e-4)


@given(st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=10, deadline=None)
def test_after_each_step_and_without_momentum_it_is_averaging(ranks, steps):
    """With SGD the mean of parameters is a step by the mean gradient."""
    x = START.astype(np.float64)
    for step in range(1, steps + 1):
        x = x - RATE * np.mean([gradient(rank, step, x) for rank in range(ranks)], axis=0)
    for weights, _ in trained(ranks, steps, LocalSchedule(1), OuterSGD(1.0, 0.0)):
        np.testing.assert_allclose(weights, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", ["torch", "torch.ddp"])
def test_the_default_is_every_5_steps_an_eighth_averaged(module):
    """Every 5 steps, with one element in 8: what was measured to work."""
    make = importlib.import_module(f"hvd_gradcomp.{module}").LocalSteps
    defaults = inspect.signature(make).parameters
    assert defaults["outer"].default == OuterSGD() == OuterSGD(lr=1.0, momentum=0.0)
    assert (defaults["every"].default, defaults["warmup_steps"].default) == (5, 0)
    assert defaults["compression"].default == EIGHTH


@pytest.mark.parametrize(
    ("outer", "compression", "warmup", "warns"),
    [
        (AVERAGING, None, 0, False),
        (AVERAGING, gc.DGCCompressor(), 0, False),
        (AVERAGING, gc.DGCCompressor(momentum=0.9), 0, True),
        (DILOCO, None, 0, True),
        (DILOCO, gc.DGCCompressor(), 0, True),
        (DILOCO, None, 100, False),
        (OuterSGD(0.5, 0.0), None, 0, False),
        (lambda copies: torch.optim.SGD(copies, 0.7, 0.9), None, 0, True),
        (lambda copies: torch.optim.Adam(copies, 0.7), None, 0, True),
        (lambda copies: torch.optim.Adam(copies, 0.7), None, 1, False),
    ],
)
def test_an_outer_momentum_from_the_first_step_is_warned_of(
    outer, compression, warmup, warns, caplog
):
    with caplog.at_level("WARNING", logger="hvd_gradcomp"):
        run(1, lambda rank: over(rank, Net(), LocalSchedule(4, warmup), outer, compression))
    assert ("Give warmup_steps=200 or more" in caplog.text) == warns


@pytest.mark.parametrize(
    ("outer", "compression", "warns"),
    [
        (DILOCO, EIGHTH, True),
        (lambda copies: torch.optim.SGD(copies, 0.7, 0.9), EIGHTH, True),
        (AVERAGING, EIGHTH, False),
        (DILOCO, None, False),
        (DILOCO, gc.Int8Compressor(), False),
    ],
)
def test_an_outer_momentum_with_the_default_is_warned_of(outer, compression, warns, caplog):
    with caplog.at_level("WARNING", logger="hvd_gradcomp"):
        run(1, lambda rank: over(rank, Net(), LocalSchedule(4, 100), outer, compression))
    assert ("an outer momentum of 0.9 with the default" in caplog.text) == warns


@pytest.mark.parametrize(
    ("compression", "delay", "blend", "warns"),
    [
        (EIGHTH, 1, None, True),
        (gc.ChunkedTopKCompressor(), 1, None, True),
        (gc.SparseGDCompressor(), 1, None, True),
        (gc.RandomKCompressor(feedback=False), 1, None, False),
        (gc.Int8Compressor(), 1, None, False),
        (EIGHTH, 1, 0.0, False),
        (EIGHTH, 0, None, False),
        (None, 1, None, False),
    ],
)
def test_a_delay_with_a_residual_is_warned_of(compression, delay, blend, warns, caplog):
    schedule = LocalSchedule(4, delay=delay, blend=blend)
    with caplog.at_level("WARNING", logger="hvd_gradcomp"):
        run(1, lambda rank: over(rank, Net(), schedule, AVERAGING, compression))
    assert ("delay=1 with a compressor that keeps" in caplog.text) == warns


@pytest.mark.parametrize(
    ("ranks", "compression", "warns"),
    [(1, EIGHTH, True), (1, gc.Int8Compressor(), False), (1, None, False), (2, EIGHTH, False)],
)
def test_one_rank_with_a_residual_is_warned_of(ranks, compression, warns, caplog):
    with caplog.at_level("WARNING", logger="hvd_gradcomp"):
        run(ranks, lambda rank: over(rank, Net(), LocalSchedule(4), AVERAGING, compression))
    assert ("one rank alone exchanges with nobody" in caplog.text) == warns


def test_diloco_begins_with_dense_steps():
    assert (gc.diloco()["every"], gc.diloco()["warmup_steps"]) == (15, 200)
    assert gc.diloco()["outer"] == gc.OuterSGD(0.7, 0.9)
    assert gc.sparse_loco()["outer"] == AVERAGING


FEEDBACK = [
    gc.SparseGDCompressor(density=0.1),
    gc.GradientDroppingCompressor(ratio=0.9),
    gc.StromCompressor(tau=0.01),
    gc.VarianceCompressor(alpha=1.0, moments="step", feedback_rounding=True),
    gc.ChunkedTopKCompressor(chunk=32, k=3, decay=1.0),
    gc.OneBitCompressor(),
]


@pytest.mark.parametrize("compression", FEEDBACK, ids=lambda c: type(c).__name__)
def test_nothing_is_lost_over_rounds(compression):
    """All pseudogradients so far are what was applied, and what is kept on the ranks."""
    rounds, every, size = 5, 3, 2

    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(every), OuterSGD(1.0, 0.0), compression)
        total = np.zeros(SIZE)
        for step in range(1, rounds * every + 1):
            before = globals_of(optimizer) if optimizer.steps_made else START
            net.set_gradients(gradient(rank.rank, step, net.flat()))
            moved = inner(rank.rank, step, net.flat())
            optimizer.step()
            if step % every == 0:
                total += before - moved
        kept = np.zeros(SIZE)
        for bucket in optimizer.reducers[0].buckets:
            residual = residual_of(bucket.compressor, bucket.state)
            order = dict(zip(bucket.layout.names, bucket.cut(residual)))
            kept = flat(order[name] for name in SHAPES)
        return total, kept, START - globals_of(optimizer)

    results = run(size, work)
    applied = results[0][2] * size
    expected = sum(total for total, _, _ in results)
    kept = sum(kept for _, kept, _ in results)
    np.testing.assert_allclose(applied + kept, expected, atol=2e-3)


def test_replicas_are_equal_after_each_exchange():
    def work(rank):
        net = Net()
        how = LocalSchedule(4), DILOCO, gc.DGCCompressor(density=0.1, momentum=0.0)
        adam = torch.optim.AdamW(net.parameters(), 0.01)
        optimizer = over(rank, net, *how, optimizer=adam)
        history = []
        for step in range(1, 13):
            train(rank, net, optimizer, 1, step)
            history.append(net.flat())
        verify(optimizer)
        return history

    first, second = run(2, work)
    for step in range(1, 13):
        assert np.array_equal(first[step - 1], second[step - 1]) == (step % 4 == 0)


def test_warmup_averages_gradients():
    def work(rank):
        net = Net()
        adam = torch.optim.AdamW(net.parameters(), 0.01)
        optimizer = over(rank, net, LocalSchedule(3, warmup_steps=4), optimizer=adam)
        train(rank, net, optimizer, 4)
        return net.flat(), optimizer.rounds, compression_stats(optimizer).bytes_sent

    net, x = Net(), START
    adam = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(1, 5):
        x = net.flat()
        net.set_gradients((gradient(0, step, x) + gradient(1, step, x)) / 2)
        adam.step()
    for weights, rounds, sent in run(2, work):
        np.testing.assert_allclose(weights, net.flat(), rtol=1e-4, atol=1e-5)
        assert rounds == 0
        assert sent == 4 * SIZE * 4


def test_momentum_of_the_outer_optimizer_is_taken_over():
    """DGC corrects it: sent in full, it is the outer optimizer's own."""

    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2), DILOCO, gc.DGCCompressor(density=1.0))
        train(rank, net, optimizer, 8)
        assert optimizer.outer.param_groups[0]["momentum"] == 0
        state = optimizer.state_dict()["gradcomp"]["outer"]
        assert state["param_groups"][0]["momentum"] == 0.9
        return net.flat()

    outer, _ = oracle.diloco(START, inner, 2, 8, 2, 0.7, 0.9)
    for weights in run(2, work):
        np.testing.assert_allclose(weights, outer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut_at", [3, 5, 6, 7, 8, 9])
@pytest.mark.parametrize(
    "schedule",
    [LocalSchedule(4), LocalSchedule(4, 2, 2, 2), LocalSchedule(6, 0, 3, 3, 0.0)],
    ids=str,
)
def test_resumes_to_the_bit(schedule, cut_at):
    """At any step, also while an exchange is on its way."""

    def whole(rank, steps, resume):
        net = Net()
        adam = torch.optim.AdamW(net.parameters(), 0.02)
        compressor = gc.SparseGDCompressor(density=0.1)
        optimizer = over(rank, net, schedule, DILOCO, compressor, optimizer=adam)
        if resume is not None:
            net.load_state_dict(resume[0])
            optimizer.load_state_dict(resume[1])
        first = optimizer.steps_made + 1
        train(rank, net, optimizer, steps, first)
        states = [x.clone() for b in optimizer.reducers[0].buckets for _, x in leaves(b.state)]
        return net, optimizer, states

    def straight(rank):
        net, optimizer, states = whole(rank, 16, None)
        return net.flat(), globals_of(optimizer), states

    def resumed(rank):
        net, optimizer, _ = whole(rank, cut_at, None)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        train(rank, net, optimizer, 2, cut_at + 1)  # saving has changed nothing
        for fragment in optimizer._rounds.fragments:
            fragment.exchange.abort()
        net, optimizer, states = whole(rank, 16 - cut_at, saved)
        return net.flat(), globals_of(optimizer), states

    for left, right in zip(run(2, straight), run(2, resumed)):
        assert not isinstance(right, Exception), right
        np.testing.assert_array_equal(left[0], right[0])
        np.testing.assert_array_equal(left[1], right[1])
        for x, y in zip(left[2], right[2]):
            assert torch.equal(x, y)


def test_another_rank_s_state_gives_the_global_parameters():
    saved = {}

    def save(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4))
        train(rank, net, optimizer, 6)
        saved[rank.rank] = optimizer.state_dict()
        return globals_of(optimizer)

    def load(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4))
        optimizer.load_state_dict(saved[0])
        return net.flat()

    (shared, _), (loaded, other) = run(2, save), run(2, load)
    assert not np.array_equal(loaded, shared)
    np.testing.assert_array_equal(other, shared)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("steps", [2, 9], ids=["dense first steps", "middle of a round"])
def test_two_ranks_have_saved_and_others_go_on(steps, ranks):
    saved, schedule = {}, LocalSchedule(4, warmup_steps=3)
    how = schedule, MEANS, gc.SparseGDCompressor(density=0.1)

    def kept(optimizer):
        return flat(
            residual_of(bucket.compressor, bucket.state)
            for reducer in optimizer.reducers
            for bucket in reducer.buckets
        )

    def save(rank):
        net = Net()
        optimizer = over(rank, net, *how)
        train(rank, net, optimizer, steps)
        saved[rank.rank] = copy.deepcopy(optimizer.state_dict())
        return net.flat(), globals_of(optimizer), kept(optimizer)

    def load(rank):
        net = Net()
        optimizer = over(rank, net, *how)
        optimizer.load_states(saved[other] for other in (1, 0))
        result = net.flat(), kept(optimizer)
        train(rank, net, optimizer, 4, steps + 1)
        return *result, optimizer.steps_made

    before, after = run(2, save), run(ranks, load)
    for rank, (weights, residual, made) in enumerate(after):
        assert made == steps + 4
        if ranks == 2:  # each its own
            np.testing.assert_array_equal(weights, before[rank][0])
            np.testing.assert_array_equal(residual, before[rank][2])
            continue
        np.testing.assert_array_equal(weights, before[0][0 if steps == 2 else 1])
        share = (before[0][2].astype(float) + before[1][2]) / ranks
        np.testing.assert_allclose(residual, share, rtol=1e-6)


def test_what_all_ranks_save_in_the_dense_first_steps_has_their_parameters():
    saved = {}

    def save(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4, warmup_steps=3))
        train(rank, net, optimizer, 2)
        saved[rank.rank] = copy.deepcopy(optimizer.state_dict("consolidated"))
        return net.flat()

    def load(rank):
        net = Net()
        over(rank, net, LocalSchedule(4, warmup_steps=3)).load_state_dict(saved[0])
        return net.flat()

    for weights, loaded in zip(run(2, save), run(2, load)):
        np.testing.assert_array_equal(loaded, weights)


def test_what_was_saved_must_fit():
    def work(rank):
        net = Net()
        saved = over(rank, net, LocalSchedule(4)).state_dict()
        over(rank, net, LocalSchedule(5)).load_state_dict(saved)

    (error,) = run(1, work)
    assert isinstance(error, CheckpointError)
    assert "every=4" in str(error) and "every=5" in str(error)


def test_a_plain_optimizer_s_state_is_taken():
    def work(rank):
        net = Net()
        plain = torch.optim.AdamW(net.parameters(), 0.01)
        net.set_gradients(numbers(3))
        plain.step()
        saved = plain.state_dict()
        adam = torch.optim.AdamW(net.parameters(), 0.01)
        optimizer = over(rank, net, LocalSchedule(2), optimizer=adam)
        optimizer.load_state_dict(saved)
        train(rank, net, optimizer, 2)
        return adam.state[net.a]["step"].item()

    assert run(1, work) == [3.0]


def errors_of(size, work):
    results = run(size, work)
    assert all(isinstance(result, Exception) for result in results), results
    return results


def test_different_numbers_of_steps_are_an_error_on_all_ranks():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4))
        train(rank, net, optimizer, 3 + rank.rank)
        optimizer.exchange() if rank.rank == 0 else None
        train(rank, net, optimizer, 8)

    for error in errors_of(2, work):
        assert isinstance(error, OutOfStepError), error
        assert "rank 0 after 3 steps in exchange()" in str(error)


def test_other_settings_on_one_rank_are_an_error_on_all_ranks():
    def work(rank):
        net = Net()
        train(rank, net, over(rank, net, LocalSchedule(4 + 4 * rank.rank)), 8)

    for error in errors_of(2, work):
        assert isinstance(error, MismatchError), error
        assert "every=4" in str(error) and "every=8" in str(error)


def test_other_parameters_on_one_rank_are_an_error_on_all_ranks():
    def work(rank):
        net = Net()
        with torch.no_grad():
            net.a[3] += rank.rank
        train(rank, net, over(rank, net, LocalSchedule(4)), 1)  # before anything is trained

    for error in errors_of(2, work):
        assert isinstance(error, DivergedError), error


def test_parameters_may_be_set_between_rounds():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2))
        train(rank, net, optimizer, 2)
        net.load_state_dict(Net().state_dict())
        train(rank, net, optimizer, 1)
        return globals_of(optimizer)

    for weights in run(2, work):
        np.testing.assert_array_equal(weights, START)


SCHEDULES = {
    "plain": (LocalSchedule(2), {}),
    "skip": (LocalSchedule(2), {"nonfinite": "skip"}),
    "fragments": (LocalSchedule(4, fragments=2), {}),
    "delay": (LocalSchedule(4, delay=1), {}),
    "delay without blend": (LocalSchedule(4, delay=1, blend=0.0), {}),
    "blend": (LocalSchedule(2, blend=0.25), {}),
    "warm-up": (LocalSchedule(2, warmup_steps=3), {}),
    "deadline": (LocalSchedule(2, deadline=20.0), {}),
}


MEANS = OuterSGD(1.0, 0.0)


def scheduled(rank, net, kind, optimizer, outer=MEANS, compression=None):
    schedule, more = SCHEDULES[kind]
    if schedule.deadline is not None:
        more = {**more, "connect_clock": lambda: rank.apart().connect("rounds")}
    return over(rank, net, schedule, outer, compression, optimizer, **more)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_weights_that_are_swapped_and_put_back_were_not_set(kind):
    """Narrow weights are swapped for others after each step, as for an evaluation of averages.

    One rank moves each weight by the least that bfloat16 can, so the mean is half of that.
    """

    def work(rank, swaps):
        net = Net().bfloat16()
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(4.0)  # the next one below is 2**-6 away
        optimizer = scheduled(rank, net, kind, torch.optim.SGD(net.parameters(), 2.0**-6))
        for step in range(28):
            if swaps:
                stored = [p.detach().clone() for p in net.parameters()]
                for p, value in zip(net.parameters(), stored):
                    p.data.copy_(torch.zeros_like(p))
                    p.data.copy_(value)
                with torch.no_grad():
                    for p, value in zip(net.parameters(), stored):
                        p.copy_(0 * value)
                        p.copy_(value)
            for p in net.parameters():
                p.grad = torch.full_like(p, float(rank.rank and step % 4 == 3))
            optimizer.step()
        optimizer.exchange()
        return globals_of(optimizer)

    plain = whole(run(2, lambda rank: work(rank, False)))
    swapped = whole(run(2, lambda rank: work(rank, True)))
    np.testing.assert_array_equal(plain, swapped)
    assert (plain[0] < 4.0).all()


class Words(torch.nn.Module):
    """An embedding that renormalizes in forward what is looked up, and a layer after it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(12, 4, max_norm=1.0)
        self.last = torch.nn.Linear(4, 1)
        for p in self.parameters():  # ranks are threads, which share a seed
            p.data.normal_(generator=torch.Generator().manual_seed(p.numel()))

    def forward(self, words):
        return self.last(self.table(words)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_rows_that_forward_renormalizes_are_local(kind, dtype):
    """Each rank looks up others, also in a forward between an exchange and the next step."""

    def work(rank):
        net = Words().to(dtype)
        optimizer = scheduled(rank, net, kind, torch.optim.SGD(net.parameters(), 0.25), DILOCO)
        drawn = torch.Generator().manual_seed(rank.rank)
        for _ in range(3 * 4 + 3):
            optimizer.zero_grad()
            with torch.no_grad():
                net(torch.randint(12, (3,), generator=drawn))
            net(torch.randint(12, (3,), generator=drawn)).backward()
            optimizer.step()
        optimizer.exchange()
        verify(optimizer)
        return flat(net.float().parameters())

    first, second = whole(run(2, work))
    np.testing.assert_array_equal(first, second)


def whole(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_what_forward_renormalizes_is_part_of_the_pseudogradient():
    def work(rank):
        net = Words()
        with torch.no_grad():
            net.table.weight.fill_(2.0)  # of norm 4
        optimizer = over(rank, net, LocalSchedule(2), OuterSGD(1.0, 0.0))
        means = []
        for _ in range(2):
            for _ in range(2):
                net(torch.tensor([rank.rank]))
                optimizer.step()  # without a gradient
            means.append(net.table.weight.detach().norm(dim=1)[:3])
        return means

    for (mean, again), _ in zip(whole(run(2, work)), range(2)):
        torch.testing.assert_close(mean, torch.tensor([2.5, 2.5, 4.0]))  # of 1 and 4
        torch.testing.assert_close(again, torch.tensor([1.75, 1.75, 4.0]))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_table_that_is_set_on_all_ranks_is_taken_over(restarts):
    def work(rank):
        net = Words()
        optimizer = over(rank, net, LocalSchedule(2), OuterSGD(1.0, 0.5))
        for _ in range(2):
            net(torch.tensor([rank.rank]))
            optimizer.step()
        net.table.weight.data.copy_(torch.arange(48.0).view(12, 4))
        if restarts:
            optimizer.restart()
            net(torch.tensor([rank.rank]))
        optimizer.step()
        shared = optimizer._rounds.fragments[0].copies[0].detach().clone()
        net(torch.tensor([rank.rank]))
        optimizer.step()
        return shared

    for shared in whole(run(2, work)):
        assert torch.equal(shared, torch.arange(48.0).view(12, 4))


def test_what_was_not_sent_before_a_restart_is_dropped():
    def work(rank):
        net = Net()
        sparse = gc.SparseGDCompressor(density=0.1)
        optimizer = over(rank, net, LocalSchedule(2), AVERAGING, sparse)
        train(rank, net, optimizer, 4)
        net.load_state_dict(Net().state_dict())
        before = optimizer.stats()
        optimizer.restart()
        after = optimizer.stats()
        assert replace(after, residual_norm=before.residual_norm) == before
        assert after.residual_norm == 0 < before.residual_norm
        for _ in range(2):
            net.set_gradients(np.zeros(SIZE, np.float32))
            optimizer.step()
        return net.flat()

    for values in whole(run(2, work)):
        np.testing.assert_array_equal(values, START)


@pytest.mark.parametrize("name", ["sparse", "onebit", "eighth"])
def test_what_was_not_sent_of_parameters_that_are_set_is_dropped(name):
    """Without a restart too, and of those parameters alone."""
    method = {
        "sparse": gc.SparseGDCompressor(density=0.1),
        "onebit": gc.OneBitCompressor(),
        "eighth": EIGHTH,
    }[name]

    def unsent(optimizer):
        reducer = optimizer.reducers[0]
        layers = {}
        for bucket in reducer.buckets:
            residual = residual_of(bucket.compressor, bucket.state)
            layers |= zip(bucket.layout.names, bucket.cut(residual.clone()))
        return [layers[key] for key in SHAPES]

    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2), AVERAGING, method)
        train(rank, net, optimizer, 4)
        before = unsent(optimizer)
        with torch.no_grad():
            net.a.copy_(torch.zeros(40))
            net.b[:4] = 1.0
        at = net.flat().copy()
        net.set_gradients(np.zeros(SIZE, np.float32))
        optimizer.step()
        after = unsent(optimizer)
        return before, after, at, net.flat()

    for before, after, at, flat in whole(run(2, work)):
        assert all(x.any() for x in before[:2])
        expected = [x.clone() for x in before]
        expected[0][:], expected[1][:4] = 0.0, 0.0
        assert all(map(torch.equal, after, expected))
        np.testing.assert_array_equal(flat, at)


def test_parameters_that_one_rank_sets_are_an_error_on_all_ranks():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2))
        train(rank, net, optimizer, 2)
        if rank.rank == 1:
            net.load_state_dict(Net().state_dict())
        train(rank, net, optimizer, 2)

    for error in errors_of(2, work):
        assert isinstance(error, DivergedError), error


def test_parameters_that_are_not_finite():
    def work(rank, policy):
        net = Net()
        how = LocalSchedule(2), DILOCO, gc.SparseGDCompressor(density=0.1)
        optimizer = over(rank, net, *how, nonfinite=policy)
        train(rank, net, optimizer, 2)
        before = globals_of(optimizer)
        kept = [x.clone() for b in optimizer.reducers[0].buckets for _, x in leaves(b.state)]
        train(rank, net, optimizer, 1, 3)
        with torch.no_grad():
            net.b[0, 0] = float("nan") if rank.rank == 1 else net.b[0, 0]
        train(rank, net, optimizer, 1, 4)
        now = [x for b in optimizer.reducers[0].buckets for _, x in leaves(b.state)]
        assert all(map(torch.equal, kept, now))
        np.testing.assert_array_equal(net.flat(), before)
        train(rank, net, optimizer, 2, 5)
        return net.flat()

    for error in errors_of(2, lambda rank: work(rank, None)):
        assert isinstance(error, gc.NonFiniteGradientError)
    first, second = run(2, lambda rank: work(rank, "skip"))
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()


@scales_on_cpus
def test_a_scaler_s_overflow_on_one_rank_keeps_ranks_together():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for step in range(1, 7):
            net.zero_grad()
            x = torch.cat([p.reshape(-1) for p in net.parameters()])
            loss = (x * torch.from_numpy(gradient(rank.rank, step, net.flat()))).sum()
            if step == 3 and rank.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return net.flat(), optimizer.steps_made, scaler.get_scale()

    def alone(rank, step, x):
        return x if (rank, step) == (1, 3) else inner(rank, step, x)

    outer, _ = oracle.diloco(START, alone, 2, 6, 2, 0.7, 0.9)
    results = run(2, work)
    assert [scale for *_, scale in results] == [4.0, 2.0]
    for weights, steps, _ in results:
        assert steps == 6
        np.testing.assert_allclose(weights, outer, rtol=1e-4, atol=1e-5)


def test_an_exchange_that_is_asked_for_while_another_is_on_its_way():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(3, 0, 2, 1))
        train(rank, net, optimizer, 4)
        optimizer.exchange()
        shared = net.flat()
        train(rank, net, optimizer, 5, 5)
        optimizer.exchange()
        return shared, net.flat()

    (shared, end), other = run(2, work)
    np.testing.assert_array_equal(shared, other[0])
    np.testing.assert_array_equal(end, other[1])


def test_an_exchange_that_is_asked_for():
    """After different numbers of steps, and with none since the last exchange."""

    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4, fragments=2))
        train(rank, net, optimizer, 4)
        optimizer.exchange()
        train(rank, net, optimizer, rank.rank, 5)
        optimizer.exchange()
        before = net.flat(), optimizer.steps_made, optimizer.outer.state_dict()
        optimizer.exchange()
        np.testing.assert_array_equal(net.flat(), before[0])
        train(rank, net, optimizer, 4, 9)
        optimizer.exchange()
        return *before[:2], net.flat()

    (first, made, end), (second, made_there, end_there) = run(2, work)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(end, end_there)
    assert (made, made_there) == (4, 5)


def test_schedulers_of_both_optimizers():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2))
        inner_rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        outer_rate = torch.optim.lr_scheduler.StepLR(optimizer.outer, 1, 0.1)
        for step in range(1, 5):
            train(rank, net, optimizer, 1, step)
            inner_rate.step()
            if step % 2 == 0:
                outer_rate.step()
        return optimizer.param_groups[0]["lr"], optimizer.outer.param_groups[0]["lr"]

    for rates in run(2, work):
        assert rates == pytest.approx((RATE / 16, 0.007))


def test_buffers_are_averaged_or_left():
    def work(rank, averaged):
        net = Net()
        buffers = net.named_buffers() if averaged else None
        optimizer = over(rank, net, LocalSchedule(2), named_buffers=buffers)
        net.mean.fill_(rank.rank)
        train(rank, net, optimizer, 2)
        return net.mean[0].item()

    assert run(2, lambda rank: work(rank, True)) == [0.5, 0.5]
    assert run(2, lambda rank: work(rank, False)) == [0.0, 1.0]


def test_half_precision_has_global_parameters_in_float32():
    def work(rank):
        net = Net().to(torch.bfloat16)
        optimizer = over(rank, net, LocalSchedule(2))
        for _ in range(4):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert optimizer._rounds.fragments[0].copies[0].dtype == torch.float32
        return net.a.detach().float().numpy()

    first, second = run(2, work)
    np.testing.assert_array_equal(first, second)


def test_half_precision_takes_nothing_back():
    """Keep what only the global parameters can express, where nothing was trained."""

    def work(rank):
        net = Net().to(torch.bfloat16)
        optimizer = over(rank, net, LocalSchedule(1), OuterSGD(1.0, 0.0))
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        (fragment,) = optimizer._rounds.fragments
        with torch.no_grad():
            for c in fragment.copies:
                c.add_(1e-4)
            fragment.hand_out(0.0)
        before = [c.clone() for c in fragment.copies]
        optimizer.step()
        return all(map(torch.equal, before, fragment.copies))

    assert run(2, work) == [True, True]


def test_hooks_of_both():
    def work(rank):
        net, seen = Net(), []
        optimizer = over(rank, net, LocalSchedule(2))
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append("state"))
        train(rank, net, optimizer, 2)
        optimizer.state_dict()
        return seen

    assert run(1, work) == [["step", "step", "state"]]


def test_frozen_parameters_stay():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2))
        train(rank, net, optimizer, 2)
        net.c.requires_grad_(False)
        before = net.c.detach().clone()
        for step in (3, 4):
            net.set_gradients(gradient(rank.rank, step, net.flat()))
            net.c.grad = None
            optimizer.step()
        return torch.equal(before, net.c)

    assert run(2, work) == [True, True]


def test_a_parameter_that_thaws_on_one_rank_is_an_error_on_all():
    def work(rank):
        net = Net()
        net.c.requires_grad_(False)
        optimizer = over(rank, net, LocalSchedule(2))
        train(rank, net, optimizer, 2)
        net.c.requires_grad_(rank.rank == 1)
        train(rank, net, optimizer, 2, 3)

    for error in errors_of(2, work):
        assert "1 on rank 1" in str(error), error


def test_statistics_count_local_steps():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4, fragments=2))
        train(rank, net, optimizer, 8)
        return compression_stats(optimizer), describe(optimizer)

    for stats, table in run(2, work):
        assert stats.steps == 8
        assert stats.bytes_sent == 2 * SIZE * 4
        assert stats.ratio == 4.0
        assert set(stats.layers) == set(SHAPES)
        assert all(name in table for name in SHAPES)


def test_bad_settings():
    def make(**more):
        def work(rank):
            net = Net()
            how = {"schedule": LocalSchedule(2), "outer": DILOCO, "compression": None, **more}
            over(rank, net, **how)

        (error,) = run(1, work)
        return str(error)

    assert "outer=" in make(outer=0.7)
    assert "nonfinite" in make(nonfinite="propagate")
    assert "moments='step'" in make(compression=gc.VarianceCompressor(moments="microbatch"))
    for bad in (
        {"every": 0},
        {"every": 2, "delay": 2},
        {"every": 2, "fragments": 3},
        {"blend": 1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(reversed(bad)))):
            LocalSchedule(**bad)
    with pytest.raises(ValueError, match="momentum"):
        OuterSGD(1.0, 0.0, nesterov=True)
    with pytest.raises(ValueError, match="layers"):
        cut([1], 2)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_fragments_are_all_layers_in_order(sizes, data):
    fragments = data.draw(st.integers(1, len(sizes)))
    parts = cut(sizes, fragments)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert all(len(part) for part in parts) and len(parts) == fragments


@given(st.integers(1, 20), st.integers(0, 7), st.data())
@settings(max_examples=60, deadline=None)
def test_each_fragment_travels_once_a_round(every, warmup, data):
    fragments = data.draw(st.integers(1, every))
    delay = data.draw(st.integers(0, every - 1))
    schedule = LocalSchedule(every, warmup, fragments, delay)

    def round_of(step):
        number = (step - warmup - 1) // every
        return Round(warmup + number * every, every, every if number else 0)

    for first in range(warmup + 1, warmup + 3 * every):
        steps = range(first, first + every)
        sent = [f for step in steps for f in schedule.sends(step, round_of(step))]
        assert sorted(sent) == list(range(fragments))
    for step in range(warmup + 1, 60):
        later = step + delay
        assert schedule.applies(later, round_of(later)) == schedule.sends(step, round_of(step))


def test_what_ranks_go_on_from_in_the_warm_up_are_the_parameters_of_now():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(4, warmup_steps=6))
        train(rank, net, optimizer, 3)
        (fragment,) = optimizer.common_state_dict()["gradcomp"]["fragments"]
        return net.flat(), flat(fragment["global"])

    for now, common in run(2, work):
        np.testing.assert_array_equal(now, common)
        assert not np.array_equal(now, START)


def made_in_inference_mode():
    """Return the tensors that are alive and can never be written to again."""
    tensors = []
    for item in gc_module.get_objects():
        if issubclass(type(item), torch.Tensor) and item.is_inference():
            tensors.append(item)
    return tensors


WITH_STATE = [("plain", c) for c in (None, *FEEDBACK)]
# With a deadline the numbers of steps depend on time, and no two runs are equal to the bit.
WITH_STATE += [(kind, FEEDBACK[0]) for kind in SCHEDULES if kind not in ("plain", "deadline")]


@pytest.mark.parametrize(("kind", "compression"), WITH_STATE, ids=str)
def test_whatever_is_called_in_inference_mode_makes_no_inference_tensors(kind, compression):
    """Libraries evaluate so, and an exchange comes before."""

    def work(rank, mode):
        net = Net()
        adam = torch.optim.AdamW(net.parameters(), 0.01)
        with mode():
            optimizer = scheduled(rank, net, kind, adam, DILOCO, compression)
        for step in range(1, 13):
            train(rank, net, optimizer, 1, step)
            if step % 3 == 0:
                with mode():
                    optimizer.exchange()
                    verify(optimizer)
                    saved = optimizer.state_dict()
                    if step == 6:
                        optimizer.load_state_dict(saved)
                    if step == 9:
                        optimizer.restart()
        return net.flat()

    inside = whole(run(2, lambda rank: work(rank, torch.inference_mode)))
    outside = whole(run(2, lambda rank: work(rank, torch.no_grad)))
    np.testing.assert_array_equal(inside, outside)
    assert not made_in_inference_mode()


COSTS = {  # collectives of a round, the comparison's included
    "NoneCompressor()": 2,
    "Int8Compressor(exchange='allgather')": 2,
    "Int8Compressor(exchange='two_shot', feedback=True)": 3,
    "ChunkedTopKCompressor(chunk=64, k=8, values='int4', decay=1)": 2,
    "SparseGDCompressor(density=0.1)": 2,
}


@pytest.mark.parametrize("method", COSTS)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_has_one_collective_more_than_its_payload(method, delay):
    def work(rank):
        net = Net()
        schedule = LocalSchedule(2, delay=delay)
        optimizer = over(rank, net, schedule, AVERAGING, eval(method, vars(gc)))
        train(rank, net, optimizer, 4 + delay)
        before = rank._number
        train(rank, net, optimizer, 6, first=5 + delay)
        return (rank._number - before) / 3

    assert whole(run(2, work)) == [COSTS[method]] * 2


def test_a_rank_compresses_before_it_waits_for_the_others(monkeypatch):
    def work(rank):
        net = Net()
        optimizer = over(rank, net, LocalSchedule(2), AVERAGING, gc.Int8Compressor())
        (fragment,) = optimizer._rounds.fragments
        channel, started = optimizer._rounds._ranks, []
        start = channel.start_gather

        def watched(row):
            wait = start(row)
            return lambda: (started.append(fragment.exchange.started), wait())[1]

        monkeypatch.setattr(channel, "start_gather", watched)
        train(rank, net, optimizer, 4)
        return started

    assert whole(run(2, work)) == [[False, True, True]] * 2  # the first compares the models


def test_a_checksum_of_global_parameters():
    """It is the same for copies elsewhere in memory, and another one if any bit is flipped."""
    shapes = ((3, 5), (), (0,), (2, 3, 4, 4), (7,))
    tensors = [torch.randn(shape) for shape in shapes] + [torch.randn(5, dtype=torch.bfloat16)]
    tensors += [torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.complex64)]
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    copies = neighbours(tensors)
    with torch.no_grad():
        for c, x in zip(copies, tensors):
            assert c.stride() == x.stride() and c.dtype in (x.dtype, torch.float32)
            c.copy_(x)
        checksum = Checksum(copies)
        expected = checksum.digest()
        assert digest([c.clone() for c in copies]) == expected
        for c in copies:
            flat = c.detach().as_strided((c.numel(),), (1,), c.storage_offset())
            for word in flat.view(torch.uint8)[-1:]:
                word ^= 4
                assert checksum.digest() != expected
                word ^= 4
        assert checksum.digest() == expected
        copies[0].data = copies[0].data.clone()
        copies[0][1, 1] += 1
        assert checksum.digest() not in (expected, 0)


@pytest.mark.parametrize("method", COSTS)
@pytest.mark.parametrize("delay", [0, 1])
def test_an_error_of_the_comparison_loses_nothing(method, delay):
    """The compressor has run by then; what it keeps is as before, and ranks go on."""

    def work(rank, fails):
        net = Net()
        schedule = LocalSchedule(3, delay=delay, blend=0.0)
        optimizer = over(rank, net, schedule, AVERAGING, eval(method, vars(gc)))
        train(rank, net, optimizer, 5)
        fragment = optimizer._rounds.fragments[0]
        changed = fragment.copies[0].detach()
        before, kept = changed.clone(), copy.deepcopy(fragment.exchange.save("sharded"))
        net.set_gradients(gradient(rank.rank, 6, net.flat()))
        if fails:
            changed[1] += rank.rank
            with pytest.raises(DivergedError):
                optimizer.step()
            changed.copy_(before)
            assert not fragment.in_flight
            assert_equal_states(fragment.exchange.save("sharded"), kept)
        else:
            optimizer.step()
        optimizer.exchange()
        train(rank, net, optimizer, 7, first=7)
        return net.flat(), globals_of(optimizer)

    failed, as_ever = (whole(run(2, partial(work, fails=fails))) for fails in (True, False))
    for one, other in zip(failed, as_ever):
        for x, y in zip(one, other):
            np.testing.assert_array_equal(x, y)


def assert_equal_states(one, other):
    """Compare nested states, to the bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_states(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for x, y in zip(one, other):
            assert_equal_states(x, y)
    else:
        assert one == other
