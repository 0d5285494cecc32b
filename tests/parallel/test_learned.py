"""GradiVeQ and LGC over real Horovod, through every phase and every change of phase."""

from __future__ import annotations

import pytest

from tests.methods import learned_by
from tests.parallel.launch import launch

pytestmark = pytest.mark.parallel
SWEEP = pytest.mark.sweep
STEPS = 200


def fusion(ranks):
    """Bytes. Sums of more than two depend on what Horovod happens to fuse; two commute."""
    return "134217728" if ranks == 2 else "0"


def check(results, kind, ranks):
    for name in map(repr, learned_by(kind, ranks)):
        for result in results:
            assert len(result[name]["digests"]) == STEPS // 10
            assert result[name]["digests"] == results[0][name]["digests"], "replicas differ"
            assert result[name]["finite"]
        (loss,) = results[0][name]["losses"].values()
        assert 0 <= loss < 1.2
        sent = [result[name]["bytes"] for result in results]
        compressed = sum(min(b) for b in sent) / ranks
        assert compressed < 0.9 * max(sent[0]), "a phase was compressed"
    for result in results:
        if "again" in result:
            assert result["again"][0] == result["again"][1], "the same run twice, or resumed"


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "gloo"),
        pytest.param(4, "gloo", marks=SWEEP),
        pytest.param(4, "mpi", marks=SWEEP),
    ],
)
def test_torch_replicas_are_identical_in_every_phase(ranks, backend, tmp_path):
    arguments = (str(STEPS), fusion(ranks))
    results = launch("torch_learned", ranks, backend, tmp_path, *arguments, deadline=550)
    check(results, "torch", ranks)
    for result in results:
        assert result["lost"] < 1e-6, "residuals go over as well"
        away, layers = result["order"]
        assert away < 1e-6, "momentum goes on when the buckets are planned anew"
        assert layers[:2] == ["first.weight", "first.bias"] or layers[:1] == ["first.bias"]
        assert {name.split(".")[0] for name in layers[-2:]} == {"last"}


@pytest.mark.parametrize(
    ("kind", "ranks", "backend"),
    [
        ("fit", 2, "gloo"),
        pytest.param("fit", 4, "mpi", marks=SWEEP),
        pytest.param("graph", 2, "gloo", marks=SWEEP),
    ],
)
def test_tensorflow_replicas_are_identical_in_every_phase(kind, ranks, backend, tmp_path):
    arguments = (kind, str(STEPS), fusion(ranks))
    results = launch("tensorflow_learned", ranks, backend, tmp_path, *arguments, deadline=550)
    check(results, kind, ranks)
