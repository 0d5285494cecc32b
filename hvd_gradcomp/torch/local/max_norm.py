"""Embedding tables with `max_norm`: forward shortens the rows that it looks up, in place.

So the rows differ between ranks without a step, by what each has looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.torch.interop.owners import owners_of
from hvd_gradcomp.torch.interop.shards import is_sharded

Table = Any  # an nn.Embedding or nn.EmbeddingBag
_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def tables_of(parameters: Sequence[torch.nn.Parameter]) -> dict[int, Table]:
    """Return the embeddings with `max_norm` among the owners of parameters, by place."""
    places = {
        id(p): place
        for place, p in enumerate(parameters)
        if p.dim() == 2 and not is_sharded(p)  # of a shard, forward shortens a copy
    }
    owners = owners_of([parameters[place] for place in places.values()])
    return {
        places[id(p)]: module
        for module, p in owners
        if isinstance(module, _TABLES) and module.max_norm is not None
    }


def shortened(table: Table, rows: torch.Tensor) -> torch.Tensor:
    """Return all rows of a table as its forward leaves those that it looks up."""
    return rows.renorm(table.norm_type, 0, table.max_norm)


def was_shortened(table: Table, rows: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return True for each row that a forward has shortened.

    Args:
        table: the module.
        rows: before, `[rows, width]`.
        now: the same rows.
    """
    off = 8 * torch.finfo(rows.dtype).eps  # relative, what the kernels of devices round
    long = torch.linalg.vector_norm(rows, table.norm_type, 1) > (1 - off) * table.max_norm
    return long & torch.isclose(now, shortened(table, rows), rtol=off, atol=0).all(1)
