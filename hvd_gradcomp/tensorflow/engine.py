"""Runs the programs of all buckets through Horovod's TensorFlow ops.

While a `tf.function` is traced the programs run to their end; the graph then does what it can at
the same time, so buckets overlap. Eager calls go through a `tf.function` of the engine's own, like
stock Horovod's. State lives in variables that the owner makes, so checkpoints see it. None
of them is assigned before the payloads of all buckets have been checked.

Everything that travels has a name that all ranks give alike, see `hvd_gradcomp.timeline`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod import __version__ as horovod_version
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from hvd_gradcomp import (
    assignment,
    failures,
    handshake,
    hierarchy,
    messages,
    timeline,
    validate,
    verify,
    wire,
    worth,
)
from hvd_gradcomp.aggregator import (
    Compressor,
    Context,
    Program,
    State,
    is_replicated,
    leaves,
    with_leaves,
)
from hvd_gradcomp.algorithms.dense import NoneCompressor, as_compressor
from hvd_gradcomp.collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Inside,
    Switch,
    goes_as_sum,
)
from hvd_gradcomp.layers import Layer
from hvd_gradcomp.names import Names
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.ops.tensorflow import ASSERTION, TensorFlowOps, assertion
from hvd_gradcomp.protocols import learning
from hvd_gradcomp.protocols.reporting import Report, report
from hvd_gradcomp.protocols.resizing import resized, start
from hvd_gradcomp.stats import CompressionStats, mean_losses, norm_of

LOGGER = logging.getLogger("hvd_gradcomp")
BUCKET_BYTES = 4 << 20  # on a CPU, where a bucket that stays in cache is faster
GPU_BUCKET_BYTES = 25 << 20

STEPPING, SAVING = 1, 2  # what a rank does that gives a word; see `meeting`
_OTHER_CALL = (
    "rank {ranks} saves or loads a checkpoint while others train; call save_checkpoint and "
    "load_checkpoint on all ranks, between the same two steps"
)
_OTHER_GRADIENTS = (
    "rank {ranks} has gradients of other layers; freeze and thaw the same ones on all ranks, "
    "before the same step"
)
_OTHER_SUMS = (
    "rank {ranks} has heard another sum in the exchange before, so replicas have diverged: a reply "
    "was damaged on its way. Load the last checkpoint on all ranks; if it happens again, suspect "
    "memory or the network"
)
_OTHER_PHASE = (
    "rank {ranks} is in another phase of a compressor that learns; load the same checkpoint and "
    "call hvd.retrain on all ranks, before the same step"
)

Layers = Sequence[Layer]
_FLOATS = ("float16", "bfloat16", "float32", "float64")
living: weakref.WeakSet[Engine] = weakref.WeakSet()
TITLES = Names("gradcomp")
_rank_local: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
_own: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()


def gather_objects(item: Any, kind: Any, name: str, process_set: Any) -> list[Any]:
    """Everybody's item of a kind, on all ranks; see `messages`. Where nothing is traced."""

    def gather(data: tf.Tensor, title: str) -> Any:
        every = mpi_ops.allgather(
            data, name=f"{name}.{title}", ignore_name_scope=True, process_set=process_set
        )
        return every.numpy()

    def allgather(mine: bytes) -> Iterator[bytes]:
        lengths = gather(tf.constant([len(mine)], tf.int32), "sz")
        data, start = gather(tf.io.decode_raw(mine, tf.uint8), "t").tobytes(), 0
        for length in lengths.tolist():
            yield data[start : start + length]
            start += length

    return messages.gathered(item, kind, allgather, process_set.ranks)


def new_variable(name: str, value: tf.Tensor) -> tf.Variable:
    """A variable that belongs to nobody's checkpoint.

    Made where nothing is traced: a `tf.function` that has made a variable is traced a second time.
    """
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(tf.Variable, value, trainable=False, name=name).result()


def check(
    what: str,
    op: Any,
    groups: Any,
    num_groups: int,
    compression: Any,
    process_set: Any = horovod.global_process_set,
    hierarchical: bool = False,
) -> Compressor:
    """Refuses what cannot work, and returns the compressor."""
    validate.exchange(
        what,
        initialized=horovod.is_initialized(),
        groups=groups,
        num_groups=num_groups,
        op=op,
        allowed=(horovod.Average, horovod.Sum),
    )
    if hierarchical:
        hierarchy.place_of(mpi_ops, process_set, average=True)
    return as_compressor(compression, horovod.Compression)


def is_rank_local(variable: Any) -> bool:
    """Whether it holds what a compressor accumulated on this rank: never to be broadcast."""
    return _rank_local.get(id(variable)) is variable


def keep_local(variable: tf.Variable) -> tf.Variable:
    """Marks a variable as this rank's alone."""
    _rank_local[id(variable)] = variable
    return variable


def is_own(variable: Any) -> bool:
    """Whether it is a parameter that is trained on this rank alone: never to be saved for all."""
    return _own.get(id(variable)) is variable


def keep_own(variable: tf.Variable) -> None:
    """Marks a parameter whose gradient is not exchanged."""
    _own[id(variable)] = variable


