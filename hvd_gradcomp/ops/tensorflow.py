"""The verbs in TensorFlow, eager and in a graph.

In a graph, sizes that depend on the step (the capacity of a payload, how many elements are sent)
are int64 scalars: one trace serves all rungs. `static=True` keeps to shapes that are known while
tracing, which XLA needs.

XLA contracts `a + b * c` into a fused multiply-add, which rounds once where everybody else rounds
twice: with `static=True` the products of `square` and `times` are kept apart from what follows.

Composites run in C, as operations (see `native_tensorflow.cc`), where the library is built for this
TensorFlow. They have kernels for a CPU alone: with a GPU in sight, where TensorFlow would bring
tensors to the host for them, and with `static=True`, it is verbs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tensorflow as tf

from hvd_gradcomp.foundation.bands import Bands
from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops import LOGGER, NonFiniteGradientError, Ops, PayloadError, Tensor, building
from hvd_gradcomp.ops.composites import Field
from hvd_gradcomp.ops.tensorflow_passes import TensorFlowLargestPasses, TensorFlowWordPasses

_WORD = 1 << 32
ASSERTION = "hvd_gradcomp"  # begins what a failed check says in a graph


@lru_cache(maxsize=1)
def library() -> Any:
    """The operations in C, or None."""
    if os.environ.get("HVD_GRADCOMP_NATIVE") == "0":
        return None
    path = building.HERE / building.operations(tf.__version__)
    if path.exists():
        try:
            return tf.load_op_library(str(path))
        except (tf.errors.OpError, RuntimeError) as error:
            LOGGER.warning(
                "%s does not load, compression is slower without: %s. `hvd-gradcomp build "
                "--anew` builds it for what is installed now",
                path,
                error,
            )
            return None
    found = building.others(tf.__version__)
    LOGGER.info(
        "hvd_gradcomp's operations are not built for TensorFlow %s%s: compression is slower. "
        "`hvd-gradcomp build` builds them",
        tf.__version__,
        f", only for {', '.join(found)}" if found else "",
    )
    return None


class TensorFlowOps(Ops):
    """TensorFlow, wherever its tensors live.

    Args:
        static: only shapes that are known while tracing, for XLA.

    Attributes:
        verdicts: where a step may be left out, whether all gradients were finite: a bool scalar
            for each check of the function that is being traced. None makes it an error.
    """

    def __init__(self, static: bool = False) -> None:
        self.dynamic_shapes = not static
        on_host = self.dynamic_shapes and not tf.config.get_visible_devices("GPU")
        self.native = library() if on_host else None
        if self.native is not None:
            self.word_passes = TensorFlowWordPasses(self.native)
            self.largest_passes = TensorFlowLargestPasses(self.native)
        self.verdicts: list[Tensor] | None = None

    def zeros(self, shape: Sequence[Any], dtype: str = "float32") -> Tensor:
        return tf.zeros(_shape(shape), tf.as_dtype(dtype))

    def full(self, shape: Sequence[Any], value: Any, dtype: str = "int64") -> Tensor:
        return tf.fill(_shape(shape), tf.cast(value, tf.as_dtype(dtype)))

    def arange(self, count: Any) -> Tensor:
        return tf.range(tf.cast(count, tf.int64), dtype=tf.int64)

    def table(self, layout: Layout, field: str) -> Tensor:
        return tf.constant(getattr(layout, field), tf.int64)

    def words(self, values: Sequence[Any]) -> Tensor:
        if all(isinstance(value, int) for value in values):
            return tf.constant(values, tf.int64)
        return tf.stack([_integer(value) for value in values])

    def reals(self, values: Sequence[float]) -> Tensor:
        return tf.constant(values, tf.float32)

    def host(self, value: Any) -> Tensor:
        return tf.cast(value, tf.int64)

    def abs(self, x: Tensor) -> Tensor:
        return tf.abs(x)

    def square(self, x: Tensor) -> Tensor:
        return self._rounded(x * x)

    def times(self, x: Tensor, factor: float) -> Tensor:
        return self._rounded(x * factor)

    def _rounded(self, product: Tensor) -> Tensor:
        """The product itself. A choice between it and NaN is one that no compiler looks through."""
        if self.dynamic_shapes:
            return product
        return tf.where(product == product, product, float("nan"))

    def log2(self, x: Tensor) -> Tensor:
        return tf.math.log(x) / tf.math.log(tf.constant(2.0, x.dtype))

    def sqrt(self, x: Tensor) -> Tensor:
        return tf.sqrt(x)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        return tf.maximum(x, y)

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        return tf.minimum(x, y)

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return tf.where(condition, *_alike(x, y))

    def greater(self, x: Tensor, y: Any) -> Tensor:
        return x > y

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        if tf.executing_eagerly() or not self.dynamic_shapes:
            return x + y
        # TensorFlow's graph optimizer sums a chain of additions in another order; not this one.
        row = tf.expand_dims(x, 0)
        return tf.squeeze(tf.tensor_scatter_nd_add(row, [[0]], tf.expand_dims(y, 0)), 0)

    def clear(self, x: Tensor) -> Tensor:
        return tf.zeros_like(x)

    def scale(self, x: Tensor, factor: Any) -> Tensor:
        return self._rounded(x * factor)

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return tf.cast(x, dtype)

    def split_bits(self, x: Tensor, low: int) -> tuple[Tensor, Tensor]:
        amount = tf.constant(low, tf.int64)
        return tf.bitwise.right_shift(x, amount), tf.bitwise.bitwise_and(x, (1 << low) - 1)

    def shift_right(self, x: Tensor, amount: Tensor) -> Tensor:
        return tf.bitwise.right_shift(x, amount)

    def xor(self, x: Tensor, y: Any) -> Tensor:
        return tf.bitwise.bitwise_xor(x, tf.cast(y, x.dtype))

    def float_bits(self, x: Tensor) -> Tensor:
        return tf.cast(tf.bitcast(x, tf.int32), tf.int64) % _WORD

    def bits_float(self, bits: Tensor) -> Tensor:
        return tf.bitcast(_low_word(bits), tf.float32)

    def reshape(self, x: Tensor, shape: Sequence[Any]) -> Tensor:
        return tf.reshape(x, _shape(shape))

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return tf.concat(list(xs), -1)

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return tf.stack(list(xs))

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return tf.gather(x, index)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return tf.gather(x, index, axis=1, batch_dims=1)

    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        updates = tf.zeros_like(index, x.dtype) + tf.cast(values, x.dtype)
        return tf.tensor_scatter_nd_update(x, index[:, None], updates)

    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        del x
        return y

    def assemble(self, room: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        return tf.concat([tf.reshape(x, (-1,)) for x in pieces], 0)[: room.shape[0]]

    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        y = y[: max(x.shape[0] - start, 0)]
        end = start + y.shape[0]
        return tf.concat((x[:start], self.accumulate(x[start:end], y), x[end:]), 0)

    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return tf.tensor_scatter_nd_add(x, index[:, None], values)

    def clear_last(self, x: Tensor) -> Tensor:
        return tf.concat((x[:-1], tf.zeros_like(x[-1:])), 0)

    def sum(self, x: Tensor, axis: int | None = None) -> Tensor:
        return tf.reduce_sum(x, axis)

    def max(self, x: Tensor, axis: int | None = None) -> Tensor:
        return tf.reduce_max(x, axis)

    def min(self, x: Tensor, axis: int) -> Tensor:
        return tf.reduce_min(x, axis)

    def cumsum(self, x: Tensor) -> Tensor:
        return tf.cumsum(x)

    def sort(self, x: Tensor) -> Tensor:
        return tf.sort(x)

    def count_below(self, ascending: Tensor, x: Tensor) -> Tensor:
        return tf.searchsorted(ascending, x, out_type=tf.int64)

    def largest(self, x: Tensor, k: int) -> Tensor:
        return tf.math.top_k(x, k).values

    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        magnitude = tf.reshape(tf.abs(x), (bound.shape[0], -1))
        return self.nonzero(tf.reshape((magnitude >= bound[:, None]) & (magnitude > 0), (-1,)))

    def finite(self, x: Tensor) -> Any:
        if self.native is not None and x.dtype == tf.float32:
            finite = self.native.gradcomp_finite(x)
        else:
            finite = tf.reduce_all(tf.math.is_finite(x))
        return bool(finite) if tf.executing_eagerly() else finite

    def nonzero(self, mask: Tensor) -> Tensor:
        return tf.where(mask)[:, 0]

    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return tf.maximum(tf.math.unsorted_segment_max(x, segment, count), 0)

    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return tf.math.unsorted_segment_sum(x, segment, count)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.matmul(x, y)

    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return tf.matmul(x, y) + row

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.reduce_sum(tf.reshape(x, (-1,)) * tf.reshape(y, (-1,)))

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return tf.transpose(x, list(axes))

    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = tf.linalg.eigh(x)
        return values, vectors

    def orthogonalize(self, x: Tensor) -> Tensor:
        q, r = tf.linalg.qr(x)
        turned = tf.cast(tf.linalg.diag_part(r) < 0, q.dtype)[..., tf.newaxis, :]
        return q * (1.0 - 2.0 * turned)

    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        leaves = [tf.identity(parameter) for parameter in parameters]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            values = function(*leaves)
        return values, list(tape.gradient(values[0], leaves))

    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype == "uint8":
            return tf.cast(x, tf.uint8)
        narrow = _low_word(x) if dtype == "uint32" else tf.cast(x, tf.as_dtype(dtype))
        data = tf.bitcast(narrow, tf.uint8)
        return data if dtype == "int8" else tf.reshape(data, _shape((*_head(x), -1)))

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype == "uint8":
            return tf.cast(x, tf.int64)
        if dtype == "int8":
            return tf.cast(tf.bitcast(x, tf.int8), tf.int64)
        wide = tf.int32 if dtype == "uint32" else tf.as_dtype(dtype)
        items = tf.bitcast(tf.reshape(x, _shape((*_head(x), -1, wide.size))), wide)
        return tf.cast(items, tf.int64) % _WORD if dtype == "uint32" else items

    def length(self, x: Tensor) -> Any:
        known = x.shape[-1]
        return tf.shape(x, tf.int64)[-1] if known is None else known

    def search(
        self,
        body: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        donated: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
        bound: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        flags, settled = body(*donated, *given)
        if bound is not None:
            return self.find(flags, bound), settled
        return (self.nonzero(flags) if self.dynamic_shapes else flags), settled

    def sweep(
        self,
        body: Callable[..., tuple[Tensor, ...]],
        donated: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        return body(*donated, *given)

    def cond(self, dense: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        if isinstance(dense, bool):
            return if_true() if dense else if_false()
        return tf.cond(dense, if_true, if_false)

    def map_bytes(self, function: Callable[[bytes], bytes], data: Tensor) -> Tensor:
        if tf.executing_eagerly():
            return tf.io.decode_raw(function(data.numpy().tobytes()), tf.uint8)
        # Not tf.py_function: it runs operations of its own, and waits for a thread to do so.
        result = tf.numpy_function(lambda given: function(given.tobytes()), [data], tf.string)
        return tf.reshape(tf.io.decode_raw(result, tf.uint8), (-1,))

    def warn(self, condition: Any, message: str) -> None:
        def log() -> bool:
            LOGGER.warning("%s", message)
            return True

        if isinstance(condition, bool) or tf.executing_eagerly():
            if bool(condition):
                log()
        else:
            tf.cond(condition, lambda: tf.numpy_function(log, [], tf.bool), lambda: False)

    def stage(self, x: Tensor) -> Tensor:
        return x

    def staged(self, x: Tensor) -> Any:
        return int(x) if tf.executing_eagerly() else x

    def pick(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, bool):
            return x if condition else y
        return tf.where(condition, tf.cast(x, tf.int64), tf.cast(y, tf.int64))

    def bisect(self, ascending: Sequence[int], x: Any) -> Any:
        if isinstance(x, int):
            return sum(value < x for value in ascending)
        return tf.reduce_sum(tf.cast(tf.constant(ascending, tf.int64) < x, tf.int64))

    def choice(self, values: Sequence[int], index: Any) -> Any:
        return (
            values[index]
            if isinstance(index, int)
            else tf.gather(tf.constant(values, tf.int64), index)
        )

    def require(
        self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError
    ) -> Tensor | None:
        if error is NonFiniteGradientError and self.verdicts is not None:
            finite = tf.reduce_all(tf.stack(list(facts.values())), 0)
            self.verdicts.append(tf.reduce_all(finite))
            return finite
        if tf.executing_eagerly():
            for message, held in facts.items():
                if not bool(tf.reduce_all(held)):
                    ranks = tf.where(~held)[:, 0].numpy().tolist()
                    raise error(message.replace("{ranks}", ", ".join(map(str, ranks))))
            return None
        # In a graph the sum depends on the assertion, so nothing is assigned before it holds. One
        # for all facts, and not `tf.debugging.Assert`, which traces two functions for each.
        texts = [
            f"{ASSERTION}: {message.replace('rank {ranks}', 'a rank')}; fine by rank:"
            for message in facts
        ]
        if len(facts) == 1:
            (held,) = facts.values()
            with tf.control_dependencies([assertion(tf.reduce_all(held), texts[0], held)]):
                return tf.identity(held)
        held = tf.stack(list(facts.values()))  # [facts, world]
        fine = tf.reduce_all(held, 1)
        first = tf.argmin(tf.cast(fine, tf.int32))
        what, by_rank = tf.gather(texts, first), tf.gather(held, first)
        with tf.control_dependencies([assertion(tf.reduce_all(fine), what, by_rank)]):
            return tf.reduce_all(held, 0)

    def found_finite(self) -> Any:
        return tf.reduce_all(tf.stack(self.verdicts)) if self.verdicts else True

    @property
    def climb(self) -> Any:
        """In a graph one operation in place of sixty."""
        return None if self.native is None or tf.executing_eagerly() else self._climb

    def _climb(self, capacities: Sequence[int], patience: int, state: Sequence[Tensor]) -> Any:
        assert self.native is not None
        return self.native.gradcomp_climb(list(state), capacities=capacities, patience=patience)

    # -- buckets -------------------------------------------------------------------------------

    def flatten(self, layout: Layout, values: Sequence[Tensor | None], dtype: str) -> Tensor:
        """The layers' values as the bucket: [layout.size], zeros where there are none."""
        known = [
            (tf.cast(value, dtype), size, start)
            for value, size, start in zip(values, layout.sizes, layout.offsets)
            if value is not None
        ]
        if not known:
            return tf.zeros((layout.size,), dtype)
        if self.native is not None and dtype == "float32":
            pieces, _, offsets = zip(*known)
            return self.native.gradcomp_flatten(pieces, offsets=offsets, size=layout.size)
        flat, end = [], 0
        for value, size, start in known:
            flat += [tf.zeros((start - end,), dtype)] if start > end else []
            flat.append(tf.reshape(value, (size,)))
            end = start + size
        flat += [tf.zeros((layout.size - end,), dtype)] if layout.size > end else []
        return tf.concat(flat, 0)

    def cut(self, layout: Layout, bucket: Tensor) -> Sequence[Tensor]:
        """The inverse of `flatten`."""
        if self.native is not None and bucket.dtype == tf.float32:
            shapes, offsets = list(layout.shapes), list(layout.offsets)
            return self.native.gradcomp_cut(
                bucket, count=len(shapes), offsets=offsets, shapes=shapes
            )
        return [
            tf.reshape(tf.slice(bucket, [start], [size]), shape)
            for size, start, shape in zip(layout.sizes, layout.offsets, layout.shapes)
        ]

    # -- shadows of composites -----------------------------------------------------------------

    def outputs_first(self, layout: Layout, x: Tensor, back: bool = False) -> Tensor:
        if self.native is None:
            return super().outputs_first(layout, x, back)
        offsets = [start for start, *_ in layout.stored_outputs_last]
        axes = [n for _, *sizes in layout.stored_outputs_last for n in sizes[:: -1 if back else 1]]
        return self.native.gradcomp_turn(x, offsets=offsets, axes=axes)

    def leaky_relu(self, x: Tensor, slope: float) -> Tensor:
        return tf.nn.leaky_relu(x, slope)

    def bit_planes(self, groups: Tensor, bits: int) -> Tensor:
        if self.native is None:
            return super().bit_planes(groups, bits)
        return self.native.gradcomp_bit_planes(groups, bits=bits)

    def from_bit_planes(self, planes: Tensor) -> Tensor:
        if self.native is None:
            return super().from_bit_planes(planes)
        return self.native.gradcomp_from_bit_planes(planes)

    def framed(self, words: Tensor, body: Tensor) -> Tensor:
        if self.native is None:
            return super().framed(words, body)
        return self.native.gradcomp_frame(words, body)

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        if self.native is None:
            return super().examine(frames, count, fields, expected)
        numbers = [number for field in fields for number in field]
        given = frames, self.words(expected)
        words, held = self.native.gradcomp_examine(*given, count=count, fields=numbers)
        return words, tf.unstack(held, 1 + len(fields))

    def key(self, step: Any, salt: int) -> Tensor:
        if self.native is None:
            return super().key(step, salt)
        return self.native.gradcomp_key(_integer(step), salt=salt)

    def weighted_sum(self, data: Tensor) -> Tensor:
        if self.native is None:
            return super().weighted_sum(data)
        return self.native.gradcomp_weighted_sum(data)

    def group_maxima(self, bands: Bands, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_maxima(bands, x)
        return self.native.gradcomp_group_maxima(x, bands=_numbers(bands))

    def group_squares(self, bands: Bands, x: Tensor) -> Tensor:
        if self.native is None:
            return super().group_squares(bands, x)
        return self.native.gradcomp_group_squares(x, bands=_numbers(bands))

    def layer_histograms(self, layout: Layout, x: Tensor, bins: int) -> Tensor:
        if self.native is None:
            return super().layer_histograms(layout, x, bins)
        bands = [n for start, size in zip(layout.offsets, layout.sizes) for n in (start, 1, size)]
        return self.native.gradcomp_layer_histograms(x, bands=bands, bins=bins)

    def encode_levels(
        self, bands: Bands, x: Tensor, scale: Tensor, bits: int, key: Tensor
    ) -> Tensor:
        if self.native is None:
            return super().encode_levels(bands, x, scale, bits, key)
        return self.native.gradcomp_encode_levels(x, scale, key, bands=_numbers(bands), bits=bits)

    def add_levels(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        if self.native is None:
            return super().add_levels(bands, base, room, packed, scale, bits, weights)
        return self.native.gradcomp_add_levels(
            room if base is None else base,
            packed,
            scale,
            weights,
            bands=_numbers(bands),
            bits=bits,
            from_zero=base is None,
        )

    def encode_signs(self, bands: Bands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.native is None:
            return super().encode_signs(bands, x)
        above, below, packed = self.native.gradcomp_encode_signs(x, bands=_numbers(bands))
        return above, below, packed

    def add_signs(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if self.native is None:
            return super().add_signs(bands, base, room, packed, above, below, weights)
        return self.native.gradcomp_add_signs(
            room if base is None else base,
            packed,
            above,
            below,
            weights,
            bands=_numbers(bands),
            from_zero=base is None,
        )


def _numbers(bands: Bands) -> list[int]:
    """The bands as C sees them."""
    return [number for band in bands.bands for number in band]


def assertion(condition: Tensor, *said: Any) -> Any:
    """The operation that fails where a condition does not hold, saying so; of a graph."""
    return tf.raw_ops.Assert(condition=condition, data=list(said), summarize=64)


def _shape(shape: Sequence[Any]) -> Any:
    """Python integers as they are; a vector where one is a tensor."""
    if all(isinstance(extent, int) for extent in shape):
        return tuple(shape)
    return tf.stack([tf.cast(extent, tf.int64) for extent in shape])


def _integer(value: Any) -> Tensor:
    """As int64; of a graph one node for what is known."""
    return tf.constant(value, tf.int64) if isinstance(value, int) else tf.cast(value, tf.int64)


def _head(x: Tensor) -> tuple[Any, ...]:
    """All axes but the last."""
    if x.shape[:-1].is_fully_defined():
        return tuple(x.shape[:-1])
    return tuple(tf.unstack(tf.shape(x, tf.int64)[:-1]))


def _alike(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors of the dtype that one of them has."""
    if isinstance(x, tf.Tensor):
        return x, tf.cast(y, x.dtype)
    if isinstance(y, tf.Tensor):
        return tf.cast(x, y.dtype), y
    return tf.constant(x, tf.int64), tf.constant(y, tf.int64)


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits of int64 in [0, 2**32) as int32, by arithmetic that cannot overflow."""
    return tf.cast(tf.where(x > 0x7FFFFFFF, x - _WORD, x), tf.int32)
