"""Frames of all payloads, their checks and what is not finite, against the plain ops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.method.patterns import reduction_spec, weights_of
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from tests.kernels import layout_of
from tests.triton.gradients import assert_left_clean, on

SIZES = st.sampled_from([0, 1, 3, 255, 4096, 5000, 9001])  # words; a tile has 4096


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    ranks=st.sampled_from([1, 2, 3, 5]),
    groups=st.sampled_from([0, 1, 40, 2000]),
    kind=st.sampled_from(["float32", "int8"]),
    size=st.sampled_from([0.0, 1.0, 1e38, float("inf"), float("nan")]),
    damage=st.sampled_from(["", "", "", "body", "step", "finite"]),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=25, derandomize=True)
def test_frames_are_those_of_the_verbs(sizes, ranks, groups, kind, size, damage, seed, device):
    """Bodies in parts, long ones too, that begin with magnitudes; what is wrong is said alike."""
    generator = torch.Generator().manual_seed(seed)
    context = Context(layout_of(100), 0, ranks, 7, 1.0, 1.0 if seed % 2 else 1.0 / ranks)
    side = {"side": wire.Part(kind, groups)} if groups else {}

    def drawn(words):
        return torch.randint(0, 256, (4 * words,), dtype=torch.uint8, generator=generator)

    bodies = []
    for _ in range(ranks):
        first = torch.full((groups,), size) if kind == "float32" else torch.zeros(-(-groups // 4))
        bodies.append([first.view(torch.uint8), *map(drawn, sizes)])
    if kind == "int8" and groups:  # of 2.0**127 on all ranks a mean can be had, and no sum
        for first, *_ in bodies:
            first[: groups // 2] = 127 if size >= 1e38 else 0

    def outcome(kernels):
        ops, packed = on(device, kernels), []
        header = wire.Header(3, 0xFEDCBA98, 7, 2, 5, 1 << 31, True)
        for rank, body in enumerate(bodies):
            rank_header = header
            if damage == "step" and rank == ranks - 1:
                rank_header = rank_header._replace(step=8)
            finite = torch.tensor(not (damage == "finite" and rank == 0), device=device)
            parts = [part.to(device) for part in body]
            packed.append(wire.pack(ops, rank_header._replace(finite=finite), *parts))
        frames = torch.stack(packed)
        if damage == "body":
            frames[-1, -1] += 1
        try:
            how = reduction_spec(context, side)
            headers, got = wire.unpack(ops, header, frames, how)
            weights = weights_of(ops, context, headers)
            ops.raise_found()
        except (PayloadError, NonFiniteGradientError) as error:
            return frames, str(error)
        finally:
            if kernels:
                assert_left_clean(ops)
        return frames, torch.stack((headers.sent, headers.wanted)).tolist(), weights.tolist(), got

    (ours, *one), (theirs, *other) = outcome(True), outcome(False)
    assert torch.equal(ours, theirs)
    assert str(one) == str(other)


@pytest.mark.parametrize("what", ["", "nan", "inf", "large"])
@pytest.mark.parametrize("where", ["gradient", "moment"])
def test_what_is_not_finite_becomes_zeros(what, where, device):
    values = {"": 1.0, "nan": float("nan"), "inf": -float("inf"), "large": 2.0**120}
    tensors = {name: torch.ones(10_000, device=device) for name in ("gradient", "moment")}
    tensors[where][9_000] = values[what]
    ours, theirs = on(device, True), on(device, False)
    for name in ("check_finite", "check_finite_with"):
        both = []
        for ops in (ours, theirs):
            copies = [x.clone() for x in tensors.values()]
            if name == "check_finite_with":
                finite, *left = ops.check_finite_with(*copies)
            else:
                finite, *left = ops.check_finite(copies[0], "elements")
            both.append((bool(finite), *left))
        assert both[0][0] == both[1][0]
        assert all(map(torch.equal, both[0][1:], both[1][1:]))
    assert_left_clean(ours)
