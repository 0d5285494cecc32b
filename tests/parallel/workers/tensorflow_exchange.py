"""What a TensorFlow exchange does besides training: faults, process sets, saving, other imports."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
import torch

import hvd_gradcomp.tensorflow as hvd
import hvd_gradcomp.tensorflow.keras as hvd_keras
from hvd_gradcomp.core.collectives import Alltoall
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.tensorflow.comm import horovod as comm
from hvd_gradcomp.testing import World
from tests.parallel.workers.results import digest, errors_of, finish, write

STROM = hvd.StromCompressor(tau=0.05)
GRAPHS = (
    STROM,
    hvd.StromCompressor(tau=0.05, index_coding="int32"),
    hvd.DGCCompressor(density=0.01, momentum=0.9),
    hvd.QSGDCompressor(bits=4, exchange="two_shot"),
)


def dense_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    )


def samples(count=64):
    random = np.random.default_rng(10 + hvd.rank())
    x, y = random.standard_normal((count, 6)), random.standard_normal((count, 3))
    return x.astype("f4"), y.astype("f4")


def weights_of(model):
    return digest(v.numpy() for v in model.trainable_variables)


def keras_variables():
    """Stock Horovod's tape refuses `model.trainable_variables` of Keras 3."""
    model, optimizer = dense_model(), keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(model(x) - y))
        tape = hvd.DistributedGradientTape(tape, compression=STROM)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    x, y = samples()
    step(x, y)
    graph = tf.function(step)
    for _ in range(5):
        graph(x, y)
    stats = hvd.compression_stats(model.trainable_variables)
    assert stats.steps == 6, stats
    assert any("dense" in name for name in stats.layers), stats
    return weights_of(model)


def translated():
    """Functions that AutoGraph has translated on the way to a collective.

    Without those that call a user's code.
    """
    weight, seen, send = tf.Variable(tf.ones((300,))), set(), comm.mpi_ops.allgather
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=STROM)
    trained = keras.Variable(np.ones(300, "f4"))

    def allgather(tensor, **options):
        frame = sys._getframe()
        while frame is not None:
            name = frame.f_code.co_name
            if "__autograph_generated_file" in frame.f_code.co_filename and "_body" not in name:
                seen.add(name.removeprefix("tf__"))
            frame = frame.f_back
        return send(tensor, **options)

    def by_tape():
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(weight * weight)
        tape = hvd.DistributedGradientTape(tape, compression=STROM)
        return tape.gradient(value, [weight])

    def by_optimizer():
        optimizer.apply([trained.value * 2.0], [trained])

    comm.mpi_ops.allgather = allgather
    try:
        tf.function(by_tape)()
        tf.function(by_optimizer)()
    finally:
        comm.mpi_ops.allgather = send
    assert {"by_tape", "by_optimizer"} <= seen
    return sorted(seen - {"by_tape", "by_optimizer", "gradient", "apply"})


class Damage:
    """While on, flips a bit of what rank 1 sends by allgather."""

    def __init__(self):
        self.on = tf.Variable(0)
        self.send = comm.mpi_ops.allgather

    def allgather(self, tensor, **options):
        if hvd.rank() == 1 and tensor.dtype == tf.uint8:
            flip = tf.one_hot(40, tf.size(tensor), on_value=8 * self.on, off_value=0)
            tensor = tf.bitwise.bitwise_xor(tensor, tf.cast(flip, tf.uint8))
        return self.send(tensor, **options)


