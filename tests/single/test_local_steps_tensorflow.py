"""Local steps on TensorFlow with one rank: against the papers' pseudo-code, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.single.older import skip_without_keras_3

skip_without_keras_3()
import hvd_gradcomp.tensorflow as hvd  # noqa: E402
import hvd_gradcomp.tensorflow.keras as hvd_keras  # noqa: E402
from hvd_gradcomp.algorithms.combined.local_steps import DILOCO, LocalSchedule, cut  # noqa: E402
from hvd_gradcomp.algorithms.combined.round_length import Round  # noqa: E402
from hvd_gradcomp.method.compressor import leaves  # noqa: E402
from hvd_gradcomp.tensorflow.reduce.reducer import require_one_replica  # noqa: E402
from tests.methods import ONE_OF_EACH, ONE_OF_TODAY  # noqa: E402
from tests.oracles import local_steps as oracle  # noqa: E402

SHAPES = {"a": (40,), "b": (8, 6), "c": (16,), "d": (24,)}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
ENDS = [0, *np.cumsum(SIZES).tolist()]
RATE = 0.05
DGC = hvd.DGCCompressor(density=0.1, momentum=0.5)


pytestmark = pytest.mark.usefixtures("one_rank")


def numbers(*key):
    return np.random.default_rng(key).normal(size=ENDS[-1]).astype(np.float32)


START = numbers(0)


def gradient(step, x):
    return (x - numbers(1)) * 0.7 + 0.3 * numbers(2, step)


def inner(rank, step, x):
    del rank
    return x - RATE * gradient(step, x)


def network(dtype="float32"):
    pieces = (START[a:b].reshape(s) for a, b, s in zip(ENDS, ENDS[1:], SHAPES.values()))
    return [tf.Variable(x, name=n, dtype=dtype) for n, x in zip(SHAPES, pieces)]


def flat(variables):
    return np.concatenate([tf.cast(v, tf.float32).numpy().reshape(-1) for v in variables])


def globals_of(local):
    return flat([v for some in local.global_variables for v in some])


def train(variables, local, steps, first=1, averages=False):
    for step in range(first, first + steps):
        g = gradient(step, flat(variables))
        pieces = [
            tf.constant(g[a:b].reshape(v.shape)) for a, b, v in zip(ENDS, ENDS[1:], variables)
        ]
        for v, piece in zip(variables, local.reduce_gradients(pieces) if averages else pieces):
            v.assign_sub(tf.cast(RATE * piece, v.dtype))
        local.step()


def trained(steps, *how, compression=None, **more):
    variables = network()
    local = hvd.LocalSteps(variables, *how, compression=compression, **more)
    train(variables, local, steps)
    return variables, local


@pytest.mark.parametrize("every", [1, 3, 7])
def test_diloco_is_that_of_the_paper(every):
    outer, replicas = oracle.diloco(START, inner, 1, 15, every, 0.7, 0.9)
    variables, local = trained(15, every, DILOCO)
    np.testing.assert_allclose(globals_of(local), outer, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat(variables), replicas[0], rtol=1e-4, atol=1e-5)
    assert (local.steps_made, local.rounds) == (15, 15 // every)


@pytest.mark.parametrize(
    ("fragments", "delay", "blend"),
    [(1, 2, 0.5), (2, 0, None), (2, 1, 0.0), (3, 5, 0.25), (4, 3, None)],
)
def test_streaming_is_that_of_the_paper(fragments, delay, blend):
    parts = [slice(ENDS[r.start], ENDS[r.stop]) for r in cut(SIZES, fragments)]
    how = 0.7, 0.9, parts, delay, LocalSchedule(6, 0, fragments, delay, blend).blend
    outer, replicas = oracle.streaming(START, inner, 1, 25, 6, *how)
    variables, local = trained(25, 6, DILOCO, fragments=fragments, delay=delay, blend=blend)
    np.testing.assert_allclose(globals_of(local), outer, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat(variables), replicas[0], rtol=1e-4, atol=1e-5)


def test_momentum_may_be_the_compressor_s():
    everything = hvd.DGCCompressor(density=1.0, masking=False)
    outer, _ = oracle.diloco(START, inner, 1, 9, 3, 0.7, 0.9)
    _, local = trained(9, 3, DILOCO, compression=everything)
    assert not any(v.name.startswith("gradcomp_velocity") for v in local.variables)
    np.testing.assert_allclose(globals_of(local), outer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "warns"),
    [
        ({}, False),
        ({"outer": DILOCO}, True),
        ({"compression": DGC}, True),
        (hvd.diloco(), False),
        (hvd.sparse_loco(), False),
    ],
)
def test_an_outer_momentum_from_the_first_step_is_warned_of(how, warns, caplog):
    with caplog.at_level("WARNING", logger="hvd_gradcomp"):
        hvd.LocalSteps(network(), **how)
    assert ("Give warmup_steps=200 or more" in caplog.text) == warns


def test_without_compression_variables_are_averaged():
    """Averaging of one rank changes nothing."""
    x = START.astype(np.float64)
    for step in range(1, 9):
        x = inner(0, step, x)
    variables, local = trained(8, 4)
    np.testing.assert_allclose(globals_of(local), x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat(variables), x, rtol=1e-4, atol=1e-5)


def test_several_steps_at_once():
    variables = network()
    local = hvd.LocalSteps(variables, 4)
    local.step(3)
    assert local.rounds == 0
    local.step(3)
    assert (local.rounds, local.steps_made) == (1, 6)


def test_an_exchange_in_between_begins_the_schedule_again():
    variables, local = trained(5, 4, delay=1)
    assert not local.is_exchanged
    local.exchange()
    assert local.is_exchanged
    assert (local.steps_made, local.rounds) == (5, 2)
    np.testing.assert_array_equal(flat(variables), globals_of(local))
    before = flat(variables)
    local.exchange()  # nothing has moved: the outer momentum must not go on alone
    np.testing.assert_array_equal(flat(variables), before)
    train(variables, local, 3, 6)
    assert local.rounds == 2
    train(variables, local, 2, 9)  # sent after four, applied after five
    assert local.rounds == 3


def test_warmup_steps_plainly_and_an_exchange_leaves_it_alone():
    x = START.astype(np.float64)
    for step in (1, 2, 3):
        x = inner(0, step, x)
    variables = network()
    local = hvd.LocalSteps(variables, 4, warmup_steps=3)
    train(variables, local, 2, averages=True)
    local.exchange()
    assert (local.steps_made, local.is_exchanged) == (2, True)
    train(variables, local, 1, 3, averages=True)
    np.testing.assert_allclose(globals_of(local), x, rtol=1e-5, atol=1e-6)
    train(variables, local, 4, 4, averages=True)
    assert (local.steps_made, local.rounds) == (7, 1)


def test_gradients_are_averaged_in_a_graph_too():
    variables = network()
    local = hvd.LocalSteps(variables, 4, warmup_steps=1)
    sums = [tf.ones(v.shape) for v in variables]
    sums[2] = None

    @tf.function
    def reduced():
        return local.reduce_gradients(sums)

    for _ in range(2):
        assert [g is None for g in reduced()] == [False, False, True, False]
        local.step()
    assert int(local.others[0].steps) == 1


def test_a_new_trace_compares_nothing_with_other_ranks(monkeypatch):
    """After a restart other ranks may still run the graph that they have, and would not answer."""
    local = hvd.LocalSteps([tf.Variable([1.0])], 4, warmup_steps=9)
    gathered = []
    gather = local._ranks._gather
    monkeypatch.setattr(local._ranks, "_gather", lambda *how: gathered.append(how) or gather(*how))

    @tf.function
    def reduced(batch):
        return local.reduce_gradients([tf.reduce_sum(batch, keepdims=True)])

    reduced(tf.ones(2))
    assert gathered
    local.step()
    local.restart()
    gathered.clear()
    reduced(tf.ones(3))
    assert reduced.experimental_get_tracing_count() == 2 and not gathered
    local.step()
    assert gathered


def test_variables_that_were_set():
    variables, local = trained(4, 4)
    for v, value in zip(variables, network()):
        v.assign(value)
    local.restart_if_set()
    np.testing.assert_array_equal(globals_of(local), START)
    train(variables, local, 1, 5)
    for v, value in zip(variables, network()):
        v.assign(2 * value)
    local.restart()
    np.testing.assert_array_equal(globals_of(local), 2 * START)
    assert local.is_exchanged


def test_what_was_not_sent_before_a_restart_is_dropped():
    variables, local = trained(4, 2, compression=hvd.SparseGDCompressor(density=0.1))
    for v, value in zip(variables, network()):
        v.assign(value)
    before = hvd.compression_stats(local)
    local.restart()
    after = hvd.compression_stats(local)
    assert replace(after, residual_norm=before.residual_norm) == before
    assert after.residual_norm == 0 < before.residual_norm
    for _ in range(2):
        local.step()
    np.testing.assert_array_equal(flat(variables), START)


def test_half_precision_has_global_variables_in_float32():
    variables = network("float16")
    local = hvd.LocalSteps(variables, 2)
    train(variables, local, 2)
    (copies,) = local.global_variables
    assert {c.dtype for c in copies} == {tf.float32}
    for v, c in zip(variables, copies):
        np.testing.assert_array_equal(v.numpy(), c.numpy().astype(np.float16))
    before = globals_of(local)
    local.restart_if_set()
    np.testing.assert_array_equal(globals_of(local), before)


def test_setting_an_element_keeps_the_precision_of_the_others():
    """And weights that are put back bit by bit after an evaluation were not set."""
    variables = network("bfloat16")
    local = hvd.LocalSteps(variables, 2, DILOCO)
    train(variables, local, 2)
    (copies,) = local.global_variables
    before = [c.numpy() for c in copies]
    assert any(
        (c.numpy() != tf.cast(v, tf.float32).numpy()).any() for c, v in zip(copies, variables)
    )
    values = [v.read_value() for v in variables]
    for v in variables:
        v.assign(tf.zeros_like(v))
    for v, value in zip(variables, values):
        v.assign(value)
    for take_over in (local.restart_if_set, local.restart):
        take_over()
        for c, value in zip(copies, before):
            np.testing.assert_array_equal(c.numpy(), value)
    variables[0].assign(
        tf.tensor_scatter_nd_update(variables[0], [[3]], [tf.cast(9.0, "bfloat16")])
    )
    local.restart_if_set()
    before[0][3] = 9.0
    for c, value in zip(copies, before):
        np.testing.assert_array_equal(c.numpy(), value)


def test_changes_below_the_precision_of_the_model_add_up():
    """As in a loop that evaluates other weights after each exchange, and puts its own back."""
    variable = tf.Variable(tf.ones((4,), tf.bfloat16))
    local = hvd.LocalSteps([variable], 1, hvd.OuterSGD(0.125, 0.0))
    for _ in range(16):
        variable.assign_add(tf.fill((4,), tf.cast(2.0**-6, tf.bfloat16)))
        local.step()  # the global variable moves by 2^-9, and bfloat16 has 2^-7 here
        value = variable.read_value()
        variable.assign(tf.zeros_like(value))
        variable.assign(value)
        local.restart()
    (copies,) = local.global_variables
    np.testing.assert_allclose(copies[0].numpy(), 1 + 16 * 2.0**-9)


@pytest.mark.parametrize("compression", [*ONE_OF_EACH, *ONE_OF_TODAY], ids=repr)
def test_every_method_takes_all_precisions_beside_each_other(compression):
    dtypes = "float64", "bfloat16", "float32", "float16"
    pieces = zip(network(), dtypes)
    variables = [tf.Variable(tf.cast(v, dtype)) for v, dtype in pieces]
    local = hvd.LocalSteps(variables, 2, hvd.OuterSGD(1.0, 0.0), compression)
    train(variables, local, 4)
    assert local.rounds == 2 and np.isfinite(flat(variables)).all()
    (copies,) = local.global_variables
    assert [c.dtype.name for c in copies] == ["float64", "float32", "float32", "float32"]


@pytest.mark.parametrize("host", ["local steps", "tape", "optimizer", "momenta"])
def test_complex_variables_are_refused_by_name(host):
    real, wave = keras.Variable(np.ones(3)), tf.Variable(tf.ones((3,), tf.complex64), name="wave")
    gradients = [tf.ones((3,)), tf.ones((3,), tf.complex64)]
    adam = keras.optimizers.Adam(0.1)
    with pytest.raises(ValueError, match=r"wave has dtype complex64.*real and imaginary"):
        if host == "local steps":
            hvd.LocalSteps([real, wave])
        elif host == "tape":
            hvd.reduce_gradients(gradients, [real, wave])
        elif host == "optimizer":
            hvd_keras.DistributedOptimizer(adam).build([real, wave])
        else:
            hvd_keras.MomentumExchange(adam).build([real, wave])


CONSTRAINTS = {
    "NonNeg": keras.constraints.NonNeg(),
    "MaxNorm": keras.constraints.MaxNorm(0.5),
    "UnitNorm": keras.constraints.UnitNorm(),
}


@pytest.mark.parametrize("compression", [None, hvd.SparseGDCompressor(density=0.2)], ids=repr)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_global_variables_keep_their_constraints(name, compression):
    """With an outer momentum, which goes past where the ranks were, and with a blend."""
    constraint = CONSTRAINTS[name]
    for delay in (0, 1):
        variable = keras.Variable(np.abs(START).reshape(8, 16)[:, :6])
        variable.constraint = constraint
        variable.assign(constraint(variable.value))
        local = hvd.LocalSteps([variable], 2, compression=compression, delay=delay)
        inner_sgd = keras.optimizers.SGD(0.3)
        for step in range(12):
            inner_sgd.apply([tf.constant(numbers(5, step).reshape(8, 16)[:, :6])], [variable])
            local.step()
            for value in (variable.value, local.global_variables[0][0]):
                np.testing.assert_allclose(constraint(value), value, rtol=1e-5, atol=1e-6)


def averaging(kind=keras.optimizers.SGD, **more):
    return kind(RATE, use_ema=True, ema_momentum=0.9, **more)


def wrapped(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)


def several(optimizer):
    from keras.src.optimizers.multi_optimizer import OptimizerMap

    return keras.optimizers.MultiOptimizer(OptimizerMap(optimizer))


@pytest.mark.parametrize("around", [lambda x: x, wrapped, several], ids=["plain", "scaled", "map"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_moving_averages_are_those_of_the_global_variables(fragments, around):
    variables = [keras.Variable(v.numpy()) for v in network()]
    optimizer = around(averaging())
    optimizer.build(variables)
    local = hvd.LocalSteps(variables, 3, fragments=fragments, optimizer=optimizer)
    wanted, past = globals_of(local), 0.9**3
    parts = cut(SIZES, fragments)
    for step in range(1, 13):
        g = gradient(step, flat(variables))
        pieces = [g[a:b].reshape(v.shape) for a, b, v in zip(ENDS, ENDS[1:], variables)]
        optimizer.apply([tf.constant(piece) for piece in pieces], variables)
        local.step()
        for number in local.schedule.sends(step, Round((step - 1) // 3 * 3, 3)):
            at = slice(ENDS[parts[number].start], ENDS[parts[number].stop])
            wanted[at] = past * wanted[at] + (1 - past) * globals_of(local)[at]
    if fragments == 1:
        optimizer.finalize_variable_values(variables)
        np.testing.assert_allclose(flat(variables), wanted, rtol=1e-5, atol=1e-6)
    kept = np.concatenate(
        [v.numpy().reshape(-1) for f in local._machine.fragments for v in f.averages.variables]
    )
    np.testing.assert_allclose(kept, wanted, rtol=1e-5, atol=1e-6)


def test_an_optimizer_with_moving_averages_takes_a_number():
    variables = [keras.Variable(v.numpy()) for v in network()]
    optimizer = averaging()
    optimizer.build(variables)
    with pytest.raises(ValueError, match="give every= a number"):
        hvd.LocalSteps(variables, grows, optimizer=optimizer)


def test_an_optimizer_with_moving_averages_has_to_be_known():
    variables = [keras.Variable(v.numpy()) for v in network()]
    optimizers = averaging(), averaging()
    for each in optimizers:
        each.build(variables)
    ones = [tf.ones(v.shape) for v in variables]
    optimizers[0].apply(ones, variables)  # of an earlier phase
    local = hvd.LocalSteps(variables, 4)
    for _ in range(2):
        local.step()
    local = hvd.LocalSteps(variables, 4)
    optimizers[1].apply(ones, variables)
    local.step()
    optimizers[1].apply(ones, variables)
    with pytest.raises(ValueError, match=r"use_ema=True.*optimizer=\.\.\."):
        local.step()


def test_moving_averages_go_back_with_the_variables():
    variables = [keras.Variable(v.numpy()) for v in network()]
    optimizer = averaging()
    optimizer.build(variables)
    local = hvd.LocalSteps(variables, 2, nonfinite="skip", optimizer=optimizer)
    for value in (1.0, 1.0, np.nan, 1.0):
        optimizer.apply([tf.fill(v.shape, np.float32(value)) for v in variables], variables)
        local.step()
    optimizer.finalize_variable_values(variables)
    assert np.isfinite(flat(variables)).all()


def test_frozen_variables_stay():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    local = hvd.LocalSteps(model.trainable_variables, 1)
    for variable in model.trainable_variables:
        variable.assign_add(tf.ones(variable.shape))
    local.step()  # the outer optimizer has momentum now
    model.layers[0].trainable = False
    before = [v.numpy() for v in model.layers[0].weights]
    local.step()
    local.step()
    for v, value in zip(model.layers[0].weights, before):
        np.testing.assert_array_equal(v.numpy(), value)


def test_variables_that_are_not_finite():
    variables, local = trained(2, 2, nonfinite="skip", compression=hvd.SparseGDCompressor(0.1))
    before = flat(variables)
    (bucket,) = local.reducers[0].buckets
    kept = [x.numpy() for _, x in leaves(bucket.state)]
    variables[1].assign(np.full((8, 6), np.nan))
    train(variables, local, 2, 3)
    np.testing.assert_array_equal(flat(variables), before)
    for x, (_, now) in zip(kept, leaves(bucket.state)):
        np.testing.assert_array_equal(x, now)
    variables, local = trained(1, 2)
    variables[1].assign(np.full((8, 6), np.inf))
    with pytest.raises(hvd.NonFiniteGradientError, match="nonfinite='skip'"):
        train(variables, local, 1, 2)


def grows(step):
    return 3 + step // 5


@pytest.mark.parametrize("every", [4, grows], ids=["number", "function"])
@pytest.mark.parametrize("cut_at", [3, 5, 6, 8])
def test_tensorflow_s_checkpoint_resumes_to_the_bit(cut_at, every, tmp_path):
    how = {"warmup_steps": 2, "fragments": 2, "delay": 2}

    def start():
        variables = network()
        local = hvd.LocalSteps(variables, every, compression=hvd.SparseGDCompressor(0.1), **how)
        return variables, local, tf.train.Checkpoint(local=local, variables=variables)

    whole, kept, _ = start()
    train(whole, kept, 14, averages=True)
    variables, local, keeper = start()
    train(variables, local, cut_at, averages=True)
    path = keeper.save(str(tmp_path / "state"))
    variables, local, keeper = start()
    keeper.restore(path).assert_consumed()
    train(variables, local, 14 - cut_at, cut_at + 1, averages=True)
    np.testing.assert_array_equal(flat(variables), flat(whole))
    for a, b in zip(local.variables, kept.variables):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_our_checkpoint_resumes_to_the_bit(mode, tmp_path):
    def start():
        variables = network()
        return variables, hvd.LocalSteps(variables, 4, compression=hvd.SparseGDCompressor(0.1))

    whole, kept = start()
    train(whole, kept, 8)
    variables, local = start()
    train(variables, local, 3)
    if mode == "consolidated":
        with pytest.raises(hvd.CheckpointError, match=r"call local\.exchange\(\)"):
            hvd.save_checkpoint(tmp_path, mode=mode, variables=variables, local=local)
        train(variables, local, 1, 4)
    done = local.steps_made
    hvd.save_checkpoint(tmp_path, mode=mode, variables=variables, local=local)
    variables, local = start()
    hvd.load_checkpoint(tmp_path, variables=variables, local=local)
    train(variables, local, 8 - done, done + 1)
    np.testing.assert_array_equal(flat(variables), flat(whole))
    np.testing.assert_array_equal(globals_of(local), globals_of(kept))
    other = hvd.LocalSteps(variables, 5, compression=hvd.SparseGDCompressor(0.1))
    with pytest.raises(hvd.CheckpointError, match=r"every=4.*every=5"):
        hvd.load_checkpoint(tmp_path, variables=variables, local=other)


def test_statistics_count_local_steps(tmp_path):
    variables = network()
    buffers = [tf.Variable([1.0, 2.0], trainable=False), tf.Variable([3], trainable=False)]
    local = hvd.LocalSteps(variables, 4, compression=None, fragments=2, buffers=buffers)
    writer = hvd.StatsWriter(local, every=4, writers=[hvd.JSONLines(tmp_path / "stats.jsonl")])
    for step in range(1, 9):
        train(variables, local, 1, step)
        writer.step()
    writer.close()
    stats, table = hvd.compression_stats(local), hvd.describe(local)
    assert stats.steps == 8
    assert stats.bytes_sent == 2 * (ENDS[-1] + 2) * 4
    assert stats.memory == {"global": 4 * ENDS[-1]}
    assert set(stats.layers) == {*SHAPES, "Variable"}
    assert all(name in table for name in SHAPES)
    hvd.verify(local)
    hvd.retrain(local)
    lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert [json.loads(line)["compression/steps"] for line in lines] == [4, 4]
    np.testing.assert_array_equal(buffers[0].numpy(), [1.0, 2.0])


def test_memory_is_named_by_its_purpose():
    _, local = trained(
        3, 4, outer=DILOCO, delay=1, warmup_steps=2, compression=hvd.OneBitCompressor()
    )
    memory, size = hvd.compression_stats(local).memory, 4 * ENDS[-1]
    assert memory["global"] == memory["outer"] == memory["in flight"] == size
    assert memory["state"] >= size

    variables = network()
    for rollback in (True, False):
        with hvd.DistributedGradientTape(
            tf.GradientTape(), compression=hvd.OneBitCompressor(), rollback=rollback
        ) as tape:
            loss = tf.add_n([tf.reduce_sum(v**2) for v in variables])
        tape.gradient(loss, variables)
        memory = hvd.compression_stats(tape).memory
        assert memory["state"] >= size
        assert memory.get("rollback", 0) == (memory["state"] if rollback else 0)


REFUSED = {
    "outer=": {"outer": 0.7},
    "nonfinite must": {"nonfinite": "propagate"},
    "moments='step'": {"compression": hvd.VarianceCompressor(moments="microbatch")},
    "compression must": {"compression": 4},
    "every must": {"every": 0},
    "delay must": {"every": 2, "delay": 2},
    "fragments=5": {"every": 8, "fragments": 5},
    "optimizer= is not built": {"optimizer": keras.optimizers.Adam()},
    "hvd.DistributedOptimizer exchanges": {"optimizer": "ours"},
    "hvd.MomentumExchange exchanges": {"optimizer": "momenta"},
    "stock Horovod's DistributedOptimizer exchanges": {"optimizer": "stock"},
    "another momentum": {
        "outer": DILOCO,
        "compression": DGC,
    },
    "got 0.0": {"deadline": 0.0},
    "got True": {"deadline": True},
    "got '1'": {"deadline": "1"},
    "got nan": {"deadline": float("nan")},
    "which fragments= and delay=": {"deadline": 1.0, "fragments": 2},
    "leave them out with a deadline": {"deadline": 1.0, "delay": 1},
    "follows the rate": {"deadline": 1.0, "every": hvd.QuadraticRule(0.1)},
    "pass optimizer=, the inner one": {"every": hvd.QuadraticRule(0.1)},
}


def distributed(kind):
    """An optimizer that exchanges gradients."""
    import horovod.tensorflow.keras as stock

    wrap = {
        "ours": lambda adam: wrapped(hvd_keras.DistributedOptimizer(adam)),
        "momenta": hvd_keras.MomentumExchange,
        "stock": stock.DistributedOptimizer,
    }
    return wrap[kind](keras.optimizers.Adam(0.1))


@pytest.mark.parametrize("message", REFUSED)
def test_bad_settings(message):
    how = dict(REFUSED[message])
    if isinstance(how.get("optimizer"), str):
        how["optimizer"] = distributed(how["optimizer"])
    with pytest.raises((ValueError, TypeError), match=message):
        hvd.LocalSteps(network(), **how)


@pytest.mark.parametrize("kind", ["tape", "optimizer", "momenta"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_second_exchange_is_refused(kind, graph):
    """Check that exchanging gradients too is an error, at the first step."""
    variables = [keras.Variable(v.numpy()) for v in network()]
    optimizer = (
        keras.optimizers.SGD(RATE) if kind == "tape" else distributed("ours").inner_optimizer
    )
    if kind == "momenta":
        optimizer = distributed(kind)
    optimizer.build(variables)
    local = hvd.LocalSteps(variables, 4)

    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v.value**2) for v in variables)
        if kind == "tape":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)

    run = tf.function(step) if graph else step
    run()
    name = {"tape": "GradientTape", "optimizer": "Optimizer", "momenta": "MomentumExchange"}[kind]
    with pytest.raises(RuntimeError, match=f"{name} has exchanged the gradients.*one of the two"):
        local.step()
    run()
    local.restart()  # a phase of dense steps is over
    local.step()


def test_a_tape_in_a_tape_is_refused():
    with tf.GradientTape() as tape:
        pass
    tape = hvd.DistributedGradientTape(tape)
    with pytest.raises(ValueError, match="exchanges its gradients already"):
        hvd.DistributedGradientTape(tape)


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_a_tape_are_not_reduced_again(graph):
    """Eagerly the second step knows, in a graph the first trace."""
    variables = [keras.Variable(v.numpy()) for v in network()]
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(RATE))

    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v.value**2) for v in variables)
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    run = tf.function(step) if graph else step
    with pytest.raises(ValueError, match="GradientTape has exchanged the gradients of these"):
        for _ in range(2):
            run()


@pytest.mark.parametrize("graph", [False, True])
def test_optimizers_may_share_variables(graph):
    """As an actor's and a critic's share a trunk, in one step and in phases of several."""
    trunk, *heads = (keras.Variable([value]) for value in (1.0, 2.0, 3.0))
    optimizers = [hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in heads]
    for optimizer, head in zip(optimizers, heads):
        optimizer.build([trunk, head])

    def step(place):
        trained = [trunk.value, heads[place].value]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(trained[0] * trained[1])
        optimizers[place].apply(tape.gradient(loss, trained), [trunk, heads[place]])

    def both():
        step(0)
        step(1)

    run = tf.function(both) if graph else both
    run()
    run()
    values = [1.0, 2.0, 3.0]
    for place in (1, 2, 1, 2):
        values[0], values[place] = (
            values[0] - 0.1 * values[place],
            values[place] - 0.1 * values[0],
        )
    np.testing.assert_allclose([trunk.numpy(), *heads], np.reshape(values, (3, 1)), rtol=1e-5)
    for place in (0, 0, 1, 1):
        step(place)


def test_a_later_one_over_the_same_variables_counts():
    variables, local = trained(3, 4)
    later = hvd.LocalSteps(variables[1:], 5)
    with pytest.raises(RuntimeError, match=r"every=5.* after this one.*every=4.*later one alone"):
        local.step()
    later.step()
    del later
    hvd.LocalSteps(variables, 6).step()


def test_a_later_one_counts_for_as_long_as_it_exists():
    variables, local = trained(3, 4)
    cycle = [hvd.LocalSteps(variables[1:], 5)]
    cycle.append(cycle)
    del cycle
    local.step()
    later = hvd.LocalSteps(variables, 5)
    local.restart()
    local.step()
    with pytest.raises(RuntimeError, match=r"every=4.* restarted after this one.*every=5"):
        later.step()
    later.restart()
    later.step()
    with pytest.raises(RuntimeError, match=r"every=5.* restarted after this one.*restart\(\) of"):
        local.step()


def test_replicas_in_the_process_are_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():  # of one replica, which is no exchange
        variable = tf.Variable(tf.ones((3,)))
    hvd.reduce_gradients([tf.ones((3,))], [variable])

    class Several:
        num_replicas_in_sync = 2

    with pytest.raises(ValueError, match=r"Several has 2 replicas.*hvd\.LocalSteps"):
        require_one_replica(Several())


@pytest.mark.parametrize("message", [m for m in REFUSED if "deadline" in REFUSED[m]])
def test_bad_deadlines_of_the_callback(message):
    with pytest.raises(ValueError, match=message):
        hvd_keras.callbacks.LocalSteps(**REFUSED[message])


def test_rounds_with_a_deadline_have_about_as_many_steps():
    """A rank makes one more where its numbers come a moment later, and loses none."""
    variables, total = network(), np.zeros(ENDS[-1])
    local = hvd.LocalSteps(variables, 4, compression=None, warmup_steps=2, deadline=60.0)
    local.exchange()
    for step in range(1, 27):
        time.sleep(0.02)
        g = numbers(2, step)
        total += g
        for v, a, b in zip(variables, ENDS, ENDS[1:]):
            v.assign_sub(RATE * g[a:b].reshape(v.shape))
        local.step()
    assert 3 <= local.rounds <= 6 and local.steps_made == 26 and local.deadline == 60.0
    local.exchange()
    rounds = local.rounds
    local.exchange()  # nothing has moved
    assert local.rounds == rounds and local.is_exchanged
    np.testing.assert_allclose(flat(variables), START - RATE * total, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(flat(variables), globals_of(local))


def test_a_deadline_and_commits_between_batches_exclude_each_other():
    from hvd_gradcomp.tensorflow.keras.elastic import KerasState

    model = compiled()
    local = hvd_keras.callbacks.LocalSteps(4, deadline=1.0).build(model)
    with pytest.raises(ValueError, match="make LocalSteps without it"):
        KerasState(model, local=local)


def test_what_is_not_trained_is_refused():
    with pytest.raises(ValueError, match="buffers="):
        hvd.LocalSteps([*network(), tf.Variable(1.0, trainable=False)])


def test_a_step_in_a_graph_is_refused():
    local = hvd.LocalSteps(network())
    with pytest.raises(RuntimeError, match=r"outside of the tf\.function"):
        tf.function(local.step)()


X = np.random.default_rng(3).normal(size=(24, 4)).astype(np.float32)


def compiled(**more):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", **more)
    return model


def fit(model, callbacks, **more):
    return model.fit(X, X[:, :3], 4, callbacks=callbacks, shuffle=False, verbose=0, **more)


class Watch(keras.callbacks.Callback):
    """Record of whether weights are the global ones, at each event."""

    def __init__(self, callback):
        super().__init__()
        self.callback, self.seen = callback, []

    def note(self, event):
        self.seen.append((event, self.callback.local.is_exchanged))

    def on_train_batch_end(self, batch, logs=None):
        self.note("batch")

    def on_test_begin(self, logs=None):
        self.note("test")

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch")


def test_fit_exchanges_before_it_validates(tmp_path):
    callback = hvd_keras.callbacks.LocalSteps(4, average_buffers=True)
    watch = Watch(callback)
    writer = hvd_keras.callbacks.StatsWriter(6, [hvd.JSONLines(tmp_path / "stats.jsonl")])
    rest = [
        writer,
        watch,
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.VerifyCallback(2),
    ]
    model = compiled()
    fit(model, [callback, *rest], epochs=2, validation_data=(X, X[:, :3]))
    epoch = [False, False, False, True, False, False]  # 6 batches
    once = [*(("batch", done) for done in epoch), ("test", True), ("epoch", True)]
    assert watch.seen == 2 * once
    assert (callback.local.steps_made, callback.local.rounds) == (12, 4)
    lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert len(lines) == 2
    fit(model, [callback])  # another one goes on
    assert (callback.local.steps_made, callback.local.rounds) == (18, 6)


def test_fit_may_exchange_at_its_end_alone():
    callback = hvd_keras.callbacks.LocalSteps(100, at_epoch_end=False)
    watch = Watch(callback)
    fit(compiled(), [callback, watch], epochs=2)
    assert not any(done for _, done in watch.seen)
    assert callback.local.rounds == 1


def test_fit_with_several_steps_an_execution():
    callback = hvd_keras.callbacks.LocalSteps(4, at_epoch_end=False)
    fit(compiled(steps_per_execution=2), [callback], epochs=2)
    assert (callback.local.steps_made, callback.local.rounds) == (12, 3)
    for bad in ({"every": 3}, {"every": 4, "fragments": 4}, {"every": 4, "warmup_steps": 1}):
        with pytest.raises(ValueError, match="multiples of steps_per_execution=2"):
            fit(compiled(steps_per_execution=2), [hvd_keras.callbacks.LocalSteps(**bad)])
    with pytest.raises(ValueError, match="every= has to be a number"):
        callback = hvd_keras.callbacks.LocalSteps(hvd.QuadraticRule(0.1))
        fit(compiled(steps_per_execution=2), [callback])


def test_rounds_of_fit_follow_the_rate():
    """A rate that falls by half after each epoch of 6 batches: rounds of 3, then of 12."""
    model = compiled()
    model.optimizer.learning_rate = 0.05
    rule = hvd.QuadraticRule(0.05 * 3**0.5, base=3)
    callback = hvd_keras.callbacks.LocalSteps(rule, at_epoch_end=False)
    rounds = []

    class Halved(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rounds.append(callback.local.rounds)
            self.model.optimizer.learning_rate = 0.05 / 2 ** (epoch + 1)

    fit(model, [callback, Halved()], epochs=5)
    # Decided at the end of a round: at steps 3 and 6 by 0.05, at step 9 by 0.025.
    assert rounds == [2, 3, 3, 4, 4]


@pytest.mark.parametrize("by_fit", [False, True], ids=["loop", "fit"])
@pytest.mark.parametrize("follows", ["rate", "steps"])
def test_rounds_under_a_schedule_of_the_rate(follows, by_fit):
    """As computed by hand from Keras's schedule, which an optimizer reads after each step."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 60)
    rule, ends = hvd.QuadraticRule(0.05 * 2**0.5, base=2, longest=20), []
    every = rule if follows == "rate" else grows
    sgd = keras.optimizers.SGD(schedule)
    if by_fit:
        model = compiled()
        model.compile(sgd, "mse")
        callback = hvd_keras.callbacks.LocalSteps(every, at_epoch_end=False)

        class Ends(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if callback.local.rounds > len(ends):
                    ends.append(callback.local.steps_made)

        fit(model, [callback, Ends()], epochs=10)
    else:
        variables = [keras.Variable(v.numpy()) for v in network()]
        sgd.build(variables)
        local = hvd.LocalSteps(variables, every, optimizer=sgd)
        for step in range(1, 61):
            sgd.apply([tf.ones(v.shape) for v in variables], variables)
            local.step()
            if local.rounds > len(ends):
                ends.append(step)
    expected, at, length = [], 0, 2 if follows == "rate" else grows(0)
    while at + length <= 60:
        at += length
        expected.append(at)
        length = rule.length(float(schedule(at)), 1.0) if follows == "rate" else grows(at)
    assert ends == expected and len(ends) < 15
    if follows == "rate":
        assert ends[-1] - ends[-2] > 2 * (ends[1] - ends[0])


def test_fit_averages_gradients_during_warmup():
    model = compiled()
    callback = hvd_keras.callbacks.LocalSteps(4, warmup_steps=8, at_epoch_end=False)
    fit(model, [callback])
    assert int(callback.local.others[0].steps) == 6
    assert "apply" not in vars(model.optimizer)
    fit(model, [callback])
    assert int(callback.local.others[0].steps) == 8
    assert (callback.local.steps_made, callback.local.rounds) == (12, 1)


@pytest.mark.parametrize("at_epoch_end", [False, True])
def test_fit_ends_with_averages_of_global_weights(at_epoch_end):
    model = compiled()
    model.compile(averaging(keras.optimizers.Adam), "mse")
    callback = hvd_keras.callbacks.LocalSteps(4, at_epoch_end=at_epoch_end)
    ends = []
    for _ in range(2):
        fit(model, [callback], epochs=2)
        fragments = callback.local._machine.fragments
        for v, average in zip(model.trainable_variables, fragments[0].averages.variables):
            np.testing.assert_array_equal(v.numpy(), average.numpy())
        ends.append(flat(model.trainable_variables))
    assert (ends[0] != ends[1]).any()
    assert "finalize_variable_values" not in vars(model.optimizer)
    assert callback.local.rounds == 2 * (4 if at_epoch_end else 3)


def test_fit_refuses_an_optimizer_that_the_callback_does_not_know():
    """Its moving averages would stay each rank's."""
    model = compiled()
    callback = hvd_keras.callbacks.LocalSteps(4)
    fit(model, [callback])
    model.compile(averaging(), "mse")
    for go_on in (lambda: fit(model, [callback]), lambda: callback.build(model)):
        with pytest.raises(ValueError, match=r"compiled anew.*Pass a new callbacks\.LocalSteps"):
            go_on()
    later = hvd_keras.callbacks.LocalSteps(4)
    fit(model, [later])
    assert later.local._machine.fragments[0].averages.variables
    with pytest.raises(ValueError, match="or is another one"):
        fit(compiled(), [later])


def test_fits_may_have_callbacks_in_turn():
    model = compiled()
    callbacks = [hvd_keras.callbacks.LocalSteps(every) for every in (2, 3)]
    for place in (0, 1, 0):
        fit(model, [callbacks[place]])
        np.testing.assert_array_equal(
            flat(model.trainable_variables), globals_of(callbacks[place].local)
        )
    assert [callback.local.steps_made for callback in callbacks] == [12, 6]


def test_fit_that_an_error_ends_leaves_nothing_behind():
    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    model = compiled()
    model.compile(averaging(), "mse")
    callback = hvd_keras.callbacks.LocalSteps(4, warmup_steps=8)
    with pytest.raises(ZeroDivisionError):
        fit(model, [callback, Failing()])
    assert not {"apply", "finalize_variable_values"} & set(vars(model.optimizer))
    fit(model, [])
    assert callback.local.steps_made == 1


def test_fit_refuses_other_models():
    model = compiled()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ValueError, match="Compile the model with the plain optimizer"):
        fit(model, [hvd_keras.callbacks.LocalSteps()])
    model.compile(distributed("stock"), "mse")
    with pytest.raises(ValueError, match="stock Horovod's DistributedOptimizer exchanges"):
        fit(model, [hvd_keras.callbacks.LocalSteps()])
    two = [hvd_keras.callbacks.LocalSteps(2), hvd_keras.callbacks.LocalSteps(3)]
    with pytest.raises(ValueError, match=r"several callbacks\.LocalSteps.*every=2.*every=3"):
        fit(compiled(), two)
    with pytest.raises(ValueError, match="every must"):
        hvd_keras.callbacks.LocalSteps(every=0)


