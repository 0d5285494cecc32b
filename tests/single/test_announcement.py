"""Line that is logged when compressing begins: its numbers hold, and a user sees it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradiVeQCompressor,
    Int8Compressor,
    LGCCompressor,
    NoneCompressor,
    QSGDCompressor,
    QuadraticRule,
    StromCompressor,
    balanced,
    partition,
)
from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.core.collectives import Alltoall, Broadcast
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.announcement import announce, announcement
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.testing import World
from tests import methods

LAYERS = [("a", (200, 300), "float32"), ("b", (64, 129), "float32")]
FIXED = [
    method
    for method in {
        str(method): method
        for family in (
            methods.LINEAR,
            methods.LARGEST,
            methods.LEADER,
            methods.QUANTIZED,
            methods.PHASED,
            methods.TODAY,
        )
        for method in family
    }.values()
    if method.compresses and not method.varies_in_size and not method.uses_moments
]


def line_of(compressor, schedule=None, ranks=2, layers=LAYERS, scope=""):
    how = () if schedule is None else (schedule,)
    planned = plan(compressor, layers, 25 << 20, ranks=ranks)
    return announcement(compressor, planned, ranks, *how, scope=scope)


def ratio_of(compressor, ranks, steps=12, last=4):
    """Bytes of dense gradients, by those that a rank hands over for others in the last steps."""
    dense = sent = 0
    for method, layout in plan(compressor, LAYERS, 25 << 20, ranks=ranks):
        world = World(method, TorchOps(), layout, ranks)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            gradients = [
                world.flat([0.1 * torch.randn(s, generator=generator) for s in layout.shapes])
                for _ in range(ranks)
            ]
            world.step(gradients)
            if step < steps - last:
                continue
            dense += 4 * ranks * layout.elements
            for requests in world.traffic:
                for rank, request in enumerate(requests):
                    if isinstance(request, Broadcast) and request.root != rank:
                        continue
                    kept = isinstance(request, Alltoall)
                    sent += (request.tensor[1:] if kept else request.tensor).nbytes
    return dense / sent


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("compressor", FIXED, ids=str)
def test_the_factor_is_that_of_the_bytes_that_are_sent(compressor, ranks):
    saved = line_of(compressor, ranks=ranks).rpartition("; ")[2]
    factor = float(saved.split()[1].replace(",", ""))
    assert saved.startswith("about ")
    assert factor == pytest.approx(ratio_of(compressor, ranks), rel=0.1)


@pytest.mark.parametrize(
    "compressor",
    [
        StromCompressor(tau=1.0),
        EGCCompressor(momentum=0.0),
        balanced(DGCCompressor(momentum=0.0), "two_shot"),
        partition({"a": StromCompressor(tau=1.0), "b": Int8Compressor()}),
    ],
    ids=str,
)
def test_no_number_where_gradients_decide(compressor):
    reason = "how many bytes that takes depends on the gradients: see its statistics"
    for schedule in (None, LocalSchedule(15)):
        assert line_of(compressor, schedule).rpartition("; ")[2] == reason


@pytest.mark.parametrize(
    ("compressor", "schedule", "line"),
    [
        (
            QSGDCompressor(bits=4),
            None,
            "compressing 2 tensors, 68,256 elements, with QSGDCompressor(); about 7.9 times fewer "
            "bytes",
        ),
        (
            Int8Compressor(),
            LocalSchedule(15),
            "compressing 2 tensors, 68,256 elements, with Int8Compressor(), every 15 local steps; "
            "about 59 times fewer bytes",
        ),
        (
            NoneCompressor(),
            LocalSchedule(15, warmup_steps=1000),
            "exchanging 2 tensors, 68,256 elements, uncompressed, every 15 local steps, after "
            "1,000 dense steps; about 15 times fewer bytes",
        ),
        (
            NoneCompressor(),
            LocalSchedule(QuadraticRule(0.01, 4)),
            "exchanging 2 tensors, 68,256 elements, uncompressed, in local steps with "
            "every=QuadraticRule(alpha=0.01, base=4, longest=1000); at least 4 times fewer bytes",
        ),
        (
            Int8Compressor(),
            LocalSchedule(lambda step: 5),
            "compressing 2 tensors, 68,256 elements, with Int8Compressor(), in local steps with "
            "every=<lambda>; about 3.9 times fewer bytes in an exchange",
        ),
        (
            partition({"b": None, "*": Int8Compressor()}),
            LocalSchedule(1, warmup_steps=100),
            "compressing 1 tensor, 60,000 elements (and 1 tensor, 8,256 elements, dense), with "
            "partition([('b', NoneCompressor()), ('*', Int8Compressor())]), after 100 dense steps; "
            "about 2.9 times fewer bytes",
        ),
        (NoneCompressor(), None, None),
        (GradiVeQCompressor(), None, None),  # of which `worth` says that nothing is compressed
    ],
)
def test_lines(compressor, schedule, line):
    assert line_of(compressor, schedule) == line


def test_an_allgather_brings_more_than_it_sends():
    line = line_of(DGCCompressor(momentum=0.0), ranks=8)
    sent, received = line.rpartition("; ")[2].split(", ")
    assert sent.endswith("times fewer bytes sent") and received.endswith("times fewer received")
    factors = [float(text.removeprefix("about ").split()[0]) for text in (sent, received)]
    assert factors[0] == pytest.approx(4 * factors[1], rel=0.02)  # 7 payloads, and 2 * 7 / 8


@pytest.mark.parametrize(
    "compressor",
    [
        GradiVeQCompressor(ratio=4),
        LGCCompressor(momentum=0.9),
        LGCCompressor("parameter_server", momentum=0.9),
    ],
    ids=str,
)
def test_what_learns_is_announced_with_what_it_saves_then(compressor):
    layers = [(f"conv{n}.weight", (64, 64, 3, 3), "float32") for n in range(4)]
    line = line_of(compressor, layers=layers)
    assert line.endswith(" times fewer bytes, once it has learned")
    assert float(line.rpartition("; ")[2].split()[1]) > 3


def test_scope_and_large_numbers():
    layers = [(f"{n}.weight", (1000, 1000), "float32") for n in range(1234)]
    line = line_of(Int8Compressor(), layers=layers, scope="between hosts")
    assert line.startswith("compressing 1,234 tensors, 1,234 M elements between hosts, with Int8")


PROGRAM = """
import logging
from hvd_gradcomp.planning.announcement import announce
{}
announce("compressing a tensor")
announce(None)
"""
SHOWN = "hvd_gradcomp: compressing a tensor\n"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ("", SHOWN),
        ("logging.getLogger('hvd_gradcomp').setLevel(logging.INFO)", SHOWN),
        ("logging.getLogger('hvd_gradcomp').setLevel(logging.WARNING)", ""),
        ("logging.disable(logging.INFO)", ""),
        ("logging.getLogger('hvd_gradcomp').disabled = True", ""),
        ("logging.getLogger('hvd_gradcomp').addHandler(logging.NullHandler())", ""),
        ("logging.basicConfig()", ""),
        (
            "logging.basicConfig(level=logging.INFO, format='%(name)s | %(message)s')",
            "hvd_gradcomp | compressing a tensor\n",
        ),
    ],
)
def test_seen_without_logging_and_silenced_by_it(settings, shown):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(settings)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", shown)


def test_logged_at_info(caplog, capsys):
    with caplog.at_level(logging.INFO, "hvd_gradcomp"):
        announce("compressing a tensor")
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.INFO, "compressing a tensor")
    ]
    assert capsys.readouterr().err == ""  # not twice
