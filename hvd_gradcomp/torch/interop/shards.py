"""This rank's parts of sharded tensors, the `DTensor`s of `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch


def is_sharded(x: torch.Tensor) -> bool:
    """Return True for a `DTensor`."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, with the same memory and no gradient.

    That is all of a tensor that is not sharded.
    """
    sharded: Any = x
    local: torch.Tensor = sharded.to_local() if is_sharded(x) else x
    return local.detach()


def sharded_like(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as another one, from this rank's part of it.

    Args:
        x: has the mesh, the placements and the whole shape; if not sharded, `part` is returned.
        part: of the shape of `local_part(x)`.
    """
    if not is_sharded(x):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = x
    whole = x.shape, x.stride()
    mesh, placements = sharded.device_mesh, sharded.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole[0], stride=whole[1]
    )