def delayed(monkeypatch, reduces):
    """Return variables and their local steps, which are to send next; `reduces` calls what does."""
    variables = network()
    local = hvd.LocalSteps(variables, 4, compression=hvd.SparseGDCompressor(0.1), delay=2)
    train(variables, local, 7)
    (reducer,) = local.reducers
    stock = reducer.reduce
    monkeypatch.setattr(reducer, "reduce", lambda gradients: reduces(lambda: stock(gradients)))
    return variables, local


def as_ever(steps):
    return trained(steps, 4, compression=hvd.SparseGDCompressor(0.1), delay=2)


def assert_equal(variables, local, others, other):
    np.testing.assert_array_equal(flat(variables), flat(others))
    for a, b in zip(local.variables, other.variables):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_steps_go_on_while_an_exchange_is_on_its_way(monkeypatch):
    arrives, in_time = threading.Event(), []

    def reduces(reduce):
        in_time.append(arrives.wait(60))
        return reduce()

    variables, local = delayed(monkeypatch, reduces)
    train(variables, local, 2, 8)
    assert not in_time and not local.is_exchanged
    arrives.set()
    train(variables, local, 1, 10)
    assert in_time == [True]
    assert_equal(variables, local, *as_ever(10))


def test_a_checkpoint_waits_for_what_is_on_its_way(monkeypatch, tmp_path):
    """Also one that is loaded: what arrives later must not change it."""

    def reduces(reduce):
        time.sleep(0.3)
        return reduce()

    variables, local = delayed(monkeypatch, reduces)
    keeper = tf.train.Checkpoint(local=local, variables=variables)
    train(variables, local, 1, 8)
    path = keeper.save(str(tmp_path / "state"))
    train(variables, local, 8, 9)  # another exchange is on its way after step 16
    assert local._fragments[0]._call is not None
    keeper.restore(path).assert_consumed()
    assert local.steps_made == 8 and not local.is_exchanged
    train(variables, local, 4, 9)
    assert_equal(variables, local, *as_ever(12))


def test_an_error_on_the_way_is_raised_where_the_result_is_due(monkeypatch):
    def reduces(reduce):
        raise ArithmeticError("lost")

    variables, local = delayed(monkeypatch, reduces)
    train(variables, local, 2, 8)
    with pytest.raises(ArithmeticError, match="lost"):
        train(variables, local, 1, 10)
    local.restart()
    assert local.is_exchanged
