"""One payload of each method, decoded by itself."""

from __future__ import annotations

import pytest
import tensorflow as tf
import torch

from hvd_gradcomp import QSGDCompressor, SparseGDCompressor, VarianceCompressor
from hvd_gradcomp.core.collectives import Allgather, Allreduce
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.errors import PayloadError
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import EVERY, LARGEST, LINEAR, QSGD, TERNGRAD, WORDS

SHAPES = ((30, 20), (20,))


def world_of(compressor, ops, tamper=None) -> World:
    layout = Layout(("weight", "bias"), SHAPES, block=compressor.block)
    return World(compressor, ops, layout, 2, tamper=tamper)


def step(world: World) -> torch.Tensor:
    """Make a step with other gradients on each rank; return the mean."""
    generator = torch.Generator().manual_seed(1)
    drawn = [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(world.size)]
    moments = [[torch.rand(s, generator=generator) for s in SHAPES] for _ in range(world.size)]
    extra = {}
    if world.compressor.uses_moments:
        extra["moment"] = [world.flat(m) for m in moments]
    return world.step([world.flat(g) for g in drawn], **extra)[0]


def payloads(world: World) -> list[torch.Tensor]:
    (requests,) = world.traffic
    return [request.tensor.clone() for request in requests]


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_a_payload_that_all_ranks_send_is_their_mean(compressor):
    """Or the method says that one payload alone means nothing."""
    ops, first = TorchOps(), []

    def tamper(rank, request):
        first.extend([request] if rank == 0 else [])
        return first[-1]

    plain = world_of(compressor, ops)
    step(plain)
    sent = plain.traffic[0][0]
    whole = len(plain.traffic) == 1 and isinstance(sent, (Allgather, Allreduce))
    if not whole:
        with pytest.raises(ValueError, match="cannot be decoded alone"):
            compressor.decode(ops, plain.layout, getattr(sent, "tensor", None))
        return
    expected = step(world_of(compressor, ops, tamper))
    decoded = compressor.decode(ops, plain.layout, payloads(plain)[0])
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("compressor", [*LINEAR, *WORDS, *LARGEST, QSGD, TERNGRAD], ids=repr)
def test_the_mean_is_that_of_the_decoded_payloads(compressor):
    world = world_of(compressor, TorchOps())
    total = step(world)
    decoded = [compressor.decode(world.ops, world.layout, p) for p in payloads(world)]
    assert torch.allclose(sum(decoded) / 2, total, atol=1e-3 if compressor in LINEAR else 1e-6)


def test_tensorflow_decodes_what_pytorch_does():
    compressor = VarianceCompressor(alpha=0.5)
    world = world_of(compressor, TorchOps())
    step(world)
    payload = payloads(world)[0]
    ours = compressor.decode(TensorFlowOps(), world.layout, tf.constant(payload.numpy()))
    assert ours.numpy().any()
    assert ours.numpy().tolist() == compressor.decode(world.ops, world.layout, payload).tolist()


def test_a_later_payload_takes_its_step():
    """And a payload of another method, or a damaged one, is an error."""
    compressor = QSGDCompressor(exchange="allgather")
    world = world_of(compressor, TorchOps())
    for _ in range(3):
        step(world)
    payload = payloads(world)[0]
    assert compressor.decode(world.ops, world.layout, payload, step=2).any()
    with pytest.raises(PayloadError):
        compressor.decode(world.ops, world.layout, payload)
    with pytest.raises(PayloadError):
        SparseGDCompressor().decode(world.ops, world.layout, payload, step=2)
    payload[4] ^= 1
    with pytest.raises(PayloadError):
        compressor.decode(world.ops, world.layout, payload, step=2)
