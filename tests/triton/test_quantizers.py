"""Kernels that give every element a code against the plain ops, to the bit; see `make triton`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hvd_gradcomp import EFSignSGDCompressor, SignumCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.ops.triton import quantizers
from tests.methods import QUANTIZED
from tests.triton.gradients import assert_step_alike, drawn, on, worlds

FEW = settings(deadline=None, max_examples=4, derandomize=True, phases=[Phase.generate])


def bands_of(cuts, size):
    """Rows of several lengths, with gaps between."""
    groups, at = [], 0
    for gap, rows, length in cuts:
        if at + gap + rows * length <= size:
            groups.append(RowGroup(at + gap, rows, length))
            at += gap + rows * length
    return RowGroups(tuple(groups))


def values(kind, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    if kind == "zeros":
        return torch.where(x < 0, torch.tensor(-0.0), torch.tensor(0.0))
    if kind == "minus zeros":
        return x * -0.0
    return x * 10.0 ** torch.randint(-20, 18, (size,), generator=generator)


@FEW
@given(
    cuts=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 5, 64]),
            st.integers(1, 3),
            st.sampled_from([1, 2, 3, 31, 33, 147, 255, 512, 1025, 5001]),
        ),
        max_size=3,
    ),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["noise", "zeros", "minus zeros"]),
    bits=st.sampled_from([1, 2, 3, 4, 8]),
    ranks=st.integers(1, 3),
    based=st.booleans(),
)
def test_kernels_do_what_the_composites_do(cuts, seed, kind, bits, ranks, based, device):
    size = 9_600
    row_groups, ours, theirs = bands_of(cuts, size), on(device, True), on(device, False)
    padding = torch.ones(size, dtype=torch.bool)
    for band in row_groups.runs:
        padding[band.start : band.end] = False
    anywhere = values(kind, size, seed).to(device)
    x = anywhere.masked_fill(padding.to(device), 0.0)  # as that of a bucket is
    squares = x.clamp(-1e15, 1e15)

    def same(function):
        for one, other in zip(function(ours), function(theirs)):
            assert one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()

    same(lambda ops: [ops.group_maxima(row_groups, x), ops.group_squares(row_groups, squares)])
    same(lambda ops: [ops.group_means(row_groups, squares)])
    same(lambda ops: ops.encode_signs(row_groups, x))
    same(lambda ops: ops.encode_signs(row_groups, anywhere))
    random = np.random.default_rng(seed)
    scale = torch.from_numpy(
        random.choice([0.0, 1e-31, 1e-3, 7.0, 1e6], (ranks, row_groups.groups))
    )
    scale = scale.to(device, torch.float32)
    bytes_ = random.integers(0, 256, (ranks, size * bits // 8), dtype=np.uint8)
    packed, weights = torch.from_numpy(bytes_).to(device), torch.full((ranks,), 0.3, device=device)
    base = x if based else None
    if bits > 1:
        salt = seed * 7919
        same(lambda ops: [ops.encode_levels(row_groups, x, scale[0], bits, ops.key(seed, salt))])
        same(lambda ops: [ops.encode_levels(row_groups, x, scale[0], bits, None)])
        same(lambda ops: ops.encode_peaks(row_groups, x, bits, None))
        how = packed, scale, bits, weights
        same(lambda ops: [ops.add_levels(row_groups, base, torch.empty_like(x), *how)])
    else:
        how = packed, scale, -scale, weights
        same(lambda ops: [ops.add_signs(row_groups, base, torch.empty_like(x), *how)])
        apart = torch.cat((scale, scale), dim=1)[:, : row_groups.groups]  # as a part of payloads
        how = packed, apart, -scale, weights
        same(lambda ops: [ops.add_signs(row_groups, base, torch.empty_like(x), *how)])


@pytest.mark.parametrize("compressor", QUANTIZED, ids=repr)
def test_what_is_not_finite_is_said(compressor, device):
    layout = Layout(("a",), ((4, 16),), block=compressor.block)
    for world in worlds(compressor, layout, 2, device):
        gradients = drawn(torch.Generator().manual_seed(1), world, 1.0, 1.0)
        gradients[0][5] = float("nan")
        with pytest.raises(NonFiniteGradientError, match="rank 0"):
            world.step(gradients)
            world.ops.raise_found()  # on a GPU it is said when the host next looks


@pytest.mark.parametrize(
    "compressor", [*QUANTIZED, EFSignSGDCompressor(), SignumCompressor()], ids=repr
)
def test_steps_are_alike(compressor, device):
    """Whole exchanges, of shards too."""
    layout = Layout(("a", "b", "c", "d"), ((4, 45), (0, 7), (), (150,)), block=compressor.block)
    ours, theirs = worlds(compressor, layout, 2, device)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        assert_step_alike(ours, theirs, drawn(generator, ours, 1.0, 1.0))


def test_rows_of_ranks_may_lie_far_apart(tmp_path, device):
    """In payloads of gigabytes a rank's row begins beyond what 32 bits can say."""
    if device != "cpu":
        pytest.skip("a file with holes is memory of the host")
    far, groups = 1 << 30, 1
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=4 * far + groups)
    middle = rows[2 * far :]  # what is counted wrong is not outside of the file
    middle[0], middle[far], middle[2 * far] = 1.0, 2.0, 5.0
    passes, row_groups = on(device, True).quantizers, RowGroups((RowGroup(0, 1, 32),))
    side, codes = torch.from_numpy(np.asarray(middle[:groups])), torch.zeros(8, dtype=torch.int32)
    tables, how = passes._bands(row_groups, 32)
    weights, out = torch.ones(3), torch.empty(32)

    arguments = weights, *tables, out, 32, 1, 3, 0, far  # all have the same codes
    passes.launch(quantizers.add_signs, 1, None, codes, side, side, *arguments, **how)
    assert bool((out == 8.0).all())
    arguments = *arguments, 2.0**-100, 1.0
    passes.launch(quantizers.add_levels, 1, None, codes, side, *arguments, BITS=2, **how)
    assert bool((out == -8.0).all())
