"""Optimizers inside of local steps: replicas, resuming, and what schedule-free ones evaluate."""

from __future__ import annotations

import copy
import importlib
import io
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import hvd_gradcomp as gc
from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, DILOCO, LocalSchedule
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from tests.single.test_local_steps import whole
from tests.thread_ranks import run

SHAPE = (64, 64)  # torchao leaves smaller ones in 32 bits
BETA = 0.9


class EightBitSGD(torch.optim.Optimizer):
    """SGD whose momentum is kept in 8 bits with one scale, as 8-bit optimizers keep theirs."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.int8)
                    state["scale"] = torch.zeros(())
                momentum = group["momentum"] * state["momentum"] * state["scale"] + p.grad
                state["scale"] = momentum.abs().max() / 127
                state["momentum"] = (momentum / state["scale"]).round().to(torch.int8)
                p.sub_(group["lr"] * momentum)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): the model has `y` while it trains, `x` in eval()."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, trains, weight):
        for group in self.param_groups:
            if group["train_mode"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = trains

    def eval(self):
        self._switch(False, 1 - 1 / BETA)

    def train(self):
        self._switch(True, 1 - BETA)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                x = y.lerp(z, 1 - 1 / BETA)
                z.sub_(y.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                y.copy_(x.lerp(z, 1 - BETA))


def real_schedule_free(params, lr):
    return importlib.import_module("schedulefree").SGDScheduleFree(params, lr)


@pytest.fixture(autouse=True)
def eager():
    """Compile no step, as torchao would: its arithmetic is the same, and that takes minutes."""
    if not hasattr(torch.compiler, "set_stance"):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def adam_in_8_bits(params, lr):
    return importlib.import_module("torchao.optim").AdamW8bit(params, lr)


def muon(params, lr):
    return torch.optim.Muon(params, lr)


TWO_BITS = gc.ChunkedTopKCompressor(chunk=64, k=16, values="int2", decay=1.0)
INNER = {
    "AdamW": (lambda params: torch.optim.AdamW(params, 0.01), None, AVERAGING),
    "SGD": (lambda params: torch.optim.SGD(params, 0.05, 0.9), None, AVERAGING),
    "8 bits": (lambda params: EightBitSGD(params, 0.02), None, AVERAGING),
    "torchao, 8 bits": (lambda params: adam_in_8_bits(params, 0.01), None, AVERAGING),
    "Muon": (lambda params: muon(params, 0.02), None, DILOCO),
    "Muon, 2 bits": (lambda params: muon(params, 0.02), TWO_BITS, DILOCO),
    "schedule-free": (lambda params: ScheduleFreeSGD(params, 0.05), None, AVERAGING),
    "schedulefree": (lambda params: real_schedule_free(params, 0.05), None, AVERAGING),
}

MISSING = {  # here, rather than in the threads of ranks
    "torchao, 8 bits": not find_spec("torchao"),
    "schedulefree": not find_spec("schedulefree"),
    "Muon": not hasattr(torch.optim, "Muon"),
    "Muon, 2 bits": not hasattr(torch.optim, "Muon"),
}
by_inner = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(MISSING.get(name, False), reason="not installed")
        )
        for name in INNER
    ],
)


def values(*key):
    return torch.from_numpy(np.random.default_rng(key).normal(size=SHAPE).astype(np.float32))


def made(rank, name, every=3, **more):
    make, compression, outer = INNER[name]
    p = torch.nn.Parameter(values(0))
    inner = make([p])
    if hasattr(inner, "train"):
        inner.train()
    schedule = LocalSchedule(every, **more)
    optimizer = LocalStepsOptimizer(inner, [("w", p)], rank.connect, schedule, outer, compression)
    return p, optimizer


def train(rank, p, optimizer, steps, first=1):
    for step in range(first, first + steps):
        noise = 0.1 * values(2, rank.rank, step)
        p.grad = (p.detach() - values(1, rank.rank)) * 0.5 + noise
        optimizer.step()


@by_inner
def test_ranks_evaluate_the_same_after_an_exchange(name):
    def work(rank):
        p, optimizer = made(rank, name, warmup_steps=2)
        train(rank, p, optimizer, 9)
        if hasattr(optimizer.inner, "eval"):
            optimizer.eval()
        optimizer.exchange()
        (fragment,) = optimizer._rounds.fragments
        assert torch.equal(p, fragment.copies[0])
        goal = (values(1, 0) + values(1, 1)) / 2
        return p.detach().clone(), float((p - goal).norm() / (values(0) - goal).norm())

    (first, near), (second, _) = whole(run(2, work))
    assert torch.equal(first, second) and near < 1.0


@pytest.mark.parametrize("more", [{}, {"delay": 1}], ids=["apart", "on its way"])
@by_inner
def test_resumes_to_the_bit(name, more):
    def work(rank, resumes):
        p, optimizer = made(rank, name, **more)
        if resumes:
            train(rank, p, optimizer, 4 - bool(more))
            file = io.BytesIO()
            torch.save((p.detach(), optimizer.state_dict()), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            for exchange in optimizer.exchanges[0]:
                exchange.abort()
            p, optimizer = made(rank, name, **more)
            with torch.no_grad():
                p.copy_(saved[0])
            optimizer.load_state_dict(saved[1])
        train(rank, p, optimizer, 10 - optimizer.steps_made, optimizer.steps_made + 1)
        return p.detach().clone()

    straight = whole(run(2, lambda rank: work(rank, False)))
    for x, y in zip(straight, whole(run(2, lambda rank: work(rank, True)))):
        assert torch.equal(x, y)


def test_what_schedule_free_ranks_average_are_the_averages():
    """Each rank by hand: `x` is exchanged, `z` stays with its rank."""
    x, z = [values(0)] * 2, [values(0)] * 2
    for step in range(1, 10):
        for rank in range(2):
            y = x[rank].lerp(z[rank], 1 - BETA)
            z[rank] = z[rank] - 0.05 * ((y - values(1, rank)) * 0.5 + 0.1 * values(2, rank, step))
            x[rank] = x[rank].lerp(z[rank], 1 / step)
        if step % 3 == 0:
            x = [(x[0] + x[1]) / 2] * 2

    def work(rank):
        p, optimizer = made(rank, "schedule-free")
        train(rank, p, optimizer, 9)
        trained = p.detach().clone()
        optimizer.eval()
        return trained, p.detach().clone()

    for rank, (trained, evaluated) in enumerate(whole(run(2, work))):
        torch.testing.assert_close(evaluated, x[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trained, x[rank].lerp(z[rank], 1 - BETA), rtol=1e-4, atol=1e-5)


def test_a_schedule_free_rank_goes_on_from_another_ones_state():
    saved = {}

    def save(rank):
        p, optimizer = made(rank, "schedule-free")
        train(rank, p, optimizer, 4)
        saved[rank.rank] = copy.deepcopy(optimizer.state_dict())
        (fragment,) = optimizer._rounds.fragments
        return fragment.copies[0].detach().clone()

    def load(rank):
        p, optimizer = made(rank, "schedule-free")
        optimizer.load_state_dict(saved[0])
        assert optimizer.param_groups[0]["train_mode"]
        optimizer.eval()
        return p.detach().clone()

    (shared, _), (_, other) = whole(run(2, save)), whole(run(2, load))
    torch.testing.assert_close(other, shared, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(MISSING["Muon"], reason="this PyTorch has no Muon")
def test_two_optimizers_of_one_model_have_local_steps_each():
    """As Muon is used: it takes matrices, and AdamW the rest."""

    def work(rank):
        matrix, optimizer = made(rank, "Muon")
        bias = torch.nn.Parameter(torch.zeros(SHAPE[1]))
        adam = LocalStepsOptimizer(
            torch.optim.AdamW([bias], 0.01),
            [("bias", bias)],
            rank.connect,
            LocalSchedule(3),
            AVERAGING,
            None,
        )
        for step in range(1, 7):
            train(rank, matrix, optimizer, 1, step)
            bias.grad = values(3, rank.rank, step)[0]
            adam.step()
        return torch.cat([matrix.detach().reshape(-1), bias.detach()])

    first, second = whole(run(2, work))
    assert torch.equal(first, second)
