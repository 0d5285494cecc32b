"""Adam that exchanges momenta: against the paper's pseudo-code, with ranks as threads."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hvd_gradcomp as gc
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.monitoring.inspection import compression_stats, describe, verify
from tests.oracles import one_bit_adam as oracle
from tests.single.older import scales_on_cpus
from tests.single.test_local_steps import SIZE, START, Net, flat, gradient
from tests.thread_ranks import run

WARMUP, RATE, DECAY = 4, 0.02, 0.1


def over(rank, net, compression=None, kind=torch.optim.AdamW, warmup=WARMUP, **more):
    adam = kind(net.parameters(), RATE, weight_decay=DECAY)
    named = net.named_parameters()
    return MomentumExchangeOptimizer(adam, named, rank.connect, compression, warmup, **more)


def train(rank, net, optimizer, steps, first=1):
    for step in range(first, first + steps):
        net.set_gradients(gradient(rank.rank, step, net.flat()))
        optimizer.step()


def largest(x):
    """Ten in a hundred."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[: round(len(x) / 10)]
    kept[places] = x[places]
    return kept


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("compress", [None, largest])
def test_it_is_that_of_the_paper(ranks, compress):
    # One layer, so that its share is the whole's; without what pads a bucket.
    compressor = None if compress is None else gc.SparseGDCompressor(density=0.1)

    def work(rank):
        net = Net({"whole": (SIZE,)})
        optimizer = over(rank, net, compressor)
        train(rank, net, optimizer, 12)
        verify(optimizer)
        momentum = optimizer.state[net.whole]["exp_avg"]
        return net.flat(), momentum.numpy()

    how = compress or (lambda x: x), RATE, (0.9, 0.999), 1e-8, DECAY
    x, m, _ = oracle.train(START, gradient, ranks, 12, WARMUP, *how)
    for weights, momentum in run(ranks, work):
        if compress is None:
            np.testing.assert_allclose(weights, x, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(momentum, m, rtol=1e-3, atol=1e-4)
        else:  # a tie in rounding may choose another element
            close = np.isclose(weights, x, rtol=1e-3, atol=1e-3)
            assert close.mean() > 0.95


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_first_steps_are_plain_adam(kind):
    net = Net()
    adam = kind(net.parameters(), RATE, weight_decay=DECAY)
    for step in range(1, WARMUP + 1):
        x = net.flat()
        net.set_gradients((gradient(0, step, x) + gradient(1, step, x)) / 2)
        adam.step()

    def work(rank):
        model = Net()
        train(rank, model, over(rank, model, gc.OneBitCompressor(), kind), WARMUP)
        return model.flat()

    for weights in run(2, work):
        np.testing.assert_allclose(weights, net.flat(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_with_the_variance_that_adam_would_have_it_is_adam(kind):
    """Dense momenta are Adam's own; the second moment is that of the last dense step."""
    net = Net()
    adam = kind(net.parameters(), RATE, weight_decay=DECAY)
    for step in range(1, 9):
        net.set_gradients(gradient(0, step, net.flat()))
        if step <= WARMUP:
            adam.step()
            continue
        for group in adam.param_groups:  # what Adam does, by hand
            for p in group["params"]:
                state, g = adam.state[p], p.grad
                with torch.no_grad():
                    if kind is torch.optim.Adam:
                        g = g + DECAY * p
                    else:
                        p.mul_(1 - RATE * DECAY)
                    state["step"] += 1
                    state["exp_avg"].lerp_(g, 0.1)
                    root = (state["exp_avg_sq"] / (1 - 0.999**WARMUP)).sqrt() + 1e-8
                    p.sub_(RATE * state["exp_avg"] / (1 - 0.9**step) / root)

    def work(rank):
        model = Net()
        train(rank, model, over(rank, model, None, kind), 8)
        return model.flat()

    np.testing.assert_allclose(run(1, work)[0], net.flat(), rtol=1e-4, atol=1e-5)


def test_resumes_to_the_bit():
    def whole(rank, steps, resume):
        net = Net()
        optimizer = over(rank, net, gc.SparseGDCompressor(density=0.1))
        if resume is not None:
            net.load_state_dict(resume[0])
            optimizer.load_state_dict(resume[1])
        train(rank, net, optimizer, steps, optimizer.steps_made + 1)
        return net, optimizer

    def work(rank):
        straight = whole(rank, 12, None)[0].flat()
        ends = []
        for cut_at in (2, 4, 7):
            net, optimizer = whole(rank, cut_at, None)
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            ends.append(whole(rank, 12 - cut_at, saved)[0].flat())
        return straight, ends

    for result in run(2, work):
        straight, ends = result
        for end in ends:
            np.testing.assert_array_equal(straight, end)


def test_two_ranks_have_saved_and_three_go_on():
    saved = []

    def kept(optimizer):
        (bucket,) = optimizer.reducers[0].buckets
        return residual_of(bucket.compressor, bucket.state).clone()

    def save(rank):
        net = Net()
        optimizer = over(rank, net, gc.SparseGDCompressor(density=0.1))
        train(rank, net, optimizer, 7)
        saved.append(copy.deepcopy(optimizer.state_dict()))
        return net.state_dict(), kept(optimizer)

    def load(rank):
        net = Net()
        net.load_state_dict(before[0][0])
        optimizer = over(rank, net, gc.SparseGDCompressor(density=0.1))
        optimizer.load_states(copy.deepcopy(saved))  # an optimizer takes tensors as they are
        residual = kept(optimizer)
        train(rank, net, optimizer, 2, optimizer.steps_made + 1)
        return residual, optimizer.steps_made, net.flat()

    before = run(2, save)
    after = run(3, load)
    for residual, steps, weights in after:
        share = (before[0][1].double() + before[1][1]) / 3
        torch.testing.assert_close(residual, share.float())
        assert steps == 9
        np.testing.assert_array_equal(weights, after[0][2])


def test_a_plain_adam_s_state_counts_as_the_first_steps():
    def work(rank):
        net = Net()
        adam = torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY)
        for step in range(1, WARMUP + 1):
            net.set_gradients(gradient(0, step, net.flat()))
            adam.step()
        other = Net()
        other.load_state_dict(net.state_dict())
        optimizer = over(rank, other, gc.OneBitCompressor())
        optimizer.load_state_dict(adam.state_dict())
        train(rank, other, optimizer, 2, WARMUP + 1)
        return compression_stats(optimizer).bytes_sent

    (sent,) = run(1, work)
    assert 0 < sent < 2 * SIZE * 4


def test_what_is_not_finite_on_one_rank_is_seen_on_all():
    def work(rank, policy):
        net = Net()
        optimizer = over(rank, net, gc.SparseGDCompressor(density=0.1), nonfinite=policy)
        train(rank, net, optimizer, 6)
        before = net.flat()
        net.set_gradients(gradient(rank.rank, 7, before))
        if rank.rank == 1:
            net.a.grad[2] = float("inf")
        optimizer.step()
        np.testing.assert_array_equal(net.flat(), before)
        train(rank, net, optimizer, 2, 8)
        assert compression_stats(optimizer).skipped == 1
        return net.flat()

    for error in run(2, lambda rank: work(rank, None)):
        assert isinstance(error, gc.NonFiniteGradientError), error
    first, second = run(2, lambda rank: work(rank, "skip"))
    np.testing.assert_array_equal(first, second)


@scales_on_cpus
def test_a_scaler_s_overflow_on_one_rank_skips_on_all():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, gc.OneBitCompressor())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for step in range(1, 9):
            net.zero_grad()
            x = torch.cat([p.reshape(-1) for p in net.parameters()])
            loss = (x * torch.from_numpy(gradient(rank.rank, step, net.flat()))).sum()
            if step in (2, 6) and rank.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return net.flat(), compression_stats(optimizer).skipped

    (first, skipped), (second, _) = run(2, work)
    assert skipped == 2 and np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)


