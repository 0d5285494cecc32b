"""Horovod's recipes for Keras: saving and loading, resuming, callbacks, layers of one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow as hvd_tf
import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp import (
    DGCCompressor,
    GradiVeQCompressor,
    LGCCompressor,
    SparseGDCompressor,
    StromCompressor,
    VarianceCompressor,
    __version__,
    partition,
    role,
)
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.planning.configuration import as_config
from hvd_gradcomp.tensorflow.interop.variables import is_rank_local
from tests.methods import ONE_OF_EACH
from tests.parallel.workers.results import digest, errors_of, finish

LOSS = keras.losses.MeanSquaredError()
STROM = StromCompressor(tau=0.01)
GRADIVEQ = GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=3, compress_steps=9)
LGC = LGCCompressor(alpha=0.3, full_steps=2, train_steps=40, momentum=0.9)
RULES = partition([(role("bias"), None), ("*", DGCCompressor(0.1))])
EVERY = [*ONE_OF_EACH, GRADIVEQ, LGC, RULES]


def data(samples=32):
    random = np.random.default_rng(100 + hvd.rank())
    x, y = (random.standard_normal((samples, n)).astype(np.float32) for n in (20, 3))
    return x, y


def network(build=True, dropout=0.0):
    keras.utils.set_random_seed(1 + hvd.rank())
    return keras.Sequential(
        [
            *([keras.Input((20,))] if build else []),
            layers.Dense(16, activation="tanh"),
            layers.Dropout(dropout),
            layers.Dense(8),
            layers.Dense(3, name="head"),
        ]
    )


class Subclassed(keras.Model):
    """One that Keras builds when it is called."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1 + hvd.rank())
        self.hidden, self.head = layers.Dense(16, activation="tanh"), layers.Dense(3)

    def call(self, x, training=False):
        return self.head(self.hidden(x))


class Trained(Subclassed):
    """One with a training step of its own, which keeps the batch under other names."""

    def train_step(self, batch):
        (inputs, target), _ = batch
        with tf.GradientTape() as tape:
            value = LOSS(target, self(inputs))
        tape = hvd_tf.DistributedGradientTape(tape, compression=STROM)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(value, weights), weights)
        return {"loss": value}


def plain_for(compressor):
    if correction_of(compressor):
        return keras.optimizers.SGD(0.001, momentum=0.9)
    return keras.optimizers.Adam(0.01)


def compiled(model, compressor, **options):
    optimizer = hvd.DistributedOptimizer(plain_for(compressor), compression=compressor, **options)
    model.compile(optimizer, LOSS)
    return model


def fit(model, *callbacks, epochs=1):
    x, y = data()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[broadcast, hvd.callbacks.MetricAverageCallback(), *callbacks],
    )
    return model


def weights(model):
    return digest(np.asarray(w) for w in model.get_weights())


def everything(model):
    return digest(np.asarray(v.value) for v in (*model.variables, *model.optimizer.variables))


def reducer_of(model):
    return model.optimizer._gradcomp


def filled(model, steps):
    """As if it had trained: something in everything that its exchange keeps."""
    random = np.random.default_rng(5)
    reducer = reducer_of(model)
    for v in reducer.planner.variables:
        v.assign(tf.cast(random.integers(1, 100, v.shape), v.dtype))
    reducer.steps.assign(steps)
    model.optimizer.iterations.assign(steps)
    return model


def saved_and_loaded(folder):
    """Every compressor, by Keras's own functions."""
    pairs = {}
    for place, compressor in enumerate(EVERY):
        model = compiled(network(), compressor)
        model.optimizer.build(model.trainable_variables)
        path = Path(folder, f"saved-{place}-{hvd.rank()}.keras")
        filled(model, 5).save(path)
        loaded = keras.models.load_model(path)
        pairs[f"loaded {compressor!r}"] = [everything(loaded), everything(model)]
        config = json.loads(json.dumps(model.optimizer.get_config()))
        again = type(model.optimizer).from_config(config)
        assert again._compressor == model.optimizer._compressor, again._compressor
        left_out = dict.fromkeys(("decay",))
        assert {**again.get_config(), **left_out} == {**config, **left_out}
    return pairs


