"""Cost model of a step: that of Tsuzuku et al. 2018, section 5, with latency, work and overlap.

The paper takes the volume that a rank receives: `2(p-1)/p * N * s * beta` for a ring allreduce of N
parameters of s bits, `(p-1) * n * beta` for an allgather of n bits from each rank. It leaves out
latency, the work of encoding and decoding, and the overlap of communication and backward. Here

- a `Link` has the measured time of each collective at several sizes, which includes latency and
  Horovod's overhead. Other numbers of ranks have the paper's volumes, and more hops;
- a `Bucket` has the measured times of its work before, between and after its collectives;
- `step_seconds` simulates them: on each rank one thread that differentiates, encodes and decodes,
  and meanwhile one link that performs one collective after the other. Horovod's tensor fusion is
  modelled for dense gradients only (`dense_seconds`); buckets are few.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# As in `collectives`; "allreduce16" is in half precision, which CPUs add slowly.
KINDS = ("allreduce", "allreduce16", "allgather", "alltoall", "broadcast")
FUSION_BYTES = 128 << 20  # Horovod's default

Curve = tuple[tuple[float, float], ...]  # (bytes that a rank receives, seconds), ascending


def volume(kind: str, size: float, ranks: int) -> float:
    """Return the bytes over the busiest rank's link, one way, for `size` bytes on each rank.

    Assumes rings, and for a broadcast gloo's tree, in which the root sends all more than once.

    >>> [volume(kind, 8.0, 4) for kind in ("allreduce", "allgather", "alltoall", "broadcast")]
    [12.0, 24.0, 6.0, 16.0]
    """
    others = ranks - 1
    shares = {
        "allreduce": 2 * others / ranks,
        "allreduce16": 2 * others / ranks,
        "allgather": others,
        "alltoall": others / ranks,
        "broadcast": math.ceil(math.log2(ranks)),
    }
    return size * shares[kind]


class Exchange(NamedTuple):
    """Collectives that a bucket travels by in one step.

    Attributes:
        kind: "dense" for an allreduce of 4 bytes for each element of the bucket; otherwise the
            method's word, such as "allgather" or "two_shot".
        collectives: kind and bytes that a rank hands over, in order; for a broadcast the leader's.
    """

    kind: str
    collectives: tuple[tuple[str, float], ...]

    def received(self, ranks: int) -> float:
        """Return the bytes over the busiest rank's link, one way; see `volume`."""
        return sum(volume(kind, size, ranks) for kind, size in self.collectives)


class Course(NamedTuple):
    """Bytes that a rank hands to collectives in a method that learns; the mean over ranks."""

    learning: float  # in total while it learns
    step: float  # for each step afterwards
    dense: float  # for each step without compression

    @classmethod
    def total(cls, courses: Iterable[Course]) -> Course:
        """Return the sum over buckets."""
        return cls(*map(sum, zip(*courses)))


def two_shot_exchange(shard: float, ranks: int) -> Exchange:
    """Return the exchange that reduces at owners and gathers their results, of so many bytes each.

    Args:
        shard: bytes of a message to an owner, and of its result.
        ranks: how many own a part.
    """
    return Exchange("two_shot", (("alltoall", ranks * shard), ("allgather", shard)))


def dense_exchange(elements: int, header: int = 0) -> Exchange:
    """Return the exchange that allreduces all elements as float32.

    Args:
        elements: of the bucket.
        header: bytes of the header that each rank sends all others first.
    """
    headers = (("allgather", float(header)),) if header else ()
    return Exchange("dense", (*headers, ("allreduce", 4.0 * elements)))


def cheapest(exchanges: Sequence[Exchange], ranks: int) -> Exchange:
    """Return the exchange that moves the fewest bytes, of equal ones the first."""
    return min(exchanges, key=lambda exchange: exchange.received(ranks))


