"""Measurements of a model's gradient exchange: whole ones between ranks, and a rank's own work.

An `Exchange` is a whole one, as in an optimizer but without the update. `alone` measures a single
rank: it stands in for the others' payloads with its own, so encode and decode are measured without
a link, for any number of ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch

from hvd_gradcomp.algorithms.combined.wrappers import corrected
from hvd_gradcomp.core.collectives import Allreduce, Gather
from hvd_gradcomp.core.cost_model import KINDS, Link, volume
from hvd_gradcomp.core.cost_model import Bucket as Cost
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import takes_momentum
from hvd_gradcomp.method.learned import Learned
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.planning.methods import ExchangeMethod, Local
from hvd_gradcomp.planning.worth import idle
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.reduce.backend import Backend
from hvd_gradcomp.torch.reduce.bucket import Bucket
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.step_sync import ConfigCheck
from hvd_gradcomp.tuning.job import Job
from hvd_gradcomp.tuning.models import Model, ModelError, shapes

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes, to measure a link with
FEW_SIZES = SIZES[1:4:2]  # for a rough measurement
LONG = 0.25  # seconds of a collective, after which larger ones are not measured

_NEVER = 1 << 40  # steps
_LEARNED = 10_000  # a step at which learning methods are past their warm-up
_SHIFTS = 1 << 20

T = TypeVar("T")
Layers = Sequence[tuple[str, tuple[int, ...]]]


# -- gradients -------------------------------------------------------------------------------


class Gradients:
    """Gradients to exchange: noise of variance 1, or some of the model's own in turn.

    Args:
        job: the ranks, which draw different ones; with shards, this rank's part of each.
        model: the gradients' model.
        real: number of steps whose gradients are computed from its loss; 0 for noise.

    Attributes:
        layers: (name, shape) of each; of a sharded model of this rank's shards, where it has one.
        places: of these layers among the model's parameters.
        squares: sums of squared sample gradients of the last draw, in the model's order, if the
            model is tracked (`track_moments`); otherwise empty.
        tensors: filled by `draw`.
        scale: the root mean square over layers' elements.

    Raises:
        ModelError: nothing in the model requires a gradient, or see `backward`.
    """

    def __init__(self, job: Job, model: Model, real: int = 0) -> None:
        self._job = job
        whole = shapes(model.module)
        parts = [shard_shape(shape, job.shard, job.shards) for _, shape in whole]
        self.places = [place for place, shape in enumerate(parts) if math.prod(shape)]
        self.layers: Layers = [(whole[place][0], parts[place]) for place in self.places]
        if not whole:
            raise ModelError(f"{model.name} has no parameter that requires a gradient")
        if not self.layers:
            raise ModelError(f"{model.name} has nothing for shard {job.shard} of {job.shards}")
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
            squares = list(map(_square, trained, gradients)) if tracked else []
            self._steps.append(self._sharded(gradients))
            self._squares.append(self._sharded(squares))
        self.squares = self._squares[0] if real else []
        self._step, self.scale = 0, 1.0
        if real:
            total = sum(float(g.square().sum()) for g in self._steps[0])
            scale = (total / self.elements) ** 0.5
            # The same on all ranks, of which one alone may have what is not finite.
            self.scale = job.slowest(scale if math.isfinite(scale) else math.inf)
            if not 0 < self.scale < math.inf:
                what = "not finite" if self.scale else "all zero"
                raise ModelError(f"{model.name}: the gradients of its loss are {what}")
        else:  # draw once, then read at a random offset in each step: drawing is slow
            self._generator = torch.Generator().manual_seed(1000 + job.rank())
            self._noise = torch.randn(self.elements + _SHIFTS, generator=self._generator)

    def _sharded(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of tensors of the parameters' shapes; all without shards."""
        job = self._job
        if job.shards == 1 or not tensors:
            return tensors
        parts = [tensors[place] for place in self.places]
        return [part.chunk(job.shards)[job.shard] if part.dim() else part for part in parts]

    @property
    def moments(self) -> str:
        """Return the source of second moments that methods get: "sample" or "step"."""
        return "sample" if self.squares else "step"

    def draw(self) -> list[torch.Tensor]:
        """Fill `tensors` with the next step's gradients; return them."""
        self._step += 1
        if self._steps:
            step = self._steps[self._step % len(self._steps)]
            self.squares = self._squares[self._step % len(self._steps)]
        else:
            start = int(torch.randint(_SHIFTS, (), generator=self._generator))
            noise = self._noise[start : start + self.elements]
            step = list(noise.split([tensor.numel() for tensor in self.tensors]))
        for tensor, gradient in zip(self.tensors, step):
            tensor.copy_(gradient.view_as(tensor))
        return self.tensors


