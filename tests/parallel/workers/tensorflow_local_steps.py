"""Local steps on TensorFlow over Horovod: tapes, Keras's `fit`, and what ranks do differently."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow as hvd
import hvd_gradcomp.tensorflow.keras as hvd_keras
from hvd_gradcomp.algorithms.combined.local_steps import DILOCO
from hvd_gradcomp.method.handover import residual_of
from tests.oracles import local_steps as oracle
from tests.parallel.workers.results import digest, errors_of, finish

EVERY = 3
SHAPES = (30,), (8, 5), (11,)
ENDS = [0, *np.cumsum([int(np.prod(shape)) for shape in SHAPES]).tolist()]
RATE = 0.05
METHODS = [
    hvd.NoneCompressor(),
    hvd.SparseGDCompressor(density=0.1),
    hvd.ChunkedTopKCompressor(chunk=32, k=2),
    hvd.PowerSGDCompressor(rank=1),
    hvd.Int8Compressor(),
]


def numbers(*key):
    return np.random.default_rng(key).normal(size=ENDS[-1]).astype(np.float32)


def gradient(rank, step, x):
    return (x - numbers(1, rank)) * 0.7 + 0.3 * numbers(2, rank, step)


def inner(rank, step, x):
    return x - RATE * gradient(rank, step, x)


def network():
    start = numbers(0)
    return [tf.Variable(start[a:b].reshape(s)) for a, b, s in zip(ENDS, ENDS[1:], SHAPES)]


def flat(variables):
    return np.concatenate([v.numpy().reshape(-1) for v in variables])


@tf.function(reduce_retracing=True)
def update(variables, gradients):
    for v, g in zip(variables, gradients):
        v.assign_sub(RATE * g)


def train(variables, local, steps, first=1):
    for step in range(first, first + steps):
        g = gradient(hvd.rank(), step, flat(variables))
        pieces = [tf.constant(g[a:b].reshape(s)) for a, b, s in zip(ENDS, ENDS[1:], SHAPES)]
        update(variables, local.reduce_gradients(pieces))
        local.step()


def far(values, wanted):
    return float(np.abs(values - wanted).max())


def against_the_papers():
    """Largest differences to the oracles, in float32."""
    variables, ranks = network(), hvd.size()
    local = hvd.LocalSteps(variables, EVERY, DILOCO, None)
    train(variables, local, 8)
    outer, locals_ = oracle.diloco(numbers(0), inner, ranks, 8, EVERY, 0.7, 0.9)
    results = {
        "diloco": max(far(flat(variables), locals_[hvd.rank()]), far(globals_of(local), outer))
    }
    variables = network()
    local = hvd.LocalSteps(variables, 4, DILOCO, None, fragments=3, delay=2)
    train(variables, local, 13)
    parts = [slice(a, b) for a, b in zip(ENDS, ENDS[1:])]
    how = 4, 0.7, 0.9, parts, 2, 0.5
    outer, locals_ = oracle.streaming(numbers(0), inner, ranks, 13, *how)
    results["streaming"] = max(
        far(flat(variables), locals_[hvd.rank()]), far(globals_of(local), outer)
    )
    return results


def globals_of(local):
    return flat([v for some in local.global_variables for v in some])


def warmup():
    """In a graph: the mean gradient at first, and this rank's later; the difference to that."""
    variables = network()
    local = hvd.LocalSteps(variables, 2, warmup_steps=3)

    @tf.function
    def step(gradients):
        update(variables, local.reduce_gradients(gradients))

    x = numbers(0).astype(np.float64)
    for number in range(1, 4):
        g = gradient(hvd.rank(), number, flat(variables))
        step([tf.constant(g[a:b].reshape(s)) for a, b, s in zip(ENDS, ENDS[1:], SHAPES)])
        local.step()
        x = np.mean([inner(rank, number, x) for rank in range(hvd.size())], axis=0)
    difference = far(flat(variables), x)
    train(variables, local, 1, 4)
    apart = digest([flat(variables)])
    train(variables, local, 1, 5)
    return difference, apart, digest([flat(variables)])


def methods():
    """Digests of variables between exchanges, and after some."""
    results = {}
    for compression in METHODS:
        variables = network()
        local = hvd.LocalSteps(variables, EVERY, compression=compression)
        train(variables, local, EVERY + 1)
        apart = digest([flat(variables)])
        train(variables, local, EVERY - 1, EVERY + 1)
        hvd.verify(local)
        stats = hvd.compression_stats(local)
        assert stats.steps == 2 * EVERY and stats.seconds_waited > 0
        first = digest([flat(variables)])
        more = 1 + hvd.rank() % 2  # not equally many, and fewer than are due
        train(variables, local, more, 2 * EVERY + 1)
        local.exchange()
        assert local.steps_made == 2 * EVERY + more
        results[repr(compression)] = apart, [first, digest([flat(variables)])]
    return results


