"""Ring-allreduce pattern of LGC: Algorithm 2."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.algorithms.lgc import training, vectors
from hvd_gradcomp.algorithms.lgc.state import SAMPLED, LGCState
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core.collectives import Allgather, Allreduce, Broadcast
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Compressor, Context, Program
from hvd_gradcomp.ops import Ops, Tensor


@dataclass(frozen=True)
class Ring:
    """Exchanges codes by allreduce, at the indices of a leader that is drawn each step."""

    compressor: Compressor  # whose headers the payloads have
    selection: vectors.Selection
    units: vectors.Units
    trainer: training.Trainer
    master: int  # the rank that trains
    seed: int  # of the leaders

    def heads(self, ranks: int) -> int:
        """Return the number of decoders on a rank."""
        del ranks
        return 1

    def choice_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts of the leader's broadcast with codes: indices, signs and scales.

        While values travel, the leader broadcasts the indices alone.
        """
        topk = self.selection.topk
        capacity = topk.capacity(layout)
        return {**topk.coding.parts(layout, capacity), **self.units.parts(layout, capacity)}

    def compressed_bytes(self, layout: Layout, ranks: int) -> dict[str, int]:
        """Return the bytes of a compressed step; see `LGCCompressor.compressed_bytes`."""
        del ranks
        length = autoencoder.code_length(self.selection.topk.capacity(layout))
        return {
            "leader": wire.packed_bytes(self.choice_parts(layout)),
            "worker": 4 * (length + SAMPLED + 1),
        }

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
        layout, selection = context.layout, self.selection
        leader = patterns.draw_number(context.step, self.seed, context.size)
        finite, gradient = patterns.check_storable(ops, gradient)
        taken = selection.accumulate_and_select(
            ops, context, finite, gradient, state, leader == context.rank
        )
        state = state._replace(memory=taken.memory, hint=taken.hint)
        index, choice = yield from self.places(
            ops, context, leader, finite, taken.index, state, compress
        )
        # Codes hold `r` alone; `owed` waits until values travel.
        r = ops.gather(state.memory.r, index)
        values = r if compress else selection.values_to_send(ops, state, index)
        state = vectors.count_sent(ops, layout, state, index)
        poison = patterns.poison(ops, finite)
        if compress:
            total, state = yield from self.exchange_codes(
                ops, context, state, index, values, choice, poison
            )
        elif train:
            body = ops.to_bytes(values, "float32")
            buffers = yield Allgather(vectors.pack(self.compressor, ops, context, finite, body))
            header, bodies = vectors.unpack(self.compressor, ops, context, buffers)
            sent = ops.from_bytes(bodies, "float32")  # [ranks, selected]
            weights = ops.reshape(patterns.weights_of(ops, context, header), (-1, 1))
            weighted = sent * weights
            total = weighted[0]
            for rank in range(1, context.size):
                total = total + weighted[rank]
            total = patterns.check_sum(ops, total)
            state = selection.commit(ops, state, index)
            if context.rank == self.master:
                loss = self.loss(ops, context, leader, index, sent)
                state = self.trainer.step(ops, state, elapsed, loss)
            if last:
                state = yield from self.distribute(ops, state)
        else:
            vector = ops.concat((values, poison))
            total = yield Allreduce(vector, context.prescale, context.postscale)
            total = patterns.strip_poison(ops, total)
            state = selection.commit(ops, state, index)
        return ops.clear_last(ops.put(ops.clear(gradient), index, total)), state

    def places(
        self,
        ops: Ops,
        context: Context,
        leader: Any,
        finite: Any,
        chosen: Tensor,
        state: LGCState,
        compress: bool,
    ) -> Generator[Any, Any, tuple[Tensor, dict[str, Tensor]]]:
        """Broadcast the leader's indices, ascending, and, for codes, its signs and scales."""
        layout, topk = context.layout, self.selection.topk
        capacity = topk.capacity(layout)
        parts = self.choice_parts(layout) if compress else topk.coding.parts(layout, capacity)

        def payload() -> Tensor:
            choice = topk.coding.encode(ops, layout, chosen)
            if compress:
                values = ops.gather(state.memory.r, chosen)
                choice |= self.units.measure(ops, layout, chosen, values)
            body = wire.pack_body(ops, parts, choice)
            return vectors.pack(self.compressor, ops, context, finite, body)

        size = wire.packed_bytes(parts)
        buffer = yield from patterns.from_leader(ops, context, leader, payload, size)
        header, bodies = vectors.unpack(self.compressor, ops, context, ops.reshape(buffer, (1, -1)))
        choice = {name: part[0] for name, part in wire.unpack_body(ops, parts, bodies).items()}
        index = topk.coding.decode(ops, layout, choice, capacity)
        if header.intact is not None:
            index = ops.where(header.intact, index, layout.sink)
        return index, choice

    def exchange_codes(
        self,
        ops: Ops,
        context: Context,
        state: LGCState,
        index: Tensor,
        values: Tensor,
        choice: Mapping[str, Tensor],
        poison: Tensor,
    ) -> Generator[Any, Any, tuple[Tensor, LGCState]]:
        """Exchange codes instead of values; return the decoded sum and the state."""
        layout, selected, selection = context.layout, values.shape[0], self.selection
        unit = self.units.of_elements(ops, layout, index, choice)
        x = ops.reshape(vectors.to_units(ops, values, unit), (1, -1))
        code = ops.reshape(autoencoder.encode(ops, state.encoder, x), (-1,))
        spots = training.spots(ops, context.step, selected)
        total = yield Allreduce(
            ops.concat((code, ops.gather(values, spots), poison)), 1.0, 1.0 / context.size
        )
        total = patterns.strip_poison(ops, total)
        length, exact = code.shape[0], selection.exact
        codes = ops.stack((total[:length], code) if exact else (total[:length],))
        decoded = autoencoder.decode(ops, state.decoder, codes)[:, :selected] * unit
        back = ops.where(index < layout.sink, decoded[0], 0.0)
        weight = context.prescale * context.postscale * context.size
        result = patterns.check_sum(ops, back * weight)
        owed = ops.gather(state.owed, index) if exact else 0.0
        state = selection.commit(ops, state, index)
        if exact:
            own_decoded, memory = ops.where(index < layout.sink, decoded[1], 0.0), state.memory
            r = ops.put(memory.r, index, values - own_decoded)
            memory = memory._replace(r=ops.clear_last(r))
            state = state._replace(memory=memory)
            state = selection.set_owed(ops, state, index, owed + own_decoded - back)
        sampled = total[length:]
        state = training.update_loss(ops, state, sampled, ops.gather(back, spots) - sampled)
        return result, self.trainer.update_drift(ops, state)

    # -- the training ------------------------------------------------------------------------

    def loss(
        self, ops: Ops, context: Context, leader: Any, index: Tensor, sent: Tensor
    ) -> training.Loss:
        """Return loss (11) of the ranks' values, [ranks, selected]."""
        layout, (ranks, count) = context.layout, sent.shape
        leader_values = ops.reshape(sent, (-1,))[leader * count : (leader + 1) * count]
        leader_values = ops.reshape(leader_values, (count,))
        measured = self.units.measure(ops, layout, index, leader_values)
        unit = self.units.of_elements(ops, layout, index, measured)
        x = ops.stack([vectors.to_units(ops, sent[rank], unit) for rank in range(ranks)])
        target = ops.reshape(ops.sum(x, 0), (1, -1)) * (1.0 / ranks)
        energy = ops.sum(target * target)

        def loss(encoder: Tensor, decoder: Tensor) -> tuple[Tensor, ...]:
            codes = autoencoder.encode(ops, encoder, x)
            code = ops.reshape(ops.sum(codes, 0), (1, codes.shape[1])) * (1.0 / ranks)
            missed = autoencoder.decode(ops, decoder, code) - target
            rec = ops.sum(missed * missed)
            return rec, rec, energy

        return loss

    def distribute(self, ops: Ops, state: LGCState) -> Generator[Any, Any, LGCState]:
        """End the training: decide if it converged, and broadcast the parameters."""
        late = self.trainer.mean_late(ops, state)
        heads, flat = tuple(state.decoder.shape), ops.reshape(state.decoder, (-1,))
        everything = yield Broadcast(ops.concat((late, state.encoder, flat)), self.master)
        late, end = everything[:1], 1 + autoencoder.ENCODER_SIZE
        decoder = ops.reshape(everything[end:] * 1, heads)
        state = state._replace(encoder=everything[1:end] * 1, decoder=decoder)
        return self.trainer.finish(ops, state, late)
