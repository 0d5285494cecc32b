"""Training of the autoencoder on one rank, and distribution of its parameters."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.lgc import vectors
from hvd_gradcomp.algorithms.lgc.settings import SAMPLED, LGCSettings, LGCState
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core import wire
from hvd_gradcomp.core.collectives import Broadcast, Gather
from hvd_gradcomp.core.compressor import Context
from hvd_gradcomp.ops import Ops, Tensor

CONVERGED = 0.95  # of the energy; an autoencoder that has learned nothing loses more
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam
_FADING = 0.9  # weight of the previous step's sums
_CLIP = 10.0  # norm of a network's gradient


class Moments(NamedTuple):
    """State of Adam (Kingma and Ba 2015): running means, and the running mean of ones."""

    encoder: Tensor  # float32 [2, parameters], of the gradient and of its square
    decoder: Tensor  # float32 [2, heads * parameters]
    ones: Tensor  # float32 [2]


def no_moments(lgc: LGCSettings, ops: Ops, encoder: Tensor, decoder: Tensor) -> Any:
    """Return the moments before the first step; () without Adam."""
    if lgc.ae_optimizer == "sgd":
        return ()
    heads, size = decoder.shape
    encoder, decoder = ops.zeros((2, encoder.shape[0])), ops.zeros((2, heads * size))
    return Moments(encoder, decoder, ops.zeros((2,)))


def train_step(lgc: LGCSettings, ops: Ops, state: LGCState, elapsed: Any, loss: Any) -> LGCState:
    """Train the autoencoder for one iteration; the recorded loss is that before the first step."""
    number = ops.reshape(ops.words((elapsed,)), ())
    networks, moments = (state.encoder, state.decoder), state.moments
    if moments:  # reset those of an earlier training
        encoder, decoder, ones = (ops.where(number > 0, x, 0.0) for x in moments)
        moments = Moments(encoder, decoder, ones)
    share = state.loss
    for step in range(lgc.ae_steps):
        (_, rec, energy), gradients = ops.value_and_grad(loss, networks)
        if step == 0:
            share = ops.where(energy > 0, rec / ops.where(energy > 0, energy, 1.0), 1.0)
        if moments:
            networks, moments = _by_adam(lgc, ops, networks, gradients, moments)
        else:
            networks = tuple(
                parameters + _clipped(ops, gradient) * -lgc.ae_lr
                for parameters, gradient in zip(networks, gradients)
            )
    begins = lgc.train_steps - max(1, lgc.train_steps // 10)
    late = ops.where(number > begins, state.late, 0.0)
    late = ops.where(number >= begins, late + share, 0.0)
    encoder, decoder = networks
    return state._replace(encoder=encoder, decoder=decoder, moments=moments, late=late, loss=share)


def _by_adam(
    lgc: LGCSettings,
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
        better.append(parameters + ops.reshape(away, tuple(parameters.shape)) * -lgc.ae_lr)
        kept.append(ops.stack((mean, square)))
    return tuple(better), Moments(kept[0], kept[1], ones)


def distribute(
    lgc: LGCSettings, ops: Ops, context: Context, state: LGCState
) -> Generator[Any, Any, LGCState]:
    """End the training: decide if it converged, and distribute the parameters."""
    window = max(1, lgc.train_steps // 10)
    late = ops.reshape(state.late, (1,)) * (1.0 / window)
    heads = tuple(state.decoder.shape)
    flat = ops.reshape(state.decoder, (-1,))
    if lgc.by_server:
        late = yield Broadcast(late, lgc.master)
        common, here = lgc.common(context.size), context.rank == lgc.master
        if common != lgc.master:
            size = autoencoder.ENCODER_SIZE
            lengths = tuple(size * (r == lgc.master) for r in range(context.size))
            encoder = state.encoder if here else state.encoder[:0]
            received = yield Gather(encoder, common, lengths)
            if context.rank == common:
                state = state._replace(encoder=received)
    else:
        everything = yield Broadcast(ops.concat((late, state.encoder, flat)), lgc.master)
        late, end = everything[:1], 1 + autoencoder.ENCODER_SIZE
        decoder = ops.reshape(everything[end:] * 1, heads)
        state = state._replace(encoder=everything[1:end] * 1, decoder=decoder)
    converged = ops.reshape(ops.cast(late <= CONVERGED, "int64"), ())
    late = ops.reshape(late, ()) * 1.0
    state = state._replace(ready=ops.stage(converged), loss=late, seen=state.seen * 0.0)
    return state._replace(asked=state.asked * 0.0) if lgc.by_server else state


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


def update_drift(lgc: LGCSettings, ops: Ops, state: LGCState) -> LGCState:
    """Return the state with `drifted` set if the loss calls for another training."""
    if lgc.retrain_loss is None:
        return state
    drifted = ops.stage(ops.cast(state.loss > lgc.retrain_loss, "int64"))
    return state._replace(drifted=drifted)


def server_loss(lgc: LGCSettings, ops: Ops, context: Context, bodies: Tensor) -> Any:
    """Return losses (5) to (7) of all workers' vectors, at the common rank's indices."""
    layout, ranks = context.layout, context.size
    payload = wire.unpack_body(ops, lgc.parts(layout), bodies)
    capacity = lgc.capacity(layout)
    payload["values"] = ops.reshape(payload["values"], (ranks, capacity))
    sent = vectors.sent_by_ranks(lgc, ops, layout, payload, capacity)
    common = lgc.common(ranks)
    places = ops.concat([index for index, _ in sent])[common * capacity : (common + 1) * capacity]
    places = ops.reshape(places, (capacity,))
    found, channels = [], []
    for index, own in sent:
        found.append(vectors.at(ops, index, own, places))
        innovation = vectors.innovation(lgc, ops, layout, index, own)
        channels.append(vectors.at(ops, *innovation, places))
    own = ops.reshape(ops.concat(found)[common * capacity : (common + 1) * capacity], (capacity,))
    unit = vectors.unit(lgc, ops, layout, places, vectors.measure(lgc, ops, layout, places, own))
    x = ops.stack([vectors.to_units(ops, vector, unit) for vector in found])
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
        return rec * lgc.lambda_rec + sim * lgc.lambda_sim, rec, energy

    return loss


def ring_loss(
    lgc: LGCSettings, ops: Ops, context: Context, leader: Any, index: Tensor, sent: Tensor
) -> Any:
    """Return loss (11) of the ranks' values, [ranks, selected]."""
    layout, (ranks, count) = context.layout, sent.shape
    own = ops.reshape(sent, (-1,))[leader * count : (leader + 1) * count]
    own = ops.reshape(own, (count,))
    unit = vectors.unit(lgc, ops, layout, index, vectors.measure(lgc, ops, layout, index, own))
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


def _clipped(ops: Ops, gradient: Tensor) -> Tensor:
    """Clip the gradient of each network, an encoder or a head, to norm `_CLIP`."""
    rows = ops.reshape(gradient, (-1, gradient.shape[-1]))
    norm = ops.reshape(ops.sqrt(ops.sum(rows * rows, -1)), (-1, 1))
    rows = rows * (_CLIP / ops.maximum(norm, _CLIP))
    return ops.reshape(rows, tuple(gradient.shape))
