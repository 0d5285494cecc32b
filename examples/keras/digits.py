"""Handwritten digits on Keras 3 with `model.fit`.

horovodrun --gloo -np 2 python -m examples.keras.digits --method variance
"""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from examples import digits


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


class Shard(keras.utils.PyDataset):
    """This rank's batches; another shuffle each epoch, the same on all ranks."""

    def __init__(self, x: np.ndarray, y: np.ndarray, batch_size: int, seed: int) -> None:
        super().__init__()
        self.x, self.y, self.batch_size, self.seed = x, y, batch_size, seed
        self.epoch = -1
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self.epoch += 1
        self.batches = digits.shard(
            len(self.y), self.batch_size, hvd.rank(), hvd.size(), self.seed + self.epoch
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[self.batches[index]], self.y[self.batches[index]]


def main() -> None:
    options = digits.arguments(__doc__.splitlines()[0])
    hvd.init(process_sets=digits.process_sets(options))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(options.seed)
    train_x, train_y, test_x, test_y = digits.load()
    model = network()
    compressor = digits.METHODS[options.method]
    if compressor.uses_moments:
        hvd.track_moments(model)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(options.learning_rate),
        compression=compressor,
        hierarchical=options.hierarchical,
    )
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if hvd.rank() == 0:
        say = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: digits.say(epoch, options.epochs)
        )
        callbacks.append(say)
    start = time.perf_counter()
    model.fit(
        Shard(train_x, train_y, options.batch_size, options.seed),
        epochs=options.epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    seconds = time.perf_counter() - start
    accuracy = model.evaluate(test_x, test_y, verbose=0, return_dict=True)["accuracy"]
    stats = hvd.compression_stats(optimizer)
    if hvd.rank() == 0:
        digits.report(options, "Keras 3", accuracy, stats, seconds)
    hvd.shutdown()


if __name__ == "__main__":
    main()
