"""Measures exchanges of a model's gradients: whole ones between ranks, and a rank's own work.

An `Exchange` is a whole one, as optimizers do it but for the update. `alone` is the same without
the others: what they would send is this rank's own payload, so that encode and decode are measured
apart from any link, for any number of ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import horovod.torch as horovod
import torch

from hvd_gradcomp.core.collectives import Allgather, Allreduce, Collective, Gather, goes_as_sum
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.cost_model import KINDS, Link, volume
from hvd_gradcomp.core.cost_model import Bucket as Cost
from hvd_gradcomp.core.protocols.carrying import Corrects
from hvd_gradcomp.core.protocols.learning import Rehearses
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.planning.worth import idle
from hvd_gradcomp.runtime.collectives import PendingCollective
from hvd_gradcomp.torch.bucket import Bucket
from hvd_gradcomp.torch.engine import TITLES, HorovodReducer
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.tuning.models import Model, ModelError, shapes

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes, to measure a link with

_LEARNED = 10_000  # the step by which methods that learn have learned
_SHIFTS = 1 << 20

Layers = Sequence[tuple[str, tuple[int, ...]]]
Kind = TypeVar("Kind", bound=HorovodReducer)


# -- gradients -------------------------------------------------------------------------------


class Gradients:
    """The gradients that are exchanged: noise of variance 1, or some of the model's own in turn.

    Args:
        model: whose.
        real: how many steps' gradients are taken from its loss; 0 for noise.

    Attributes:
        layers: (name, shape) of each.
        squares: sums of squared sample gradients of what was drawn last, in the model's order,
            where the model's are tracked (`track_moments`); otherwise none.
        tensors: what `draw` fills.
        scale: the root mean square over layers' elements.

    Raises:
        ModelError: nothing in the model requires a gradient, or see `backward`.
    """

    def __init__(self, model: Model, real: int = 0) -> None:
        self.layers: Layers = shapes(model.module)
        if not self.layers:
            raise ModelError(f"{model.name} has no parameter that requires a gradient")
        self.tensors = [torch.empty(shape) for _, shape in self.layers]
        self.elements = sum(tensor.numel() for tensor in self.tensors)
        trained = [p for p in model.module.parameters() if p.requires_grad]
        tracked = all(map(tracker.is_tracked, trained))
        self._steps: list[list[torch.Tensor]] = []
        self._squares: list[list[torch.Tensor]] = []
        for _ in range(real):
            for p in trained:
                tracker.discard(p)
            gradients = backward(model)[0]
            self._steps.append(gradients)
            self._squares.append(list(map(_square, trained, gradients)) if tracked else [])
        self.squares = self._squares[0] if real else []
        self._turn, self.scale = 0, 1.0
        if real:
            squares = [float(g.square().sum()) for g in self._steps[0]]
            self.scale = slowest((sum(squares) / self.elements) ** 0.5)  # alike on all ranks
        else:  # drawn once, then read from another place in each step: drawing takes long
            self._generator = torch.Generator().manual_seed(1000 + horovod.rank())
            self._noise = torch.randn(self.elements + _SHIFTS, generator=self._generator)

    @property
    def moments(self) -> str:
        """Names what methods that use second moments are given: "sample", or "step"."""
        return "sample" if self.squares else "step"

    def draw(self) -> list[torch.Tensor]:
        """The next step's."""
        self._turn += 1
        if self._steps:
            step = self._steps[self._turn % len(self._steps)]
            self.squares = self._squares[self._turn % len(self._steps)]
        else:
            start = int(torch.randint(_SHIFTS, (), generator=self._generator))
            noise = self._noise[start : start + self.elements]
            step = list(noise.split([tensor.numel() for tensor in self.tensors]))
        for tensor, gradient in zip(self.tensors, step):
            tensor.copy_(gradient.view_as(tensor))
        return self.tensors


