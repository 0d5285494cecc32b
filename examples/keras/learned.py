"""GradiVeQ and LGC on convolutional networks, on Keras 3: accuracy, bytes by phase, curves.

horovodrun --gloo -np 2 python -m examples.keras.learned --png results/learned.png
horovodrun --gloo -np 2 python -m examples.keras.learned --cifar10 FOLDER --epochs 164
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow.keras as hvd
from examples import cifar10, digits, learned
from examples.keras.digits import Shard


def network() -> keras.Model:
    """For the digits: 1,054,570 parameters, all but 2,890 in convolutions."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (32, 64, 0, 128, 256, 0, 288):
        if filters:
            model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        else:
            model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10))
    return model


def resnet(depth: int = 32) -> keras.Model:
    """The ResNet for CIFAR of so many layers (He et al. 2016)."""

    def convolution(x: Any, filters: int, width: int = 3, stride: int = 1) -> Any:
        return layers.Conv2D(filters, width, stride, padding="same", use_bias=False)(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(layers.BatchNormalization()(convolution(inputs, 16)))
    for filters in (16, 32, 64):
        for i in range((depth - 2) // 6):
            stride = 2 if filters > 16 and i == 0 else 1
            inner = layers.BatchNormalization()(convolution(x, filters, 3, stride))
            inner = layers.BatchNormalization()(convolution(layers.ReLU()(inner), filters))
            beside = x if stride == 1 else convolution(x, filters, 1, stride)
            x = layers.ReLU()(layers.Add()([inner, beside]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


class Noting(keras.callbacks.Callback):
    """Takes down the curves."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.distributed, self.curves = optimizer, learned.Curves()
        self.step = 0
        self.last = self.previous = hvd.CompressionStats()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step % learned.EVERY == 0:
            self.previous, self.last = self.last, hvd.compression_stats(self.distributed)
            self.curves.note(float(logs["loss"]), self.last)

    def on_train_end(self, logs: Any = None) -> None:
        if not self.curves.notes:  # a run of fewer steps
            self.last = hvd.compression_stats(self.distributed)
            self.curves.note(float(logs["loss"]), self.last)


def run(data: Any, name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains one model with one method."""
    train_x, train_y, test_x, test_y = data
    keras.utils.set_random_seed(seed)
    model = resnet() if options.cifar10 else network()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(options.learning_rate, momentum=0.9),
        compression=learned.METHODS[name](options),
    )
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    noting = Noting(optimizer)
    model.fit(
        Shard(train_x, train_y, options.batch_size, 1000 * seed),
        epochs=options.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), noting],
    )
    score = 100 * model.evaluate(test_x, test_y, verbose=0, return_dict=True)["accuracy"]
    span = noting.last - noting.previous
    bytes_a_step = tf.constant([span.bytes_sent / span.steps], tf.float64)
    ranks = np.asarray(hvd.allgather(bytes_a_step, "learned.bytes")).tolist()
    return learned.row(name, seed, score, ranks, noting.curves)


def main() -> None:
    options = learned.arguments(__doc__.splitlines()[0])
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    data = digits.load() if options.cifar10 is None else cifar10.load(options.cifar10)
    rows = []
    for name in options.methods:
        for seed in range(1, options.seeds + 1):
            rows.append(run(data, name, options, seed))
            if hvd.rank() == 0:
                print(f"{name}: {rows[-1]['accuracy']:.2f} %", flush=True)
    if hvd.rank() == 0:
        size = (resnet() if options.cifar10 else network()).count_params()
        learned.report(f"Keras 3, {size:,} parameters, {hvd.size()} ranks", options, rows)
    hvd.shutdown()


if __name__ == "__main__":
    main()
