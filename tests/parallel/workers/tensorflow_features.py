"""Comparison with stock Horovod, dtypes, sparse gradients and bad input on TensorFlow."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
import weakref
from pathlib import Path

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as hvd
from hvd_gradcomp.tensorflow.comm import stall_inspector
from hvd_gradcomp.tensorflow.keras import DistributedOptimizer, MomentumExchange
from hvd_gradcomp.tensorflow.reduce.reducer import living
from tests.parallel.workers.results import digest, errors_of, finish, on_timeline


def train(module, dtype="float32", graph=True, steps=10, **options):
    """Plain descent on a small model; returns a digest of the weights."""
    random = np.random.default_rng(1)
    weights = [
        tf.Variable(tf.cast(random.standard_normal(shape) * 0.1, dtype))
        for shape in ((30, 20), (20, 5))
    ]
    rows = np.random.default_rng(10 + hvd.rank()).standard_normal((steps, 8, 30))

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_mean(tf.square(tf.tanh(x @ weights[0]) @ weights[1]))
        tape = module.DistributedGradientTape(tape, **options)
        for w, g in zip(weights, tape.gradient(y, weights)):
            w.assign_sub(tf.cast(0.5, dtype) * g)

    run = tf.function(step) if graph else step
    for x in rows:
        run(tf.cast(x, dtype))
    return digest(tf.cast(w, tf.float64).numpy() for w in weights)


def stock_pairs():
    sparse = hvd.StromCompressor(tau=0.01)
    pairs = {
        name: [
            train(hvd, compression=hvd.NoneCompressor(), **options),
            train(stock, **options),
        ]
        for name, options in {
            "float32": {},
            "float64": {"dtype": "float64"},
            "float16": {"dtype": "float16"},
            "eager": {"graph": False},
            "sum": {"op": hvd.Sum},
            "predivide": {"gradient_predivide_factor": 3.0},
        }.items()
    }
    pairs["fp16"] = [
        train(hvd, compression=hvd.FP16Compressor()),
        train(stock, compression=stock.Compression.fp16),
    ]
    pairs["ours inside stock"] = [
        train(stock, compression=hvd.NoneCompressor()),
        pairs["float32"][1],
    ]
    pairs["eager and graph"] = [
        train(hvd, compression=sparse, graph=False),
        train(hvd, compression=sparse),
    ]
    pairs["nested sources"] = nested_sources()
    return pairs


def nested_sources():
    """One variable, nests, a view of a dictionary, and what is not connected, beside a list."""
    a, b, apart = (tf.Variable(tf.ones(shape)) for shape in ((3, 2), (4,), (2,)))

    def gradients(sources, **options):
        with tf.GradientTape() as tape:
            y = (1.0 + hvd.rank()) * (tf.reduce_sum(a * a) + tf.reduce_sum(b))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.NoneCompressor())
        return tape.gradient(y, sources, **options)

    listed = gradients([a, b])
    zero = gradients([a, b, apart], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert not zero.pop().numpy().any()
    ours = [gradients((a, b)), gradients({"a": a, "b": b}.values()), zero]
    for sources in ([a, [b]], {"b": (b,), "a": a}):
        ours.append(gradients(sources))
        tf.nest.assert_same_structure(ours[-1], sources)
    ours.append([gradients(a), gradients(b)])
    digests = [digest(x.numpy() for x in tf.nest.flatten(each)) for each in ours]
    return digests, [digest(x.numpy() for x in listed)] * len(digests)


def embedding(as_dense):
    table = tf.Variable(np.random.default_rng(1).standard_normal((50, 4)).astype(np.float32))
    random = np.random.default_rng(10 + hvd.rank())
    for _ in range(8):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(tf.gather(table, random.integers(0, 50, 6))))
        tape = hvd.DistributedGradientTape(
            tape, compression=hvd.StromCompressor(), sparse_as_dense=as_dense
        )
        (gradient,) = tape.gradient(value, [table])
        assert isinstance(gradient, tf.IndexedSlices) != as_dense
        table.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return digest([table.numpy()])


def micro_batches():
    w = tf.Variable(np.random.default_rng(1).standard_normal((10, 3)).astype(np.float32))
    random = np.random.default_rng(10 + hvd.rank())
    for _ in range(8):
        x = tf.constant(random.standard_normal((16, 10)).astype(np.float32))
        _, gradients, moments = hvd.microbatch_gradients(
            lambda piece: tf.reduce_mean(tf.square(piece @ w)), [w], [x], 4
        )
        compressor = hvd.VarianceCompressor(alpha=0.5, moments="microbatch")
        (gradient,) = hvd.reduce_gradients(gradients, [w], compressor, moments=moments)
        w.assign_sub(0.1 * gradient)
    return digest([w.numpy()])


def explicit_moments():
    """What `moments=` names is used, also on a model that is tracked."""
    from hvd_gradcomp.tensorflow.keras import track_moments

    random = np.random.default_rng(10 + hvd.rank())
    x, y = (random.standard_normal((64, n)).astype(np.float32) for n in (6, 2))
    ends = {}
    for source, tracked in (("step", True), ("step", False), ("sample", True), ("auto", True)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        if tracked:
            track_moments(model)
        compressor = hvd.VarianceCompressor(alpha=0.9, moments=source)
        model.compile(optimizer(compression=compressor), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        ends[source, tracked] = digest(model.get_weights())
    assert ends["step", True] == ends["step", False] != ends["sample", True] == ends["auto", True]
    return ends["sample", True]


def watched(folder):
    """Records under `fit`; the same weights with and without, and a second `fit` goes on."""
    from hvd_gradcomp.tensorflow.keras import callbacks

    path = Path(folder, "stats.jsonl")
    strom = hvd.StromCompressor(tau=0.01, index_coding="int32")
    random = np.random.default_rng(10 + hvd.rank())
    x, y = (random.standard_normal((64, n)).astype(np.float32) for n in (6, 2))
    ends = []
    for watches in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="head")])
        model.compile(optimizer(compression=strom), "mse")
        for _ in range(2):
            writer = callbacks.StatsWriter(every=4, writers=[hvd.JSONLines(path)])
            model.fit(
                x,
                y,
                batch_size=8,
                shuffle=False,
                verbose=0,
                callbacks=[writer] if watches else [],
            )
        ends.append(digest(model.get_weights()))
    assert ends[0] == ends[1]
    stats = hvd.compression_stats(model.optimizer)
    assert stats.skipped == 0 and stats.residual_norm > 0
    if hvd.rank() == 0:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(r["step"], r["compression/steps"]) for r in records] == [
            (step, 4) for step in (4, 8, 12, 16)
        ]
        assert all(r["compression/density/head/kernel"] > 0 for r in records)
        norm = records[-1]["compression/gradient_norm"]
        assert math.isclose(norm, stats.gradient_norm, rel_tol=1e-6) and norm > 0

    # In a custom loop, where the norm is that of what was reduced.
    w = tf.Variable(tf.ones((5, 4)))
    gradient = tf.random.stateless_normal((5, 4), (hvd.rank(), 0))
    hvd.reduce_gradients([gradient], [w])
    writer = hvd.StatsWriter([w], every=1)
    (mean,) = hvd.reduce_gradients([gradient], [w])
    writer.step()
    stats = hvd.compression_stats([w])
    if hvd.rank() == 0:
        assert math.isclose(stats.gradient_norm, tf.norm(mean), rel_tol=1e-6)
    assert stats.residual_norm is None
    return ends[1]


def overflow(compressor, compiled=lambda function: function):
    """No rank's gradient overflows, their sum does."""
    sources = [tf.Variable(tf.ones((40, 64)))]

    @compiled
    def reduce(gradient):
        return hvd.reduce_gradients([gradient], sources, compression=compressor, op=hvd.Sum)

    reduce(tf.fill((40, 64), 3e38))


