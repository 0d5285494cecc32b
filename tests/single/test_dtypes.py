"""Parameters of every dtype in one model, with each method: a complex one is two real ones.

Rates are powers of two, so that complex and real arithmetic round alike.
"""

from __future__ import annotations

import pytest
import torch

import hvd_gradcomp as gc
from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule, OuterSGD
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.monitoring.inspection import verify
from tests.methods import BALANCED, GRADIVEQ, ONE_OF_EACH, ONE_OF_TODAY, PRODUCTS, ROBUST
from tests.thread_ranks import run

SHAPES = {
    "single": ((3, 1), torch.float32),  # three elements: what follows lies at odd places
    "waves": ((3, 5), torch.complex64),
    "narrow": ((5,), torch.bfloat16),
    "wide": ((3,), torch.float64),
    "wide_waves": ((7,), torch.complex128),
    "last": ((1,), torch.float32),
    "last_waves": ((1,), torch.complex64),
}


class Net(torch.nn.Module):
    """Parameters of all dtypes; with `real=True` the complex ones as real ones, [..., 2]."""

    def __init__(self, real=False):
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        for name, (shape, dtype) in SHAPES.items():
            values = torch.randn(shape, dtype=dtype, generator=drawn)
            values = torch.view_as_real(values) if real and dtype.is_complex else values
            self.register_parameter(name, torch.nn.Parameter(values.clone()))

    def set_gradients(self, rank, step):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        for p, (shape, dtype) in zip(self.parameters(), SHAPES.values()):
            values = torch.randn(shape, dtype=dtype, generator=drawn)
            p.grad = values if p.dtype == dtype else torch.view_as_real(values)

    def numbers(self):
        bits = [torch.view_as_real(p) if p.is_complex() else p for p in self.parameters()]
        return [x.detach().clone() for x in bits]


# The moments of samples are those of gradients, so what exchanges something else has none.
METHODS = [
    c
    for c in ONE_OF_EACH + ONE_OF_TODAY + PRODUCTS + [GRADIVEQ] + BALANCED + ROBUST
    if not c.uses_moments
]
METHODS += [
    gc.VarianceCompressor(alpha=0.5, moments="step"),
    gc.HybridCompressor(tau=0.5, moments="step"),
]


def both(work):
    """Return what two ranks do with complex parameters, and with two real ones each."""
    results = run(2, lambda rank: (work(rank, Net()), work(rank, Net(real=True))))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def check(results):
    for complex_ones, real_ones in results:
        for ours, real in zip(complex_ones, real_ones):
            assert torch.equal(ours, real)
            assert ours.isfinite().all()


@pytest.mark.parametrize(
    ("compressor", "fragments"), [*((c, 1) for c in METHODS), *((c, 3) for c in PRODUCTS)], ids=str
)
def test_local_steps_take_every_dtype(compressor, fragments):
    def work(rank, net):
        sgd = torch.optim.SGD(net.parameters(), 0.125)
        schedule = LocalSchedule(3, warmup_steps=1, fragments=fragments)
        named = net.named_parameters()
        outer = OuterSGD(0.5, 0.0 if correction_of(compressor) else 0.5)
        how = rank.connect, schedule, outer, compressor
        optimizer = LocalStepsOptimizer(sgd, named, *how)
        for step in range(10):
            net.set_gradients(rank.rank, step)
            optimizer.step()
        optimizer.exchange()
        verify(optimizer)
        return net.numbers()

    check(both(work))


@pytest.mark.parametrize("compressor", METHODS, ids=str)
def test_momenta_of_every_dtype(compressor):
    correction = correction_of(compressor)
    if correction is not None and correction[0]:
        pytest.skip("corrects a momentum of its own, which is refused")

    def work(rank, net):
        adam = torch.optim.AdamW(net.parameters(), 0.125, betas=(0.5, 0.999))
        named = net.named_parameters()
        optimizer = MomentumExchangeOptimizer(adam, named, rank.connect, compressor, 2)
        for step in range(6):
            net.set_gradients(rank.rank, step)
            optimizer.step()
        verify(optimizer)
        return net.numbers()

    check(both(work))
