"""Quantized values of the top-k family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    DeMoCompressor,
    DGCCompressor,
    EGCCompressor,
    GradientDroppingCompressor,
    NonFiniteGradientError,
    OkTopKCompressor,
    PayloadError,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    after,
    partition,
)
from hvd_gradcomp.codecs.values import MOST_IN_GROUP, VALUES, Stretch, ValueGroups
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.handover import correction_of, residual_of
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.testing import World
from tests.methods import ROUNDED
from tests.oracles import today

SEEDS = st.integers(0, 2**32 - 1)
NARROW = [name for name in VALUES if name != "float32"]
FAMILY = [
    SparseGDCompressor(density=0.2),
    GradientDroppingCompressor(ratio=0.8),
    DGCCompressor(density=0.2, momentum=0.9),
    DGCCompressor(density=0.2, momentum=0.5, nesterov=True, masking=False),
    EGCCompressor(K=4, momentum=0.5, entropy_interval=2),
    ScaleComCompressor(density=0.2),
]
SHAPES = ((16, 24), (10,), (90,))


def layout_of(compressor, shapes=SHAPES):
    return Layout(tuple(map(str, range(len(shapes)))), shapes, block=compressor.block)


def drawn(world, random):
    return [
        world.flat(
            [
                torch.from_numpy(random.standard_normal(s).astype(np.float32))
                for s in world.layout.shapes
            ]
        )
        for _ in range(world.size)
    ]


def accumulated(compressor, memory, gradient):
    """The accumulator before something is sent."""
    copies = type(memory)(*(x.clone() for x in memory))
    topk = getattr(compressor, "topk", compressor)  # ScaleCom holds one
    return topk.collect(TorchOps(), copies, gradient.clone())


@pytest.mark.parametrize("values", NARROW)
@pytest.mark.parametrize("base", FAMILY, ids=repr)
@given(seed=SEEDS, sizes=st.lists(st.integers(1, 200), min_size=1, max_size=3))
@settings(max_examples=6, deadline=None)
def test_the_rounding_error_stays(base, values, seed, sizes):
    """`residual' = residual + gradient - decoded`, to the bit; what is not sent stays whole."""
    compressor = replace(base, values=values)
    world = World(compressor, TorchOps(), layout_of(compressor, tuple((n,) for n in sizes)), 1)
    random = np.random.default_rng(seed)
    for _ in range(4):
        (gradient,) = drawn(world, random)
        pending = accumulated(compressor, world.states[0].memory, gradient)
        total = world.step([gradient])[0]
        memory = world.states[0].memory
        assert torch.equal(memory.r, pending[0] - total)
        if len(memory) == 2:
            cleared = (memory.u == 0) & (pending[1] != 0)
            assert torch.equal(memory.u[~cleared], pending[1][~cleared])
            assert not cleared.any() or compressor.masking


@pytest.mark.parametrize("values", NARROW)
@pytest.mark.parametrize("base", FAMILY, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 40])
def test_replicas_are_equal_and_nothing_is_lost(base, values, size):
    compressor = replace(base, values=values)
    if size == 40 and values not in ("bfloat16", "int2"):
        pytest.skip("two of them go by allreduce")
    world = World(compressor, TorchOps(), layout_of(compressor), size, average=False)
    random = np.random.default_rng(size)
    for _ in range(4):
        gradients = drawn(world, random)
        pending = [
            accumulated(compressor, s.memory, g)[0].double()
            for s, g in zip(world.states, gradients)
        ]
        totals = world.step(gradients)
        assert all(torch.equal(total, totals[0]) for total in totals)
        kept = sum(s.memory.r.double() for s in world.states)
        assert (sum(pending) - kept - totals[0].double()).abs().max() < 1e-4 * size


def rounded(x, values):
    """The oracle: a group of values as they are decoded."""
    if values == "bfloat16":
        return np.array([today.bfloat16(v) for v in x], np.float32)
    if values == "int8":
        return today.int8(x)
    if values == "sign":
        return np.where(x < 0, -1, 1) * np.abs(x).mean(dtype=np.float64)
    return today.codebook(x, int(values[3:]))


@pytest.mark.parametrize("values", NARROW)
@pytest.mark.parametrize(
    ("kind", "size"), [(SparseGDCompressor, 300), (SparseGDCompressor, 20000)], ids=["one", "many"]
)
def test_values_are_those_of_the_oracle(kind, size, values):
    compressor = kind(density=0.5, index_coding="int32", values=values)
    world = World(compressor, TorchOps(), layout_of(compressor, ((size,),)), 1)
    random = np.random.default_rng(3)
    for _ in range(2):
        (gradient,) = drawn(world, random)
        pending = world.states[0].memory.r.numpy()[:size] + gradient.numpy()[:size]
        total = world.step([gradient])[0].numpy()[:size]
        k = size // 2
        place = np.sort(np.argsort(-np.abs(pending), kind="stable")[:k])
        groups, expected = -(-k // MOST_IN_GROUP), np.zeros(size)
        for group in range(groups):
            start, end = size * group // groups, size * (group + 1) // groups
            index = place[(place >= start) & (place < end)]
            expected[index] = rounded(pending[index], values)
        assert np.allclose(total, expected, atol=1e-4)


@pytest.mark.parametrize("values", ["int2", "int4", "sign"])
def test_a_small_layer_beside_a_large_one_is_sent_as_well(values):
    """With one codebook for both, its values had a cosine of -.03, and 19 gradients were kept."""
    compressor, size = ChunkedTopKCompressor(values=values), 131_072
    world = World(compressor, TorchOps(), layout_of(compressor, ((size,), (size,))), 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        layers = [torch.randn(size, generator=generator) * scale for scale in (1.0, 0.01)]
        pending = world.flat(layers) + world.states[0].r * compressor.decay
        sent = world.step([world.flat(layers)])[0].split(size)
        for part, all_ in zip(sent, pending.split(size)):
            chosen = part != 0
            assert int(chosen.sum()) == size // 64
            assert torch.cosine_similarity(part[chosen], all_[chosen], 0) > 0.98
    kept = [r.norm() / x.norm() for r, x in zip(world.states[0].r.split(size), layers)]
    assert max(kept) < 2.3 and abs(kept[0] - kept[1]) < 0.1


def test_groups_end_at_layers():
    layout = Layout(("a", "b", "c"), ((10_000,), (300,), (1,)), block=256)
    groups = ValueGroups.of_model(layout, 8300)
    ends = [(stretch.start, stretch.end) for stretch in groups.stretches]
    assert ends == [(0, 5000), (5000, 10_000), (10_240, 10_540), (10_752, 10_753)]
    places = torch.tensor(
        [0, 4999, 5000, 9999, 10_000, 10_240, 10_539, 10_540, 10_752, layout.sink]
    )
    assert groups.of_places(TorchOps(), places).tolist() == [0, 0, 1, 1, 4, 2, 2, 4, 3, 4]
    assert groups.entries(16) == (16, 16, 16, 1)
    parts = VALUES["int4"].parts(64, groups)
    assert (parts["sides"].count, parts["codes"].count) == (49, 32)
    cut = groups.between(4000, 10_300)
    ends = [(stretch.start, stretch.end) for stretch in cut.stretches]
    assert ends == [(0, 1000), (1000, 6000), (6240, 6300)]


@pytest.mark.parametrize("values", ["int8", "int4", "int2", "sign"])
def test_no_payload_is_decoded_above_its_ceiling(values):
    """Whatever its codes are: int8 has one more level above zero than any encoder sends."""
    ops, coding, groups = TorchOps(), VALUES[values], ValueGroups.of([Stretch(0, 64, 64)])
    places = torch.arange(64)
    payload = coding.encode(ops, torch.linspace(-1, 1, 64), places, groups)
    for code in range(256):
        payload["codes"].fill_(code)
        ceiling = coding.ceiling(ops, {name: x[None] for name, x in payload.items()})
        assert coding.decode(ops, payload, places, groups).abs().max() <= ceiling.item()


@given(seed=SEEDS, layers=st.lists(st.integers(1, 30_000), min_size=1, max_size=5))
def test_the_groups_of_places_by_definition(seed, layers):
    """One search for each border, not for each place: there are up to millions of places."""

    class Searching(TorchOps):
        def count_below(self, ascending, x):
            searched.append(x.numel())
            return super().count_below(ascending, x)

    names = tuple(map(str, range(len(layers))))
    layout, searched = Layout(names, tuple((n,) for n in layers)), []
    groups = replace(ValueGroups.of_model(layout, layout.elements), ascending=True)
    random = np.random.default_rng(seed)
    for count in (0, 1, 300):
        places = np.sort(random.integers(0, layout.size, count))
        expected = np.full(count, groups.count)
        for number, (start, end, _) in enumerate(groups.stretches):
            expected[(places >= start) & (places < end)] = number
        numbers = groups.of_places(Searching(), torch.from_numpy(places))
        assert numbers.tolist() == expected.tolist()
        assert searched.pop() == len(groups.borders) and not searched
        places = torch.from_numpy(random.permutation(places))
        expected = groups.of_places(TorchOps(), places.sort().values)[places.argsort().argsort()]
        assert torch.equal(replace(groups, ascending=False).of_places(TorchOps(), places), expected)


@pytest.mark.parametrize(
    "groups",
    [
        ChunkedTopKCompressor().body(Layout(("a",), ((9000,),))).groups[0],
        ChunkedTopKCompressor().shard_body(Layout(("a",), ((9000,),)), 3).groups[2],
        DeMoCompressor().groups(Layout(("a",), ((9000,),))),
        OkTopKCompressor(values="int4").message(Layout(("a",), ((9000,),)), 90).groups,
    ],
)
def test_who_sends_ascending_places_does_not_search_for_each(groups):
    assert groups.ascending


@pytest.mark.parametrize("compressor", ROUNDED, ids=repr)
def test_torch_and_tensorflow_send_the_same_bytes(compressor):
    tf = pytest.importorskip("tensorflow")
    from hvd_gradcomp.ops.tensorflow import TensorFlowOps
    from tests.single.test_backends_agree import gradients, run

    data = gradients(1, 5, size=2)
    wire, results, states = run(compressor, TorchOps(), torch.from_numpy, data, None)
    for ops, make in [
        (TorchOps(static=True), torch.from_numpy),
        (TensorFlowOps(), tf.constant),
        (TensorFlowOps(static=True), tf.constant),
    ]:
        other = run(compressor, ops, make, data, None)
        assert other[0] == wire
        assert other[2] == states
        for ours, theirs in zip(other[1], results):
            np.testing.assert_array_equal(ours[0], theirs[0])


@pytest.mark.parametrize("compressor", ROUNDED, ids=repr)
def test_the_payload_has_its_size(compressor):
    world = World(compressor, TorchOps(), layout_of(compressor, ((3000,), (50,))), 2)
    random = np.random.default_rng(6)
    for _ in range(8):  # past the warm-up
        world.step(drawn(world, random))
        sent = sum(max(r.tensor.nbytes for r in requests) for requests in world.traffic)
        if isinstance(compressor, EGCCompressor):
            assert sent <= compressor.payload_bytes(world.layout)
    if not isinstance(compressor, EGCCompressor):
        assert sent == compressor.payload_bytes(world.layout)
    plain = replace(compressor, values="float32")
    assert sent < plain.payload_bytes(world.layout)
    assert compressor.layer_bytes((1000, 100)) < plain.layer_bytes((1000, 100))


@pytest.mark.parametrize("base", FAMILY, ids=repr)
def test_the_default_changes_nothing(base):
    assert "values='float32'" in repr(base)
    assert "values" not in str(base)
    assert repr(replace(base, values="float32")) == repr(base)
    assert base.layer_bytes((100, 10)) > replace(base, values="int8").layer_bytes((100, 10))
    rounding = replace(base, values="int8")
    assert "values='int8'" in repr(rounding)
    assert rounding.digest(layout_of(base)) != base.digest(layout_of(base))


@pytest.mark.parametrize("base", FAMILY, ids=repr)
@pytest.mark.parametrize("value", ["int3", "", None, 8])
def test_other_values_are_refused(base, value):
    with pytest.raises(ValueError, match="values must be one of 'float32', 'bfloat16', 'int8'"):
        replace(base, values=value)


@pytest.mark.parametrize("compressor", ROUNDED, ids=repr)
@pytest.mark.parametrize("what", ["nan", "damage"])
def test_a_failed_step_loses_nothing(compressor, what):
    """A rank that fails keeps its state; a rank that does not keeps the step's gradient too."""
    world = World(compressor, TorchOps(), layout_of(compressor), 2)
    random = np.random.default_rng(7)
    for _ in range(3):
        world.step(drawn(world, random))
    before = [type(s.memory)(*(x.clone() for x in s.memory)) for s in world.states]
    bad = drawn(world, random)
    if what == "nan":
        bad[1][5] = float("nan")
    else:
        world.tamper = damaged
    with pytest.raises((NonFiniteGradientError, PayloadError)):
        world.step(bad)
    for rank, (state, then) in enumerate(zip(world.states, before)):
        if isinstance(compressor, ScaleComCompressor) or (what, rank) == ("nan", 1):
            expected = then
        else:
            expected = accumulated(compressor, then, bad[rank])
        assert all(map(torch.equal, state.memory, expected))


