"""Probe on TensorFlow: in eager loops and inside `tf.function`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.monitoring import probe
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.runtime.program_runner import run
from hvd_gradcomp.tensorflow.comm.horovod import takes_part

_names = (f"gradcomp.probe.{number}" for number in itertools.count())


class Probe(probe.Probe):
    """Probe of gradients every so many steps, with the same readings on all ranks.

    probe = Probe(model.trainable_variables, every=50)
    ...
    gradients = tape.gradient(loss, variables)  # of a plain tape: this rank's own
    probe.step(gradients)

    Gradients must not have been exchanged: ask a `tf.GradientTape`, probe, and then reduce (with
    `reduce_gradients`, or an optimizer that does). Training is bit-identical to one without probe.

    Between probed steps it only counts. In a graph, a probed step samples there and does the rest
    in a `tf.py_function`, so functions that hold one cannot be compiled by XLA or saved. See
    `hvd_gradcomp.monitoring.probe` for the cost.

    Args:
        variables: those that the gradients belong to.
        every: one step in so many is probed, the first one too.
        process_set: the ranks that take part.
        **options: those of `monitoring.probe.Probe`; ranks of `pair` are those in the set.

    Raises:
        ValueError: Horovod is not initialized, or an argument is out of range.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        every: int = 50,
        *,
        process_set: Any = horovod.global_process_set,
        **options: Any,
    ) -> None:
        if not horovod.is_initialized():
            raise ValueError("call hvd.init() before Probe(...)")
        layers = [(name, v.shape) for name, v in zip(_layer_names(variables), variables)]
        super().__init__(layers, every, **options)
        if takes_part(process_set):
            self.require_pair(process_set.size())
        self.process_set = process_set
        self._name = next(_names)
        with tf.init_scope():
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="probe_steps")

    @property
    def steps(self) -> int:
        """Return the number of steps counted."""
        return int(self._steps)

    @tf.autograph.experimental.do_not_convert
    def step(self, gradients: Sequence[Any], moments: Sequence[Any] | None = None) -> None:
        """Count a step; if it is probed, all ranks exchange.

        Args:
            gradients: this rank's own, one for each variable; None stands for zero.
            moments: sums of squared sample gradients, for the density of Variance; without them
                `q = g*g`.

        Raises:
            ValueError: the number of gradients differs from that of the variables.
        """
        for tensors in (gradients, moments):
            if tensors is not None and len(tensors) != len(self.samples):
                raise ValueError(f"{len(tensors)} gradients for {len(self.samples)} variables")
        if not takes_part(self.process_set):
            return

        def probed() -> tf.Tensor:
            samples = [self._sampled(x) for x in (gradients, moments) if x is not None]
            if tf.executing_eagerly():
                return self._on_host(self._steps, *samples)
            return tf.py_function(self._on_host, [self._steps.read_value(), *samples], tf.int64)

        if tf.executing_eagerly():
            if self.due(self.steps):
                probed()
        else:
            due = self._steps % self.every == 0
            tf.cond(due, probed, lambda: tf.constant(-1, tf.int64))
        self._steps.assign_add(1)

    def _sampled(self, gradients: Sequence[Any]) -> tf.Tensor:
        pieces = []
        for x, sample in zip(gradients, self.samples):
            if x is None:
                pieces.append(tf.zeros((sample.taken,), tf.float32))
            else:
                flat = tf.reshape(tf.convert_to_tensor(x), (-1,))
                pieces.append(tf.cast(flat[:: sample.stride], tf.float32))
        return tf.concat(pieces, 0)

    def _on_host(
        self, step: Any, samples: tf.Tensor, moments: tf.Tensor | None = None
    ) -> tf.Tensor:
        rank, size = self.process_set.rank(), self.process_set.size()
        with tf.device("CPU:0"):
            samples = tf.identity(samples)
            run(self.program(TensorFlowOps(), int(step), samples, rank, size, moments), self._sum)
            return tf.constant(int(step), tf.int64)

    def _sum(self, request: Allreduce) -> tf.Tensor:
        return horovod.allreduce(
            request.tensor, name=self._name, op=horovod.Sum, process_set=self.process_set
        )


def _layer_names(variables: Sequence[Any]) -> list[str]:
    """Return Keras' path or the variable's name for each; with its index if names repeat."""
    names = [str(getattr(v, "path", None) or v.name) for v in variables]
    return [f"{name}.{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
