"""The probe against known values, on both frameworks, all ranks in one process."""

from __future__ import annotations

import json
from math import gcd, log, prod

import numpy as np
import pytest
import tensorflow as tf
import torch

from benchmarks.papers import information
from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.monitoring import probe
from hvd_gradcomp.ops import ops_of

LAYERS = [("conv", (4, 6, 3, 3)), ("dense", (10, 7)), ("bias", (10,)), ("one", (1,))]
OPTIONS = {"every": 1, "sample": 40}

make = pytest.mark.parametrize(
    "make", [lambda x: torch.from_numpy(np.asarray(x)), tf.constant], ids=["torch", "tensorflow"]
)


def lockstep(probes, gradients, step, make, moments=None):
    """One probed step of all ranks: their readings and what each of them sent."""
    taken = [flat(probes[0], gradient) for gradient in gradients]
    squares = [None if moments is None else make(flat(probes[0], q)) for q in moments or gradients]
    ops, size = ops_of(make(taken[0])), len(probes)
    programs = [
        one.program(ops, step, make(t), rank, size, q)
        for rank, (one, t, q) in enumerate(zip(probes, taken, squares))
    ]
    requests = [next(program) for program in programs]
    assert all(isinstance(r, Allreduce) for r in requests)
    total = sum(r.tensor for r in requests)
    readings = []
    for program in programs:
        with pytest.raises(StopIteration) as stop:
            program.send(total)
        readings.append(stop.value.value)
    return readings, [r.tensor for r in requests]


def flat(one, gradient):
    pieces = [x.reshape(-1)[:: sample.stride] for x, sample in zip(gradient, one.samples)]
    return np.concatenate(pieces).astype(np.float32)


def random_gradients(seed, layers=LAYERS):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32) for _, shape in layers]


# -- information -----------------------------------------------------------------------------------


@make
def test_entropy_of_known_distributions(make):
    uniform = make(np.arange(4096, dtype=np.float32))
    ops = ops_of(uniform)
    assert information.entropy(ops, uniform, 256) == pytest.approx(8, abs=1e-12)
    assert information.entropy(ops, uniform, 2) == pytest.approx(1, abs=1e-12)
    assert information.entropy(ops, make(np.full(7, 3.5, np.float32))) == 0
    assert information.entropy(ops, make(np.full(7, 3.5, np.float32)), corrected=True) == 0
    quarter = make(np.repeat(np.float32([-1, 1]), (1, 3)))
    expected = 0.25 * 2 + 0.75 * log(4 / 3, 2)
    assert information.entropy(ops, quarter, 16) == pytest.approx(expected, abs=1e-12)
    correction = 1 / (2 * 4 * log(2))
    corrected = information.entropy(ops, quarter, 16, corrected=True)
    assert corrected == pytest.approx(expected + correction, abs=1e-12)
    assert information.entropy(ops, make(np.float32([1e-42, 0, 3e38, -3e38])), 4) == pytest.approx(
        1.5
    )


@make
def test_mutual_information_of_known_pairs(make):
    random = np.random.default_rng(3)
    x, y = (make(random.standard_normal(4096).astype(np.float32)) for _ in range(2))
    ops = ops_of(x)
    for corrected in (False, True):
        entropy = information.entropy(ops, x, 32, corrected)
        assert information.mutual_information(ops, x, x, 32, corrected) == pytest.approx(
            entropy, abs=1e-12
        )
        mirrored = information.mutual_information(ops, x, 0.0 - 2.0 * x, 32, corrected)
        assert mirrored == pytest.approx(entropy, abs=0.05)
    independent = information.mutual_information(ops, x, y, 32)
    bound = information.chance_bound(32, 4096)
    assert 0 < independent < bound
    assert information.mutual_information(ops, x, y, 32, corrected=True) < independent / 2
    constant = make(np.zeros(4096, np.float32))
    assert information.mutual_information(ops, x, constant, 32) == pytest.approx(0, abs=1e-12)


def test_the_bias_of_independent_uniform_samples_is_what_is_stated():
    random = np.random.default_rng(1)
    entropies = []
    for _ in range(40):
        x, y = (torch.from_numpy(random.random(2000).astype(np.float32)) for _ in range(2))
        entropies.append(information.mutual_information(ops_of(x), x, y, 8))
    assert np.mean(entropies) == pytest.approx(information.chance_bound(8, 2000), rel=0.1)


