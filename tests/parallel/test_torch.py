"""PyTorch over real Horovod."""

from __future__ import annotations

from itertools import product

import pytest

from tests.methods import EVERY, ONE_OF_EACH_EXCHANGE
from tests.parallel.launch import launch, on_timeline, ranks_on, says

pytestmark = pytest.mark.parallel
SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("steps", "ranks", "backend"),
    [
        (40, 2, "gloo"),
        (40, 4, "mpi"),
        *(pytest.param(200, *of, marks=SWEEP) for of in product((2, 4), ("gloo", "mpi"))),
    ],
)
def test_replicas_are_identical(steps, ranks, backend, device, tmp_path):
    ranks = ranks_on(device, ranks)
    settings = "all" if ranks <= 2 and backend == "gloo" else "one of each exchange"
    results = launch("torch_replicas", ranks, backend, tmp_path, str(steps), settings, device)
    methods = EVERY if settings == "all" else ONE_OF_EACH_EXCHANGE
    assert set(results[0]) == {repr(c) for c in methods}
    for result in results:
        assert result == results[0]
    if ranks > 1:  # to one rank alone the leader of ScaleCom does nothing new
        assert len({digest for digest, _ in results[0].values()}) == len(methods)


def test_no_compression_equals_stock_horovod(tmp_path):
    results = launch("torch_stock", 2, "gloo", tmp_path)
    for result in results:
        assert result["projected"][0] == results[0]["projected"][0]
        assert result["projected"][1] < 1e-5
        for name, (ours, theirs) in result["pairs"].items():
            assert ours == theirs, name
        assert "import hvd_gradcomp.torch as hvd" in result["message"]


@pytest.mark.parametrize(("ranks", "backend"), [(3, "gloo"), (2, "mpi")], ids=str)
def test_what_users_do(ranks, backend, tmp_path):
    results = launch("torch_features", ranks, backend, tmp_path, str(ranks))
    for name in results[0]:
        assert len({r[name] for r in results if name in r}) == 1, name
    names = on_timeline(tmp_path / "timeline.json")
    assert {
        "allgather.gradcomp.0.handshake.t",
        "allgather.gradcomp.0.bucket0.1.bias-and-3.allgather.0",
        "allgather.gradcomp.2.bucket0.head.bias-and-2.allgather.0",
    } <= names


def test_moments_of_single_samples(tmp_path):
    """Replicas are equal; what else has to hold is asserted on each rank."""
    results = launch("torch_moments", 2, "gloo", tmp_path)
    assert results[0] == results[1]


MESSAGES = {
    "before init": "call hvd.init() before",
    "groups": "groups= and num_groups= bypass compression",
    "wrapped twice": "optimizer= is distributed already: pass the SGD that it was made from",
    "no optimizer": "optimizer= takes a torch.optim.Optimizer, got str",
    "num_groups": "groups= and num_groups= bypass compression",
    "adasum": "op must be hvd.Average or hvd.Sum",
    "no compressor": "compression must be a compressor of hvd_gradcomp",
    "untracked": "needs hvd.track_moments(model)",
    "one pass": "backward_passes_per_step of at least 2",
    "half named": "were not named",
    "repeated names": "must be unique",
    "integers": "weight has dtype torch.float8_e5m2; what is reduced is float16, bfloat16",
    "elsewhere": "on the device meta, where tensors have no data: weight, bias. Materialize",
    "stats": "pass the optimizer that hvd_gradcomp.torch.DistributedOptimizer returned",
    "different models": "parameter 0.weight: (3, 4) float32 on rank 0, (4, 4) float32 on rank 1",
    "different compressors": "StromCompressor(tau=1.1) on rank 1",
    "damaged payload": "PayloadError: rank 1 sent a damaged payload",
    "different sizes": "payloads of different sizes",
    "joined alone": ".handshake.sz; rank 1 waits for gradcomp.",
    "frozen alone": "parameters that are frozen: 0.bias on rank 0, none on rank 1",
    "loaded alone": "OutOfStepError: the ranks are in different steps: rank 0 in step 0, rank 1 in",
    "flipped sum": "PayloadError: what was added up in the exchange before is not the same on rank",
    "scaled alone": "or a loss scaler): raise on rank 0, skip on rank 1",
    "other scales": "in which gradients are added up: 8.0 on rank 0, 16.0 on rank 1",
    "scalers live on": "nothing was raised",
    "none overflows": "NonFiniteGradientError: a rank has a NaN or an infinity in its gradient, or",
    "levels overflow": "NonFiniteGradientError: rank 0, 1 has a NaN or an infinity in its gradient",
    "two shots overflow": "NonFiniteGradientError: rank 0, 1 has a NaN or an infinity in its",
    "signs overflow": "NonFiniteGradientError: rank 0, 1 has a NaN or an infinity in its gradient",
    "values overflow": "NonFiniteGradientError: rank 0, 1 has a NaN or an infinity in its gradient",
    "degenerate": "nothing was raised",
    "complex": "nothing was raised",
    "inference": "nothing was raised",
    "fails in backward": "GradientChangedError: the gradient of 1.weight was changed on rank 1",
    "slow": "nothing was raised",
    "metric": "allreduce.metric",
    "objects": "allgather.objects.sz",
    "verify": ".verify",
    "barrier": "barrier",
}