def goes_on(folder):
    """Loaded and trained on; in mixed precision too, and from a file without compression."""
    pairs, replicas = {}, {}
    model = fit(compiled(network(), STROM))
    path = str(Path(folder, f"model-{hvd.rank()}.keras"))
    model.save(path)
    loaded = keras.models.load_model(path)
    pairs["trains on"] = [everything(fit(loaded)), everything(fit(model))]
    replicas["trains on"] = weights(loaded)
    # Once more, around an optimizer that is distributed already: with its state.
    again = hvd.DistributedOptimizer(loaded.optimizer, compression=STROM)
    pairs["around itself"] = [
        digest(np.asarray(v) for v in again.variables),
        digest(np.asarray(v) for v in loaded.optimizer.variables),
    ]
    # Another compressor: Adam's own goes on, the exchange begins anew.
    other = hvd.load_model(path, compression=VarianceCompressor())
    moments = len(other.optimizer._plain)
    moments_here = digest(np.asarray(v) for v in other.optimizer.variables[:moments])
    reloaded = keras.models.load_model(path).optimizer
    pairs["another compressor"] = [
        moments_here,
        digest(np.asarray(v) for v in reloaded.variables[:moments]),
    ]
    anew = reducer_of(other)
    pairs["anew"] = [[int(anew.steps), repr(anew.compressor)], [0, repr(VarianceCompressor())]]
    # Undistributed: distributed afterwards, and still so when it is saved again.
    bare = network()
    bare.compile(keras.optimizers.Adam(0.01), LOSS)
    bare.fit(*data(), verbose=0)
    bare.save(path)
    first = hvd.load_model(path, compression=STROM)
    pairs["undistributed"] = [int(first.optimizer.iterations), int(bare.optimizer.iterations)]
    first.save(path)
    pairs["and saved"] = [repr(keras.models.load_model(path).optimizer._compressor), repr(STROM)]
    keras.config.set_dtype_policy("mixed_float16")
    try:
        scaled = compiled(network(), STROM)
        scaled.optimizer.build(scaled.trainable_variables)
        scaled.save(path)
        loaded = keras.models.load_model(path)
        inner = loaded.optimizer.inner_optimizer
        pairs["mixed precision"] = [repr(inner._gradcomp.compressor), repr(STROM)]
        replicas["mixed precision"] = weights(fit(loaded))
        inside = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), compression=STROM
        )
        again = keras.optimizers.deserialize(keras.optimizers.serialize(inside))
        assert again._compressor == STROM and type(again) is type(inside)
    finally:
        keras.config.set_dtype_policy("float32")
    return pairs, replicas


def resumed(folder):
    """Rank 0 alone loads; every compressor's state, and then some that train on."""
    replicas, logged = {}, 0
    path = str(Path(folder, "resumed.keras"))
    for compressor in EVERY:
        model = compiled(network(), compressor)
        if hvd.rank() == 0:
            model.optimizer.build(model.trainable_variables)
            filled(model, 7).save(path)
            model = hvd.load_model(path)
        else:
            model.optimizer.build(model.trainable_variables)
        reducer = reducer_of(model)
        hvd.broadcast_variables(model.variables, 0)
        hvd.broadcast_variables(model.optimizer.variables, 0)
        shared = [v.numpy() for _, v in reducer.planner.replicated]
        residuals = [v for v in reducer.planner.variables if is_rank_local(v)]
        learned = {id(v) for v, _ in reducer.planner.learned_by_one(7)}
        if hvd.rank() == 1:
            begun = [pair for bucket in reducer.buckets for pair in leaves(bucket.template)]
            for v, (field, start) in zip(reducer.planner.variables, begun):
                if is_rank_local(v) and id(v) not in learned:
                    same = np.array_equal(v.numpy(), start.numpy(), equal_nan=True)
                    assert same, (compressor, field, v, start)
        logged += reducer.planner.keeps_local
        together = [v.numpy() for v in residuals if id(v) in learned]
        replicas[f"resumed {compressor!r}"] = [
            int(reducer.steps),
            int(model.optimizer.iterations),
            reducer.name,
            digest([*shared, *together, *model.get_weights()]),
        ]
        assert int(reducer.steps) == 7
    # Horovod's example: the callback broadcasts what rank 0 has loaded; here others are not built.
    for compressor in (RULES, LGC):
        if hvd.rank() == 0:
            model = compiled(network(), compressor)
            model.optimizer.build(model.trainable_variables)
            reducer_of(model).steps.assign(50)
            model.save(path)
            model = hvd.load_model(path)
        else:
            model = compiled(network(build=compressor is LGC), compressor)
        fit(model)
        logged += reducer_of(model).planner.keeps_local
        hvd.verify(model.optimizer)
        replicas[f"trains on from rank 0: {compressor!r}"] = weights(model)
        assert int(reducer_of(model).steps) == 54
    return replicas, logged


