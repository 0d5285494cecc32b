"""Sharding of a model whose shards are exchanged, for an optimizer that exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """Sharding of a model, as one rank sees it.

    Attributes:
        function: that the user has called, such as "fsdp.local_steps".
        everybody: compares all ranks that have the model.
        is_first: this rank is the first of them.
        ranks: those with the same shard between which nothing else exchanges.
        place: of this rank's shard among those of the model, equal on its replicas.
        units: title of the unit of each parameter, by the parameter's name.
        refusal: returns the error of what has happened to the model since; None if nothing has.
        reshard: lets the next forward read shards that were set.
    """

    function: str
    everybody: C10dBackend
    is_first: bool
    ranks: ProcessGroup
    place: str
    units: Mapping[str, str]
    refusal: Callable[[], Exception | None]
    reshard: Callable[[], None]
