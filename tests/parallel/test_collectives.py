"""The frontends and the lockstep world perform every collective with one meaning."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.every_collective import EveryCollective, gradient
from tests.parallel.launch import launch

N = 12


def expected(size: int, steps: int) -> list[list[list[float]]]:
    """[rank][step]: what the world of lockstep gives, itself held to plain sums here."""
    layout = Layout(("a",), ((N,),), block=1)
    world = World(EveryCollective(), TorchOps(), layout, size, average=False)
    expected: list[list[list[float]]] = [[] for _ in range(size)]
    for step in range(steps):
        flats = [torch.tensor(gradient(rank, step, N)) for rank in range(size)]
        totals = world.step(flats)
        rows = torch.stack(flats).view(size, size, -1)
        for rank in range(size):
            weighted = sum(r * flat for r, flat in enumerate(flats))
            phase = sum(flats) if step % 2 == 0 else 3 * size * flats[0]
            plain = 2 * weighted + sum(flats) + rows[:, rank].reshape(-1) + flats[-1] + phase
            assert torch.equal(totals[rank], plain)
            expected[rank].append(totals[rank].tolist())
    return expected


def test_lockstep():
    expected(4, 4)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("ranks", "backend", "framework"),
    [
        (3, "gloo", "torch"),
        (2, "mpi", "torch"),
        (3, "gloo", "tensorflow"),
        pytest.param(2, "gloo", "torch", marks=pytest.mark.sweep),
        pytest.param(2, "gloo", "tensorflow", marks=pytest.mark.sweep),
        pytest.param(2, "mpi", "tensorflow", marks=pytest.mark.sweep),
    ],
)
def test_over_horovod(framework, ranks, backend, tmp_path):
    results = launch("collectives", ranks, backend, tmp_path, framework, str(N))
    assert results == expected(ranks, 4)