def test_information_against_numpy():
    random = np.random.default_rng(5)
    x = random.standard_normal(3000).astype(np.float32)
    y = (0.7 * x + 0.5 * random.standard_normal(3000)).astype(np.float32)
    counts, _, _ = np.histogram2d(x.astype(float), y.astype(float), 20)
    p = counts / 3000
    outer = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    expected = (p[p > 0] * np.log2(p[p > 0] / outer[p > 0])).sum()
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    assert information.mutual_information(ops_of(x), x, y, 20) == pytest.approx(expected, abs=1e-9)


@make
def test_functions_name_bad_input(make):
    x = make(np.ones((4, 6), np.float32))
    ops = ops_of(x)
    for call, message in {
        (lambda: information.entropy(ops, x, 1)): "bins must be a whole number in [2, inf], got 1",
        (lambda: information.entropy(ops, x[:0])): "at least one element",
        (lambda: information.entropy(ops, x * float("nan"))): "must be finite",
        (lambda: information.mutual_information(ops, x, x[:2])): "one length, got 24 and 12",
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)


# -- the probe -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_frameworks_and_ranks_agree(size):
    every = []
    for make in (torch.from_numpy, tf.constant):
        probes = [probe.Probe(LAYERS, **OPTIONS) for _ in range(size)]
        for step in range(12):
            gradients = [random_gradients(100 * step + rank) for rank in range(size)]
            readings, _ = lockstep(probes, gradients, step, make)
            assert all(r == readings[0] for r in readings)
        assert [r.step for r in probes[0].readings] == [s for s in range(12) for _ in LAYERS]
        every.append(probes[0].readings)
    for a, b in zip(*every):
        assert flattened(a) == pytest.approx(flattened(b), rel=1e-6, abs=1e-9)
        assert (a.mutual_information is None) == (size == 1)


def flattened(reading):
    values = []
    for field in reading:
        for pair in field if isinstance(field, tuple) else [(field,)]:
            values += [v for v in pair if isinstance(v, (int, float))]
    return values


def test_a_reading_is_what_the_functions_say():
    probes = [probe.Probe(LAYERS, corrected=False, **OPTIONS) for _ in range(2)]
    gradients = [random_gradients(1), random_gradients(2)]
    (readings, _), _ = lockstep(probes, gradients, 0, torch.from_numpy)
    for i, reading in enumerate(readings):
        stride = probes[0].samples[i].stride
        x, y = (torch.from_numpy(g[i].reshape(-1)[::stride].copy()) for g in gradients)
        assert len(x) == reading.sampled
        assert reading.entropy == pytest.approx(information.entropy(ops_of(x), y, 32), abs=1e-12)
        shared = information.mutual_information(ops_of(x), x, y, 32)
        assert reading.mutual_information == pytest.approx(shared, abs=1e-12)
        half = reading.sampled // 2
        turned = torch.cat((y[half:], y[:half]))
        chance = information.mutual_information(ops_of(x), x, turned, 32)
        assert reading.chance == pytest.approx(chance, abs=1e-12)
        bits = [information.entropy(ops_of(x), z, 2) for z in (x, y)]
        counts = [max(1, int(reading.size * b / 1024 + 0.5)) for b in bits]
        assert reading.density_egc == pytest.approx(np.mean(counts) / reading.size, rel=1e-6)
        assert reading.density_dgc == 1 / reading.size


def test_density_of_variance_is_what_the_method_sends():
    layers = [("w", (20, 2))]
    drawn = np.random.default_rng(4).standard_normal((30, 20, 2)).astype(np.float32) + 0.5
    for with_moments in (False, True):
        one = [probe.Probe(layers, every=1, alpha=1.5, zeta=0.9, pair=(0, 1))]
        r = v = np.zeros(40, np.float32)
        for step, gradient in enumerate(drawn):
            g = gradient.reshape(-1)
            q = g * g / 2 if with_moments else g * g
            moments = [[q]] if with_moments else None
            (readings, *_), _ = lockstep(one, [[gradient]], step, torch.from_numpy, moments)
            r, v = r + g, v + q
            wanted = r * r > np.float32(1.5) * v
            r, v = np.where(wanted, 0, r), np.where(wanted, 0, v * np.float32(0.9))
            assert readings[0].density_variance == pytest.approx(wanted.mean())