def _square(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The moment of a tracked parameter; that of the step where samples cannot be told apart."""
    moment = tracker.take(parameter, gradient)
    return moment.clone() if isinstance(moment, torch.Tensor) else gradient.square()


class UnmeasurableError(ValueError):
    """A compressor cannot be measured with these layers, by no rank; the message says why."""


class Backward(NamedTuple):
    """Seconds of a batch: forward, backward, and until each layer's gradient was there in it."""

    forward: float
    seconds: float
    ready: tuple[float, ...]


def backward(model: Model) -> tuple[list[torch.Tensor], Backward]:
    """The gradients of one batch, in the model's order, and how backward went.

    Raises:
        ModelError: the model has no loss, or a parameter gets no gradient from it.
    """
    if model.loss is None:
        raise ModelError(f"{model.name} has no loss: let its factory return (module, loss)")
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    times: dict[torch.Tensor, float] = {}
    hooks = [
        p.register_hook(lambda _, p=p: times.__setitem__(p, time.perf_counter())) for _, p in named
    ]
    model.module.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    loss = model.loss()
    start = time.perf_counter()
    loss.backward()
    seconds = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    unused = [name for name, p in named if p.grad is None]
    if unused:
        raise ModelError(f"{model.name}: no gradient for {', '.join(unused[:8])}")
    gradients = [p.grad.detach().clone() for _, p in named]
    model.module.zero_grad(set_to_none=True)
    ready = tuple(times[p] - start for _, p in named)
    return gradients, Backward(start - begin, seconds, ready)


# -- whole exchanges -------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of one exchange on one rank.

    Attributes:
        encode: until all gradients are handed over, and with them the first payloads.
        collective: waiting for what travels.
        decode: the rest; of methods with several rounds the work between them too.
        total: all of it, on the slowest rank.
    """

    encode: float
    collective: float
    decode: float
    total: float


class TimedReducer(HorovodReducer):
    """An engine that knows how long it has waited."""

    waited = 0.0

    def _wait(self, bucket: Bucket) -> torch.Tensor:
        start = time.perf_counter()
        reply = super()._wait(bucket)
        self.waited += time.perf_counter() - start
        return reply

    def finishing(self) -> Iterator[None]:
        for _ in super().finishing():
            start = time.perf_counter()
            yield
            self.waited += time.perf_counter() - start


class Exchange(ABC):
    """A way to exchange, between all ranks of the job."""

    def stats(self) -> CompressionStats | None:
        """Totals, where they are counted."""
        return None

    @abstractmethod
    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        """Once: when all gradients were handed over (`perf_counter`), and the seconds it waited."""

    def run(self, gradients: list[torch.Tensor]) -> Times:
        """One exchange; all ranks begin together."""
        horovod.barrier()
        start = time.perf_counter()
        given, waited = self.perform(gradients)
        took = time.perf_counter() - start
        return Times(given - start, waited, took - waited - (given - start), slowest(took))


class DenseExchange(Exchange):
    """As stock Horovod's optimizer: last layers first, fused by Horovod, in place."""

    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        handles = [
            horovod.allreduce_async_(g, name=f"dense.{place}")
            for place, g in reversed(list(enumerate(gradients)))
        ]
        given = time.perf_counter()
        for handle in handles:
            horovod.synchronize(handle)
        return given, time.perf_counter() - given


class CompressedExchange(Exchange):
    """As this package's optimizer.

    Args:
        compressor: what runs.
        layers: what is exchanged.
        source: where moments are, of what `perform` is given; None for those of the step.
    """

    def __init__(
        self, compressor: Compressor, layers: Layers, source: Gradients | None = None
    ) -> None:
        ranks, self._source = horovod.global_process_set, source
        self._engine = reducer_of(compressor, layers, TimedReducer, ranks, self._squares())
        self._parameters = [p for _, p in self._engine.named_parameters]

    def stats(self) -> CompressionStats:
        return self._engine.stats()

    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        engine, before = self._engine, self._engine.waited
        _supply(self._parameters, self._squares())
        for p, gradient in zip(reversed(self._parameters), reversed(gradients)):
            engine.mark_ready(p, gradient)
        given = time.perf_counter()
        engine.finish()
        for p in self._parameters:
            engine.reduced_grad(p)
        engine.clear()
        return given, engine.waited - before

    def _squares(self) -> Sequence[torch.Tensor]:
        return () if self._source is None else self._source.squares


def _supply(parameters: Iterable[torch.nn.Parameter], squares: Iterable[torch.Tensor]) -> None:
    """Gives an engine's parameters their moments, where there are some."""
    for p, square in zip(parameters, squares):
        tracker.supply(p, square)


def slowest(seconds: float) -> float:
    """The most of any rank."""
    every = horovod.allgather(torch.tensor([seconds], dtype=torch.float64), name="slowest")
    return float(every.max())


@dataclass
class Row:
    """What was measured of one way.

    Attributes:
        times: of each round.
        bytes_sent: that a rank handed to collectives in a round, on average.
        element_ratio: elements over elements sent in these rounds.
    """

    times: list[Times] = field(default_factory=list)
    bytes_sent: float = 0.0
    element_ratio: float = 1.0

    def median(self, part: str = "total") -> float:
        return statistics.median(getattr(t, part) for t in self.times)


def measure(way: Exchange, gradients: Gradients, rounds: int, warm_up: int = 0) -> Row:
    """So many rounds of a way, after others that are not counted; all ranks call it."""
    for _ in range(warm_up):
        way.run(gradients.draw())
    before, row = way.stats(), Row(bytes_sent=4.0 * gradients.elements)
    row.times = [way.run(gradients.draw()) for _ in range(rounds)]
    after = way.stats()
    if after is not None and before is not None:
        span = after - before
        row.bytes_sent, row.element_ratio = span.bytes_sent / rounds, span.element_ratio
    return row


def reducer_of(
    compressor: Compressor,
    layers: Layers,
    kind: type[Kind],
    process_set: Any,
    squares: Sequence[torch.Tensor] = (),
) -> Kind:
    """The exchange of a compressor; a method that learns has learned, if nothing useful.

    A momentum that it would take over from the optimizer is 0.9: there is no optimizer here.

    Raises:
        UnmeasurableError: on all ranks, if the compressor does not take these layers, or would
            send all of them dense.
    """
    if isinstance(compressor, Corrects) and (compressor.correction or (0.0,))[0] is None:
        compressor = compressor.corrected(0.9, False)
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in layers]
    _supply((p for _, p in named), squares)
    try:
        engine = kind(
            named,
            compressor,
            name=TITLES.take(),
            prescale=1.0,
            postscale=1.0 / process_set.size(),
            process_set=process_set,
        )
    except ValueError as error:
        raise UnmeasurableError(str(error)) from error
    if idle(compressor, [(bucket.compressor, bucket.layout) for bucket in engine.buckets]):
        raise UnmeasurableError(f"{brief(compressor)}: it would compress none of these layers")
    if isinstance(compressor, Rehearses):
        engine.steps = _LEARNED  # what counts is the compressed phase
        for bucket in engine.buckets:
            if isinstance(bucket.compressor, Rehearses):
                bucket.state = bucket.compressor.rehearsed(
                    bucket.ops, bucket.layout, bucket.state, _LEARNED
                )
    return engine


