"""Buckets of an exchange on TensorFlow, and the variables that hold their state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, State, is_replicated, leaves, with_leaves
from hvd_gradcomp.method.learned import owner_of, retrained
from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.planning import assignment
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.tensorflow.interop.variables import is_rank_local, keep_local, new_variable

BUCKET_BYTES = 4 << 20  # on a CPU, where a bucket that stays in cache is faster
GPU_BUCKET_BYTES = 25 << 20

Layers = Sequence[Layer]
MakeVariable = Callable[[str, tf.Tensor], tf.Variable]
_SMALL = 256  # elements
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Bucket:
    """Layers that are exchanged together, and their compressor's state on this rank.

    Attributes:
        name: prefix of the names of its collectives.
        layout: where each layer lies.
        places: of its layers, among all.
        planned: the compressor, on the ranks that lead the bucket.
        leader: slot of these ranks on their hosts.
        compressor: of this rank, which keeps no state unless it leads the bucket.
        template: the state before the first step.
        variables: the state, tensor by tensor.
    """

    name: str
    layout: Layout
    places: list[int]
    planned: Compressor
    leader: int
    compressor: Compressor
    template: State
    variables: list[tf.Variable]

    @property
    def state(self) -> State:
        """Return the current state."""
        return with_leaves(self.template, [tf.identity(v) for v in self.variables])

    def assign(self, state: State) -> None:
        """Replace the state."""
        for variable, (_, value) in zip(self.variables, leaves(state)):
            variable.assign(value)

    def named_variables(self) -> Iterator[tuple[str, tf.Variable]]:
        """Iterate over the paths of the state's tensors, and their variables."""
        return zip((path for path, _ in leaves(self.template)), self.variables)

    def flatten(self, ops: TensorFlowOps, values: Sequence[Any], dtype: str) -> tf.Tensor:
        """Concatenate values of its layers, out of those of all; None stands for zeros."""
        return ops.flatten(self.layout, [values[place] for place in self.places], dtype)