def damaged_payload(graph):
    """The step raises on both ranks and leaves no trace; the next one goes on."""
    damage, weight = Damage(), tf.Variable(tf.zeros((300,)))
    rows = tf.constant(np.random.default_rng(5 + hvd.rank()).standard_normal(300), tf.float32)
    traces = []

    def step():
        traces.append(1)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(weight * rows)
        tape = hvd.DistributedGradientTape(tape, compression=STROM)
        (gradient,) = tape.gradient(value, [weight])
        weight.assign_sub(gradient)

    run = tf.function(step) if graph else step
    expected = tf.errors.InvalidArgumentError if graph else hvd.PayloadError
    message = "nothing was raised"
    comm.mpi_ops.allgather = damage.allgather
    try:
        run()
        reducer = reducer_of([weight])
        before = [v.numpy() for v in (weight, reducer.steps, *reducer.buckets[0].variables)]
        damage.on.assign(1)
        try:
            run()
        except expected as error:
            message = str(error).partition("assertion failed: ")[2 if graph else 0].splitlines()[0]
        after = [v.numpy() for v in (weight, reducer.steps, *reducer.buckets[0].variables)]
        assert digest(before) == digest(after), "a failed step left a trace"
        damage.on.assign(0)
        run()
    finally:
        comm.mpi_ops.allgather = damage.send
    assert not graph or len(traces) == 1, "an exchange that creates variables is traced twice"
    return [message, digest([weight.numpy()])]


def reducer_of(variables):
    from hvd_gradcomp.tensorflow.reduce.registry import reducer_of_variables

    return reducer_of_variables(variables)


def sparse_gradients():
    """As stock Horovod gathers them, and nothing is sent for the rest of the table."""
    results = []
    for module in (hvd, stock):
        table = tf.Variable(np.random.default_rng(1).standard_normal((500, 4)).astype("f4"))
        random = np.random.default_rng(20 + hvd.rank())
        for _ in range(4):
            with tf.GradientTape() as tape:
                picked = tf.gather(table, random.integers(0, 500, 6))
                value = tf.reduce_sum(tf.square(picked))
            tape = module.DistributedGradientTape(tape)
            (gradient,) = tape.gradient(value, [table])
            assert isinstance(gradient, tf.IndexedSlices)
            table.assign_sub(tf.convert_to_tensor(gradient))
        results.append(digest([table.numpy()]))
    # Once more with a gradient that is dense.
    table = tf.Variable(tf.ones((50, 4)))
    for dense in (False, True):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(table) if dense else tf.reduce_sum(tf.gather(table, [hvd.rank()]))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.NoneCompressor())
        (gradient,) = tape.gradient(value, [table])
        results.append(digest([tf.convert_to_tensor(gradient).numpy()]))
        stats = hvd.compression_stats(tape)
    assert stats.elements_sent == 4 + 200, stats
    assert stats.bytes_sent == 4 * 4 + 4 + 4 * 200, stats  # a row and its index; the table
    return results


def embedded(vocabulary, batch, compressor, **options):
    """What `fit` of a model with an `Embedding` has moved; a batch is 8 rows a sample."""
    keras.utils.set_random_seed(3)
    table = keras.layers.Embedding(vocabulary, 16)
    model = keras.Sequential([keras.Input((8,)), table, keras.layers.Flatten()])
    model.add(keras.layers.Dense(4))
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=compressor, **options
    )
    model.compile(optimizer, "mse")
    random = np.random.default_rng(30 + hvd.rank())
    x = random.integers(0, vocabulary, (96, 8))
    y = random.standard_normal((96, 4)).astype("f4")
    model.fit(x, y, batch_size=batch, epochs=2, verbose=0)  # the last batch may be another
    return hvd.compression_stats(optimizer), weights_of(model)


