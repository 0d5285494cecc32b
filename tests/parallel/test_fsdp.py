"""FSDP2 over real processes, where Horovod cannot be imported."""

from __future__ import annotations

import pytest

from tests.parallel.test_ddp import processes

pytest.importorskip("torch.distributed.fsdp", reason="needs PyTorch")
pytestmark = pytest.mark.parallel
PARTS = (
    "every_method",
    "dense_is_what_hybrid_sharding_does",
    "momentum_is_taken_over",
    "state_goes_on",
    "not_finite",
    "discarded",
    "unused",
    "what_cannot_go",
    "one_fails",
    "one_ends",
)


def test_two_replicas_of_two_shards(tmp_path):
    processes(tmp_path, 4, *PARTS, worker="fsdp_training")


def test_two_replicas_of_one_shard(tmp_path):
    """As `DistributedDataParallel` has it."""
    processes(tmp_path, 2, "dense_is_what_hybrid_sharding_does", worker="fsdp_training")
