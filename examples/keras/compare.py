"""One task with every compressor, on Keras 3: accuracy, ratios, bytes, time.

horovodrun --gloo -np 2 python -m examples.keras.compare
"""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from examples import comparison, digits
from examples.keras.digits import Shard


def network(width: int) -> keras.Model:
    """1.1 million parameters in three layers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10),
        ]
    )


class Reading(keras.callbacks.Callback):
    """The stats at the end of the warm-up."""

    def __init__(self, optimizer: Any, epoch: int) -> None:
        super().__init__()
        self.distributed, self.epoch, self.stats = optimizer, epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            self.stats = hvd.compression_stats(self.distributed)


def run(name: str, options: Any, seed: int) -> dict[str, Any]:
    """Trains one model with one method."""
    train_x, train_y, test_x, test_y = digits.load()
    shard = Shard(train_x, train_y, options.batch_size, 1000 * seed)
    compressor = comparison.METHODS[name](options.warmup * len(shard))
    keras.utils.set_random_seed(seed)
    model = network(options.width)
    if compressor.uses_moments:
        hvd.track_moments(model)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(options.learning_rate or 0.05, momentum=0.9), compression=compressor
    )
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    reading = Reading(optimizer, options.warmup)
    start = time.perf_counter()
    model.fit(
        shard,
        epochs=options.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), reading],
    )
    seconds = time.perf_counter() - start
    score = 100 * model.evaluate(test_x, test_y, verbose=0, return_dict=True)["accuracy"]
    stats = hvd.compression_stats(optimizer)
    return comparison.row(name, compressor, score, stats, reading.stats, seconds)


def main() -> None:
    options = comparison.arguments(__doc__.splitlines()[0], ("digits",))
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rows = []
    for name in options.methods:
        for seed in range(1, options.seeds + 1):
            rows.append(run(name, options, seed))
            if hvd.rank() == 0:
                print(f"{name}: {rows[-1]['score']:.2f}", flush=True)
    if hvd.rank() == 0:
        size = network(options.width).count_params()
        title = f"Keras 3, digits, {size:,} parameters, {hvd.size()} ranks"
        comparison.report(title, "accuracy %", options, rows)
    hvd.shutdown()


if __name__ == "__main__":
    main()