def started():
    variables = network()
    compression = hvd.SparseGDCompressor(density=0.1)
    return variables, hvd.LocalSteps(variables, 4, compression=compression, delay=1)


def resumed(folder, cut_at):
    """Digests of two trainings, one of which was saved and loaded."""

    def end(variables, local):
        return digest([flat(variables), *(v.numpy() for v in local.variables)])

    variables, local = started()
    train(variables, local, cut_at)
    hvd.save_checkpoint(folder, variables=variables, local=local)
    train(variables, local, 4, cut_at + 1)
    again, other = started()
    hvd.load_checkpoint(folder, variables=again, local=other)
    train(again, other, 4, cut_at + 1)
    return end(variables, local), end(again, other)


def consolidated(folder):
    """Digests of variables before a save for any number of ranks, after the load, and later."""
    variables, local = started()
    train(variables, local, 6)
    local.exchange()
    hvd.save_checkpoint(folder, mode="consolidated", variables=variables, local=local)
    again, other = started()
    hvd.load_checkpoint(folder, variables=again, local=other)
    digests = [digest([flat(variables)]), digest([flat(again)])]
    train(again, other, 4, other.steps_made + 1)
    other.exchange()
    return [*digests, digest([flat(again)])]


def skipped():
    """NaN on one rank: all go back, and on."""
    variables = network()
    local = hvd.LocalSteps(
        variables, 2, compression=hvd.SparseGDCompressor(density=0.1), nonfinite="skip"
    )
    train(variables, local, 2)
    before = digest([flat(variables)])
    spoil(variables)
    train(variables, local, 2, 3)
    assert digest([flat(variables)]) == before
    train(variables, local, 2, 5)
    assert np.isfinite(flat(variables)).all()
    return digest([flat(variables)])


def spoil(variables):
    if hvd.rank() == 1:
        variables[0].assign(np.full(SHAPES[0], np.nan))


def slow_ranks():
    """Rounds in which the last rank sleeps in each step: steps, rounds, digests, what is lost."""
    results, pause = {}, 0.15 if hvd.rank() == hvd.size() - 1 else 0.005
    whole = hvd.ChunkedTopKCompressor(chunk=32, k=2, values="float32", decay=1.0)
    for compression in (hvd.NoneCompressor(), whole, hvd.Int8Compressor()):
        variables, total = network(), np.zeros(ENDS[-1])
        local = hvd.LocalSteps(
            variables, 8, hvd.OuterSGD(1.0, 0.0), compression, warmup_steps=1, deadline=0.05
        )
        while local.rounds < 4:
            time.sleep(pause)
            g = numbers(2, hvd.rank(), local.steps_made)
            total += g
            pieces = [tf.constant(g[a:b].reshape(s)) for a, b, s in zip(ENDS, ENDS[1:], SHAPES)]
            update(variables, local.reduce_gradients(pieces))
            local.step()
        slowest, rounds = local.steps_made, local.rounds
        local.exchange()
        assert local.is_exchanged
        hvd.verify(local)
        # The global variables have moved by the mean of all gradients but what is kept for later.
        kept = local_residual(local)
        sent = hvd.allreduce(tf.constant(RATE * total - kept), name="sent", op=hvd.Sum).numpy()
        lost = far(numbers(0) - flat(variables), sent / hvd.size())
        ends = digest([flat(variables)])
        results[type(compression).__name__] = slowest, [rounds, local.rounds, ends], lost
    return results


def local_residual(local):
    (reducer,), kept = local.reducers, np.zeros(ENDS[-1])
    for bucket in reducer.buckets:
        residual = residual_of(bucket.compressor, bucket.state)
        if residual is not None:
            names, sizes = [name for name, _, _ in reducer.layers], np.diff(ENDS)
            at = 0
            for name in bucket.layout.names:
                place = names.index(name)
                kept[ENDS[place] : ENDS[place + 1]] = residual[at : at + sizes[place]].numpy()
                at += sizes[place]
    return kept