def not_built():
    replicas = {}
    for name, make, compressor in (
        ("sequential", lambda: network(build=False), VarianceCompressor(alpha=0.9)),
        ("subclassed", Subclassed, GRADIVEQ),
        ("eager", Subclassed, STROM),
    ):
        model = compiled(make(), compressor)
        model.run_eagerly = name == "eager"
        writer = hvd.callbacks.StatsWriter(every=2)
        fit(model, *([writer] if name == "sequential" else []))
        hvd.verify(model.optimizer)
        # Built with the weights of rank 0, which are those of a model that is built before.
        replicas[f"not built: {name}"] = weights(model)
    early = fit(compiled(network(), VarianceCompressor(alpha=0.9)))
    pairs = {"built or not": [replicas["not built: sequential"], weights(early)]}
    model = Trained()
    model.compile(keras.optimizers.SGD(0.01), LOSS)
    x, y = data()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    batches = tf.data.Dataset.from_tensor_slices(((x, y), y)).batch(8)
    model.fit(batches, verbose=0, callbacks=[callback])
    replicas["a training step of its own"] = weights(model)
    return replicas, pairs


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(round(float(self.model.optimizer.learning_rate), 6))


def schedules():
    """Rates, and the velocity as Horovod's formula has it."""
    pairs = {}
    rates = Rates()
    model = compiled(network(), STROM)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=1)
    after = hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=2)
    fit(model, warmup, after, rates, epochs=4)
    expected = [0.4 * (1 + batch / 8) for batch in range(1, 9)] + [0.8] * 4 + [0.4] * 4
    pairs["rates"] = [rates.seen, [round(rate, 6) for rate in expected]]
    pairs["logged"] = [
        [round(rate, 6) for rate in model.history.history["lr"]],
        [round(rate, 6) for rate in (0.6, 0.8, 0.8, 0.4)],
    ]

    # One weight, one gradient a batch: v = m * (new / old) * v - new * g.
    class Constant(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(shape=(1,), initializer="zeros", name="w")

        def call(self, x):
            return x * self.w

    model = Constant()
    model.build((None, 1))
    plain = keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(hvd.DistributedOptimizer(plain), lambda true, out: out)
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1 + epoch, staircase=False, steps_per_epoch=4
    )
    x = np.ones((4, 1), np.float32)
    model.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=[schedule])
    v = w = 0.0
    old = 0.1
    for batch in range(8):
        new = 0.1 * (1 + batch / 4)
        v = 0.5 * (new / old) * v - new * 1.0
        w, old = w + v, new
    pairs["momentum"] = [round(float(model.w[0]), 5), round(w, 5)]
    return pairs


