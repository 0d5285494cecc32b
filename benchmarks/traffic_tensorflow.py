"""Memory traffic and launches of a step on a GPU by TensorFlow, counted without one.

    python -m benchmarks.traffic_tensorflow                          # prints the table
    python -m benchmarks.traffic_tensorflow --folder docs/measured   # and writes it there
    python -m benchmarks.traffic_tensorflow --only Strom QSGD

Methods, buckets and units are those of `benchmarks.traffic`. Nothing is run, all shapes are known
while tracing: where a method finds elements, it is told that it has found one in 500.

`ops` is what TensorFlow takes on a GPU. Each node of the graph is a launch that reads its inputs
and writes its results once, but for those that only look at memory in another shape, and those that
depend on nothing but constants, which TensorFlow computes once. What is done seldom is left out: a
scan once more where the hint misled, a look at the entropy.

`XLA` is the static ops of a whole step in one function that XLA compiles, without the texts that
a failed check says. Each instruction that is left is a launch; of a loop, as often as it runs. No
frontend takes it: Horovod's collectives are no XLA operations. And it is XLA's compiler for CPUs
that fuses here. The one for GPUs cannot be asked without one; it fuses more (several results
of one walk, other sorts), so its figures would be lower.

`ms` is what a step's work takes on an H100, at the times of a copy and of a launch that PyTorch's
ops had on one (`h100.json`; TensorFlow has run on none), and `Gb/s` the link between two ranks
below which the whole exchange takes less than a dense one, by the model of `hvd-gradcomp advise`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from benchmarks.traffic import METHODS, RANKS, RATIO, SECTOR, Count, buckets
from hvd_gradcomp import Compressor
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.core.cost_model import Bucket, Dense, Link, Way, break_even
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context, leaves, with_leaves
from hvd_gradcomp.ops import PayloadError
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.runtime.program_runner import ProgramRunner

MEASURED = Path(__file__).parents[1] / "docs" / "measured"
PASSING = 1.3  # elements that reach the hint, by those that are sent; see `codecs.exact`
FOLDED = 100 << 10  # bytes: what is computed of constants is kept up to here
HALVES = ("encode", "decode")
LINKS = (1, 10, 25, 100)  # Gb/s


class Told(TensorFlowOps):
    """The plain ops as on a GPU, without passes; they are told how many elements are found.

    Args:
        layout: of the bucket.
        static: see `TensorFlowOps`.
    """

    def __init__(self, layout: Layout, static: bool) -> None:
        super().__init__(static)
        self.native = self.threshold_kernels = self.topk_kernels = None
        self.size, self.wanted, self.passing = layout.size, layout.size // RATIO, 0

    def nonzero(self, mask: tf.Tensor) -> tf.Tensor:
        whole = mask.shape[0] == self.size
        index = tf.where(mask)
        index.set_shape((self.passing if whole else min(self.wanted, mask.shape[0]), 1))
        return index[:, 0]

    def staged(self, x: tf.Tensor) -> Any:
        known = tf.get_static_value(x)
        return x if known is None else int(known)

    def cond(self, dense: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Skip rare branches: a repeated scan, a look at the entropy."""
        return if_true() if dense is True else if_false()

    def require(self, facts: Any, error: type[Exception] = PayloadError) -> Any:
        """XLA has no texts to fail with."""
        if self.dynamic_shapes:
            return super().require(facts, error)
        return tf.reduce_all(tf.stack(list(facts.values())), 0)