def test_what_has_no_second_moment_stays():
    """Rows of an embedding that no batch had in the first steps: signs would move them far."""

    def work(rank):
        net = Net()
        optimizer = over(rank, net, gc.OneBitCompressor())
        for step in range(1, 9):
            net.set_gradients(gradient(rank.rank, step, net.flat()))
            net.a.grad[:20] = 0
            optimizer.step()
        return net.flat()

    for weights in run(2, work):
        shrunk = START[:20] * (1 - RATE * DECAY) ** 8
        np.testing.assert_allclose(weights[:20], shrunk, rtol=1e-5)
        assert not np.allclose(weights[20:], START[20:])


def test_a_parameter_that_thaws_on_one_rank_is_an_error_on_all():
    def work(rank):
        net = Net()
        net.c.requires_grad_(False)
        optimizer = over(rank, net)
        train(rank, net, optimizer, 2)
        net.c.requires_grad_(rank.rank == 1)
        train(rank, net, optimizer, 1, 3)

    for error in run(2, work):
        assert isinstance(error, RuntimeError) and "1 on rank 1" in str(error), error


def test_bad_settings():
    def message_of(compression=None, **more):
        (error,) = run(1, lambda rank: over(rank, Net(), compression, **more))
        return str(error)

    assert "momentum=0" in message_of(gc.DGCCompressor(momentum=0.9))
    assert "warmup_steps" in message_of(warmup=0)
    assert "AdamW" in message_of(kind=torch.optim.SGD)
    assert "nonfinite" in message_of(nonfinite="propagate")
    assert "moments='step'" in message_of(gc.VarianceCompressor(moments="sample"))

    def loaded(rank):
        saved = over(rank, Net()).state_dict()
        over(rank, Net(), warmup=WARMUP + 1).load_state_dict(saved)

    (error,) = run(1, loaded)
    assert isinstance(error, CheckpointError) and "warmup_steps=4" in str(error)

    def different(rank):
        net = Net()
        train(rank, net, over(rank, net, warmup=2 + rank.rank), 4)

    for error in run(2, different):
        assert isinstance(error, MismatchError), error


def test_it_is_described():
    def work(rank):
        net = Net()
        optimizer = over(rank, net, gc.SparseGDCompressor(density=0.1))
        train(rank, net, optimizer, 6)
        return describe(optimizer), compression_stats(optimizer)

    for table, stats in run(2, work):
        assert "SparseGD" in table
        assert stats.steps == 6
        assert flat(Net().parameters()).size == sum(stats.sizes.values())
