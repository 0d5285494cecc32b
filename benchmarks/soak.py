"""Memory over a long run: many steps of a small convolutional network on two ranks, in curves.

    make soak                                                    # or, with any number of ranks:
    horovodrun --gloo -np 2 python -m benchmarks.soak --folder results
    horovodrun --gloo -np 2 python -m benchmarks.soak --framework tensorflow

Each method trains a network of its own on noise with labels drawn at random, so gradients never
vanish, in several buckets. After a warm-up each rank notes, every so many steps: its resident
memory, how many objects and tensors Python's collector knows, and how many of Horovod's handles are
open. At the end all ranks compare digests of their parameters.

Growth is the highest value of the last quarter of the notes less that of the first. Exit status 1,
and a line for each reason, if on any rank memory grows by more than `--bound` MiB, if tensors or
handles grow at all, or if the replicas differ in any bit. Curves of all ranks go to
`soak-<framework>.json`, those of memory to `soak-<framework>.png`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import psutil
from rich.console import Console
from rich.table import Table

import hvd_gradcomp
from hvd_gradcomp.planning.description import brief

matplotlib.use("Agg")
from matplotlib import pyplot

METHODS = (
    "VarianceCompressor(alpha=1, moments='step')",
    "DGCCompressor(density=0.01)",
    "QSGDCompressor(bits=4)",
    "GradiVeQCompressor(ratio=8, warmup_steps=50, sample_steps=50, compress_steps=130)",
)
STEPS = {"pytorch": 20_000, "tensorflow": 4_000}
BUCKET_BYTES = 40_000  # of 139 kB of parameters: three buckets
FILTERS = (16, 32, 32)
BATCH, SIDE, CLASSES = 4, 8, 10

Training = Callable[[], None]


class Curves:
    """Measurements of one rank.

    Args:
        tensor: the framework's class.
        handles: tells how many handles of Horovod's are open.
    """

    def __init__(self, tensor: type, handles: Callable[[], int]) -> None:
        self._tensor, self._handles = tensor, handles
        self.of: dict[str, list[int]] = {
            name: [] for name in ("step", "memory", "objects", "tensors", "handles")
        }

    def note(self, step: int) -> None:
        gc.collect()
        known = gc.get_objects()
        values = {
            "step": step,
            "memory": psutil.Process().memory_info().rss,
            "objects": len(known),
            "tensors": sum(issubclass(type(x), self._tensor) for x in known),
            "handles": self._handles(),
        }
        for name, value in values.items():
            self.of[name].append(value)


def pytorch(methods: list[str]) -> Iterator[tuple[str, Training, Curves, Callable[[], bytes]]]:
    """For each method: one training step, where to note, and the parameters' bytes."""
    import torch
    from horovod.torch import mpi_ops
    from torch import nn

    import hvd_gradcomp.torch as hvd

    torch.set_num_threads(1)
    for text in methods:
        torch.manual_seed(1)
        inputs = (1, *FILTERS)
        pairs = zip(inputs, FILTERS)
        layers = [nn.Sequential(nn.Conv2d(*pair, 3, padding=1), nn.ReLU()) for pair in pairs]
        head = nn.Linear(FILTERS[-1] * SIDE * SIDE, CLASSES)
        model = nn.Sequential(*layers, nn.Flatten(), head)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            model.named_parameters(),
            compression=eval(text, vars(hvd_gradcomp)),
            bucket_bytes=BUCKET_BYTES,
        )
        generator = torch.Generator().manual_seed(2 + hvd.rank())

        def train(model: Any = model, optimizer: Any = optimizer, source: Any = generator) -> None:
            x = torch.randn(BATCH, 1, SIDE, SIDE, generator=source)
            y = torch.randint(CLASSES, (BATCH,), generator=source)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        def parameters(model: Any = model) -> bytes:
            return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

        yield text, train, Curves(torch.Tensor, lambda: len(mpi_ops._handle_map)), parameters


def tensorflow(methods: list[str]) -> Iterator[tuple[str, Training, Curves, Callable[[], bytes]]]:
    """The same with a tape in a `tf.function`; a step that has run has no handle."""
    import keras
    import tensorflow as tf

    import hvd_gradcomp.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    for text in methods:
        keras.utils.set_random_seed(1)
        convolutions = [
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu")
            for filters in FILTERS
        ]
        ends = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((SIDE, SIDE, 1)), *convolutions, *ends])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        compressor = eval(text, vars(hvd_gradcomp))
        generator = tf.random.Generator.from_seed(2 + hvd.rank())

        @tf.function
        def train(
            model: Any = model,
            optimizer: Any = optimizer,
            compressor: Any = compressor,
            source: Any = generator,
        ) -> None:
            x = source.normal((BATCH, SIDE, SIDE, 1))
            y = source.uniform((BATCH,), maxval=CLASSES, dtype=tf.int64)
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                loss = tf.reduce_mean(losses)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        def parameters(model: Any = model) -> bytes:
            return b"".join(v.numpy().tobytes() for v in model.trainable_variables)

        yield text, train, Curves(tf.Tensor, lambda: 0), parameters


