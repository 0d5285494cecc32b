"""One fault that ends the run: each living rank writes what it was told."""

from __future__ import annotations

import os
import signal
import sys
import time

import tensorflow as tf

import hvd_gradcomp.tensorflow as hvd
from tests.parallel.workers.results import noted

FAULTY = 1
STEP = 3


@tf.custom_gradient
def failing(x):
    def gradient(upstream):
        time.sleep(0.5)  # the others wait by now
        raise ArithmeticError("this rank has failed")

    return tf.identity(x), gradient


def train(fault):
    variable = tf.Variable(tf.ones((4, 2)))
    for step in range(6):
        faulty = hvd.rank() == FAULTY and step == STEP
        if faulty and fault == "killed":
            time.sleep(0.5)  # the others wait by now
            os.kill(os.getpid(), signal.SIGKILL)
        with tf.GradientTape() as tape:
            x = failing(variable) if faulty else variable
            value = tf.reduce_sum(tf.square(x))
        tape = hvd.DistributedGradientTape(tape, compression=hvd.StromCompressor(0.01))
        (gradient,) = tape.gradient(value, [variable])
        variable.assign_sub(0.1 * gradient)
    raise AssertionError("nothing was raised")


def main(folder: str, fault: str) -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with noted(folder, hvd.rank()):
        train(fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
