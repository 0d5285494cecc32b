"""A step of a bucket and the host: what a CUDA graph can hold, and how much is left beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.traffic import LAUNCHES, METHODS, Step, WithoutData, buckets, counted, most_launches
from hvd_gradcomp import (
    DGCCompressor,
    GradientDroppingCompressor,
    HybridCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.codecs.quantized import Accumulator, QuantizedCompressor
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.codecs.topk import TopKCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Context, leaves
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from tests.methods import encode_step
from tests.triton.gradients import on

SHAPES = (("a", "b", "c"), ((40, 45), (3,), (1500,)))
FAMILIES = (ThresholdCompressor, TopKCompressor, QuantizedCompressor)
HAVE_KERNELS = [name for name, (one, *_) in METHODS.items() if isinstance(one, FAMILIES)]
CODECS = [
    VarianceCompressor(alpha=0.5),
    VarianceCompressor(alpha=1.5, zeta=0.9, feedback_rounding=True),
    HybridCompressor(tau=0.5),
    StromCompressor(tau=0.7),
    QSGDCompressor(),
    QSGDCompressor(norm="l2"),
    TernGradCompressor(),
    OneBitCompressor(),
    SparseGDCompressor(density=0.01),
    DGCCompressor(density=0.01, momentum=0.9),
    GradientDroppingCompressor(ratio=0.99, index_coding="int32"),
]


class Codec:
    """A step of one of two ranks but what the host is told: `validate_headers`, adding top-k.

    The other rank sends the same. Both are at step 0 always: a graph has it in it.
    """

    def __init__(self, compressor, ops, dense=False):
        self.compressor, self.ops = compressor, ops
        self.layout = Layout(*SHAPES, block=compressor.block)
        self.context = Context(self.layout, 0, 2, 0, 1.0, 0.5)
        self.level = CapacityLevel(0, 200, dense)
        self.gradient = ops.zeros((self.layout.size,))
        self.state = compressor.init(ops, self.layout)
        self.weights = ops.full((2,), 0.5, "float32")

    def __call__(self):
        """What travels, and the sum where there is one."""
        one = self.quantized if isinstance(self.compressor, QuantizedCompressor) else self.words
        return one()

    def words(self):
        ops, codec, layout, level = self.ops, self.compressor, self.layout, self.level
        finite, gradient = patterns.check_storable(ops, self.gradient)
        encoded, state = encode_step(codec, ops, layout, level, 0, gradient, self.state)
        self.state = state._replace(sent=self.state.sent)  # would be a tensor of the graph
        header = patterns.header_of(codec, self.context, finite)
        header = header._replace(sent=encoded.sent, wanted=encoded.wanted)
        buffer = wire.pack(ops, header, encoded.body)
        bodies = wire.bodies_of(self.gathered(buffer))
        encoded.commit()
        if isinstance(codec, TopKCompressor):
            return (buffer,)
        total = codec.decode_sum(ops, layout, Payloads(level, bodies, self.weights), gradient)
        return buffer, total

    def quantized(self):
        ops, codec, layout = self.ops, self.compressor, self.layout
        row_groups, parts = codec.row_groups(layout), codec.parts(layout)
        finite, gradient = patterns.check_finite(ops, self.gradient)
        x = codec.collect(ops, gradient, self.state)
        encoded = codec.encode(ops, row_groups, x, ops.key(0, 7))
        body = wire.pack_pieces(ops, parts, encoded)
        buffer = wire.pack(ops, patterns.header_of(codec, self.context, finite), *body)
        bodies = wire.bodies_of(self.gathered(buffer))
        self.state = codec.update_state(ops, row_groups, x, encoded, self.state)
        payload = wire.unpack_body(ops, parts, bodies)
        total = codec.add_decoded(
            ops, row_groups, payload, Accumulator(None, gradient, self.weights)
        )
        return buffer, total

    def gathered(self, buffer):
        return torch.stack([buffer, buffer])

    def drawn(self, generator):
        """A gradient; padding is zero."""
        flat = torch.zeros(self.layout.size)
        for offset, size in zip(self.layout.offsets, self.layout.sizes):
            flat[offset : offset + size] = torch.randn(size, generator=generator)
        return flat


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("compressor", CODECS, ids=repr)
def test_what_is_captured_asks_the_host_nothing(compressor, dense):
    """By tensors that have no data: reading one is an error."""
    codec = Codec(compressor, WithoutData(kernels=True), dense)
    codec()  # makes tables
    with counted(codec.ops) as seen:
        codec()
    others = {name for name, _ in seen.listed} - {launch.kernel.__name__ for launch in seen.kernels}
    stand_in, errors, code = "stack", "add", "zeros"  # r + g of 1-bit SGD; Elias-Fano's code
    assert others <= {stand_in, errors, code}


class NoCopies(TorchDispatchMode):
    """Refuses copies between host and device, which wait, but for those of pinned memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        assert "copy" not in str(func) or len({x.device for x in tensors}) == 1, func
        return out


@pytest.mark.parametrize("name", HAVE_KERNELS)
def test_the_first_step_waits_for_nothing_either(name):
    """Tables come from pinned memory, which `from_host` and `stage` stand for here."""
    compressor = METHODS[name][0]
    with NoCopies():
        Step(compressor, Layout(*SHAPES, block=compressor.block), kernels=True)


@pytest.mark.parametrize("index_coding", ["elias_fano", "int32"])
@pytest.mark.parametrize("name", HAVE_KERNELS)
def test_a_step_is_few_launches_and_waits_for_nothing(name, index_coding):
    """Of ResNet-50's buckets; and in the steady state kernels take no memory that they keep."""
    compressor = METHODS[name][0]
    if hasattr(compressor, "index_coding"):
        compressor = replace(compressor, index_coding=index_coding)
    for layout in buckets(compressor):
        step = Step(compressor, layout, kernels=True)
        others = step.ops.threshold_kernels, step.ops.topk_kernels, step.ops.quantizers
        passes = [step.ops.kernels, *others]
        kept = [set(each._memory) for each in passes]
        step.take()
        launched = [launch for part in step.listed for launch, _ in part]
        assert len(launched) <= most_launches(compressor), launched
        largest = isinstance(compressor, TopKCompressor)  # adding looks at what comes of it
        codes = most_launches(compressor) > LAUNCHES  # what comes of the check of indices
        assert launched.count("to the host") == 1 + largest + codes
        assert launched.count("from the host") == 0
        assert kept == [set(each._memory) for each in passes]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("compressor", CODECS, ids=repr)
def test_a_captured_step_is_the_step(compressor, dense, device):
    """To the bit, for three steps: what travels, the sum and the state."""
    if device != "cuda":
        pytest.skip("needs --device cuda")
    ours, theirs = (Codec(compressor, on(device, True), dense) for _ in (0, 1))
    memory = [x for name, x in leaves(ours.state) if x.is_cuda and x.is_floating_point()]
    fresh = [x.clone() for x in memory]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):  # compiles kernels, makes tables and rooms
            ours()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours()
    for x, before in zip(memory, fresh):
        x.copy_(before)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradient = ours.drawn(generator)
        ours.gradient.copy_(gradient)
        theirs.gradient.copy_(gradient)
        graph.replay()
        for one, other in zip(captured, theirs()):
            assert torch.equal(one, other)
        now = [x for _, x in leaves(theirs.state) if x.is_cuda and x.is_floating_point()]
        assert all(map(torch.equal, memory, now))
