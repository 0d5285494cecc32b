"""The papers' linear correlation of gradients against known values, on both frameworks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import torch

from benchmarks.papers.principal_components import compression_loss, energy
from hvd_gradcomp.ops import ops_of

make = pytest.mark.parametrize(
    "make", [lambda x: torch.from_numpy(np.asarray(x)), tf.constant], ids=["torch", "tensorflow"]
)


@make
@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (30, 30)], ids=str)
def test_energy_of_low_rank_samples_is_whole_at_that_rank(make, shape):
    random = np.random.default_rng(1)
    rows = random.standard_normal((shape[0], 3)) @ random.standard_normal((3, shape[1])) + 2
    samples = make(rows.astype(np.float32))
    shares = energy(ops_of(samples), samples)
    assert len(shares) == min(shape)
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(1, abs=1e-10) and shares[1] < 0.999
    exact = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
    assert shares[:2] == pytest.approx((np.cumsum(exact) / exact.sum())[:2], abs=1e-6)


@make
def test_loss_is_nothing_in_the_span_and_everything_beside_it(make):
    random = np.random.default_rng(2)
    directions = random.standard_normal((4, 50))
    for count in (20, 200):  # by the Gram matrix and by the covariance
        rows = random.standard_normal((count, 3)) @ directions[:3] + 1
        within = random.standard_normal((5, 3)) @ directions[:3] + 1
        samples, later = (make(x.astype(np.float32)) for x in (rows, within))
        ops = ops_of(samples)
        assert max(compression_loss(ops, samples, later, 3)) < 1e-10
        assert min(compression_loss(ops, samples, later, 1)) > 1e-3
        assert max(compression_loss(ops, samples, later, 50)) < 1e-10
    noise = random.standard_normal((2, 300, 64)).astype(np.float32)
    losses = compression_loss(ops, make(noise[0]), make(noise[1]), 8)
    assert np.mean(losses) == pytest.approx(1 - 8 / 64, abs=0.03)
    still = make(np.ones((4, 6), np.float32))
    assert energy(ops, still) == [1.0] * 4
    assert compression_loss(ops, still, still, 2) == [0.0] * 4
    zero = make(np.zeros((1, 6), np.float32))
    assert compression_loss(ops, still, zero, 2) == [float("inf")]


@make
def test_functions_name_bad_input(make):
    x = make(np.ones((4, 6), np.float32))
    ops = ops_of(x)
    for call, message in {
        (lambda: energy(ops, x[0])): "shape [T, m]",
        (lambda: compression_loss(ops, x, x, 7)): "dimension must be a whole number in [1, 6]",
        (lambda: compression_loss(ops, x, x[:, :3], 2)): "shape [n, 6], got [4, 3]",
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)


def test_bases_of_correlated_slices_do_not_age():
    """Slices that vary in two directions lose nothing, at any age; noise loses most."""
    from benchmarks.papers.watching import aged

    random = np.random.default_rng(6)
    within = random.standard_normal((30, 2)) @ random.standard_normal((2, 32))
    for rows, low, high in (
        (within, 0, 1e-9),
        (random.standard_normal((30, 32)), 0.5, 1.5),
    ):
        looks = [(5 * k, torch.from_numpy(row.astype(np.float32))) for k, row in enumerate(rows)]
        bases = [*aged(looks, window=20, ratio=8)]
        assert len(bases) == 11 * 10
        assert {age for age, _ in bases} == {*range(5, 55, 5)}
        assert low <= min(loss for _, loss in bases) <= max(loss for _, loss in bases) <= high
    assert not [*aged(looks[:7], window=20, ratio=8)]
