"""What holds on a GPU: no host read in encode and decode, one collective, few launches."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_gradcomp.core.collectives import Allgather, Switch
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.torch import TorchOps
from tests.methods import EVERY, LARGEST, LEARNED, WORDS, encode_step
from tests.single.older import without_data

SPARSE = WORDS + [c for c in LARGEST if not getattr(c, "phases", ())]

LAYOUT = Layout(("a", "b", "c"), ((100, 30), (30,), (500,)))
HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.unique")


class Operators(TorchDispatchMode):
    """The operators that reach the framework."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        on_host = all(x.dim() == 0 for x in args if isinstance(x, torch.Tensor)) and isinstance(
            out, (int, float)
        )
        if not on_host:  # levels and counters live on the host anyway
            self.names.append(str(func))
        return out


def run_step(compressor, ops, state, step):
    gradient = torch.randn(LAYOUT.size, device=ops.device)
    program = compressor.aggregate(ops, Context(LAYOUT, 0, 2, step, 1.0, 0.5), gradient, state)
    with guarded(ops):
        request = next(program)
    reply = torch.stack((request.tensor, request.tensor))
    with guarded(ops):
        try:
            program.send(reply)
        except StopIteration as stop:
            return stop.value[1]
    raise AssertionError("more than one collective for a bucket and step")


@contextlib.contextmanager
def guarded(ops):
    if ops.device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compressor", SPARSE, ids=repr)
def test_no_host_read_and_one_collective(compressor, device):
    """On CUDA by its own check; on a CPU the same plain ops are watched for operators that read."""
    ops = TorchOps(device, static=True)
    state = compressor.init(ops, LAYOUT)
    for name in ("layer_of_block",):
        ops.table(LAYOUT, name)
    state = run_step(compressor, ops, state, 0)
    with Operators() as seen:
        for step in range(1, 4):
            state = run_step(compressor, ops, state, step)
    if device == "cpu":  # `require` and the header's int() read on a CPU, where reading is free
        allowed = {"aten._local_scalar_dense.default", "aten.item.default"}
        reading = {n for n in seen.names if n.startswith(HOST_READS)} - allowed
        assert not reading


def test_denormals_are_added(device):
    """An atomic addition on a GPU takes them for zeros."""
    ops, small = TorchOps(device), torch.full((3,), 1e-41, device=device)
    added = ops.add_at(torch.full((4,), 2e-41, device=device), ops.arange(3), small)
    sums = torch.full((4,), 2e-41) + torch.tensor([1e-41, 1e-41, 1e-41, 0.0])
    assert added.tolist() == sums.tolist()


class WithoutData(TorchOps):
    """The plain ops as on a GPU, with tensors that have a shape and nothing else.

    So a read of one is an error, in C++ too. What pinned memory carries there has values here.
    """

    def __init__(self):
        super().__init__("meta")

    def from_host(self, values, dtype):
        return torch.empty(len(values), dtype=dtype, device=self.device)

    def stage(self, x):
        return torch.ones(x.shape, dtype=x.dtype)


class NoCopies(TorchDispatchMode):
    """Refuses copies between host and device: all are from memory that is not pinned."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        if "copy" in str(func) and len({x.device for x in tensors}) > 1:
            raise AssertionError(f"{func} between host and device")
        return out


def run_without_data(compressor, ops, layout, state, step):
    """A whole step; the other of two ranks does the same."""
    gradient, context = ops.zeros((layout.size,)), Context(layout, 0, 2, step, 1.0, 0.5)
    extra = {"moment": ops.zeros((layout.size,))} if compressor.uses_moments else {}
    programs, reply = [compressor.aggregate(ops, context, gradient, state, **extra)], None
    while programs:
        try:
            request = programs[-1].send(reply)
        except StopIteration as stop:
            programs.pop()
            reply = stop.value
            continue
        if isinstance(request, Switch):
            programs.append(request.branches[int(request.index)]())
            reply = None
        elif isinstance(request, Allgather):
            reply = torch.stack((request.tensor, request.tensor))
        else:
            reply = request.tensor.clone()
    return reply[1]


@without_data
@pytest.mark.parametrize("compressor", EVERY + LEARNED, ids=repr)
def test_no_step_of_any_method_reads_the_device(compressor):
    """In each phase."""
    ops, layout = WithoutData(), Layout(LAYOUT.names, LAYOUT.shapes, block=compressor.block)
    state = compressor.start(ops, layout, 2)
    state = run_without_data(compressor, ops, layout, state, 0)  # makes tables
    with NoCopies():
        for step in (1, 2, 3, 25, 45, 65, 95, 130, 131):
            state = run_without_data(compressor, ops, layout, state, step)


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
def test_calls_do_not_grow_with_layers(compressor):
    """Launches a bucket: the same for 3 layers and for 60."""
    counts = []
    for layers in (3, 60):
        layout = Layout(tuple(f"l{i}" for i in range(layers)), ((50,),) * layers)
        ops = TorchOps(static=True)
        state = compressor.init(ops, layout)
        gradient = torch.randn(layout.size)
        level, _ = compressor.capacity_schedule(layout).next_level(ops, state.capacity)
        encode_step(compressor, ops, layout, level, 0, gradient.clone(), state)
        with Operators() as seen:
            encode_step(compressor, ops, layout, level, 0, gradient, state)
        counts.append(len(seen.names))
    limit = 150 if compressor.index_coding == "int32" else 225
    assert abs(counts[0] - counts[1]) <= 1 < counts[0] < limit  # one pads the exponents to words


def test_buckets_on_several_streams_take_turns(monkeypatch):
    """What they share, such as room for flags, would be written to by two streams at once."""
    waits = []

    class Stream:
        def wait_stream(self, other):
            waits.append((self, other))

    one, other = Stream(), Stream()
    ops = TorchOps("cuda:0", kernels=False)
    for here in (one, one, other, other, one):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, here=here: here)
        ops.take_turn()
    assert waits == [(other, one), (one, other)]
    TorchOps("cpu").take_turn()  # has no streams
