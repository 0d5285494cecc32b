"""Horovod's documented resume on PyTorch: rank 0 alone loads, and broadcasts to all."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel
# What keeps nothing on a rank alone goes on as if it had not stopped; others lose that of the rest.
EXACT = (
    "None",
    "FP16",
    "QSGD",
    "TernGrad",
    "GradiVeQCompressor(slice_size=None, max_slice=4096, loss_threshold=None, ratio=4",
)
MESSAGES = {
    "halfway": "has changed nothing: rank 1: RuntimeError: gradients are on their way",
    "forgotten": "steps made: 3 on rank 0, 0 on rank 1\n",
    "groups": "parameter group 1: 1 parameters on rank 0, missing on rank 1",
    "locked": "rank 0 cannot hand this out",
    "compressor": "compression: StromCompressor(tau=0.7) on rank 0, VarianceCompressor",
    "shape": "b: (2,) torch.float32 on rank 0, (3,) torch.float32 on rank 1",
    "dtype": "b: (2,) torch.float32 on rank 0, (2,) torch.float64 on rank 1",
    "missing": "b: (2,) torch.float32 on rank 0, missing on rank 1",
    "no tensor": "rank 1: TypeError: a is no tensor",
    "no root": "root_rank=7 does not take part",
}


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [(1, "gloo"), (2, "gloo"), pytest.param(4, "mpi", marks=pytest.mark.sweep)],
)
def test_rank_0_loads_and_all_go_on(ranks, backend, tmp_path):
    results = launch("torch_resume", ranks, backend, tmp_path, str(ranks), deadline=900)
    result = results[0]
    for other in results:
        assert other == result
    for name, ((whole, resumed), (_, steps)) in result["pairs"].items():
        stop, _, method = name.partition(" ")
        assert steps == int(stop)
        if ranks == 1 or method.startswith(EXACT):
            assert whole == resumed, name
    if ranks == 1:
        return
    assert max(result["conserved"].values()) < 1e-6
    whole, resumed = result["cases"]["loaded before"]
    assert whole == resumed
    whole, again = result["cases"]["back to the start"]
    assert whole == again
    assert "goes on from step 3 of rank 1" in result["cases"]["said"]
    says(result["errors"], MESSAGES)
