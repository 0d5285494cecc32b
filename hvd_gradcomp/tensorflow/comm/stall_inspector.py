"""Detection of deadlocks between ranks on TensorFlow, where waiting blocks the thread.

A Horovod collective blocks its thread, or a graph, until it completes, and no timeout applies
there. So each is recorded while it is pending: eager ones by the call, those in a graph by a
variable that the graph changes before and after. A thread watches these records. If nothing has
changed for `PATIENCE` seconds it reports, as waiting loops do on PyTorch (see
`runtime/stall_inspector.py`). If the ranks find that no pending collective can complete, each notes
why and shuts Horovod down: that ends the blocked calls with an error, which is translated where it
can be caught.

For an exchange, recording the step's sync message suffices, which all ranks submit (see
`tensorflow/reduce/exchange.py`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.runtime import stall_inspector
from hvd_gradcomp.runtime.stall_inspector import DeadlockError, PendingOp
from hvd_gradcomp.tensorflow.interop.background_call import BackgroundCall
from hvd_gradcomp.tensorflow.interop.variables import new_variable

__all__ = [
    "DeadlockError",
    "init",
    "marked",
    "records",
    "rounds",
    "shutdown",
    "translated",
    "unmarked",
    "waiting",
]

LOGGER = logging.getLogger("hvd_gradcomp")
_PREFIX = "horovod_"
_RECORDED = frozenset(
    f"{_PREFIX}{name}"
    for name in (
        "allreduce",
        "grouped_allreduce",
        "allgather",
        "grouped_allgather",
        "broadcast",
        "broadcast_inplace_resource",
        "alltoall",
        "reducescatter",
        "grouped_reducescatter",
    )
)
_INTERVAL = 0.5  # seconds between two looks; less if `PATIENCE` is short
_GRACE = 1.5  # seconds for all ranks to receive the reports, before Horovod is shut down
_END = ". Horovod has been shut down on all ranks"
_STOCK: Any = mpi_ops.MPI_LIB
_STOCK_INIT, _STOCK_SHUTDOWN = mpi_ops.init, mpi_ops.shutdown


class _Marking(threading.local):
    """Recording of the collectives that this thread traces.

    Attributes:
        on: they are recorded.
        owner: the set that keeps the records; None for the graphs that have the collectives.
    """

    on = True
    owner: set[Any] | None = None


_marking = _Marking()


def _counter(name: str) -> tf.Variable:
    """Create a variable on the host, wherever the collective is."""
    return new_variable(f"gradcomp_{name}", 0, tf.int64, "/cpu:0")


class RankSet(NamedTuple):
    """Ranks of a process set, as `StallChannel` needs them."""

    process_set_id: int
    ranks: Sequence[int]

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(horovod.rank())


@dataclass(frozen=True, eq=False)
class _Site:
    """Record of a collective in a graph.

    Attributes:
        operation: its name and process set.
        count: odd while it is pending; greater each time.
    """

    operation: PendingOp
    count: tf.Variable

    def begin(self) -> Any:
        return self.count.assign_add(1 + self.count % 2)  # a failed one is still odd

    def end(self) -> Any:
        return self.count.assign_add(self.count % 2)


class ReportRounds:
    """Numbers of a process set's report rounds, in variables for graphs to read.

    A report that only some ranks submit stays pending in Horovod, which takes it for stalled. So
    each step's sync message carries its round, and if one rank has reported, all do.

    Attributes:
        pending: the number of this rank's pending round; 0 for none.
        due: the highest such number of any rank, by the last message.
        reported: the rounds in which this rank has reported.
    """

    def __init__(self) -> None:
        self.pending, self.due = _counter("pending"), _counter("due")
        self.reported = 0

    def drop(self) -> None:
        """Start anew."""
        self.reported = 0
        self.pending.assign(0)
        self.due.assign(0)

    def is_due(self, pending: bool) -> bool:
        """Return True if all ranks must report now, given whether this rank's report is pending."""
        return int(self.due.numpy()) >= self.reported + (not pending)