def local_layers(folder):
    """Gradients of one layer stay on their rank, in an optimizer and in a tape."""
    pairs, x = {}, tf.constant(data()[0][:8])

    def gradients(model):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(x))
        return tape, value

    for scaled in (True, False):
        ends = {}
        for kind in ("tape", "optimizer", "passes"):
            model = network()
            hvd.broadcast_variables(model.variables, 0)
            before = [np.array(w) for w in model.get_weights()]
            plain, options = keras.optimizers.SGD(1.0), {"scale_local_gradients": scaled}
            variables, local = model.trainable_variables, [model.get_layer("head")]
            tape, value = gradients(model)
            of_rank = [g.numpy() for g in tape.gradient(value, variables)]
            if kind == "tape":
                wrapped = hvd_tf.PartialDistributedGradientTape(
                    gradients(model)[0], local_layers=local, **options
                )
                with wrapped:
                    value = tf.reduce_sum(model(x))
                of_local, shared = wrapped.get_local_and_global_gradients(value, variables)
                assert [v.path for v, _ in of_local] == [v.path for v in local[0].variables]
                by_variable = {id(v): g for v, g in (*of_local, *shared)}
                plain.build(variables)
                plain.apply([by_variable[id(v)] for v in variables])
            else:
                passes = {"backward_passes_per_step": 2} if kind == "passes" else {}
                plain = hvd.PartialDistributedOptimizer(
                    plain, local_layers=local[0], **options, **passes
                )
                for _ in range(2 if passes else 1):
                    plain.apply([tf.constant(g / (2 if passes else 1)) for g in of_rank], variables)
            moved = [b - np.asarray(a) for a, b in zip(model.get_weights(), before)]
            ends[kind] = [np.round(m.astype(np.float64), 4).tolist() for m in moved]
        means = [hvd_tf.allreduce(tf.constant(g), op=hvd_tf.Average).numpy() for g in of_rank]
        expected = [*means[:4], *(g / (2 if scaled else 1) for g in of_rank[4:])]
        for kind, moved in ends.items():
            errors = [np.abs(np.array(a) - b).max() for a, b in zip(moved, expected)]
            pairs[f"local, {kind}, scaled={scaled}"] = [bool(max(errors) < 1e-3), True]

    # In `fit`, with NaN in a local gradient of one rank: all leave the step out.
    def trained(compressor, poison=False):
        model = network()
        local = model.get_layer("head")
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.01),
            compression=compressor,
            local_layers=[local],
            nonfinite="skip",
        )
        model.compile(optimizer, LOSS)
        fit(model)
        return model, optimizer

    model, optimizer = trained(STROM)
    shared = model.trainable_variables[:4]
    pairs["local weights differ"] = [
        len(set(hvd_tf.allgather_object(weights(model)))),
        hvd.size(),
    ]
    replicas = {"shared weights": digest(v.numpy() for v in shared)}
    bad = [tf.ones(v.shape) for v in model.trainable_variables]
    if hvd.rank() == 1:
        bad[4] = bad[4] * float("nan")
    before = weights(model)
    optimizer.apply(bad, model.trainable_variables)
    pairs["local NaN"] = [weights(model), before]
    saved_in = Path(folder, "local")
    hvd.save_checkpoint(saved_in, model=model)
    other, _ = trained(STROM)
    hvd.load_checkpoint(saved_in, model=other)
    pairs["local, loaded"] = [everything(other), everything(model)]
    again = hvd.DistributedOptimizer(optimizer, compression=STROM)
    pairs["local, around itself"] = [sorted(again._local), sorted(optimizer._local)]
    path = Path(folder, f"local-{hvd.rank()}.keras")
    model.save(path)
    pairs["local, by Keras"] = [
        sorted(keras.models.load_model(path).optimizer._local),
        sorted(optimizer._local),
    ]
    return pairs, replicas, lambda: hvd.save_checkpoint(saved_in, mode="consolidated", model=model)


def stays():
    """`local_variables=` of the callback."""
    model = compiled(network(), STROM)
    bias = model.get_layer("head").bias
    bias.assign(tf.fill(bias.shape, float(hvd.rank())))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [bias])
    callback.set_model(model)
    callback.on_train_begin()
    return {
        "stays": [bias.numpy().tolist(), [float(hvd.rank())] * 3],
        "is a function": [float(hvd.broadcast(float(hvd.rank() + 1), 0)), 1.0],
    }


def undistributed(where=(0, 1), callback=None):
    model = network()
    local = (
        keras.optimizers.Adam()
        if hvd.rank() in where
        else hvd.DistributedOptimizer(keras.optimizers.Adam())
    )
    model.compile(local, LOSS)
    callback = callback or hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*data(), verbose=0, callbacks=[callback])


def other_variables():
    hvd.broadcast_variables([tf.zeros(2)] * 2 + [tf.Variable(tf.zeros(3 + hvd.rank()))], 0)