def picked(rows, compressor, graph):
    """What a tape has moved, of rows of a table; in a graph for any number of them."""
    table = tf.Variable(tf.ones((500, 4)))

    def step(which):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(tf.gather(table, which)))
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        (gradient,) = tape.gradient(value, [table])
        table.assign_sub(0.1 * tf.convert_to_tensor(gradient))

    signature = [tf.TensorSpec((None,), tf.int32)]
    run = tf.function(step, input_signature=signature) if graph else step
    for count in (rows, rows // 2):
        run(tf.range(count, dtype=tf.int32) % 500)
    return hvd.compression_stats([table]), digest([table.numpy()])


def embeddings():
    """No method moves more bytes than dense gradients, and rows go where they are fewer."""
    results = []
    for compressor, small in ((hvd.NoneCompressor(), 0.99), (hvd.QSGDCompressor(), 6.0)):
        # 256 rows a step of 50: they would be more than the table.
        stats, weights = embedded(50, 32, compressor)
        assert stats.ratio > small, stats
        assert stats.bytes_received <= 1.01 * stats.bytes_dense, stats
        # 16 rows of 5,000: gathered, which takes fewer bytes than 4 bits an element.
        few, others = embedded(5000, 2, compressor)
        assert few.ratio > 40, few
        assert few.density["embedding/embeddings"] < 0.01, few
        chosen, same = embedded(5000, 2, compressor, sparse_as_dense=False)
        assert (chosen.bytes_sent <= few.bytes_sent) and same == others, (chosen, few)
        dense, _ = embedded(5000, 2, compressor, sparse_as_dense=True)
        assert small < dense.ratio < 8, dense
        results += [weights, others]
        for rows, least in ((6, 20), (900, small)):
            for graph in (False, True):
                stats, table = picked(rows, compressor, graph)
                assert stats.ratio > least, (rows, graph, stats)
                results.append(table)
    return results


def left_out():
    """A bad batch whose step is left out does not come back; what is kept is as before."""
    counts = []
    for compressor in (
        hvd.SparseGDCompressor(density=0.1),
        hvd.DGCCompressor(density=0.1, momentum=0.0),
        hvd.EGCCompressor(momentum=0.0),
    ):
        for graph in (False, True):
            weights = [tf.Variable(tf.zeros((200, 4))), tf.Variable(tf.zeros(300))]

            def step(x, scale, weights=weights, compressor=compressor):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(x @ weights[0] - 1.0))
                    loss = scale * (loss + tf.reduce_sum(tf.square(weights[1] - 0.1)))
                tape = hvd.DistributedGradientTape(tape, compression=compressor)
                gradients = tape.gradient(loss, weights)
                if tf.linalg.global_norm(gradients) > 50.0:
                    tape.discard_step()
                    return 1
                for variable, gradient in zip(weights, gradients):
                    variable.assign_sub(0.01 * gradient)
                return 0

            run, random = tf.function(step) if graph else step, np.random.default_rng(hvd.rank())
            count = 0
            for number in range(16):
                bad = number == 8
                kept = digest(kept_by(weights)) if bad else None
                x = tf.constant(random.standard_normal((8, 200)).astype("f4"))
                count += int(run(x, tf.constant(1e4 if bad else 1.0)))
                assert not bad or digest(kept_by(weights)) == kept, (compressor, graph)
            stats = hvd.compression_stats(weights)
            assert (count, stats.skipped, stats.steps) == (1, 1, 15), (compressor, graph, count)
            counts.append(digest(v.numpy() for v in weights))
    return counts


def kept_by(weights):
    reducer = reducer_of(weights)
    return [reducer.steps.numpy(), *(v.numpy() for v in reducer.planner.variables)]


def discarded_wrongly():
    """Twice, without what it takes, and on one rank alone."""
    weight = tf.Variable(tf.ones(8))

    def reduce(**options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight)
        tape = hvd.DistributedGradientTape(tape, compression=STROM, **options)
        tape.gradient(loss, [weight])
        return tape

    def twice():
        tape = reduce()
        hvd.discard_step(tape)
        hvd.discard_step(tape)

    def alone():
        tape = reduce()
        if hvd.rank() == 1:
            tape.discard_step()
        reduce()

    model = dense_model()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=STROM)
    model.compile(optimizer, "mse")
    model.fit(*samples(), verbose=0)
    again = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=STROM, rollback=True
    )
    variables = [tf.Variable(tf.ones(3))]
    again.apply([tf.ones(3)], variables)
    kept = [v.numpy() for v in again._gradcomp.buckets[0].variables]
    again.apply([2 * tf.ones(3)], variables)
    again.discard_step()
    assert digest(kept) == digest(v.numpy() for v in again._gradcomp.buckets[0].variables)
    with tf.GradientTape() as plain:
        squares = weight * weight
    errors = {
        "twice": twice,
        "no rollback": lambda: reduce(rollback=False).discard_step(),
        "keras": optimizer.discard_step,
        "alone": alone,
        "jacobian": lambda: hvd.DistributedGradientTape(plain).jacobian(squares, weight),
    }
    return errors_of(errors)


