"""Buckets of an exchange on TensorFlow, and the variables that hold their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core.compressor import Compressor, State, is_replicated, leaves, with_leaves
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.protocols import learning
from hvd_gradcomp.core.protocols.resizing import resized, start
from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.planning import assignment
from hvd_gradcomp.runtime import hierarchy, naming
from hvd_gradcomp.runtime.participants import Participants
from hvd_gradcomp.tensorflow import step_sync
from hvd_gradcomp.tensorflow.variables import is_rank_local, keep_local, new_variable

BUCKET_BYTES = 4 << 20  # on a CPU, where a bucket that stays in cache is faster
GPU_BUCKET_BYTES = 25 << 20

Layers = Sequence[Layer]
COMMITTED, DISCARDABLE, LEFT_OUT = 0, 1, 2  # states of the last exchange
UNDECIDED, GATHERED, COMPRESSED = 0, 1, 2  # choices for the rows of a sparse gradient
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Buckets:
    """Buckets and the state that an exchange keeps from step to step.

    Args:
        layers, compressor, op, predivide, process_set: see `GraphReducer`.
        place: position of this rank among hosts.
        name: prefix of the names of everything that travels.
        make_variable: see `GraphReducer`.
        left_out, apart: places of layers that get no bucket, or one of their own; see `_plan`.
        rollback: see `GraphReducer`.
    """

    def __init__(
        self,
        layers: Layers,
        compressor: Compressor,
        *,
        op: Any,
        predivide: float,
        process_set: Any,
        place: hierarchy.HostPosition | None,
        name: str,
        make_variable: Callable[[str, tf.Tensor], tf.Variable] | None,
        left_out: Collection[int] = (),
        apart: Collection[int] = (),
        rollback: bool = False,
    ) -> None:
        self.rollback = rollback and not compressor.is_linear
        self.layers, self.compressor, self.op = list(layers), compressor, op
        self.process_set, self.place, self.name = process_set, place, name
        alive = weakref.proxy(self)
        self.participants = Participants(process_set, place, lambda at: alive._make_groups(at))
        average = op == horovod.Average
        self.prescale = 1.0 / predivide if average else 1.0
        self.postscale = predivide / self.seat[1] if average else 1.0
        self.ops = TensorFlowOps()
        for layer, _, dtype in self.layers:
            if dtype not in _FLOATS:
                raise ValueError(f"{layer} has dtype {dtype}; only floating point is reduced")
        self._make_variable = make_variable or new_variable
        self.owned = make_variable is not None
        with tf.init_scope():
            zero = tf.constant(0, tf.int64)
            self._summed = new_variable("gradcomp_summed", zero)  # checksum of the previous step
            self._last = new_variable("gradcomp_last", tf.constant(COMMITTED, tf.int64))
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
        self._plan(left_out, apart)

    @property
    def seat(self) -> tuple[int, int]:
        """Return (rank, size) as compressors see them."""
        return self.participants.rank_and_size

    def leads(self, bucket: int) -> bool:
        """Return True if this rank compresses a bucket and keeps its state."""
        return self.participants.leads(self.leader(bucket))

    def _make_groups(self, place: hierarchy.HostPosition) -> hierarchy.Groups:
        raise NotImplementedError

    def leader(self, bucket: int) -> int:
        """Return the place in its host of the rank that compresses a bucket."""
        return 0 if self.place is None else bucket % self.place.slots

    def _plan(self, left_out: Collection[int], apart: Collection[int] = ()) -> None:
        """Assign the layers to buckets, last layers first, and create their state.

        Args:
            left_out: places of layers that get no bucket.
            apart: places of layers that get one of their own, which a step may leave out; those
                whose compressor takes the whole model are ignored.
        """
        self.left_out = sorted(left_out)
        target = GPU_BUCKET_BYTES if tf.config.list_physical_devices("GPU") else BUCKET_BYTES
        ranks = self.seat[1]
        assigned = assignment.assign(self.compressor, self.layers, ranks, filters_last=True)
        self.assigned = assigned
        self.apart = [p for p in sorted(apart) if not assigned[p].whole_model]
        together = {p for p in range(len(self.layers)) if p not in self.apart}
        everywhere = set(range(len(self.layers)))
        planned = [
            each
            for some in (together, *({place} for place in self.apart))
            for each in assignment.plan(
                self.compressor,
                self.layers,
                target,
                left_out={*left_out, *(everywhere - some)},
                ranks=ranks,
                filters_last=True,
            )
        ]
        self._planned = planned
        self._moments = [compressor.uses_moments for compressor, _ in planned]
        # A rank that does not lead a bucket keeps no state for it.
        planned = [
            (one if self.leads(bucket) else NoneCompressor(), layout)
            for bucket, (one, layout) in enumerate(planned)
        ]
        self.compressors = [compressor for compressor, _ in planned]
        self.layouts = [layout for _, layout in planned]
        self._name_buckets()
        places = {name: place for place, (name, _, _) in enumerate(self.layers)}
        self.places = [[places[name] for name in layout.names] for layout in self.layouts]
        self.variables: list[list[tf.Variable]] = []
        with tf.init_scope():
            undecided = tf.constant(UNDECIDED, tf.int64)
            self.choices = {p: new_variable("gradcomp_rows", undecided) for p in self.apart}
            self.templates = [start(one, self.ops, layout, ranks) for one, layout in planned]
            for bucket, template in enumerate(self.templates):
                self.variables.append([])
                for path, value in leaves(template):
                    title = f"gradcomp_{bucket}_{path.replace('.', '_')}"
                    variable = self._make_variable(title, value)
                    self.variables[-1].append(variable)
                    # With hosts, only the leaders have the replicated state.
                    if self.place or not is_replicated(self.compressors[bucket], path):
                        keep_local(variable)
            # The state before the last exchange; it shares its buffers until the next one.
            self._previous = [
                [new_variable("gradcomp_previous", v) for v in some] if self.rollback else []
                for some in self.variables
            ]

    def _name_buckets(self) -> None:
        self.names = [naming.bucket(self.name, *pair) for pair in enumerate(self.layouts)]

    def leave_out(self, places: Collection[int], apart: Collection[int] = ()) -> None:
        """Plan without some layers, whose gradients are sparse, unless that is the plan already.

        Args:
            places, apart: see `_plan`.
        """
        if self.left_out != sorted(places) or self.apart != sorted(apart):
            self._plan(places, apart)

    @property
    def keeps_local(self) -> bool:
        """Return True if a compressor keeps state that belongs to this rank alone."""
        return any(is_rank_local(v) for some in self.variables for v in some)

    def learned_by_one(self, steps: int) -> list[tuple[tf.Variable, int]]:
        """Return variables whose value on one rank counts for all after `steps`, and that rank."""
        ranks = self.process_set.ranks or range(self.process_set.size())
        return [
            (variable, ranks[owner])
            for one, template, variables in zip(self.compressors, self.templates, self.variables)
            for (path, _), variable in zip(leaves(template), variables)
            if is_rank_local(variable) and self.place is None
            if (owner := learning.owner(one, path, steps)) is not None
        ]

    def commit(self) -> None:
        """Commit the last exchange: it can no longer be discarded."""
        self._last.assign(COMMITTED)

    def discard(self) -> None:
        """Roll back to the state before the last exchange, bit-exact; all ranks do the same.

        The exchange counts as skipped. A no-op if it was undone already, because of a non-finite
        gradient. Works eagerly, and as part of a traced graph.

        Raises:
            RuntimeError: there is nothing to discard; in a graph TensorFlow's
                `InvalidArgumentError`, with the same message.
        """
        if not (self.rollback or self.compressor.is_linear):
            raise RuntimeError(
                "discard_step() needs what was kept before the exchange: make the tape without "
                "rollback=False, or the optimizer with rollback=True"
            )
        nothing = (
            "discard_step() takes back the last exchange, once: call it after an exchange and "
            "before the next one"
        )
        if tf.executing_eagerly() and int(self._last) == COMMITTED:
            raise RuntimeError(nothing)

        def restore() -> None:
            for variables, previous in zip(self.variables, self._previous):
                for variable, before in zip(variables, previous):
                    variable.assign(before)
            one = tf.constant(1, tf.int64)
            self.steps.assign_sub(one)
            self.counters["exchanges"].assign_sub(one)
            self.counters["skipped"].assign_add(one)
            self._last.assign(COMMITTED)

        known = tf.debugging.Assert(tf.not_equal(self._last, COMMITTED), [nothing])
        with tf.control_dependencies([] if known is None else [known]):
            tf.cond(tf.equal(self._last, DISCARDABLE), restore, lambda: None)

    def forget(self) -> None:
        """Reset what belongs to this rank alone to its value before the first step."""
        self.commit()
        for zero in (*self.counters.values(), *self.sums, self._summed):
            zero.assign(tf.zeros_like(zero))
        for template, variables in zip(self.templates, self.variables):
            for variable, (_, value) in zip(variables, leaves(template)):
                if is_rank_local(variable):
                    variable.assign(value)

    def state_of(self, bucket: int) -> State:
        """Return a bucket's current state."""
        return with_leaves(self.templates[bucket], [tf.identity(v) for v in self.variables[bucket]])

    @property
    def replicated(self) -> list[tuple[str, tf.Variable]]:
        """Return the state variables that are equal on all ranks that have them, by name."""
        held = []
        for bucket, (layout, template) in enumerate(zip(self.layouts, self.templates)):
            state = with_leaves(template, list(self.variables[bucket]))
            held += verify.replicated(bucket, self.compressors[bucket], layout, state)
        return held

    @property
    def everything(self) -> list[tf.Variable]:
        """Return all variables of the exchange."""
        return [self.steps, *self.counters.values(), *(v for some in self.variables for v in some)]

    def retrain(self) -> None:
        """Let the compressors learn anew, from the next step on."""
        self.commit()
        for bucket, compressor in enumerate(self.compressors):
            state = learning.retrained(compressor, self.ops, self.state_of(bucket), int(self.steps))
            for variable, (_, value) in zip(self.variables[bucket], leaves(state)):
                variable.assign(value)

    @property
    def _alike(self) -> list[tf.Variable]:
        """Return the integer scalars of the states that are equal on all ranks."""
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
        """Return the name of the message that ranks compare in each step."""
        return f"{self.name}.step"

    @property
    def word_size(self) -> int:
        """Return the number of integers in that message."""
        return step_sync.FIELDS + len(self._alike) + len(self.apart)

    def resize(self) -> set[Compressor]:
        """Adapt to another number of ranks; functions traced before must not run again.

        Returns:
            The compressors that have to learn anew.

        Raises:
            ValueError: on all ranks, if a compressor cannot work with so many.
        """
        ranks, anew = self.process_set.size(), set()
        for choice in self.choices.values():
            choice.assign(UNDECIDED)
        self.commit()
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
        return anew