def slow_and_resumed(folder):
    """Each rank saves after another number of steps of a round, and goes on from there."""

    def start():
        variables = network()
        compression = hvd.SparseGDCompressor(density=0.1)
        return variables, hvd.LocalSteps(variables, 4, compression=compression, deadline=0.1)

    def end(variables, local, rounds=3):
        while local.rounds < rounds:
            time.sleep(0.02 * hvd.rank())
            train(variables, local, 1, local.steps_made + 1)
        local.exchange()
        hvd.verify(local)
        return digest([flat(variables)])

    variables, local = start()
    train(variables, local, 1 + hvd.rank() % 2)
    hvd.save_checkpoint(folder, variables=variables, local=local)
    kept, made = flat(variables), local.steps_made
    train(variables, local, 1, made + 1)
    again, other = start()
    hvd.load_checkpoint(folder, variables=again, local=other)
    assert (flat(again) == kept).all() and other.steps_made == made
    other.exchange()  # also where a rank has made no step
    moved = digest([flat(again)])
    hvd.load_checkpoint(folder, variables=variables, local=local)  # numbers may be on their way
    ends = [moved, end(again, other), end(variables, local)]
    train(variables, local, 1, local.steps_made + 1)
    hvd.elastic.TensorFlowState(variables, local=local).sync()
    return [*ends, digest([flat(variables)]), end(variables, local, local.rounds + 2)]


def decaying(rate):
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(rate, 40))


RULE = hvd.QuadraticRule(RATE * 2**0.5, base=2)


def grows(step):
    return 2 + step // 6


class Ends(keras.callbacks.Callback):
    """Notes the step of each round of a `LocalSteps` before it, and a digest."""

    def __init__(self, local_steps):
        super().__init__()
        self.local_steps, self.seen = local_steps, []

    def on_train_batch_end(self, batch, logs=None):
        local = self.local_steps.local
        if local.rounds > len(self.seen):
            self.seen.append([local.steps_made, digest(weights(self.model))])


def lengths():
    """The end of each round that a rule or a function decides, with a digest; of loops and fits."""
    results = {}
    for name, every in (("rule", RULE), ("function", grows)):
        results[name] = scheduled(every, RATE)
        callback = hvd_keras.callbacks.LocalSteps(every, at_epoch_end=False)
        ends = Ends(callback)
        fit(model_of(decaying(RATE)), [callback, ends], last=30)
        results[f"fit, {name}"] = ends.seen
    return results


def scheduled(every, rate):
    """Train 30 steps at a rate that falls; return the ends of rounds as `lengths` does."""
    variables, sgd, ends = [keras.Variable(v.numpy()) for v in network()], decaying(rate), []
    sgd.build(variables)
    local = hvd.LocalSteps(variables, every, optimizer=sgd)
    for step in range(1, 31):
        g = gradient(hvd.rank(), step, flat(variables))
        pieces = [tf.constant(g[a:b].reshape(s)) for a, b, s in zip(ENDS, ENDS[1:], SHAPES)]
        sgd.apply(pieces, variables)
        local.step()
        if local.rounds > len(ends):
            ends.append([step, digest([flat(variables)])])
    return ends


# -- Keras ---------------------------------------------------------------------------------------


def data(rank, batches):
    random = np.random.default_rng(10 + rank)
    x = random.normal(size=(8 * batches, 6)).astype(np.float32)
    return x, x[:, :3] * (1 + rank)


def model_of(optimizer, *more, **options):
    keras.utils.set_random_seed(1 + hvd.rank())  # the callback broadcasts
    made = keras.Sequential([keras.Input((6,)), layers.Dense(3, use_bias=False), *more])
    made.compile(optimizer, "mse", **options)
    return made


def fit(model, callbacks, first=0, last=8, **options):
    x, y = data(hvd.rank(), last)
    hows = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    model.fit(x[8 * first :], y[8 * first :], callbacks=callbacks, **hows)
    return model


def weights(model):
    return [np.asarray(v.value) for v in model.weights]


def fit_against_the_paper():
    """The largest difference; with several steps an execution too."""
    results = {}
    for together in (1, 2):
        model = model_of(keras.optimizers.SGD(0.1), steps_per_execution=together)
        first = hvd.broadcast(model.weights[0].value, 0, name="first").numpy()

        def step(rank, number, flat):
            x, y = (a[8 * (number - 1) : 8 * number] for a in data(rank, 8))
            w = flat.reshape(6, 3)
            return (w - 0.1 * 2 / y.size * x.T @ (x @ w - y)).reshape(-1)

        outer, _ = oracle.diloco(first.reshape(-1), step, hvd.size(), 8, 4, 0.7, 0.9)
        fit(model, [hvd_keras.callbacks.LocalSteps(4, DILOCO, None)])
        results[str(together)] = far(weights(model)[0].reshape(-1), outer)
    return results


