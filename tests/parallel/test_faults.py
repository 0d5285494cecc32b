"""What goes wrong on one rank: how the others end, or go on, and what is said."""

from __future__ import annotations

import re

import pytest

from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel

STOPPED = "another rank has stopped, or raised an error"
ENDS = {  # what ends a run, by what the faulty rank says; None where it says nothing
    "killed": None,
    "raises": "ArithmeticError: this rank has failed",
    "ends early": None,
    "received": "PayloadError: rank 0 sent a damaged payload",
}


def of_one_fault(result, fault):
    """Rank 1 had the fault."""
    for rank in {*range(len(result))} - {1}:
        kind, message = result[rank]
        assert kind == "HorovodInternalError"  # which elastic training goes by
        assert STOPPED in message
    assert result[1] is None if ENDS[fault] is None else ENDS[fault] in ": ".join(result[1])


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [("killed", 3), ("raises", 2), ("ends early", 2), ("received", 2)],
    ids=str,
)
def test_pytorch_ends_with_a_message_on_all_ranks(fault, ranks, tmp_path):
    result = launch("torch_faults", ranks, "gloo", tmp_path, fault, deadline=60, fails=True)
    assert "the exchange of gradcomp.0.bucket" in result[0][1]
    of_one_fault(result, fault)


def test_mpi_ends_too(tmp_path):
    """`mpirun` ends the other ranks itself as soon as one has died."""
    launch("torch_faults", 2, "mpi", tmp_path, "killed", deadline=60, fails=True)


@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_tensorflow_ends_with_a_message_on_all_ranks(fault, tmp_path):
    result = launch("tensorflow_faults", 2, "gloo", tmp_path, fault, deadline=60, fails=True)
    of_one_fault(result, fault)


FOUND = {
    "clean": "nothing was raised",
    "one element": "after 8 steps parameter 4.weight on rank 1 is not what it is on rank 0",
    "sign of zero": "parameter 3.bias on rank 1",
    "while training": "after 10 steps parameter 4.weight on rank 1",
    "level": "state capacity.level of bucket 0 (4.bias, 4.weight, 3.bias) on rank 1",
    "basis": "state basis of bucket 3 (0.weight) on rank 1",
    "verify_every": "verify_every must be a whole number of at least 0, got -1",
    "version": "wire format: 1 on rank 0, 2 on rank 1\nInstall the same versions",
    "dtype": "parameter 0.weight: (4, 1, 3, 3) float32 on rank 0, (4, 1, 3, 3) float64 on rank 1",
}


def test_pytorch_finds_differences_and_survives_what_it_can(tmp_path):
    results = launch("torch_endured", 2, "gloo", tmp_path, deadline=120)
    for result in results:
        says(result["errors"], FOUND)
        assert result["replicas"] == results[0]["replicas"]
        assert result["replicas"]["slow"] == result["replicas"]["in time"]


FOUND_BY_TENSORFLOW = {
    "clean": "nothing was raised",
    "fit": "DivergedError: the ranks have diverged: after 4 steps parameter dense/bias on rank 1",
    "callback": "DivergedError: the ranks have diverged: after 4 steps parameter dense/bias",
    "tape": "DivergedError: the ranks have diverged: after 3 steps parameter Variable on rank 1",
    "level": "state capacity.level of bucket 0 (dense/bias, dense/kernel) on rank 1",
    "version": "wire format: 1 on rank 0, 2 on rank 1\nInstall the same versions",
    "saved late": "nothing was raised",
}
SAVED_ALONE = (
    "a rank saves or loads a checkpoint while others train",
    "CheckpointError: nothing was saved or loaded: rank 1 saves or loads a checkpoint, but rank 0 "
    "waits in step 3",
)


def test_tensorflow_finds_differences(tmp_path):
    for rank, result in enumerate(launch("tensorflow_endured", 2, "gloo", tmp_path, deadline=120)):
        says(result, {**FOUND_BY_TENSORFLOW, "saved alone": SAVED_ALONE[rank]})


DEADLOCKS = {
    "slow": ("", ""),
    "slow rounds": ("", ""),
    "rounds": (".clock.0", "allreduce"),
    "metric": (".step", "allreduce"),
    "callback": (".step", "allreduce (metric.loss)"),
    "early stopping": (".step", "allgather (after fit.sz)"),
    "validation": ("allreduce (metric.val_loss)", ".step"),
    "tape": (".step", "allreduce (metric)"),
    "tf.function": (".step", "metric"),
}


# A deadlock ends Horovod, so it comes last in a run.
RUNS = [
    ("gloo", ["slow", "slow rounds", "metric"]),
    ("gloo", ["validation"]),
    ("gloo", ["tape"]),
    pytest.param("mpi", ["slow", "callback"], marks=pytest.mark.sweep),
    pytest.param("gloo", ["rounds"], marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("backend", "names"), RUNS, ids=str)
def test_tensorflow_finds_that_ranks_wait_for_each_other(backend, names, tmp_path):
    worker = "tensorflow_deadlocks"
    results = launch(worker, 2, backend, tmp_path, *names, deadline=150)
    for result in results:
        for name in names:
            first, second = DEADLOCKS[name]
            if not first:
                assert result[name] == "nothing was raised"
                continue
            texts = map(re.escape, (first, second))
            waits = "; ".join(f"rank {i} waits for [^;]*{text}" for i, text in enumerate(texts))
            assert re.search(waits, result["log"][name])
            # In a function of the user's TensorFlow raises its own; the log says why.
            kind = "" if name == "tf.function" else "DeadlockError: the ranks wait for each other"
            assert result[name].startswith(kind) and "shut down" in result[name], result[name]


@pytest.mark.parametrize(
    "framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.sweep)]
)
def test_two_process_sets_train_at_once_as_each_would_alone(framework, tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    for folder in (together, alone):
        folder.mkdir()
    of_sets = launch("process_sets", 4, "gloo", together, framework, "together")
    of_two = launch("process_sets", 2, "gloo", alone, framework, "alone")
    assert of_sets[0] == of_sets[1] and of_sets[2] == of_sets[3] and of_two[0] == of_two[1]
    assert {**of_sets[0], **of_sets[2]} == of_two[0]
