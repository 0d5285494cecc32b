"""Local clipping (Lin et al. 2018, section 3.2), by every method that keeps a residual."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import hvd_gradcomp
from hvd_gradcomp.codecs import clipping
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context, leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import EVERY, LEARNED

OPS = TorchOps(torch.device("cpu"))
SHAPES = ((8, 16, 3, 3), (8,), (31, 5), (7,))
RANKS, MOST = 2, 0.5
WITH_CLIPPING = [c for c in EVERY + LEARNED if "max_norm" in {f.name for f in fields(c)}]


def layout_of(compressor):
    names = tuple(f"layer{i}" for i in range(len(SHAPES)))
    return Layout(names, SHAPES, block=compressor.block)


def gradients(world, step):
    random = np.random.default_rng(step)
    scale = (10.0, 0.001, 1.0, 100.0)  # the second layer stays as it is
    return [
        world.flat(
            [torch.from_numpy(random.normal(0, s, x).astype("f")) for s, x in zip(scale, SHAPES)]
        )
        for _ in range(RANKS)
    ]


def test_no_layer_exceeds_its_share():
    layout = layout_of(EVERY[0])
    world = World(hvd_gradcomp.NoneCompressor(), OPS, layout, RANKS)
    context = Context(layout, 0, RANKS, 0)
    for gradient in gradients(world, 1):
        before = [x.clone() for x in layout_cut(layout, gradient)]
        factor = clipping.shrinking(OPS, context, gradient, MOST)
        after = layout_cut(layout, clipping.scaled(OPS, context, gradient, factor))
        for x, y in zip(before, after):
            limit = MOST / RANKS**0.5
            expected = x.double() * min(1.0, limit / float(x.double().norm()))
            torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0)
        assert torch.equal(before[1], after[1])


def layout_cut(layout, flat):
    return [flat[o : o + n] for o, n in zip(layout.offsets, layout.sizes)]


@pytest.mark.parametrize("compressor", WITH_CLIPPING, ids=str)
def test_it_is_what_the_gradient_clipped_before_would_give(compressor):
    layout = layout_of(compressor)
    clips = World(replace(compressor, max_norm=MOST), OPS, layout, RANKS)
    plain = World(compressor, OPS, layout, RANKS)
    context = Context(layout, 0, RANKS, 0)
    for step in range(6):
        full, limited, moments, smaller = gradients(clips, step), [], [], []
        for g in full:
            factor = clipping.shrinking(OPS, context, g.clone(), MOST)
            limited.append(clipping.scaled(OPS, context, g.clone(), factor))
            moments.append(g.square() * 0.5)
            smaller.append(clipping.scaled(OPS, context, moments[-1].clone(), factor.square()))
        kept = [x.clone() for x in moments]
        more = {"moment": moments} if compressor.uses_moments else {}
        less = {"moment": smaller} if compressor.uses_moments else {}
        one, other = clips.step(full, **more)[0], plain.step(limited, **less)[0]
        assert torch.equal(one, other)
        assert all(map(torch.equal, moments, kept)), "moments are only lent"
    for ours, theirs in zip(clips.states, plain.states):
        for (path, x), (_, y) in zip(leaves(ours), leaves(theirs)):
            assert torch.equal(x, y) or x.isnan().all(), path


def test_every_method_with_a_residual_has_it():
    for compressor in EVERY + LEARNED:
        if not type(compressor).__name__.endswith("Compressor"):
            continue
        state = World(compressor, OPS, layout_of(compressor), RANKS).states[0]
        if residual_of(compressor, state) is not None:
            names = {field.name for field in fields(compressor)}
            assert names & {"max_norm", "clip_norm"}, compressor


@pytest.mark.parametrize("compressor", WITH_CLIPPING, ids=str)
def test_it_is_shown_where_it_clips(compressor):
    limited = replace(compressor, max_norm=2.0)
    assert "max_norm" not in str(compressor) and "max_norm=2.0" in str(limited)
    assert limited.digest(layout_of(compressor)) != compressor.digest(layout_of(compressor))
    for wrong in (0, -1.0, float("nan"), "1"):
        with pytest.raises((ValueError, TypeError), match="max_norm"):
            replace(compressor, max_norm=wrong)