def plain_variable(source: Any) -> Any:
    """TensorFlow's variable of a Keras variable; anything else as it is."""
    if isinstance(source, tf.Variable):
        return source
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source


def optimizer_of(model: Any) -> Any:
    """The optimizer that a model was compiled with, with its variables made."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model.optimizer


def distributed_in(source: Any) -> Any:
    """What exchanges: the source itself, or the optimizer that a loss scaler is wrapped around."""
    if hasattr(source, "_gradcomp"):
        return source
    return getattr(source, "inner_optimizer", source)


def _where(trained: tf.Tensor, state: State, other: State) -> State:
    """A state that is another's in all it holds of elements that are not trained."""
    pairs = zip(leaves(state), leaves(other))
    held = [tf.where(trained, x, y) if y.shape == trained.shape else x for (_, x), (_, y) in pairs]
    return with_leaves(state, held)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Horovod's failures as its own exception, with their likely cause."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.FailedPreconditionError) as error:
        if "Horovod" not in error.message:
            raise
        said = error.message.rpartition("\n\n")[2]  # behind where in the graph it happened
        raise HorovodInternalError(failures.explained(what, said)) from error


def takes_part(process_set: Any) -> bool:
    """Whether this rank belongs to the set.

    `ProcessSet.included()` says no wherever `horovod.torch` is imported after Horovod for
    TensorFlow, and then stock Horovod trains without reducing.
    """
    if process_set is horovod.global_process_set:
        return True
    return horovod.rank() in (process_set.ranks or ())