def shard_shape(shape: tuple[int, ...], shard: int, shards: int) -> tuple[int, ...]:
    """Return the shape of a shard of a parameter, as `fully_shard` cuts it: along the first axis.

    >>> [shard_shape((5, 3), shard, 4) for shard in range(4)]
    [(2, 3), (2, 3), (1, 3), (0, 3)]
    """
    if shards == 1 or not shape:
        return shape if shard == 0 or shards == 1 else (0,)
    rows = -(-shape[0] // shards)
    return max(min(rows, shape[0] - shard * rows), 0), *shape[1:]


def _square(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return a tracked parameter's moment, or the step's if samples cannot be told apart."""
    moment = tracker.take(parameter, gradient)
    return moment.clone() if isinstance(moment, torch.Tensor) else gradient.square()


def _kind(item: Any) -> str:
    """Describe a wrong loss in a few words."""
    if not isinstance(item, torch.Tensor):
        return f"a {type(item).__name__}"
    constant = "" if item.requires_grad else " that needs no gradient"
    return f"a tensor of shape {tuple(item.shape)}{constant}"


class UnmeasurableError(ValueError):
    """Error on all ranks: a compressor cannot be measured with these layers; see the message."""


def made_on_all(job: Job, make: Callable[[], T]) -> T:
    """Return what `make` makes on all ranks of a job; ranks with other shards may refuse alone.

    Raises:
        UnmeasurableError: on all ranks, if `make` raises one on some.
    """
    refusal: UnmeasurableError | None = None
    try:
        made = make()
    except UnmeasurableError as error:
        refusal = error
    if job.shards > 1:
        refusals = [text for text in job.gather_objects(str(refusal or ""), str) if text]
        refusal = UnmeasurableError(refusals[0]) if refusals else None
    if refusal is not None:
        raise refusal
    return made


class Backward(NamedTuple):
    """Seconds of a batch: forward, backward, and from backward's start to each layer's gradient."""

    forward: float
    seconds: float
    ready: tuple[float, ...]


def backward(model: Model) -> tuple[list[torch.Tensor], Backward]:
    """Compute the gradients of one batch; return them, in the model's order, and the timings.

    Raises:
        ModelError: the model has no loss, or one without a gradient for each parameter.
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
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ModelError(
            f"{model.name}: loss() has to return a tensor of one element that depends on the "
            f"module's parameters, not {_kind(loss)}"
        )
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
        encode: until all gradients, and with them the first payloads, are submitted.
        collective: waiting for collectives.
        decode: the rest; for methods with several rounds including the work between them.
        total: the whole exchange, on the slowest rank.
    """

    encode: float
    collective: float
    decode: float
    total: float


class _Timed:
    """Transport that measures how long it waits."""

    def __init__(self, transport: Backend) -> None:
        self._transport, self.waited = transport, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def wait(self, pending: Any) -> torch.Tensor:
        start = time.perf_counter()
        reply = self._transport.wait(pending)
        self.waited += time.perf_counter() - start
        return reply

    def timed(self, waits: Iterator[None]) -> Iterator[None]:
        """Measure the pauses of a generator that yields while it waits for other ranks."""
        for _ in waits:
            start = time.perf_counter()
            yield
            self.waited += time.perf_counter() - start


class Exchange(ABC):
    """Exchange method between all ranks of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def stats(self) -> CompressionStats | None:
        """Return totals, or None if they are not counted."""
        return None

    def prepare(self, gradients: list[torch.Tensor]) -> None:
        """Do what comes before an exchange, and is not timed."""
        del gradients

    @abstractmethod
    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        """Exchange once; return (`perf_counter` after the last submission, seconds waited)."""

    def run(self, gradients: list[torch.Tensor]) -> Times:
        """Time one exchange; all ranks begin together."""
        self.prepare(gradients)
        self.job.barrier()
        start = time.perf_counter()
        submitted, waited = self.perform(gradients)
        took = time.perf_counter() - start
        rest = took - waited - (submitted - start)
        return Times(submitted - start, waited, rest, self.job.slowest(took))


class DenseExchange(Exchange):
    """Exchange without this package; see `Job.exchange_dense`."""

    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        submitted = self.job.exchange_dense(gradients)
        return submitted, time.perf_counter() - submitted


class CompressedExchange(Exchange):
    """Exchange as in this package's optimizer.

    Args:
        job: the ranks.
        compressor: to measure.
        layers: to exchange.
        source: the gradients' per-sample moments; None for those of the step.
        learned: see `reducer_of`.

    Raises:
        UnmeasurableError: see `reducer_of`.
    """

    def __init__(
        self,
        job: Job,
        compressor: Compressor,
        layers: Layers,
        source: Gradients | None = None,
        learned: bool = True,
    ) -> None:
        super().__init__(job)
        self._source = source
        self._transport = _Timed(job.backend())
        transport = cast(Backend, self._transport)
        self._reducer = made_on_all(
            job,
            lambda: reducer_of(compressor, layers, transport, job.group, self._squares(), learned),
        )
        self._parameters = self._reducer.planner.ordered_parameters
        self._check = ConfigCheck(self._reducer, "")

    def stats(self) -> CompressionStats:
        return self._reducer.stats()

    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        reducer, before = self._reducer, self._transport.waited
        _supply(self._parameters, self._squares())
        self._check.agree()
        _begin(reducer)
        for p, gradient in zip(reversed(self._parameters), reversed(gradients)):
            reducer.mark_ready(p, gradient)
        submitted = time.perf_counter()
        self.job.run_to_end(reducer.programs, self._transport.timed)
        reducer.commit_or_roll_back()
        for p in self._parameters:
            reducer.reduced_grad(p)
        reducer.finish_step()
        return submitted, self._transport.waited - before

    def _squares(self) -> Sequence[torch.Tensor]:
        return () if self._source is None else self._source.squares


class LocalExchange(Exchange):
    """Round of local steps: with the comparison of the ranks, and the outer step.

    Args:
        job: the ranks.
        method: whose round it is.
        layers: to exchange.

    Raises:
        UnmeasurableError: on all ranks, if the compressor does not take these layers.
    """

    def __init__(self, job: Job, method: Local, layers: Layers) -> None:
        super().__init__(job)
        named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in layers]
        self._parameters = [p for _, p in named]
        inner = torch.optim.SGD(self._parameters, lr=1.0)
        settings = {**method.settings, "every": _NEVER, "warmup_steps": 0}

        def make() -> WrappedOptimizer:
            try:
                return job.local_steps(inner, named, compression=method.compressor, **settings)
            except ValueError as error:
                raise UnmeasurableError(str(error)) from error

        self._optimizer = made_on_all(job, make)
        self._optimizer.step()  # the first one compares the parameters of the ranks

    def stats(self) -> CompressionStats:
        return self._optimizer.stats()

    def prepare(self, gradients: list[torch.Tensor]) -> None:
        for p, gradient in zip(self._parameters, gradients):
            p.grad = gradient
        self._optimizer.step()

    def perform(self, gradients: list[torch.Tensor]) -> tuple[float, float]:
        start, before = time.perf_counter(), self._waited()
        self._optimizer.exchange()
        return start, self._waited() - before

    def _waited(self) -> float:
        return sum(reducer.traffic.waited for reducer in self._optimizer.all_reducers)


def exchange_of(job: Job, method: ExchangeMethod, gradients: Gradients) -> Exchange:
    """Return the exchange of a method, for gradients of these shapes; all ranks call it.

    Raises:
        UnmeasurableError: see `reducer_of`.
    """
    if isinstance(method, Local):
        return LocalExchange(job, method, gradients.layers)
    source = gradients if method.overlaps else None  # momenta have no moments
    return CompressedExchange(job, method.compressor, gradients.layers, source)


def _supply(parameters: Iterable[torch.nn.Parameter], squares: Iterable[torch.Tensor]) -> None:
    """Set the moments of a reducer's parameters, if there are some."""
    for p, square in zip(parameters, squares):
        tracker.supply(p, square)


@dataclass
class Row:
    """Measurements of one exchange method.

    Attributes:
        times: of each round.
        bytes_sent: bytes that a rank passed to collectives per round, on average.
        element_ratio: elements over elements sent in these rounds.
    """

    times: list[Times] = field(default_factory=list)
    bytes_sent: float = 0.0
    element_ratio: float = 1.0

    def per_step(self, every: int) -> Row:
        """Return a step's share, of rounds in so many steps."""
        times = [Times(*(seconds / every for seconds in each)) for each in self.times]
        return Row(times, self.bytes_sent / every, self.element_ratio * every)

    def median(self, part: str = "total") -> float:
        return statistics.median(getattr(t, part) for t in self.times)


def measure(method: Exchange, gradients: Gradients, rounds: int, warm_up: int = 0) -> Row:
    """Measure rounds of a method, after a warm-up that is not counted; all ranks call it."""
    for _ in range(warm_up):
        method.run(gradients.draw())
    before, row = method.stats(), Row(bytes_sent=4.0 * gradients.elements)
    row.times = [method.run(gradients.draw()) for _ in range(rounds)]
    after = method.stats()
    if after is not None and before is not None:
        span = after - before
        row.bytes_sent, row.element_ratio = span.bytes_sent / rounds, span.element_ratio
    return row


def reducer_of(
    compressor: Compressor,
    layers: Layers,
    transport: Backend,
    process_set: Any,
    squares: Sequence[torch.Tensor] = (),
    learned: bool = True,
) -> Reducer:
    """Make the reducer of a compressor; with `learned` a method that learns is past its learning.

    A momentum that it would take over from an optimizer is 0.9: there is no optimizer here.

    Raises:
        UnmeasurableError: on all ranks, if the compressor does not take these layers, or would
            send all of them dense.
    """
    if takes_momentum(compressor):
        compressor = corrected(compressor, 0.9, False)
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in layers]
    _supply((p for _, p in named), squares)
    participants, options = Participants(process_set), ExchangeOptions(rollback=False)
    try:
        planner = BucketPlanner(
            named,
            compressor,
            participants,
            options,
            name=transport.name,
            tracking="hvd.track_moments(model) before DistributedOptimizer",
        )
        postscale = 1.0 / process_set.size()
        reducer = Reducer(
            planner, transport, participants, options, prescale=1.0, postscale=postscale
        )
    except ValueError as error:
        raise UnmeasurableError(str(error)) from error
    if idle(compressor, [(bucket.compressor, bucket.layout) for bucket in reducer.buckets]):
        raise UnmeasurableError("it would compress none of these layers")
    for bucket in reducer.buckets:
        one, before = bucket.compressor, bucket.state
        if learned and isinstance(one, Learned):
            bucket.state = one.rehearsed(bucket.ops, bucket.layout, before, _LEARNED)
        if bucket.state is not before:
            reducer.steps = _LEARNED  # measure the compressed phase
    return reducer