# -- a rank's own work -----------------------------------------------------------------------


class _Leader(int):
    """A rank that is any rank it is compared with: where one leads, it does, and takes longest."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _Imagined:
    """So many ranks, of which this is one."""

    ranks = None

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return _Leader(horovod.rank() % self._size)

    def included(self) -> bool:
        return True


class _Answered:
    """What stands for a loan that need not be waited for."""

    def ready(self) -> bool:
        return True


class _AloneReducer(HorovodReducer):
    """An engine whose collectives give back what this rank has sent, at once.

    Attributes:
        asks, marks: by bucket, the (kind, bytes) of its collectives, and when its work began and
            ended, in pairs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.forget()

    def forget(self) -> None:
        self.asks: dict[str, list[tuple[str, float]]] = {b.name: [] for b in self.buckets}
        self.marks: dict[str, list[float]] = {b.name: [] for b in self.buckets}

    def cost(self, bucket: Bucket, first: float, ready: Mapping[str, float]) -> Cost:
        """What a bucket's last step took, if so many seconds until its first collective."""
        marks = self.marks[bucket.name][2:]  # the first pair is in `first`
        rest = (end - start for start, end in zip(marks[::2], marks[1::2]))
        asks = tuple(self.asks[bucket.name])
        asked = getattr(bucket.compressor, "exchange", "auto") != "auto"  # by the user, who gets it
        dense = math.inf if asked else 4.0 * bucket.layout.elements
        return Cost(max(ready[name] for name in bucket.layout.names), (first, *rest), asks, dense)

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        del kind
        return [item] * self.process_set.size()

    def _step_program(self, bucket: Bucket, reply: Any) -> None:
        marks = self.marks[bucket.name]
        marks.append(time.perf_counter())
        super()._step_program(bucket, reply)
        marks.append(time.perf_counter())

    def _submit(self, bucket: Bucket, request: Collective) -> PendingCollective:
        if isinstance(request, Gather):
            raise UnmeasurableError(
                f"{type(self.compressor).__name__}: its ranks have different parts to play, so "
                "what it takes cannot be measured by one rank alone"
            )
        tensor = request.tensor  # type: ignore[union-attr]
        size = float(tensor.numel() * tensor.element_size())
        half = isinstance(request, Allreduce) and tensor.dtype in (torch.float16, torch.bfloat16)
        kind = "allreduce16" if half else type(request).__name__.lower()
        self.asks[bucket.name].append((kind, size))
        return PendingCollective(request, self.process_set, True, _Answered())

    def _wait(self, bucket: Bucket) -> torch.Tensor:
        assert bucket.sent is not None
        request: Any = bucket.sent.request
        bucket.sent = None
        if isinstance(request, Allgather):
            return request.tensor.expand(self.process_set.size(), *request.tensor.shape).clone()
        tensor: torch.Tensor = request.tensor.clone()
        return tensor