def grown(curves: dict[str, list[int]], name: str) -> int:
    """By how much the last quarter of a curve rises above its first."""
    quarter = -(-len(curves[name]) // 4)
    return max(curves[name][-quarter:]) - max(curves[name][:quarter])


def complaints(title: str, ranks: list[dict[str, Any]], bound: float) -> list[str]:
    """Return the reasons why a method fails."""
    reasons = []
    for rank, result in enumerate(ranks):
        memory = grown(result["curves"], "memory") / 2**20
        if memory > bound:
            reasons.append(
                f"{title}: rank {rank}'s memory grows by {memory:.2f} MiB, over {bound:g}"
            )
        for name in ("tensors", "handles"):
            more = grown(result["curves"], name)
            if more > 0:
                reasons.append(f"{title}: rank {rank} has {more} more {name} at the end")
    if len({result["digest"] for result in ranks}) > 1:
        reasons.append(f"{title}: the replicas differ")
    return reasons


def draw(results: dict[str, list[dict[str, Any]]], title: str, path: Path) -> None:
    """Resident memory above that after the warm-up, a line for each method and rank."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for place, (method, ranks) in enumerate(results.items()):
        for rank, result in enumerate(ranks):
            curves = result["curves"]
            above = [(memory - curves["memory"][0]) / 2**20 for memory in curves["memory"]]
            label = method if rank == 0 else None
            style = "-" if rank == 0 else ":"
            axes.plot(curves["step"], above, style, color=f"C{place}", label=label, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("resident memory above that after the warm-up, MiB")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=tuple(STEPS), default="pytorch")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="as in hvd_gradcomp")
    parser.add_argument("--steps", type=int, help=f"of each method; {STEPS} if not given")
    parser.add_argument("--every", type=int, default=200, help="steps between two notes")
    parser.add_argument("--warm-up", type=int, help="steps before the first; a tenth if not given")
    parser.add_argument("--bound", type=float, default=2.0, help="MiB that memory may grow by")
    parser.add_argument("--folder", type=Path, default=Path("results"))
    options = parser.parse_args()
    steps = STEPS[options.framework] if options.steps is None else options.steps
    warm_up = steps // 10 if options.warm_up is None else options.warm_up
    if not 0 < warm_up < steps or options.every < 1:
        parser.error("there have to be steps, and a warm-up of fewer; --every is at least 1")

    if options.framework == "pytorch":
        import horovod.torch as horovod

        trainings = pytorch
    else:
        import horovod.tensorflow as horovod

        trainings = tensorflow
    horovod.init()
    results: dict[str, list[dict[str, Any]]] = {}
    failures: list[str] = []
    for text, train, curves, parameters in trainings(options.methods):
        start = time.perf_counter()
        for step in range(1, steps + 1):
            train()
            if step == steps or (step >= warm_up and (step - warm_up) % options.every == 0):
                curves.note(step)
        result = {
            "curves": curves.of,
            "digest": hashlib.sha256(parameters()).hexdigest(),
            "seconds": time.perf_counter() - start,
        }
        title = brief(eval(text, vars(hvd_gradcomp)))
        results[title] = horovod.allgather_object(result, name=f"soak.{title}")
        failures += complaints(title, results[title], options.bound)
        if horovod.rank() == 0:
            more = grown(curves.of, "memory") / 2**20
            seconds = f"{steps} steps in {result['seconds']:.0f} s"
            print(f"{title}: {seconds}, rank 0 grows by {more:.2f} MiB", flush=True)

    if horovod.rank() == 0:
        table = Table(title=f"{steps} steps, {horovod.size()} ranks, {options.framework}")
        table.add_column("method")
        for head in ("ms a step", "MiB", "growth, MiB", "objects", "tensors", "handles", "equal"):
            table.add_column(head, justify="right")
        for title, ranks in results.items():
            result = ranks[0]["curves"]
            table.add_row(
                title,
                f"{1e3 * ranks[0]['seconds'] / steps:.1f}",
                f"{result['memory'][-1] / 2**20:.0f}",
                f"{max(grown(r['curves'], 'memory') for r in ranks) / 2**20:.2f}",
                *(f"{max(grown(r['curves'], n) for r in ranks):+}" for n in list(result)[2:]),
                "yes" if len({r["digest"] for r in ranks}) == 1 else "NO",
            )
        Console(width=120).print(table)
        for line in failures:
            print(f"FAILS: {line}")
        options.folder.mkdir(parents=True, exist_ok=True)
        path = options.folder / f"soak-{options.framework}.json"
        path.write_text(json.dumps({"steps": steps, "bound": options.bound, "methods": results}))
        draw(results, str(table.title), path.with_suffix(".png"))
        print(f"curves: {path}, {path.with_suffix('.png')}")
    horovod.allgather_object(None, name="soak.end")  # a rank that fails ends the others
    horovod.shutdown()
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