def unlike_lengths():
    """Ranks whose data end at different batches end an epoch together; so do their callbacks."""
    x, y = samples()
    length = len(x) - 8 * hvd.rank()
    model = dense_model()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=STROM)
    f1 = keras.metrics.F1Score(average=None, name="f1")
    model.compile(optimizer, "mse", metrics=[f1])
    y = np.eye(y.shape[-1], dtype="f4")[np.arange(len(y)) % y.shape[-1]]
    data = tf.data.Dataset.from_tensor_slices((x[:length], y[:length])).batch(8)
    callback = hvd_keras.callbacks.MetricAverageCallback()
    history = model.fit(hvd_keras.even_batches(data), epochs=2, verbose=0, callbacks=[callback])
    unknown = hvd_keras.even_batches(data.filter(lambda *_: True))
    assert sum(1 for _ in unknown) == -(-(len(x) - 8) // 8)
    steps = hvd.compression_stats(optimizer).steps
    assert steps == 2 * -(-(len(x) - 8) // 8), steps
    assert np.asarray(history.history["f1"][0]).shape == (y.shape[-1],)
    return [weights_of(model), digest(np.asarray(f) for f in history.history["f1"])]


def joined():
    """A rank without batches joins: as if it had given zeros, and what it keeps, itself.

    Over a tape, eager and in a graph, with rows that are gathered, and by an optimizer of Keras.
    """
    longest, missing = 6, 2 * hvd.rank()

    def spent(compressor, graph, by_join):
        table, weight = tf.Variable(tf.ones((2000, 4))), tf.Variable(tf.ones((4, 30)))
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.Adam(0.1), compression=compressor
        )
        trained = keras.Variable(np.ones(40, "f4"))

        def step(rows, factor):
            with tf.GradientTape() as tape:
                loss = factor * tf.reduce_sum(tf.tanh(tf.gather(table, rows) @ weight))
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            sparse, dense = tape.gradient(loss, [table, weight])
            table.assign_sub(0.1 * tf.convert_to_tensor(sparse))
            weight.assign_sub(0.1 * dense)
            optimizer.apply([factor * trained.value], [trained])

        run = tf.function(step) if graph else step
        steps = longest - (missing if by_join else 0)
        for place in range(steps):
            rows = np.random.default_rng([place, hvd.rank()]).integers(0, 2000, 3)
            run(tf.constant(rows), tf.constant(float(place < longest - missing)))
        if by_join:
            last = int(hvd.join())
            assert last == 0, last
            hvd.broadcast_variables([table, weight, trained], root_rank=last)
            hvd.broadcast_variables(optimizer.variables, root_rank=last)
        stats = hvd.compression_stats(optimizer)
        assert stats.steps == longest, stats
        return digest(v.numpy() for v in (table, weight, trained))

    kept = tf.Variable(tf.ones(9))
    hvd.reduce_gradients([tf.ones(9)], [kept], STROM)
    if hvd.rank() == 1:
        del kept  # rank 0 still has the reducer of an earlier training
    ends = []
    methods = (STROM, False), (hvd.QSGDCompressor(), True), (hvd.SparseGDCompressor(), True)
    for compressor, graph in methods:
        plain, by_join = (spent(compressor, graph, each) for each in (False, True))
        assert plain == by_join, compressor
        ends.append(by_join)
    return ends


def two_optimizers(folder):
    """Those of a GAN, resumed in a process in which they have not trained."""

    def made():
        keras.utils.set_random_seed(5)
        models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]) for _ in range(2)]
        pair = [
            hvd_keras.DistributedOptimizer(kind, compression=STROM)
            for kind in (keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01))
        ]
        return models, pair

    def train(models, pair, first, last):
        for step in range(first, last):
            x = np.random.default_rng([step, hvd.rank()]).standard_normal((8, 4)).astype("f4")
            for model, optimizer in zip(models, pair):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x) - 1.0))
                weights = model.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
        return digest(v.numpy() for m in models for v in m.trainable_variables)

    whole, stopped, resumed = made(), made(), made()
    straight = train(*whole, 0, 6)
    train(*stopped, 0, 3)
    names = ("generator", "critic", "first", "second")
    path = str(Path(folder, "gan"))
    hvd.save_checkpoint(path, **dict(zip(names, [*stopped[0], *stopped[1]])))
    hvd.load_checkpoint(path, **dict(zip(names, [*resumed[0], *resumed[1]])))
    assert train(*resumed, 3, 6) == straight
    return straight