def degenerate():
    """Variables without elements, of one, and of no dimension, in graphs."""
    for compressor in (hvd.NoneCompressor(), hvd.StromCompressor(0.1), hvd.SparseGDCompressor(0.1)):
        for shapes in (((0,),), ((), (0, 3), (40, 9))):
            sources = [tf.Variable(tf.ones(shape)) for shape in shapes]

            @tf.function
            def reduce(gradients, sources=sources, compressor=compressor):
                return hvd.reduce_gradients(gradients, sources, compression=compressor)

            for reduced, shape in zip(reduce([tf.ones(shape) for shape in shapes]), shapes):
                assert tuple(reduced.shape) == shape
                assert bool(tf.reduce_all(tf.math.is_finite(reduced)))


def tape(**options):
    with tf.GradientTape() as plain:
        pass
    return hvd.DistributedGradientTape(plain, **options)


def optimizer(**options):
    return DistributedOptimizer(
        options.pop("optimizer", None) or keras.optimizers.SGD(0.1), **options
    )


def different_models():
    w = tf.Variable(tf.ones((3 + hvd.rank(), 2)))
    with tf.GradientTape() as plain:
        value = tf.reduce_sum(w)
    hvd.DistributedGradientTape(plain, compression=hvd.StromCompressor()).gradient(value, [w])


