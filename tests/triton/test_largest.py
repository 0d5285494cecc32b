"""Kernels of the top-k family against the plain ops, to the bit; see `make triton`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    LGCCompressor,
    SparseGDCompressor,
)
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.method.wire import HEADER_BYTES
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from tests.kernels import layout_of
from tests.methods import LARGEST, encode_step
from tests.triton.gradients import assert_step_alike, drawn, on, worlds

METHODS = [
    *LARGEST,
    SparseGDCompressor(density=1.0),
    DGCCompressor(density=0.01, momentum=0.9, masking=False),
    GradientDroppingCompressor(ratio=0.99, index_coding="int32"),
]
SOME = settings(deadline=None, derandomize=True, phases=[Phase.generate])
ONE_EACH = [
    SparseGDCompressor(density=0.01),
    SparseGDCompressor(density=0.1, index_coding="int32"),
    DGCCompressor(density=0.05, momentum=0.9),
    GradientDroppingCompressor(ratio=0.9),
]


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 255, 256, 700, 2500]), max_size=3).filter(any),
    seed=st.integers(0, 2**16),
    ranks=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(["noise", "ties", "equal", "heavy"]), min_size=2, max_size=2),
    scales=st.lists(st.sampled_from([0.0, 1e-41, 1e-3, 1e6]), min_size=2, max_size=2),
    share=st.sampled_from([0.002, 1.0]),
    first=st.sampled_from([0, 1, 1000, 1 << 33]),
)
@settings(SOME, max_examples=3)
def test_kernels_do_what_the_verbs_do(
    compressor, sizes, seed, ranks, kinds, scales, share, first, device
):
    """Ties in their turn, groups with too few elements, denormals."""
    ours, theirs = worlds(compressor, layout_of(*sizes), ranks, device)
    ours.steps = theirs.steps = first
    for step, (kind, scale) in enumerate(zip(kinds, scales)):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        assert_step_alike(ours, theirs, drawn(generator, ours, scale, share, kind))


@pytest.mark.parametrize("pattern", ["ring_allreduce", "parameter_server"])
def test_lgc_finds_the_same(pattern, device):
    """It takes their choice, and learns by plain ops."""
    lgc = LGCCompressor(pattern, alpha=0.05, full_steps=1, train_steps=1, momentum=0.9)
    ours, theirs = worlds(lgc, layout_of(700, 300), 2, device)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradients = drawn(generator, ours, 1.0, 1.0)
        assert all(map(torch.equal, ours.step(gradients), theirs.step(gradients)))


@pytest.mark.parametrize("compressor", [ONE_EACH[2], ONE_EACH[3]], ids=repr)
def test_tasks_cut_a_large_bucket_alike(compressor, device):
    """More tasks of a layer than are gathered at once, and bodies of more than one tile."""
    ours, theirs = worlds(compressor, layout_of(140_000, 100, 3_001), 1, device)
    for step, kind in enumerate(["noise", "ties"]):
        generator = torch.Generator().manual_seed(step)
        assert_step_alike(ours, theirs, drawn(generator, ours, 1.0, 1.0, kind))


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
def test_signs_and_what_is_not_finite_in_the_memory(compressor, device):
    """Magnitudes are compared as bits, those of infinities and NaN too; zeros are not sent."""
    layout = layout_of(300, 700)
    generator, bodies = torch.Generator().manual_seed(1), []
    x = torch.randint(-(1 << 31), 1 << 31, (layout.size,), generator=generator).to(torch.int32)
    r = x.view(torch.float32)
    r[::3] = -0.0
    r[5], r[6], r[700] = float("inf"), float("-inf"), float("nan")
    r[r.isnan()] = float("nan")
    r[300:512] = r[1212:] = 0.0
    for kernels in (True, False):
        ops = on(device, kernels)
        state = compressor.init(ops, layout)
        memory = state.memory._replace(r=r.clone().to(device))
        level = compressor.capacity_schedule(layout).next_level(ops, state.capacity)[0]
        gradient = torch.zeros(layout.size, device=device)
        before = state._replace(memory=memory)
        encoded, after = encode_step(compressor, ops, layout, level, 3, gradient, before)
        encoded.commit()
        left = [m.view(torch.int32).cpu() for m in after.memory]
        bodies.append([encoded.body.cpu(), torch.as_tensor(encoded.sent).cpu(), *left])
    assert all(map(torch.equal, *bodies))


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
@pytest.mark.parametrize("what", ["payload", "nan", "overflow", "sum"])
def test_what_is_damaged_or_not_finite_is_said(compressor, what, device):
    layout, fails = layout_of(600), []

    def tamper(rank, request):
        if rank == 1 and fails and isinstance(request, Allgather):
            damaged = request.tensor.clone()
            damaged[HEADER_BYTES + 4] += 1
            return request._replace(tensor=damaged)
        return request

    for world in worlds(compressor, layout, 2, device):
        world.tamper = tamper
        generator = torch.Generator().manual_seed(1)
        gradients = [drawn(generator, world, 2.0, 1.0) for _ in range(2)]
        world.step(gradients[0])
        if what == "sum":
            world.postscale = 1.0
            for state in world.states:
                state.memory.r[7] = 3e38
        elif what != "payload":
            gradients[1][0][5] = float("nan") if what == "nan" else 2.0**60
        fails[:] = [True] * (what == "payload")
        error = PayloadError if what == "payload" else NonFiniteGradientError
        message = {"payload": "rank 1", "sum": "overflows"}.get(what, "rank 0")
        with pytest.raises(error, match=message):
            world.step(gradients[1])
            world.ops.raise_found()  # on a GPU it is said when the host next looks
        fails.clear()


@given(data=st.data())
@settings(SOME, max_examples=40)
def test_no_index_is_trusted(data, device):
    """Bodies that nobody wrote: an error, or the sum of the plain ops, whatever the bytes."""
    compressor = SparseGDCompressor(density=0.2)
    layout = layout_of(300, 200)
    ours, theirs = on(device, True), on(device, False)
    level = compressor.capacity_schedule(layout).next_level(
        ours, compressor.init(ours, layout).capacity
    )[0]
    ranks, capacity = data.draw(st.integers(1, 3)), compressor.capacity(layout)
    seed, finite = data.draw(st.integers(0, 2**32)), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    bodies = torch.randint(0, 256, (ranks, 8 * capacity), generator=generator).to(torch.uint8)
    if finite:
        bodies[:, : 4 * capacity].view(torch.int32).bitwise_and_(-0x40000001)
    ordered, index = False, bodies[:, 4 * capacity :].view(torch.int32)
    if data.draw(st.booleans()):  # most random indices lie beyond the bucket
        index.copy_(torch.rand(ranks, layout.size, generator=generator).argsort()[:, :capacity])
        ordered = data.draw(st.booleans())
        if ordered:
            index.copy_(index.sort().values)
            ordered = bool((index < layout.sink).all())
    weights = torch.full((ranks,), 0.5, device=device)
    buffer = torch.full((layout.size + 512,), 7.0, device=device)

    def total(ops):
        into = buffer[: layout.size]
        summed = compressor.decode_sum(
            ops, layout, Payloads(level, bodies.to(device), weights), into
        )
        ops.raise_found()
        return summed.clone()

    try:
        one = total(ours)
    except (PayloadError, NonFiniteGradientError) as error:
        assert not (finite and ordered), error
        one = None
    assert bool((buffer[layout.size :] == 7.0).all()), (
        "what lies behind the bucket is not written to"
    )
    if one is not None:
        assert torch.equal(one, total(theirs))


@pytest.mark.parametrize("first", [0, 1])
def test_quotas_share_the_room(first, device):
    """What entropy asks for has no room yet; of a rank that has just joined nothing is known."""
    compressor = EGCCompressor(K=4, bins=16, momentum=0.9, entropy_interval=2)
    ours, theirs = worlds(compressor, layout_of(2_000, 300, 1), 2, device)
    for world in (ours, theirs):
        low = world.ops.host(2), world.ops.host(20)
        schedule = world.states[0].capacity._replace(level=low[0], needed=low[1])
        world.states = [state._replace(capacity=schedule) for state in world.states]
        world.steps = first
    levels = []
    for step, kind in enumerate(["noise", "heavy", "noise"]):
        generator = torch.Generator().manual_seed(step)
        assert_step_alike(ours, theirs, drawn(generator, ours, 1.0, 1.0, kind))
        levels.append(int(ours.states[0].capacity.level))
    assert levels[0] < levels[1]
