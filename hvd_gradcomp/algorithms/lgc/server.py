"""Parameter-server pattern of LGC: Algorithm 1."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.algorithms.lgc.state import SAMPLED, LGCState
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.codecs.topk import BodySpec, count_of
from hvd_gradcomp.core.collectives import Allgather, Broadcast, Gather
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Compressor, Context, Program
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel

_FINE, _NOT_FINITE, _DAMAGED = 0, 1, 2
_OTHERS = "other "  # name prefix of parts with indices other than the common rank's


@dataclass(frozen=True)
class Server:
    """Sends one rank's code and all ranks' innovations to a master, which reconstructs the mean."""

    compressor: Compressor  # whose headers the payloads have
    selection: vectors.Selection
    units: vectors.Units
    trainer: training.Trainer
    master: int  # the rank that trains and reconstructs
    common_rank: int | None  # the rank that sends the code
    innovation: float
    lambda_rec: float
    lambda_sim: float

    def heads(self, ranks: int) -> int:
        """Return the number of decoders on a rank."""
        return ranks

    def common(self, ranks: int) -> int:
        """Return the rank that sends the code."""
        return (self.master + 1) % ranks if self.common_rank is None else self.common_rank

    # -- payloads ----------------------------------------------------------------------------

    def innovations(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of elements of a worker's innovation in each layer."""
        limits = self.selection.topk.limits(layout)
        return tuple(count_of(count, self.innovation) for count in limits)

    def outside(self, layout: Layout, ranks: int) -> int:
        """Return the maximum number of elements in the reply besides the common rank's."""
        return min(ranks * sum(self.innovations(layout)), layout.size - 1)

    def code_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts that the common rank sends to the master besides its innovation."""
        topk = self.selection.topk
        capacity = topk.capacity(layout)
        indices, units = topk.coding.parts(layout, capacity), self.units.parts(layout, capacity)
        return {**indices, **units, "code": wire.Part("float32", autoencoder.code_length(capacity))}

    def innovation_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts that every worker sends to the master."""
        count = sum(self.innovations(layout))
        return {
            **self.selection.topk.coding.parts(layout, count),
            "values": wire.Part("float32", count),
            "sampled": wire.Part("float32", SAMPLED),
        }

    def back_parts(self, layout: Layout, ranks: int) -> dict[str, wire.Part]:
        """Return the parts of the master's broadcast: common and other indices, and values."""
        topk = self.selection.topk
        capacity, outside = topk.capacity(layout), self.outside(layout, ranks)
        others = topk.coding.parts(layout, outside)
        return {
            **topk.coding.parts(layout, capacity),
            **{_OTHERS + name: part for name, part in others.items()},
            "values": wire.Part("float16", capacity + outside),
            "peak": wire.Part("float32", 1),
            "loss": wire.Part("float32", 1),
            "verdict": wire.Part("uint32", ranks),
        }

    def compressed_bytes(self, layout: Layout, ranks: int) -> dict[str, int]:
        """Return the bytes of a compressed step; see `LGCCompressor.compressed_bytes`."""
        return {
            "worker": wire.packed_bytes(self.innovation_parts(layout)),
            "common": wire.packed_bytes(self.code_parts(layout)),
            "master": wire.packed_bytes(self.back_parts(layout, ranks)),
        }

    # -- one step ----------------------------------------------------------------------------

    def step(
        self,
        ops: Ops,
        context: Context,
        gradient: Tensor,
        state: LGCState,
        elapsed: Any,
        train: bool = False,
        last: bool = False,
        compress: bool = False,
    ) -> Program:
        """Run one step of a rank, after the first phase."""
        layout, selection, topk = context.layout, self.selection, self.selection.topk
        finite, gradient = patterns.check_storable(ops, gradient)
        selected = selection.accumulate_and_select(ops, context, finite, gradient, state)
        state = state._replace(memory=selected.memory, hint=selected.hint)
        if compress:
            index = selected.index
            return (yield from self.compressed_step(ops, context, finite, index, gradient, state))
        index = selected.index
        parts = topk.coding.encode(ops, layout, index)
        parts["values"] = selection.values_to_send(ops, state, index)
        body = wire.pack_body(ops, topk.parts(layout), parts)
        buffers = yield Allgather(vectors.pack(self.compressor, ops, context, finite, body))
        header, bodies = vectors.unpack(self.compressor, ops, context, buffers)
        body_spec = BodySpec(topk, layout, topk.capacity(layout))
        bodies, ascending = body_spec.decoded(ops, bodies)
        header = patterns.check_ascending(ops, ascending, header)
        weights = patterns.weights_of(ops, context, header)
        level = CapacityLevel(0, topk.capacity(layout), False)
        mean = topk.decode_sum(ops, layout, Payloads(level, bodies, weights), gradient)
        mean = patterns.check_sum(ops, mean)
        state = vectors.count_sent(ops, layout, state, index)
        state = selection.commit(ops, state, index)
        if train and context.rank == self.master:
            loss = self.loss(ops, context, bodies)
            state = self.trainer.step(ops, state, elapsed, loss)
        if train and last:
            state = yield from self.distribute(ops, context, state)
        return mean, state

    def compressed_step(
        self,
        ops: Ops,
        context: Context,
        finite: Any,
        index: Tensor,
        gradient: Tensor,
        state: LGCState,
    ) -> Program:
        """Run a compressed step of a rank, given its selected indices."""
        layout, ranks, rank = context.layout, context.size, context.rank
        selection, topk = self.selection, self.selection.topk
        common, capacity = self.common(ranks), topk.capacity(layout)
        message = []
        if rank == common:
            parts = topk.coding.encode(ops, layout, index)
            values = selection.values_to_send(ops, state, index)
            parts |= self.units.measure(ops, layout, index, values)
            unit = self.units.of_elements(ops, layout, index, parts)
            x = ops.reshape(vectors.to_units(ops, values, unit), (1, -1))
            parts["code"] = ops.reshape(autoencoder.encode(ops, state.encoder, x), (-1,))
            body = wire.pack_body(ops, self.code_parts(layout), parts)
            message.append(vectors.pack(self.compressor, ops, context, finite, body))
        else:
            values = selection.values_to_send(ops, state, index)
        state = vectors.count_sent(ops, layout, state, index)
        innovated, innovation_values = self.innovate(ops, layout, index, values)
        layout_parts = self.innovation_parts(layout)
        parts = topk.coding.encode(ops, layout, innovated)
        parts["values"] = ops.where(innovated < layout.sink, innovation_values, 0.0)
        parts["sampled"] = state.sampled[0]
        body = wire.pack_body(ops, layout_parts, parts)
        message.insert(0, vectors.pack(self.compressor, ops, context, finite, body))
        size = self.compressed_bytes(layout, ranks)
        lengths = tuple(size["worker"] + size["common"] * (r == common) for r in range(ranks))
        everything = yield Gather(ops.concat(message), self.master, lengths)
        if rank == self.master:
            answer, state = self.reconstruct(ops, context, state, everything, lengths)
        else:
            answer = ops.zeros((size["master"],), "uint8")
        answer = yield Broadcast(answer, self.master)
        changed, mean, loss = self.decode_answer(ops, context, answer)
        weight = context.prescale * context.postscale * ranks
        sums = patterns.check_sum(ops, mean * weight)
        total = ops.clear_last(ops.put(ops.clear(gradient), changed, sums))
        spots = training.spots(ops, context.step, capacity)
        own_sampled = vectors.at(ops, index, values, ops.gather(changed, spots))
        if selection.exact:
            # Selected values whose index is in the answer move from `r` to `owed`.
            _, answered = vectors.among(ops, ops.sort(changed), index)
            kept, owed = (ops.gather(x, index) for x in (state.memory.r, state.owed))
            state = selection.set_owed(ops, state, index, ops.where(answered, values, owed))
            owed = ops.gather(state.owed, changed) - mean
            state = selection.set_owed(ops, state, changed, owed)
            memory = state.memory
            memory = memory._replace(r=ops.put(memory.r, index, ops.where(answered, 0.0, kept)))
            if topk.momentum and topk.masking:  # mask the elements that this rank sent
                u = ops.put(memory.u, innovated, 0.0)
                memory = memory._replace(u=ops.put(u, index, 0.0) if rank == common else u)
            state = state._replace(memory=topk.without_sink(ops, memory))
        else:
            state = selection.commit(ops, state, index)
        sampled = ops.stack((own_sampled, ops.gather(mean, spots)))
        loss = ops.reshape(loss, ()) * 1.0
        return total, self.trainer.update_drift(ops, state._replace(sampled=sampled, loss=loss))

    def innovate(
        self, ops: Ops, layout: Layout, index: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the indices and values of a worker's innovation; see `largest_of_layers`."""
        return vectors.largest_of_layers(ops, layout, self.innovations(layout), index, values)

    def decode_answer(
        self, ops: Ops, context: Context, answer: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode the master's answer: the changed indices, the mean there, and the loss.

        Raises:
            PayloadError, NonFiniteGradientError: on all ranks, if the master received such a
                payload.
        """
        layout, ranks, topk = context.layout, context.size, self.selection.topk
        header, bodies = vectors.unpack(self.compressor, ops, context, ops.reshape(answer, (1, -1)))
        back = wire.unpack_body(ops, self.back_parts(layout, ranks), bodies)
        back = {name: part[0] for name, part in back.items()}
        verdict = back["verdict"]
        sound = ops.require({wire.DAMAGED: verdict != _DAMAGED}, PayloadError)
        fine = ops.require({wire.NOT_FINITE: verdict != _NOT_FINITE}, NonFiniteGradientError)
        places = topk.coding.decode(ops, layout, back, topk.capacity(layout))
        others = {n.removeprefix(_OTHERS): part for n, part in back.items() if _OTHERS in n}
        outside = topk.coding.decode(ops, layout, others, self.outside(layout, ranks))
        changed = ops.concat((places, outside))
        if sound is not None:
            good = ops.sum(ops.cast(sound & fine & header.intact, "int64")) == ranks
            changed = ops.where(good, changed, layout.sink)
        mean = ops.cast(back["values"], "float32") * back["peak"]
        return changed, ops.where(changed < layout.sink, mean, 0.0), back["loss"]

    def reconstruct(
        self,
        ops: Ops,
        context: Context,
        state: LGCState,
        everything: Tensor,
        lengths: Sequence[int],
    ) -> tuple[Tensor, LGCState]:
        """Return the master's answer (reconstructed mean, verdict on each rank) and its state.

        The master must not fail alone while the others wait, so it reports damage as a verdict.
        """
        layout, ranks, common = context.layout, context.size, self.common(context.size)
        coding = self.selection.topk.coding
        capacity = self.selection.topk.capacity(layout)
        count, most_outside = sum(self.innovations(layout)), self.outside(layout, ranks)
        base = self.compressed_bytes(layout, ranks)["worker"]
        starts = [sum(lengths[:rank]) for rank in range(ranks)]
        workers = ops.stack([everything[start : start + base] for start in starts])
        extra = ops.reshape(
            everything[starts[common] + base : starts[common] + lengths[common]], (1, -1)
        )
        header = patterns.header_of(self.compressor, context)
        facts, finite = wire.examine(ops, header, workers)
        more, _ = wire.examine(ops, header, extra)
        intact = ops.cast(facts, "int64")
        more = ops.where(ops.arange(ranks) == common, ops.cast(more, "int64"), intact * 0 + 1)
        verdict = ops.where(finite, _FINE, _NOT_FINITE)
        verdict = ops.where(intact * more > 0, verdict, _DAMAGED)

        payload = wire.unpack_body(ops, self.innovation_parts(layout), wire.bodies_of(workers))
        sampled = ops.reshape(payload.pop("sampled"), (ranks, SAMPLED))
        sampled = ops.sum(sampled, 0) * (1.0 / ranks)
        state = training.update_loss(ops, state, sampled, state.sampled[1] - sampled)
        payload["values"] = ops.reshape(payload["values"], (ranks, count))
        innovations = [
            (ops.minimum(index, layout.sink), values)
            for index, values in vectors.sent_by_ranks(ops, layout, coding, payload, count)
        ]
        choice = wire.unpack_body(ops, self.code_parts(layout), wire.bodies_of(extra))
        choice = {name: part[0] for name, part in choice.items()}
        # Damaged indices may lie beyond the bucket, and the master must not fail alone.
        places = ops.minimum(coding.decode(ops, layout, choice, capacity), layout.sink)
        unit = self.units.of_elements(ops, layout, places, choice)
        code = ops.reshape(choice["code"], (1, -1))
        channels = [vectors.at(ops, *innovation, places) for innovation in innovations]
        decoded = autoencoder.decode(
            ops, state.decoder, code, ops.stack([vectors.to_units(ops, x, unit) for x in channels])
        )
        mean = ops.sum(decoded, 0)[:capacity] * (unit * (1.0 / ranks))

        lonely = [
            ops.where(vectors.among(ops, places, i)[1], layout.sink, i) for i, _ in innovations
        ]
        outside = _distinct(ops, ops.concat(lonely), layout.sink)[:most_outside]
        others = coding.encode(ops, layout, outside)
        outside_values = [vectors.at(ops, *innovation, outside) for innovation in innovations]
        changed = ops.concat((places, outside))
        mean = ops.concat((mean, ops.sum(ops.stack(outside_values), 0) * (1.0 / ranks)))
        mean = ops.where(changed < layout.sink, mean, 0.0)
        peak = ops.reshape(ops.max(ops.abs(mean)), (1,))
        peak = ops.where(peak > 0, peak, 1.0)
        back = {name: choice[name] for name in coding.parts(layout, capacity)}
        back |= {_OTHERS + name: part for name, part in others.items()}
        back |= {"values": mean / peak, "peak": peak, "verdict": verdict}
        back["loss"] = ops.reshape(state.loss, (1,))
        body = wire.pack_body(ops, self.back_parts(layout, ranks), back)
        return vectors.pack(self.compressor, ops, context, True, body), state

    # -- the training ------------------------------------------------------------------------

    def loss(self, ops: Ops, context: Context, bodies: Tensor) -> training.Loss:
        """Return losses (5) to (7) of all workers' vectors, at the common rank's indices."""
        layout, ranks, topk = context.layout, context.size, self.selection.topk
        capacity = topk.capacity(layout)
        payload = wire.unpack_body(ops, BodySpec(topk, layout, capacity).plain_parts(ops), bodies)
        values = ops.reshape(payload["values"], (ranks, capacity))
        sent = [(payload["index"][rank], values[rank]) for rank in range(ranks)]
        common = self.common(ranks)
        begin, end = common * capacity, (common + 1) * capacity
        places = ops.concat([index for index, _ in sent])[begin:end]
        places = ops.reshape(places, (capacity,))
        at_common, channels = [], []
        for index, rank_values in sent:
            at_common.append(vectors.at(ops, index, rank_values, places))
            innovation = self.innovate(ops, layout, index, rank_values)
            channels.append(vectors.at(ops, *innovation, places))
        common_values = ops.reshape(ops.concat(at_common)[begin:end], (capacity,))
        measured = self.units.measure(ops, layout, places, common_values)
        unit = self.units.of_elements(ops, layout, places, measured)
        x = ops.stack([vectors.to_units(ops, vector, unit) for vector in at_common])
        innovation = ops.stack([vectors.to_units(ops, channel, unit) for channel in channels])
        energy = ops.sum(x * x)

        def loss(encoder: Tensor, decoder: Tensor) -> tuple[Tensor, ...]:
            codes = autoencoder.encode(ops, encoder, x)
            code = codes[common : common + 1]
            code = ops.reshape(code, (1, codes.shape[1]))
            missed = autoencoder.decode(ops, decoder, code, innovation) - x
            rec = ops.sum(missed * missed)
            mean = ops.reshape(ops.sum(codes, 0), (1, -1)) * (1.0 / ranks)
            away = codes - mean  # sum over pairs of |a - b|^2 = 2 * ranks * sum of |a - mean|^2
            sim = ops.sum(away * away) * (2.0 * ranks)
            return rec * self.lambda_rec + sim * self.lambda_sim, rec, energy

        return loss

    def distribute(
        self, ops: Ops, context: Context, state: LGCState
    ) -> Generator[Any, Any, LGCState]:
        """End the training: decide if it converged, and send the encoder to the common rank."""
        late = yield Broadcast(self.trainer.mean_late(ops, state), self.master)
        common, here = self.common(context.size), context.rank == self.master
        if common != self.master:
            size = autoencoder.ENCODER_SIZE
            lengths = tuple(size * (r == self.master) for r in range(context.size))
            encoder = state.encoder if here else state.encoder[:0]
            received = yield Gather(encoder, common, lengths)
            if context.rank == common:
                state = state._replace(encoder=received)
        state = self.trainer.finish(ops, state, late)
        return state._replace(sampled=state.sampled * 0.0)


def _distinct(ops: Ops, index: Tensor, sink: int) -> Tensor:
    """Return the distinct indices, ascending, padded with the sink."""
    ascending = ops.sort(index)
    before = ops.concat((ops.full((1,), -1), ascending[:-1]))
    return ops.sort(ops.where(ascending == before, sink, ascending))
