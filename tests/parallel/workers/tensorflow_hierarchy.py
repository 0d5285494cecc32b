"""Two hosts of two ranks: dense inside, compressed between; tapes, and `fit`."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow.keras as hvd
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.tensorflow import DistributedGradientTape, LocalSteps
from hvd_gradcomp.tensorflow.reduce import buckets
from tests.methods import SCALECOM
from tests.parallel.workers.results import digest, errors_of, write

SHAPES = ((12, 40), (40, 30), (30, 4))
STROM, DGC = hvd.StromCompressor(0.01), hvd.DGCCompressor(density=0.1, momentum=0.9)
LGC = hvd.LGCCompressor(alpha=0.1, full_steps=1, train_steps=3, ae_lr=0.1, momentum=0.9)


def batches(steps, seed=0):
    random = np.random.default_rng(10 * seed + hvd.rank())
    return random.standard_normal((steps, 4, 12)).astype(np.float32)


def start():
    random = np.random.default_rng(1)
    return [tf.Variable(random.standard_normal(s).astype(np.float32) * 0.3) for s in SHAPES]


def taped(compressor, steps=5, *, graph=True, spoilt=(), joins=False, **options):
    """Variables after some steps, and what was raised in those that are spoilt."""
    options = {"hierarchical": True, **options}
    variables, errors = start(), []

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

    run = tf.function(step, autograph=False) if graph else step
    for place, x in enumerate(batches(steps)):
        factor = float("nan") if place in spoilt and hvd.rank() == 1 else 1.0
        errors.append(
            errors_of({"": lambda x=x, f=factor: run(tf.constant(x), tf.constant(f))})[""]
        )
        if place in spoilt:
            errors[-1] = errors[-1].partition("; nothing was exchanged")[0][-80:]
    assert all(s == "nothing was raised" for p, s in enumerate(errors) if p not in spoilt), errors
    if joins:
        last = int(hvd.join())
        assert last == 2, last  # rank 3 has had fewer batches
        hvd.broadcast_variables(variables, root_rank=last)
    hvd.verify(variables)
    return variables, [errors[place] for place in spoilt]


def replicas():
    """Several rounds with a leader, and phases that learn; all ranks lead some."""
    methods = [SCALECOM, LGC]
    return {repr(one): digest(v.numpy() for v in taped(one)[0]) for one in methods}


def joined():
    """A rank has two batches fewer than the others."""
    steps = 3 if hvd.rank() == 3 else 5
    return digest(v.numpy() for v in taped(STROM, steps, joins=True)[0])


def exact():
    ends = [taped(None, graph=False, hierarchical=inside)[0] for inside in (True, False)]
    return max(float(tf.reduce_max(tf.abs(x - y))) for x, y in zip(*ends))


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


def fit(model, steps, seed=0, **options):
    xs = np.concatenate(batches(steps, seed))
    model.fit(xs, xs[:, :4], batch_size=4, shuffle=False, verbose=0, **options)
    return digest(v.numpy() for v in model.trainable_variables)


def residual(model):
    """The sum over ranks of what is not sent yet."""
    reducer, pieces = model.optimizer._gradcomp, []
    for bucket in reducer.buckets:
        piece = residual_of(bucket.compressor, bucket.state)
        pieces.append(tf.zeros((bucket.layout.size,)) if piece is None else piece)
    return hvd.allreduce(tf.concat(pieces, 0), op=hvd.Sum, name="residual").numpy()


def trained(folder):
    """One training, and what becomes of it when it stops and resumes."""
    model = fitted(DGC)
    fit(model, 3)
    reducer = model.optimizer._gradcomp
    stats = hvd.compression_stats(model.optimizer)
    assert 0 < stats.bytes_sent < stats.bytes_dense
    hvd.save_checkpoint(f"{folder}/sharded", model=model)
    hvd.save_checkpoint(f"{folder}/consolidated", mode="consolidated", model=model)
    total = residual(model)
    for inside in (True, False):
        other = fitted(DGC, hierarchical=inside)
        hvd.load_checkpoint(f"{folder}/consolidated", model=other)
        assert total.any() and np.allclose(residual(other), total, atol=1e-6)
    resumed = fitted(DGC)
    hvd.load_checkpoint(f"{folder}/sharded", model=resumed)
    ends = [fit(one, 3, seed=1) for one in (model, resumed)]

    def elsewhere():
        hvd.load_checkpoint(f"{folder}/sharded", model=fitted(DGC, hierarchical=False))

    def diverged():
        """A level of a bucket that ranks 1 and 3 lead."""
        if hvd.rank() == 3:
            variables = resumed.optimizer._gradcomp.buckets[1].variables
            (level,) = [v for v in variables if "level" in v.name]
            level.assign_add(1)
        hvd.verify(resumed.optimizer)

    # Weights go from rank 0 to all, and what only some ranks have stays where it is.
    model.layers[0].bias.assign_add(tf.fill((40,), float(hvd.rank())))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    spread = fit(model, 2, callbacks=[callback])
    return {
        "layers": list(stats.layers),
        "states": [bool(bucket.variables) for bucket in reducer.buckets],
        "sharded": ends,
        "broadcast": spread,
        "errors": errors_of({"sharded elsewhere": elsewhere, "diverged": diverged}),
    }


def micro_batches():
    moments = hvd.VarianceCompressor(alpha=0.5, moments="microbatch")
    return fit(fitted(moments, backward_passes_per_step=2, verify_every=2), 6)


def local_steps():
    """Ranks of a host are equal in each step, hosts after each exchange."""
    variables, ends, forgotten = start(), [], start()
    rule = {"compression": STROM, "hierarchical": True}
    local = LocalSteps(variables, 3, warmup_steps=1, **rule)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for variable in variables:
                y = tf.tanh(y @ variable)
            value = tf.reduce_mean(tf.square(y))
        gradients = local.reduce_gradients(tape.gradient(value, variables))
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(0.1 * gradient)

    for x in batches(7):
        step(tf.constant(x))
        local.step()
        ends.append(digest(v.numpy() for v in variables))
    hvd.verify(local)
    model = fitted(None)
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    callback = hvd.callbacks.LocalSteps(3, at_epoch_end=False, **rule)
    fit(model, 5, callbacks=[callback, Digests(fits := [])])
    alone = LocalSteps(forgotten, 1, **rule)
    errors = errors_of({"forgotten": alone.step})
    return [ends, fits], errors


class Digests(keras.callbacks.Callback):
    """Digests of the weights after each batch."""

    def __init__(self, ends):
        super().__init__()
        self.ends = ends

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(digest(v.numpy() for v in self.model.trainable_variables))


def main(folder: str) -> None:
    hvd.init(process_sets="dynamic")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    buckets.BUCKET_BYTES = 6000
    skipping, _ = taped(STROM, graph=False, spoilt=(2,), nonfinite="skip")
    raising, errors = taped(STROM, spoilt=(2,))
    ends, forgotten = local_steps()
    result = {
        "local steps": ends,
        "replicas": replicas(),
        "joined": joined(),
        "exact": exact(),
        "skip": digest(v.numpy() for v in skipping),
        "raise": [errors, digest(v.numpy() for v in raising)],
        "micro-batches": micro_batches(),
        **trained(folder),
    }
    result["errors"].update(forgotten)
    write(folder, hvd.rank(), result)
    hvd.allreduce(tf.constant(0.0), name="end")  # a rank that ends takes the others with it


if __name__ == "__main__":
    main(*sys.argv[1:])
