"""Handwritten digits with a custom training loop: `DistributedGradientTape` in a `tf.function`.

horovodrun --gloo -np 2 python -m examples.tensorflow2.custom_loop --method hybrid
"""

from __future__ import annotations

import time

import keras
import tensorflow as tf

import hvd_gradcomp.tensorflow as hvd
from examples import digits
from examples.keras.digits import network


def main() -> None:
    options = digits.arguments(__doc__.splitlines()[0])
    hvd.init(process_sets=digits.process_sets(options))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(options.seed)
    train_x, train_y, test_x, test_y = digits.load()
    model = network()
    variables = [v.value for v in model.trainable_variables]
    optimizer = keras.optimizers.Adam(options.learning_rate)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(variables, root_rank=0)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compressor = digits.METHODS[options.method]

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        _, gradients, moments = hvd.microbatch_gradients(
            lambda x, y: cross_entropy(y, model(x, training=True)), variables, [images, labels], 4
        )
        reduced = hvd.reduce_gradients(
            gradients, variables, compressor, moments=moments, hierarchical=options.hierarchical
        )
        optimizer.apply(reduced, model.trainable_variables)

    start = time.perf_counter()
    for epoch in range(options.epochs):
        for batch in digits.shard(
            len(train_y), options.batch_size, hvd.rank(), hvd.size(), options.seed + epoch
        ):
            step(tf.constant(train_x[batch]), tf.constant(train_y[batch]))
        if hvd.rank() == 0:
            digits.say(epoch, options.epochs)
    seconds = time.perf_counter() - start
    right = tf.argmax(model(test_x), 1).numpy() == test_y
    stats = hvd.compression_stats(variables)
    if hvd.rank() == 0:
        digits.report(options, "TensorFlow", right.mean(), stats, seconds)
    hvd.shutdown()


if __name__ == "__main__":
    main()
