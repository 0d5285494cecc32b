"""LGC: the autoencoder, the three phases, both patterns, and what can go wrong in them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import LGCCompressor, NonFiniteGradientError, PayloadError, partition
from hvd_gradcomp.algorithms.combined.wrappers import After
from hvd_gradcomp.algorithms.lgc import vectors
from hvd_gradcomp.algorithms.lgc.server import Server
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.core.collectives import Gather
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.method.patterns import draw_number
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign, plan
from hvd_gradcomp.testing import World
from tests.oracles import lgc as plain
from tests.single.older import compiles_whole

SIZES = (700, 90, 900)
SHORT = {"alpha": 0.03, "full_steps": 3, "train_steps": 14, "ae_lr": 0.01}
READY = 17  # the first step that is compressed
LEARNS = {"alpha": 0.03, "full_steps": 3, "train_steps": 40, "ae_lr": 0.003, "lambda_sim": 0.0}
PATTERNS = ("ring_allreduce", "parameter_server")


def gradients(step, ranks, sizes=SIZES, own_share=0.3):
    """Smooth, with a part that all ranks share: [rank][layer]."""
    shared = np.random.default_rng((step,))
    common = [
        np.cumsum(shared.standard_normal(n)) * 0.1 + 0.5 * shared.standard_normal(n) for n in sizes
    ]
    drawn = []
    for rank in range(ranks):
        random = np.random.default_rng((step, rank))
        drawn.append(
            [(c + own_share * random.standard_normal(len(c))).astype(np.float32) for c in common]
        )
    return drawn


def world_of(compressor, ranks=3, ops=None, sizes=SIZES, **options):
    layout = Layout(tuple(f"layer{i}" for i in range(len(sizes))), tuple((n,) for n in sizes))
    return World(compressor, ops or TorchOps(), layout, ranks, **options)


def advance(world, tensor=torch.from_numpy, sizes=SIZES):
    drawn = gradients(world.steps, world.size, sizes)
    flat = [world.flat([tensor(x) for x in rank]) for rank in drawn]
    totals = world.step(flat)
    for total in totals:
        assert np.array_equal(np.asarray(total), np.asarray(totals[0])), "replicas differ"
    return flat, totals[0]


# -- the autoencoder ---------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [TorchOps(), TensorFlowOps()], ids=["torch", "tensorflow"])
@pytest.mark.parametrize("innovation", [False, True], ids=["plain", "innovation"])
def test_the_networks_and_their_derivatives(ops, innovation):
    tensor = (
        (lambda x: torch.tensor(np.asarray(x, np.float32)))
        if "Torch" in repr(ops)
        else (lambda x: tf.constant(x, tf.float32))
    )
    random = np.random.default_rng(3)
    heads, length = (3 if innovation else 1), 48
    encoder = np.asarray(autoencoder.initial_encoder(ops, 1))
    encoder = encoder + 0.02 * random.standard_normal(encoder.shape).astype(np.float32)
    decoder = np.stack([np.asarray(autoencoder.initial_decoder(ops, innovation, 2))] * heads)
    decoder = decoder + 0.02 * random.standard_normal(decoder.shape).astype(np.float32)
    x, j = random.standard_normal((2, 3, length))

    def loss(encoder, decoder):
        codes = autoencoder.encode(ops, encoder, tensor(x))
        if innovation:
            missed = autoencoder.decode(ops, decoder, codes[1:2], tensor(j)) - tensor(x)
            rec = ops.sum(missed * missed)
            away = codes - ops.reshape(ops.sum(codes, 0), (1, -1)) * (1 / 3)
            return rec + ops.sum(away * away) * 3.0, rec
        mean = ops.reshape(ops.sum(codes, 0), (1, -1)) * (1 / 3)
        missed = autoencoder.decode(ops, decoder, mean)[0] - tensor(x.mean(0))
        return (ops.sum(missed * missed),) * 2

    (_, rec), gradients_ = ops.value_and_grad(loss, (tensor(encoder), tensor(decoder)))
    networks = plain.unpacked(encoder, decoder, innovation)
    if innovation:
        expected, _, down, up = plain.decoupling(*networks, list(x), list(j), 1, 1.0, 0.5)
    else:
        expected, _, down, up = plain.aggregating(networks[0], networks[1][0], list(x))
        up = [up]
    assert float(rec) == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(gradients_, plain.packed(down, up)):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(ours) / scale, theirs / scale, atol=1e-4)


@compiles_whole
def test_the_networks_are_traced_and_compiled_whole():
    ops, other = TorchOps(static=True), TensorFlowOps(static=True)
    encoder = autoencoder.initial_encoder(ops, 1)
    decoder = torch.stack([autoencoder.initial_decoder(ops, True, 2)] * 2) + 0.01
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32))

    def there_and_back(ops, encoder, decoder, x):
        code = autoencoder.encode(ops, encoder, x)
        return autoencoder.decode(ops, decoder, code, x)

    expected = there_and_back(ops, encoder, decoder, x)
    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ops, encoder, decoder, x), expected)
    traced = tf.function(
        lambda *tensors: there_and_back(other, *tensors), jit_compile=True, autograph=False
    )
    traced_ = traced(*(tf.constant(y.numpy()) for y in (encoder, decoder, x)))
    np.testing.assert_allclose(traced_, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ops", [TorchOps(), TensorFlowOps()], ids=["torch", "tensorflow"])
def test_adam_is_as_printed(ops):
    """Of a loss whose gradient is never near zero, where rounding would be a step of its own."""
    compressor = LGCCompressor(
        "parameter_server", ae_optimizer="adam", ae_steps=2, ae_lr=0.02, alpha=0.03, momentum=0.9
    )
    world = world_of(compressor, 2, ops)
    state = world.states[0]
    random = np.random.default_rng(1)
    signs = [random.choice([-1.0, 1.0], 5) * random.uniform(1, 2, 5) for _ in range(3)]
    tensor = torch.tensor if "Torch" in repr(ops) else tf.constant
    first, *others = (tensor(x.astype(np.float32)) for x in signs)
    slopes = ops.stack(others)
    state = state._replace(encoder=first * 0.0, decoder=slopes * 0.0)
    trainer = compressor.trainer
    state = state._replace(moments=trainer.no_moments(ops, state.encoder, state.decoder))

    def loss(encoder, decoder):
        gap = ops.sum((encoder + 3.0) * first) + ops.sum((decoder + 1.0) * (decoder + 9.0) * slopes)
        return gap, gap * 0.0 + 1.0, gap * 0.0 + 2.0

    network = [[(np.zeros(5), np.zeros(0))] for _ in range(3)]
    adams = [plain.Adam() for _ in range(3)]
    for step in range(4):
        state = trainer.step(ops, state, step, loss)
        assert float(state.loss) == 0.5
        for _ in range(2):
            for i, adam in enumerate(adams):
                w = network[i][0][0]
                slope = signs[i] if i == 0 else signs[i] * (2 * w + 10.0)
                network[i] = adam.step(network[i], [(slope, np.zeros(0))], 0.02)
    np.testing.assert_allclose(np.asarray(state.encoder), network[0][0][0], rtol=1e-4)
    for head in (0, 1):
        np.testing.assert_allclose(
            np.asarray(state.decoder)[head], network[head + 1][0][0], rtol=1e-4
        )
    anew = trainer.step(ops, state, 0, loss)
    away = np.asarray(anew.encoder) - np.asarray(state.encoder)
    np.testing.assert_allclose(np.abs(away), 0.04, rtol=1e-3, err_msg="no moments of another time")


def test_first_parameters_pass_a_signal_on():
    ops = TorchOps()
    x = torch.from_numpy(np.repeat(np.random.default_rng(1).standard_normal(40), 4)[None]).float()
    encoder = autoencoder.initial_encoder(ops, 0)
    decoder = autoencoder.initial_decoder(ops, False, 1)[None]
    code = autoencoder.encode(ops, encoder, x)
    assert code.shape == (1, 40) and autoencoder.code_length(160) == 40
    assert not autoencoder.decode(ops, decoder, code).any(), "the loss begins at 1"
    decoder[0, -33], decoder[0, -32] = 0.5 / 1.01, -0.5 / 1.01
    back = autoencoder.decode(ops, decoder, code)
    assert (back - x).square().mean() < 0.25 * x.square().mean(), "but for the noise"
    assert torch.equal(encoder, autoencoder.initial_encoder(ops, 0))
    assert not torch.equal(encoder, autoencoder.initial_encoder(ops, 1))


# -- the algorithms ----------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", ["exact", "paper"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "more",
    [
        {"momentum": 0.0},
        {"momentum": 0.9, "index_coding": "int32"},
        {
            "momentum": 0.5,
            "masking": False,
            "master": 1,
            "common_rank": 0,
            "ae_steps": 2,
        },
        {"momentum": 0.9, "signs": False, "scale": "model"},
        {"momentum": 0.0, "signs": True, "scale": "model", "innovation": 0.4},
    ],
    ids=str,
)
def test_agrees_with_plain_loops(pattern, feedback, more):
    ranks = 3
    short = {**SHORT, "ae_lr": 0.005}  # with larger steps rounding grows
    compressor = LGCCompressor(pattern, feedback=feedback, **{**short, **more})
    world = world_of(compressor, ranks)
    state = world.states[0]
    networks = plain.unpacked(
        state.encoder.numpy(), state.decoder.numpy(), pattern == "parameter_server"
    )
    oracle = plain.LGC(
        SIZES,
        ranks,
        *networks,
        pattern=pattern,
        feedback=feedback,
        innovation=compressor.innovation,
        lambda_rec=1.0,
        lambda_sim=0.5,
        master=compressor.master,
        common_rank=compressor.exchange.common(ranks) if compressor.by_server else 1,
        momentum=compressor.momentum,
        masking=compressor.masking,
        drawn=lambda step, purpose, count: draw_number(step, purpose, count),
        signs=compressor.signs,
        scale=compressor.scale,
        ae_steps=compressor.ae_steps,
        **{name: short[name] for name in ("alpha", "full_steps", "train_steps", "ae_lr")},
    )
    layout, seen = world.layout, np.zeros(2)
    for step in range(READY + 8):
        _, total = advance(world)
        expected = oracle.step(gradients(step, ranks))
        scale = max(np.abs(x).max() for rank in oracle.r for x in [*expected, *rank])
        for start, size, mean in zip(layout.offsets, layout.sizes, expected):
            layer_total = total[start : start + size].numpy()
            np.testing.assert_allclose(
                layer_total / scale, mean / scale, atol=2e-3, err_msg=f"{step}"
            )
            for rank in range(ranks):
                layer, state = layout.offsets.index(start), world.states[rank]
                kept = residual_of(compressor, state)[start : start + size].numpy()
                other = oracle.r[rank][layer] + oracle.owed[rank][layer]
                np.testing.assert_allclose(kept / scale, other / scale, atol=2e-3)
        if step >= READY and pattern == "ring_allreduce":
            seen = _seen(seen, oracle, step)
        if step > READY:
            loss = compressor.report(world.layout, world.states[0], world.steps).losses[
                "autoencoder"
            ]
            assert loss == pytest.approx(seen[0] / seen[1], rel=2e-2, abs=1e-3)
        if step >= READY and pattern == "parameter_server":  # workers say so in the next step
            seen = _seen(seen, oracle, step)
        if 3 <= step < READY:
            layer_total = float(world.states[compressor.master].loss)
            assert layer_total == pytest.approx(oracle.loss, rel=1e-2, abs=1e-3)
    assert bool(int(world.states[0].ready)) == oracle.converged
    assert oracle.converged


def _seen(seen, oracle, step):
    """Fading sums of squares at 16 places, others each step: what was missed, what was asked."""
    places = sorted(oracle.came)
    assert len(places) == oracle.mu
    spots = [places[(i * -(-oracle.mu // 16) + step) % oracle.mu] for i in range(16)]
    missed = sum((oracle.came[place] - oracle.requested[place]) ** 2 for place in spots)
    return 0.9 * seen + [missed, sum(oracle.requested[place] ** 2 for place in spots)]


@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("pattern", PATTERNS)
@given(
    seed=st.integers(0, 2**16),
    ranks=st.integers(1, 4),
    coding=st.sampled_from(["elias_fano", "int32"]),
)
@settings(max_examples=4, deadline=None)
def test_with_exact_feedback_the_sum_over_ranks_loses_nothing(
    pattern, average, seed, ranks, coding
):
    compressor = LGCCompressor(
        pattern,
        alpha=0.04,
        full_steps=1,
        train_steps=12,
        ae_lr=0.05,
        momentum=0.0,
        index_coding=coding,
        seed=seed,
        lambda_sim=0.0,
    )
    world = world_of(compressor, ranks, average=average)
    world.steps = 1
    share = ranks if average else 1

    def kept():
        return sum(residual_of(compressor, state).double() for state in world.states)

    for _ in range(16):
        before = kept()
        flat, total = advance(world)
        accumulated = before + sum(g.double() for g in flat)
        torch.testing.assert_close(
            kept() + share * total.double(), accumulated, rtol=1e-4, atol=1e-4
        )
        if int(world.states[0].ready) == 0 and world.steps > 13:  # not learned: go on as if it had
            world.states = [s._replace(ready=torch.tensor(1)) for s in world.states]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("coding", ["elias_fano", "int32"])
def test_bytes_equal_the_formula(pattern, coding):
    ranks = 3
    compressor = LGCCompressor(pattern, index_coding=coding, momentum=0.9, **SHORT)
    world = world_of(compressor, ranks)
    capacity = sum(max(1, round(n * 0.03)) for n in SIZES)
    sizes = compressor.compressed_bytes(world.layout, ranks)
    if coding == "int32":
        code = -(-capacity // 16) * 4 * 4
        inner = sum(max(1, round(0.1 * max(1, round(n * 0.03)))) for n in SIZES)
        chosen = 32 + 4 * capacity + 4 * -(-capacity // 32) + 4 * len(SIZES)
        expected = {"leader": chosen, "worker": code + 4 * 17}
        if pattern == "parameter_server":
            back = capacity + ranks * inner
            expected = {
                "worker": 32 + 8 * inner + 4 * 16,
                "common": chosen + code,
                "master": 32 + 4 * back + (2 * back + 3) // 4 * 4 + 8 + 4 * ranks,
            }
        assert sizes == expected
    while world.steps < READY + 2:
        if world.steps == READY:
            world.states = [s._replace(ready=torch.tensor(1)) for s in world.states]
        advance(world)
        sent = [[r.tensor.numel() * r.tensor.element_size() for r in rs] for rs in world.traffic]
        if world.steps <= 3:
            assert sent == [[4 * (world.layout.size + 1)] * ranks]
        elif world.steps < READY and pattern == "ring_allreduce" and coding == "int32":
            assert sent == [[32 + 4 * capacity] * ranks] * 2, "no signs where values travel"
        elif world.steps == READY and pattern == "ring_allreduce":
            handed = 4 * (1 + autoencoder.ENCODER_SIZE + autoencoder.decoder_size(False))
            assert sent[-1] == [handed] * ranks
        elif world.steps == READY:
            assert sent[-2:] == [[4] * ranks, [4 * autoencoder.ENCODER_SIZE, 0, 0]]
    if pattern == "ring_allreduce":
        assert sent == [[sizes["leader"]] * ranks, [sizes["worker"]] * ranks]
    else:
        worker, common = sizes["worker"], sizes["common"]
        assert sent == [[worker, worker + common, worker], [sizes["master"]] * ranks]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_frameworks_agree_but_for_rounding(pattern):
    compressor = LGCCompressor(pattern, momentum=0.9, **SHORT)
    worlds = [
        (world_of(compressor, 2), torch.from_numpy),
        (world_of(compressor, 2, TorchOps(static=True)), torch.from_numpy),
        (world_of(compressor, 2, TensorFlowOps()), tf.constant),
    ]
    for _ in range(READY + 4):
        totals = [np.asarray(advance(*pair)[1]) for pair in worlds]
        for other in totals[1:]:
            np.testing.assert_allclose(other, totals[0], rtol=1e-2, atol=1e-2)
    assert int(worlds[0][0].states[0].ready) == int(worlds[2][0].states[0].ready)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_seeds_give_the_same_run_twice(pattern):
    runs = []
    for _ in range(2):
        world = world_of(LGCCompressor(pattern, momentum=0.9, **SHORT))
        runs.append([advance(world)[1].numpy() for _ in range(READY + 5)])
    assert np.array_equal(*runs)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_rank_and_a_master_who_is_the_common_rank(pattern, ranks):
    compressor = LGCCompressor(pattern, common_rank=0, momentum=0.9, **LEARNS)
    world = world_of(compressor, ranks)
    for _ in range(LEARNS["train_steps"] + 8):
        _, total = advance(world)
        assert total.isfinite().all() and total.any()
    assert int(world.states[0].ready) == 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_autoencoder_that_does_not_learn_is_not_used(pattern, caplog):
    compressor = LGCCompressor(pattern, momentum=0.0, **{**SHORT, "ae_lr": 1e-12})
    world = world_of(compressor)
    with caplog.at_level(logging.WARNING, "hvd_gradcomp"):
        for _ in range(READY + 5):
            flat, total = advance(world)
    assert caplog.text.count("has not fallen to 0.95") == 1, "said once, by one rank"
    assert "hvd.retrain(optimizer)" in caplog.text
    assert int(world.states[0].ready) == 0
    assert compressor.report(world.layout, world.states[1], world.steps).losses[
        "autoencoder"
    ] == pytest.approx(1.0, abs=0.01)
    assert not any(isinstance(rs[0], Gather) for rs in world.traffic)
    before = sum(residual_of(compressor, state).double() for state in world.states)
    flat, total = advance(world)
    after = sum(residual_of(compressor, state).double() for state in world.states)
    torch.testing.assert_close(
        after + 3 * total.double(), before + sum(flat).double(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_among_other_ranks_it_learns_anew_and_keeps_its_residual(pattern):
    compressor = LGCCompressor(pattern, momentum=0.0, **SHORT)
    world = world_of(compressor)
    for _ in range(READY + 2):
        advance(world)
    fewer = world_of(compressor, ranks=2)
    fewer.steps = world.steps
    fewer.states = [compressor.resized(world.ops, s, world.steps, 2) for s in world.states[1:]]
    for before, after in zip(world.states[1:], fewer.states):
        assert torch.equal(residual_of(compressor, before), residual_of(compressor, after))
        assert (int(after.start), int(after.ready)) == (world.steps, 0)
        assert after.decoder.shape[0] == (2 if compressor.by_server else 1)
    for _ in range(READY):
        advance(fewer)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_users_and_drift_train_it_again(pattern):
    compressor = LGCCompressor(pattern, common_rank=0, momentum=0.0, **LEARNS)
    world = world_of(compressor)
    for _ in range(46):
        advance(world)
    assert int(world.states[0].ready) == 1
    states = [compressor.retrained(world.ops, state, world.steps) for state in world.states]
    world.states = states
    for _ in range(42):
        advance(world)
        assert int(world.states[0].ready) == (world.steps >= 46 + LEARNS["train_steps"])
    drifting = LGCCompressor(**{**SHORT, "retrain_loss": 1e-6, "momentum": 0.0})
    world = world_of(drifting)
    trained = []
    for _ in range(READY + 40):
        advance(world)
        assert not float(world.states[0].loss) > 1.0
        trained.append(type(world.traffic[1][0]).__name__ if len(world.traffic) > 1 else "whole")
    assert trained[READY] == "Allreduce" and "Allgather" in trained[READY + 1 :], (
        "a new training began"
    )
    assert "Allreduce" in trained[READY + 10 :], "and ended"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_is_trained_again_every_so_often(pattern):
    compressor = LGCCompressor(pattern, momentum=0.0, retrain_every=5, **LEARNS)
    world = world_of(compressor)
    ready, learned = [], []
    for _ in range(2 * (LEARNS["train_steps"] + 5) + 6):
        advance(world)
        ready.append(int(world.states[2].ready))
        learned.append(world.states[0].encoder)
    first = LEARNS["full_steps"] + LEARNS["train_steps"]
    assert ready[first - 1 : first + 6] == [1] * 6 + [0], "five steps, then it learns"
    again = first + 5 + LEARNS["train_steps"]
    assert ready[again - 2 : again + 6] == [0] + [1] * 6 + [0]
    initial = autoencoder.initial_encoder(world.ops, 0)
    away, further = ((learned[i] - initial).norm() for i in (first, first + 5))
    assert further > 0.9 * away, "from where it was"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exact_feedback_does_not_choose_the_same_again_and_again(pattern, monkeypatch):
    """Of what is selected, the share that has come back in the ten steps before."""
    taken_in, answered = vectors.Selection.accumulate_and_select, Server.decode_answer
    chosen: list[tuple[int, set[int]]] = []
    came: dict[int, set[int]] = {}

    def taking(selection, ops, context, *arguments):
        taken = taken_in(selection, ops, context, *arguments)
        index = set(taken.index[taken.index < context.layout.sink].tolist())
        if index:
            chosen.append((context.step, index))
            if pattern == "ring_allreduce":
                came[context.step] = index
        return taken

    def answering(server, ops, context, answer):
        replied = answered(server, ops, context, answer)
        came[context.step] = set(replied[0].tolist())
        return replied

    monkeypatch.setattr(vectors.Selection, "accumulate_and_select", taking)
    monkeypatch.setattr(Server, "decode_answer", answering)

    def share(feedback, one_place=False):
        chosen.clear()
        came.clear()
        world = world_of(LGCCompressor(pattern, momentum=0.9, feedback=feedback, **LEARNS), 2)
        for _ in range(90):
            advance(world)
            if one_place:
                world.states = [
                    s._replace(memory=s.memory._replace(r=s.memory.r + s.owed), owed=s.owed * 0)
                    for s in world.states
                ]
        again = [
            len(index & set().union(*(came.get(step - i, ()) for i in range(1, 11)))) / len(index)
            for step, index in chosen
            if step >= 60
        ]
        return sum(again) / len(again)

    exact = share("exact")
    assert exact <= share("paper") + 0.05
    if pattern == "ring_allreduce":
        assert share("exact", one_place=True) > 2 * exact, "what is owed would be"


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("signs", [True, False])
def test_signs_that_are_sent_need_not_be_learned(pattern, signs):
    """White signs of equal magnitudes, all ranks alike, in layers of other magnitudes."""
    kind = LGCCompressor(pattern, signs=signs, momentum=0.0, **{**LEARNS, "lambda_sim": 0.0})
    world = world_of(kind, 2)
    for _ in range(LEARNS["train_steps"] + 20):
        random = torch.Generator().manual_seed(world.steps)
        layers = [
            10.0**place
            * torch.randn(n, generator=random).sign()
            * (1 + 0.01 * torch.rand(n, generator=random))
            for place, n in enumerate(SIZES)
        ]
        x = world.flat(layers)
        world.step([x, x.clone()])
        world.states = [
            s._replace(memory=s.memory._replace(r=s.memory.r * 0), owed=s.owed * 0)
            for s in world.states
        ]
    (loss,) = kind.report(world.layout, world.states[0], world.steps).losses.values()
    assert loss < 0.1 if signs else loss > 0.3


# -- what can go wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 10, READY + 2], ids=["whole", "training", "compressed"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_poisoned_gradient_is_an_error_on_all_ranks(pattern, at):
    compressor = LGCCompressor(pattern, common_rank=0, momentum=0.9, lambda_sim=0.0, **SHORT)
    for bad in range(3):
        world = world_of(compressor)
        for _ in range(at):
            advance(world)
        before = [[x.clone() for _, x in leaves(state)] for state in world.states]
        flat = [world.flat([torch.from_numpy(x) for x in r]) for r in gradients(at, 3)]
        flat[bad][17] = float("nan")
        with pytest.raises(NonFiniteGradientError):
            world.step(flat)
        for rank, (state, old) in enumerate(zip(world.states, before)):
            for (path, now), then in zip(leaves(state), old):
                if rank != bad and at > 1 and path == "memory.u":
                    then = 0.9 * then + flat[rank]  # who had a gradient keeps it
                elif rank != bad and at > 1 and path == "memory.r":
                    then = then + dict(leaves(state))["memory.u"]
                assert torch.allclose(now, then) or now.isnan().all(), path
        advance(world)


@pytest.mark.parametrize("bad", [0, 2], ids=["common rank", "another"])
@pytest.mark.parametrize("index_coding", ["elias_fano", "int32"])
def test_what_is_damaged_on_its_way_to_the_master_is_an_error_on_all_ranks(index_coding, bad):
    """Indices that point outside of the bucket too."""
    failures = []

    def tamper(rank, request):
        if isinstance(request, Gather) and world.steps == 46 and rank == bad and request.root == 0:
            damaged = request.tensor.clone()
            damaged[wire.HEADER_BYTES :] ^= 0x7F
            return request._replace(tensor=damaged)
        return request

    compressor = LGCCompressor(
        "parameter_server", common_rank=0, momentum=0.0, index_coding=index_coding, **LEARNS
    )
    world = world_of(compressor, tamper=tamper)
    for _ in range(46):
        advance(world)
    assert isinstance(world.traffic[0][0], Gather)
    with pytest.raises(PayloadError, match=f"rank {bad} sent a damaged payload") as error:
        advance(world)
    failures.append(str(error.value))
    world.steps += 1
    advance(world)


LAYERS = [
    ("stem.weight", (8, 1, 3, 3), "float32"),
    ("stem.bias", (8,), "float32"),
    ("body.0.weight", (200, 90), "float32"),
    ("body.1.weight", (100, 200), "float32"),
    ("head.weight", (10, 100), "float32"),
    ("head.bias", (10,), "float32"),
]


def test_the_values_of_the_last_layer_take_fewer_bits():
    layers = [("a", (64, 16), "float32"), ("b", (64, 64), "float32"), ("c", (10, 64), "float32")]
    names = {"first_layer": "a", "last_layer": "c"}
    plain = LGCCompressor(alpha=0.05, momentum=0.9, **names)
    coded = LGCCompressor(alpha=0.05, momentum=0.9, **names, values="int4")
    _, body, last = coded.of_layers(layers, 2)
    assert body is coded and last.then.values == "int4"
    assert repr(plain) == repr(LGCCompressor(alpha=0.05, momentum=0.9, values="float32", **names))
    size = plain.of_layers(layers, 2)[2].layer_bytes((10, 64))
    assert last.layer_bytes((10, 64)) < size
    with pytest.raises(ValueError, match="values"):
        LGCCompressor(values="int3")


def test_first_and_last_layers():
    one = LGCCompressor(alpha=0.01, momentum=0.9)
    chosen = [type(c).__name__ for c in assign(one, LAYERS, 2)]
    assert chosen == ["MomentumAfter"] * 2 + ["LGCCompressor"] * 2 + ["After"] * 2
    named = LGCCompressor(alpha=0.01, momentum=0.0, first_layer="body.0", last_layer=("*.bias",))
    chosen = assign(named, LAYERS, 2)
    assert [isinstance(c, LGCCompressor) for c in chosen] == [True, False, False, True, True, False]
    assert isinstance(chosen[1], After)
    none = LGCCompressor(alpha=0.01, momentum=0.0, first_layer=(), last_layer=())
    assert all(isinstance(c, LGCCompressor) for c in assign(none, LAYERS, 2))
    buckets = plan(one, LAYERS, 1, ranks=2)
    (whole,) = [layout for c, layout in buckets if isinstance(c, LGCCompressor)]
    assert len(whole.names) == 2, "one bucket, however large"
    inside = partition(
        {
            "body.*": LGCCompressor(alpha=0.01, momentum=0.0, first_layer=(), last_layer=()),
            "*": None,
        }
    )
    assert sum(isinstance(c, LGCCompressor) for c in assign(inside, LAYERS, 2)) == 2


def test_bad_input():
    with pytest.raises(ValueError, match=r"no layer is left for the autoencoder.*first layer"):
        assign(LGCCompressor(), LAYERS[:1], 2)
    with pytest.raises(ValueError, match=r"no layer is left.*DGCCompressor"):
        assign(LGCCompressor(), [LAYERS[0], LAYERS[4]], 2)
    with pytest.raises(
        ValueError, match=r"first_layer='stam' matches no layer; there are stem.weight"
    ):
        assign(LGCCompressor(first_layer="stam"), LAYERS, 2)
    with pytest.raises(
        ValueError, match=r"alpha=1e-05 selects 2 of 38000 .* at least 16. Raise alpha"
    ):
        plan(LGCCompressor(alpha=1e-5, momentum=0.9), LAYERS, 1 << 20, ranks=2)
    for name in ("master", "common_rank"):
        with pytest.raises(ValueError, match=rf"{name} must be a rank in \[0, 1\], got 2; 2 ranks"):
            assign(LGCCompressor("parameter_server", **{name: 2}), LAYERS, 2)
        with pytest.raises(ValueError, match=f"LGCCompressor: {name} must be a whole number"):
            LGCCompressor(**{name: -1})
    for name in ("full_steps", "train_steps", "ae_steps", "retrain_every"):
        with pytest.raises(
            ValueError, match=rf"{name} must be a whole number in \[1, inf\], got 0"
        ):
            LGCCompressor(**{name: 0})
    for name in ("alpha", "innovation", "ae_lr"):
        with pytest.raises(ValueError, match=f"LGCCompressor: {name} must be a number in"):
            LGCCompressor(**{name: 0})
    with pytest.raises(ValueError, match="pattern must be one of 'ring_allreduce', 'param"):
        LGCCompressor("ring")
    with pytest.raises(ValueError, match="ae_optimizer must be one of 'sgd', 'adam', got 'Adam'"):
        LGCCompressor(ae_optimizer="Adam")
    with pytest.raises(ValueError, match="LGCCompressor: scale must be one of 'layer', 'model'"):
        LGCCompressor(scale="layers")
    with pytest.raises(ValueError, match="LGCCompressor: signs must be True or False, got 1"):
        LGCCompressor(signs=1)
    with pytest.raises(ValueError, match=r"alpha=1 selects 74999790 elements of 90 layers"):
        layers = [(f"{i}", (25_000_000 // 90 * 3,), "float32") for i in range(90)]
        plan(LGCCompressor("parameter_server", alpha=1, momentum=0.0), layers, 1 << 20, ranks=2)
    with pytest.raises(ValueError, match="feedback must be one of 'exact', 'paper'"):
        LGCCompressor(feedback=True)


# -- what it is made of ------------------------------------------------------------------------


@given(seed=st.integers(0, 2**16), share=st.sampled_from([0.1, 0.4, 1.0]))
@settings(max_examples=20, deadline=None)
def test_the_innovation_is_the_largest_tenth_of_each_layer(seed, share):
    random = np.random.default_rng(seed)
    layout = Layout(("a", "b", "c"), ((300,), (5,), (700,)))
    compressor = LGCCompressor("parameter_server", alpha=0.1, innovation=share)
    index, values, expected = [], [], {}
    for layer, (offset, size) in enumerate(zip(layout.offsets, layout.sizes)):
        limit = compressor.topk.limits(layout)[layer]
        real = random.integers(0, limit + 1)  # fewer where a layer has zeros
        of_layer = np.sort(random.choice(size, real, replace=False)) + offset
        theirs = (random.standard_normal(real) * 10.0 ** (3 * layer)).round(1)
        ranked = sorted(range(real), key=lambda i: -abs(theirs[i]))
        count = max(1, int(share * limit + 0.5))
        expected |= {int(of_layer[i]): theirs[i] for i in ranked[:count]}
        index, values = [*index, *of_layer], [*values, *theirs]
    missing = compressor.topk.capacity(layout) - len(index)
    places, innovated = compressor.exchange.innovate(
        TorchOps(),
        layout,
        torch.tensor([*index, *[layout.sink] * missing]).long(),
        torch.tensor([*values, *[0.0] * missing]).float(),
    )
    innovations = compressor.exchange.innovations(layout)
    assert len(places) == sum(innovations)
    assert innovations == {0.1: (3, 1, 7), 0.4: (12, 1, 28)}.get(share, (30, 1, 70))
    places, innovated = places.tolist(), innovated.tolist()
    assert places == sorted(places)
    by_place = {i: v for i, v in zip(places, innovated) if i < layout.sink}
    assert by_place == pytest.approx(expected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_perfect_autoencoder_loses_nothing(pattern, monkeypatch):
    """Whatever is selected: of ranks that select other elements too, and one alone sends a code."""
    compressor = LGCCompressor(pattern, momentum=0.0, innovation=0.5, **{**SHORT, "full_steps": 1})
    world = world_of(compressor)
    (size, *_), ready = SIZES, 1 + SHORT["train_steps"]

    def step(count):
        for _ in range(count):
            flat = [torch.zeros(world.layout.size) for _ in range(world.size)]
            for rank, x in enumerate(flat):
                far = world.steps * 31 * 3 % (size - 200) + 31 * rank
                x[far : far + 21] = 1.0 + rank
                for layer, n in ((1, 3), (2, 27)):
                    start = world.layout.offsets[layer] + far % 60 * (1 if layer == 1 else 3)
                    x[start : start + n] = -1.0 - rank
            world.step(flat)

    step(ready)
    world.states = [s._replace(ready=torch.tensor(1)) for s in world.states]
    truth = {}

    def measured(ops, values, unit):
        made = original(ops, values, unit)
        truth.setdefault("mine", []).append(made)
        return made

    original = vectors.to_units
    monkeypatch.setattr(vectors, "to_units", measured)

    def decode(ops, parameters, code, innovation=None):
        if innovation is None:  # the mean first, then a rank's own
            of_rank = truth["mine"][-world.size :]
            return torch.stack([sum(of_rank) / world.size, *of_rank[: code.shape[0] - 1]])
        return torch.stack(truth["asked"])

    def reconstructed(server, ops, context, state, everything, lengths):
        del truth["mine"][:]
        common = server.common(context.size)
        index = truth["index"][common]
        vectors_ = [vectors.at(ops, i, v, index) for i, v in zip(truth["index"], truth["values"])]
        measured = server.units.measure(ops, world.layout, index, vectors_[common])
        unit = server.units.of_elements(ops, world.layout, index, measured)
        truth["asked"] = [original(ops, v, unit) for v in vectors_]
        truth["index"], truth["values"] = [], []
        return answer(server, ops, context, state, everything, lengths)

    def innovate(server, ops, layout, index, values):
        truth.setdefault("index", []).append(index)
        truth.setdefault("values", []).append(values)
        return chosen(server, ops, layout, index, values)

    answer, chosen = Server.reconstruct, Server.innovate
    monkeypatch.setattr(Server, "reconstruct", reconstructed)
    monkeypatch.setattr(Server, "innovate", innovate)
    monkeypatch.setattr(autoencoder, "decode", decode)
    step(5)
    assert (
        compressor.report(world.layout, world.states[1], world.steps).losses["autoencoder"] < 1e-3
    )


def test_all_ranks_draw_alike():
    for count in (2, 3, 8):
        draws = [draw_number(step, 5, count) for step in range(2000)]
        assert draws == [int(draw_number(tf.constant(s, tf.int64), 5, count)) for s in range(2000)]
        shares = np.bincount(draws, minlength=count) / 2000
        assert (abs(shares - 1 / count) < 0.04).all()
        pairs = np.bincount([a * count + b for a, b in zip(draws, draws[1:])], minlength=count**2)
        assert pairs.min() > 0.5 * 2000 / count**2
