"""Adam that exchanges momenta, on Keras 3 with one rank: the paper's pseudo-code, and refusals."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.single.older import skip_without_keras_3

skip_without_keras_3()
import hvd_gradcomp.tensorflow.keras as hvd  # noqa: E402
from tests.oracles import one_bit_adam as oracle  # noqa: E402

SIZE, WARMUP, RATE, DECAY = 200, 4, 0.02, 0.1
ADAMS = [keras.optimizers.Adam, keras.optimizers.AdamW]


pytestmark = pytest.mark.usefixtures("one_rank")


def numbers(*key):
    return np.random.default_rng(key).normal(size=SIZE).astype(np.float32)


def gradient(rank, step, x):
    del rank
    return (x - numbers(1)) * 0.7 + 0.3 * numbers(2, step)


def largest(x):
    """Ten in a hundred."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[: round(len(x) / 10)]
    kept[places] = x[places]
    return kept


def adam(kind=keras.optimizers.AdamW, **more):
    return kind(RATE, weight_decay=DECAY, epsilon=1e-12, **more)


def train(optimizer, variable, steps, first=1, scale=1.0):
    for step in range(first, first + steps):
        g = scale * gradient(0, step, variable.numpy())
        optimizer.apply([tf.constant(g)], [variable])


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("compress", [None, largest])
def test_it_is_that_of_the_paper(kind, compress):
    compressor = None if compress is None else hvd.SparseGDCompressor(density=0.1)
    x = keras.Variable(numbers(0))
    optimizer = hvd.MomentumExchange(adam(kind), compressor, WARMUP)
    assert isinstance(optimizer, kind)
    train(optimizer, x, 12)
    hvd.verify(optimizer)
    how = compress or (lambda x: x), RATE, (0.9, 0.999), 1e-12, DECAY
    wanted, m, _ = oracle.train(numbers(0), gradient, 1, 12, WARMUP, *how)
    momentum = next(v for v in optimizer.variables if "momentum" in v.path).numpy()
    if compress is None:
        np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(momentum, m, rtol=1e-3, atol=1e-4)
    else:  # a tie in rounding may choose another element
        assert np.isclose(x.numpy(), wanted, rtol=1e-3, atol=1e-3).mean() > 0.95


def test_the_first_steps_are_plain_adam():
    x, y = keras.Variable(numbers(0)), keras.Variable(numbers(0))
    plain, exchanging = adam(), hvd.MomentumExchange(adam(), hvd.OneBitCompressor(), WARMUP)
    train(plain, x, WARMUP)
    train(exchanging, y, WARMUP)
    np.testing.assert_array_equal(x.numpy(), y.numpy())
    train(plain, x, 1, WARMUP + 1)
    train(exchanging, y, 1, WARMUP + 1)
    assert (x.numpy() != y.numpy()).any()


def test_it_goes_on_from_a_built_adam():
    """A plain Adam's steps count in the second moment, when that is fixed later."""
    x, y = keras.Variable(numbers(0)), keras.Variable(numbers(0))
    plain = adam()
    train(plain, x, 3)
    train(first := hvd.MomentumExchange(adam(), None, WARMUP), y, WARMUP)
    later = hvd.MomentumExchange(plain, None, WARMUP - 3)
    for optimizer, variable in ((later, x), (first, y)):
        made = int(optimizer.iterations)
        train(optimizer, variable, 9 - made, made + 1)
    np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-6)


