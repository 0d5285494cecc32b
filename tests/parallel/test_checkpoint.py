"""Stopping and resuming over real Horovod: exact, or with another number of ranks."""

from __future__ import annotations

import os

import pytest

from tests.methods import EVERY, LEARNED, OUTSIDE
from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel
# "200" stops every setting at step 100 of 200, the learned ones too; half an hour.
STEPS = os.environ.get("HVD_GRADCOMP_CHECKPOINT", "8")


def test_pytorch_resumes_to_the_bit(tmp_path):
    results = launch("torch_checkpoint", 2, "gloo", tmp_path, "stopped", STEPS, deadline=3000)
    methods = EVERY + OUTSIDE + (LEARNED if int(STEPS) >= 200 else [])
    for rank, result in enumerate(results):
        assert set(result["pairs"]) == {repr(c) for c in methods}
        for name, (whole, resumed) in result["pairs"].items():
            assert whole == resumed, (rank, name)
        faults = result["faults"]
        says(faults["raised"], MESSAGES)
        assert faults["kept"], "what was saved before is what can be resumed from"
        assert faults["files"] == ["current", "manifest", "rank-0-of-2", "rank-1-of-2", "shared"]
        assert len(faults["unharmed"]) == 10 and all(faults["unharmed"])
        assert faults["refusing"] == 0 and not faults["ran"]
        assert_seen(faults["flips"])
        assert faults["as before flips"]
        before, after = result["asked"]["digests"]
        assert before == after, "torch.distributed.checkpoint has made an exchange"
        (message,) = result["asked"]["said"]
        assert "leaves out of an optimizer's state what its compressor keeps" in message


def assert_seen(flips):
    """Every flip of a bit is an error that names the file; what it was names the version, too."""
    for name, messages in flips.items():
        naming = f"{name} is damaged" if name != "current" else ""
        for one in messages:
            assert one.startswith("CheckpointError") and naming in one, (name, one)


MESSAGES = {
    "full disk": "rank 1: OSError: [Errno 27] File too large. What was saved there before is",
    "nowhere": "there is no checkpoint in",
    "truncated": "rank 1: rank-1-of-2 is damaged: its bytes are not those that were saved",
    "missing": "rank 0: rank-0-of-2 is missing",
    "other format": "the compressor's state has format 3, this version reads 5",
    "foreign": "shared is no checkpoint of this frontend",
    "hostile": "shared is no checkpoint of this frontend",
    "not on one rank": "rank 1: refusing: not here",
    "unknown": "which no checkpoint can hold",
    "another compressor": "Use the same compression= to resume: it was made with "
    "DGCCompressor(density=0.1, momentum=0.0), here is StromCompressor(tau=1.0)",
    "another model": "size mismatch for 5.weight",
    "another object": "scheduler is not in it; there are model, optimizer, epoch",
    "mode": "mode must be one of 'sharded', 'consolidated', got 'whole'",
    "two modes": "rank 0 saves mode='sharded', rank 1 mode='consolidated'",
}


def test_tensorflow_resumes_to_the_bit(tmp_path):
    results = launch("tensorflow_checkpoint", 2, "gloo", tmp_path, "stopped", STEPS, deadline=3000)
    for rank, result in enumerate(results):
        for name, (whole, resumed) in result["pairs"].items():
            assert whole == resumed, (rank, name)
        for route in ("by_keras", "by_checkpoint", "tapes"):
            whole, resumed = result[route]
            assert whole == resumed, (rank, route)
        refused = result["refused"]
        says(refused["said"], KERAS_MESSAGES)
        assert len(refused["unharmed"]) == 7 and all(refused["unharmed"])
        assert_seen(refused["flips"])


KERAS_MESSAGES = {
    "another compressor": "Use the same compression= to resume: it was made with "
    "StromCompressor(tau=0.01), here is StromCompressor(tau=1.0)",
    "another model": "was dense/kernel [216, 10] float32, here it is dense/kernel [216, 11]",
    "not distributed": "saved with a distributed optimizer, but this optimizer is plain",
    "another object": "optimizer is not in it; there are model, epoch",
    "truncated": "rank 1: rank-1-of-2 is damaged: its bytes are not those that were saved",
    "not on one rank": "rank 1: other: variable 0 was Variable [2] float32, here it is",
    "two modes": "rank 0 saves mode='sharded', rank 1 mode='consolidated'",
}


@pytest.mark.parametrize(
    ("worker", "sizes"), [("torch_checkpoint", (4, 2, 8)), ("tensorflow_checkpoint", (2, 3))]
)
def test_other_ranks_go_on_with_the_same_sum(worker, sizes, tmp_path):
    before = None
    for place, size in enumerate(sizes):
        folder = tmp_path / f"run-{place}"
        folder.mkdir()
        results = launch(worker, size, "gloo", folder, "moved", "3", deadline=900)
        for result in results:
            assert result == results[0]
        if before is not None:
            for name, (_, saved, _) in before.items():
                loaded = results[0][name][0]
                largest = max(map(abs, saved))
                # One sum in float32, divided and added up again.
                errors = [abs(x - y) for x, y in zip(saved, loaded)]
                assert len(saved) == len(loaded) and max(errors) <= 1e-6 * largest, name
        before = results[0]
