"""The training of the autoencoder, on one rank, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_gradcomp import exchanges, wire
from hvd_gradcomp.aggregator import Context, Program
from hvd_gradcomp.algorithms.lgc import vectors
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.collectives import Broadcast, Gather
from hvd_gradcomp.ops import Ops, Tensor

if TYPE_CHECKING:
    from hvd_gradcomp.algorithms.lgc.settings import LGCSettings

CONVERGED = 0.95  # of the energy; more is lost by an autoencoder that has learned nothing
_CLIP = 10.0  # norm of a network's gradient


def learned(lgc: LGCSettings, ops: Ops, state: Any, elapsed: Any, loss: Any) -> Any:
    """One step of gradient descent."""
    (_, rec, energy), gradients = ops.value_and_grad(loss, (state.encoder, state.decoder))
    encoder, decoder = (
        parameters + _clipped(ops, gradient) * -lgc.ae_lr
        for parameters, gradient in zip((state.encoder, state.decoder), gradients)
    )
    share = ops.where(energy > 0, rec / ops.where(energy > 0, energy, 1.0), 1.0)
    begins = lgc.train_steps - max(1, lgc.train_steps // 10)
    number = ops.reshape(ops.words((elapsed,)), ())
    late = ops.where(number > begins, state.late, 0.0)
    late = ops.where(number >= begins, late + share, 0.0)
    return state._replace(encoder=encoder, decoder=decoder, late=late, loss=share)


def handed_out(lgc: LGCSettings, ops: Ops, context: Context, state: Any) -> Program:
    """The end of the training: whether it succeeded, and the parameters for who needs them."""
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
            mine = state.encoder if here else state.encoder[:0]
            given = yield Gather(mine, common, lengths)
            if context.rank == common:
                state = state._replace(encoder=given)
    else:
        everything = yield Broadcast(ops.concat((late, state.encoder, flat)), lgc.master)
        late, end = everything[:1], 1 + autoencoder.ENCODER_SIZE
        decoder = ops.reshape(everything[end:] * 1, heads)
        state = state._replace(encoder=everything[1:end] * 1, decoder=decoder)
    converged = ops.reshape(ops.cast(late <= CONVERGED, "int64"), ())
    late = ops.reshape(late, ()) * 1.0
    return state._replace(ready=ops.stage(converged), loss=late, local=late * 1.0)


def watched(lgc: LGCSettings, ops: Ops, state: Any, loss: Tensor) -> Any:
    """The state with the ranks' mean loss, which may ask for another training."""
    loss = ops.reshape(loss, ()) * 1.0
    if lgc.retrain_loss is None:
        return state._replace(loss=loss)
    drifted = ops.stage(ops.cast(loss > lgc.retrain_loss, "int64"))
    return state._replace(loss=loss, drifted=drifted)


def server_loss(lgc: LGCSettings, ops: Ops, context: Context, bodies: Tensor) -> Any:
    """Losses (5) to (7) on what all workers sent, at the places of one of them."""
    layout, ranks = context.layout, context.size
    payload = wire.unpack_body(ops, lgc.parts(layout), bodies)
    capacity = lgc.capacity(layout)
    values = ops.reshape(payload.pop("values"), (ranks, capacity))
    sent = []
    for rank in range(ranks):
        mine = {name: part[rank] for name, part in payload.items()}
        index = lgc.coding.decode(ops, layout, mine, capacity)
        sent.append(vectors.in_order(ops, index, values[rank]))
    common = exchanges.drawn(context.step, lgc.seed + 1, ranks)
    places = ops.concat([index for index, _ in sent])[common * capacity : (common + 1) * capacity]
    places = ops.reshape(places, (capacity,))
    found, channels = [], []
    for index, own in sent:
        strong = vectors.strongest(ops, own, lgc.innovations(layout))
        found.append(vectors.at(ops, index, own, places))
        innovation = ops.gather(index, strong), ops.gather(own, strong)
        channels.append(vectors.at(ops, *innovation, places))
    own = ops.concat(found)[common * capacity : (common + 1) * capacity]
    scale = vectors.rms(ops, ops.reshape(own, (capacity,)), capacity)
    x = ops.stack([vectors.scaled(ops, vector, scale) for vector in found])
    innovation = ops.stack([vectors.scaled(ops, channel, scale) for channel in channels])
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


def ring_loss(ops: Ops, sent: Tensor, scale: Tensor) -> Any:
    """Loss (11)."""
    ranks = sent.shape[0]
    x = ops.stack([vectors.scaled(ops, sent[rank], scale) for rank in range(ranks)])
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
    """The gradient of each network, an encoder or a head, no longer than `_CLIP`."""
    rows = ops.reshape(gradient, (-1, gradient.shape[-1]))
    norm = ops.reshape(ops.sqrt(ops.sum(rows * rows, -1)), (-1, 1))
    rows = rows * (_CLIP / ops.maximum(norm, _CLIP))
    return ops.reshape(rows, tuple(gradient.shape))