KERNELS = {
    "conv/kernel": (3, 2, 8, 16),
    "conv/bias": (16,),
    "table/embeddings": (20, 6),
    "square/kernel": (24, 24),
    "dense/kernel": (48, 30),
}


def nodes_of_a_bucket(compressor):
    """Nodes that one bucket more adds to a step's graph; each lengthens the first step."""

    def nodes(buckets):
        variables = [tf.Variable(tf.zeros((1 << 20,)), name=f"layer{i}") for i in range(buckets)]

        def reduced():
            with tf.GradientTape() as tape:
                value = tf.add_n([tf.reduce_sum(v * v) for v in variables])
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            return tape.gradient(value, variables)

        graph = tf.function(reduced, autograph=False).get_concrete_function().graph
        assert len(reducer_of(variables).buckets) == buckets
        return len(graph.get_operations())

    return nodes(3) - nodes(2)


def as_pytorch_has_it(name, x):
    """Outputs first, but for a table of embeddings."""
    axes = (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)) if "/kernel" in name else range(x.ndim)
    return torch.from_numpy(np.ascontiguousarray(x.transpose(*axes)))


def outputs_first(exchange):
    """1-bit SGD of TensorFlow's layers; a world of PyTorch's plain ops does the same to the bit."""
    compressor = hvd.OneBitCompressor(exchange)
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in KERNELS.items()]
    copies = [tf.Variable(v) for v in variables]

    @tf.function
    def reduced():
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, copies)])
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(value, variables)

    world = None
    for step in range(4):
        random = np.random.default_rng(step)
        ranks = [
            [random.standard_normal(shape).astype("f4") for shape in KERNELS.values()]
            for _ in range(2)
        ]
        for variable, x in zip(copies, ranks[hvd.rank()]):
            variable.assign(x)
        reduced_ = [as_pytorch_has_it(n, x.numpy()) for n, x in zip(KERNELS, reduced())]
        reducer = reducer_of(variables)
        if world is None:
            (bucket,) = reducer.buckets
            layout, places = bucket.layout, bucket.places
            assert layout.turned
            layout = Layout(layout.names, layout.shapes, block=layout.block)
            world = World(compressor, TorchOps(), layout, 2)
        flats = []
        for layers in ranks:
            turned = [as_pytorch_has_it(n, x) for n, x in zip(KERNELS, layers)]
            flats.append(world.flat([turned[place] for place in places]))
        expected = world.step(flats)[0]
        assert torch.equal(world.flat([reduced_[place] for place in places]), expected)
        (kept,) = reducer.planner.variables
        assert kept.numpy().tobytes() == world.states[hvd.rank()].r.numpy().tobytes()
    requests = [requests[hvd.rank()] for requests in world.traffic]
    leaving = [r.tensor[1:] if isinstance(r, Alltoall) else r.tensor for r in requests]
    sent = sum(x.numel() * x.element_size() for x in leaving)
    assert hvd.compression_stats(variables).bytes_sent == 4 * sent, exchange
    return digest(x.numpy() for x in reduced_)


def process_sets():
    """A rank outside keeps its gradients, and later exchanges still find each other."""
    ours = hvd.add_process_set([0])
    weight, results = tf.Variable([1.0, 2.0]), []
    for process_set in (ours, hvd.global_process_set):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(weight * (1.0 + hvd.rank()))
        tape = hvd.DistributedGradientTape(
            tape, compression=hvd.NoneCompressor(), process_set=process_set
        )
        results.append(tape.gradient(value, [weight])[0].numpy().tolist())
    assert results == [[1.0 + hvd.rank()] * 2, [1.5] * 2], results
    model = dense_model()
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=STROM, process_set=ours
    )
    model.compile(optimizer, "mse")
    model.fit(*samples(), verbose=0)
    return True


