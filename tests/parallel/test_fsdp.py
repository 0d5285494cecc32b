"""FSDP2 over real processes, where Horovod cannot be imported."""

from __future__ import annotations

import pytest

from tests.parallel.test_ddp import processes

pytest.importorskip("torch.distributed.fsdp", reason="needs PyTorch")
pytestmark = pytest.mark.parallel
METHODS = "every_method", "passes_are_exchanged_once", "factors_leave_methods_alone"
PARTS = (
    "dense_is_what_hybrid_sharding_does",
    "divided_as_in_hybrid_sharding",
    "micro_batch_moments",
    "units_in_another_order",
    "frozen_for_some_steps",
    "policies",
    "momentum_is_taken_over",
    "state_goes_on",
    "not_finite",
    "groups_of_some_ranks",
    "discarded",
    "unused",
    "what_cannot_go",
    "compiled",
    "waits_as_long",
    "made_and_dropped",
    "one_fails",
    "one_ends",
)


def test_methods(tmp_path):
    processes(tmp_path, 4, *METHODS, worker="fsdp_training")


def test_two_replicas_of_two_shards(tmp_path):
    processes(tmp_path, 4, *PARTS, worker="fsdp_training")


def test_two_replicas_of_one_shard(tmp_path):
    """As `DistributedDataParallel` has it."""
    parts = (
        "dense_is_what_hybrid_sharding_does",
        "divided_as_in_hybrid_sharding",
        "micro_batch_moments_are_those_of_ddp",
    )
    processes(tmp_path, 2, *parts, worker="fsdp_training")
