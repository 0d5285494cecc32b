"""DeMo (Peng, Quesnelle, Rolnick, Lee, Kingma 2024): the fast components of the momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.values import VALUES, Stretch, ValueCoding, ValueGroups
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.core.cost_model import Exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Context, Program, Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor


class Momentum(NamedTuple):
    """State of one bucket."""

    m: Tensor  # float32 [size], what was not sent yet; rank-local


@dataclass(frozen=True)
class Tiles:
    """Layer cut into tiles of `height` x `width`; a vector has tiles of height 1."""

    start: int
    rows: int
    columns: int
    height: int
    width: int

    @property
    def count(self) -> int:
        """Return the number of tiles."""
        return self.rows // self.height * (self.columns // self.width)

    @property
    def size(self) -> int:
        """Return the elements of a tile."""
        return self.height * self.width


@dataclass(frozen=True)
class DeMoCompressor(Clipping, Handover):
    """Sends the largest components of the momentum, transformed tile by tile (Peng et al. 2024).

    Each step: `m = beta * m + g`. Each layer, as a matrix with its outputs as rows, is cut into
    tiles of at most `chunk` x `chunk` (the largest divisors of its sides), a vector into runs of at
    most `chunk`; each tile is transformed by an orthonormal DCT-II along both axes. The k largest
    components of each tile are sent, and subtracted from m. The ranks add up what they receive in
    the order of ranks, divide by how many sent a component, and transform back; the result is its
    sign. The optimizer is SGD without momentum: each element moves by the learning rate.

    What travels: for each tile of 4,096, k places of 8 to 9 bits and k values, by allgather. State:
    m, 4 bytes for each element.

    Default: `DeMoCompressor(k=32)`, as trained in docs/papers.md with SGD without momentum at a
    rate of 0.001. DisTrO's setting was not trained.

    Args:
        chunk: side of a tile, at least 2.
        k: components of a tile to send, at least 1; smaller sends less.
        beta: factor of the momentum, in (0, 1).
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2", "sign".
            Neighbours in a layer, some 4,096 at most, share a scale or a codebook. DisTrO's setting
            is k=4 and "sign".
        signed: whether the result is the sign; otherwise it is the mean itself.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating; positive; smaller clips more. None clips
            nothing.

    Differs from the published code: m holds gradients, not gradients times the learning rate; sums
    have a fixed order; places take 8 bits, not 64. The inverse transform rounds by machine, so
    ranks on different processors may disagree about the sign of a number near 0; `verify_every=`
    notices.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> DeMoCompressor()
    DeMoCompressor(chunk=64, k=32, beta=0.999, values='float32', signed=True, max_norm=None)
    """

    chunk: int = 64
    k: int = 32
    beta: float = 0.999
    values: str = "float32"
    signed: bool = True
    max_norm: float | None = None

    outputs_first = True
    block = 1  # no padding

    def __post_init__(self) -> None:
        validate.whole(self, "chunk", low=2, high=1024)
        validate.whole(self, "k", low=1)
        validate.real(self, "beta", low=0, high=1)
        validate.one_of(self, "values", VALUES)
        validate.boolean(self, "signed")
        self.validate_max_norm()

    # -- sizes -------------------------------------------------------------------------------

    @property
    def coding(self) -> ValueCoding:
        """Code of the values."""
        return VALUES[self.values]

    def tiles(self, layout: Layout) -> list[Tiles]:
        """Return how each layer is cut."""
        shapes = layout.with_outputs_first().shapes
        return [
            Tiles(at, *self.cut(shape)) for at, shape in zip(layout.offsets, shapes) if prod(shape)
        ]

    def cut(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Return (rows, columns, height, width) of a layer and its tiles."""
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        return rows, columns, _divisor(rows, self.chunk), _divisor(columns, self.chunk)

    def places(self, tiles: Tiles) -> EliasFano:
        """Return the code of the places in a layer's tiles."""
        return EliasFano.of(tiles.count, min(self.k, tiles.size), tiles.size)

    def parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts of a payload's body."""
        parts: dict[str, wire.Part] = {}
        for number, tiles in enumerate(self.tiles(layout)):
            places = self.places(tiles)
            parts.update({f"{name}{number}": part for name, part in places.parts().items()})
        groups = self.groups(layout)
        return {**parts, **self.coding.parts(groups.end, groups)}

    def groups(self, layout: Layout) -> ValueGroups:
        """Return the groups of values by layers; places are those in the payload."""
        return _groups_of(self, layout)

    def layer_bytes(self, shape: Sequence[int]) -> float:
        if not prod(shape):
            return 0.0
        places = self.places(Tiles(0, *self.cut(shape)))
        values = self.coding.layer_bytes(places.rows * places.count)
        return float(wire.body_bytes(places.parts())) + values

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        payload = float(wire.packed_bytes(self.parts(layout)))
        return Exchange("allgather", (("allgather", payload),))

    # -- one step ----------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> Momentum:
        return Momentum(ops.zeros((layout.size,)))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Momentum, **extra: Tensor
    ) -> Program:
        layout, tiles = context.layout, self.tiles(context.layout)
        gradient, _ = self.clipped(ops, context, gradient, extra)
        finite, gradient = patterns.check_storable(ops, gradient)
        m = ops.accumulate(gradient, ops.times(state.m, self.beta))
        payload, own_components = self.encode(ops, layout, tiles, m)

        parts = self.parts(layout)
        header = patterns.header_of(self, context, finite)
        buffers = yield Allgather(wire.pack(ops, header, *wire.pack_pieces(ops, parts, payload)))
        expected = patterns.header_of(self, context)
        header, bodies = wire.unpack(ops, expected, buffers, patterns.reduction_spec(context, {}))
        weights = patterns.weights_of(ops, context, header)
        mean = self.back(ops, layout, tiles, self.mean(ops, layout, tiles, bodies, weights))
        if self.signed:
            unit = context.prescale * context.postscale * context.size
            mean = ops.signs(mean, unit)
        mean = patterns.check_sum(ops, mean)
        kept = m - self.back(ops, layout, tiles, own_components)
        return mean, Momentum(ops.overwrite(state.m, kept))

    def encode(
        self, ops: Ops, layout: Layout, tiles: Sequence[Tiles], m: Tensor
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the parts of the body, and for each layer the components as others decode them."""
        payload: dict[str, Tensor] = {}
        chosen, values = [], []
        bases = _Bases(ops)
        for number, each in enumerate(tiles):
            places = self.places(each)
            rows = _forward(ops, bases, each, m)
            index, largest = ops.largest_of_rows(rows, each.size, places.count)
            coded = places.encode(ops, index)
            payload.update({f"{name}{number}": part for name, part in coded.items()})
            chosen.append(index)
            values.append(ops.reshape(largest, (-1,)))
        flat, groups = ops.concat(values), self.groups(layout)
        order = ops.arange(flat.shape[0])
        coded = self.coding.encode(ops, flat, order, groups)
        payload.update(coded)
        decoded = self.coding.decode(ops, coded, order, groups)
        pieces = zip(tiles, chosen, patterns.split_like(decoded, chosen))
        return payload, [_spread(ops, each, index, value) for each, index, value in pieces]

    def mean(
        self, ops: Ops, layout: Layout, tiles: Sequence[Tiles], bodies: Tensor, weights: Tensor
    ) -> list[Tensor]:
        """Return the mean of the components over the ranks that sent them, by layer; flat."""
        payload = wire.unpack_body(ops, self.parts(layout), bodies)
        totals = [ops.zeros((each.count * each.size,)) for each in tiles]
        counts = [ops.zeros((each.count * each.size,)) for each in tiles]
        groups = self.groups(layout)
        order = ops.arange(groups.end)
        for rank in range(bodies.shape[0]):
            rank_payload = {name: part[rank] for name, part in payload.items()}
            chosen = [
                self.places(each).decode(
                    ops, {name: rank_payload[f"{name}{number}"] for name in ("low", "high")}
                )
                for number, each in enumerate(tiles)
            ]
            values = self.coding.decode(ops, rank_payload, order, groups) * weights[rank]
            for number, (each, index, value) in enumerate(
                zip(tiles, chosen, patterns.split_like(values, chosen))
            ):
                places, ones = _places(ops, each, index), ops.cast(value != 0, "float32")
                totals[number] = ops.add_at(totals[number], places, value)
                counts[number] = ops.add_at(counts[number], places, ones)
        world = float(bodies.shape[0])
        # A vector, since PyTorch divides a number by one as a product with its reciprocal.
        return [
            total * ((n * 0.0 + world) / ops.maximum(n, 1.0)) for total, n in zip(totals, counts)
        ]

    def back(
        self, ops: Ops, layout: Layout, tiles: Sequence[Tiles], components: Sequence[Tensor]
    ) -> Tensor:
        """Return a bucket's vector from its layers' components."""
        bases = _Bases(ops)
        pieces = [_backward(ops, bases, each, flat) for each, flat in zip(tiles, components)]
        vector = ops.concat(pieces) if pieces else ops.zeros((0,))
        missing = layout.size - vector.shape[0]
        return ops.concat((vector, ops.zeros((missing,)))) if missing else vector

    # -- reports -----------------------------------------------------------------------------

    def report(self, layout: Layout, state: Momentum, steps: int, since: int = 0) -> Report:
        shapes = layout.with_outputs_first().shapes
        places = [self.places(Tiles(0, *self.cut(s))) if prod(s) else None for s in shapes]
        sent = [0 if each is None else each.rows * each.count for each in places]
        return Report([count * (steps - since) for count in sent], state.m)

    def residual(self, state: Momentum) -> Tensor:
        return state.m


@lru_cache(maxsize=1024)
def _groups_of(compressor: DeMoCompressor, layout: Layout) -> ValueGroups:
    layers, end = [], 0
    for places in map(compressor.places, compressor.tiles(layout)):
        start, end = end, end + places.rows * places.count
        layers.append(Stretch(start, end, end - start))
    return replace(ValueGroups.of(layers), ascending=True)


def _divisor(n: int, limit: int) -> int:
    """Return the largest divisor of n up to `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


@lru_cache(maxsize=64)
def _dct(n: int) -> tuple[float, ...]:
    """Return the orthonormal DCT-II as a matrix [n, n] of Python floats, row by row.

    >>> [round(x, 6) for x in _dct(2)]
    [0.707107, 0.707107, 0.707107, -0.707107]
    """

    def row(k: int) -> Iterator[float]:
        scale = math.sqrt((1 if k == 0 else 2) / n)
        for i in range(n):
            yield scale * math.cos(math.pi * (2 * i + 1) * k / (2 * n))

    return tuple(x for k in range(n) for x in row(k))


class _Bases(dict[int, Tensor]):
    """Matrices of the transform by their size, each looked up once a step."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops

    def __missing__(self, n: int) -> Tensor:
        self[n] = basis = self._ops.reshape(self._ops.constants(_dct(n)), (n, n))
        return basis


def _forward(ops: Ops, bases: _Bases, tiles: Tiles, m: Tensor) -> Tensor:
    """Return the components of a layer's tiles, one tile after another; float32 [elements]."""
    layer = m[tiles.start : tiles.start + tiles.rows * tiles.columns]
    across = ops.transpose(bases[tiles.width], (1, 0))
    shape = tiles.rows, tiles.columns
    return ops.turn_tiles(layer, shape, bases[tiles.height], across, back=False)


def _backward(ops: Ops, bases: _Bases, tiles: Tiles, components: Tensor) -> Tensor:
    """Return a layer, flat, from the components of its tiles."""
    down = ops.transpose(bases[tiles.height], (1, 0))
    shape = tiles.rows, tiles.columns
    return ops.turn_tiles(components, shape, down, bases[tiles.width], back=True)


def _spread(ops: Ops, tiles: Tiles, index: Tensor, values: Tensor) -> Tensor:
    """Return a layer's components, flat: values where they belong, 0 elsewhere."""
    out = ops.zeros((tiles.count * tiles.size,))
    return ops.add_at(out, _places(ops, tiles, index), values)


def _places(ops: Ops, tiles: Tiles, index: Tensor) -> Tensor:
    """Return where in a layer's components, flat, what is chosen of its tiles lies."""
    first = ops.reshape(ops.arange(tiles.count), (-1, 1)) * tiles.size
    return ops.reshape(ops.minimum(index, tiles.size - 1) + first, (-1,))