def test_samples_are_bounded_and_spread():
    layers = [(f"c{i}", (64, 64, 3, 3)) for i in range(20)] + [("big", (1000, 1000))]
    for sample, (_, shape) in zip(probe.Probe(layers, sample=1000).samples, layers):
        assert 500 < sample.taken <= 1000
        assert sample.taken == len(range(0, prod(shape), sample.stride))
        assert gcd(sample.stride, prod(shape)) == 1


def test_traffic_does_not_grow_with_ranks_and_old_readings_go():
    sizes = []
    for ranks in (2, 5):
        probes = [probe.Probe(LAYERS, keep=3, **OPTIONS) for _ in range(ranks)]
        for step in range(5):
            gradients = [random_gradients(step + 50 * rank) for rank in range(ranks)]
            _, sent = lockstep(probes, gradients, step, torch.from_numpy)
        assert {r.step for r in probes[0].readings} == {2, 3, 4}
        sizes.append(sent[0].shape)
    assert sizes[0] == sizes[1]


def test_what_is_not_finite_counts_as_zero_and_is_reported():
    probes = [probe.Probe(LAYERS, **OPTIONS) for _ in range(2)]
    for step in range(10):
        gradients = [random_gradients(step), random_gradients(step + 50)]
        if step == 4:
            gradients[1][1][0] = float("nan")
            gradients[0][0][:] = float("inf")
        readings, _ = lockstep(probes, gradients, step, torch.from_numpy)
    json.dumps([r._asdict() for r in probes[0].readings], allow_nan=False)
    wrong = [r.nonfinite for r in probes[0].readings if r.step == 4]
    assert wrong[0] == probes[0].samples[0].taken / 2 and wrong[1] > 0 and wrong[2:] == [0, 0]
    assert sum(r.nonfinite for r in readings[0]) == 0


def test_table_and_file(tmp_path):
    probes = [probe.Probe(LAYERS, **OPTIONS) for _ in range(2)]
    assert "layer" in probes[0].table()
    for step in range(9):
        gradients = [random_gradients(step), random_gradients(step + 50)]
        lockstep(probes, gradients, step, torch.from_numpy)
    table = probes[0].table()
    assert table.startswith("step 8\n") and "conv" in table
    path = tmp_path / "readings"
    path.write_text("old")
    probes[0].write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["readings"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == json.loads(json.dumps([r._asdict() for r in probes[0].readings]))
    with pytest.raises(FileNotFoundError):
        probes[0].write(tmp_path / "nowhere" / "readings")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a whole number in [1, inf], got 0"),
        ({"sample": 1}, "sample must be a whole number in [2, inf], got 1"),
        ({"bins": 2.0}, "bins must be a whole number in [2, inf], got 2.0"),
        ({"pair": (1, 1)}, "pair must be two different ranks in [0, ranks - 1], got (1, 1)"),
        ({"pair": (0, -1)}, "pair must be two different ranks"),
        ({"alpha": 0}, "alpha must be a number in (0, inf), got 0"),
        ({"zeta": 1.1}, "zeta must be a number in (0, 1], got 1.1"),
        ({"K": -1}, "K must be a number in (0, inf), got -1"),
        ({"density": 0}, "density must be a number in (0, 1], got 0"),
        ({"keep": 0}, "keep must be a whole number in [1, inf], got 0"),
        ({"layers": []}, "layers must have elements, got none"),
        ({"layers": [("a", (3,)), ("b", (0, 3))]}, "got none in ['b']"),
        ({"layers": [("a", (3,)), ("a", (2,))]}, "names must be unique, got ['a'] again"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError) as caught:
        probe.Probe(**{"layers": LAYERS, **options})
    assert message in str(caught.value) and str(caught.value).startswith("Probe: ")


def test_a_pair_beyond_the_ranks_is_an_error_on_all_of_them():
    for rank in range(2):
        one = probe.Probe(LAYERS, pair=(0, 2))
        taken = torch.zeros(sum(sample.taken for sample in one.samples))
        with pytest.raises(ValueError, match=r"pair must be two different ranks in \[0, 1\]"):
            next(one.program(ops_of(taken), 0, taken, rank, 2))
    with pytest.raises(ValueError, match="elements are sampled, got"):
        next(one.program(ops_of(taken), 0, taken[1:], 0, 1))
