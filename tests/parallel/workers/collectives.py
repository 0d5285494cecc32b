"""Runs the toy method on one of the frameworks; writes each step's result."""

from __future__ import annotations

import sys

from tests.every_collective import EveryCollective, gradient
from tests.parallel.workers.results import write

STEPS = 4


def on_torch(n: int) -> tuple[int, list[list[float]]]:
    import torch

    import hvd_gradcomp.torch as hvd

    hvd.init()
    parameters = [(name, torch.nn.Parameter(torch.zeros(n))) for name in "ab"]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in parameters], lr=1.0),
        parameters,
        compression=EveryCollective(),
        op=hvd.Sum,
        bucket_bytes=4 * n,
    )
    replies = []
    for step in range(STEPS):
        optimizer.zero_grad()
        values = torch.tensor(gradient(hvd.rank(), step, n))
        (parameters[0][1] * values + parameters[1][1] * values * 2).sum().backward()
        optimizer.synchronize()
        assert torch.equal(parameters[1][1].grad, 2 * parameters[0][1].grad)
        replies.append(parameters[0][1].grad.tolist())
        with optimizer.skip_synchronize():
            optimizer.step()  # without it zero_grad() takes the step back
    return hvd.rank(), replies


def on_tensorflow(n: int) -> tuple[int, list[list[float]]]:
    import tensorflow as tf

    import hvd_gradcomp.tensorflow as hvd

    hvd.init()
    variable = tf.Variable(tf.zeros(n))
    replies = []
    for step in range(STEPS):
        values = tf.constant(gradient(hvd.rank(), step, n))
        (reduced,) = hvd.reduce_gradients([values], [variable], EveryCollective(), op=hvd.Sum)
        replies.append(reduced.numpy().tolist())
    return hvd.rank(), replies


if __name__ == "__main__":
    run = on_torch if sys.argv[2] == "torch" else on_tensorflow
    write(sys.argv[1], *run(int(sys.argv[3])))
