"""Transport by Horovod's TensorFlow operations: each collective is part of the traced graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.core.collectives import Allreduce, Broadcast, Gather, Inside, goes_as_sum
from hvd_gradcomp.ops.tensorflow import ASSERTION, assertion
from hvd_gradcomp.runtime import errors, typed_json
from hvd_gradcomp.tensorflow.comm import stall_inspector


class HorovodBackend:
    """Transport with five collectives, see `Transport`. Their results are the replies."""

    def allgather(self, tensor: tf.Tensor, name: str, group: Any) -> tf.Tensor:
        how, world = _how(name, group), group.size()
        size, dtype = tensor.shape.num_elements() or 0, tensor.dtype.name
        if goes_as_sum(size, dtype, world, mpi_ops.gloo_enabled()):
            summand = tf.bitcast(tf.reshape(tensor, (-1, 4)), tf.int32)
            others = mpi_ops._allreduce(summand, op=horovod.Sum, **how) - summand
            both = (summand, others) if group.rank() == 0 else (others, summand)
            return tf.reshape(tf.bitcast(tf.stack(both), tf.uint8), (world, *tensor.shape))
        reply = mpi_ops.allgather(tensor, **how)
        same = assertion(
            tf.equal(tf.size(reply), world * tf.size(tensor)),
            f"{ASSERTION}: the ranks sent payloads of different sizes for {name}; load the same "
            "checkpoint on all ranks",
            tf.size(reply),
            tf.size(tensor),
        )
        with tf.control_dependencies([same]):
            reply = tf.reshape(reply, tf.concat(([world], tf.shape(tensor)), 0))
        reply.set_shape((world, *tensor.shape))
        return reply

    def allreduce(self, request: Allreduce, name: str, group: Any) -> tf.Tensor:
        return mpi_ops._allreduce(
            request.tensor,
            op=horovod.Sum,
            prescale_factor=request.prescale,
            postscale_factor=request.postscale,
            **_how(name, group),
        )

    def alltoall(self, tensor: tf.Tensor, name: str, group: Any) -> tf.Tensor:
        reply = mpi_ops.alltoall(tf.reshape(tensor, (-1,)), **_how(name, group))
        return tf.reshape(reply, tf.shape(tensor))

    def gather(self, request: Gather, name: str, group: Any) -> tf.Tensor:
        """Gather vectors to the root, with an unknown static shape on all ranks.

        With a known one, a rank that receives nothing would count its bytes as a constant, and
        nothing there would depend on the collective.
        """
        splits = [0] * group.size()
        splits[request.root] = request.lengths[group.rank()]
        tensor = tf.reshape(request.tensor, (splits[request.root],))
        parts = tf.constant(splits, tf.int32)
        return mpi_ops.alltoall(tensor, splits=parts, **_how(name, group))[0]

    def broadcast(self, tensor: tf.Tensor, root: int, name: str, group: Any) -> tf.Tensor:
        return mpi_ops.broadcast(tensor, root, **_how(name, group))

    def wait(self, pending: tf.Tensor) -> tf.Tensor:
        return pending


def _how(name: str, group: Any) -> dict[str, Any]:
    return {"name": name, "ignore_name_scope": True, "process_set": group}


def requested_in_branch(request: Any, taken: tf.Tensor) -> Any:
    """Return the same request, of a tensor that depends on whether its branch is taken.

    A rank that only receives passes a constant. TensorFlow's graph optimizer moves what depends on
    constants alone out of its branch, and then this rank submits when others do not.
    """
    if isinstance(request, Inside):
        return request._replace(request=requested_in_branch(request.request, taken))
    if not isinstance(request, (Broadcast, Gather)):
        return request
    tensor = request.tensor
    return request._replace(tensor=tf.where(taken, tensor, tf.zeros_like(tensor)))


def gather_objects(item: Any, kind: Any, name: str, process_set: Any) -> list[Any]:
    """Gather every rank's item of a kind on all ranks, outside of traces; see `typed_json`."""

    def gather(data: tf.Tensor, title: str) -> Any:
        every = mpi_ops.allgather(
            data, name=f"{name}.{title}", ignore_name_scope=True, process_set=process_set
        )
        return every.numpy()

    def allgather(encoded: bytes) -> Iterator[bytes]:
        lengths = gather(tf.constant([len(encoded)], tf.int32), "sz")
        data, start = gather(tf.io.decode_raw(encoded, tf.uint8), "t").tobytes(), 0
        for length in lengths.tolist():
            yield data[start : start + length]
            start += length

    return typed_json.gather(item, kind, allgather, process_set.ranks)


def takes_part(process_set: Any) -> bool:
    """Return True if this rank belongs to the process set.

    `ProcessSet.included()` returns False wherever `horovod.torch` is imported after Horovod for
    TensorFlow, and then stock Horovod trains without reducing.
    """
    if process_set is horovod.global_process_set:
        return True
    return horovod.rank() in (process_set.ranks or ())


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise Horovod's failures as its own exception, with their likely cause."""
    try:
        with stall_inspector.translated():
            yield
    except (tf.errors.UnknownError, tf.errors.FailedPreconditionError) as error:
        if "Horovod" not in error.message:
            raise
        reason = error.message.rpartition("\n\n")[2]  # after the place in the graph
        raise HorovodInternalError(errors.explain(what, reason)) from error
