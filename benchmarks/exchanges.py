"""Exchanges of gradients between ranks on PyTorch, by TensorFlow's tape and by Keras.

    horovodrun --gloo -np 2 python -m benchmarks.exchanges POINTS.json RESULT.json

Started by `benchmarks.curve`, which writes POINTS.json: layers, and points with compressors. All
frameworks are in one process, so that rounds take turns: in each, PyTorch's dense allreduce, then
the method on every framework that was asked for. A time is that of the slowest rank, from a barrier
on; the median over rounds counts. Before them come steps until payloads have their size; the first
of all is given apart, which on TensorFlow is the trace. Horovod's threads for the framework that
waits wake a thousand times a second meanwhile, which takes some percent of a core.

What is timed on PyTorch is the exchange as optimizers do it, but for the update; on TensorFlow a
`tf.function` around `tape.gradient`, of a tape that hands given gradients over; on Keras one around
`optimizer.apply` of a `DistributedOptimizer(SGD())`, which is what `fit` calls, so with the update.
Dense is stock Horovod's; on Keras 3, where that does not reduce, `NoneCompressor()`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import torch

import hvd_gradcomp
from benchmarks.points import DENSE, PYTORCH, SETTLE, TAPE, Noise
from hvd_gradcomp import Compressor, NoneCompressor
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.tuning.job import Job
from hvd_gradcomp.tuning.measure import CompressedExchange, DenseExchange, Exchange, Layers
from hvd_gradcomp.tuning.over_horovod import HorovodJob


class Feed:
    """Each step's gradients."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.tensors = [torch.zeros(shape) for _, shape in layers]
        elements = sum(tensor.numel() for tensor in self.tensors)
        self._noise = Noise(elements, 1000 + horovod.rank())

    @cached_property
    def variables(self) -> list[Any]:
        """TensorFlow's, which hold what was drawn."""
        import tensorflow as tf

        return [tf.Variable(stored(tensor).numpy()) for tensor in self.tensors]

    @cached_property
    def trained(self) -> list[Any]:
        """Keras's, for every optimizer: their memory would not come back."""
        import keras

        return [keras.Variable(stored(tensor).numpy()) for tensor in self.tensors]

    def draw(self) -> list[torch.Tensor]:
        self._noise.fill(self.tensors)
        return self.tensors

    def copy_ms(self, rounds: int = 9) -> float:
        """Return the milliseconds of a copy of all gradients, while the other ranks copy theirs."""
        source = torch.cat([tensor.flatten() for tensor in self.draw()])
        target, times = torch.empty_like(source), []
        for _ in range(rounds):
            horovod.barrier()
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """As TensorFlow stores a layer: the outputs, PyTorch's first axis, are its last."""
    axes = tensor.dim()
    if axes < 3:
        return tensor.t().contiguous()
    return tensor.permute(*range(2, axes), 1, 0).contiguous()


class Graph(Exchange):
    """An exchange in a `tf.function`, of gradients that lie in variables.

    Args:
        job: the ranks.
        compressor: None for stock Horovod.
        feed: that draws what `perform` exchanges.
    """

    def __init__(self, job: Job, compressor: Compressor | None, feed: Feed) -> None:
        import tensorflow as tf

        super().__init__(job)
        self.compressor, self.inputs = compressor, feed.variables
        self.set_up(feed)
        self.step = tf.function(self.exchange)

    @abstractmethod
    def set_up(self, feed: Feed) -> None:
        """Make what trains."""

    @abstractmethod
    def exchange(self) -> Any:
        """Run the exchange; this is traced."""

    def run(self, gradients: list[torch.Tensor]) -> Any:
        for variable, gradient in zip(self.inputs, gradients):
            variable.assign(stored(gradient).numpy())
        return super().run(gradients)

    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        self.step()
        return time.perf_counter(), 0.0


