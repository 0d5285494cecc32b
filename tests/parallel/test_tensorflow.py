"""TensorFlow and Keras 3 over real Horovod."""

from __future__ import annotations

import pytest

from tests.methods import methods_by
from tests.parallel.launch import launch, on_timeline, says

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("steps", "kind", "ranks", "backend"),
    [
        (40, "fit", 4, "mpi"),
        (40, "graph", 4, "gloo"),
        (40, "eager", 2, "gloo"),
        (40, "passes", 2, "gloo"),
        *(
            pytest.param(200, *each, marks=pytest.mark.sweep)
            for each in (
                ("fit", 2, "gloo"),
                ("fit", 4, "mpi"),
                ("graph", 4, "gloo"),
                ("graph", 2, "mpi"),
                ("eager", 2, "gloo"),
                ("passes", 2, "gloo"),
            )
        ),
    ],
)
def test_replicas_are_identical(steps, kind, ranks, backend, tmp_path):
    arguments = (kind, str(steps))
    results = launch("tensorflow_replicas", ranks, backend, tmp_path, *arguments, deadline=550)
    methods = methods_by(kind, ranks)
    assert set(results[0]) == {repr(c) for c in methods}
    for result in results:
        assert result == results[0]
    assert len({digest for digest, _ in results[0].values()}) == len(methods)


MESSAGES = {
    "before init": "call hvd.init() before",
    "groups": "groups= and num_groups= bypass compression",
    "keras groups": "groups= and num_groups= bypass compression",
    "adasum": "op must be hvd.Average or hvd.Sum",
    "no compressor": "compression must be a compressor of hvd_gradcomp",
    "no moments": "needs moments= here",
    "no optimizer": "expected a Keras 3 optimizer",
    "passes": "backward_passes_per_step must be at least 1",
    "accumulation": "use backward_passes_per_step=",
    "accumulation inside": "use backward_passes_per_step=",
    "unlike passes": "nothing was raised",
    "not decayed": "nothing was raised",
    "scaled by keras": "nothing was raised",
    "small gradients": "nothing was raised",
    "too few": "1 gradients were given for 2 variables",
    "given twice": "was given twice, with a gradient each",
    "sparse alone": "a rank has gradients of other layers",
    "one pass": "backward_passes_per_step of at least 2",
    "stats": "no exchange is known",
    "inside stock": "import hvd_gradcomp.tensorflow as hvd",
    "late layer": "did not train when this optimizer was built",
    "xla": "jit_compile=False",
    "xla switched off": "nothing was raised",
    "different models": "(3, 2) float32 on rank 0",
    "other step": "a rank is at another step; load the same checkpoint on all ranks",
    "retrained alone": "a rank is in another phase of a compressor that learns",
    "none overflows": "NonFiniteGradientError: [hvd_gradcomp: a rank has a NaN or an infinity",
    "levels overflow": "NonFiniteGradientError: [hvd_gradcomp: a rank has a NaN or an infinity",
    "signs overflow in a graph": "has a NaN or an infinity in its gradient",
    "values overflow": "NonFiniteGradientError: [hvd_gradcomp: a rank has a NaN or an infinity",
    "degenerate": "nothing was raised",
}


def test_like_stock_horovod_and_bad_input(tmp_path):
    results = launch("tensorflow_features", 2, "gloo", tmp_path)
    for result in results:
        for name, (ours, theirs) in result["pairs"].items():
            assert ours == theirs, name
        assert result["replicas"] == results[0]["replicas"]
        for name, ends in result["left"].items():
            assert ends[0][0] and ends[1] == ends[2], f"{name}: {ends}"
        says(result["errors"], MESSAGES)
    assert {
        "gradcomp.0.bucket0.Variable.1-and-1.allgather.0",
        "gradcomp.3.bucket0.Variable.1-and-1.allreduce.0",
        "gradcomp.4.sparse0.Variable.indices",
        "gradcomp.6.bucket0.head.bias-and-1.allgather.0",
    } <= on_timeline(tmp_path / "timeline.json")


TAKEOVER_MESSAGES = {
    "adam": "Adam has none that it could take over",
    "another": "another momentum than SGD, 0.5 and 0.9",
    "taped": "no optimizer here to take the momentum over from",
    "poisoned": "NonFiniteGradientError",
    "poisoned graph": "has a NaN or an infinity in its gradient",
}


def test_momentum_is_applied_once(tmp_path):
    for result in launch("tensorflow_momentum", 2, "gloo", tmp_path):
        for name, (difference, _) in result["pairs"].items():
            assert difference < 1e-4, (name, difference)
        assert "DGC(density=0.1, momentum=0.9, nesterov=False)" in result["description"]
        says(result["errors"], TAKEOVER_MESSAGES)
