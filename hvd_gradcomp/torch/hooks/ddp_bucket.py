"""Bucket of `DistributedDataParallel`, as its communication hook is called with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from hvd_gradcomp.torch.reduce.bucket import as_real

# A parameter, its reduced gradient, its `grad` before the end of backward, and the version of that.
UnusedGradient = tuple[torch.nn.Parameter, torch.Tensor, Optional[torch.Tensor], int]


class DDPBucket(NamedTuple):
    """Bucket that a hook was called with.

    Attributes:
        future: gets the reduced bucket.
        buffer: the gradients, flat; or a sparse one.
        pairs: each parameter with its gradient, a view of the buffer.
    """

    future: Any
    buffer: torch.Tensor
    pairs: list[tuple[torch.nn.Parameter, torch.Tensor]]

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> DDPBucket:
        """Return the bucket of a hook's call."""
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        return cls(future, buffer, _gradients(bucket))

    def maybe_unused(self) -> list[UnusedGradient]:
        """Return each dense gradient with what its parameter has before the end of backward."""
        dense = [(p, gradient) for p, gradient in self.pairs if not gradient.is_sparse]
        return [(p, gradient, p.grad, _version(p.grad)) for p, gradient in dense]

    def release(self) -> None:
        """Release the memory until `allocate`, and every `p.grad` that lies in it."""
        if self.buffer.is_sparse:
            return
        buffer, storage = self.buffer, self.buffer.untyped_storage()
        if storage.nbytes() != buffer.nbytes:
            return
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        for p, _ in self.pairs:
            if p.grad is not None and p.grad.untyped_storage().data_ptr() == storage.data_ptr():
                p.grad = None  # DDP sets it when it has the reduced gradient
        storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory if it was released."""
        if not self.buffer.is_sparse and not self.buffer.untyped_storage().nbytes():
            self.buffer.untyped_storage().resize_(self.buffer.nbytes)

    def fill(self, value: float) -> None:
        """Set all gradients to a value."""
        (self.buffer._values() if self.buffer.is_sparse else self.buffer).fill_(value)


def _gradients(bucket: dist.GradBucket) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return each parameter of a DDP bucket with its gradient, a view of the bucket.

    The bucket has complex gradients as real ones of shape [..., 2]; `gradients()` ignores that.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:  # of one parameter, and `gradients()` has none
        return [(parameters[0], buffer)]
    if not any(p.is_complex() for p in parameters):
        return list(zip(parameters, bucket.gradients()))
    pairs, start = [], buffer.storage_offset()
    for p in parameters:
        real = as_real(p.detach())
        view = buffer.as_strided(real.shape, real.stride(), start)
        pairs.append((p, torch.view_as_complex(view) if p.is_complex() else view))
        start += real.numel()
    return pairs


@torch.no_grad()
def copy_out_unused(gradients: Sequence[UnusedGradient]) -> None:
    """Set the reduced gradients of layers that no rank has used, which DDP does not.

    So residuals of such layers are applied. Without one, such a layer has no gradient, as in DDP.

    Args:
        gradients: those of all buckets.
    """
    for p, reduced, gradient, version in gradients:
        if p.grad is not gradient or _version(p.grad) != version or not reduced.any():
            continue
        if gradient is None:
            p.grad = reduced.clone(memory_format=torch.preserve_format)
        else:
            gradient.copy_(reduced)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