class Tape(Graph):
    def set_up(self, feed: Feed) -> None:
        import tensorflow as tf

        self.variables = [tf.Variable(v, name=f"layer{i}") for i, v in enumerate(self.inputs)]

    def exchange(self) -> Any:
        import horovod.tensorflow as stock
        import tensorflow as tf

        import hvd_gradcomp.tensorflow as hvd

        gradients = [variable.value() for variable in self.inputs]

        class Given(tf.GradientTape):
            def gradient(self, *_: Any, **__: Any) -> Any:
                return gradients

        if self.compressor is None:
            return stock.DistributedGradientTape(Given()).gradient(None, self.variables)
        tape = hvd.DistributedGradientTape(Given(), compression=self.compressor)
        return tape.gradient(None, self.variables)

    def stats(self) -> CompressionStats | None:
        import hvd_gradcomp.tensorflow as hvd

        return hvd.compression_stats(self.variables) if self.compressor is not None else None


class Fit(Graph):
    def set_up(self, feed: Feed) -> None:
        import keras

        import hvd_gradcomp.tensorflow.keras as hvd

        self.optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1e-3), compression=self.compressor or NoneCompressor()
        )
        self.variables = feed.trained
        self.optimizer.build(self.variables)

    def exchange(self) -> Any:
        self.optimizer.apply([variable.value() for variable in self.inputs], self.variables)

    def stats(self) -> CompressionStats:
        import hvd_gradcomp.tensorflow.keras as hvd

        return hvd.compression_stats(self.optimizer)


def exchange_of(job: Job, framework: str, compressor: Compressor | None, feed: Feed) -> Exchange:
    if framework != PYTORCH:
        return (Tape if framework == TAPE else Fit)(job, compressor, feed)
    if compressor is None:
        return DenseExchange(job)
    return CompressedExchange(job, compressor, feed.layers)


def measure(
    job: Job, compressor: Compressor | None, frameworks: Sequence[str], feed: Feed, rounds: int
) -> dict[str, dict[str, Any]]:
    """A row for each framework, and one for PyTorch's dense allreduce in the same rounds."""
    ways: dict[str, Exchange] = {DENSE: DenseExchange(job)}
    ways |= {name: exchange_of(job, name, compressor, feed) for name in frameworks}
    first = {name: one.run(feed.draw()).total for name, one in ways.items()}
    settle = SETTLE if isinstance(compressor, ThresholdCompressor) else 3
    for name, one in ways.items():
        for _ in range(1, settle if name != DENSE else 2):
            one.run(feed.draw())
    before = {name: one.stats() for name, one in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, one in ways.items():
            times[name].append(1e3 * one.run(feed.draw()).total)
    rows = {}
    for name, one in ways.items():
        rows[name] = {
            "ms": statistics.median(times[name]),
            "min": min(times[name]),
            "max": max(times[name]),
            "first_s": first[name],
        }
        after = one.stats()
        if after is not None and before[name] is not None:
            span = after - before[name]
            rows[name] |= {
                "element_ratio": span.element_ratio,
                "bytes": span.bytes_sent / rounds,
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    plan = json.loads(options.points.read_text())
    points = plan["points"]
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    job = HorovodJob()
    torch.set_num_threads(1)
    if any(set(point["frameworks"]) - {PYTORCH} for point in points):
        import horovod.tensorflow as stock
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        stock.init()
    feed = Feed([(name, tuple(shape)) for name, shape in plan["layers"]])
    result: dict[str, Any] = {"copy_ms": feed.copy_ms(), "rows": {}}
    for point in points:
        compressor = eval(point["compressor"], dict(vars(hvd_gradcomp)))
        dense = point["name"] == DENSE
        frameworks, method = point["frameworks"], None if dense else compressor
        rows = measure(job, method, frameworks, feed, options.rounds)
        result["rows"][point["name"]] = rows
        gc.collect()  # functions of TensorFlow hold each other
        if horovod.rank() == 0:
            times = ", ".join(f"{name} {row['ms']:.0f} ms" for name, row in rows.items())
            print(f"{point['name']}: {times}", flush=True)
            options.result.write_text(json.dumps(result))
    horovod.shutdown()


if __name__ == "__main__":
    main()