def differing(compression, change):
    """Between two steps rank 0 changes its reducer, and rank 1 does not."""
    known, w = set(living), tf.Variable(tf.ones((3, 3, 32, 64)))

    @tf.function
    def step():
        with tf.GradientTape() as plain:
            value = tf.reduce_sum(tf.square(w))
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        w.assign_sub(0.01 * tape.gradient(value, [w])[0])

    for number in range(3):
        if number == 2 and hvd.rank() == 0:
            (reducer,) = set(living) - known
            change(reducer)
        step()


def other_step():
    compression = hvd.after(1, None, hvd.StromCompressor(tau=0.1))
    differing(compression, lambda reducer: reducer.steps.assign_sub(2))


def retrained_alone():
    compression = hvd.GradiVeQCompressor(
        ratio=4, warmup_steps=0, sample_steps=2, compress_steps=2, slice_size=64
    )
    differing(compression, lambda reducer: reducer.retrain())


def xla():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer(compression=hvd.StromCompressor()), "mse", jit_compile=True)
    model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)


def xla_switched_off():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer(compression=hvd.StromCompressor()), "mse", jit_compile=True)
    from hvd_gradcomp.tensorflow.keras import callbacks

    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0, callbacks=[broadcast])


def frozen_layer():
    """Freezes a layer and thaws it: it does not move meanwhile, and nothing of it is lost."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    distributed = DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=hvd.StromCompressor(tau=0.2)
    )
    random = np.random.default_rng(5 + hvd.rank())
    x, y = random.standard_normal((16, 6)), random.standard_normal((16, 2))

    def fit(trainable):
        model.layers[0].trainable = trainable
        model.compile(distributed, "mse", jit_compile=False)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        return [w.copy() for w in model.layers[0].get_weights()], residual()

    def residual():
        (bucket,) = distributed._gradcomp.buckets
        layout = bucket.layout
        (vector,) = [v for v in bucket.variables if v.shape == (layout.size,)]
        slots = [
            place for place, shape in enumerate(layout.shapes) if 5 in shape and 2 not in shape
        ]
        cut = [(layout.offsets[i], layout.offsets[i] + layout.sizes[i]) for i in slots]
        return [vector.numpy()[start:end] for start, end in cut]

    moving = fit(True)
    assert any(x.any() for x in moving[1])
    for before, after in zip(moving, fit(False)):
        assert all(np.array_equal(a, b) for a, b in zip(before, after))
    thawed = fit(True)
    assert not np.array_equal(thawed[0][0], moving[0][0])
    return digest(model.get_weights())


def late_layer():
    """One that was not trainable when the optimizer was built."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    distributed = DistributedOptimizer(keras.optimizers.SGD(0.1))
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        model.compile(distributed, "mse", jit_compile=False)
        model.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)


def pass_of(distributed, variable, graph):
    def run():
        distributed.apply([tf.ones(variable.shape)], [variable])

    return tf.function(run) if graph else run


