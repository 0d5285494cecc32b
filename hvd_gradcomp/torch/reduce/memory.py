"""Bytes that a reducer holds beyond the model and its gradients, by what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.torch.reduce.bucket import Bucket


def memory_of(buckets: Sequence[Bucket], gradients: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the bytes that buckets hold now, without entries of 0; see `CompressionStats.memory`.

    Memory that several tensors share counts once, for the first purpose that needs it.

    Args:
        buckets: of a reducer.
        gradients: every `p.grad`, whose memory is not counted; sparse ones never lie in a bucket.
    """
    operations = list({id(bucket.ops): bucket.ops for bucket in buckets}.values())
    tensors = {
        "state": [x for bucket in buckets for _, x in leaves(bucket.state)],
        "rollback": [
            *(x for bucket in buckets for _, x in leaves(bucket.snapshot_state or ())),
            *(x for ops in operations for x in ops.spare_memory()),
        ],
        "buckets": [bucket.flat for bucket in buckets],
        "moments": [bucket.moment for bucket in buckets if bucket.moment is not None],
        "scratch": [x for ops in operations for x in ops.reused_memory()],
    }
    counted = {_address(x) for x in gradients if not x.is_sparse}
    sizes = {purpose: count_bytes(some, counted) for purpose, some in tensors.items()}
    return {purpose: size for purpose, size in sizes.items() if size}


def count_bytes(tensors: Iterable[torch.Tensor], counted: set[int] | None = None) -> int:
    """Return the bytes of the memory that tensors lie in, each piece once.

    Args:
        tensors: strided ones.
        counted: addresses of pieces that are left out; this call adds its own.
    """
    counted, size = set() if counted is None else counted, 0
    for x in tensors:
        address = _address(x)
        if address not in counted:
            counted.add(address)
            size += x.untyped_storage().nbytes()
    return size


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