class Step:
    """A step of one of two ranks on one bucket."""

    def __init__(self, compressor: Compressor, layout: Layout) -> None:
        self.compressor, self.layout = compressor, layout
        with tf.Graph().as_default():
            ops = TensorFlowOps(static=True)
            self.template = compressor.start(ops, layout, RANKS)
            kept = [tf.TensorSpec(x.shape, x.dtype) for _, x in leaves(self.template)]
        self.has_moments = compressor.uses_moments and getattr(compressor, "moments", "") != "step"
        bucket = tf.TensorSpec((layout.size,), tf.float32)
        self.inputs = [tf.TensorSpec((), tf.int64), *[bucket] * (1 + self.has_moments), *kept]
        self.payload = 0  # bytes, once it has been traced

    def plain(self) -> dict[str, Count]:
        """As TensorFlow takes it on a GPU."""

        def reply(sent: tf.Tensor) -> tf.Tensor:
            self.payload = sent.shape[0]
            return tf.compat.v1.placeholder(tf.uint8, (RANKS, self.payload))

        step = tf.function(lambda *inputs: self._trace(False, reply, *inputs), autograph=False)
        return of_graph(step.get_concrete_function(*self.inputs).graph)

    def xla(self) -> dict[str, Count]:
        """The static ops, compiled. Traced by ops before, since only then its size is known.

        Raises:
            ValueError: XLA does not compile it.
        """
        reply = tf.TensorSpec((RANKS, self.payload), tf.uint8)
        step = tf.function(
            lambda reply, *inputs: self._trace(True, lambda _: reply, *inputs),
            autograph=False,
            jit_compile=True,
        )
        return of_hlo(optimized(step, reply, *self.inputs))

    def _trace(self, static: bool, reply: Callable[[Any], Any], number: Any, *inputs: Any) -> Any:
        compressor, layout = self.compressor, self.layout
        ops = Told(layout, static)
        gradient, *inputs = inputs
        extra = {"moment": inputs.pop(0)} if self.has_moments else {}
        with tf.name_scope("encode"):
            state = self._state(ops, inputs)
            context = Context(layout, 0, RANKS, number, 1.0, 1.0 / RANKS)
            stack = ProgramRunner(compressor.aggregate(ops, context, gradient, state, **extra))
            request = stack.send(None)
        if not isinstance(request, Allgather):
            raise AssertionError(f"{compressor!r} asks for {type(request).__name__}")
        with tf.name_scope("decode"):
            if stack.send(reply(request.tensor)) is not None:
                raise AssertionError("more than one collective")
        total, state = stack.result
        return request.tensor, total, [x for _, x in leaves(state)]

    def _state(self, ops: Told, values: Sequence[tf.Tensor]) -> Any:
        """At the level with room for one element in 500, or on the last."""
        state = with_leaves(self.template, list(values))
        if not hasattr(state, "capacity"):
            return state
        schedule = self.compressor.capacity_schedule(self.layout, RANKS)
        if ops.dynamic_shapes:  # where the level is not known while tracing, that costs nodes
            schedule.next_level(ops, state.capacity)
        capacity = self.compressor.capacity(self.layout) if hasattr(state, "hint") else ops.wanted
        ops.passing = int(capacity * (PASSING if hasattr(state, "hint") else 1))
        needed = ops.wanted = min(capacity, schedule.capacities[-1])
        numbers = {"level": ops.bisect(schedule.capacities, needed), "needed": needed}
        known = dict.fromkeys(state.capacity._fields, 0) | numbers
        return state._replace(
            capacity=type(state.capacity)(**{k: tf.constant(v, tf.int64) for k, v in known.items()})
        )


# -- a graph -------------------------------------------------------------------------------

_VIEWS = {"Bitcast", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "Reshape", "Squeeze"}
_SHAPES = {"Const", "Rank", "Shape", "ShapeN", "Size"}
_WRITING = {"Fill", "Range", "ZerosLike", "OnesLike"}
_PARTS = {"Slice", "Split", "SplitV", "StridedSlice", "Unpack"}
_GATHERS = {"GatherNd", "GatherV2"}
_SCATTERS = {"TensorScatterAdd", "TensorScatterUpdate"}


