"""Chunked top-k with quantized values, as SparseLoCo sends it (Sarfi et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.quantized import EXCHANGES
from hvd_gradcomp.codecs.sparse import Residual
from hvd_gradcomp.codecs.values import VALUES, Stretch, ValueCoding, ValueGroups
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allgather, Alltoall
from hvd_gradcomp.core.cost_model import Exchange, cheapest, dense_exchange, two_shot_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Context, Program, Report
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.ops import Ops, Tensor

MEANS = ("ranks", "contributors")


@dataclass(frozen=True)
class Body:
    """Body of the payloads of some chunks.

    Args:
        chunk: elements of a chunk.
        places: code of the places in each chunk.
        coding: code of the values.
        groups: of the values of each payload that has this body, by places in its chunks; payloads
            have the room for those with the most side values.
    """

    chunk: int
    places: EliasFano
    coding: ValueCoding
    groups: tuple[ValueGroups, ...]

    @cached_property
    def parts(self) -> dict[str, wire.Part]:
        """Return the parts."""
        values = self.coding.parts(self.places.rows * self.places.count, *self.groups)
        return {**self.places.parts(), **values}

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of a payload."""
        return wire.packed_bytes(self.parts)

    def encode(
        self, ops: Ops, groups: ValueGroups, index: Tensor, values: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return the body in pieces, and the values as all ranks decode them; [chunks, k]."""
        places = self._in_chunks(ops, index)
        coded = self.coding.encode(ops, ops.reshape(values, (-1,)), places, groups)
        sent = self.coding.decode(ops, coded, places, groups)
        if "sides" in coded:
            missing = self.parts["sides"].count - coded["sides"].shape[0]
            coded["sides"] = ops.concat((coded["sides"], ops.zeros((missing,))))
        payload = {**self.places.encode(ops, index), **coded}
        return wire.pack_pieces(ops, self.parts, payload), ops.reshape(sent, values.shape)

    def decode(
        self, ops: Ops, groups: Sequence[ValueGroups], bodies: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each rank's places and values, by chunk; groups are those of each rank."""
        payload, decoded = wire.unpack_body(ops, self.parts, bodies), []
        for rank, of_rank in enumerate(groups):
            parts = {name: part[rank] for name, part in payload.items()}
            index = self.places.decode(ops, parts)
            values = self.coding.decode(ops, parts, self._in_chunks(ops, index), of_rank)
            decoded.append((index, ops.reshape(values, index.shape)))
        return decoded

    def _in_chunks(self, ops: Ops, index: Tensor) -> Tensor:
        """Return places in all chunks, given those in each; int64 [chunks * k]."""
        first = ops.reshape(ops.arange(self.places.rows) * self.chunk, (-1, 1))
        return ops.reshape(index + first, (-1,))


@dataclass(frozen=True)
class ChunkedTopKCompressor(Clipping, Handover):
    """Sends the k largest elements of each chunk, in a few bits (Sarfi et al. 2025).

    Each step: `r = decay * r + g`. A bucket is cut into chunks of `chunk` neighbours, across the
    borders of layers. Of each chunk the k largest `|r|` are sent, of equal ones the first; their
    values as `values` says, their places by Elias-Fano. What was decoded is subtracted from r.
    No search runs over a layer, and a payload has one size.

    Exchange: by "allgather" each rank receives the payloads of all others. In two shots, as Ok-Topk
    does it (Li and Hoefler 2022), each rank owns a share of the chunks: it sums what all send of
    them, and sends on the k largest of each chunk of the sum. What is left out stays in its r. A
    rank then receives less than two payloads, with any number of ranks, and each element of the
    result comes from k a chunk, not from k of each rank.

    What travels: with the defaults 8 bits for a place and 2 for a value, 203 times fewer bytes than
    float32 in large layers; and a codebook of 16 bytes for each layer. If a rank would receive more
    bytes than with dense gradients (from some 400 ranks on), 4 bytes for each element of the
    bucket, by allreduce; not with mean="contributors". State: `r`, 4 bytes for each element.

    Default: `ChunkedTopKCompressor(k=64, values="int2", decay=0.95)`, SparseLoCo's, as trained in
    docs/papers.md. With local steps `k=512, values="int4", decay=1` reached a loss sooner than all
    else (docs/worth.md).

    Args:
        chunk: elements of a chunk, at least 32; a power of two.
        k: elements of a chunk to send, at least 1; smaller sends less.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2", "sign". int4
            and int2 are bins with a codebook. Neighbours in a layer, some 4,096 at most, share a
            codebook or a scale.
        decay: factor of what was kept, in (0, 1]. Below 1 the method forgets: then
            `kept + sent = decay * before + gradient`, and gradients are not sent in full.
        mean: "ranks", the mean over all ranks; or "contributors", the mean over those that sent
            the element.
        exchange: "allgather", "two_shot", or "auto": the one that moves fewer bytes, from 3 ranks
            on in two shots; the mean over contributors goes by allgather.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating; positive; smaller clips more. None clips
            nothing.

    Differs from the published code: a place takes 8 bits, not 12 or 64, and a value its 2 bits, not
    a byte; chunks run through the whole bucket, so at the border of two layers their elements
    compete; a large layer has several codebooks. From Ok-Topk: chunks, of which each sends as many,
    take the place of its thresholds and of the balancing that these need.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> print(ChunkedTopKCompressor(k=16))
    ChunkedTopKCompressor(k=16)
    """

    chunk: int = 4096
    k: int = 64
    values: str = "int2"
    decay: float = 0.95
    mean: str = "ranks"
    exchange: str = "allgather"
    max_norm: float | None = None

    block = 1  # no padding: zeros are decoded as the mean of their bin, wherever they are
    keeps_gradient = True

    def __post_init__(self) -> None:
        validate.whole(self, "chunk", low=32, high=1 << 20)
        if self.chunk & (self.chunk - 1):
            raise ValueError(
                f"ChunkedTopKCompressor: chunk must be a power of two, got {self.chunk}"
            )
        validate.whole(self, "k", low=1, high=self.chunk)
        validate.one_of(self, "values", VALUES)
        validate.real(self, "decay", low=0, high=1, closed="]")
        validate.one_of(self, "mean", MEANS)
        validate.one_of(self, "exchange", EXCHANGES)
        if self.exchange == "two_shot" and self.mean == "contributors":
            raise ValueError(
                "ChunkedTopKCompressor: exchange='two_shot' has no mean='contributors': its owner "
                "alone knows who sent an element"
            )
        self.validate_max_norm()

    # -- sizes -------------------------------------------------------------------------------

    @property
    def coding(self) -> ValueCoding:
        """Code of the values."""
        return VALUES[self.values]

    def places(self, size: int) -> EliasFano:
        """Return the code of the places of `size` elements."""
        return EliasFano.of(-(-size // self.chunk), self.k, self.chunk)

    def body(self, layout: Layout) -> Body:
        """Return the body of a bucket's payload."""
        return _body_of(self, layout)

    def shard_body(self, layout: Layout, ranks: int) -> Body:
        """Return the body of an owner's payload, with the groups of each owner."""
        return _shard_body_of(self, layout, ranks)

    def payload_bytes(self, layout: Layout) -> int:
        """Return the bytes of a bucket's payload."""
        return self.body(layout).packed_bytes

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange:
        """Return the exchange; dense is an allreduce of the decoded payloads.

        The mean over contributors needs to know who sent what, so it goes by allgather.
        """
        two_shot = two_shot_exchange(float(self.shard_bytes(layout, ranks)), ranks)
        if self.exchange == "two_shot":
            return two_shot
        gathered = Exchange("allgather", (("allgather", float(self.payload_bytes(layout))),))
        if self.mean == "contributors":
            return gathered
        compressed = [gathered, two_shot] if self.exchange == "auto" else [gathered]
        return cheapest([*compressed, dense_exchange(layout.elements)], ranks)

    def owned(self, size: int, ranks: int) -> list[tuple[int, int]]:
        """Return which chunks each rank owns in two shots, as (first, end)."""
        rows = self.places(size).rows
        return [(rank * rows // ranks, (rank + 1) * rows // ranks) for rank in range(ranks)]

    def shard_bytes(self, layout: Layout, ranks: int) -> int:
        """Return the bytes of an owner's payload."""
        return self.shard_body(layout, ranks).packed_bytes

    def layer_bytes(self, shape: Sequence[int]) -> float:
        places = EliasFano.of(1 << 20, self.k, self.chunk)
        per_chunk, chunks = wire.body_bytes(places.parts()) / places.rows, prod(shape) / self.chunk
        return chunks * per_chunk + self.coding.layer_bytes(chunks * self.k)

    # -- one step ----------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> Residual:
        return Residual(ops.zeros((layout.size,)))

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Residual, **extra: Tensor
    ) -> Program:
        layout, size = context.layout, context.layout.size
        gradient, _ = self.clipped(ops, context, gradient, extra)
        # In the gradient's memory: if the exchange fails, the state is as before.
        inputs = state.r, self.decay, gradient, self.chunk, self.k
        finite, accumulated, index, values = ops.accumulate_largest_checked(*inputs)
        exchange = self.exchange_of(layout, context.size)
        if exchange.kind == "two_shot":
            selected = finite, accumulated, index, values
            return (yield from self.two_shot(ops, context, state, selected))
        body = self.body(layout)
        pieces, sent = body.encode(ops, body.groups[0], index, values)
        if exchange.kind == "dense":
            weight = patterns.poison(ops, finite) + 1.0
            out = ops.zeros((size,))
            total = ops.add_in_rows(None, out, self.chunk, [index], [sent], weight)
            total = yield from patterns.allreduce_bucket(ops, context, total)
            total = patterns.check_sum(ops, total)
            return total, self.commit(ops, state.r, accumulated, index, sent)
        groups = body.groups * context.size
        gathered, weights = yield from self.allgather(ops, context, body, groups, pieces, finite)
        kept, out = (accumulated, state.r) if context.owns_gradient else (state.r, accumulated)
        state = self.commit(ops, kept, accumulated, index, sent)
        return self.sum(ops, gathered, weights, out), state

    def allgather(
        self,
        ops: Ops,
        context: Context,
        body: Body,
        groups: Sequence[ValueGroups],
        pieces: Sequence[Tensor],
        finite: Any,
    ) -> Program:
        """Allgather bodies; return what is decoded of each rank, and their weights.

        Args:
            ops: the tensor operations.
            context: of the step.
            body: of all ranks.
            groups: of the values of each rank.
            pieces: of this rank's body.
            finite: whether this rank's gradient is.
        """
        header = patterns.header_of(self, context, finite)
        buffers = yield Allgather(wire.pack(ops, header, *pieces))
        expected, spec = patterns.header_of(self, context), patterns.reduction_spec(context, {})
        header, bodies = wire.unpack(ops, expected, buffers, spec)
        gathered = body.decode(ops, groups, bodies)
        header = self.check_summable(ops, context, header, [values for _, values in gathered])
        return gathered, patterns.weights_of(ops, context, header)

    def two_shot(
        self,
        ops: Ops,
        context: Context,
        state: Residual,
        selected: tuple[Any, Tensor, Tensor, Tensor],
    ) -> Program:
        """Sum the chunks of each owner, and choose of the sums.

        Args:
            ops: the tensor operations.
            context: of the step.
            state: before it.
            selected: of this rank, by `accumulate_largest_checked`.
        """
        finite, accumulated, index, largest = selected
        size, chunk = context.layout.size, self.chunk
        owned = self.owned(size, context.size)
        cuts = [(first * chunk, min(end * chunk, size)) for first, end in owned]
        body = self.shard_body(context.layout, context.size)
        plain = context._replace(prescale=1.0, postscale=1.0)
        expected, spec = patterns.header_of(self, context), patterns.reduction_spec(plain, {})

        chosen: Sequence[Tensor] = (index, largest)
        coded = [
            self.encode_shard(ops, body, groups, chosen, a, b)
            for groups, (a, b) in zip(body.groups, owned)
        ]
        decoded = [values[: b - a] for (_, values), (a, b) in zip(coded, owned)]
        sent = self.rows_of(ops, decoded)
        header = patterns.header_of(self, context, finite)
        buffers = yield Alltoall(wire.pack_all(ops, header, [pieces for pieces, _ in coded]))
        header, received = wire.unpack(ops, expected, buffers, spec)
        rows = owned[context.rank][1] - owned[context.rank][0]
        share = body.groups[context.rank]
        theirs = body.decode(ops, [share] * context.size, received)
        weights = patterns.weights_of(ops, plain, header)
        start, end = cuts[context.rank]
        if rows:
            places = [index[:rows] for index, _ in theirs]
            summands = [values[:rows] for _, values in theirs]
            out = ops.zeros((end - start,))
            total = ops.add_in_rows(None, out, chunk, places, summands, weights)
            inputs = ops.zeros((end - start,)), 1.0, total, chunk, self.k
            finite, total, *chosen = ops.accumulate_largest_checked(*inputs)
        # Who owns nothing sends any chunk of its own, which nobody uses.
        pieces, sent_sums = self.encode_shard(ops, body, share, chosen, 0, rows)
        sums, weights = yield from self.allgather(ops, context, body, body.groups, pieces, finite)
        kept, out = (accumulated, state.r) if context.owns_gradient else (state.r, accumulated)
        state = self.commit(ops, kept, accumulated, index, sent)
        if rows:
            left = self.commit(ops, total, total, chosen[0], sent_sums[:rows]).r
            state = Residual(ops.add_slice(state.r, start, left))
        pieces = [
            ops.add_in_rows(
                None,
                out[a:b],
                chunk,
                [places[: end - first]],
                [values[: end - first]],
                weights[rank : rank + 1],
            )
            for rank, ((a, b), (first, end), (places, values)) in enumerate(zip(cuts, owned, sums))
            if first < end
        ]
        return ops.assemble(out, pieces), state

    def encode_shard(
        self,
        ops: Ops,
        body: Body,
        groups: ValueGroups,
        chosen: Sequence[Tensor],
        first: int,
        end: int,
    ) -> tuple[list[Tensor], Tensor]:
        """Return `Body.encode` of some chunks, and of another behind them if a shard has more."""
        index, values = (x[first:end] for x in chosen)
        if end - first < body.places.rows:  # by one; what is decoded there is left out
            index, values = (self.rows_of(ops, [x[first:end], x[:1]]) for x in chosen)
        return body.encode(ops, groups, index, values)

    def rows_of(self, ops: Ops, pieces: Sequence[Tensor]) -> Tensor:
        """Return the pieces' rows as one tensor; [rows, k]."""
        flat = ops.concat([ops.reshape(piece, (-1,)) for piece in pieces])
        return ops.reshape(flat, (-1, self.k))

    def commit(
        self, ops: Ops, kept: Tensor, accumulated: Tensor, index: Tensor, sent: Tensor
    ) -> Residual:
        """Return the residual: the accumulated gradient minus the sent values.

        `kept` is donated, and may be the accumulated gradient.
        """
        less = ops.constants((-1.0,))
        return Residual(ops.add_in_rows(accumulated, kept, self.chunk, [index], [sent], less))

    def check_summable(
        self, ops: Ops, context: Context, header: wire.Header, values: Sequence[Tensor]
    ) -> wire.Header:
        """Require a finite sum, or mean; see `patterns.check_summable`."""
        peaks = ops.concat([ops.peaks(ops.reshape(x, (1, -1))) for x in values])
        if self.mean == "contributors":  # of which there may be one
            context = context._replace(postscale=context.postscale * context.size)
        return patterns.check_summable(ops, [ops.reshape(peaks, (-1, 1))], context, header)

    def sum(
        self, ops: Ops, decoded: Sequence[tuple[Tensor, Tensor]], weights: Tensor, out: Tensor
    ) -> Tensor:
        """Return the weighted sum, or mean, of what `decode` returned, in `out`; donated."""
        index, values = zip(*decoded)
        total = ops.add_in_rows(None, out, self.chunk, index, values, weights)
        if self.mean == "ranks":
            return total
        sent = [ops.cast(x != 0, "float32") for x in values]
        ones, out = ops.full(weights.shape, 1.0, "float32"), ops.zeros(total.shape)
        counts = ops.add_in_rows(None, out, self.chunk, index, sent, ones)
        # A vector, since PyTorch divides a number by one as a product with its reciprocal.
        world = counts * 0.0 + float(len(decoded))
        return total * (world / ops.maximum(counts, 1.0))

    # -- reports -----------------------------------------------------------------------------

    def report(self, layout: Layout, state: Residual, steps: int, since: int = 0) -> Report:
        share = min(1.0, self.places(layout.size).rows * self.k / layout.size)
        return Report([round(size * share) * (steps - since) for size in layout.sizes], state.r)

    def residual(self, state: Residual) -> Tensor:
        return state.r

    def inherit(
        self, ops: Ops, state: Residual, gradient: Tensor, residual: Tensor
    ) -> tuple[Residual, Tensor]:
        del ops
        return Residual(state.r + residual), gradient


@lru_cache(maxsize=1024)
def _body_of(compressor: ChunkedTopKCompressor, layout: Layout) -> Body:
    chunk, k, layers = compressor.chunk, compressor.k, []
    for start, size in zip(layout.offsets, layout.sizes):
        chunks = -(-(start + size) // chunk) - start // chunk
        layers.append(Stretch(start, start + size, min(size, chunks * k)))
    groups = ValueGroups.of(layers, [size * k / chunk for size in layout.sizes])
    groups = replace(groups, ascending=True)
    return Body(chunk, compressor.places(layout.size), compressor.coding, (groups,))


@lru_cache(maxsize=1024)
def _shard_body_of(compressor: ChunkedTopKCompressor, layout: Layout, ranks: int) -> Body:
    (whole,), chunk = compressor.body(layout).groups, compressor.chunk
    owned = compressor.owned(layout.size, ranks)
    groups = [whole.between(first * chunk, end * chunk) for first, end in owned]
    size = max(end - first for first, end in owned) * chunk
    return Body(chunk, compressor.places(size), compressor.coding, tuple(groups))