def fits():
    """Digests after `fit` with everything, and whether validation has seen global weights."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append(digest(v.numpy() for v in map(tf.convert_to_tensor, self.model.weights)))

    callback = hvd_keras.callbacks.LocalSteps(
        **hvd.sparse_loco(every=3, chunk=32, k=8), warmup_steps=2, average_buffers=True
    )
    model = model_of(keras.optimizers.AdamW(0.01), layers.BatchNormalization())
    rest = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.VerifyCallback(3),
        Watch(),
    ]
    fit(model, [callback, *rest], epochs=2, validation_data=data(0, 2))
    return [*seen, digest(weights(model))]


def fit_resumed(folder):
    """Digests of weights and optimizers of all, saved in the middle of a round."""

    def start():
        model = model_of(keras.optimizers.Adam(0.01), layers.Dense(3))
        how = {"compression": hvd.SparseGDCompressor(density=0.2), "at_epoch_end": False}
        return model, hvd_keras.callbacks.LocalSteps(3, **how)

    def end(model):
        variables_ = map(tf.convert_to_tensor, model.optimizer.variables)
        return digest([*weights(model), *(v.numpy() for v in variables_)])

    class Saving(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                hvd.save_checkpoint(folder, model=self.model, local=whole_callback.local)

    whole, whole_callback = start()
    fit(whole, [whole_callback, Saving()])
    again, callback = start()
    hvd.load_checkpoint(folder, model=again, local=callback.build(again))
    fit(again, [callback], 4)
    return end(whole), end(again)


class Embedded(layers.Layer):
    """A table whose rows are drawn back in forward, as some embeddings are."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, 3), initializer="random_normal")

    def call(self, x):
        self.table.assign(tf.clip_by_norm(self.table.value, 0.1, axes=1))
        return x + tf.gather(self.table.value, tf.cast(tf.abs(x[:, 0]) * 4, tf.int32) % 12)


def averaged_fits():
    """Digests after each of two `fit` with moving averages, and the least weight of one >= 0."""
    results, sparse = {}, hvd.SparseGDCompressor(density=0.2)
    # An average begins with the first weights, so these keep the constraint too.
    within = keras.initializers.RandomUniform(0.0, 1.0)
    nonneg = {"kernel_constraint": keras.constraints.NonNeg(), "use_bias": False}
    nonneg = {**nonneg, "kernel_initializer": within}
    for name, how, after in (
        ("plain", {"every": 3}, []),
        ("at its end", {"every": 3, "at_epoch_end": False, "compression": sparse}, []),
        ("swapped", {"every": 4}, [keras.callbacks.SwapEMAWeights()]),
    ):
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        model = model_of(optimizer, layers.Dense(3, **nonneg), Embedded())
        callback, ends = hvd_keras.callbacks.LocalSteps(**how), []
        for _ in range(2):
            fit(model, [callback, *after], epochs=2, validation_data=data(0, 1))
            average = [v.numpy() for v in optimizer._model_variables_moving_average]
            ends.append(digest([*weights(model), *average]))
        results[name] = ends, float(weights(model)[1].min())
    return results


