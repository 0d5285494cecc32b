"""Two hosts of two ranks: dense inside, compressed between; tapes in graphs, and `fit`."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.tensorflow import DistributedGradientTape
from tests.methods import LARGEST, LEADER, QUANTIZED, WORDS
from tests.parallel.workers.results import digest, errors_of, write

SHAPES = ((12, 40), (40, 30), (30, 4))
STROM = hvd.StromCompressor(0.01)
LGC = hvd.LGCCompressor(alpha=0.1, full_steps=1, train_steps=3, ae_lr=0.1, momentum=0.9)


def batches(steps, seed=0):
    random = np.random.default_rng(10 * seed + hvd.rank())
    return random.standard_normal((steps, 4, 12)).astype(np.float32)


def start():
    random = np.random.default_rng(1)
    return [tf.Variable(random.standard_normal(s).astype(np.float32) * 0.3) for s in SHAPES]


def taped(compressor, steps=5, *, spoilt=(), stop=None, **options):
    """Variables after some steps in a graph, and what was raised in those that are spoilt."""
    options = {"hierarchical": True, **options}
    variables, said = start(), []

    @tf.function(autograph=False)
    def step(x, factor):
        with tf.GradientTape() as tape:
            y = x
            for variable in variables:
                y = tf.tanh(y @ variable)
            value = tf.reduce_mean(tf.square(y)) * factor
        tape = DistributedGradientTape(tape, compression=compressor, **options)
        gradients = tape.gradient(value, variables)
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(tf.where(tf.math.is_finite(gradient), 0.1 * gradient, 0.0))

    for place, x in enumerate(batches(steps)):
        factor = float("nan") if place in spoilt and hvd.rank() == 1 else 1.0
        said.append(errors_of({"": lambda x=x, f=factor: step(tf.constant(x), tf.constant(f))})[""])
        if place in spoilt:
            said[-1] = said[-1].partition("; nothing was exchanged")[0][-40:]
    assert all(s == "nothing was raised" for p, s in enumerate(said) if p not in spoilt), said
    hvd.verify(variables)
    return variables, [said[place] for place in spoilt]


def replicas():
    """One of each way to exchange; several buckets, so that all ranks lead some."""
    methods = [WORDS[0], LARGEST[3], LEADER[0], QUANTIZED[2], LGC]
    return {repr(one): digest(v.numpy() for v in taped(one)[0]) for one in methods}


def exact():
    ends = [[v.numpy() for v in taped(None, hierarchical=inside)[0]] for inside in (True, False)]
    return max(float(np.abs(x - y).max()) for x, y in zip(*ends))


def fitted(compressor, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(n) for n in (40, 30, 4)]
    model = keras.Sequential([keras.Input((12,)), *layers])
    options = {"hierarchical": True, **options}
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=compressor, **options
    )
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def fit(model, steps, seed=0):
    xs = np.concatenate(batches(steps, seed))
    model.fit(xs, xs[:, :4], batch_size=4, epochs=1, shuffle=False, verbose=0)
    return digest(v.numpy() for v in model.trainable_variables)


def keras_fit():
    moments = hvd.VarianceCompressor(alpha=0.5, moments="microbatch")
    return [
        fit(fitted(hvd.EGCCompressor(K=8, momentum=0.9), verify_every=2), 5),
        fit(fitted(moments, backward_passes_per_step=2), 6),
    ]


def resumed(folder, mode):
    ends, compressor = [], hvd.EGCCompressor(K=8, momentum=0.9)
    for stop in (False, True):
        model = fitted(compressor)
        fit(model, 3)
        if stop:
            hvd.save_checkpoint(folder, mode=mode, model=model)
            model = fitted(compressor)
            hvd.load_checkpoint(folder, model=model)
        ends.append(fit(model, 3, seed=1))
    return ends


def kept():
    """Whether this rank's buckets have state, and what it counts."""
    model = fitted(STROM)
    fit(model, 3)
    engine = model.optimizer._gradcomp
    found = hvd.compression_stats(model)
    assert 0 < found.bytes_sent < found.bytes_dense
    return list(found.layers), [bool(some) for some in engine.variables]


def broadcast():
    """Keras's callback brings weights to all, and leaves alone what only some ranks have."""
    model = fitted(STROM)
    fit(model, 2)
    model.layers[0].bias.assign_add(tf.fill((40,), float(hvd.rank())))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    xs = np.concatenate(batches(2))
    model.fit(xs, xs[:, :4], batch_size=4, shuffle=False, verbose=0, callbacks=[callback])
    return digest(v.numpy() for v in model.trainable_variables)


def diverged():
    """A rung of a bucket that ranks 1 and 3 lead."""
    model = fitted(STROM)
    fit(model, 2)
    if hvd.rank() == 3:
        engine = model.optimizer._gradcomp
        (rung,) = [v for v in engine.variables[1] if "rung" in v.name]
        rung.assign_add(1)
    hvd.verify(model)


def main(folder: str) -> None:
    hvd.init(process_sets="dynamic")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import hvd_gradcomp.tensorflow.engine as engine

    engine.BUCKET_BYTES = 2500
    skipping, _ = taped(STROM, spoilt=(2,), nonfinite="skip")
    raising, said = taped(hvd.DGCCompressor(density=0.1, momentum=0.9), spoilt=(2,))
    result = {
        "replicas": replicas(),
        "exact": exact(),
        "fit": keras_fit(),
        "kept": kept(),
        "skip": digest(v.numpy() for v in skipping),
        "raise": [said, digest(v.numpy() for v in raising)],
        "sharded": resumed(f"{folder}/sharded", "sharded"),
        "consolidated": resumed(f"{folder}/consolidated", "consolidated"),
        "broadcast": broadcast(),
        "errors": errors_of({"diverged": diverged, "join": hvd.join}),
    }
    write(folder, hvd.rank(), result)
    hvd.allgather_object(None, name="end")


if __name__ == "__main__":
    main(*sys.argv[1:])
