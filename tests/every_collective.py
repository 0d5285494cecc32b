"""A toy method that asks for every collective, to hold the drivers to one meaning."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.core.collectives import (
    SUMMED_BYTES,
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Switch,
)
from hvd_gradcomp.method.compressor import Compressor


@dataclass(frozen=True)
class EveryCollective(Compressor):
    """The sum of what all collectives reply, in several rounds; the phase alternates."""

    block = 1

    def init(self, ops, layout):
        return ()

    def aggregate(self, ops, context, gradient, state, **extra):
        ranks = ops.reshape(ops.cast(ops.arange(context.size), "float32"), (-1, 1))
        gathered = yield Allgather(gradient)  # [world, n]
        total = ops.sum(gathered * ranks, 0)
        # So large that two ranks add it up over gloo.
        copies = SUMMED_BYTES // (4 * context.layout.size) + 1
        payload = ops.to_bytes(ops.concat([gradient] * copies), "float32")
        gathered = ops.from_bytes((yield Allgather(payload)), "float32")
        total = total + ops.sum(gathered[:, -context.layout.size :] * ranks, 0)
        total = total + (yield Allreduce(gradient, 0.5, 2.0))
        rows = ops.reshape(gradient, (context.size, -1))
        total = total + ops.reshape((yield Alltoall(rows)), (context.layout.size,))
        total = total + (yield Broadcast(gradient, context.size - 1))

        def summed():
            return ((yield Allreduce(gradient)),)

        def from_first():
            first = yield Broadcast(gradient, 0)
            return ((yield Allreduce(first, 1.0, 3.0)),)

        (phase,) = yield Switch(context.step % 2, (summed, from_first))
        return total + phase, state


def gradient(rank: int, step: int, n: int) -> list[float]:
    return [float((7 * rank + 3 * i + step) % 11) for i in range(n)]