class Alone(NamedTuple):
    """What one rank measured by itself.

    Attributes:
        rounds: the buckets of each round.
        element_ratio: elements over elements sent in them.
    """

    rounds: list[list[Cost]]
    element_ratio: float


def alone(
    compressor: Compressor,
    gradients: Gradients,
    ranks: int,
    rounds: int,
    warm_up: int = 0,
    ready: Sequence[float] | None = None,
) -> Alone:
    """What exchanges cost this rank among so many: its own work, and what it asks for.

    All ranks call it together, so that they get in each other's way as they do in training.

    Args:
        compressor, gradients: what is exchanged.
        ranks: how many take part, whether they are there or not.
        rounds, warm_up: that are measured, and before.
        ready: see `Backward`; all at once if None.

    Raises:
        UnmeasurableError: it does not take these layers, or its ranks have different parts to
            play (a parameter server).
    """
    engine = reducer_of(
        compressor, gradients.layers, _AloneReducer, _Imagined(ranks), gradients.squares
    )
    parameters = [p for _, p in engine.named_parameters]
    there = dict(
        zip((name for name, _ in engine.named_parameters), ready or [0.0] * len(parameters))
    )
    costs = []
    before = engine.stats()
    for turn in range(warm_up + rounds):
        before = engine.stats() if turn == warm_up else before
        tensors = gradients.draw()
        _supply(parameters, gradients.squares)
        horovod.barrier()
        engine.forget()
        laid: dict[str, float] = {}
        for p, gradient in zip(reversed(parameters), reversed(tensors)):
            start = time.perf_counter()
            engine.mark_ready(p, gradient)
            name = engine.bucket_of(p).name
            laid[name] = laid.get(name, 0.0) + time.perf_counter() - start
        engine.finish()
        for p in parameters:
            engine.reduced_grad(p)
        engine.clear()
        if turn >= warm_up:
            costs.append(
                [engine.cost(bucket, laid[bucket.name], there) for bucket in engine.buckets]
            )
    return Alone(costs, (engine.stats() - before).element_ratio)


# -- the link --------------------------------------------------------------------------------


def link(sizes: Sequence[int] = SIZES, rounds: int = 3, latency: float = 50e-6) -> Link:
    """Measures the running job's collectives; all ranks call it.

    Args:
        sizes: bytes of what each rank hands over, ascending, at least two.
        rounds: of each; medians count.
        latency: see `Link`.
    """
    ranks = horovod.size()
    curves = {}
    for kind in KINDS:
        points = []
        for size in sizes:
            count = max(size // 4 // ranks, 1) * ranks * 4
            if kind == "allgather":  # as much as arrives by the others
                count = max(count // 4 // max(ranks - 1, 1), 1) * 4
            payload, took = torch.full((count,), 0x3C, dtype=torch.uint8), []
            for turn in range(rounds + 1):  # the first one is negotiated
                horovod.barrier()
                start = time.perf_counter()
                _collective(kind, payload, f"link.{kind}.{size}")
                seconds = slowest(time.perf_counter() - start)
                if turn:
                    took.append(seconds)
            points.append((volume(kind, count, ranks), statistics.median(took)))
        curves[kind] = tuple(sorted(points))
    return Link(ranks, curves, latency)


def _collective(kind: str, payload: torch.Tensor, name: str) -> None:
    """One of `KINDS`, as an engine performs it."""
    ranks = horovod.size()
    summed = goes_as_sum(payload.numel(), "uint8", ranks, horovod.gloo_enabled())
    if kind == "allreduce16":
        horovod.allreduce(payload.view(torch.float16), name=name, op=horovod.Sum)
    elif kind == "allreduce":
        horovod.allreduce(payload.view(torch.float32), name=name, op=horovod.Sum)
    elif kind == "allgather" and summed:
        horovod.allreduce(payload.view(torch.int32), name=name, op=horovod.Sum)
    elif kind == "allgather":
        horovod.allgather(payload, name=name)
    elif kind == "alltoall":
        horovod.alltoall(payload, name=name)
    else:
        horovod.broadcast(payload, 0, name=name)