def of_graph(graph: tf.Graph) -> dict[str, Count]:
    """Return the bytes that each half's nodes read and write; the others do not count."""
    counts = {half: Count(0, 0) for half in HALVES}
    constant: set[str] = set()
    for node in graph.get_operations():
        half, _, _ = node.name.partition("/")
        outputs = sum(map(_bytes, node.outputs))
        known = all(x.name in constant for x in node.inputs)
        if node.type in _SHAPES or (node.inputs and known and outputs <= FOLDED):
            constant.update(x.name for x in node.outputs)
        elif half in HALVES and node.type not in _VIEWS | {"Placeholder"}:
            moved, launches = _of_node(node, outputs)
            counts[half] = Count(counts[half].moved + moved, counts[half].launches + launches)
    return counts


def _of_node(node: Any, outputs: int) -> Count:
    """One node; a check reads its condition on the host."""
    if any(attribute.type == "func" for attribute in node.op_def.attr):
        raise AssertionError(f"{node.name} calls a function, which is not looked into")
    inputs = list(node.inputs)
    if node.type in _WRITING:
        return Count(outputs, 1)
    if node.type in _PARTS:
        return Count(2 * outputs, 1)
    if node.type in _GATHERS:
        items = sum(x.shape.num_elements() for x in node.outputs)
        index = _bytes(inputs[1])
        return Count(index + min(items * SECTOR, _bytes(inputs[0])) + outputs, 1)
    if node.type in _SCATTERS:
        into, index, updates = inputs
        rows = math.prod(index.shape[:-1])
        moved = _bytes(index) + _bytes(updates) + 2 * max(rows * SECTOR, _bytes(updates))
        return Count(moved, 1) if _is_free(into) else Count(moved + 2 * outputs, 2)
    sizes = {_base(x).name: _bytes(x) for x in inputs}
    return Count(sum(sizes.values()) + outputs, 1)


def _base(x: tf.Tensor) -> tf.Tensor:
    return _base(x.op.inputs[0]) if x.op.type in _VIEWS else x


def _is_free(x: tf.Tensor) -> bool:
    """Return True if nothing else reads it, so that a result may be written to its memory."""
    if x.op.type == "Placeholder" or len(x.consumers()) > 1:
        return False
    return x.op.type not in _VIEWS or _is_free(x.op.inputs[0])


def _bytes(x: tf.Tensor) -> int:
    count = x.shape.num_elements()
    if x.dtype == tf.string:
        return 0
    if count is None:
        raise AssertionError(f"the size of {x.name} is not known: {x.shape}")
    return int(count * x.dtype.size)


# -- what XLA has made -----------------------------------------------------------------------

_NOTHING = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
_LOOKS = {"dynamic-slice", "slice"}  # at a part of their first operand
_WRITES_TO = {"dynamic-update-slice", "scatter"}  # a part of their first operand

Instruction = Any  # `hlo_pb2.HloInstructionProto`


def optimized(function: Any, *inputs: tf.TensorSpec) -> hlo_pb2.HloModuleProto:
    """Return the instructions that XLA compiles a function to."""
    ir = function.experimental_get_compiler_ir(*inputs)(stage="optimized_hlo_proto_serialized")
    return hlo_pb2.HloProto.FromString(ir).hlo_module


def of_hlo(module: hlo_pb2.HloModuleProto) -> dict[str, Count]:
    """Return the bytes that each half reads and writes; a loop counts as often as it runs."""
    computations = {one.id: one for one in module.computations}
    counts = {half: Count(0, 0) for half in HALVES}

    def walk(computation: int, half: str, times: int) -> None:
        known = {one.id: one for one in computations[computation].instructions}
        for one in known.values():
            half = next((h for h in HALVES if f"{h}/" in one.metadata.op_name), half)
            if one.opcode == "while":
                trips = int(json.loads(one.backend_config)["known_trip_count"]["n"])
                walk(one.called_computation_ids[0], half, times * trips)
            elif one.opcode in ("call", "conditional"):
                raise AssertionError(f"{one.name} runs a computation, which is not looked into")
            elif one.opcode not in _NOTHING:
                if one.opcode == "fusion":
                    moved = _of_fusion(computations[one.called_computation_ids[0]])
                else:
                    moved = _written(one, known)
                    for place, i in enumerate(one.operand_ids):
                        shape, written = known[i].shape, _elements(one.shape)
                        moved += _bytes_of(shape, _read(one, place, written, shape))
                count = counts[half]
                counts[half] = Count(count.moved + times * moved, count.launches + times)

    walk(module.entry_computation_id, HALVES[0], 1)
    return counts


