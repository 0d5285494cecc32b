"""Kernels of the words family against the plain ops, to the bit; see `make triton`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import HybridCompressor, StromCompressor, VarianceCompressor
from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.codecs.sparse import Payloads
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.method.patterns import header_of, weights_of
from hvd_gradcomp.method.wire import HEADER_BYTES
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.ops.kernel_params import CapacityLevel
from tests.kernels import layout_of
from tests.methods import WORDS
from tests.triton.gradients import assert_step_alike, drawn, on, worlds

ONE_EACH = [VarianceCompressor(alpha=0.5), HybridCompressor(tau=0.5), StromCompressor(tau=0.7)]
INT32 = [replace(compressor, index_coding="int32") for compressor in ONE_EACH]


@pytest.mark.parametrize("compressor", WORDS, ids=repr)
@given(
    moments=st.booleans(),
    sizes=st.lists(st.sampled_from([0, 1, 3, 255, 256, 700, 5000]), max_size=4).filter(any),
    seed=st.integers(0, 2**16),
    ranks=st.integers(1, 3),
    scale=st.sampled_from([1e-30, 0.3, 3.0, 1e14]),
    shares=st.lists(st.sampled_from([0.0, 0.002, 0.1, 1.0]), min_size=3, max_size=3),
    first=st.sampled_from([0, 1, 1000, 1 << 33]),
)
@settings(deadline=None, max_examples=5, derandomize=True)
def test_kernels_do_what_the_verbs_do(
    compressor, moments, sizes, seed, ranks, scale, shares, first, device
):
    """The capacity goes up to the dense level, and windows rotate."""
    ours, theirs = worlds(compressor, layout_of(*sizes), ranks, device)
    ours.steps = theirs.steps = first
    for step, share in enumerate(shares):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        gradients, extra = drawn(generator, ours, scale, share), {}
        if compressor.uses_moments and moments:
            extra["moment"] = [g * g / 2 for g in gradients]
        assert_step_alike(ours, theirs, gradients, **extra)


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
def test_pieces_cut_a_large_bucket_alike(compressor, device):
    """More tiles than one, borders within layers; windows that wrap, and then the dense level."""
    ours, theirs = worlds(compressor, layout_of(9_000, 100, 3_001), 2, device)
    for step, share in enumerate([0.001, 0.3, 1.0, 1.0, 0.01]):
        generator = torch.Generator().manual_seed(step)
        assert_step_alike(ours, theirs, drawn(generator, ours, 1.0, share))


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
@pytest.mark.parametrize("what", ["payload", "nan", "overflow"])
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
        if what != "payload":
            gradients[1][0][5] = float("nan") if what == "nan" else 2.0**60
        fails[:] = [True] * (what == "payload")
        error = PayloadError if what == "payload" else NonFiniteGradientError
        with pytest.raises(error, match="rank 1" if fails else "rank 0"):
            world.step(gradients[1])
            world.ops.raise_found()  # on a GPU it is said when the host next looks
        fails.clear()


@pytest.mark.parametrize("compressor", INT32, ids=repr)
@given(data=st.data())
@settings(deadline=None, max_examples=15, derandomize=True)
def test_no_index_is_trusted(compressor, data, device):
    """Bodies that nobody wrote: an error, or the sum of the plain ops, whatever the bytes."""
    layout, capacity = layout_of(300, 200), 20
    ours, theirs = on(device, True), on(device, False)
    dense = data.draw(st.booleans())
    level = CapacityLevel(0, capacity, dense)
    size = compressor.payload_bytes(layout, level) - HEADER_BYTES
    payloads = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=3))
    bodies = torch.tensor([list(body) for body in payloads], dtype=torch.uint8)
    mask = 0x0FFFFFFF if compressor.rule.powers else 0x7FFFFFFF
    index = None
    if not dense:
        words = bodies[:, size - 4 * capacity :].view(torch.int32)
        if data.draw(st.booleans()):  # most random indices lie beyond the bucket
            words &= ~mask | 0x1FF
        if data.draw(st.booleans()):  # and few ascend
            order = torch.argsort(words & mask, dim=1)
            words.copy_(torch.gather(words, 1, order))
        index = words & mask
    context = Context(layout, 0, len(payloads), 1, 1.0, 0.5)
    header = header_of(compressor, context)
    buffer = torch.full((layout.size + 512,), 7.0, device=device)

    def total(ops):
        into = buffer[: layout.size]
        frames = torch.stack([wire.pack(ops, header, body.to(device)) for body in bodies])
        spec = compressor.reduction_spec(context, level)
        try:
            headers, unpacked = wire.unpack(ops, header, frames, spec)
            weights = weights_of(ops, context, headers)
            summed = compressor.decode_sum(ops, layout, Payloads(level, unpacked, weights), into)
            ops.raise_found()
        except (PayloadError, NonFiniteGradientError):
            return None
        return summed.clone()

    one = total(ours)
    assert bool((buffer[layout.size :] == 7.0).all()), (
        "what lies behind the bucket is not written to"
    )
    if index is not None:
        rises = (index[:, 1:] > index[:, :-1]) | (index[:, 1:] == layout.sink)
        if not bool(rises.all()) or bool((index >= layout.size).any()):
            assert one is None
            return
    other = total(theirs)
    assert one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()


@pytest.mark.parametrize("bits", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 33, 1100, 2500])
@pytest.mark.parametrize("spread", [2, 40])
def test_indices_are_coded_alike(count, bits, spread, device):
    """Sinks at the end; then bodies of any bits, which differ in what they say of no index."""
    ours, theirs = on(device, True), on(device, False)
    generator, size = torch.Generator().manual_seed(count), spread * count
    code = EliasFano.of(1, count, size - 1)
    form = count, code.low, code.width, code.universe, bits
    index = torch.rand(size - 1, generator=generator).argsort()[: count * 3 // 4].sort().values
    index = torch.cat((index, torch.full((count - len(index),), size - 1)))
    codes = torch.randint(1 << bits, (count,), generator=generator)
    words = theirs.to_bytes(codes * (1 << 32 - bits) + index, "uint32")
    for side in (0, 8):
        body = torch.cat((torch.arange(side).to(torch.uint8), words)).to(device)
        coded = ours.encode_words(body, side, *form)
        assert torch.equal(coded, theirs.encode_words(body, side, *form))
        noise = torch.randint(256, coded.shape, generator=generator).to(torch.uint8).to(device)
        rows = [coded, coded ^ (noise & (noise >> 3)), noise, noise & 0, noise | 255]
        bodies = torch.stack(rows)
        back, ascends = ours.decode_words(bodies, side, *form)
        expected, ascend = theirs.decode_words(bodies, side, *form)
        assert torch.equal(back[0], body) and torch.equal(back, expected)
        assert ascends[0] and torch.equal(ascends, ascend)
