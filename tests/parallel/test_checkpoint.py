"""Stopping and resuming over real Horovod: exact, or with another number of ranks."""

from __future__ import annotations

import os

import pytest

from tests.methods import EVERY, LEARNED
from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel
# "200" stops every setting at step 100 of 200, the learned ones too; half an hour.
STEPS = os.environ.get("HVD_GRADCOMP_CHECKPOINT", "8")


def test_pytorch_resumes_to_the_bit(tmp_path):
    results = launch("torch_checkpoint", 2, "gloo", tmp_path, "stopped", STEPS, deadline=3000)
    methods = EVERY + LEARNED if int(STEPS) >= 200 else EVERY
    for rank, result in enumerate(results):
        assert set(result["pairs"]) == {repr(c) for c in methods}
        for name, (whole, resumed) in result["pairs"].items():
            assert whole == resumed, (rank, name)
        faults = result["faults"]
        says(faults["raised"], MESSAGES)
        assert faults["kept"], "what was saved before is what can be resumed from"
        assert faults["files"] == ["current", "rank-0-of-2", "rank-1-of-2", "shared"]


MESSAGES = {
    "full disk": "rank 1: OSError: [Errno 27] File too large. What was saved there before is",
    "nowhere": "there is no checkpoint in",
    "truncated": "rank 1: rank-1-of-2 is damaged, or no checkpoint",
    "missing": "rank 0: rank-0-of-2 is missing",
    "older": "the compressor's state has format 2, this version reads 3",
    "foreign": "shared is damaged, or no checkpoint",
    "another compressor": "Use the same compression= to resume: it was made with "
    "DGCCompressor(density=0.1, momentum=0.0), here is StromCompressor(tau=1.0)",
    "another model": "size mismatch for 5.weight",
    "another object": "scheduler is not in it; there are model, optimizer, epoch",
    "mode": "mode must be one of 'sharded', 'consolidated', got 'whole'",
}


def test_tensorflow_resumes_to_the_bit(tmp_path):
    results = launch("tensorflow_checkpoint", 2, "gloo", tmp_path, "stopped", STEPS, deadline=3000)
    for rank, result in enumerate(results):
        for name, (whole, resumed) in result["pairs"].items():
            assert whole == resumed, (rank, name)
        for way in ("by_keras", "by_checkpoint", "tapes"):
            whole, resumed = result[way]
            assert whole == resumed, (rank, way)
        says(result["refused"], KERAS_MESSAGES)


KERAS_MESSAGES = {
    "another compressor": "Use the same compression= to resume: it was made with "
    "StromCompressor(tau=0.01), here is StromCompressor(tau=1.0)",
    "another model": "was dense/kernel [216, 10] float32, here it is dense/kernel [216, 11]",
    "not distributed": "its optimizer was distributed, here it is not so",
    "another object": "optimizer is not in it; there are model",
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
