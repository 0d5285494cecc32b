"""Overflows on one rank: whether all variables are as before on all ranks, to the bit."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp import GradiVeQCompressor
from hvd_gradcomp.tensorflow import DistributedGradientTape
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.reduce.registry import reducer_of_variables
from tests.methods import ONE_OF_EACH
from tests.parallel.workers.results import digest, errors_of, finish

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SCALER = keras.optimizers.LossScaleOptimizer
GRADIVEQ = GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=3, compress_steps=9)
STEPS = 8


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def scaled_inside(compressor):
    plain = SCALER(keras.optimizers.SGD(0.001, 0.9), initial_scale=2.0**10, dynamic_growth_steps=5)
    return hvd.DistributedOptimizer(plain, compression=compressor)


def scaled_outside(compressor):
    plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001, 0.9), compression=compressor)
    return SCALER(plain, initial_scale=2.0**10, dynamic_growth_steps=5)


def not_scaled(compressor):
    plain = keras.optimizers.SGD(0.001, 0.9)
    return hvd.DistributedOptimizer(plain, compression=compressor, nonfinite="skip")


def batches():
    random = np.random.default_rng(100 + hvd.rank())
    while True:
        x = random.standard_normal((8, 8, 8, 1)).astype(np.float32)
        yield tf.constant(x), tf.constant(random.integers(0, 10, 8))


def contents(variables):
    """A digest of everything but what counts and the scale, which are to change."""
    shown = ("dynamic_scale", "step_counter", "skipped", "bytes_")
    kept = [v for v in variables if not any(name in v.name for name in shown)]
    return digest([plain_variable(v).numpy() for v in kept])


def by_optimizer(make, compressor):
    """Whether bad steps change nothing, and good ones do; steps skipped; a digest."""
    model = network()
    optimizer = make(compressor)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(images, labels, poison):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(LOSS(labels, model(images, training=True)))
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        gradients[2] = gradients[2] + poison
        optimizer.apply(gradients, model.trainable_variables)

    return alternate(
        step, lambda: [*model.variables, *optimizer.variables], lambda: optimizer, model
    )


def by_tape(compressor):
    model = network()
    optimizer = SCALER(keras.optimizers.SGD(0.001, 0.9), initial_scale=2.0**10)
    optimizer.build(model.trainable_variables)
    variables = [v.value for v in model.trainable_variables]

    @tf.function(reduce_retracing=True)
    def step(images, labels, poison):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(LOSS(labels, model(images, training=True)))
            value += poison * tf.reduce_sum(variables[2])
        scale = optimizer.dynamic_scale
        tape = DistributedGradientTape(tape, compression=compressor, loss_scale=scale)
        optimizer.apply(tape.gradient(value, variables), model.trainable_variables)

    def everything():
        reducer = reducer_of_variables(variables)
        state = reducer.planner.variables
        return [*model.variables, *optimizer.variables, reducer.steps, *state]

    return alternate(step, everything, lambda: variables, model)


def alternate(step, everything, source, model):
    data, unchanged, changed = batches(), [], []
    step(*next(data), tf.constant(0.0))  # a reducer of tapes is made in its first step
    for number in range(1, STEPS):
        if number % 3 == 2:
            before = contents(everything())
            bad = hvd.rank() == number % 2
            step(*next(data), tf.constant(float("inf" if bad else 0.0)))
            unchanged.append(before == contents(everything()))
        before = contents(everything())
        step(*next(data), tf.constant(0.0))
        changed.append(before != contents(everything()))
    stats = hvd.compression_stats(source())
    assert stats.steps == STEPS
    parameters = digest([v.numpy() for v in model.variables])
    return [all(unchanged), all(changed), stats.skipped, parameters]


def by_fit():
    """The policy alone, as users write it; `compile` wraps a loss scaler around the optimizer."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.01), compression=hvd.VarianceCompressor(alpha=1.0)
        )
        hvd.track_moments(model)
        model.compile(optimizer, LOSS)
        random = np.random.default_rng(hvd.rank())
        x = random.standard_normal((64, 8, 8, 1)).astype(np.float32)
        x[20, 0, 0, 0] *= 1e6 if hvd.rank() else 1.0  # infinite in half precision
        labels = random.integers(0, 10, 64)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, labels, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        stats = hvd.compression_stats(model.optimizer)
        kinds = [type(model.optimizer).__name__, type(model.optimizer.inner_optimizer).__name__]
        scale = float(model.optimizer.dynamic_scale)
        parameters = [v.numpy() for v in model.variables]
        finite = all(np.isfinite(p).all() for p in parameters)
        return [kinds, stats.steps, stats.skipped, scale, finite, digest(parameters)]
    finally:
        keras.config.set_dtype_policy("float32")


def misused():
    def built_in_its_first_step():
        model, optimizer = network(), scaled_outside(None)
        with tf.GradientTape() as tape:
            value = LOSS(tf.zeros(1, tf.int32), model(tf.zeros((1, 8, 8, 1))))
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    def accumulated():
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)
        SCALER(inner).build(network().trainable_variables)

    def no_policy():
        hvd.DistributedOptimizer(keras.optimizers.SGD(), nonfinite="ignore")

    cases = (built_in_its_first_step, accumulated, no_policy)
    return errors_of({case.__name__: case for case in cases})


def main(folder: str, settings: str) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    methods = [*ONE_OF_EACH, GRADIVEQ]
    some = [c for c in methods if type(c).__name__[:4] in ("None", "Vari", "DGCC", "QSGD", "Afte")]
    few = some[1:3]
    result = {
        "inside": {
            repr(c): by_optimizer(scaled_inside, c)
            for c in (methods if settings == "all" else [*some, GRADIVEQ])
        },
        "outside": {repr(c): by_optimizer(scaled_outside, c) for c in few},
        "not scaled": {repr(c): by_optimizer(not_scaled, c) for c in few},
        "tape": {repr(c): by_tape(c) for c in few[:1]},
        "fit": by_fit(),
        "errors": misused(),
    }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
