"""Helpers for tests of kernels: the reference ops beside them, and the comparison to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops.native import library
from hvd_gradcomp.testing import World

torch = pytest.importorskip("torch")
TorchOps = pytest.importorskip("hvd_gradcomp.ops.torch").TorchOps
NATIVE = pytest.mark.skipif(library() is None, reason="without the C library")


def reference_ops() -> TorchOps:
    ops = TorchOps()
    ops.threshold_kernels = ops.topk_kernels = None
    return ops


def layout_of(*sizes: int) -> Layout:
    return Layout(tuple(f"layer{i}" for i in range(len(sizes))), tuple((n,) for n in sizes))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_alike(fused: World, reference: World) -> None:
    """The states of all ranks, and what they sent in the last step."""
    for one, other in zip(fused.states, reference.states):
        for (name, x), (_, y) in zip(leaves(one), leaves(other)):
            assert torch.equal(x, y), name
    for ours, theirs in zip(fused.traffic, reference.traffic):
        assert all(map(torch.equal, (r.tensor for r in ours), (r.tensor for r in theirs)))