class _Watch:
    """Records of this rank, and the thread that has a `StallInspector` look at them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._sites: weakref.WeakValueDictionary[tuple[str, int], _Site]
        self._sites = weakref.WeakValueDictionary()
        self._sites_of: weakref.WeakKeyDictionary[Any, list[_Site]] = weakref.WeakKeyDictionary()
        self._calls: dict[int, PendingOp] = {}
        self._rounds: dict[int, ReportRounds] = {}
        self._numbers = itertools.count()
        self._inspector = stall_inspector.StallInspector(self._pending, self._submit, self._members)
        self.drop()
        atexit.register(self._stop.set)

    def drop(self) -> None:
        """Drop all records: Horovod starts or ends."""
        self.message, self._reports = "", False
        self._deadlocked, self._ended = threading.Event(), threading.Event()
        self._calls.clear()
        self._inspector.drop()
        self._sets: dict[int, Sequence[int]] = {}
        for rounds in list(self._rounds.values()):
            rounds.drop()
        self.close_records()

    def rounds(self, process_set: int) -> ReportRounds:
        """Return the report rounds of a process set."""
        if process_set not in self._rounds:
            self._rounds[process_set] = ReportRounds()
        return self._rounds[process_set]

    def close_records(self) -> None:
        """Close the records that failed graphs have left open."""
        with tf.init_scope():  # also if an error ends a trace
            for site in self.living_sites():
                site.end()

    def living_sites(self) -> list[_Site]:
        """Return the records of collectives in graphs."""
        refs = self._sites.valuerefs()  # at once: another thread may add to them
        return [site for ref in refs if (site := ref()) is not None]

    def site(self, name: str, shown: str, process_set: int) -> _Site:
        """Return the record of a collective in a graph, which its owner keeps, or that graph."""
        self._start()
        key = name, process_set
        site = self._sites.get(key)
        if site is None:
            operation = PendingOp(name, RankSet(process_set, []), lambda: False, shown=shown)
            self._sites[key] = site = _Site(operation, _counter("waits"))
        if _marking.owner is not None:  # TensorFlow does not let go of all graphs
            _marking.owner.add(site)
            return site
        graph: Any = tf.compat.v1.get_default_graph()
        while graph.building_function:  # a branch has a graph of its own, in that of a function
            self._sites_of.setdefault(graph, []).append(site)
            graph = graph.outer_graph
        return site

    @contextmanager
    def call(self, name: str, shown: str, process_set: int) -> Iterator[None]:
        """Record an eager collective while it blocks."""
        self._start()
        number = next(self._numbers)
        ranks, thread = RankSet(process_set, []), threading.get_ident()
        self._calls[number] = PendingOp(name, ranks, lambda: False, thread, shown)
        try:
            yield
        finally:
            self._calls.pop(number, None)

    def deadlock_message(self) -> str:
        """Return why a deadlock has shut Horovod down, once it has; empty if there is none."""
        if self._reports:
            self._deadlocked.wait(4 * _GRACE)
        if self.message:
            self._ended.wait(20 * _GRACE)
        return self.message

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="gradcomp-deadlock"
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(min(_INTERVAL, stall_inspector.PATIENCE / 4)):
            try:
                if horovod.is_initialized() and not self.message:
                    self._answer()
                    self._look()
            except DeadlockError as error:
                self._end(str(error))
            except Exception as error:  # for example, Horovod ends meanwhile
                LOGGER.debug("the look for deadlocks has failed: %s", error)
                self._inspector.drop()

    def _pending(self) -> dict[Hashable, PendingOp]:
        """Return what this rank waits for; see `StallInspector`."""
        pending: dict[Hashable, PendingOp] = {}
        for site in self.living_sites():
            count, operation = int(site.count.numpy()), site.operation
            if count % 2:
                pending[operation.name, operation.process_set.process_set_id, count] = operation
        calls = list(self._calls.items())
        pending.update(calls)
        return pending if len({call.thread for _, call in calls}) < 2 else {}

    def _look(self) -> None:
        waiting = self._inspector.overdue()
        self._reports = bool(waiting)
        for number in {0, *(op.process_set.process_set_id for op in waiting)} if waiting else ():
            channel = self._among(number)
            if channel is not None:
                try:
                    self._inspector.report(waiting, channel)
                finally:
                    rounds = self.rounds(number)
                    rounds.pending.assign(rounds.reported * channel.pending)

    def _answer(self) -> None:
        """Submit and complete the reports that all ranks must submit, since one has."""
        for number, rounds in list(self._rounds.items()):
            channel = self._among(number)
            if channel is not None and rounds.is_due(channel.pending):
                channel.complete()
                rounds.reported = max(rounds.reported, int(rounds.due.numpy()))
                rounds.pending.assign(0)

    def _among(self, number: int) -> stall_inspector.StallChannel | None:
        """Return the channel of a process set; None if there is nobody to wait for."""
        ranks = self._members().get(number)
        if not ranks or len(ranks) == 1 or horovod.rank() not in ranks:
            return None
        return self._inspector.among(RankSet(number, ranks))

    def _members(self) -> dict[int, Sequence[int]]:
        """Return the ranks of each process set; as last known if another rank has ended Horovod."""
        try:
            self._sets = dict(mpi_ops._basics._get_process_set_ids_and_ranks())
        except (ValueError, RuntimeError):
            LOGGER.debug("Horovod has ended; process sets are those from before")
        return self._sets

    def _submit(self, table: list[list[int]], name: str, process_set: RankSet) -> BackgroundCall:
        self.rounds(process_set.process_set_id).reported += 1
        return _summed(table, name, process_set)

    def _end(self, why: str) -> None:
        self.message = why + _END
        LOGGER.error("%s", self.message)
        self._deadlocked.set()
        time.sleep(_GRACE)
        try:
            _STOCK_SHUTDOWN()
        finally:
            self._ended.set()


def _summed(table: list[list[int]], name: str, process_set: RankSet) -> BackgroundCall:
    def total() -> tf.Tensor:
        return _STOCK.horovod_allreduce(
            tf.constant(table, tf.int64),
            name=name,
            reduce_op=horovod.Sum,
            prescale_factor=1.0,
            postscale_factor=1.0,
            ignore_name_scope=True,
            process_set_id=process_set.process_set_id,
        )

    graph = tf.function(total, autograph=False).get_concrete_function()  # names count there

    def sums() -> Any:
        try:
            return graph().numpy()
        except tf.errors.OpError as error:
            raise RuntimeError(error.message) from error

    return BackgroundCall(sums, "gradcomp-report")


_watch = _Watch()


class _RecordedOps:
    """Horovod's operations, with collectives recorded."""

    def __getattr__(self, name: str) -> Any:
        stock = getattr(_STOCK, name)
        return _recorded(name, stock) if name in _RECORDED else stock