def fitted(model, epochs, x, y):
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model


def saving(folder):
    """Training goes on from a file as if it had not stopped, if each rank loads its own."""
    x, y = samples()
    compressor = hvd.HybridCompressor(tau=0.05, moments="step")

    def new():
        model = dense_model()
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.Adam(0.01), compression=compressor
        )
        model.compile(optimizer, "mse")
        return model

    straight = fitted(fitted(new(), 1, x, y), 1, x, y)
    stopped = fitted(new(), 1, x, y)
    path = str(Path(folder, f"model{hvd.rank()}.keras"))
    stopped.save(path)
    resumed = hvd_keras.load_model(path, compression=compressor)
    before = hvd.compression_stats(resumed.optimizer)
    saved = hvd.compression_stats(stopped.optimizer)
    assert before == saved, (before, saved)
    fitted(resumed, 1, x, y)
    assert weights_of(resumed) == weights_of(straight), "resumed otherwise"

    # The root's file on all ranks: what belongs to the root stays there.
    hvd.broadcast_object(0)  # both have saved
    shared = hvd_keras.load_model(str(Path(folder, "model0.keras")), compression=compressor)
    kept = [
        float(tf.reduce_sum(tf.abs(b.variables[0]))) for b in shared.optimizer._gradcomp.buckets
    ]
    assert (sum(kept) > 0) == (hvd.rank() == 0), kept
    fitted(shared, 1, x, y)

    # The root alone has read a file; the callback brings the others to it.
    mixed = hvd_keras.load_model(path, compression=compressor) if hvd.rank() == 0 else new()
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    mixed.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])

    # A file of an optimizer that is not distributed, and the way back.
    plain = dense_model()
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    fitted(plain, 1, x[:8] * 0, y[:8] * 0).save(path)
    loaded = hvd_keras.load_model(path, compression=compressor)
    assert int(loaded.optimizer.iterations) == 1
    fitted(loaded, 1, x, y)
    return [weights_of(m) for m in (straight, shared, mixed, loaded)]


def broadcast():
    """`broadcast_variables(optimizer.variables)` leaves what belongs to this rank."""
    model = dense_model()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=STROM)
    model.compile(optimizer, "mse")
    fitted(model, 1, *samples())
    variables_ = [v.numpy() for v in optimizer._gradcomp.planner.variables]
    if hvd.rank() == 1:
        optimizer.learning_rate = 7.0
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    assert digest(variables_) == digest(v.numpy() for v in optimizer._gradcomp.planner.variables)
    assert float(optimizer.learning_rate) == np.float32(0.1)
    return digest([variables_[0]])


def late_torch():
    """Another of Horovod's frontends, imported later, makes `included()` say no."""
    import horovod.torch

    assert not horovod.torch.is_initialized()
    model = dense_model()
    model.compile(
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=STROM), "mse"
    )
    return weights_of(fitted(model, 1, *samples()))


def main(folder: str) -> None:
    if folder.endswith("late"):
        import horovod.torch  # noqa: F401 - after horovod.tensorflow
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if folder.endswith("late"):
        write(folder, hvd.rank(), late_torch())
        return
    if folder.endswith("joined"):
        write(folder, hvd.rank(), joined())
        return
    warnings.filterwarnings("error", message="Skipping variable loading")
    result = {
        "keras variables": keras_variables(),
        "translated": translated(),
        "damaged payload, eager": damaged_payload(False),
        "damaged payload, graph": damaged_payload(True),
        "sparse gradients": sparse_gradients(),
        "outputs first": [outputs_first(exchange) for exchange in ("allgather", "two_shot")],
        "nodes": [nodes_of_a_bucket(compressor) for compressor in GRAPHS],
        "process sets": process_sets(),
        "saving": saving(folder),
        "embeddings": embeddings(),
        "left out": left_out(),
        "unlike lengths": unlike_lengths(),
        "two optimizers": two_optimizers(folder),
    }
    broadcast_ = broadcast()
    finish(hvd, folder, {"equal": result, "own": broadcast_, "errors": discarded_wrongly()})


if __name__ == "__main__":
    main(sys.argv[1])
