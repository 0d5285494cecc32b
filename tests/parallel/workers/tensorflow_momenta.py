"""Adam that exchanges momenta, on Keras 3 over Horovod: tapes, `fit`, and what ranks differ in."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from tests.parallel.workers.results import digest, errors_of, finish

WARMUP, BATCH = 3, 8
SPARSE = hvd.SparseGDCompressor(density=0.1)


def data(first, last):
    """Other samples on each rank."""
    random = np.random.default_rng(10 + hvd.rank())
    x = random.normal(size=(BATCH * 20, 6)).astype(np.float32)
    batches = slice(BATCH * first, BATCH * last)
    return x[batches], (x[:, :3] * (1 + hvd.rank()))[batches]


def network(optimizer, **options):
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(3)]
    )
    made.compile(optimizer, "mse", **{"jit_compile": False, **options})
    return made


def momenta(compression, warmup=WARMUP, **more):
    adam = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    return hvd.MomentumExchange(adam, compression, warmup, **more)


def common(model):
    """Digest of weights, and of the optimizer's own variables."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    of_optimizer = [
        v for v in optimizer.variables if not v.path.rpartition("/")[2].startswith("gradcomp")
    ]
    return digest(tf.convert_to_tensor(v).numpy() for v in (*model.weights, *of_optimizer))


def everything(model):
    return digest(
        tf.convert_to_tensor(v).numpy() for v in (*model.weights, *model.optimizer.variables)
    )


class Watch(keras.callbacks.Callback):
    """Digests after each step, before and after the switch; and a checkpoint after some."""

    def __init__(self, folder=None, at=()):
        super().__init__()
        self.seen, self.folder, self.at, self.warm = [], folder, at, None

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(common(self.model))
        if len(self.seen) == WARMUP:
            self.warm = self.model.get_weights()
        if len(self.seen) in self.at:
            hvd.save_checkpoint(self.folder / str(len(self.seen)), model=self.model)


def fit(model, first, last, *callbacks):
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [*callbacks]}
    model.fit(*data(first, last), **how)


def looped(compression, graph, steps=6):
    """Digests after each step of a loop with a tape."""
    model, seen = network(momenta(compression)), []

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    run = tf.function(step) if graph else step
    for number in range(steps):
        run(*map(tf.constant, data(number, number + 1)))
        seen.append(common(model))
    hvd.verify(model.optimizer)
    return seen


def fitted(compression, folder, *more, at=()):
    """Return what has seen `fit`, and digests after resuming before and after the switch."""
    model, watch = network(momenta(compression)), Watch(folder, at)
    fit(model, 0, 8, hvd.callbacks.BroadcastGlobalVariablesCallback(), watch, *more)
    hvd.verify(model.optimizer)
    stats = hvd.compression_stats(model.optimizer)
    assert stats.steps == 8 and sum(stats.sizes.values()) == model.count_params()
    ends = [everything(model)]
    for cut in at:
        again = network(momenta(compression))
        hvd.load_checkpoint(folder / str(cut), model=again)
        fit(again, cut, 8)
        ends.append(everything(again))
    return watch, ends, stats.bytes_sent


def far_from_plain(weights):
    """The largest difference to a plain distributed AdamW after the first steps."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.1))
    model = network(optimizer)
    fit(model, 0, WARMUP)
    return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), weights))


def spoiled(steps):
    """Batches, with a NaN in the last one of rank 1."""
    x, y = data(0, steps)
    if hvd.rank() == 1:
        y[-1, 0] = np.nan
    return x, y


def not_finite(scaled):
    """Digests after each step, one of which all ranks have to skip."""
    optimizer = momenta(SPARSE, nonfinite=None if scaled else "skip")
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model, watch = network(optimizer), Watch()
    x, y = (np.concatenate(pair) for pair in zip(spoiled(5), data(5, 7)))
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [watch]}
    model.fit(x, y, **how)
    assert hvd.compression_stats(optimizer).skipped == 1
    assert watch.seen[3] == watch.seen[4] != watch.seen[5]
    assert all(np.isfinite(w).all() for w in model.get_weights())
    return watch.seen


def message_of(rank):
    def raised():
        model = network(momenta(hvd.OneBitCompressor()))
        model.fit(*spoiled(5), batch_size=BATCH, shuffle=False, verbose=0)

    def other(**more):
        fit(network(momenta(hvd.OneBitCompressor(), **more)), 0, 3)

    def gradients():
        compression = hvd.after(WARMUP, None, hvd.OneBitCompressor())
        adam = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        alike = {"compression": compression, "sparse_as_dense": True}
        made = (hvd.DistributedOptimizer(adam, **alike), momenta(hvd.OneBitCompressor()))
        fit(network(made[rank]), 0, 1)

    return errors_of(
        {
            "not finite": raised,
            "warmup": lambda: other(warmup=2 + rank),
            "gradients": gradients,
        }
    )


def main(folder: str) -> None:
    hvd.init()
    here = Path(folder)
    writer = hvd.callbacks.StatsWriter(2, [hvd.JSONLines(here / "stats.jsonl")])
    results = {
        "none": fitted(hvd.NoneCompressor(), here / "none"),
        "one-bit": fitted(hvd.OneBitCompressor(), here / "one-bit", writer),
        "sparse": fitted(SPARSE, here / "sparse", at=(2, 5)),
    }
    result = {
        "fit": {name: watch.seen for name, (watch, _, _) in results.items()},
        "resumed": results["sparse"][1],
        "bytes": {name: sent for name, (_, _, sent) in results.items()},
        "records": hvd.rank() or len((here / "stats.jsonl").read_text().splitlines()),
        "loop": {
            "none": looped(hvd.NoneCompressor(), graph=False),
            "one-bit": looped(hvd.OneBitCompressor(), graph=True),
            "sparse": looped(SPARSE, graph=False),
        },
        "plain": far_from_plain(results["one-bit"][0].warm),
        "skipped": {str(scaled): not_finite(scaled) for scaled in (False, True)},
        "errors": message_of(hvd.rank()),
    }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1])