def most_gathered(size: float, ranks: int) -> float:
    """Return the bytes per rank whose allgather brings as many as an allreduce of `size`.

    >>> most_gathered(400.0, 2), most_gathered(400.0, 16), most_gathered(400.0, 1)
    (400.0, 50.0, inf)
    """
    brought = volume("allgather", 1.0, ranks)
    return volume("allreduce", size, ranks) / brought if brought else math.inf


def gathers_rows(
    rows: float,
    length: int,
    ranks: int,
    *,
    dense: float,
    payload: float | None = None,
    summed: bool = False,
    value_bytes: int = 4,
    index_bytes: int = 8,
) -> bool:
    """Return True if gathering a sparse gradient's rows moves fewer bytes than the alternative.

    The rows must be fewer bytes to send, and no more to receive. A payload that is no smaller than
    the dense layer counts as an allreduce of that layer.

    Args:
        rows: of a rank, repeated ones included; the maximum over ranks.
        length: values in a row.
        ranks: how many exchange.
        dense: bytes of the layer without compression.
        payload: bytes that its compressor is expected to send of it; None if unknown.
        summed: whether payloads are summed by an allreduce, as those of half precision are.
        value_bytes, index_bytes: size of a value, and of a row's index.

    A table of 10,000 rows of 64 values, with 32 and with 640 rows per rank; the latter with a
    compressed payload; and among 64 ranks:

    >>> gathers_rows(32, 64, 2, dense=2_560_000), gathers_rows(640, 64, 2, dense=2_560_000)
    (True, True)
    >>> gathers_rows(640, 64, 2, dense=2_560_000, payload=100_000)
    False
    >>> gathers_rows(640, 64, 64, dense=2_560_000)
    False
    """
    gathered = rows * (length * value_bytes + index_bytes)
    instead = dense if payload is None else min(payload, dense)
    brought = volume("allreduce", instead if summed else dense, ranks)
    if not summed and instead < dense:
        brought = min(brought, volume("allgather", instead, ranks))
    return gathered < instead and volume("allgather", gathered, ranks) <= brought


def hops(kind: str, ranks: int) -> int:
    """Count the messages in sequence: around a ring, down a tree, or direct in an alltoall."""
    if kind == "alltoall":
        return min(ranks - 1, 1)
    if kind == "broadcast":
        return math.ceil(math.log2(ranks))
    return (2 if kind.startswith("allreduce") else 1) * (ranks - 1)


@dataclass(frozen=True)
class Link:
    """Measured times of collectives over a link.

    Attributes:
        ranks: how many measured it.
        curves: by kind of collective, the measured seconds by volume.
        latency: seconds per additional hop, for other numbers of ranks. The curves include the
            latency of those that measured.
    """

    ranks: int
    curves: Mapping[str, Curve]
    latency: float = 50e-6

    @classmethod
    def of(cls, bits_per_second: float, ranks: int = 2, latency: float = 50e-6) -> Link:
        """Return a link without measurements: its rate, and Horovod's millisecond to start."""
        line = ((0.0, 1e-3), (1e9, 1e-3 + 8e9 / bits_per_second))
        return cls(ranks, dict.fromkeys(KINDS, line), latency)

    def seconds(self, kind: str, size: float, ranks: int | None = None) -> float:
        """Return the duration of a collective, for a tensor of `size` bytes on each rank."""
        ranks = self.ranks if ranks is None else ranks
        if ranks == 1:
            return 0.0
        curve = self.curves[kind]
        further = max(hops(kind, ranks) - hops(kind, self.ranks), 0) * self.latency
        return _read(curve, volume(kind, size, ranks)) + further

    def with_bandwidth(self, bits_per_second: float) -> Link:
        """Return the same link with another bandwidth.

        The time to start a collective stays the same, and so does the extra time that a sum of
        halves takes over a sum of floats. Otherwise the time per byte scales with the bandwidth.
        """
        before, after = 8 / self.bandwidth, 8 / bits_per_second
        curves = {}
        for kind, curve in self.curves.items():
            start, last = _start(curve), max(curve[-1][0], 1.0)
            byte = (curve[-1][1] - start) / last
            byte = (
                max(byte - before, 0.0) + after if kind == "allreduce16" else byte * after / before
            )
            curves[kind] = ((0.0, start), (last, start + last * byte))
        return replace(self, curves=curves)

    @property
    def bandwidth(self) -> float:
        """Return the bits per second that a large allreduce receives."""
        (before, earlier), (last, later) = self.curves["allreduce"][-2:]
        return 8 * (last - before) / max(later - earlier, 1e-12)


