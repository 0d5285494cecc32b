"""What an algorithm may ask of the other ranks: requests as values.

An algorithm yields one of these and is resumed with the reply. It names nothing and waits for
nothing; the frontend names the request, performs it, and decides when to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

Tensor = Any


class Allgather(NamedTuple):
    """Everybody's tensor. Shapes are equal on all ranks. Reply: `[world, *shape]`."""

    tensor: Tensor


class Allreduce(NamedTuple):
    """`postscale * sum over ranks of prescale * tensor`. Reply: the tensor's shape.

    A tensor that is donated may be what holds the reply.
    """

    tensor: Tensor
    prescale: float = 1.0
    postscale: float = 1.0
    donated: bool = False


# Over gloo the payloads of two ranks travel one after the other: the word that a rank is ready to
# receive goes to the same peer as its payload, and behind it. An allreduce takes turns in small
# pieces. So a large allgather takes half the time as a sum, of which each rank takes away its own.
SUMMED_BYTES = 1 << 16


def goes_as_sum(size: int, dtype: str, ranks: int, gloo: bool) -> bool:
    """Whether an allgather of a tensor of so many items is done by adding up 32-bit words."""
    whole = dtype == "uint8" and size % 4 == 0
    return gloo and ranks == 2 and whole and size >= SUMMED_BYTES


class Alltoall(NamedTuple):
    """Row i of the tensor goes to rank i. [world, m]; reply: [world, m], row i from rank i."""

    tensor: Tensor


class Broadcast(NamedTuple):
    """The root's tensor. Reply: the tensor's shape."""

    tensor: Tensor
    root: int


class Gather(NamedTuple):
    """Everybody's vector for the root: one after another, in rank order; empty elsewhere.

    `lengths` says how many items each rank's vector has, on all ranks alike.
    """

    tensor: Tensor
    root: int
    lengths: tuple[int, ...]


class Switch(NamedTuple):
    """One of several programs, chosen by an index that all ranks share (a phase, by the step).

    Each branch is called without arguments and makes a program that returns a tuple of tensors,
    of the same dtypes and shapes in every branch. Reply: that tuple.
    """

    index: Any
    branches: Sequence[Callable[[], Any]]


class Inside(NamedTuple):
    """A collective among the ranks of this host, whose ranks are counted there; see `hierarchy`.

    `what` travels, by its name on the timeline.
    """

    request: Any
    what: str


Collective = Union[Allgather, Allreduce, Alltoall, Broadcast, Gather, Inside, Switch]