def test_a_loss_scale_changes_nothing_and_an_overflow_is_left_out():
    x, y = keras.Variable(numbers(0)), keras.Variable(numbers(0))
    compression = hvd.SparseGDCompressor(density=0.1)
    plain = hvd.MomentumExchange(adam(), compression, WARMUP)
    inner = hvd.MomentumExchange(adam(), compression, WARMUP)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    train(plain, x, 8)
    train(scaler, y, 6, scale=1024.0)
    before = [v.numpy() for v in (y, *inner.variables)]
    scaler.apply([tf.fill((SIZE,), float("inf"))], [y])
    assert hvd.compression_stats(inner).skipped == 1
    changed = {
        v.path.rpartition("/")[2]
        for v, value in zip((y, *inner.variables), before)
        if not np.array_equal(v.numpy(), value)
    }
    assert changed <= {"gradcomp_skipped", "gradcomp_bytes_sent", "gradcomp_bytes_received"}
    train(scaler, y, 2, 7, scale=512.0)
    np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_parts_of_a_model_have_compressors_of_their_own():
    parts = hvd.partition({"big*": hvd.OneBitCompressor(), "*": None})
    made = [keras.Variable(numbers(i), name=name) for i, name in enumerate(("big", "small"))]
    optimizer = hvd.MomentumExchange(adam(), parts, 2)
    for _ in range(4):
        optimizer.apply([tf.constant(numbers(5)), tf.constant(numbers(6))], made)
    assert "OneBit" in hvd.describe(optimizer)
    assert hvd.compression_stats(optimizer).bytes_sent < 4 * 2 * 4 * SIZE


def test_rows_of_embeddings_and_variables_without_a_gradient():
    table, other = keras.Variable(np.ones((6, 4), np.float32)), keras.Variable(numbers(0))
    optimizer = hvd.MomentumExchange(adam(), hvd.OneBitCompressor(), 2)
    optimizer.build([table, other])
    rows = tf.IndexedSlices(tf.ones((2, 4)), tf.constant([1, 1]), tf.constant([6, 4]))
    for _ in range(4):
        optimizer.apply([rows, None], [table, other])
    np.testing.assert_array_equal(other.numpy(), numbers(0))
    seen, unseen = table.numpy()[1], table.numpy()[[0, 2, 3, 4, 5]]
    np.testing.assert_allclose(unseen, (1 - RATE * DECAY) ** 4, rtol=1e-6)  # no second moment
    assert (seen < unseen.min()).all()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"optimizer": keras.optimizers.SGD(0.1)}, TypeError, "AdamW, got SGD"),
        ({"optimizer": "adam"}, TypeError, "AdamW, got str"),
        ({"optimizer": keras.optimizers.Adam(amsgrad=True)}, ValueError, "amsgrad"),
        ({"optimizer": keras.optimizers.Adam(global_clipnorm=1.0)}, ValueError, "global_clipnorm"),
        (
            {"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)},
            ValueError,
            "gradient_accumulation_steps",
        ),
        (
            {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())},
            TypeError,
            r"LossScaleOptimizer\(hvd.MomentumExchange",
        ),
        ({"compression": hvd.DGCCompressor(momentum=0.9)}, ValueError, "momentum=0"),
        ({"compression": hvd.VarianceCompressor(moments="sample")}, ValueError, "moments='step'"),
        ({"compression": 3}, TypeError, "compress"),
        ({"warmup_steps": 0}, ValueError, "warmup_steps"),
        ({"nonfinite": "propagate"}, ValueError, "nonfinite"),
    ],
)
def test_bad_settings(how, error, message):
    with pytest.raises(error, match=message):
        hvd.MomentumExchange(**{"optimizer": adam(), **how})


def test_what_it_does_not_do(tmp_path):
    optimizer = hvd.MomentumExchange(adam())
    with pytest.raises(ValueError, match="distributed"):
        hvd.MomentumExchange(optimizer)
    with pytest.raises(ValueError, match="MomentumExchange exchanges already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="PartialDistributedOptimizer"):
        optimizer.register_local_var(keras.Variable(0.0))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    with pytest.raises(ValueError, match="save_checkpoint"):
        model.save(tmp_path / "model.keras")


def test_another_number_of_first_steps_is_no_resume(tmp_path):
    def made(warmup):
        x = keras.Variable(numbers(0))
        optimizer = hvd.MomentumExchange(adam(), hvd.OneBitCompressor(), warmup)
        train(optimizer, x, 3)
        return optimizer

    hvd.save_checkpoint(tmp_path / "it", optimizer=made(2))
    with pytest.raises(hvd.CheckpointError, match=r"after\(2"):
        hvd.load_checkpoint(tmp_path / "it", optimizer=made(3))
