"""The line at the beginning, on each of TensorFlow's entry points: one, however many exchanges."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.single.older import skip_without_keras_3

skip_without_keras_3()
import hvd_gradcomp.tensorflow as hvd  # noqa: E402
import hvd_gradcomp.tensorflow.keras as hvd_keras  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")
QSGD, INT8 = hvd.QSGDCompressor(), hvd.Int8Compressor()


def variables_of():
    return [tf.Variable(tf.ones((30, 40)), name="a"), tf.Variable(tf.ones((500,)), name="b")]


def model_of():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(40), keras.layers.Dense(4)])
    return model, np.ones((16, 12), np.float32), np.ones((16, 4), np.float32)


def by_tape():
    variables = variables_of()
    for _ in range(2):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=QSGD) as tape:
            loss = sum(tf.reduce_sum(v * v) for v in variables)
        tape.gradient(loss, variables)


def by_optimizer():
    model, x, y = model_of()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=QSGD)
    model.compile(optimizer, "mse")
    model.fit(x, y, epochs=2, verbose=0)


def by_momenta():
    model, x, y = model_of()
    model.compile(hvd_keras.MomentumExchange(keras.optimizers.Adam(0.01), INT8, 2), "mse")
    model.fit(x, y, epochs=2, verbose=0)


def by_local_steps():
    variables = variables_of()
    how = {"compression": INT8, "fragments": 2, "warmup_steps": 1, "buffers": [tf.Variable([1.0])]}
    local = hvd.LocalSteps(variables, 4, **how)
    for _ in range(9):
        local.reduce_gradients([tf.ones_like(v) for v in variables])
        for v in variables:
            v.assign_add(tf.ones_like(v))
        local.step()


def by_callback():
    model, x, y = model_of()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    callback = hvd_keras.callbacks.LocalSteps(every=3, compression=None)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback])


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (by_tape, "compressing 2 tensors, 1,700 elements, with QSGDCompressor(); about "),
        (by_optimizer, "with QSGDCompressor(); about "),
        (by_momenta, "Int8Compressor()"),
        (by_local_steps, "with Int8Compressor(), every 4 local steps, after 1 dense steps; about "),
        (by_callback, "uncompressed, every 3 local steps; about 3 times fewer bytes"),
    ],
)
def test_one_line(run, text, caplog):
    with caplog.at_level(logging.INFO, "hvd_gradcomp"):
        run()
    lines = [r.getMessage() for r in caplog.records if " tensors, " in r.getMessage()]
    assert len(lines) == 1 and text in lines[0], lines