def other_compressors():
    one = StromCompressor(1.0) if hvd.rank() == 0 else SparseGDCompressor()
    model = compiled(network(), one)
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.optimizer.variables, 0)


def with_schedule():
    model = network()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), LOSS)
    fit(model, hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5))


def without_steps():
    model = compiled(network(), STROM)
    x, y = data()

    def batches():
        yield x, y

    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    model.fit(batches(), verbose=0, callbacks=[callback])


def all_local():
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(), local_layers=[x for x in model.layers if x.weights]
    )
    optimizer.build(model.trainable_variables)


def too_early():
    model = network()
    once = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=model.layers[0])
    again = type(once).from_config(once.get_config())
    again.apply([tf.ones(2)], [keras.Variable(tf.ones(2))])


def twice():
    once = hvd.DistributedOptimizer(keras.optimizers.SGD())
    hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(once))


def as_saved(compressor):
    """What Keras writes of a distributed optimizer."""
    written = {
        "hvd_gradcomp": __version__,
        "optimizer": "Adam",
        "compression": as_config(compressor),
    }
    return {
        "module": "keras.src.optimizers.adam",
        "class_name": "Adam",
        "registered_name": "hvd_gradcomp>DistributedOptimizer",
        "config": {**keras.optimizers.Adam(0.25).get_config(), "decay": written},
    }


def by_plain_keras(folder):
    """What is loaded where nobody has imported this package."""
    path = str(Path(folder, f"plain-{hvd.rank()}.keras"))
    fit(compiled(network(), STROM)).save(path)
    known = keras.saving.get_custom_objects()
    ours = known.pop("hvd_gradcomp>DistributedOptimizer")
    try:
        optimizer = keras.models.load_model(path).optimizer
    finally:
        known["hvd_gradcomp>DistributedOptimizer"] = ours
    rate = round(float(optimizer.learning_rate), 6)
    return {"by plain Keras": [[type(optimizer) is keras.optimizers.Adam, rate], [True, 0.01]]}


def of_a_process_set(folder):
    pair = hvd.ProcessSet([0, 1])
    pair.process_set_id = 0  # the same ranks, and not the set that all know
    model = compiled(network(), STROM, process_set=pair)
    model.optimizer.build(model.trainable_variables)
    path = Path(folder, f"set-{hvd.rank()}.keras")
    model.save(path)
    loaded = hvd.load_model(path, process_set=pair)
    assert reducer_of(loaded).process_set is pair
    keras.models.load_model(path).predict(data()[0], verbose=0)
    hvd.load_model(path)


def refused(folder, early, consolidated):
    average = hvd.callbacks.MetricAverageCallback()
    return errors_of(
        {
            "undistributed": undistributed,
            "undistributed on one rank": lambda: undistributed((1,)),
            "averaged only": lambda: undistributed(callback=average),
            "other variables": other_variables,
            "other compressors": other_compressors,
            "schedule": with_schedule,
            "no steps": without_steps,
            "no filepath": lambda: fit(
                compiled(network(), STROM), hvd.callbacks.BestModelCheckpoint()
            ),
            "no layer": lambda: hvd.PartialDistributedOptimizer(
                keras.optimizers.SGD(), local_layers=["head"]
            ),
            "all local": all_local,
            "twice": twice,
            "too early": too_early,
            "before init": lambda: early.apply([tf.ones(2)], [keras.Variable(tf.ones(2))]),
            "process set": lambda: of_a_process_set(folder),
            "consolidated": consolidated,
        }
    )


def main(folder: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    early = keras.saving.deserialize_keras_object(as_saved(STROM))
    hvd.init()
    pairs, replicas = goes_on(folder)
    pairs.update(saved_and_loaded(folder))
    results, resumes = resumed(folder)
    replicas.update(results)
    results, more = not_built()
    replicas.update(results)
    pairs.update({**more, **schedules(), **stays(), **by_plain_keras(folder)})
    more, results, consolidated = local_layers(folder)
    pairs.update(more)
    replicas.update(results)
    errors = refused(folder, early, consolidated)
    result = {"pairs": pairs, "replicas": replicas, "errors": errors, "resumed": resumes}
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1])
