"""Public class of LGC: its state and its phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.algorithms.lgc import ring, server, training, vectors
from hvd_gradcomp.algorithms.lgc.settings import SAMPLED, LGCSettings, LGCState
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core.collectives import Switch
from hvd_gradcomp.core.compressor import Context, Program, Report
from hvd_gradcomp.core.layout import Layout
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
    """LGC: sends a learned code of the largest accumulated velocities (Abrahamyan et al. 2021).

    For `full_steps` full gradients are exchanged. Then momentum correction and residual work as
    in DGC, and `k = max(1, round(n * alpha))` elements of each layer are selected; their values
    form one vector for the whole model. One rank's vector normalizes those of all ranks: they are
    multiplied by its signs, and each layer is divided by its RMS in that vector. For `train_steps`
    the values travel, and one rank trains an autoencoder on them. From then on:

    * `pattern="ring_allreduce"`: the leader of the step, drawn from a shared seed, broadcasts its
      indices, signs and RMS; all ranks encode their values at these indices; the codes are
      allreduced and every rank decodes the mean (Algorithm 2, equations 8 to 11).
    * `pattern="parameter_server"`: `common_rank` sends indices, signs, RMS and code; every rank
      sends its innovation, the largest tenth of its selected elements of each layer. The master
      decodes each worker's vector, adds innovations at other indices to the mean, and
      broadcasts it (Algorithm 1, equations 2 to 7).

    The first layer is sent dense, the last one like `DGCCompressor(density=alpha)`.

    What travels, compressed: with the ring, 1 byte for each selected element (a float32 for four)
    and 64 bytes, by allreduce; by broadcast, the leader's packed indices, 1 bit for each element's
    sign, and 4 bytes for each layer. To the master, values and packed indices of the innovation
    and 64 bytes, and from one worker also the payload of a ring leader and a code; back, packed
    indices, and nonzero values in half precision. `compressed_bytes` has the formula. The
    autoencoder's parameters (0.69 MB the encoder, 0.17 MB a decoder) travel once per training.
    State: `r`, `u` and, with exact feedback, `owed`, 12 bytes for each element, and the
    autoencoder's parameters, three times with Adam.

    Args:
        pattern: "ring_allreduce" or "parameter_server".
        alpha: share of the elements of a layer that are selected, in (0, 1]; smaller sends less.
        full_steps: uncompressed steps at the start, at least 1.
        train_steps: steps of the autoencoder's training, at least 1.
        innovation: share of the selected elements of a layer that each worker sends itself, in
            (0, 1] (parameter server only); smaller sends less. At least one of each layer.
        signs: True to send one rank's signs, one bit for each element, so that the code holds
            magnitudes only; False is the paper's form.
        scale: "layer" divides each layer by its RMS; "model" uses one RMS, the paper's form.
        ae_lr: learning rate of the autoencoder, positive.
        ae_optimizer: of the autoencoder: "sgd", descent with clipped gradients, or "adam".
        ae_steps: optimizer steps of the autoencoder for each iteration's vectors, at least 1. More
            learn more from as many iterations, at proportional cost for the trainer.
        lambda_rec, lambda_sim: weights of the losses (6) and (5), not negative (parameter server
            only).
        master: the rank that trains the autoencoder, and the parameter server; it is also a
            worker.
        common_rank: the worker that sends the code; None for the one after the master.
        first_layer: names of the layers that are sent dense, as shell-style patterns or names of
            modules; None for the first layer with a matrix or more, in execution order: on PyTorch
            that of the first step, on TensorFlow that of the variables.
        last_layer: the same for layers that are sent by top-k without the autoencoder.
        index_coding: "deflate" (DEFLATE, on the host), "delta", packed, "elias_fano", fewer bits,
            or "int32", plain.
        feedback: "exact" keeps the difference of selected and reconstructed values on each rank,
            so the sum over ranks loses nothing (see below); "paper" counts all that was selected
            as sent.
        momentum, nesterov, masking: see `DGCCompressor`.
        retrain_loss: train the autoencoder again when the loss (see below) exceeds this; None
            disables this.
        retrain_every: train it again after so many steps with codes, at least 1; None disables
            this. Training resumes from the current parameters.
        seed: of the draws and of the autoencoder's first parameters.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.

    *Exact feedback.* A rank's selected values minus the returned mean are mostly its deviation
    from the other ranks. These deviations sum to zero over ranks, so no exchange ever removes
    them: in `r` they would grow without bound and, being large, be selected again and again.
    Hence two buffers. `r`, which selects the elements, keeps what this rank knows to be
    missing: with the ring its values minus its own reconstruction of them, with a server its
    selected values at indices that the answer does not contain. `owed` keeps the rest and is
    added to the values when the element is selected again; with the ring only while values
    travel, in a training, since codes with large owed parts say little about the mean.

    *The loss*, in `compression_stats(...).losses`: `||asked - decoded||^2 / ||asked||^2`, where
    `asked` is the mean over ranks of the selected vectors, at the indices of the leader or the
    common rank. No rank knows that mean, so each step the ranks exchange their values at 16 of
    the indices, in turn; sums of squares decay by a tenth per step. A server reports it a step
    late.

    Differs from the paper: signs, RMS by layer and feedback (above). The gradient of each
    network is clipped to norm 10, since plain descent on the printed loss diverges; the initial
    parameters pass a signal on (see `codecs.autoencoder`). An autoencoder whose mean loss over
    the last tenth of its training is above 0.95 of the energy is not used: values continue to
    travel, and a warning says so. With a server, training always uses the common rank's code,
    as compression does, not a randomly drawn one. Workers' vectors are trained on, and
    reconstructed, at the indices of the common rank. PyTorch and TensorFlow differ in the last
    bits.

    Raises:
        ValueError: a hyper-parameter is out of range; a rank does not exist; the model has no
            layer between the first and the last one, or fewer than 16 elements are selected.

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
            memory=self.init_memory(ops, layout),
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
        """Return the state's fields of an untrained autoencoder."""
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
        return state._replace(start=ops.host(step - self.train_steps), ready=ops.host(1))

    def resized(self, ops: Ops, state: LGCState, step: Any, ranks: int) -> LGCState:
        # Each rank has a decoder, and new ranks have no encoder; nor, in the first phase, the
        # replicated velocity.
        self.check_ranks(ranks)
        state = self._restarted(ops, state, ranks if self.by_server else 1)
        if self.momentum and step < self.full_steps:
            state = state._replace(memory=state.memory._replace(u=state.memory.u * 0))
        return state._replace(start=ops.host(max(int(step), self.full_steps)))

    def _restarted(self, ops: Ops, state: LGCState, heads: int) -> LGCState:
        return state._replace(**self._untrained(ops, heads), ready=ops.host(0), drifted=ops.host(0))

    def owner(self, path: str, step: int) -> int | None:
        # The master trains; in the first phase the velocity is replicated.
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
