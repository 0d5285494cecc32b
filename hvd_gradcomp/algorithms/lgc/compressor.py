"""The public class: what it keeps, and which phase it is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.algorithms.lgc import ring, server, training, vectors
from hvd_gradcomp.algorithms.lgc.settings import SAMPLED, LGCSettings, LGCState
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.core.compressor import Context, Program
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols.reporting import Report
from hvd_gradcomp.ops import Ops, Tensor

_NOT_CONVERGED = (
    "LGC: the loss of the autoencoder has not fallen to {bound} of the gradient's energy by the "
    "end of its {steps} training steps, so values go on to travel uncompressed. Try a larger "
    "ae_lr or train_steps, then call hvd.retrain(optimizer); compression_stats(...).losses has "
    "the loss"
)


_LEARNED = ("encoder", "decoder", "late", "seen", "loss")


@dataclass(frozen=True, repr=False)
class LGCCompressor(LGCSettings):
    """Sends a learned code of the largest accumulated velocities (Abrahamyan et al. 2021).

    For `full_steps` gradients are exchanged whole. Then momentum is corrected and the residual kept
    as in DGC, and of each layer `k = max(1, round(n * alpha))` elements are selected; their values
    are one vector for the whole model. Of these one rank's are the measure: its signs are taken out
    of all ranks' vectors, and each layer is divided by the RMS that it has there. For `train_steps`
    the values travel, and one rank trains an autoencoder on them. From then on:

    * `pattern="ring_allreduce"`: the leader of the step, drawn from a seed that all ranks share,
      broadcasts its indices, signs and RMS; all ranks encode their values there; the codes are
      added up by an allreduce and every rank decodes the mean (Algorithm 2, equations 8 to 11).
    * `pattern="parameter_server"`: `common_rank` sends indices, signs, RMS and code; every rank
      sends its innovation, the largest tenth of what it has selected of each layer. The master
      decodes each worker's vector, puts innovations that lie outside the indices where they
      belong, and broadcasts the mean (Algorithm 1, equations 2 to 7).

    The first layer is sent dense, the last one as `DGCCompressor(density=alpha)` does.

    What travels, compressed: by the ring, 1 byte an element selected (a float32 for four) and 64
    bytes, by allreduce; by broadcast, packed indices from the leader, 1 bit an element for signs,
    and 4 bytes a layer. To the master, values and packed indices of the innovation and 64 bytes,
    and from one worker what the ring's leader sends and a code; back, packed indices, and half
    precision for all that is not zero. `compressed_bytes` has the formula. The parameters of the
    autoencoder (0.69 MB the encoder, 0.17 MB a decoder) travel once a training. State: `r`, `u`
    and, with exact feedback, `owed`, 12 bytes an element, and the autoencoder's parameters, three
    times with Adam.

    Args:
        pattern: "ring_allreduce" or "parameter_server".
        alpha: share of the elements of a layer that are selected, in (0, 1]; smaller sends less.
        full_steps: steps before anything is left out, at least 1.
        train_steps: steps of the autoencoder's training, at least 1.
        innovation: share of the selected elements of a layer that a worker sends itself, in (0, 1]
            (parameter server only); smaller sends less. At least one of each layer.
        signs: whether signs travel, one bit an element from one rank, and the code has only
            magnitudes to hold; False is the paper's form.
        scale: "layer" divides each layer by its RMS; "model" all by one, the paper's form.
        ae_lr: learning rate of the autoencoder, positive.
        ae_optimizer: of the autoencoder: "sgd", descent with clipped gradients, or "adam".
        ae_steps: of the autoencoder on each iteration's vectors, at least 1. More learns more from
            as many iterations, and takes the trainer as much longer.
        lambda_rec, lambda_sim: weights of the losses (6) and (5), not negative (parameter server
            only).
        master: the rank that trains the autoencoder, and reconstructs with a parameter server; it
            is a worker too.
        common_rank: the worker that sends the code; None for the one after the master.
        first_layer: names of the layers that are sent dense, patterns of the shell's kind or the
            names of modules; None for the first layer that has a matrix or more, in the order of
            use: PyTorch sees it in the first step, on TensorFlow it is that of the variables.
        last_layer: the same for layers that are sent by top-k without the autoencoder.
        index_coding: "deflate" (DEFLATE, on the host), "delta", packed, or "int32", plain.
        feedback: "exact" keeps on each rank what it selected less what came back, so the sum over
            ranks loses nothing (see below); "paper" counts what was selected as sent.
        momentum, nesterov, masking: see `DGCCompressor`.
        retrain_loss: train the autoencoder again once the loss, see below, exceeds this; None
            never.
        retrain_every: train it again after so many steps with codes, at least 1; None never. It
            goes on from the parameters that it has.
        seed: of the draws and of the autoencoder's first parameters.
        max_norm: before it is accumulated, a layer of a rank's own gradient whose norm exceeds
            `max_norm / sqrt(ranks)` is scaled down to it, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.

    *Exact feedback.* What a rank selected less the mean that came back is for the most part what
    this rank has and others have not. It adds up to zero over ranks, so no exchange ever takes it
    away: kept in `r` it would grow without bound and, being large, be selected again and again.
    Hence two places. `r`, by which elements are selected, keeps what this rank knows to be
    missing: by the ring its values less its own reconstruction of them, with a server what it
    selected and the answer does not mention. The rest is `owed`: it is added to the values once
    the element is selected again; by the ring only where values travel, in a training, since the
    codes of ranks that owe each other much say little about the mean.

    *The loss*, in `compression_stats(...).losses`: `||asked - decoded||^2 / ||asked||^2`, where
    `asked` is the mean over ranks of the vectors that the autoencoder stands for, at the places of
    the leader or the common rank. No rank knows that mean, so each says what it has at 16 of the
    places, others in each step; sums of squares fade by a tenth a step. A server shows it a step
    late.

    Differs from the paper: signs, RMS by layer and feedback (above). The gradient of each network
    is clipped to norm 10, without which plain descent on the printed loss diverges; its first
    parameters pass a signal on (see `codecs.autoencoder`). An autoencoder whose mean loss over the
    last tenth of its training is above 0.95 of the energy is not used: values go on to travel, and
    a warning says so. With a server the code that it is trained on is always the common rank's, as
    it is later, not one drawn at random. Workers' vectors are trained on, and reconstructed, at the
    places of the common rank. PyTorch and TensorFlow agree but for the last bits.

    Raises:
        ValueError: a hyper-parameter is out of range; a rank does not exist; the model has no layer
            between the first and the last one, or fewer than 16 elements are selected.

    >>> LGCCompressor(alpha=0.01).pattern
    'ring_allreduce'
    """

    def velocity(self, state: LGCState) -> Tensor | None:
        return state.memory.u if self.momentum else None

    def init(self, ops: Ops, layout: Layout) -> LGCState:
        return self.start(ops, layout, 1)

    def start(self, ops: Ops, layout: Layout, ranks: int) -> LGCState:
        self.check_ranks(ranks)
        self.check(layout)
        return LGCState(
            memory=self.remember(ops, layout),
            owed=ops.zeros((layout.size,)) if self.feedback == "exact" else (),
            **self._untrained(ops, ranks if self.by_server else 1),
            loss=ops.full((), float("nan"), "float32"),
            start=ops.host(self.full_steps),
            ready=ops.host(0),
            drifted=ops.host(0),
            sent=ops.zeros((len(layout.names),), "int64"),
            hint=self.unknown(ops, layout),
        )

    def _untrained(self, ops: Ops, heads: int) -> dict[str, Any]:
        """What the state holds of an autoencoder that has seen nothing."""
        encoder = autoencoder.initial_encoder(ops, self.seed)
        decoder = autoencoder.initial_decoder(ops, self.by_server, self.seed + 1)
        decoder = ops.stack([decoder] * heads)
        return {
            "encoder": encoder,
            "decoder": decoder,
            "moments": training.no_moments(self, ops, encoder, decoder),
            "late": ops.zeros(()),
            "seen": ops.zeros((2,)),
            "asked": ops.zeros((2, SAMPLED)) if self.by_server else (),
        }

    def retrained(self, ops: Ops, state: LGCState, step: Any) -> LGCState:
        if step < self.full_steps:
            return state
        return self._restarted(ops, state, state.decoder.shape[0])._replace(start=ops.host(step))

    def rehearsed(self, ops: Ops, layout: Layout, state: LGCState, step: int) -> LGCState:
        del layout
        return state._replace(start=ops.host(step - self.train_steps), ready=ops.host(1))

    def resized(self, ops: Ops, state: LGCState, step: Any, ranks: int) -> LGCState:
        # Decoders are one a rank, and who is new has no encoder; nor, in the first phase, the
        # velocity that the others have in common.
        self.check_ranks(ranks)
        state = self._restarted(ops, state, ranks if self.by_server else 1)
        if self.momentum and step < self.full_steps:
            state = state._replace(memory=state.memory._replace(u=state.memory.u * 0))
        return state._replace(start=ops.host(max(int(step), self.full_steps)))

    def _restarted(self, ops: Ops, state: LGCState, heads: int) -> LGCState:
        return state._replace(**self._untrained(ops, heads), ready=ops.host(0), drifted=ops.host(0))

    def owner(self, path: str, step: int) -> int | None:
        # The master trains; and in the first phase all have the velocity in common.
        common = path == "memory.u" and step <= self.full_steps
        learned = path.startswith("moments") or path in _LEARNED
        return self.master if common or learned else None

    def report(self, layout: Layout, state: LGCState, steps: int, since: int = 0) -> Report:
        whole = min(steps - since, self.full_steps)
        sent = [int(n) + whole * size for n, size in zip(state.sent, layout.sizes)]
        return Report(sent, self.residual(state), {"autoencoder": float(state.loss)})

    def residual(self, state: LGCState) -> Tensor:
        return state.memory.r + state.owed if self.feedback == "exact" else state.memory.r

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: LGCState, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        start, ready = ops.staged(state.start), ops.staged(state.ready)
        again = ops.staged(state.drifted) > 0
        if self.retrain_every is not None:
            again = again | (context.step - start >= self.train_steps + self.retrain_every)
        start = ops.pick(again, context.step, start)
        ready = ops.pick(again, 0, ready)
        host = ops.host
        state = state._replace(start=host(start), ready=host(ready), drifted=host(0))
        steps, elapsed = self.train_steps, context.step - start
        if context.rank == self.master:
            message = _NOT_CONVERGED.format(bound=training.CONVERGED, steps=steps)
            ops.warn((elapsed == steps) & (ready != 1), message)
        phase = ops.bisect((-1, steps - 2, steps - 1), elapsed)
        phase = ops.pick((elapsed >= steps) & (ready != 1), 4, phase)
        program = server.program if self.by_server else ring.program
        branches = (
            lambda: vectors.whole(self, ops, context, gradient, state),
            lambda: program(self, ops, context, gradient, state, elapsed, train=True),
            lambda: program(self, ops, context, gradient, state, elapsed, train=True, last=True),
            lambda: program(self, ops, context, gradient, state, elapsed, compress=True),
            lambda: program(self, ops, context, gradient, state, elapsed),
        )
        return (yield Switch(phase, branches))