def with_replicas():
    """Digest after local steps of processes that have two replicas each, and what is refused."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        local = model_of(keras.optimizers.Adam(0.1))
        exchanged = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    fit(local, [hvd_keras.callbacks.LocalSteps(3)])

    def taped():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(local(tf.ones((2, 6))))
        variables = local.trainable_variables
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    errors = errors_of({"fit": lambda: fit(exchanged, []), "tape": lambda: strategy.run(taped)})
    return digest(weights(local)), errors


def slow_fits():
    """Steps, and what is equal, of `fit` with a rank that sleeps: until a round, and for epochs."""
    pause, results = 0.1 if hvd.rank() == hvd.size() - 1 else 0.005, {}

    class Sleep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(pause)

    class Until(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = callback.local.rounds >= 3

    how = {"outer": hvd.OuterSGD(1.0, 0.0), "deadline": 0.05, "at_epoch_end": True}
    callback = hvd_keras.callbacks.LocalSteps(4, **how, warmup_steps=2)
    model = model_of(keras.optimizers.Adam(0.01), steps_per_execution=2)
    x, y = data(hvd.rank(), 8)
    endless = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
    rest = [callback, Sleep(), Until(), hvd_keras.callbacks.MetricAverageCallback()]
    model.fit(endless, steps_per_epoch=1000, epochs=3, callbacks=rest, verbose=0)
    local = callback.local
    results["until"] = local.steps_made, [local.rounds, digest(weights(model))]
    callback = hvd_keras.callbacks.LocalSteps(3, **how)
    model = model_of(keras.optimizers.Adam(0.01))
    fit(model, [callback, Sleep(), hvd_keras.callbacks.VerifyCallback(1)], epochs=2)
    local = callback.local
    assert local.steps_made == 16
    results["epochs"] = local.steps_made, [local.rounds, digest(weights(model))]
    return results


# -- what ranks do differently -------------------------------------------------------------------


def message_of(rank):
    def loop(steps, spoiled=False, shift=0.0, **options):
        variables = network()
        variables[1].assign_add(tf.fill(SHAPES[1], shift))
        local = hvd.LocalSteps(variables, **options)
        train(variables, local, steps - 1)
        if spoiled:
            spoil(variables)
        train(variables, local, 1, steps)
        return variables, local

    def other_place():
        variables, local = loop(3 + rank, every=4)
        local.exchange() if rank == 0 else train(variables, local, 4, 5)

    def set_alone():
        variables, local = loop(4, every=4)
        if rank:
            variables[0].assign(tf.zeros(SHAPES[0]))
        local.restart_if_set()
        train(variables, local, 1, 5)

    def distributed():
        optimizer = keras.optimizers.SGD(0.1)
        if rank:
            optimizer = hvd_keras.DistributedOptimizer(optimizer)
        else:
            hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))  # names are drawn alike
        fit(model_of(optimizer), [hvd_keras.callbacks.LocalSteps(4)])

    def spoiled_fit():
        class Spoil(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2 and rank == 1:
                    self.model.weights[0].assign(np.full((6, 3), np.nan))

        fit(model_of(keras.optimizers.SGD(0.1)), [Spoil(), hvd_keras.callbacks.LocalSteps(4)])

    return errors_of(
        {
            "every": lambda: loop(4, every=2 + 2 * (rank % 2)),
            "lengths": lambda: loop(9, every=lambda step: 2 if step < 4 else 2 + rank),
            "rates": lambda: scheduled(RULE, RATE * (1 - 0.3 * rank)),
            "fit lengths": lambda: fit(
                model_of("sgd"), [hvd_keras.callbacks.LocalSteps(lambda step: 2 + rank * step)]
            ),
            "fit rates": lambda: fit(
                model_of(decaying(RATE * (1 - 0.3 * rank))), [hvd_keras.callbacks.LocalSteps(RULE)]
            ),
            "fails alone": lambda: loop(9, every=lambda step: 2 if step < 4 or rank else 1 // 0),
            "deadline": lambda: loop(4, every=2, deadline=1.0 + rank),
            "no deadline": lambda: loop(4, every=2, deadline=None if rank else 2.0),
            "fit deadline": lambda: fit(
                model_of("sgd"), [hvd_keras.callbacks.LocalSteps(4, deadline=1.0 + rank)]
            ),
            "warmup": lambda: loop(4, every=2, warmup_steps=rank),
            "fragments": lambda: loop(4, every=4, fragments=1 + rank % 2),
            "not finite": lambda: loop(2, spoiled=True, every=2),
            "start": lambda: loop(1, shift=float(rank), every=4),
            "start of warmup": lambda: loop(1, shift=float(rank), every=4, warmup_steps=2),
            "set alone": set_alone,
            "place": other_place,
            "distributed": distributed,
            "fit not finite": spoiled_fit,
            "fit ends": lambda: fit(
                model_of("sgd"), [hvd_keras.callbacks.LocalSteps(4, at_epoch_end=rank > 0)]
            ),
            "fit every": lambda: fit(
                model_of("sgd"), [hvd_keras.callbacks.LocalSteps(2 + 2 * rank)]
            ),
        }
    )


def main(folder: str) -> None:
    (processor,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(processor, two)
    hvd.init()
    here = Path(folder)
    result = {
        "papers": against_the_papers(),
        "warmup": warmup(),
        "methods": methods(),
        "resumed": {
            "after an exchange": resumed(here / "after", 4),
            "on its way": resumed(here / "way", 9),
        },
        "consolidated": consolidated(here / "all"),
        "skipped": skipped(),
        "lengths": lengths(),
        "slow": slow_ranks(),
        "slow resumed": slow_and_resumed(here / "slow"),
        "slow fits": slow_fits(),
        "fit papers": fit_against_the_paper(),
        "fits": fits(),
        "fit resumed": fit_resumed(here / "fit"),
        "averaged fits": averaged_fits(),
        "replicas": with_replicas(),
        "errors": message_of(hvd.rank()),
    }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1])