def _read(curve: Curve, size: float) -> float:
    """Interpolate between measurements; beyond the last one, extrapolate the last line."""
    place = min(max(bisect_left(curve, (size, 0.0)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[place - 1 : place + 1]
    if size < x0:
        return y0
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _start(curve: Curve) -> float:
    """Return the duration of a collective that moves nothing."""
    (x0, y0), (x1, y1) = curve[0], curve[-1]
    return max(min(y0, y0 - x0 * (y1 - y0) / (x1 - x0)), 0.0)


class Bucket(NamedTuple):
    """Timing of a bucket's step on one rank.

    Attributes:
        ready: seconds of backward after which its last gradient is ready.
        work: seconds before the first collective, between them, and after the last; one more than
            there are collectives.
        asks: (kind, bytes) of its collectives, in order.
        dense: bytes of its elements. Its allgather becomes an allreduce of these among so many
            ranks that the allgather would bring more.
    """

    ready: float
    work: tuple[float, ...]
    asks: tuple[tuple[str, float], ...]
    dense: float = math.inf

    def summed(self, ranks: int) -> bool:
        """Return True if its one allgather becomes an allreduce among this many ranks."""
        kinds = [kind for kind, _ in self.asks]
        return kinds == ["allgather"] and self.asks[0][1] * ranks > 2 * self.dense


def step_seconds(
    ranks: Sequence[Sequence[Bucket]], link: Link, size: int | None = None, backward: float = 0.0
) -> float:
    """Return the time from the start of backward to the slowest rank's last decoded bucket.

    A collective begins when all ranks have requested it and the previous one is done.

    Args:
        ranks: the buckets of each rank, in the same order.
        link: what the collectives go over.
        size: number of ranks; as many as have measured the link if None.
        backward: seconds of the backward pass.

    >>> link = Link(2, {"allgather": ((0.0, 1.0), (10.0, 2.0))})
    >>> step_seconds([[Bucket(0.0, (1.0, 0.5), (("allgather", 10.0),))] * 2], link)
    5.5
    """
    now, free = [0.0] * len(ranks), 0.0
    rows = sorted(zip(*ranks), key=lambda row: row[0].ready)
    since = 0.0
    waiting = []
    for row in rows:
        ready = row[0].ready
        now = [time + ready - since + bucket.work[0] for time, bucket in zip(now, row)]
        since = ready
        if row[0].asks:
            free = max(free, *now) + _travels(row, 0, link, size)
            waiting.append((row, 0, free))
    now = [time + max(backward - since, 0.0) for time in now]
    while waiting:
        further = []
        for row, done, arrival in waiting:
            now = [max(time, arrival) + b.work[done + 1] for time, b in zip(now, row)]
            if done + 1 < len(row[0].asks):
                free = max(free, *now) + _travels(row, done + 1, link, size)
                further.append((row, done + 1, free))
        waiting = further
    return max(now)


def _travels(row: Sequence[Bucket], place: int, link: Link, ranks: int | None) -> float:
    kind, _ = row[0].asks[place]
    return link.seconds(kind, max(bucket.asks[place][1] for bucket in row), ranks)


def dense_seconds(
    layers: Sequence[tuple[float, float]],
    link: Link,
    ranks: int | None = None,
    backward: float = 0.0,
) -> float:
    """Return the same for uncompressed Horovod, which fuses tensors while the link is busy.

    Args:
        layers: (ready, bytes), see `Bucket`.
        link, ranks, backward: as in `step_seconds`.
    """
    rest, free = sorted(layers), 0.0
    while rest:
        begin, size, count = max(free, rest[0][0]), 0.0, 0
        for ready, some in rest:
            if ready > begin or (count and size + some > FUSION_BYTES):
                break
            size, count = size + some, count + 1
        free, rest = begin + link.seconds("allreduce", size, ranks), rest[count:]
    return max(free, backward)


Rounds = Sequence[Sequence[Bucket]]  # buckets, by rounds of one rank's measurement, or by ranks


@dataclass(frozen=True)
class Way:
    """Exchange method with its measured cost on each rank.

    Attributes:
        name: shown to the user.
        costs: by number of ranks, the measurements of each rank.
    """

    name: str
    costs: Mapping[int, Sequence[Rounds]]

    def seconds(self, link: Link, ranks: int, backward: float | None = None) -> float:
        """Return the median over rounds.

        Args:
            link: what the collectives go over.
            ranks: number of ranks. A number that was not measured lies on the line through the two
                largest that were.
            backward: seconds of the backward pass that it overlaps with; None for the exchange
                alone, with all gradients ready.
        """
        rounds = zip(*(self.costs[ranks] if ranks in self.costs else self._among(ranks)))
        if backward is not None:
            return statistics.median(step_seconds(r, link, ranks, backward) for r in rounds)
        return statistics.median(step_seconds(_at_once(r), link, ranks) for r in rounds)

    def _among(self, ranks: int) -> list[Rounds]:
        few, many = sorted(self.costs)[-2:]
        return [
            [[_between(few, a, many, b, ranks) for a, b in zip(*two)] for two in zip(*rounds)]
            for rounds in zip(self.costs[few], self.costs[many])
        ]


@dataclass(frozen=True)
class Dense:
    """Uncompressed allreduces of (ready, bytes), by layer or by bucket; see `dense_seconds`."""

    name: str
    layers: Sequence[tuple[float, float]]

    def seconds(self, link: Link, ranks: int, backward: float | None = None) -> float:
        """Return the duration, as `Way.seconds`."""
        if backward is None:
            return dense_seconds([(0.0, size) for _, size in self.layers], link, ranks)
        return dense_seconds(self.layers, link, ranks, backward)


def _at_once(ranks: Rounds) -> Rounds:
    """Return the buckets with all gradients ready at the start."""
    return [[bucket._replace(ready=0.0) for bucket in buckets] for buckets in ranks]


def _between(few: int, a: Bucket, many: int, b: Bucket, ranks: int) -> Bucket:
    """Interpolate between two buckets; once summed, work does not grow with the number of ranks."""
    if [kind for kind, _ in a.asks] != [kind for kind, _ in b.asks]:
        return b if ranks >= many or a.summed(ranks) else a
    summed = b.summed(ranks)
    reach = 2 * b.dense / b.asks[0][1] if summed else ranks
    share = (reach - few) / (many - few)
    work = tuple(max(x + share * (y - x), 0.0) for x, y in zip(a.work, b.work))
    if summed:
        both = (("allgather", 0.0), ("allreduce", b.dense))
        return Bucket(a.ready, (work[0], 0.0, work[1]), both, b.dense)
    share = (1 / ranks - 1 / few) / (1 / many - 1 / few)  # a shard is 1/ranks of the whole
    sizes = (max(x + share * (y - x), 0.0) for (_, x), (_, y) in zip(a.asks, b.asks))
    asks = tuple((kind, size) for (kind, _), size in zip(a.asks, sizes))
    return Bucket(a.ready, work, asks, b.dense)


def break_even(faster: Callable[[float], float], low: float = 1e5, high: float = 1e13) -> float:
    """Return the bandwidth, in bits per second, at which `faster` changes its sign.

    Args:
        faster: seconds that compression gains at a bandwidth: positive on slow links.
        low, high: search interval.

    Returns:
        `inf` if it gains at `high` as well, 0 if not even at `low`.

    >>> round(break_even(lambda bandwidth: 1e9 / bandwidth - 1))
    1000000000
    """
    if faster(low) <= 0:
        return 0.0
    if faster(high) > 0:
        return math.inf
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