def _of_fusion(computation: hlo_pb2.HloComputationProto) -> int:
    """Return the elements of operands and results; intermediate values are never in memory."""
    known = {one.id: one for one in computation.instructions}
    wanted: dict[int, int] = {}  # elements of each; operands come before those that use them
    needed: dict[int, int] = dict.fromkeys(known, 0)
    read = 0
    for one in reversed(known.values()):
        size = _elements(one.shape)
        wanted[one.id] = size if one.id == computation.root_id else min(size, needed[one.id])
        for place, i in enumerate(one.operand_ids):
            needed[i] += _read(one, place, wanted[one.id], known[i].shape)
        if one.opcode == "parameter":
            read += _bytes_of(one.shape, wanted[one.id])
    return read + _written(known[computation.root_id], known)


def _read(one: Instruction, place: int, wanted: int, operand: Any) -> int:
    """Return how many elements of an operand an instruction reads for so many of its own."""
    if place == 0 and one.opcode in _WRITES_TO:
        return 0
    if place == 0 and one.opcode == "gather":
        return wanted * SECTOR // max(_bytes_of(operand, 1), 1)
    if (place == 0 and one.opcode in _LOOKS) or _elements(one.shape) == _elements(operand):
        return wanted
    return _elements(operand)


def _written(one: Instruction, known: dict[int, Instruction]) -> int:
    operands = [known[i] for i in one.operand_ids]
    if one.opcode == "tuple":
        return sum(_written(x, known) for x in operands)
    if one.opcode == "bitcast":
        return _written(operands[0], known)
    if one.opcode == "scatter":
        return 2 * SECTOR * _elements(operands[-1].shape)
    return _size((operands[1] if one.opcode in _WRITES_TO else one).shape)


def _elements(shape: Any) -> int:
    """Return the elements of a shape; of a tuple, their sum."""
    if shape.element_type == xla_data_pb2.TUPLE:
        return sum(map(_elements, shape.tuple_shapes))
    return int(math.prod(shape.dimensions))


def _size(shape: Any) -> int:
    """Bytes."""
    if shape.element_type == xla_data_pb2.TUPLE:
        return sum(map(_size, shape.tuple_shapes))
    return _bytes_of(shape, _elements(shape))


def _bytes_of(shape: Any, elements: int) -> int:
    kind = xla_data_pb2.PrimitiveType.Name(shape.element_type)
    width = 8 if kind == "PRED" else int("".join(filter(str.isdigit, kind)) or 0)
    return min(elements, _elements(shape)) * width // 8


# -- in time -------------------------------------------------------------------------------


class Speed(NamedTuple):
    """Speed of a GPU: seconds of a copy of a gradient of `size` bytes, and of a launch."""

    copy: float
    launch: float
    size: int


def measured_speed() -> Speed:
    """Return the times of PyTorch's plain ops measured on an H100, as multiples of their counts."""
    codecs = json.loads((MEASURED / "h100.json").read_text())["codecs"]
    counted = {
        row["compressor"].partition("(")[0]: row["verbs"]["copies"]
        for row in json.loads((MEASURED / "traffic.json").read_text())
    }
    copy = statistics.median(row["copy_ms"] for row in codecs)
    launches = [
        (row["ms"] - copy * counted[name]) / row["launches"]
        for row in codecs
        if (name := row["method"].partition("(")[0]) in counted
    ]
    return Speed(1e-3 * copy, 1e-3 * statistics.median(launches), codecs[0]["bytes"])