def _recorded(title: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    kind = title.removeprefix(_PREFIX)

    @functools.wraps(stock)
    def collective(*arguments: Any, **options: Any) -> Any:
        process_set = int(options.get("process_set_id", 0))
        if tf.executing_eagerly():
            # Eager collectives pair by kind, not by name.
            shown = f"{kind} ({options['name']})" if options.get("name") else kind
            with translated(), _watch.call(kind, shown, process_set):
                return stock(*arguments, **options)
        in_function = tf.compat.v1.executing_eagerly_outside_functions()
        if not _marking.on or not in_function:
            return stock(*arguments, **options)
        name = f"{kind}.{options.get('name') or 'without a name'}"
        site = _watch.site(name, options.get("name") or kind, process_set)
        inputs = [x for x in tf.nest.flatten([*arguments]) if isinstance(x, tf.Tensor)]
        with tf.control_dependencies(inputs):
            begin = site.begin()
        with tf.control_dependencies([begin]):
            result = stock(*arguments, **options)
        after = result if isinstance(result, tf.Operation) else tf.nest.flatten(result)
        with tf.control_dependencies(after if isinstance(after, list) else [after]):
            site.end()
        return result

    return collective


@contextmanager
def _marks(on: bool, owner: set[Any] | None = None) -> Iterator[None]:
    before = _marking.on, _marking.owner
    _marking.on, _marking.owner = on, owner
    try:
        yield
    finally:
        _marking.on, _marking.owner = before


def rounds(process_set: Any) -> ReportRounds:
    """Return the report rounds that the sync messages of these ranks carry."""
    return _watch.rounds(process_set.process_set_id)


def waiting(name: str, process_set: Any) -> AbstractContextManager[None]:
    """Record that this thread waits for a collective of a graph that has no record itself."""
    return _watch.call(f"allgather.{name}", name, process_set.process_set_id)


def records() -> list[PendingOp]:
    """Return the collectives of graphs that are recorded."""
    return [site.operation for site in _watch.living_sites()]


def unmarked() -> Any:
    """Leave collectives that are traced in this context without records."""
    return _marks(False)


def marked(owner: set[Any]) -> Any:
    """Record collectives that are traced in this context, as long as a set keeps the records."""
    return _marks(True, owner)


@contextmanager
def translated() -> Iterator[None]:
    """Raise a DeadlockError if Horovod was shut down for one."""
    try:
        yield
    except tf.errors.OpError as error:
        _watch.close_records()
        message = _watch.deadlock_message() if "Horovod" in (error.message or "") else ""
        if not message:
            raise
        raise DeadlockError(message) from error


@functools.wraps(_STOCK_INIT)
def init(*arguments: Any, **options: Any) -> Any:
    """Initialize Horovod like its own `init`; records start anew."""
    _watch.drop()
    return _STOCK_INIT(*arguments, **options)


@functools.wraps(_STOCK_SHUTDOWN)
def shutdown(*arguments: Any, **options: Any) -> Any:
    """Shut Horovod down like its own `shutdown`; records are dropped."""
    result = _STOCK_SHUTDOWN(*arguments, **options)
    _watch.drop()
    return result


def _replace() -> None:
    mpi_ops.MPI_LIB = _RecordedOps()
    replaced = ("init", _STOCK_INIT, init), ("shutdown", _STOCK_SHUTDOWN, shutdown)
    for title, module in list(sys.modules.items()):
        if title.startswith("horovod."):
            for name, stock, ours in replaced:
                if vars(module).get(name) is stock:
                    setattr(module, name, ours)


_replace()
