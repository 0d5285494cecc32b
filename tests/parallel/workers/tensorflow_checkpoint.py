"""Stops and resumes on TensorFlow: Keras's `fit`, tapes, and with another number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow as hvd
import hvd_gradcomp.tensorflow.keras as hvd_keras
from hvd_gradcomp import DGCCompressor, GradiVeQCompressor, StromCompressor, VarianceCompressor
from hvd_gradcomp.method.handover import correction_of, residual_of
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from tests.methods import ONE_OF_EACH
from tests.parallel.workers.results import digest, errors_of, finish, flipped

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
GRADIVEQ = GradiVeQCompressor(
    ratio=4, warmup_steps=1, sample_steps=3, compress_steps=9, feedback=True
)


def network(outputs=10, dropout=0.2):
    keras.utils.set_random_seed(1 + hvd.rank())  # seeds of Keras differ, weights are broadcast
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.Dropout(dropout),
            layers.Flatten(),
            layers.Dense(outputs),
        ]
    )


def data(first, last):
    random = np.random.default_rng(100 + hvd.rank())
    x = random.standard_normal((8 * last, 8, 8, 1)).astype(np.float32)
    y = random.integers(0, 10, 8 * last)
    return x[8 * first :], y[8 * first :]


def build(compressor, outputs=10, dropout=0.2):
    model = network(outputs, dropout)
    plain = (
        keras.optimizers.SGD(0.001) if correction_of(compressor) else keras.optimizers.Adam(0.01)
    )
    model.compile(hvd.DistributedOptimizer(plain, compression=compressor), LOSS)
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.trainable_variables, 0)
    return model


def train(model, first, last):
    x, y = data(first, last)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


def everything(model):
    return digest([np.asarray(v.value) for v in (*model.variables, *model.optimizer.variables)])


def stopped(compressor, steps, folder):
    """Digests without a stop and with one."""
    whole = build(compressor)
    train(whole, 0, steps // 2)
    train(whole, steps // 2, steps)  # another `fit`, but no stop
    before = train(build(compressor), 0, steps // 2)
    hvd.save_checkpoint(folder, model=before, epoch=steps // 2)
    model = build(compressor)
    rest = hvd.load_checkpoint(folder, model=model)
    train(model, rest["epoch"], steps)
    return [everything(whole), everything(model)]


def by_keras(model, compressor, path):
    """Keras's own saving, a file for each rank; it leaves random seeds out."""
    model.save(f"{path}.keras")
    return hvd_keras.load_model(f"{path}.keras", compression=compressor)


def by_checkpoint(model, compressor, path):
    """TensorFlow's own saving."""
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)
    model = build(compressor, dropout=0.0)
    keeper = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    keeper.restore(saved).assert_consumed()
    return model


def moved(ways, compressor, folder):
    """Digests without a stop, and with one by each way to save, of one training."""
    whole = build(compressor, dropout=0.0)
    train(whole, 0, 4)
    train(whole, 4, 8)
    before = train(build(compressor, dropout=0.0), 0, 4)
    results = {}
    for save_and_load in ways:
        path = Path(folder, f"{save_and_load.__name__}-{hvd.rank()}")
        model = train(save_and_load(before, compressor, path), 4, 8)
        results[save_and_load.__name__] = [everything(whole), everything(model)]
    return results


def with_tapes(compressor, folder):
    """The same by `tf.train.Checkpoint`, for tapes."""

    def start():
        model = network()
        hvd.broadcast_variables(model.trainable_variables, 0)
        variables = [v.value for v in model.trainable_variables]
        state = hvd.tape_state(variables, compressor)
        keeper = tf.train.Checkpoint(
            exchange=state, **{f"w{i}": v for i, v in enumerate(variables)}
        )

        @tf.function(reduce_retracing=True)
        def step(x, y):
            with tf.GradientTape() as tape:
                value = LOSS(y, model(x, training=False))
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            for v, g in zip(variables, tape.gradient(value, variables)):
                v.assign_sub(0.01 * g)

        def run(first, last):
            x, y = data(first, last)
            for i in range(0, len(y), 8):
                step(tf.constant(x[i : i + 8]), tf.constant(y[i : i + 8]))

        return run, keeper, lambda: digest([v.numpy() for v in (*variables, *state.variables)])

    run, _, result = start()
    run(0, 4)
    run(4, 8)
    whole = result()
    run, keeper, _ = start()
    run(0, 4)
    path = keeper.save(Path(folder, f"tape-{hvd.rank()}"))
    run, keeper, result = start()
    keeper.restore(path).assert_consumed()
    run(4, 8)
    return [whole, result()]