def damaged(rank, request):
    """Flip a bit in the body of what rank 1 sends."""
    if rank != 1 or getattr(request, "tensor", torch.zeros(1)).dtype != torch.uint8:
        return request
    tensor = request.tensor.clone()
    tensor.view(-1)[40] ^= 1
    return request._replace(tensor=tensor)


@pytest.mark.parametrize("then", ROUNDED, ids=repr)
@pytest.mark.parametrize("first", [None, StromCompressor(tau=0.5), ROUNDED[0]], ids=repr)
def test_after(first, then):
    """A residual goes on in the next phase, whichever of the two rounds."""
    compressor = after(3, first, then)
    world = World(compressor, TorchOps(), layout_of(compressor), 2, average=False)
    random = np.random.default_rng(8)
    came, went = 0.0, 0.0
    for step in range(7):
        gradients = drawn(world, random)
        totals = world.step(gradients)
        assert torch.equal(*totals)
        came, went = came + sum(g.double() for g in gradients), went + totals[0].double()
        inner = compressor.first if step < 3 else then
        kept = [residual_of(inner, s.first if step < 3 else s.then) for s in world.states]
        residual = sum(r.double() for r in kept) if kept[0] is not None else 0.0
        forgets = getattr(then, "momentum", 0.0) or getattr(then, "beta", 1.0) != 1.0
        if step < 3 or not forgets:
            assert (came - went - residual).abs().max() < 1e-3


@pytest.mark.parametrize("compressor", ROUNDED, ids=repr)
def test_partition(compressor):
    """Each bucket of a plan of two methods goes its way; a layer of one element is dense."""
    if correction_of(compressor):
        compressor = compressor.corrected(compressor.momentum, bool(compressor.nesterov))
    layers = [("a.weight", (40, 9), "float32"), ("b.weight", (300,), "float32")]
    layers += [("a.bias", (1,), "float32")]
    other = SparseGDCompressor(density=0.1)
    buckets = plan(partition({"a.*": compressor, "b.*": other}), layers, 1 << 20)
    chosen = {name: method for method, layout in buckets for name in layout.names}
    assert chosen["b.weight"].working == other
    assert isinstance(chosen["a.weight"].working, type(compressor))
    random = np.random.default_rng(9)
    for method, layout in buckets:
        world = World(method, TorchOps(), layout, 3)
        for _ in range(3):
            totals = world.step(drawn(world, random))
            assert all(torch.equal(total, totals[0]) for total in totals)
            assert totals[0].any()