def unlike_passes():
    """A pass may bring gradients of layers that the last one of its step has none of."""
    results = []
    for graph in (False, True):
        variables = [keras.Variable(np.zeros(n, "float32")) for n in (3, 2)]
        distributed = optimizer(optimizer=keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        distributed.build(variables)
        passes = [pass_of(distributed, variable, graph) for variable in variables]
        for run in passes * 2:
            run()
        results += [variable.numpy().tolist() for variable in variables]
    assert results == [[-2.0] * 3, [-2.0] * 2] * 2, results


def not_decayed():
    """What was excluded from weight decay is so in the distributed optimizer, too."""
    weight = keras.Variable(np.ones(3, "float32"), name="kernel")
    plain = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    plain.exclude_from_weight_decay(var_names=["kernel"])
    distributed = optimizer(optimizer=plain)
    distributed.build([weight])
    distributed.apply([tf.zeros(3)], [weight])
    assert weight.numpy().tolist() == [1.0] * 3


def scaled_by_keras():
    """`loss_scale_factor` changes nothing: what is kept is in the units of the loss."""
    random = np.random.default_rng(10 + hvd.rank())
    x, y = (random.standard_normal((32, n)).astype(np.float32) for n in (6, 2))
    ends = []
    for factor in (None, 1024.0):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        plain = keras.optimizers.SGD(0.1, loss_scale_factor=factor)
        strom = hvd.StromCompressor(tau=0.3)
        model.compile(optimizer(optimizer=plain, compression=strom), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        ends.append(digest(model.get_weights()))
    assert ends[0] == ends[1]


def small_gradients():
    """What a loss scale saves from underflow in half precision is not lost on the way."""
    small, scale = 2.0**-30, 2.0**20
    strom = hvd.StromCompressor(tau=small / 2, index_coding="int32")  # sends all at once, dense
    for compression, sent in ((None, 1.5 * small), (strom, small / 2)):
        weight = tf.Variable(tf.ones(64, tf.float16))
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(tf.cast(weight, tf.float32)) * (small * scale * (1 + hvd.rank()))
        tape = hvd.DistributedGradientTape(plain, compression=compression, loss_scale=scale)
        (gradient,) = tape.gradient(loss, [weight])
        assert gradient.dtype == tf.float16
        np.testing.assert_allclose(gradient.numpy(), sent * scale, rtol=1e-2)


def constrained(dtype):
    """Variables of which all but the last have a constraint."""
    random, made = np.random.default_rng(1), []
    kinds = keras.constraints.NonNeg(), keras.constraints.UnitNorm(), keras.constraints.MaxNorm(1.0)
    for shape, constraint in zip(((6, 4), (5, 3), (4, 3), (3,)), (*kinds, None)):
        name = f"layer_{len(made)}"
        made.append(keras.Variable(random.standard_normal(shape), dtype=dtype, name=name))
        made[-1].constraint = constraint
    return made


def several_optimizers():
    from keras.src.optimizers.multi_optimizer import OptimizerMap

    several = OptimizerMap(keras.optimizers.SGD(0.1, use_ema=True))
    several["layer_0"] = keras.optimizers.Adam(0.1, clipnorm=0.3)
    return keras.optimizers.MultiOptimizer(several)


def like_keras():
    """Largest differences to Keras's own optimizer with the mean gradient, in each option."""
    made, results = keras.optimizers, {}
    often = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}

    def adam(**more):
        return lambda: made.Adam(0.1, **more)

    def scaled():
        return made.LossScaleOptimizer(made.Adam(0.1, use_ema=True, clipnorm=0.3), 64.0)

    def distant(optimizers, scale=1.0, passes=1, dtype="float32", steps=6):
        wrap, plain = optimizers if isinstance(optimizers, tuple) else (None, optimizers)
        ours, theirs = constrained(dtype), constrained(dtype)
        wrap = wrap or (lambda x: DistributedOptimizer(x, backward_passes_per_step=passes))
        optimizer, stock = wrap(plain()), plain()
        optimizer.build(ours)
        step, total = tf.function(lambda gradients: optimizer.apply(gradients, ours)), []
        for number in range(steps):
            random = np.random.default_rng((7, number))
            ranks = [[random.standard_normal(v.shape) for v in ours] for _ in range(hvd.size())]
            step([tf.cast(scale * g, dtype) for g in ranks[hvd.rank()]])
            mean = [scale * sum(each) / hvd.size() for each in zip(*ranks)]
            total = mean if number % passes == 0 else [a + b for a, b in zip(total, mean)]
            if number % passes == passes - 1:
                stock.apply([tf.cast(g, dtype) for g in total], theirs)
        for each, variables in ((optimizer, ours), (stock, theirs)):
            each.finalize_variable_values(variables)
        ends = [[v.numpy().astype("float64") for v in each] for each in (ours, theirs)]
        return max(float(np.abs(a - b).max()) for a, b in zip(*ends)), digest(ends[0])

    def momenta(adam):
        return MomentumExchange(adam, None, 100)

    for name, how in {
        "averages": {"optimizers": adam(use_ema=True)},
        "averages, often": {"optimizers": adam(**often)},
        "averages, skipping": {
            "optimizers": (lambda x: DistributedOptimizer(x, nonfinite="skip"), adam(**often))
        },
        "clipnorm": {"optimizers": adam(clipnorm=0.3)},
        "clipvalue": {"optimizers": adam(clipvalue=0.3)},
        "global_clipnorm": {"optimizers": adam(global_clipnorm=0.3)},
        "weight_decay": {"optimizers": lambda: made.AdamW(0.1, weight_decay=0.1)},
        "loss_scale_factor": {
            "optimizers": adam(loss_scale_factor=64.0, global_clipnorm=0.3),
            "scale": 64.0,
        },
        "scaler": {"optimizers": scaled, "scale": 64.0},
        "passes": {"optimizers": adam(global_clipnorm=0.3, **often), "passes": 2},
        "passes, float64": {"optimizers": adam(), "passes": 2, "dtype": "float64"},
        "bfloat16": {"optimizers": adam(use_ema=True), "dtype": "bfloat16"},
        "float64": {"optimizers": adam(use_ema=True), "dtype": "float64"},
        "several": {"optimizers": several_optimizers},
        "momenta": {"optimizers": (momenta, adam(**often))},
        "momenta, scaled": {"optimizers": (momenta, adam(loss_scale_factor=64.0)), "scale": 64.0},
        "momenta, float64": {"optimizers": (momenta, adam()), "dtype": "float64"},
    }.items():
        difference, end = distant(**how)
        bound = 1e-12 if how.get("dtype") == "float64" else 1e-6
        assert difference < bound, f"{name}: {difference}"
        results[name] = end
    return results


def left_behind():
    """Counts of what stays after each of three models that were trained and dropped."""
    from hvd_gradcomp.tensorflow.keras import callbacks

    x = np.random.default_rng(1).standard_normal((16, 6)).astype(np.float32)

    def network(compiled):
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        made.compile(compiled, "mse", run_eagerly=True)
        return made

    def fitted(make, *after):
        def run():
            made = network(make(keras.optimizers.Adam(0.1)))
            made.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[each() for each in after])
            return made

        return run

    def taped():
        weights = [tf.Variable(tf.ones((6, 2)))]
        for _ in range(2):
            hvd.reduce_gradients([tf.ones((6, 2))], weights, hvd.StromCompressor())
        return weights[0]

    def local():
        weights = [tf.Variable(tf.ones((6, 2)))]
        steps = hvd.LocalSteps(weights, 2, compression=hvd.StromCompressor(), deadline=1.0)
        for _ in range(2):
            steps.step()
        steps.exchange()
        return weights[0]

    results = {}
    for name, run in {
        "optimizer": fitted(optimizer_around),
        "momenta": fitted(lambda adam: MomentumExchange(adam, None, 1)),
        "tape": taped,
        "local steps": local,
        "callback": fitted(lambda adam: adam, lambda: callbacks.LocalSteps(2, warmup_steps=1)),
    }.items():
        results[name] = []
        for _ in range(3):
            trained = weakref.ref(run())
            for _ in range(3):
                gc.collect()
            files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
            variables = sum(isinstance(x, tf.Variable) for x in gc.get_objects())
            records = len(stall_inspector.records())
            gone = trained() is None
            results[name].append([gone, files, threads, len(living), records, variables])
    return results


