"""What surrounds a launch: the device, memory, and whether a GPU can take kernels at all."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton

from benchmarks.traffic import METHODS, WithoutData
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops.torch import TorchOps, base
from hvd_gradcomp.ops.triton import common
from tests.triton.gradients import on

LAYOUT = Layout(("a", "b", "c"), ((300, 512), (), (20_000,)))
PASSES = (
    *("frame", "check_finite", "checked_sides", "write", "group_maxima", "group_norms"),
    *("clipped_maxima", "encode_levels", "encode_signs", "encode_words", "decode_words"),
)


def test_the_gpu_of_the_tensors_is_current(monkeypatch, device):
    """Triton takes the current one, and a process may have several."""
    context = common.made_current(torch.device("cuda", 1))
    assert isinstance(context, torch.cuda.device) and context.idx == 1
    if device != "cpu":
        return
    seen = []

    @contextlib.contextmanager
    def noted(current):
        seen.append(current)
        yield
        seen.append("left")

    monkeypatch.setattr(common, "made_current", noted)
    on(device, True).check_finite(torch.zeros(5, device=device), "elements")
    assert seen == [torch.device("cpu"), "left"]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_memory_is_asked_for_before_anything_is_launched(name, dense, monkeypatch):
    """Without memory a step fails as a whole: what later steps take for zeros is zeros."""
    ops, passes, launched = WithoutData(kernels=True), [], []

    def begun(function):
        def noted(*args, **kwargs):
            launched.clear()
            passes.append(function.__name__)
            return function(*args, **kwargs)

        return noted

    def launching(*args, **kwargs):
        launched.append(args[0])

    def asking(function):
        def noted(*args, **kwargs):
            assert not launched, (passes[-1], args)
            return function(*args, **kwargs)

        return noted

    families = ops.kernels, ops.threshold_kernels, ops.topk_kernels, ops.quantizers
    for family in (*families, ops.word_kernels):
        monkeypatch.setattr(family, "launch", launching)
        for what in ("scratch", "clean", "empty", "table"):
            monkeypatch.setattr(family, what, asking(getattr(family, what)))
        for what in PASSES:
            if hasattr(family, what):
                monkeypatch.setattr(family, what, begun(getattr(family, what)))
                if what in vars(ops):
                    monkeypatch.setattr(ops, what, getattr(family, what))
    compressor = METHODS[name][0]
    layout = Layout(LAYOUT.names, LAYOUT.shapes, block=compressor.block)
    state = compressor.init(ops, layout)
    if dense and hasattr(state, "capacity"):
        schedule = compressor.capacity_schedule(layout, 2)
        numbers = {"level": ops.host(schedule.top), "needed": ops.host(schedule.capacities[-1] + 1)}
        state = state._replace(capacity=state.capacity._replace(**numbers))
    gradient = ops.zeros((layout.size,))
    next(compressor.aggregate(ops, Context(layout, 0, 2, 1, 1.0, 0.5), gradient, state))
    assert passes


@pytest.mark.parametrize("tile", [2048, 4096])
@pytest.mark.parametrize("size", [1, 4096, 4097, common.MOST - 1, common.MOST])
def test_no_index_passes_32_bits(size, tile):
    """The last piece may reach beyond the bucket, and its numbers must not wrap."""
    pieces, tiles = common.cut(size, tile)
    assert size <= pieces * tiles * tile <= 1 << 31
    assert pieces <= common.PIECES


def test_a_bucket_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="take smaller buckets"):
        common.cut(common.MOST + 1, 2048)


@pytest.mark.parametrize(
    "change, reason",
    [
        ("capability", "compute capability 8.0"),
        ("triton", "Triton 3.6"),
        ("maker", "NVIDIA"),
        ("compiler", "Failed to find C compiler"),
        ("nothing", ""),
    ],
)
def test_a_gpu_without_what_kernels_need_takes_verbs(change, reason, monkeypatch, caplog):
    """It says so once, and trains."""

    def check_finite(passes, x, how):
        if change == "compiler":
            raise RuntimeError("Failed to find C compiler. Please specify via CC")

    capability = (7, 5) if change == "capability" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", None if change == "maker" else "13.0")
    monkeypatch.setattr(triton, "__version__", "3.5.1" if change == "triton" else "3.10.0")
    monkeypatch.setattr(common.Common, "check_finite", check_finite)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: None)  # of any default dtype
    base._triton_runs.cache_clear()
    for _ in range(2):
        ops = TorchOps("cuda:0")
        assert (ops.kernels is None) == bool(reason) == (ops.threshold_kernels is None)
    base._triton_runs.cache_clear()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(reason)
    assert all("cuda:0" in message and reason in message for message in messages)
