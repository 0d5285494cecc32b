"""Collectives that a compressor's program may request, as values.

A program yields one of these and is resumed with the reply. It names nothing and waits for
nothing; the frontend names the request, performs it, and decides when to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

Tensor = Any


class Allgather(NamedTuple):
    """Gather of every rank's tensor, of equal shapes. Reply: `[world, *shape]`."""

    tensor: Tensor


class Allreduce(NamedTuple):
    """Scaled sum, `postscale * sum over ranks of prescale * tensor`. Reply: the tensor's shape.

    The reply may reuse the memory of a donated tensor.
    """

    tensor: Tensor
    prescale: float = 1.0
    postscale: float = 1.0
    donated: bool = False


# Over gloo the payloads of two ranks travel one after the other: a rank's ready-to-receive message
# queues behind its payload to the same peer. An allreduce alternates in small pieces. So a large
# allgather takes half the time as a sum, from which each rank subtracts its own part.
SUMMED_BYTES = 1 << 16


def goes_as_sum(size: int, dtype: str, ranks: int, gloo: bool) -> bool:
    """Return True if an allgather of a tensor of `size` items is done as a sum of 32-bit words."""
    whole = dtype == "uint8" and size % 4 == 0
    return gloo and ranks == 2 and whole and size >= SUMMED_BYTES


class Alltoall(NamedTuple):
    """Exchange of rows: row i goes to rank i. [world, m]; reply: [world, m], row i from rank i."""

    tensor: Tensor


class Broadcast(NamedTuple):
    """Broadcast of the root's tensor. Reply: the tensor's shape."""

    tensor: Tensor
    root: int


class Gather(NamedTuple):
    """Gather of every rank's vector to the root, concatenated in rank order; empty elsewhere.

    `lengths` has the number of items of each rank's vector; it is equal on all ranks.
    """

    tensor: Tensor
    root: int
    lengths: tuple[int, ...]


class Switch(NamedTuple):
    """Choice of one program by an index that all ranks share (a phase, by the step).

    Each branch is called without arguments and makes a program that returns a tuple of tensors,
    of the same dtypes and shapes in every branch. Reply: that tuple.
    """

    index: Any
    branches: Sequence[Callable[[], Any]]


class Inside(NamedTuple):
    """Collective among the ranks of this host, numbered within the host; see `hierarchy`.

    `what` is the payload's name on the timeline.
    """

    request: Any
    what: str


Collective = Union[Allgather, Allreduce, Alltoall, Broadcast, Gather, Inside, Switch]
