"""Training of the autoencoder on one rank, and the loss that it is watched by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.lgc.state import SAMPLED, LGCState
from hvd_gradcomp.ops import Ops, Tensor

CONVERGED = 0.95  # of the energy; an autoencoder that has learned nothing loses more
_NOT_CONVERGED = (
    "LGC: the loss of the autoencoder has not fallen to {bound} of the gradient's energy by the "
    "end of its {steps} training steps, so values go on to travel uncompressed. Try a larger "
    "ae_lr or train_steps, then call hvd.retrain(optimizer); compression_stats(...).losses has "
    "the loss"
)
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam
_FADING = 0.9  # weight of the previous step's sums
_CLIP = 10.0  # norm of a network's gradient

Loss = Callable[[Tensor, Tensor], "tuple[Tensor, ...]"]
"""Loss of (encoder, decoder): what is minimized, the squared error, and the target's energy."""


class Moments(NamedTuple):
    """State of Adam (Kingma and Ba 2015): running means, and the running mean of ones."""

    encoder: Tensor  # float32 [2, parameters], of the gradient and of its square
    decoder: Tensor  # float32 [2, heads * parameters]
    ones: Tensor  # float32 [2]


@dataclass(frozen=True)
class Trainer:
    """Trains the autoencoder, decides if it has converged, and when it must be trained again."""

    steps: int  # iterations of a training
    inner_steps: int  # of the optimizer, for each iteration
    lr: float
    adam: bool  # else descent with clipped gradients
    retrain_loss: float | None

    def no_moments(self, ops: Ops, encoder: Tensor, decoder: Tensor) -> Any:
        """Return the moments before the first step; () without Adam."""
        if not self.adam:
            return ()
        heads, size = decoder.shape
        encoder, decoder = ops.zeros((2, encoder.shape[0])), ops.zeros((2, heads * size))
        return Moments(encoder, decoder, ops.zeros((2,)))

    @property
    def window(self) -> int:
        """Last steps of a training, whose mean loss decides."""
        return max(1, self.steps // 10)

    def step(self, ops: Ops, state: LGCState, elapsed: Any, loss: Loss) -> LGCState:
        """Train for one iteration; the recorded loss is that before the first step."""
        number = ops.reshape(ops.words((elapsed,)), ())
        networks, moments = (state.encoder, state.decoder), state.moments
        if moments:  # reset those of an earlier training
            encoder, decoder, ones = (ops.where(number > 0, x, 0.0) for x in moments)
            moments = Moments(encoder, decoder, ones)
        share = state.loss
        for step in range(self.inner_steps):
            (_, rec, energy), gradients = ops.value_and_grad(loss, networks)
            if step == 0:
                share = ops.where(energy > 0, rec / ops.where(energy > 0, energy, 1.0), 1.0)
            if moments:
                networks, moments = self._by_adam(ops, networks, gradients, moments)
            else:
                networks = tuple(
                    parameters + _clipped(ops, gradient) * -self.lr
                    for parameters, gradient in zip(networks, gradients)
                )
        begins = self.steps - self.window
        late = ops.where(number > begins, state.late, 0.0)
        late = ops.where(number >= begins, late + share, 0.0)
        encoder, decoder = networks
        return state._replace(
            encoder=encoder, decoder=decoder, moments=moments, late=late, loss=share
        )

    def _by_adam(
        self,
        ops: Ops,
        networks: tuple[Tensor, ...],
        gradients: Sequence[Tensor],
        moments: Moments,
    ) -> tuple[tuple[Tensor, ...], Moments]:
        """Return the parameters and moments after a step of Adam, without gradient clipping."""
        first, second = _BETAS
        ones = moments.ones * ops.reals(_BETAS) + ops.reals([1.0 - first, 1.0 - second])
        better, kept = [], []
        for parameters, gradient, before in zip(networks, gradients, moments):
            flat = ops.reshape(gradient, (-1,))
            mean = before[0] * first + flat * (1.0 - first)
            square = before[1] * second + flat * flat * (1.0 - second)
            away = mean / ones[0] / (ops.sqrt(square / ones[1]) + _EPSILON)
            better.append(parameters + ops.reshape(away, tuple(parameters.shape)) * -self.lr)
            kept.append(ops.stack((mean, square)))
        return tuple(better), Moments(kept[0], kept[1], ones)

    def mean_late(self, ops: Ops, state: LGCState) -> Tensor:
        """Return the mean loss over the end of the training, of the rank that trained; [1]."""
        return ops.reshape(state.late, (1,)) * (1.0 / self.window)

    def finish(self, ops: Ops, state: LGCState, late: Tensor) -> LGCState:
        """Return the state after a training, with what `mean_late` is on the trainer."""
        converged = ops.reshape(ops.cast(late <= CONVERGED, "int64"), ())
        late = ops.reshape(late, ()) * 1.0
        return state._replace(ready=ops.stage(converged), loss=late, seen=state.seen * 0.0)

    def warn_unless_ready(self, ops: Ops, elapsed: Any, ready: Any) -> None:
        """Log once after a training that the autoencoder has not converged."""
        message = _NOT_CONVERGED.format(bound=CONVERGED, steps=self.steps)
        ops.warn((elapsed == self.steps) & (ready != 1), message)

    def update_drift(self, ops: Ops, state: LGCState) -> LGCState:
        """Return the state with `drifted` set if the loss calls for another training."""
        if self.retrain_loss is None:
            return state
        drifted = ops.stage(ops.cast(state.loss > self.retrain_loss, "int64"))
        return state._replace(drifted=drifted)


def spots(ops: Ops, step: Any, count: int) -> Tensor:
    """Return positions to sample among `count`, all in turn over the steps; int64 [SAMPLED]."""
    return (ops.arange(SAMPLED) * -(-count // SAMPLED) + step) % count


def update_loss(ops: Ops, state: LGCState, sampled: Tensor, missed: Tensor) -> LGCState:
    """Update the loss from sampled elements: `sampled`, their means over ranks, and the error.

    The target is the mean of the ranks' selected values, (11) and (13). Earlier steps decay
    exponentially, with a total weight of about ten steps.
    """
    energies = [ops.reshape(ops.sum(x * x), (1,)) for x in (missed, sampled)]
    seen = state.seen * _FADING + ops.concat(energies)
    known = seen[1] > 0
    loss = ops.where(known, seen[0] / ops.where(known, seen[1], 1.0), state.loss)
    return state._replace(seen=seen, loss=loss)


def _clipped(ops: Ops, gradient: Tensor) -> Tensor:
    """Clip the gradient of each network, an encoder or a head, to norm `_CLIP`."""
    rows = ops.reshape(gradient, (-1, gradient.shape[-1]))
    norm = ops.reshape(ops.sqrt(ops.sum(rows * rows, -1)), (-1, 1))
    rows = rows * (_CLIP / ops.maximum(norm, _CLIP))
    return ops.reshape(rows, tuple(gradient.shape))
