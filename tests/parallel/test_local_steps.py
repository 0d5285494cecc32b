"""Local steps over real processes."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel

MESSAGES = {
    "deadline": "deadline=1.0",
    "every": "every=2",
    "not_finite": "NonFiniteGradientError",
    "start": "the global parameters of the ranks differ",
    "steps": "in exchange()",
    "samples": "moments='step'",
    "exchanges_already": "optimizer= is distributed already: pass the SGD",
    "twice": "hvd.DistributedOptimizer and hvd.LocalSteps would both exchange the same parameters",
    "around_ddp": "hvd.DistributedOptimizer and DistributedDataParallel would both exchange",
    "wrapped_by_ddp_later": "and DistributedDataParallel would both exchange the same parameters",
    "momenta_of_sgd": "TypeError: MomentumExchange takes",
    "lengths": "another number of steps for the round after step 4, by rank: {0: 2, 1: 3",
    "fails_alone": "ZeroDivisionError",
    "rates": "another number of steps for the round after step",
}


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "gloo"),
        pytest.param(3, "gloo", marks=pytest.mark.sweep),
        pytest.param(4, "mpi", marks=pytest.mark.sweep),
    ],
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
        shared, loaded, end = result["consolidated"]
        assert shared == loaded
        assert end == results[0]["consolidated"][2]
        assert len(set(result["ddp"])) == 1
        whole, again = result["grown"]
        assert whole == again == results[0]["grown"][0] and whole[0] < 30 // 3
        assert result["handed out"] == results[0]["handed out"]
        assert result["skipped"] == results[0]["skipped"]
        for name, (steps, *end) in result["slow"].items():
            largest, *first = results[0]["slow"][name]
            assert end == first, name
            assert result is results[0] or steps < largest, "a quick rank goes on while it waits"
        says(result["errors"], MESSAGES)


TENSORFLOW_MESSAGES = {
    "every": "MismatchError",
    "lengths": "another number of steps for the round after step 4, by rank: {0: 2, 1: 3",
    "fit lengths": "another number of steps for the round after step 2, by rank: {0: 2, 1: 4",
    "rates": "another number of steps for the round after step",
    "fit rates": "another number of steps for the round after step",
    "fails alone": "ZeroDivisionError",
    "deadline": "deadline=1.0",
    "no deadline": "deadline=2.0",
    "fit deadline": "deadline=1.0",
    "warmup": "MismatchError",
    "fragments": "fragments=2",
    "not finite": "NonFiniteGradientError",
    "start": "the global variables of the ranks differ",
    "start of warmup": "the global variables of the ranks differ",
    "set alone": "the global variables of the ranks differ",
    "place": "rank 0 after 3 steps in exchange()",
    "distributed": "rank 1: its optimizer is distributed",
    "fit not finite": "NonFiniteGradientError",
    "fit ends": "at_epoch_end differs",
    "fit every": "every=4",
}


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "gloo"),
        pytest.param(3, "gloo", marks=pytest.mark.sweep),
        pytest.param(4, "mpi", marks=pytest.mark.sweep),
    ],
)
def test_tensorflow_over_horovod(ranks, backend, tmp_path):
    results = launch("tensorflow_local_steps", ranks, backend, tmp_path)
    for result in results:
        assert max(result["papers"].values()) < 2e-5
        assert max(result["fit papers"].values()) < 2e-5
        assert result["warmup"][0] < 1e-5
        for name, (whole, again) in result["resumed"].items():
            assert whole == again, name
        assert len(set(result["fit resumed"])) == 1
        says(result["errors"], TENSORFLOW_MESSAGES)
        says(result["replicas"][1], dict.fromkeys(("fit", "tape"), "2 replicas in this process"))
        for name, (ends, least) in result["averaged fits"].items():
            assert len(set(ends)) == 2 and least >= 0, name
    first, *others = results
    assert len(set(first["consolidated"])) == 2  # what was loaded is what was saved
    assert len(set(first["fits"])) == 2  # nothing moves after the last validation
    for name, ends in first["lengths"].items():
        steps = [step for step, _ in ends]
        assert steps[0] == 2 and steps[-1] - steps[-2] > 4, (name, steps)
    for other in others:
        assert first["warmup"][1] != other["warmup"][1]
        assert first["warmup"][2] == other["warmup"][2]
        for name, (apart, ends) in first["methods"].items():
            assert apart != other["methods"][name][0], name
            assert ends == other["methods"][name][1], name
        for name in ("consolidated", "skipped", "fits", "lengths"):
            assert first[name] == other[name], name
        assert first["fit resumed"] != other["fit resumed"]  # each rank's own Adam
        assert first["slow resumed"] == other["slow resumed"]
        assert first["averaged fits"] == other["averaged fits"]
        assert first["replicas"][0] == other["replicas"][0]
    *quick, slow = results
    for name, (largest, ends, lost) in first["slow"].items():
        least, rounds = slow["slow"][name][0], ends[0]
        assert least - 1 < 8 * rounds <= largest - 1, f"{name}: rounds do not wait for slow steps"
        assert all(result["slow"][name][1] == ends for result in results), name
        assert lost < 1e-4 if name != "Int8Compressor" else lost < 0.1, name
    for name, (_, ends) in first["slow fits"].items():
        assert all(result["slow fits"][name][1] == ends for result in results), name
    assert slow["slow fits"]["until"][0] < quick[0]["slow fits"]["until"][0]


MOMENTA_MESSAGES = {
    "not finite": "a rank has a NaN or an infinity in its gradient",
    "warmup": "MismatchError",
    "gradients": "MismatchError",
}


def test_momenta_on_tensorflow(tmp_path):
    first, second = launch("tensorflow_momenta", 2, "gloo", tmp_path)
    for name in ("fit", "loop", "skipped"):
        assert first[name] == second[name], name
    assert first["records"] == 4
    for seen in (*first["fit"].values(), *first["loop"].values()):
        assert len(set(seen)) == len(seen)  # each step moves
    for result in (first, second):
        assert result["plain"] < 1e-6
        assert len(set(result["resumed"])) == 1
        assert result["bytes"]["one-bit"] < 0.8 * result["bytes"]["none"]  # 3 of 8 steps are dense
        says(result["errors"], MOMENTA_MESSAGES)
