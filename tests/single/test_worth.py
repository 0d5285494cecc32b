"""What a user is told whose compressor does not pay, and that others are told nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    DeMoCompressor,
    DGCCompressor,
    GradiVeQCompressor,
    LGCCompressor,
    OkTopKCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    after,
    balanced,
    partition,
    robust,
)
from hvd_gradcomp.core.collectives import Allreduce, Alltoall, Broadcast
from hvd_gradcomp.core.cost_model import dense_exchange, volume
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.handover import takes_momentum
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning import worth
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.planning.description import describe
from hvd_gradcomp.testing import World
from tests import methods

SHORT = {"alpha": 0.05, "full_steps": 2, "train_steps": 20, "ae_lr": 0.005, "momentum": 0.9}


def linear(*sizes):
    layers = []
    for place, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layers += [(f"{place}.weight", (b, a), "float32"), (f"{place}.bias", (b,), "float32")]
    return layers


def convolutions(*sizes):
    pairs = enumerate(zip(sizes, sizes[1:]))
    return [(f"conv{place}.weight", (b, a, 3, 3), "float32") for place, (a, b) in pairs]


def warned(compressor, layers, ranks=2):
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
    course = compressor.course(layout, 3)
    assert bytes_of(world, 22) == pytest.approx(course.learning)
    assert [int(state.ready) for state in world.states] == [1, 1, 1]
    assert bytes_of(world, 3) == pytest.approx(3 * course.step)  # each rank has led once


def test_gradiveq_sends_what_was_foreseen():
    compressor = GradiVeQCompressor(ratio=4, warmup_steps=0, sample_steps=12, compress_steps=5)
    layout = Layout(("a",), ((8, 6, 3, 3),), block=1)
    world = World(compressor, TorchOps(), layout, 3)
    course = compressor.course(layout, 3)
    assert bytes_of(world, 12) == pytest.approx(course.learning)
    assert bytes_of(world, 5) == pytest.approx(5 * course.step)


@pytest.mark.parametrize(
    ("compressor", "layers", "message"),
    [
        (LGCCompressor(**SHORT), linear(64, 32, 32, 10), "where dense ones take 4,224; then 182"),
        (
            LGCCompressor("parameter_server", innovation=1.0, **{**SHORT, "alpha": 0.5}),
            linear(64, 32, 32, 10),
            "so it never pays. Use DGCCompressor, which learns nothing",
        ),
        (
            GradiVeQCompressor(ratio=1.06, sample_steps=50, compress_steps=1),
            [("conv.weight", (4, 4, 1, 1), "float32")],
            "GradiVeQ sends no less than dense gradients on these convolutions",
        ),
        (GradiVeQCompressor(), linear(64, 32, 10), "GradiVeQ compresses nothing: none of 4 layers"),
        (
            GradiVeQCompressor(other=SparseGDCompressor()),
            linear(640, 320, 10),
            "none of 4 layers is a convolution",
        ),
        (SparseGDCompressor(density=1.0), linear(8, 4), "144 bytes each time"),
        (DGCCompressor(density=0.5, momentum=0.9), linear(1, 1), "no layer is compressed"),
    ],
)
def test_what_does_not_pay_is_said_with_numbers(compressor, layers, message):
    (line,) = warned(compressor, layers)
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
    assert warned(compressor, LARGE, ranks) == []


def test_a_density_that_saves_nothing_among_so_many():
    layers = linear(300, 200, 10)
    few, many = (warned(SparseGDCompressor(density=0.1), layers, ranks) for ranks in (2, 64))
    assert few == []
    assert len(many) == 1
    assert "nothing is saved among 64 ranks" in many[0] and "SparseGDCompressor" in many[0]
    assert warned(StromCompressor(), layers, 64) == [], "which its gradients decide"
    assert warned(QSGDCompressor(), layers, 64) == []


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_buckets_that_are_all_summed_are_warned_about_however_many(ranks):
    """Bytes are floats: as a sum over buckets they were less than those of all elements at once."""
    compressor = OkTopKCompressor(density=0.9)
    for count in range(2, 9):
        for first in range(10_007, 10_047):
            sizes = [first * (3 * place + 1) for place in range(count)]
            layouts = [Layout((str(size),), ((size,),)) for size in sizes]
            (line,) = compressor.drawbacks(layouts, ranks)
            assert "nothing is saved" in line and "by an allreduce" in line


def test_the_table_knows_what_is_summed():
    layers = linear(300, 200, 10)
    few, many = (describe(SparseGDCompressor(density=0.1), layers, 1, n) for n in (2, 64))

    def total(table):
        return table.splitlines()[-1].split()[-2:]

    assert total(many) == ["248,840", "248,840"]
    assert total(few)[0] == "248,840" != total(few)[1]


ALL = [
    *methods.EVERY,
    *methods.TODAY,
    *methods.ROUNDED,
    *methods.INT32,
    *methods.PRODUCTS,
    *methods.ROBUST,
    *methods.BALANCED,
    *methods.OUTSIDE,
]
SHAPES = ((40, 30), (700,))
# What makes a method send as much as it can.
MOST = {"density": 0.9, "ratio": 0.1, "K": 2, "rank": 1000, "min_ratio": 1.0, "every": 1}


def unsparing(compressor):
    """The method with settings that send nearly every element; its wrappers stay."""
    compressor = compressor.working
    names = {field.name for field in fields(compressor)}
    if "inner" in names:
        return replace(compressor, inner=unsparing(compressor.inner))
    changed = {name: MOST[name] for name in MOST if name in names}
    if "chunk" in names:
        changed["k"] = compressor.chunk if compressor.chunk > 8 else compressor.chunk**2
    if "warmup_steps" in names:
        changed["warmup_steps"] = None
    if type(compressor).__name__ == "RandomKCompressor":
        changed["density"] = 0.5
    if type(compressor).__name__ == "RandomStretchCompressor":
        changed["every"] = 2
    return replace(compressor, **changed)


def received(compressor, layout, ranks, steps=2):
    """The bytes that a step brings each rank, as counted; the mean over steps."""
    world, total = World(compressor, TorchOps(), layout, ranks), 0.0
    kinds = {Allreduce: "allreduce", Alltoall: "alltoall", Broadcast: "broadcast"}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        gradients = [
            world.flat([torch.randn(shape, generator=generator) for shape in layout.shapes])
            for _ in range(ranks)
        ]
        extra = {}
        if compressor.uses_moments:
            extra["moment"] = [g**2 / 100 for g in gradients]
        world.step(gradients, **extra)
        for requests in world.traffic:
            one = requests[requests[0].root if isinstance(requests[0], Broadcast) else 0]
            size = one.tensor.numel() * one.tensor.element_size()
            total += volume(kinds.get(type(one), "allgather"), size, ranks)
    return total / steps


def bucket_of(compressor):
    layout = Layout(("0.weight", "0.bias"), SHAPES, block=compressor.block)
    return layout.with_outputs_first() if compressor.outputs_first else layout


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("compressor", [*ALL, *map(unsparing, methods.one_of_each(ALL))], ids=str)
def test_a_method_knows_how_its_buckets_travel(compressor, ranks):
    """To the byte; a method whose payload varies, its smallest."""
    compressor = compressor.working
    layout = bucket_of(compressor)
    exchange = compressor.exchange_of(layout, ranks)
    if exchange is None:
        return
    counted = received(compressor, layout, ranks)
    varies = hasattr(compressor, "warmup_steps") or hasattr(compressor, "entropy_interval")
    if varies or isinstance(compressor, type(methods.BALANCED[0])):
        assert exchange.received(ranks) <= counted
    else:
        assert exchange.received(ranks) == pytest.approx(counted)


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("compressor", [*map(unsparing, ALL)], ids=str)
def test_whoever_moves_more_than_dense_gradients_is_warned(compressor, ranks):
    """All methods, whatever they derive from, at settings that send nearly everything."""
    layers = [("0.weight", SHAPES[0], "float32"), ("0.bias", SHAPES[1], "float32")]
    planned = (
        plan(compressor, layers, 25 << 20, ranks=ranks) if not takes_momentum(compressor) else []
    )
    dense = dense_exchange(sum(layout.elements for _, layout in planned)).received(ranks)
    counted = sum(received(method, layout, ranks) for method, layout in planned)
    headers = 2 * (ranks - 1) * 2 * wire.HEADER_BYTES
    if counted > dense + headers and compressor.compresses:
        assert warned(compressor, layers, ranks), (counted, dense)


@pytest.mark.parametrize(
    ("compressor", "ranks"),
    [
        (OkTopKCompressor(density=0.9), 8),
        (OkTopKCompressor(density=0.9, exchange="two_shot"), 8),
        (balanced(SparseGDCompressor(density=0.65)), 64),
        (ScaleComCompressor(density=0.9), 8),
        (ChunkedTopKCompressor(chunk=32, k=16, values="float32"), 8),
        (DeMoCompressor(chunk=8, k=30), 8),
        (QSGDCompressor(bits=8, exchange="allgather"), 16),
        (after(5, None, OkTopKCompressor(density=0.9)), 8),
        (robust(ChunkedTopKCompressor(chunk=32, k=16), "clip"), 64),
        (partition({"*.bias": None, "*": OkTopKCompressor(density=0.9)}), 8),
    ],
    ids=str,
)
def test_newer_methods_and_wrappers_are_warned_about_too(compressor, ranks):
    (line,) = warned(compressor, linear(300, 200, 10), ranks)
    assert f"nothing is saved among {ranks} ranks" in line
    assert str(compressor.working) in line or not compressor.runs
    assert len(line) < 600