def test_bad_input_is_an_error_on_all_ranks(tmp_path):
    for result in launch("torch_errors", 2, "gloo", tmp_path, deadline=120):
        says(result, MESSAGES)


TAKEOVER_MESSAGES = {
    "adam": "Adam has none that it could take over",
    "adam given": "Use SGD, or give the compressor momentum=0",
    "another": "another momentum than SGD, 0.5 and 0.9",
    "groups": "the groups of SGD have",
    "cycled": "it would be applied twice",
    "rules": "'nothing' matches no layer",
    "poisoned": "NonFiniteGradientError: rank 1 has a NaN or an infinity in its gradient",
}


def test_momentum_is_applied_once(tmp_path):
    for result in launch("torch_momentum", 2, "gloo", tmp_path):
        for name, (difference, _) in result["pairs"].items():
            assert difference < 1e-4, (name, difference)
        assert result["resumed"][0] == result["resumed"][1]
        assert "DGC(density=0.1, momentum=0.9, nesterov=False)" in result["description"]
        assert "None(), then momentum=0.9" in result["description"]
        says(result["errors"], TAKEOVER_MESSAGES)


TRAINING_MESSAGES = {
    "lgc": "plans the whole model at once: head.weight, head.bias cannot join",
    "momentum": "the compressor has taken 0.9 over",
    "untracked": "not tracked: head.weight, head.bias",
    "in between": "after backward() and before step()",
}


def test_parameters_join_freeze_and_thaw(tmp_path):
    results = launch("torch_training", 2, "gloo", tmp_path)
    assert results[0] == results[1]
    says(results[0]["errors"], TRAINING_MESSAGES)
    assert len(results[0]["defaults"]) > 10
    for kind, (plain, distributed) in results[0]["defaults"].items():
        assert plain == distributed, kind
    messages, groups, registered = results[0]["refused"]
    assert TRAINING_MESSAGES["momentum"] in messages and groups == 1 and not registered


BACKWARD_MESSAGES = {
    "too early": "GradientChangedError: the gradient of trunk.weight was changed on rank 1 before",
    "in time": "nothing was raised",
    "replaced": "GradientChangedError: the gradient of left.bias was changed on rank 0 before",
    "once too often": "more than backward_passes_per_step times",
    "out of step": "OutOfStepError: the ranks are in different steps: rank 0 in step 0, rank 1 in",
    "higher": "backward(create_graph=True) cannot be exchanged",
    "in a hook": "a hook of the parameter steps or clears it. Step after backward()",
}


@pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "gloo"), pytest.param(3, "mpi", marks=SWEEP)], ids=str
)
def test_gradients_are_reduced_when_backward_returns(ranks, backend, device, tmp_path):
    ranks = ranks_on(device, ranks)
    results = launch("torch_backward", ranks, backend, tmp_path, device)
    for result in results:
        for name, (difference, reduced) in result["cases"].items():
            assert difference < 1e-6, (name, difference)
            assert reduced or name in ("too few passes", "nothing on one rank", "by hand"), name
        for name, (norm, _) in result["clipped"].items():
            assert 0 < norm < 1.01, (name, norm)
        assert max(*result["scaler"], result["gan"], result["joined"], result["both"]) < 1e-6
        assert result["swapped"] < 1e-6
        assert all(result["kept"].values()), result["kept"]
        few, many, quantized = result["rows"]
        dense = 4 * 64 * 32
        assert max(*few, *many) <= dense and max(quantized) < dense / 6.5
        for ends in result["dropped"].values():
            assert len(set(ends.values())) == 1, ends
        (once_only, loss), (for_long, _) = result["guarded"].values()
        assert once_only == 1 and for_long > 20 and loss < 1.0
        for last, steps, _ in result["joined compressed"].values():
            assert (last, steps) == ([1, 1], [10, 6])  # rank 1 has most batches
        assert result["unused"] == [0.0, 0.0]
        assert result["copied"] == [[True, True], [0.9, 0.9]]
        for same in ("clipped", "sparse", "synchronized", "joined compressed"):
            assert result[same] == results[0][same]
        assert len(set(result["synchronized"].values())) == 1
        says(result.get("errors", {}), BACKWARD_MESSAGES if ranks > 1 else {})
    for result in results[1:]:  # who had no backward may have gone on
        says(result["errors"], {"on some ranks": "they have called step() without backward()"})