def costs_of(steps: Sequence[Step], parts: Sequence[dict[str, Count]], speed: Speed) -> Way:
    """An exchange as `advise` models it, from what is moved and launched."""

    def seconds(count: Count) -> float:
        return count.moved / (2 * speed.size) * speed.copy + count.launches * speed.launch

    round_ = [
        Bucket(0.0, tuple(seconds(p[half]) for half in HALVES), (("allgather", s.payload),))
        for s, p in zip(steps, parts)
    ]
    return Way("", {RANKS: [[round_]] * RANKS})


def dense_seconds(size: float, bandwidth: float) -> float:
    """An exchange of so many bytes without compression."""
    return Dense("", [(0.0, size)]).seconds(Link.of(bandwidth, RANKS), RANKS)


def summary(
    steps: Sequence[Step], parts: Sequence[dict[str, Count]], speed: Speed
) -> dict[str, Any]:
    """All buckets of a method, by one way to run it."""
    one = 8 * sum(step.layout.elements for step in steps)
    encode, decode = (sum(p[half].moved for p in parts) / one for half in HALVES)
    launches = [sum(p[half].launches for half in HALVES) for p in parts]
    costs = costs_of(steps, parts, speed)

    def saved(bandwidth: float) -> float:
        return dense_seconds(one / 2, bandwidth) - costs.seconds(Link.of(bandwidth, RANKS), RANKS)

    work = sum(sum(bucket.work) for bucket in costs.costs[RANKS][0][0])
    return {
        "encode": round(encode, 2),
        "decode": round(decode, 2),
        "copies": round(encode + decode, 2),
        "launches": max(launches),
        "launches_of_a_step": sum(launches),
        "ms": round(1e3 * work, 2),
        "pays_below_gbits": round(break_even(saved) / 1e9, 2),
    }


def rows(only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A row a method: what it moves by plain ops, and under XLA or why it cannot."""
    speed = measured_speed()
    for name, (compressor, _, _) in METHODS.items():
        if only and not any(name.lower().startswith(word.lower()) for word in only):
            continue
        steps = [Step(compressor, layout) for layout in buckets(compressor)]
        row: dict[str, Any] = {"method": name, "compressor": repr(compressor)}
        row["verbs"] = summary(steps, [step.plain() for step in steps], speed)
        try:
            row["xla"] = summary(steps, [step.xla() for step in steps], speed)
        except ValueError as error:
            row["xla"] = {"error": str(error).partition("\n")[0]}
        row["payload_bytes"] = sum(step.payload for step in steps)
        yield row


def table(table_rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown, in 80 columns."""
    lines = [
        "| method | plain ops: copies | launches | ms | Gb/s | XLA | launches | ms | Gb/s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in table_rows:
        cells = [row["method"]]
        for ways in (row["verbs"], row["xla"]):
            if "error" in ways:
                cells += ["no", "", "", ""]
                continue
            cells += [f"{ways['copies']:.1f}", str(ways["launches"])]
            cells += [f"{ways['ms']:.0f}", f"{ways['pays_below_gbits']:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD")
    parser.add_argument("--folder", type=Path, default=None, help="where to write both files")
    options = parser.parse_args(arguments)
    table_rows = []
    for row in rows(options.only):
        print(row["method"], file=sys.stderr)
        table_rows.append(row)
    speed = measured_speed()
    dense = {gbits: round(1e3 * dense_seconds(speed.size, 1e9 * gbits), 1) for gbits in LINKS}
    print(table(table_rows))
    print("dense:", ", ".join(f"{ms} ms at {gbits} Gb/s" for gbits, ms in dense.items()))
    print(f"a copy takes {1e3 * speed.copy:.3f} ms, a launch {1e6 * speed.launch:.1f} us")
    if options.folder:
        content = {"speed": speed._asdict(), "dense_ms_by_gbits": dense, "rows": table_rows}
        for name, text in (
            ("json", json.dumps(content, indent=1) + "\n"),
            ("txt", table(table_rows)),
        ):
            (options.folder / f"traffic-tensorflow.{name}").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