def optimizer_around(plain):
    return optimizer(optimizer=plain, compression=hvd.StromCompressor(tau=0.01))


def too_few():
    variables = [keras.Variable(np.zeros(3)) for _ in range(2)]
    distributed = optimizer()
    distributed.build(variables)
    distributed.apply([tf.ones(3)], variables)


def given_twice():
    a = keras.Variable(np.zeros(3))
    distributed = optimizer()
    distributed.build([a])
    distributed.apply([tf.ones(3), 2 * tf.ones(3)], [a, a])


def sparse_alone():
    """Rank 1 would wait for rows that rank 0 does not have, if it asked before it has heard."""
    table, other = tf.Variable(tf.ones((4, 3))), tf.Variable(tf.ones(3))
    for step in range(2):
        with tf.GradientTape() as plain:
            used = tf.gather(table, [1]) if step and hvd.rank() else table
            loss = tf.reduce_sum(used) + tf.reduce_sum(other)
        tape = hvd.DistributedGradientTape(plain, compression=hvd.StromCompressor())
        tape.gradient(loss, [table, other])


def inside_stock():
    train(stock, compression=hvd.VarianceCompressor())


def main(folder: str) -> None:
    try:
        tape()
        before_init = "nothing was raised"
    except ValueError as error:
        before_init = str(error)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with on_timeline(hvd, folder):
        replicas = {
            "bfloat16": train(hvd, "bfloat16", compression=hvd.StromCompressor(tau=0.01)),
            "float16": train(hvd, "float16", compression=hvd.StromCompressor(tau=0.01)),
            "float64": train(hvd, "float64", compression=hvd.StromCompressor(tau=0.01)),
            "bfloat16, dense": train(hvd, "bfloat16", compression=hvd.NoneCompressor()),
            "embedding": embedding(False),
            "embedding as dense": embedding(True),
            "watched": watched(folder),
        }
    hvd.init()
    replicas["micro-batches"] = micro_batches()
    replicas["explicit moments"] = explicit_moments()
    replicas["frozen layer"] = frozen_layer()
    replicas["like Keras"] = like_keras()
    errors = errors_of(
        {
            "groups": lambda: tape(groups=2),
            "adasum": lambda: tape(op=hvd.Adasum),
            "no compressor": lambda: tape(compression=3),
            "no moments": lambda: tape(compression=hvd.VarianceCompressor(moments="sample")),
            "keras groups": lambda: optimizer(num_groups=2),
            "no optimizer": lambda: optimizer(optimizer=3.0),
            "passes": lambda: optimizer(backward_passes_per_step=0),
            "accumulation": lambda: optimizer(
                optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            ),
            "accumulation inside": lambda: optimizer(
                optimizer=keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
                )
            ),
            "unlike passes": unlike_passes,
            "not decayed": not_decayed,
            "scaled by keras": scaled_by_keras,
            "small gradients": small_gradients,
            "too few": too_few,
            "given twice": given_twice,
            "sparse alone": sparse_alone,
            "one pass": lambda: optimizer(compression=hvd.VarianceCompressor(moments="microbatch")),
            "stats": lambda: hvd.compression_stats([tf.Variable(1.0)]),
            "inside stock": inside_stock,
            "late layer": late_layer,
            "xla": xla,
            "xla switched off": xla_switched_off,
            "different models": different_models,
            "other step": other_step,
            "retrained alone": retrained_alone,
            "none overflows": lambda: overflow(hvd.NoneCompressor()),
            "levels overflow": lambda: overflow(hvd.QSGDCompressor()),
            "signs overflow in a graph": lambda: overflow(hvd.OneBitCompressor(), tf.function),
            "values overflow": lambda: overflow(hvd.SparseGDCompressor(density=0.1)),
            "degenerate": degenerate,
        }
    )
    errors["before init"] = before_init
    left = left_behind()
    finish(
        hvd, folder, {"left": left, "pairs": stock_pairs(), "replicas": replicas, "errors": errors}
    )


if __name__ == "__main__":
    main(sys.argv[1])
