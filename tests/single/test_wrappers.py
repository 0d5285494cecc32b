"""Phases, a compressor for each layer, and who applies the momentum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvd_gradcomp
from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SparseGDCompressor,
    StromCompressor,
    VarianceCompressor,
    after,
    partition,
    role,
    smaller,
)
from hvd_gradcomp.algorithms.combined.wrappers import MomentumAfter, take_over
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign, plan, traits_of
from hvd_gradcomp.planning.description import describe
from hvd_gradcomp.testing import World
from tests.oracles.momentum import MomentumSGD

LAYERS = [
    ("embedding.weight", (100, 16), "float32"),
    ("encoder.0.weight", (64, 16), "float32"),
    ("encoder.0.bias", (64,), "float32"),
    ("encoder.1.weight", (64,), "float32"),
    ("encoder.1.bias", (64,), "float32"),
    ("head.weight", (10, 64), "float32"),
    ("head.bias", (10,), "float32"),
    ("temperature", (), "float32"),
]


# -- phases --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [StromCompressor(tau=0.5), SparseGDCompressor(0.05), OneBitCompressor()], ids=repr
)
@pytest.mark.parametrize(
    "then", [None, SparseGDCompressor(0.02), QSGDCompressor(), OneBitCompressor()], ids=repr
)
def test_nothing_is_lost_at_a_change_of_phase(first, then):
    compressor = after(4, first, then)
    layout = Layout(("a",), ((600,),), block=compressor.block)
    world = World(compressor, TorchOps(), layout, 2, average=False)
    random = torch.Generator().manual_seed(1)
    came = torch.zeros(layout.size, dtype=torch.float64)
    went = torch.zeros(layout.size, dtype=torch.float64)
    for step in range(8):
        gradients = [world.flat([torch.randn(600, generator=random)]) for _ in range(2)]
        totals = world.step(gradients)
        assert torch.equal(*totals)
        came += sum(g.double() for g in gradients)
        went += totals[0].double()
        inner = first if step < 4 else compressor.then
        states = [s.first if step < 4 else s.then for s in world.states]
        kept = [residual_of(inner, s) for s in states]
        residual = sum(r.double() for r in kept) if kept[0] is not None else 0.0
        if not (isinstance(then, QSGDCompressor) and step >= 4):  # that rounds at random
            torch.testing.assert_close(came[:600], (went + residual)[:600], rtol=0, atol=1e-4)


def test_a_velocity_goes_on_in_the_next_phase():
    """A dense phase with momentum, then DGC: all ranks begin with the common velocity."""
    compressor = after(3, None, DGCCompressor(density=0.1)).corrected(0.9, False)
    layout = Layout(("a",), ((500,),))
    world = World(compressor, TorchOps(), layout, 2)
    for _ in range(3):
        world.step([world.flat([torch.ones(500)]) for _ in range(2)])
    velocity = world.states[0].first.velocity.clone()
    torch.testing.assert_close(velocity[:500], torch.full((500,), 1 + 0.9 + 0.81))
    total = world.step([torch.zeros(layout.size) for _ in range(2)])[0]
    kept = world.states[0].then.memory.r
    torch.testing.assert_close(total + kept, velocity * 0.9)


def test_phases_are_values():
    compressor = after(200, None, DGCCompressor(density=0.01))
    assert eval(str(compressor), vars(hvd_gradcomp)) == compressor
    with pytest.raises(ValueError, match="steps must be a whole number in"):
        after(0, None, None)
    assert after(5, None, VarianceCompressor()).uses_moments
    assert after(5, None, QSGDCompressor) == after(5, None, QSGDCompressor())
    for wrong in (partition({"*": None}), "dgc"):
        with pytest.raises(TypeError, match="a phase needs a compressor or None, got"):
            after(5, None, wrong)


# -- a compressor for each layer -----------------------------------------------------------------


def test_roles():
    roles = {t.name: set(t.roles) for t in traits_of(LAYERS)}
    assert roles == {
        "embedding.weight": {"embedding", "first"},
        "encoder.0.weight": set(),
        "encoder.0.bias": {"bias"},
        "encoder.1.weight": {"norm"},
        "encoder.1.bias": {"bias", "norm"},
        "head.weight": {"last"},
        "head.bias": {"bias", "last"},
        "temperature": set(),
    }
    keras = [
        ("conv2d/kernel", (3, 3, 1, 8), "float32"),
        ("conv2d/bias", (8,), "float32"),
        ("batch_normalization/gamma", (8,), "float32"),
        ("batch_normalization/beta", (8,), "float32"),
        ("dense/kernel", (8, 8), "float32"),
        ("dense/bias", (8,), "float32"),
        ("dense/kernel.6", (8, 3), "float32"),
        ("dense/bias.7", (3,), "float32"),
    ]
    roles = [set(t.roles) for t in traits_of(keras)]
    assert roles[:4] == [{"first"}, {"first", "bias"}, {"norm"}, {"norm", "bias"}]
    assert roles[4:] == [set(), {"bias"}, {"last"}, {"last", "bias"}]


def test_rules_choose():
    dgc = DGCCompressor(density=0.01, momentum=0.0, nesterov=False)
    strom = StromCompressor(0.01)
    compressor = partition(
        [(role("bias", "norm"), None), (role("embedding"), strom), (smaller(2), None), ("*", dgc)]
    )
    chosen = dict(zip((name for name, _, _ in LAYERS), assign(compressor, LAYERS)))
    assert chosen["embedding.weight"] == strom
    assert chosen["encoder.0.weight"] == chosen["head.weight"] == dgc
    assert chosen["encoder.1.weight"] == chosen["head.bias"] == NoneCompressor()
    assert eval(str(compressor), vars(hvd_gradcomp)) == compressor
    buckets = plan(compressor, LAYERS, 1 << 20)
    assert {one for one, _ in buckets} == {dgc, strom, NoneCompressor()}
    names = [name for _, layout in buckets for name in layout.names]
    assert sorted(names) == sorted(name for name, _, _ in LAYERS)


def test_layers_too_small_to_gain_are_dense_together():
    for compressor in (SparseGDCompressor(), QSGDCompressor(), OneBitCompressor()):
        dense = [one == NoneCompressor() for one in assign(compressor, LAYERS)]
        assert dense[-1] and not dense[0], "one element costs more in any code"
    buckets = plan(OneBitCompressor(), [("a", (1,), "float32"), ("b", (2, 1), "float32")], 1 << 20)
    assert [layout.names for _, layout in buckets] == [("b", "a")]
    everything = assign(DGCCompressor(density=1.0, momentum=0.0), LAYERS)
    assert set(everything) == {NoneCompressor()}


def test_rules_that_are_wrong_are_named():
    none = NoneCompressor()
    with pytest.raises(ValueError, match=r"'decoder\.\*' matches no layer; there are embedding"):
        assign(partition({"decoder.*": none, "*": none}), LAYERS)
    with pytest.raises(ValueError, match=r"'encoder\.\*' and role\('bias'\) conflict.*0\.bias"):
        rules = [("encoder.*", none), (role("bias"), QSGDCompressor()), ("*", none)]
        assign(partition(rules), LAYERS)
    with pytest.raises(ValueError, match=r"no rule matches embedding\.weight; end with"):
        assign(partition({"head.*": none}), LAYERS)
    with pytest.raises(ValueError, match="there are no rules"):
        partition([])
    with pytest.raises(ValueError, match="role must be one of 'first', 'last', 'bias'"):
        role("middle")
    with pytest.raises(ValueError, match="size must be a whole number"):
        smaller(0)
    with pytest.raises(TypeError, match="needs a compressor or None, got 3"):
        partition({"*": 3})
    with pytest.raises(TypeError, match="a rule is a pattern, role"):
        partition([(7, None)])


def test_the_dry_run_names_every_layer():
    compressor = partition([(role("embedding"), StromCompressor(0.01)), ("*", QSGDCompressor())])
    table = describe(compressor, LAYERS, 3)
    assert repr(table) == str(table) == f"{table}", "a notebook shows what a script prints"
    for name, _, _ in LAYERS:
        assert name in table
    assert "100x16" in table and "Strom(tau=0.01)" in table and "QSGD()" in table
    assert "4 an element sent" in table
    weight = next(line for line in table.splitlines() if "encoder.0.weight" in line)
    assert weight.split()[-1] == str(64 * 16 // 2 + 4 * 2)
    assert "at least" in table.splitlines()[-1]


class SilentCompressor(NoneCompressor):
    """Of another package, and does not say what a layer takes."""

    def layer_bytes(self, shape):
        return None


def test_the_dry_run_claims_nothing_of_a_method_that_says_nothing():
    table = describe(SilentCompressor(), LAYERS, 1)
    assert "4 an element sent" not in table
    assert [line.split("  ")[-1].strip() for line in table.splitlines()[2:]] == ["not known"] * (
        1 + len(LAYERS)
    )
    assert describe(StromCompressor(0.01), LAYERS, 1).splitlines()[-1].endswith("not known")


# -- momentum ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("method", [DGCCompressor, EGCCompressor], ids=lambda m: m.__name__)
def test_dense_layers_get_their_momentum_after_the_exchange(method, nesterov):
    """With density 1 DGC is momentum SGD, over 50 steps."""
    everything = {"density": 1.0} if method is DGCCompressor else {"K": 1e-3}
    compressor, gives_up = take_over(method(**everything), "SGD", (0.9, nesterov))
    assert gives_up
    ((one, layout),) = plan(compressor, [("w", (40, 3), "float32")], 1 << 20)
    assert one == MomentumAfter(NoneCompressor(), 0.9, nesterov)
    world = World(one, TorchOps(), layout, 3)
    oracle = MomentumSGD(120, 0.9, nesterov)
    random = np.random.default_rng(1)
    for _ in range(50):
        gradients = random.standard_normal((3, 120)).astype("f4")
        total = world.step([world.flat([torch.from_numpy(g)]) for g in gradients])[0]
        expected = oracle.step(gradients.mean(0, dtype=np.float32))
        np.testing.assert_allclose(total.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_who_applies_momentum():
    taken, gives_up = take_over(DGCCompressor(), "SGD", (0.9, True))
    assert gives_up and (taken.momentum, taken.nesterov) == (0.9, True)
    taken, gives_up = take_over(DGCCompressor(), "SGD", (0.0, False))
    assert not gives_up and taken.momentum == 0.0
    taken, gives_up = take_over(DGCCompressor(momentum=0.8), "SGD", (0.0, False))
    assert not gives_up and taken.momentum == 0.8
    taken, gives_up = take_over(DGCCompressor(momentum=0.0), "Adam", None)
    assert not gives_up and taken.momentum == 0.0
    assert take_over(StromCompressor(), "Adam", None) == (StromCompressor(), False)
    with pytest.raises(
        ValueError, match=r"Adam has none that it could take over.*Use SGD, or give"
    ):
        take_over(DGCCompressor(), "Adam", None)
    with pytest.raises(ValueError, match="Use SGD, or give"):
        take_over(EGCCompressor(momentum=0.9), "Adam", None)
    with pytest.raises(ValueError, match=r"another momentum than SGD, 0\.8 and 0\.9"):
        take_over(DGCCompressor(momentum=0.8), "SGD", (0.9, False))
    both = partition({"head.*": DGCCompressor(), "*": EGCCompressor()})
    taken, _ = take_over(both, "SGD", (0.9, False))
    assert {c.momentum for _, c in taken.rules} == {0.9}
    with pytest.raises(ValueError, match="correct different momenta"):
        take_over(partition({"a": DGCCompressor(), "*": DGCCompressor(momentum=0.5)}), "SGD", None)


def test_layers_without_correction_get_momentum_too():
    compressor = partition([(role("embedding"), StromCompressor(0.01)), ("*", DGCCompressor())])
    compressor, _ = take_over(compressor, "SGD", (0.9, False))
    chosen = assign(compressor, LAYERS)
    assert chosen[0] == MomentumAfter(StromCompressor(0.01), 0.9, False)
    assert chosen[1] == DGCCompressor(momentum=0.9, nesterov=False)


def test_a_momentum_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match=r"no optimizer here to take the momentum over from; give"):
        plan(DGCCompressor(), LAYERS, 1 << 20)
