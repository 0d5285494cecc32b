"""Measures the control word and digests as a share of a step: two ranks, in one run.

    horovodrun --gloo -np 2 python -m benchmarks.archive.control
    horovodrun --gloo -np 2 python -m benchmarks.archive.control --framework tensorflow

Steps with and without them take turns, so that a machine that is busy now and then is busy for
both. Without stands for: nothing is compared in a step (on PyTorch the word that ends an exchange
still travels, since it also says that the exchange has ended, but no digest and no sum of bits is
in it), and no sum is taken of what was added up. `verify_every` is the third way: parameters are
compared after every step, from which the price at any interval follows.

Prints, for each way, the median of a step in ms, and its ratio to that without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from hvd_gradcomp import Compressor, NoneCompressor, StromCompressor

COMPRESSORS: dict[str, Compressor] = {"none": NoneCompressor(), "Strom": StromCompressor(tau=0.02)}
SHAPES = [(512, 512)] * 8
BATCH = 64
Step = Callable[[], Any]


def torch_steps(compressor: Compressor) -> tuple[Any, dict[str, Step]]:
    """A step by way."""
    import torch
    from torch import nn

    import hvd_gradcomp.torch as hvd
    from hvd_gradcomp.torch.drop_in import grad_synchronizer
    from hvd_gradcomp.torch.reduce import reducer

    torch.set_num_threads(1)
    x = torch.randn(BATCH, SHAPES[0][0])

    def step_of(without: bool) -> tuple[Step, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in SHAPES))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), compression=compressor
        )
        nothing = torch.zeros((), dtype=torch.int64)

        def step() -> None:
            with ExitStack() as stack:
                if without:
                    for module, name, value in (
                        (reducer, "sum_of_bits", nothing),
                        (grad_synchronizer, "digest_of", 0),
                    ):
                        stack.enter_context(mock.patch.object(module, name, lambda _, v=value: v))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        return step, optimizer

    (checked, optimizer), (without, _) = step_of(False), step_of(True)

    def verified() -> None:
        checked()
        hvd.verify(optimizer)

    return hvd, {"without": without, "with": checked, "verify_every=1": verified}


def tensorflow_steps(compressor: Compressor) -> tuple[Any, dict[str, Step]]:
    """The same, in graphs."""
    import tensorflow as tf

    import hvd_gradcomp.tensorflow as hvd
    from hvd_gradcomp.tensorflow.reduce import counters, step_sync

    x = tf.random.normal((BATCH, SHAPES[0][0]))

    def step_of(without: bool) -> tuple[Step, Any]:
        weights = [tf.Variable(tf.random.stateless_normal(s, (1, 2)) * 0.04) for s in SHAPES]

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                y = x
                for w in weights:
                    y = y @ w
                value = tf.reduce_mean(tf.square(y))
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            for w, gradient in zip(weights, tape.gradient(value, weights)):
                w.assign_sub(1e-3 * gradient)

        with ExitStack() as stack:
            if without:  # while it is traced
                unchecked = mock.patch.object(
                    step_sync.StepSync, "check_step", lambda _, __, rows, *___: ([], rows)
                )
                stack.enter_context(unchecked)
                zero = tf.constant(0, tf.int64)
                stack.enter_context(mock.patch.object(counters, "_sum_of_bits", lambda _: zero))
            step()
        return step, weights

    (checked, weights), (without, _) = step_of(False), step_of(True)

    def verified() -> None:
        checked()
        hvd.verify(weights)

    return hvd, {"without": without, "with": checked, "verify_every=1": verified}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    if options.framework == "torch":
        import horovod.torch as horovod

        make, together = torch_steps, horovod.barrier
    else:
        import horovod.tensorflow as horovod
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        make = tensorflow_steps

        def together() -> None:
            horovod.allreduce(tf.zeros(1), name="together")

    horovod.init()
    for name, compressor in COMPRESSORS.items():
        hvd, steps = make(compressor)
        times: dict[str, list[float]] = {name: [] for name in steps}
        order = [*steps]
        for _ in range(options.rounds + 3):
            order = [*order[1:], order[0]]  # none is always the first
            for key in order:
                together()
                start = time.perf_counter()
                steps[key]()
                times[key].append(1e3 * (time.perf_counter() - start))
        if hvd.rank() == 0:
            bare = times["without"][3:]
            for title, samples in times.items():
                ratio = statistics.median(time_ / other for time_, other in zip(samples[3:], bare))
                median = statistics.median(samples[3:])
                print(f"{name:6} {title:15} {median:8.2f} ms, ratio {ratio:.3f}", flush=True)
    horovod.shutdown()


if __name__ == "__main__":
    main()