class StateSnapshot:
    """Snapshot of variables before the last exchange.

    Large tensors share their buffers with the variables until the next exchange. Small ones of a
    dtype lie in one vector: each node of a graph lengthens its first step.

    Args:
        variables: whose values are kept.
    """

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self._variables = list(variables)
        joined: dict[tf.DType, list[int]] = {}
        self._alone = []
        for place, variable in enumerate(self._variables):
            small = variable.shape.rank < 2 and variable.shape.num_elements() <= _SMALL
            if small:
                joined.setdefault(variable.dtype, []).append(place)
            else:
                self._alone.append((place, _unwritten(variable.dtype)))
        self._joined = [(places, _unwritten(dtype)) for dtype, places in joined.items()]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the snapshot; 0 before the first exchange."""
        return bytes_of([kept for _, kept in (*self._alone, *self._joined)])

    def assign(self, values: Sequence[tf.Tensor]) -> None:
        """Replace the snapshot by one value for each variable."""
        for place, kept in self._alone:
            kept.assign(values[place])  # no copy: a buffer that is read is not written to
        for places, kept in self._joined:
            scalars = [values[place] for place in places if not values[place].shape.rank]
            vectors = [values[place] for place in places if values[place].shape.rank]
            kept.assign(tf.concat([*([tf.stack(scalars)] if scalars else []), *vectors], 0))

    def restore(self) -> None:
        """Assign the snapshot to the variables, bit-exact."""
        for place, kept in self._alone:
            self._variables[place].assign(kept)
        for places, kept in self._joined:
            variables = [self._variables[place] for place in places]
            in_order = sorted(variables, key=lambda variable: variable.shape.rank)
            sizes = [variable.shape.num_elements() for variable in in_order]
            for variable, piece in zip(in_order, tf.split(kept, sizes)):
                variable.assign(tf.reshape(piece, variable.shape))


def bytes_of(variables: Iterable[tf.Variable]) -> int:
    """Return the bytes of the values of variables, whose shape may be that of their value."""
    return sum(int(tf.size(v, tf.int64)) * v.dtype.size for v in variables)


def _unwritten(dtype: tf.DType) -> tf.Variable:
    """Create a variable of any shape, which has no memory yet."""
    return new_variable("gradcomp_snapshot", tf.zeros((0,), dtype), shape=tf.TensorShape(None))


class BucketPlanner:
    """Planner of a model's buckets, and owner of their state.

    Args:
        layers: (name, shape, dtype) of each; see `GraphReducer`.
        compressor: of all layers.
        participants: the ranks.
        ops: the tensor operations.
        name: prefix of the names of everything that travels.
        make_variable: creates the variables that hold the state.
        keeps_snapshot: keep the state before the last exchange.

    Attributes:
        snapshot: the state before the last exchange, if it can be rolled back.
        buckets: in the order in which backward fills them.
        assigned: each layer's compressor.
        left_out: sorted places of layers that get no bucket.
        apart: sorted places of layers that get a bucket of their own.
    """

    def __init__(
        self,
        layers: Layers,
        compressor: Compressor,
        participants: Participants,
        ops: TensorFlowOps,
        name: str,
        make_variable: MakeVariable,
        keeps_snapshot: bool,
    ) -> None:
        self.layers, self.compressor, self.name = list(layers), compressor, name
        self.participants, self.ops = participants, ops
        self._make_variable, self._keeps_snapshot = make_variable, keeps_snapshot
        for layer, _, dtype in self.layers:
            if dtype not in _FLOATS:
                raise ValueError(
                    f"{layer} has dtype {dtype}, and only real floating point is exchanged: keep "
                    "real and imaginary parts in variables of their own, or leave the variable to "
                    "its rank (hvd.PartialDistributedOptimizer, hvd.PartialDistributedGradientTape)"
                )
        self.snapshot: StateSnapshot | None = None
        self.buckets: list[Bucket] = []
        self.assigned: Sequence[Compressor] = ()
        self.left_out: list[int] = []
        self.apart: list[int] = []

    def plan(self, left_out: Collection[int], apart: Collection[int]) -> None:
        """Assign the layers to buckets, last layers first, and create their state.

        Args:
            left_out: places of layers that get no bucket.
            apart: places of layers that get one of their own, which a step may leave out; those
                whose compressor takes the whole model are ignored.
        """
        self.left_out = sorted(left_out)
        target = GPU_BUCKET_BYTES if tf.config.list_physical_devices("GPU") else BUCKET_BYTES
        ranks = self.participants.rank_and_size[1]
        self.assigned = assignment.assign(self.compressor, self.layers, ranks, filters_last=True)
        self.apart = [p for p in sorted(apart) if not self.assigned[p].whole_model]
        everywhere = set(range(len(self.layers)))
        planned = [
            each
            for some in (everywhere - {*self.apart}, *({place} for place in self.apart))
            for each in assignment.plan(
                self.compressor,
                self.layers,
                target,
                left_out={*left_out, *(everywhere - some)},
                ranks=ranks,
                filters_last=True,
            )
        ]
        places = {name: place for place, (name, _, _) in enumerate(self.layers)}
        with tf.init_scope():
            self.buckets = [
                self._bucket(number, compressor, layout, [places[name] for name in layout.names])
                for number, (compressor, layout) in enumerate(planned)
            ]
            if self._keeps_snapshot:
                self.snapshot = StateSnapshot(self.variables)

    def _bucket(
        self, number: int, planned: Compressor, layout: Layout, places: list[int]
    ) -> Bucket:
        place = self.participants.place
        leader = 0 if place is None else number % place.slots
        compressor = planned if self.participants.leads(leader) else NoneCompressor()
        template = compressor.start(self.ops, layout, self.participants.rank_and_size[1])
        variables = []
        for path, value in leaves(template):
            title = f"gradcomp_{number}_{path.replace('.', '_')}"
            variable = self._make_variable(title, value)
            variables.append(variable)
            # With hosts, only the leaders have the replicated state.
            if place or not is_replicated(compressor, path):
                keep_local(variable)
        return Bucket(
            naming.bucket(self.name, number, layout),
            layout,
            places,
            planned,
            leader,
            compressor,
            template,
            variables,
        )

    def rename(self, name: str) -> None:
        """Change the prefix of the names of what travels."""
        self.name = name
        self.buckets = [
            replace(bucket, name=naming.bucket(name, number, bucket.layout))
            for number, bucket in enumerate(self.buckets)
        ]

    @property
    def layouts(self) -> list[Layout]:
        """Return the layout of each bucket."""
        return [bucket.layout for bucket in self.buckets]

    @property
    def variables(self) -> list[tf.Variable]:
        """Return the state of all buckets."""
        return [variable for bucket in self.buckets for variable in bucket.variables]

    @property
    def keeps_local(self) -> bool:
        """Return True if a compressor keeps state that belongs to this rank alone."""
        return any(map(is_rank_local, self.variables))

    @property
    def replicated(self) -> list[tuple[str, tf.Variable]]:
        """Return the state variables that are equal on all ranks that have them, by name."""
        return [
            pair
            for number, bucket in enumerate(self.buckets)
            for pair in verify.replicated(
                number,
                bucket.compressor,
                bucket.layout,
                with_leaves(bucket.template, bucket.variables),
            )
        ]

    @property
    def counters(self) -> list[tf.Variable]:
        """Return the integers of the states that are equal on all ranks; they tell the phase."""
        if self.participants.place is not None:
            return []
        return [
            variable
            for bucket in self.buckets
            for path, variable in bucket.named_variables()
            if variable.dtype.is_integer
            and variable.shape.rank == 0
            and is_replicated(bucket.compressor, path)
        ]

    def learned_by_one(self, steps: int) -> list[tuple[tf.Variable, int]]:
        """Return variables whose value on one rank counts for all after `steps`, and that rank."""
        process_set = self.participants.process_set
        ranks = process_set.ranks or range(process_set.size())
        return [
            (variable, ranks[owner])
            for bucket in self.buckets
            for path, variable in bucket.named_variables()
            if is_rank_local(variable) and self.participants.place is None
            if (owner := owner_of(bucket.compressor, path, steps)) is not None
        ]

    def rollback(self) -> None:
        """Restore the state before the last exchange, bit-exact."""
        if self.snapshot is not None:
            self.snapshot.restore()

    def reset_local(self, counts: bool = True) -> None:
        """Reset what belongs to this rank alone to its value before the first step.

        Args:
            counts: whole numbers too, such as those of elements that were sent.
        """
        for bucket in self.buckets:
            for variable, (_, value) in zip(bucket.variables, leaves(bucket.template)):
                if is_rank_local(variable) and (counts or variable.dtype.is_floating):
                    variable.assign(value)

    def retrain(self, steps: int) -> None:
        """Let the compressors learn anew, from step `steps` on."""
        for bucket in self.buckets:
            bucket.assign(retrained(bucket.compressor, self.ops, bucket.state, steps))

    def resize(self, steps: int) -> set[Compressor]:
        """Adapt the state to another number of ranks.

        Returns:
            The compressors that have to learn anew.

        Raises:
            ValueError: on all ranks, if a compressor cannot work with so many.
        """
        ranks, anew = self.participants.process_set.size(), set()
        for bucket in self.buckets:
            before = bucket.state
            after = bucket.compressor.resized(self.ops, before, steps, ranks)
            if after is before:
                continue
            anew.add(bucket.compressor)
            for variable, (path, value) in zip(bucket.variables, leaves(after)):
                if variable.shape != value.shape:
                    raise ValueError(
                        f"a compressor cannot go on with {ranks} ranks on TensorFlow: {path} has "
                        f"one part a rank. Use pattern='ring_allreduce', or PyTorch. It is "
                        f"{bucket.compressor}"
                    )
                variable.assign(value)
        return anew
