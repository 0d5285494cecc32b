"""What a user is told whose compressor does not pay, and that others are told nothing."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp import (
    DGCCompressor,
    GradiVeQCompressor,
    LGCCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    after,
    partition,
)
from hvd_gradcomp.core.collectives import Broadcast
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning import worth
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.planning.description import describe
from hvd_gradcomp.testing import World

SHORT = {"alpha": 0.05, "full_steps": 2, "train_steps": 20, "ae_lr": 0.005, "momentum": 0.9}


def linear(*sizes):
    layers = []
    for place, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layers += [(f"{place}.weight", (b, a), "float32"), (f"{place}.bias", (b,), "float32")]
    return layers


def convolutions(*sizes):
    pairs = enumerate(zip(sizes, sizes[1:]))
    return [(f"conv{place}.weight", (b, a, 3, 3), "float32") for place, (a, b) in pairs]


def said(compressor, layers, ranks=2):
    return worth.warnings(compressor, plan(compressor, layers, 25 << 20, ranks=ranks), ranks)


def bytes_of(world, steps):
    """What a rank hands to collectives in so many steps, the mean over ranks."""
    total = 0
    for _ in range(steps):
        generator = torch.Generator().manual_seed(world.steps)
        gradients = [
            world.flat([torch.randn(shape, generator=generator) for shape in world.layout.shapes])
            for _ in range(world.size)
        ]
        world.step(gradients)
        for requests in world.traffic:
            for rank, request in enumerate(requests):
                if not isinstance(request, Broadcast) or request.root == rank:
                    total += request.tensor.numel() * request.tensor.element_size()
    return total / world.size


@pytest.mark.parametrize("pattern", ["ring_allreduce", "parameter_server"])
def test_lgc_sends_what_was_foreseen(pattern):
    compressor = LGCCompressor(pattern, **SHORT)
    layout = Layout(("a", "b"), ((30, 40), (900,)))
    world = World(compressor, TorchOps(), layout, 3)
    course = worth.lgc_course(compressor, layout, 3)
    assert bytes_of(world, 22) == pytest.approx(course.learning)
    assert [int(state.ready) for state in world.states] == [1, 1, 1]
    assert bytes_of(world, 3) == pytest.approx(3 * course.step)  # each rank has led once


def test_gradiveq_sends_what_was_foreseen():
    compressor = GradiVeQCompressor(ratio=4, warmup_steps=0, sample_steps=12, compress_steps=5)
    layout = Layout(("a",), ((8, 6, 3, 3),), block=1)
    world = World(compressor, TorchOps(), layout, 3)
    course = worth.gradiveq_course(compressor, layout, 3)
    assert bytes_of(world, 12) == pytest.approx(course.learning)
    assert bytes_of(world, 5) == pytest.approx(5 * course.step)


@pytest.mark.parametrize(
    ("compressor", "layers", "message"),
    [
        (LGCCompressor(**SHORT), linear(64, 32, 32, 10), "where dense ones take 4,224; then 214"),
        (
            LGCCompressor("parameter_server", innovation=1.0, **{**SHORT, "alpha": 0.5}),
            linear(64, 32, 32, 10),
            "so it never pays. Use DGCCompressor, which learns nothing",
        ),
        (
            GradiVeQCompressor(ratio=2, sample_steps=50, compress_steps=1),
            convolutions(8, 12, 12),
            "GradiVeQ sends no less than dense gradients on these convolutions",
        ),
        (GradiVeQCompressor(), linear(64, 32, 10), "GradiVeQ compresses nothing: none of 4 layers"),
        (
            GradiVeQCompressor(other=SparseGDCompressor()),
            linear(640, 320, 10),
            "none of 4 layers is a convolution",
        ),
        (SparseGDCompressor(density=1.0), linear(8, 4), "144 bytes a step"),
        (DGCCompressor(density=0.5, momentum=0.9), linear(1, 1), "no layer is compressed"),
    ],
)
def test_what_does_not_pay_is_said_with_numbers(compressor, layers, message):
    (line,) = said(compressor, layers)
    assert message in line
    assert len(line) < 600


LARGE = convolutions(3, 64, 128, 256, 512) + linear(512, 1000)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    "compressor",
    [
        LGCCompressor(momentum=0.9),
        LGCCompressor("parameter_server", momentum=0.9, common_rank=0),
        GradiVeQCompressor(),
        GradiVeQCompressor(ratio=4, sampling="qsgd", feedback=True),
        DGCCompressor(momentum=0.9),
        QSGDCompressor(),
        OneBitCompressor(),
        StromCompressor(tau=1.0),
        after(5, None, StromCompressor(tau=1.0)),
        partition({"conv0.*": None, "*": DGCCompressor(momentum=0.9)}),
    ],
    ids=str,
)
def test_nothing_is_said_where_it_pays(compressor, ranks):
    assert said(compressor, LARGE, ranks) == []


def test_a_density_that_saves_nothing_among_so_many():
    layers = linear(300, 200, 10)
    few, many = (said(SparseGDCompressor(density=0.1), layers, ranks) for ranks in (2, 64))
    assert few == []
    assert len(many) == 1
    assert "nothing is saved among 64 ranks" in many[0] and "SparseGDCompressor" in many[0]
    assert said(StromCompressor(), layers, 64) == [], "which its gradients decide"
    assert said(QSGDCompressor(), layers, 64) == []


def test_the_table_knows_what_is_summed():
    layers = linear(300, 200, 10)
    few, many = (describe(SparseGDCompressor(density=0.1), layers, 1, n) for n in (2, 64))

    def total(table):
        return table.splitlines()[-1].split()[-2:]

    assert total(many) == ["248,840", "248,840"]
    assert total(few)[0] == "248,840" != total(few)[1]
