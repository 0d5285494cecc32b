"""Two process sets train at the same time, each its own model; or one of them does so alone."""

from __future__ import annotations

import sys

import numpy as np

from hvd_gradcomp import (
    Compressor,
    GradiVeQCompressor,
    LGCCompressor,
    OneBitCompressor,
    ScaleComCompressor,
    StromCompressor,
)
from tests.methods import ONE_OF_EACH

LEARNED: list[Compressor] = [
    GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=3, compress_steps=4),
    LGCCompressor(alpha=0.1, full_steps=1, train_steps=9, ae_lr=0.1, momentum=0.9),
    LGCCompressor(
        "parameter_server", alpha=0.1, full_steps=1, train_steps=9, ae_lr=0.1, momentum=0.9
    ),
]
# Tracing is slow, and what knows of a process set is the collective: one method of each.
TRACED: list[Compressor] = [
    StromCompressor(0.01),
    ScaleComCompressor(density=0.05),
    OneBitCompressor(exchange="two_shot"),
    LEARNED[-1],
]
METHODS = {  # of each set; LGC takes longest to trace
    "torch": ([*ONE_OF_EACH, *LEARNED],) * 2,
    "tensorflow": (TRACED, TRACED[:-1]),
}
STEPS = (14, 11)  # of the two sets, which so begin and end their trainings apart
SHAPES = ((3, 3, 4, 6), (9, 32), (32, 8), (8,))


def batches(group: int, place: int) -> np.ndarray:
    """What the rank at a place of a set sees, step by step."""
    random = np.random.default_rng(10 * group + place)
    return random.standard_normal((STEPS[group], 4, 24)).astype(np.float32)


def start() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype(np.float32) * 0.3 for shape in SHAPES]


def torch_trained(hvd, process_set, compressor, xs):
    import torch

    parameters = [torch.nn.Parameter(torch.from_numpy(w)) for w in start()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.001),
        [(f"w{place}", p) for place, p in enumerate(parameters)],
        compression=compressor,
        process_set=process_set,
        bucket_bytes=1024,
        verify_every=5,
    )
    for x in torch.from_numpy(xs):
        optimizer.zero_grad()
        kernel, middle, weight, bias = parameters
        y = (x @ kernel.reshape(24, 9)).tanh() @ middle @ weight + bias
        y.square().sum().backward()
        optimizer.step()
    return [p.detach().numpy() for p in parameters]


def tensorflow_trained(hvd, process_set, compressor, xs):
    import tensorflow as tf

    variables = [tf.Variable(w) for w in start()]

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            kernel, middle, weight, bias = variables
            y = tf.tanh(x @ tf.reshape(kernel, (24, 9))) @ middle @ weight + bias
            value = tf.reduce_sum(tf.square(y))
        tape = hvd.DistributedGradientTape(tape, compression=compressor, process_set=process_set)
        for variable, gradient in zip(variables, tape.gradient(value, variables)):
            variable.assign_sub(0.001 * gradient)

    for x in xs:
        step(tf.constant(x))
    hvd.verify(variables)
    return [v.numpy() for v in variables]


def main(folder: str, framework: str, alone: str) -> None:
    """Writes digests of the weights, by set and method.

    Args:
        folder: where.
        framework: "torch" or "tensorflow".
        alone: "alone" to train the sets' models one after another on all ranks.
    """
    from tests.parallel.workers.results import digest, finish

    if framework == "torch":
        import torch

        import hvd_gradcomp.torch as hvd

        torch.set_num_threads(1)
        trained = torch_trained
    else:
        import tensorflow as tf

        import hvd_gradcomp.tensorflow as hvd

        tf.config.threading.set_intra_op_parallelism_threads(1)
        trained = tensorflow_trained
    sets = [] if alone == "alone" else [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
    hvd.init(process_sets=sets)
    result = {}
    for group in [0, 1] if alone == "alone" else [hvd.rank() // 2]:
        process_set = sets[group] if sets else hvd.global_process_set
        xs = batches(group, hvd.rank() % 2)
        for compressor in METHODS[framework][group]:
            print(framework, group, compressor, flush=True)  # the last one hangs, should one hang
            weights = trained(hvd, process_set, compressor, xs)
            result[f"{group} {compressor}"] = digest(weights)
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