def mass(model):
    """The sum over ranks of what is kept."""
    reducer, flat = model.optimizer._gradcomp, []
    for bucket in reducer.buckets:
        kept = residual_of(bucket.compressor, bucket.state)
        if kept is not None:
            flat.append(tf.cast(kept, tf.float64))
    return hvd.allreduce(tf.concat(flat, 0), op=hvd.Sum).numpy().tolist()


def on_other_ranks(folder, steps):
    """Resumes what another number of ranks has saved, if any has; trains; saves."""
    result = {}
    for place, compressor in enumerate((VarianceCompressor(), DGCCompressor(0.1), GRADIVEQ)):
        model, saved_in, first = build(compressor), Path(folder, str(place)), 0
        if (saved_in / "current").exists():
            first = hvd.load_checkpoint(saved_in, model=model)["epoch"]
        before = mass(model)
        train(model, first, first + steps)
        hvd.save_checkpoint(saved_in, mode="consolidated", model=model, epoch=first + steps)
        parameters = digest([plain_variable(v).numpy() for v in model.trainable_variables])
        result[repr(compressor)] = [before, mass(model), parameters]
    return result


def refused(folder):
    """What is said of checkpoints that cannot be resumed from, and whether it did any harm."""
    good, compressor = Path(folder, "good"), StromCompressor(tau=0.01)
    hvd.save_checkpoint(good, model=train(build(compressor), 0, 1), epoch=1)
    plain = network()
    plain.compile(keras.optimizers.Adam(), LOSS)
    plain.optimizer.build(plain.trainable_variables)
    version, unharmed = good / (good / "current").read_text().split()[0], []

    def load(model, **more):
        before = everything(model)
        try:
            hvd.load_checkpoint(good, **{"model": model, **more})
        finally:
            unharmed.append(everything(model) == before)

    def truncated():
        part = version / "rank-1-of-2"
        whole = part.read_bytes()
        hvd.allreduce(tf.zeros(1))
        if hvd.rank() == 1:
            part.write_bytes(whole[:-300])
        try:
            load(build(compressor))
        finally:
            if hvd.rank() == 1:
                part.write_bytes(whole)
            hvd.allreduce(tf.zeros(1))

    other = tf.Variable([0.0] * (2 + hvd.rank()))  # fits on rank 0 alone
    odd = Path(folder, "odd")
    hvd.save_checkpoint(odd, model=build(compressor), other=[tf.Variable([1.0, 1.0])])

    def on_one_rank():
        model = build(compressor)
        before = everything(model)
        try:
            hvd.load_checkpoint(odd, model=model, other=[other])
        finally:
            unharmed.append(everything(model) == before and not other.numpy().any())

    cases = {
        "another compressor": lambda: load(build(StromCompressor(1.0))),
        "another model": lambda: load(build(compressor, 11)),
        "not distributed": lambda: load(plain),
        "another object": lambda: load(build(compressor), optimizer=plain.optimizer),
        "truncated": truncated,
        "not on one rank": on_one_rank,
        "two modes": lambda: hvd.save_checkpoint(
            odd, mode=("sharded", "consolidated")[hvd.rank()], model=plain
        ),
    }
    messages, target = errors_of(cases), build(compressor)
    before = everything(target)

    def again():
        hvd.load_checkpoint(good, model=target)

    flips = flipped(good, hvd.rank(), again, lambda: hvd.allreduce(tf.zeros(1)), times=12)
    unharmed.append(everything(target) == before)
    return {"said": messages, "unharmed": unharmed, "flips": flips}


def main(folder: str, what: str, steps: str) -> None:
    """`stopped` with 2 ranks, `moved` with any number."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    here = Path(folder)
    if what == "moved":
        result = on_other_ranks(here.parent / "checkpoints", int(steps))
    else:
        few = [StromCompressor(tau=0.01), DGCCompressor(0.1), GRADIVEQ]
        methods = [*ONE_OF_EACH, GRADIVEQ] if int(steps) >= 200 else few
        result = {
            "pairs": {
                repr(c): stopped(c, int(steps), here / f"stopped-{place}")
                for place, c in enumerate(methods)
            },
            **moved((by_keras, by_checkpoint), few[1], folder),
            "tapes": with_tapes(few[0], folder),
            "refused": refused(folder),
        }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:4])
