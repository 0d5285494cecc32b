"""What is damaged or foreign on the wire ends in an exception on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import PayloadError, StromCompressor, VarianceCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import wire
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.kernels import NATIVE

LAYOUT = Layout(("a", "b"), ((50,), (9,)))


def world_with(tamper, ops=None):
    return World(StromCompressor(tau=0.5), ops or TorchOps(), LAYOUT, 3, tamper=tamper)


def damaged(byte, bit):
    def tamper(rank, request):
        if rank != 1:
            return request
        tensor = request.tensor.clone()
        tensor[byte % tensor.numel()] ^= 1 << bit
        return request._replace(tensor=tensor)

    return tamper


@given(byte=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_every_flipped_bit_is_found(byte, bit):
    world = world_with(damaged(byte, bit))
    with pytest.raises(PayloadError, match="rank 1 "):
        world.step([torch.ones(LAYOUT.size) for _ in range(3)])


@NATIVE
@pytest.mark.parametrize("size", [28, 30, 33, 0])
def test_what_is_no_frame_is_an_error(size):
    """C would read beyond its end."""
    header = wire.Header(1, 2, 3, 0, 4, 4)
    with pytest.raises(PayloadError, match=f"has {size} bytes"):
        wire.examine(TorchOps(), header, torch.zeros(2, size, dtype=torch.uint8))


def test_tensorflow_finds_it_as_well():
    import tensorflow as tf

    def tamper(rank, request):
        if rank != 1:
            return request
        data = request.tensor.numpy()
        data[40] ^= 1
        return request._replace(tensor=tf.constant(data))

    world = world_with(tamper, TensorFlowOps())
    with pytest.raises(PayloadError, match="rank 1 sent a damaged payload"):
        world.step([tf.ones(LAYOUT.size) for _ in range(3)])


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (0, 0, "no hvd_gradcomp payload"),
        (1, 99, "another wire format version"),
        (3, 77, "another algorithm"),
        (5, 1, "another model or other hyper-parameters"),
        (8, 9, "another step"),
        (12, 3, "another payload size"),
    ],
)
def test_a_foreign_header_is_named(byte, value, message):
    """With a checksum that is right, so that the header itself is what is judged."""

    def tamper(rank, request):
        if rank != 2:
            return request
        tensor = request.tensor.clone()
        old = int(tensor[byte])
        tensor[byte] = value if old != value else value + 1
        words = tensor.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        weights = torch.cat((torch.arange(7) * 2 + 1, torch.arange(len(words) - 8) * 2 + 17))
        checksum = int((torch.cat((words[:7], words[8:])) * weights).sum()) % 2**32
        signed = checksum - 2**32 if checksum >= 2**31 else checksum
        tensor[28:32] = torch.tensor([signed], dtype=torch.int32).view(torch.uint8)
        return request._replace(tensor=tensor)

    with pytest.raises(PayloadError, match=f"rank 2 .*{message}"):
        world_with(tamper).step([torch.ones(LAYOUT.size) for _ in range(3)])


def test_other_hyper_parameters_on_one_rank():
    ops = TorchOps()
    strange = World(StromCompressor(tau=0.25), ops, LAYOUT, 1)
    strange.step([torch.ones(LAYOUT.size)])
    foreign = strange.traffic[0][0]
    world = world_with(lambda rank, request: foreign if rank == 0 else request)
    with pytest.raises(PayloadError, match="rank 0 has another model or other hyper-parameters"):
        world.step([torch.ones(LAYOUT.size) for _ in range(3)])


def test_a_graph_stops_before_anything_is_assigned():
    import tensorflow as tf

    from hvd_gradcomp.method.compressor import Context

    compressor, ops = VarianceCompressor(alpha=0.5), TensorFlowOps()
    state = compressor.init(ops, LAYOUT)
    changed = tf.Variable(0)

    @tf.function(autograph=False)
    def step(flip):
        context = Context(LAYOUT, 0, 1, tf.constant(0, tf.int64))
        program = compressor.aggregate(ops, context, tf.ones(LAYOUT.size), state)
        buffer = next(program).tensor
        buffer = tf.concat((buffer[:36], buffer[36:37] ^ flip, buffer[37:]), 0)
        try:
            program.send(buffer[None])
        except StopIteration as stop:
            changed.assign_add(tf.cast(stop.value[0][0] * 0, tf.int32) + 1)
            return stop.value[0]

    step(tf.constant([0], tf.uint8))
    assert int(changed) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="damaged payload"):
        step(tf.constant([4], tf.uint8))
    assert int(changed) == 1