class Engine:
    """The exchange of one optimizer, or of the tapes over one list of variables.

    Args:
        layers: (name, shape, dtype) of everything that is reduced, in the same order on all ranks.
        compressor: what runs.
        op: `Average` or `Sum`.
        predivide: splits the averaging before and after the sum.
        process_set: the ranks that take part.
        sparse_as_dense: compress `IndexedSlices` as dense tensors. Otherwise they are gathered as
            they are.
        hierarchical: compress only the sums of hosts; see `hierarchy`.
        nonfinite: what becomes of a step in which a gradient is not finite: "raise", or "skip" or
            "propagate", which are the same here: gradients are NaN and nothing else changes.
        settings: what else must be equal on all ranks, for the handshake.
        name: begins the name of everything that travels; see `Names`.
        make_variable: makes the variables that hold the state, for an owner that saves them.
            Without an owner, layers whose first gradient is sparse get no state and no bucket.

    Attributes:
        layouts: the buckets.
        variables: the state of each bucket, tensor by tensor.
        steps: exchanges so far, equal on all ranks.
        counters: what `stats` reports, of this rank.
        owned: whether somebody saves the variables, which are then not made anew.
        sums: of gradients, that an owner adds up for the next exchange on this rank.
        titles: with hosts, what each rank has of `replicated`, by name.
    """

    def __init__(
        self,
        layers: Layers,
        compressor: Compressor,
        *,
        op: Any,
        predivide: float = 1.0,
        process_set: Any = horovod.global_process_set,
        sparse_as_dense: bool = False,
        hierarchical: bool = False,
        nonfinite: str = "raise",
        settings: str = "",
        name: str | None = None,
        make_variable: Callable[[str, tf.Tensor], tf.Variable] | None = None,
    ) -> None:
        self.layers, self.compressor, self.op = list(layers), compressor, op
        self.process_set, self.sparse_as_dense = process_set, sparse_as_dense
        average = op == horovod.Average
        self.place = hierarchy.place_of(mpi_ops, process_set, average) if hierarchical else None
        self._groups: hierarchy.Groups | None = None  # made when all are known to want them
        self.prescale = 1.0 / predivide if average else 1.0
        self.postscale = predivide / self.seat[1] if average else 1.0
        self.settings = (
            f"op={'Average' if average else 'Sum'}, gradient_predivide_factor={predivide}, "
            f"sparse_as_dense={sparse_as_dense}, hierarchical={hierarchical}, "
            f"nonfinite={nonfinite}{settings}"
        )
        self.undoes = nonfinite != "raise"
        self.name = name or TITLES.take()
        self.ops = TensorFlowOps()
        self.agreed = self._judged = False
        self.finite: Any = None  # whether the gradients of the last exchange were, on all ranks
        for layer, _, dtype in self.layers:
            if dtype not in _FLOATS:
                raise ValueError(f"{layer} has dtype {dtype}; only floating point is reduced")
        self._make_variable = make_variable or new_variable
        self.owned = make_variable is not None
        with tf.init_scope():
            zero = tf.constant(0, tf.int64)
            self._summed = new_variable("gradcomp_summed", zero)  # of the step before
            self.steps = self._make_variable("gradcomp_steps", zero)
            self.counters = {
                name: keep_local(self._make_variable(f"gradcomp_{name}", value))
                for name, value in {
                    "exchanges": zero,
                    "skipped": zero,
                    "bytes_sent": zero,
                    "bytes_received": zero,
                    "unbucketed": tf.zeros((len(self.layers),), tf.int64),
                }.items()
            }
        self.sums: list[tf.Variable] = []
        self._norm: tf.Variable | None = None  # of the gradient, where somebody watches
        self._heard: list[tf.Tensor] = []  # of the bits of replies that all ranks have alike
        self._eager = tf.function(self._reduce, autograph=False)
        self._plan(())
        living.add(self)

    @property
    def seat(self) -> tuple[int, int]:
        """(rank, size) as compressors see them: of hosts, where only those exchange."""
        if self.place is not None:
            return self.place.host, self.place.hosts
        return self.process_set.rank(), self.process_set.size()

    def leads(self, bucket: int) -> bool:
        """Whether this rank compresses a bucket, and keeps its state."""
        return self.place is None or self.place.slot == self.leader(bucket)

    def leader(self, bucket: int) -> int:
        """The place in its host of the rank that compresses a bucket."""
        return 0 if self.place is None else bucket % self.place.slots

    @property
    def groups(self) -> hierarchy.Groups:
        """The process sets of this rank among hosts; all ranks ask together the first time."""
        assert self.place is not None
        if self._groups is None:
            with tf.init_scope():
                self._groups = hierarchy.groups_of(mpi_ops, self.place, self._gather_objects)
        return self._groups

    def among(self, request: Collective | None) -> Any:
        """The process set that a collective is for; of None, those that exchange compressed."""
        if self.place is None:
            return self.process_set
        return self.groups.inside if isinstance(request, Inside) else self.groups.across

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        with explained("the exchange of what the ranks train"):
            return gather_objects(item, kind, f"{self.name}.handshake", self.process_set)

    def _plan(self, left_out: Collection[int]) -> None:
        """Lays the layers into buckets, last layers first, and makes their state."""
        self.left_out = sorted(left_out)
        target = GPU_BUCKET_BYTES if tf.config.list_physical_devices("GPU") else BUCKET_BYTES
        ranks = self.seat[1]
        planned = assignment.plan(
            self.compressor,
            self.layers,
            target,
            left_out=left_out,
            ranks=ranks,
            filters_last=True,
        )
        self._planned = planned
        self._moments = [compressor.uses_moments for compressor, _ in planned]
        # A rank that does not lead a bucket keeps what has no state.
        planned = [
            (one if self.leads(bucket) else NoneCompressor(), layout)
            for bucket, (one, layout) in enumerate(planned)
        ]
        self.compressors = [compressor for compressor, _ in planned]
        self.layouts = [layout for _, layout in planned]
        self.rename(self.name)
        places = {name: place for place, (name, _, _) in enumerate(self.layers)}
        self.places = [[places[name] for name in layout.names] for layout in self.layouts]
        self.variables: list[list[tf.Variable]] = []
        with tf.init_scope():
            self.templates = [start(one, self.ops, layout, ranks) for one, layout in planned]
            for bucket, template in enumerate(self.templates):
                self.variables.append([])
                for path, value in leaves(template):
                    title = f"gradcomp_{bucket}_{path.replace('.', '_')}"
                    variable = self._make_variable(title, value)
                    self.variables[-1].append(variable)
                    # With hosts, not even what leaders have in common is on all ranks.
                    if self.place or not is_replicated(self.compressors[bucket], path):
                        keep_local(variable)

    def rename(self, name: str) -> None:
        """Begins the names of what travels anew."""
        if name != self.name:
            self.name = name
            self._eager = tf.function(self._reduce, autograph=False)
        self.names = [timeline.bucket(name, *pair) for pair in enumerate(self.layouts)]

    def leave_out(self, places: Collection[int]) -> None:
        """Plans without some layers, whose gradients are sparse, unless it is planned so."""
        if self.left_out != sorted(places):
            self._plan(places)

    @property
    def keeps_local(self) -> bool:
        """Whether a compressor keeps what belongs to this rank alone."""
        return any(is_rank_local(v) for some in self.variables for v in some)

    def learned_by_one(self, steps: int) -> list[tuple[tf.Variable, int]]:
        """Variables in which one rank's value counts for all after so many steps, and its rank."""
        ranks = self.process_set.ranks or range(self.process_set.size())
        return [
            (variable, ranks[owner])
            for one, template, variables in zip(self.compressors, self.templates, self.variables)
            for (path, _), variable in zip(leaves(template), variables)
            if is_rank_local(variable) and self.place is None
            if (owner := learning.owner(one, path, steps)) is not None
        ]

    def forget(self) -> None:
        """Sets what belongs to this rank alone to what it was before the first step."""
        for zero in (*self.counters.values(), *self.sums, self._summed):
            zero.assign(tf.zeros_like(zero))
        for template, variables in zip(self.templates, self.variables):
            for variable, (_, value) in zip(variables, leaves(template)):
                if is_rank_local(variable):
                    variable.assign(value)

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Any],
        moments: Sequence[Any] | None = None,
        loss_scale: Any = None,
    ) -> list[Any]:
        """One exchange.

        Args:
            gradients: one for each layer, or None; None stays None. On all ranks it is the same
                layers that have none, and what was accumulated for them waits.
            moments: sums of squared sample gradients, for compressors that use them.
            loss_scale: what gradients are multiplied with, and moments with its square; the same
                of the result. What is kept from step to step is without it.

        Returns:
            The reduced gradients, in their dtypes. `finite` says whether they are.
        """
        if loss_scale is not None:
            scale = tf.cast(loss_scale, tf.float32)
            gradients = [times(g, 1.0 / scale) for g in gradients]
            if moments is not None:
                moments = [times(m, 1.0 / (scale * scale)) for m in moments]
            return [times(g, scale) for g in self.reduce(gradients, moments)]
        if len(gradients) != len(self.layers):
            raise ValueError(f"{len(gradients)} gradients for {len(self.layers)} layers")
        if not self.agreed:
            self._agree(gradients)
        if moments is None or not self.compressor.uses_moments:
            moments = [None] * len(gradients)
        if not tf.executing_eagerly():
            reduced, self.finite = self._reduce(list(gradients), list(moments))
            return reduced
        try:
            with explained("the exchange"):
                reduced, self.finite = self._eager(list(gradients), list(moments))
            return list(reduced)
        except tf.errors.InvalidArgumentError as error:
            if ASSERTION not in error.message:
                raise
            said = error.message.partition("assertion failed: ")[2].partition("\n")[0]
            kind = NonFiniteGradientError if wire.IS_NOT_FINITE in said else PayloadError
            raise kind(said or error.message) from None

    def _agree(self, gradients: Sequence[Any]) -> None:
        """Compares with the other ranks what is about to be trained, once."""
        kinds = [self._kind(gradient) for gradient in gradients]
        sparse = [place for place, kind in enumerate(kinds) if kind == ", sparse"]
        if not (self.owned and any(self.variables)):
            self.leave_out(sparse)
        described = [
            (name, shape, f"{dtype}{kind}")
            for (name, shape, dtype), kind in zip(self.layers, kinds)
        ]
        mine = handshake.describe(
            described,
            self.compressor,
            self.layouts,
            self.settings,
            framework=f"tensorflow {tf.__version__}",
            horovod=horovod_version,
        )
        with tf.init_scope():
            every = self._gather_objects(mine, handshake.Description)
        handshake.agree(every, self.process_set.ranks)
        if self.process_set.rank() == 0 and not self._judged:
            for line in worth.warnings(self.compressor, self._planned, self.seat[1]):
                LOGGER.warning("%s", line)
        self._judged = True
        if self.place is not None:
            _ = self.groups  # all ranks are here together
            with tf.init_scope():
                own = [title for title, _ in self.replicated]
                self.titles = self._gather_objects(own, list[str])
        self.agreed = True

    def _kind(self, gradient: Any) -> str:
        if gradient is None:
            return " without a gradient"
        sparse = isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense
        return ", sparse" if sparse else ""

    def _reduce(self, gradients: list[Any], moments: list[Any]) -> tuple[list[Any], Any]:
        # Where a leader finds that a gradient is not finite, its host has to hear of it first.
        self.ops.verdicts = [] if self.undoes or self.place is not None else None
        dense: list[Any] = list(gradients)
        sparse: dict[int, Any] = {}
        for place, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                if self.sparse_as_dense:
                    dense[place] = tf.convert_to_tensor(gradient)
                else:
                    dense[place], sparse[place] = None, gradient
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            with tf.control_dependencies([self._still_valid()]):
                dense = [None if g is None else tf.identity(g) for g in dense]
        programs: list[list[Program]] = []
        requests: list[Collective] = []
        results: list[Any] = [None] * len(self.layouts)
        before: list[State] = []
        trained = [self._trained(bucket, gradients) for bucket in range(len(self.layouts))]
        for bucket, layout in enumerate(self.layouts):
            context = Context(
                layout,
                *self.seat,
                tf.identity(self.steps),
                self.prescale,
                self.postscale,
            )
            extra = {}
            if self._moments[bucket] and any(
                moments[place] is not None for place in self.places[bucket]
            ):
                extra["moment"] = self._flat(bucket, moments, "float32")
            state = with_leaves(
                self.templates[bucket], [tf.identity(v) for v in self.variables[bucket]]
            )
            before.append(state)
            if trained[bucket] is not None:
                nothing = with_leaves(state, [tf.zeros_like(x) for _, x in leaves(state)])
                state = _where(trained[bucket], state, nothing)
            flat = self._flat(bucket, dense, layout.dtype)
            one, how = self.compressors[bucket], (self.ops, context, flat, state)
            if self.place is None:
                program = one.aggregate(*how, **extra)
            else:
                leader = self.leader(bucket)
                program = hierarchy.aggregate(one, *how, place=self.place, leader=leader, **extra)
            programs.append([program])
        # All first rounds come before any second one, as far as an eager run is concerned.
        for bucket, stack in enumerate(programs):
            requests.append(self._advance(stack, None, results, bucket))
        self._heard = []
        together = self._together(gradients)
        # In different phases a rank would wait for ever for what others do not ask for.
        phases = any(isinstance(request, Switch) for request in requests)
        with tf.control_dependencies(together if phases else []):
            self._finish(programs, requests, results)
        reduced = list(gradients)
        planned = {place for places in self.places for place in places}
        for place, gradient in enumerate(gradients):
            if place in sparse:
                reduced[place] = self._gather(place, gradient)
            elif gradient is not None and place not in planned:  # sparse at first, not now
                reduced[place] = self._sum(place, dense[place])
        finite = self._verdict()
        if not self.undoes and self.place is not None:
            facts = {wire.ANY_NOT_FINITE: tf.reshape(finite, (1,))}
            finite = tf.reduce_all(self.ops.require(facts, NonFiniteGradientError))
        one = tf.cast(finite, tf.int64)
        # The totals depend on the checks of the payloads: a step that fails leaves no trace.
        with tf.control_dependencies([finite, *together, *(total for total, _ in results)]):
            for bucket, (total, state) in enumerate(results):
                if trained[bucket] is not None:
                    state = _where(trained[bucket], state, before[bucket])
                for variable, (_, value) in zip(self.variables[bucket], leaves(state)):
                    variable.assign(self._kept(finite, value, variable))
                self._cut(bucket, total, dense, reduced)
            self._summed.assign(tf.add_n(self._heard) if self._heard else 0)
            self.steps.assign_add(one)
            self.counters["exchanges"].assign_add(one)
            self.counters["skipped"].assign_add(1 - one)
        if self.undoes:
            reduced = [times(g, tf.where(finite, 1.0, float("nan"))) for g in reduced]
        if self._norm is not None:
            with tf.control_dependencies([total for total, _ in results]):
                self._measure(reduced)
        return reduced, finite

    def _finish(
        self, programs: list[list[Program]], requests: list[Any], results: list[Any]
    ) -> None:
        """Runs all programs from their first requests to their ends."""
        rounds = 0
        while any(request is not None for request in requests):
            due = [request for request in requests if request is not None]
            # What another leader sends comes last, as far as an eager run is concerned.
            due = [request for request in due if not hierarchy.is_result(request)] or due
            replies = [
                self._perform(request, name, rounds) if any(request is d for d in due) else None
                for name, request in zip(self.names, requests)
            ]
            for bucket, reply in enumerate(replies):
                if reply is not None:
                    requests[bucket] = self._advance(programs[bucket], reply, results, bucket)
            rounds += 1

    @property
    def _alike(self) -> list[tf.Variable]:
        """What states count alike on all ranks."""
        if self.place is not None:
            return []
        return [
            variable
            for one, template, variables in zip(self.compressors, self.templates, self.variables)
            for (path, _), variable in zip(leaves(template), variables)
            if variable.dtype.is_integer and variable.shape.rank == 0 and is_replicated(one, path)
        ]

    @property
    def word_name(self) -> str:
        """Of what ranks compare in each step."""
        return f"{self.name}.step"

    @property
    def word_size(self) -> int:
        """Of how many numbers it is."""
        return 4 + len(self._alike)

    def _together(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Fails, on all ranks, unless they are in the same step and phase; nothing for one rank.

        Phases go by the step and by what states count alike on all ranks. Added up, each rank's
        in a place of its own, since that is what works with `hvd.join()`.
        """
        rank, ranks = self.process_set.rank(), self.process_set.size()
        if ranks == 1:
            return []
        kinds = repr([self._kind(gradient) for gradient in gradients]).encode()
        mine = [tf.constant(STEPPING, tf.int64), tf.constant(zlib.crc32(kinds), tf.int64)]
        mine += [tf.identity(self.steps), tf.identity(self._summed)]
        word = tf.stack([*mine, *(tf.cast(v, tf.int64) for v in self._alike)])
        table = tf.one_hot([rank], ranks, dtype=tf.int64, axis=0) * word
        everybody = mpi_ops._allreduce(
            table,
            op=horovod.Sum,
            name=self.word_name,
            ignore_name_scope=True,
            process_set=self.process_set,
        )
        joined = everybody[:, 0] == 0
        alike = joined[:, None] | (everybody == word)
        summed = alike[:, 3] | (everybody[:, 3] == 0) | (word[3] == 0)
        alike = tf.concat((alike[:, :3], alike[:, 4:]), 1)
        return [
            self.ops.require(
                {
                    _OTHER_CALL: everybody[:, 0] != SAVING,
                    _OTHER_GRADIENTS: alike[:, 1],
                    wire.OTHER_STEP: alike[:, 2],
                    _OTHER_PHASE: tf.reduce_all(alike, 1),
                    _OTHER_SUMS: summed,
                }
            )
        ]

    def _verdict(self) -> Any:
        """Whether all gradients of the step were finite, as far as it has not been an error."""
        verdicts, self.ops.verdicts = self.ops.verdicts, None
        return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)

    def _kept(self, finite: tf.Tensor, value: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """What a state variable becomes; after a step that is left out, what it was."""
        return tf.where(finite, value, variable) if self.undoes else value

    def _still_valid(self) -> Any:
        """Fails where a trace runs among other ranks than it was made for."""
        rank, size = horovod.rank(), horovod.size()
        same = tf.equal(mpi_ops.rank_op(), rank) & tf.equal(mpi_ops.size_op(), size)
        return tf.debugging.Assert(
            same,
            [
                f"{ASSERTION}: this was traced for rank {rank} of {size}, and the ranks have "
                "changed since. Make the tf.function inside the function that hvd.elastic.run "
                "wraps, so that it is traced again"
            ],
        )

    def _gather(self, place: int, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """Everybody's slices, as stock Horovod does it: nothing is compressed."""
        name = f"{self.name}.sparse{place}.{timeline.readable(self.layers[place][0])}"
        values = self._gather_rows(gradient.values, f"{name}.values")
        indices = self._gather_rows(gradient.indices, f"{name}.indices")
        if self.op == horovod.Average:
            values = values / tf.cast(self.process_set.size(), values.dtype)
        self._count(place, gradient.values)
        if self.ops.verdicts is not None:  # all ranks see all values
            self.ops.verdicts.append(self.ops.finite(values))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _gather_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        wire = tf.cast(rows, tf.float32) if rows.dtype == tf.bfloat16 else rows
        reply = mpi_ops.allgather(
            wire,
            name=name,
            ignore_name_scope=True,
            process_set=self.process_set,
        )
        self.counters["bytes_sent"].assign_add(_bytes(wire))
        self.counters["bytes_received"].assign_add(_bytes(reply))
        return tf.cast(reply, rows.dtype)

    def _sum(self, place: int, gradient: tf.Tensor) -> tf.Tensor:
        """A dense gradient that has no bucket."""
        wire = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
        share = 1.0 if self.place is None else self.place.share
        request = Allreduce(wire, self.prescale, self.postscale * share)
        self._count(place, wire)
        name = f"{self.name}.dense{place}.{timeline.readable(self.layers[place][0])}"
        total = self._perform(request, name, 0, among=self.process_set)
        if self.ops.verdicts is not None:
            self.ops.verdicts.append(self.ops.finite(total))
        return tf.cast(total, gradient.dtype)

    def _count(self, place: int, sent: tf.Tensor) -> None:
        here = tf.one_hot(place, len(self.layers), dtype=tf.int64)
        self.counters["unbucketed"].assign_add(here * tf.size(sent, tf.int64))

    def _flat(self, bucket: int, values: Sequence[Any], dtype: str) -> tf.Tensor:
        mine = [values[place] for place in self.places[bucket]]
        return self.ops.flatten(self.layouts[bucket], mine, dtype)

    def _trained(self, bucket: int, gradients: Sequence[Any]) -> tf.Tensor | None:
        """Which elements belong to layers that have a gradient; None where all have."""
        if all(gradients[place] is not None for place in self.places[bucket]):
            return None
        ones = [
            None if gradient is None else tf.ones(shape)
            for gradient, (_, shape, _) in zip(gradients, self.layers)
        ]
        return self._flat(bucket, ones, "float32") > 0

    def _cut(self, bucket: int, total: tf.Tensor, given: list[Any], reduced: list[Any]) -> None:
        pieces = self.ops.cut(self.layouts[bucket], total)
        for place, piece in zip(self.places[bucket], pieces):
            if given[place] is not None:
                reduced[place] = tf.cast(piece, self.layers[place][2])

    def _advance(self, stack: list[Program], reply: Any, results: list[Any], bucket: int) -> Any:
        """Resumes the innermost program until it asks for a collective, or all have ended."""
        while stack:
            try:
                request = stack[-1].send(reply)
            except StopIteration as stop:
                stack.pop()
                reply = stop.value
                continue
            if isinstance(request, Switch) and isinstance(request.index, int):
                stack.append(request.branches[request.index]())
                reply = None
                continue
            return request
        results[bucket] = reply
        return None

    def _perform(
        self, request: Any, name: str, path: Any, taken: Any = None, among: Any = None
    ) -> Any:
        """The reply.

        Args:
            request: a collective.
            name: of the bucket.
            path: the round.
            taken: true where the branch that asks is the one that runs.
            among: the process set, where it is another than the request is for.
        """
        if isinstance(request, Switch):
            index = request.index
            branches = [
                lambda branch=branch, i=i: self._run(
                    branch(), name, f"{path}.{i}", tf.equal(index, i)
                )
                for i, branch in enumerate(request.branches)
            ]
            reply, finite, summed = tf.switch_case(tf.cast(index, tf.int32), branches)
            if self.ops.verdicts is not None:
                self.ops.verdicts.append(finite)
            self._heard.append(summed)
            return reply
        process_set, counts = among or self.among(request), not isinstance(request, Inside)
        title = timeline.collective(name, request, path)
        if isinstance(request, Inside):
            request = request.request
        tensor, world = request.tensor, process_set.size()
        if taken is not None and isinstance(request, (Broadcast, Gather)):
            # A rank that only receives hands over a constant. TensorFlow's graph optimizer frees
            # what depends on constants alone from its branch, and then this rank asks when others
            # do not.
            tensor = tf.where(taken, tensor, tf.zeros_like(tensor))
        shared: dict[str, Any] = {
            "name": title,
            "ignore_name_scope": True,
            "process_set": process_set,
        }
        here = process_set.rank()
        source = request.root if isinstance(request, Broadcast) else None
        if counts and source in (None, here):
            self.counters["bytes_sent"].assign_add(_bytes(tensor))
        size = tensor.shape.num_elements()
        gloo = mpi_ops.gloo_enabled()
        if isinstance(request, Allgather) and goes_as_sum(
            size or 0, tensor.dtype.name, world, gloo
        ):
            own = tf.bitcast(tf.reshape(tensor, (-1, 4)), tf.int32)
            others = mpi_ops._allreduce(own, op=horovod.Sum, **shared) - own
            both = (own, others) if here == 0 else (others, own)
            reply = tf.reshape(tf.bitcast(tf.stack(both), tf.uint8), (world, *tensor.shape))
        elif isinstance(request, Allgather):
            reply = mpi_ops.allgather(tensor, **shared)
            same = assertion(
                tf.equal(tf.size(reply), world * tf.size(tensor)),
                f"{ASSERTION}: the ranks sent payloads of different sizes for {title}; load "
                "the same checkpoint on all ranks",
                tf.size(reply),
                tf.size(tensor),
            )
            with tf.control_dependencies([same]):
                reply = tf.reshape(reply, tf.concat(([world], tf.shape(tensor)), 0))
            reply.set_shape((world, *tensor.shape))
        elif isinstance(request, Allreduce):
            reply = mpi_ops._allreduce(
                tensor,
                op=horovod.Sum,
                prescale_factor=request.prescale,
                postscale_factor=request.postscale,
                **shared,
            )
        elif isinstance(request, Alltoall):
            reply = mpi_ops.alltoall(tf.reshape(tensor, (-1,)), **shared)
            reply = tf.reshape(reply, tf.shape(tensor))
        elif isinstance(request, Gather):
            splits = [0] * world
            splits[request.root] = request.lengths[here]
            tensor = tf.reshape(tensor, (splits[request.root],))
            given = mpi_ops.alltoall(tensor, splits=tf.constant(splits, tf.int32), **shared)[0]
            # Counted before its shape is known, or ranks that get nothing would leave it out.
            self.counters["bytes_received"].assign_add(_bytes(given))
            return tf.reshape(given, (sum(request.lengths) if request.root == here else 0,))
        elif isinstance(request, Broadcast):
            ranks = process_set.ranks
            root = ranks[request.root] if ranks else request.root
            reply = mpi_ops.broadcast(tensor, root, **shared)
        else:
            raise TypeError(f"{request!r} is no collective; {self.compressor} has asked for it")
        if isinstance(request, (Allreduce, Broadcast)) and self.place is None:
            self._heard.append(_sum_of_bits(reply))
        if counts and source != here:
            self.counters["bytes_received"].assign_add(_bytes(reply))
        return reply

    def _run(self, program: Program, name: str, path: str, taken: tf.Tensor) -> Any:
        """A branch of a `Switch`, to its end: results, whether gradients were finite, and sums."""
        outside, sums = self.ops.verdicts, self._heard
        self.ops.verdicts, self._heard = None if outside is None else [], [tf.constant(0, tf.int64)]
        try:
            results = self._run_to_end(program, name, path, taken)
            return results, self._verdict(), tf.add_n(self._heard)
        finally:
            self.ops.verdicts, self._heard = outside, sums

    def _run_to_end(self, program: Program, name: str, path: str, taken: tf.Tensor) -> Any:
        results: list[Any] = [None]
        stack, reply = [program], None
        for turn in itertools.count():
            request = self._advance(stack, reply, results, 0)
            if request is None:
                return results[0]
            reply = self._perform(request, name, f"{path}.{turn}", taken)

    def stats(self) -> CompressionStats:
        """Totals since the start; reads the device."""
        steps = int(self.counters["exchanges"])
        layers: dict[str, int] = {}
        reports: list[Report] = []
        theirs: set[str] = set()
        for bucket, (layout, compressor) in enumerate(zip(self.layouts, self.compressors)):
            if not self.leads(bucket):
                theirs.update(layout.names)
                continue
            state = with_leaves(self.templates[bucket], list(self.variables[bucket]))
            said = report(compressor, layout, state, steps)
            reports.append(said)
            layers.update(zip(layout.names, said.sent))
        unbucketed = self.counters["unbucketed"].numpy().tolist()
        for (name, _, _), sent_as_is in zip(self.layers, unbucketed):
            if name not in theirs:
                layers[name] = layers.get(name, 0) + sent_as_is
        sizes = {name: prod(shape) for name, shape, _ in self.layers if name in layers}
        elements = sum(sizes.values())
        return CompressionStats(
            steps=steps,
            elements=elements * steps,
            elements_sent=sum(layers.values()),
            bytes_dense=4 * elements * steps,
            bytes_sent=int(self.counters["bytes_sent"]),
            bytes_received=int(self.counters["bytes_received"]),
            layers={name: layers[name] for name in sizes},
            losses=mean_losses(said.losses for said in reports),
            sizes=sizes,
            skipped=int(self.counters["skipped"]),
            rung_changes=sum(said.rung_changes for said in reports),
            residual_norm=norm_of(
                float(tf.norm(said.residual)) for said in reports if said.residual is not None
            ),
            gradient_norm=norm_of(() if self._norm is None else [float(self._norm)]),
        )

    def watch(self) -> bool:
        """Lets graphs that are traced from now on measure the gradient, at each `measure`.

        Returns:
            Whether they could not before.
        """
        if self._norm is not None:
            return False
        with tf.init_scope():
            self._norm = new_variable("gradcomp_norm", tf.constant(math.nan))
            self._asked = new_variable("gradcomp_asked", tf.constant(False))
        self._eager = tf.function(self._reduce, autograph=False)
        return True

    def measure(self) -> None:
        """Asks the next exchange for the norm of what it reduces; nothing where none watches."""
        if self._norm is not None:
            self._asked.assign(True)

    def _measure(self, reduced: list[Any]) -> None:
        def measured() -> None:
            known = [tf.cast(_values(g), tf.float32) for g in reduced if g is not None]
            self._norm.assign(tf.linalg.global_norm(known))  # type: ignore[union-attr]
            self._asked.assign(False)

        tf.cond(self._asked, measured, lambda: None)

    def retrain(self) -> None:
        """Lets the compressors learn anew what they learn, from the next step on."""
        for bucket, compressor in enumerate(self.compressors):
            state = learning.retrained(compressor, self.ops, self.state_of(bucket), int(self.steps))
            for variable, (_, value) in zip(self.variables[bucket], leaves(state)):
                variable.assign(value)

    def state_of(self, bucket: int) -> State:
        """A bucket's state as it is now."""
        return with_leaves(self.templates[bucket], [tf.identity(v) for v in self.variables[bucket]])

    @property
    def replicated(self) -> list[tuple[str, tf.Variable]]:
        """The variables of states that are equal on all ranks that have them, by name."""
        held = []
        for bucket, (layout, template) in enumerate(zip(self.layouts, self.templates)):
            state = with_leaves(template, list(self.variables[bucket]))
            held += verify.replicated(bucket, self.compressors[bucket], layout, state)
        return held

    @property
    def everything(self) -> list[tf.Variable]:
        """All its variables."""
        return [self.steps, *self.counters.values(), *(v for some in self.variables for v in some)]

    def resize(self) -> set[Compressor]:
        """Settles what depends on the number of ranks; what was traced before must not run again.

        Returns:
            The compressors that have to learn anew.

        Raises:
            ValueError: on all ranks, if a compressor cannot work with so many.
        """
        ranks, anew = self.process_set.size(), set()
        self._summed.assign(0)  # the step before may have ended on some ranks only
        if self.op == horovod.Average:
            self.postscale = 1.0 / (self.prescale * ranks)
        for bucket, compressor in enumerate(self.compressors):
            before = self.state_of(bucket)
            after = resized(compressor, self.ops, before, int(self.steps), ranks)
            if after is before:
                continue
            anew.add(compressor)
            for variable, (path, value) in zip(self.variables[bucket], leaves(after)):
                if variable.shape != value.shape:
                    raise ValueError(
                        f"a compressor cannot go on with {ranks} ranks on TensorFlow: {path} has "
                        f"one part a rank. Use pattern='ring_allreduce', or PyTorch. It is "
                        f"{compressor}"
                    )
                variable.assign(value)
        self._eager = tf.function(self._reduce, autograph=False)
        self.agreed = False
        return anew


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """A gradient, which may be sparse or None, times a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = times(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    wide = gradient.dtype if gradient.dtype.size >= 4 else tf.float32
    return tf.cast(tf.cast(gradient, wide) * tf.cast(factor, wide), gradient.dtype)


def poisoned(gradients: list[Any], others: Sequence[Any]) -> list[Any]:
    """Gradients that are not finite where others are not, which are not exchanged themselves.

    So all ranks hear of it, and leave the step out together.
    """
    zeros = [tf.cast(tf.reduce_sum(_values(g) * 0), tf.float32) for g in others if g is not None]
    place = next((i for i, g in enumerate(gradients) if g is not None), None)
    if not zeros or place is None:
        return gradients
    first = times(gradients[place], 1.0 + tf.add_n(zeros))
    return [*gradients[:place], first, *gradients[place + 1 :]]


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _sum_of_bits(x: tf.Tensor) -> tf.Tensor:
    """Any bit that flips changes it; an int64 scalar."""
    kinds = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
    return tf.reduce_sum(tf.cast(tf.bitcast(x, kinds[x.dtype.size]), tf.int64))


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    known = tensor.shape.num_elements()
    if known is not None:
        return tf.constant(known * tensor.dtype.size, tf.int64)
    return tf.size(tensor, tf.int64) * tensor.dtype.size
