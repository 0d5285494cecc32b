"""Local steps of sharded models over real processes, where Horovod cannot be imported."""

from __future__ import annotations

import pytest

from tests.parallel.test_ddp import processes

pytest.importorskip("torch.distributed.fsdp", reason="needs PyTorch")
pytestmark = pytest.mark.parallel
PARTS = (
    "equal_to_plain_models",
    "bytes_between_hosts",
    "fragments_and_buffers",
    "evaluated_between",
    "policies",
    "frozen_for_a_round",
    "not_finite",
)
KEPT = "checkpoints", "other_hosts", "momenta"
LAST = "three_levels", "made_and_dropped", "what_differs", "one_fails", "one_ends"


def test_methods(tmp_path):
    processes(tmp_path, 4, "every_method", worker="fsdp_local")


def test_two_hosts_of_two_shards(tmp_path):
    processes(tmp_path, 4, *PARTS, worker="fsdp_local")


def test_what_is_kept(tmp_path):
    processes(tmp_path, 4, *KEPT, worker="fsdp_local")


def test_levels_and_errors(tmp_path):
    processes(tmp_path, 4, *LAST, worker="fsdp_local")