def _begin(reducer: Reducer) -> None:
    """Begin a step, as a host does."""
    planner = reducer.planner
    if planner.arrived is not None and reducer.steps > 0:
        planner.reorder(planner.order)
    if not planner.judged:
        planner.warn_if_unprofitable()
    reducer.begin_step()


# -- a rank's own work -----------------------------------------------------------------------


class _Leader(int):
    """Rank that compares equal to every rank, to force the leader's path, the slowest."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _ImaginedRanks:
    """Imaginary process set of a given size that includes this rank."""

    ranks = None

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return _Leader(self._rank % self._size)

    def included(self) -> bool:
        return True


class _Reply(NamedTuple):
    """Handle of a collective that has completed already."""

    reply: torch.Tensor

    def ready(self) -> bool:
        return True


class _FakeTransport:
    """Transport that immediately returns this rank's own payloads.

    Args:
        ranks: number of ranks.
        rank: number of this one.

    Attributes:
        requests: (kind, bytes) of the collectives since the last call of `take`.
        waited: seconds in which replies were made.
    """

    name, library, version = "alone", "none", ""
    failure: type[Exception] = RuntimeError
    hangs_up = False

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.requests: list[tuple[str, float]] = []
        self.waited = 0.0

    def take(self) -> list[tuple[str, float]]:
        """Return the requested collectives, and forget them."""
        taken, self.requests = self.requests, []
        return taken

    def check(self, named_parameters: Any) -> None:
        """Do nothing: all tensors stay here."""

    def global_rank(self) -> int:
        return self._rank

    def gather_objects(self, item: Any, kind: Any, what: str) -> list[Any]:
        return [item] * self._ranks

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return row.expand(self._ranks, *row.shape)

    def _answer(self, kind: str, tensor: torch.Tensor, copies: int = 0) -> _Reply:
        self.requests.append((kind, float(tensor.numel() * tensor.element_size())))
        return _Reply(tensor.expand(copies, *tensor.shape) if copies else tensor)

    def allgather(self, tensor: torch.Tensor, name: str, group: Any) -> _Reply:
        return self._answer("allgather", tensor, self._ranks)

    def allreduce(self, request: Allreduce, name: str, group: Any) -> _Reply:
        half = request.tensor.dtype in (torch.float16, torch.bfloat16)
        return self._answer("allreduce16" if half else "allreduce", request.tensor)

    def alltoall(self, tensor: torch.Tensor, name: str, group: Any) -> _Reply:
        return self._answer("alltoall", tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str, group: Any) -> _Reply:
        return self._answer("broadcast", tensor)

    def gather(self, request: Gather, name: str, group: Any) -> _Reply:
        raise UnmeasurableError(
            "its ranks have different roles, so one rank alone cannot measure its cost"
        )

    def wait(self, pending: _Reply) -> torch.Tensor:
        start = time.perf_counter()
        reply = pending.reply.clone()
        self.waited += time.perf_counter() - start
        return reply


def _cost(bucket: Bucket, work: Sequence[float], asks: Any, ready: Mapping[str, float]) -> Cost:
    """Return the cost of a bucket's step.

    Args:
        bucket: of the reducer.
        work: seconds to the first collective, and between the later ones.
        asks: its collectives.
        ready: when the gradient of each layer is there.
    """
    chosen = getattr(bucket.compressor, "exchange", "auto") != "auto"  # chosen by the user
    dense = math.inf if chosen else 4.0 * bucket.layout.elements
    return Cost(max(ready[name] for name in bucket.layout.names), tuple(work), tuple(asks), dense)


class Alone(NamedTuple):
    """Measurements of one rank by itself.

    Attributes:
        rounds: the buckets of each round.
        element_ratio: elements over elements sent in them.
    """

    rounds: list[list[Cost]]
    element_ratio: float


def alone(
    job: Job,
    compressor: Compressor,
    gradients: Gradients,
    ranks: int,
    rounds: int,
    warm_up: int = 0,
    ready: Sequence[float] | None = None,
) -> Alone:
    """Measure this rank's own work and collectives in exchanges among `ranks` ranks.

    All ranks call it together, so that they compete for the machine as in training.

    Args:
        job: the ranks.
        compressor, gradients: to exchange.
        ranks: number of ranks, real or imaginary.
        rounds, warm_up: rounds to measure, and rounds before them.
        ready: see `Backward`; all at once if None.

    Raises:
        UnmeasurableError: the compressor does not take these layers, or its ranks have different
            roles (a parameter server).
    """
    transport = _FakeTransport(ranks, job.rank())
    imagined, squares = _ImaginedRanks(ranks, job.rank()), gradients.squares
    reducer = made_on_all(
        job, lambda: reducer_of(compressor, gradients.layers, transport, imagined, squares)
    )
    parameters, names = reducer.planner.ordered_parameters, reducer.planner.names
    ready_at = dict(zip(names.values(), ready or [0.0] * len(parameters)))
    costs = []
    before = reducer.stats()
    for step in range(warm_up + rounds):
        before = reducer.stats() if step == warm_up else before
        tensors = gradients.draw()
        _supply(parameters, gradients.squares)
        job.barrier()
        transport.take()
        _begin(reducer)
        work: dict[str, list[float]] = {bucket.name: [0.0] for bucket in reducer.buckets}
        asks: dict[str, list[tuple[str, float]]] = {bucket.name: [] for bucket in reducer.buckets}
        for p, gradient in zip(reversed(parameters), reversed(tensors)):
            start = time.perf_counter()
            reducer.mark_ready(p, gradient)
            bucket, _ = reducer.planner.places[p]
            work[bucket.name][0] += time.perf_counter() - start
            asks[bucket.name] += transport.take()
        while running := reducer.programs.running:
            for bucket in running:
                start, waited = time.perf_counter(), transport.waited
                reducer.programs.resume([bucket])
                spent = time.perf_counter() - start - (transport.waited - waited)
                work[bucket.name].append(spent)
                asks[bucket.name] += transport.take()
        reducer.commit_or_roll_back()
        for p in parameters:
            reducer.reduced_grad(p)
        reducer.finish_step()
        if step >= warm_up:
            costs.append([_cost(b, work[b.name], asks[b.name], ready_at) for b in reducer.buckets])
    return Alone(costs, (reducer.stats() - before).element_ratio)


# -- the link --------------------------------------------------------------------------------


def link(job: Job, sizes: Sequence[int] = SIZES, rounds: int = 3, latency: float = 50e-6) -> Link:
    """Measure the collectives of a job; all ranks call it.

    On a slow link large ones take seconds, and say no more of it: from `LONG` on the link's rate is
    all that counts. So the first size that takes so long is the last, but for the first two, and is
    measured twice. With shards all groups exchange at the same time, so each measures its share.

    Args:
        job: the ranks.
        sizes: bytes that each rank submits, ascending, at least two.
        rounds: of each; medians are used.
        latency: see `Link`.
    """
    ranks, backend = job.group.size(), job.backend()
    curves = {}
    for kind in KINDS:
        points = []
        for size in sizes:
            count = max(size // 4 // ranks, 1) * ranks * 4
            if kind == "allgather":  # as much as arrives by the other kinds
                count = max(count // 4 // max(ranks - 1, 1), 1) * 4
            payload, took = torch.full((count,), 0x3C, dtype=torch.uint8), []
            for step in range(rounds + 1):  # the first one is negotiated
                job.barrier()
                start = time.perf_counter()
                _collective(kind, payload, f"link.{kind}.{size}", job, backend)
                seconds = job.slowest(time.perf_counter() - start)
                if step:
                    took.append(seconds)
                if step == 2 and seconds > LONG:  # the same on all ranks
                    break
            points.append((volume(kind, count, ranks), statistics.median(took)))
            if len(points) > 1 and points[-1][1] > LONG:  # the same on all ranks
                break
        curves[kind] = tuple(sorted(points))
    return Link(ranks, curves, latency)


def _collective(kind: str, payload: torch.Tensor, name: str, job: Job, backend: Backend) -> None:
    """Run a collective of `KINDS`, as a reducer does."""
    group = job.group
    pending: Any
    if kind in ("allreduce16", "allreduce"):
        dtype = torch.float16 if kind == "allreduce16" else torch.float32
        pending = backend.allreduce(Allreduce(payload.view(dtype), donated=True), name, group)
    elif kind == "allgather":
        pending = backend.allgather(payload, name, group)
    elif kind == "alltoall":
        pending = backend.alltoall(payload, name, group)
    else:
        pending = backend.broadcast(payload, (group.ranks or [0])[0], name, group)
    backend.wait(pending)
