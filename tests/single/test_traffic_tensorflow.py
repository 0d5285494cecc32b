"""What `benchmarks.traffic_tensorflow` counts of functions whose traffic is known."""

from __future__ import annotations

import pytest
import tensorflow as tf

from benchmarks.traffic import Count
from benchmarks.traffic_tensorflow import HALVES, Step, of_graph, of_hlo, optimized
from hvd_gradcomp import StromCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.tensorflow import TensorFlowOps

pytestmark = pytest.mark.skipif(
    tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16),
    reason="older versions do not show what XLA makes of shapes alone",
)

N = 1 << 20
COPY = 2 * 4 * N
NOTHING = Count(0, 0)


def chain(x):
    return tf.sqrt(tf.abs(x) * 2.0)


def graph_of(function, *inputs):
    return of_graph(decoding(function).get_concrete_function(*inputs).graph)


def compiled(function, *inputs):
    return of_hlo(optimized(decoding(function, jit_compile=True), *inputs))


def decoding(function, **how):
    def scoped(*inputs):
        with tf.name_scope("decode"):
            return function(*inputs)

    return tf.function(scoped, autograph=False, **how)


FLOATS = tf.TensorSpec((N,), tf.float32)
FEW = tf.TensorSpec((100,), tf.int64)


@pytest.mark.parametrize("count", [graph_of, compiled])
def test_one_node_is_a_copy_and_is_of_its_half(count):
    assert count(tf.abs, FLOATS) == dict(zip(HALVES, (NOTHING, Count(COPY, 1))))


def test_a_chain_is_one_copy_a_node_and_one_in_all_where_it_is_fused():
    assert graph_of(chain, FLOATS)["decode"] == (3 * COPY + 4, 3)
    assert compiled(chain, FLOATS)["decode"] == (COPY, 1)


@pytest.mark.parametrize("count", [graph_of, compiled])
def test_a_gather_reads_what_it_touches_and_a_scatter_copies_what_others_read(count):
    assert count(tf.gather, FLOATS, FEW)["decode"].moved < COPY / 100

    def spread(x, index):
        return tf.tensor_scatter_nd_add(x, index[:, None], tf.ones_like(index, tf.float32))

    # The copy is XLA's own, so nothing says which half it is of.
    moved = sum(half.moved for half in count(spread, FLOATS, FEW).values())
    assert COPY <= moved < 1.01 * COPY


def test_a_fusion_reads_no_more_of_an_input_than_comes_out():
    def start(x):
        return tf.abs(x)[:1024] + 1.0

    assert compiled(start, FLOATS)["decode"] == (2 * 4 * 1024, 1)


def test_a_graph_whose_sizes_are_not_known_is_not_counted():
    with pytest.raises(AssertionError, match="is not known"):
        graph_of(tf.where, tf.TensorSpec((N,), tf.bool))


def test_a_method_takes_fewer_copies_by_verbs_of_run_time_shapes_than_under_xla():
    """XLA's are static: a flag for every element. Small, but of the layout of real buckets."""
    step = Step(StromCompressor(), Layout(("a", "b"), ((1 << 16,), (1 << 15,))))
    plain, xla = step.plain(), step.xla()
    assert step.payload == 360  # 224 elements, the level above one in 500: 11.7 bits each
    assert 0 < plain["encode"].moved < xla["encode"].moved
    assert all(count.launches for counts in (plain, xla) for count in counts.values())


def test_texts_of_checks_keep_a_step_from_xla():
    """As the page on GPUs says; where this compiles, `Told` need not leave them out."""
    ops = TensorFlowOps(static=True)

    def checked(x):
        return ops.require({"rank {ranks} is late": x > 0, "rank {ranks} is early": x < 9})

    with pytest.raises(ValueError, match="No registered 'GatherV2' OpKernel for XLA_CPU_JIT"):
        compiled(checked, FEW)
