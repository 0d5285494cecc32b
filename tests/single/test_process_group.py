"""Connections of one rank over `torch.distributed`, and what it has saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import ChunkedTopKCompressor, SparseGDCompressor
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup


def test_closed_connections_are_not_those_of_all_ranks(one_process):
    """To `torch.distributed` a group that is None means the user's own."""
    group = ProcessGroup()
    backend = C10dBackend(group, "bucket")
    backend.allgather(torch.ones(2), "", group).wait()
    group.hang_up()
    group.hang_up()
    assert group.closed
    for collective in (
        lambda: backend.allgather(torch.ones(2), "", group),
        lambda: backend.broadcast(torch.ones(2), 0, "", group),
        lambda: backend.gather_objects(1, int, "a number"),
    ):
        with pytest.raises(RuntimeError, match="closed: this rank failed earlier"):
            collective()


def test_a_state_of_more_ranks_says_what_can_be_done(one_process):
    model = DistributedDataParallel(nn.Linear(3, 2))
    state = ddp.compress(model, SparseGDCompressor(density=0.5))
    saved = state.state_dict()
    saved["size"] = 2
    with pytest.raises(CheckpointError, match=r"sharded by 2 ranks.*Hand load_states\(\)"):
        state.load_state_dict(saved)
    state.load_states([saved, {**saved, "rank": 1}])


@pytest.mark.parametrize("rollback", [True, False])
def test_a_bucket_and_its_state_swap_the_same_memory(one_process, rollback):
    """A state that keeps the gradient's memory gives its own back, step after step."""
    model = DistributedDataParallel(nn.Linear(300, 300))
    compressor = ChunkedTopKCompressor(chunk=64, k=8)
    state = ddp.compress(model, compressor, rollback=rollback)
    (bucket,), seen = state.reducer.buckets, set()
    for _ in range(8):
        model.zero_grad()
        model(torch.randn(4, 300)).sum().backward()
        seen |= {bucket.flat.data_ptr(), bucket.state.r.data_ptr()}
    assert len(seen) == (3 if rollback else 2)
