"""Local steps over real processes."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel

MESSAGES = {
    "every": "every=2",
    "not_finite": "NonFiniteGradientError",
    "start": "the global parameters of the ranks differ",
    "steps": "in exchange()",
    "samples": "moments='step'",
    "momenta_of_sgd": "TypeError: MomentumExchange takes",
}


@pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "gloo"), pytest.param(4, "mpi", marks=pytest.mark.sweep)]
)
def test_torch_over_horovod(ranks, backend, tmp_path):
    results = launch("torch_local_steps", ranks, backend, tmp_path)
    for result in results:
        for name, (apart, end) in result["methods"].items():
            assert end == results[0]["methods"][name][1], name
            if result is not results[0]:
                assert apart != results[0]["methods"][name][0], name
        assert result["momenta"] == results[0]["momenta"]
        for name, (whole, again) in result["momenta"].items():
            assert whole == again, name
        assert result["stock"] < 1e-5
        for name, (whole, again) in result["resumed"].items():
            assert whole == again == results[0]["resumed"][name][0], name
        shared, found, end = result["consolidated"]
        assert shared == found
        assert end == results[0]["consolidated"][2]
        assert result["handed out"] == results[0]["handed out"]
        assert result["skipped"] == results[0]["skipped"]
        says(result["errors"], MESSAGES)
