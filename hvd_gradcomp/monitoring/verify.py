"""Verification that replicas are bit-identical.

Each rank hashes the parameters and the replicated tensors of the compressors' states. The hashes
are allgathered, 8 bytes for each tensor, so all ranks see all of them and raise the same error.
Bits are compared, not numbers: -0.0 is not 0.0, and a NaN is equal to itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, State, is_replicated, leaves
from hvd_gradcomp.ops import Ops, Tensor

_TILE = 1 << 18  # words for each block, so that the products fit in the cache
_ODD = 0x5851F42D4C957F2D
_SHOWN = 3


class DivergedError(RuntimeError):
    """Replicas differ between ranks."""


def weights(ops: Ops) -> Tensor:
    """Return the weights of `digest`; the same for all tensors, so reuse them."""
    return ops.mix(ops.arange(_TILE)) * 2 + 1


def digest(ops: Ops, data: Tensor, weights: Tensor) -> Tensor:
    """Hash a uint8 vector of known length to 64 bits; an int64 scalar on the vector's device.

    The sum of its 32-bit words, each times an odd random weight, modulo 2**64. A change of one word
    always shows, since an odd factor is invertible; several changes cancel once in 2**64.
    """
    size = data.shape[0]
    if size % 4:
        data = ops.concat((data, ops.zeros((4 - size % 4,), "uint8")))
    total = ops.sum(ops.zeros((0,), "int64"))
    for start in range(0, size, 4 * _TILE):
        words = ops.from_bytes(data[start : start + 4 * _TILE], "uint32")
        total = total * _ODD + ops.sum(words * weights[: words.shape[0]])
    return total


def replicated(
    bucket: int, compressor: Compressor, layout: Layout, state: State
) -> list[tuple[str, Tensor]]:
    """Return the replicated tensors of a bucket's state, with names that a user recognizes."""
    names = [*layout.names[:_SHOWN], *(["..."] if len(layout.names) > _SHOWN else [])]
    of = f"of bucket {bucket} ({', '.join(names)})"
    return [
        (f"state {path} {of}", x) for path, x in leaves(state) if is_replicated(compressor, path)
    ]


def compare(
    names: Sequence[str], digests: Sequence[Sequence[int | None]], ranks: Sequence[int], steps: int
) -> None:
    """Raise unless each tensor has the same digest on all ranks.

    Args:
        names: of the tensors.
        digests: of each rank, one for each tensor; None for a tensor that the rank lacks.
        ranks: the ranks' numbers.
        steps: exchanges so far.

    Raises:
        DivergedError: naming the first tensor that differs, and the ranks that differ from the
            majority, or from the first rank if there is no majority.
    """
    columns = [set(column) - {None} for column in zip(*digests)]
    differing = [place for place, different in enumerate(columns) if len(different) > 1]
    if not differing:
        return
    holders: dict[int, list[int]] = {}
    for rank, row in zip(ranks, digests):
        digest = row[differing[0]]
        if digest is not None:
            holders.setdefault(digest, []).append(rank)
    majority = max(holders.values(), key=len)
    others = sorted(rank for some in holders.values() if some is not majority for rank in some)
    raise DivergedError(
        f"the ranks have diverged: after {steps} steps {names[differing[0]]} on {_listed(others)} "
        f"is not what it is on {_listed(majority)}; {len(differing)} of {len(names)} tensors "
        "differ. Broadcast parameters and optimizer state before the first step, change them on "
        "all ranks alike, and use the same processor and libraries on all hosts"
    )


def sums_differ(sums: Mapping[int, int]) -> str:
    """Describe the error if ranks received different sums; `sums` has each rank's digest."""
    values = list(sums.values())
    common = max(values, key=values.count)
    others = [rank for rank, value in sums.items() if value != common]
    return (
        f"what was added up in the exchange before is not the same on {_listed(others)} as on the "
        "other ranks, so replicas have diverged: a reply was damaged on its way. Load the last "
        "checkpoint on all ranks; if it happens again, suspect memory or the network of that host"
    )


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
