"""Fused CPU kernels: one pass over a bucket does the work of a dozen ops.

`codecs.threshold` and `codecs.topk` define in plain ops what each kernel does. The plain ops run
wherever there is no kernel, and tests compare each kernel with them, bit by bit. A kernel writes to
its inputs in place, and uses as many threads as PyTorch does.

    write   accumulates the gradient, selects elements, writes the payload's body
    commit  removes the sent elements from the memory, once the exchange has succeeded
    add     adds up the bodies of all ranks

If one rank chooses for all: `choose` writes the indices, `values` reads a rank's values there, and
`replace` stores the result there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Collecting, Form, Rule, Written
from hvd_gradcomp.ops.scope import Scope
from hvd_gradcomp.ops.torch.kernels import walkable


class KernelOps(Protocol):
    """Part of `TorchOps` that the fused kernels use."""

    native: Any

    def room(self, x: Tensor) -> Tensor: ...

    def own(self, x: Tensor) -> Tensor: ...

    def body(self, size: int) -> Tensor: ...

    def table(self, layout: Layout, field: str) -> Tensor: ...


class FusedKernels:
    """Base of the fused kernels.

    Args:
        ops: the tensor ops, on a CPU with the C library.
    """

    def __init__(self, ops: KernelOps) -> None:
        self.ops = ops
        self.native: Any = ops.native

    def _bucket(self, layout: Layout) -> Tensor:
        return self.ops.table(layout, "numbers")


class ThresholdKernels(FusedKernels):
    """Fused kernels of the methods with a rule for each element."""

    def write(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        turn: int,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
        before: Tensor,
    ) -> Written:
        """Encode one rank's step.

        Args:
            rule: which elements are selected, and what a code means.
            layout: of the bucket.
            level: the capacity level.
            turn: the step.
            memory: r and, with `rule.ambiguity`, v; float32 [size]. Donating.
            gradient: float32 [size].
            moment: float32 [size]; None if the step is the sample.
            before: int64 [layers], number of elements sent of each before.
        """
        memory = [self.ops.own(x) for x in memory[: 1 + rule.ambiguity]]
        per_layer = torch.empty(len(layout.names), dtype=torch.int64, device="cpu")
        sent, wanted = array("q", (0,)), array("q", (0,))
        body = self.ops.body(rule.body_bytes(layout, level))
        bucket, capacity = self._bucket(layout), -1 if level.dense else level.capacity
        sampled = () if moment is None or not rule.ambiguity else (moment,)
        given = bucket, gradient, *memory, *sampled
        out = body, sent, wanted, per_layer, *memory
        self.native("threshold_write", given, out, (turn, capacity, rule.flags, 0), rule.reals)

        def commit() -> None:
            ints = sent[0], capacity, rule.flags
            self.native("threshold_commit", (bucket, body), memory, ints, rule.reals)

        return Written(body, sent[0], wanted[0], before + per_layer, memory, commit)

    def add(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """Sum `weights[rank] * values of the rank` over ranks, in rank order.

        Args:
            rule, layout, level: as for `write`, equal on all ranks.
            bodies: uint8 [world, bytes].
            weights: float32 [world].
            room: float32 [size] that the sum may be written to; its values are ignored.

        Raises:
            PayloadError: an index points outside of the bucket; bodies have another capacity level.
        """
        _require(bodies, rule.body_bytes(layout, level))
        room, capacity = self.ops.room(room), -1 if level.dense else level.capacity
        given = self._bucket(layout), walkable(bodies), weights, room
        self.native("threshold_add", given, (room,), (capacity, rule.flags), rule.reals)
        return room


class TopKKernels(FusedKernels):
    """Fused kernels of the methods with a number of elements.

    Attributes:
        leads: whether `choose`, `values` and `replace` exist.
        looks: whether `add` itself checks that the sum is finite.
        shares: whether `write` accepts the `wanted` of `Indexing.shares` as the quota.
        removes: whether `write` removes the sent elements from the memory, before `commit`.
    """

    leads = True
    looks = shares = removes = False

    def write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        turn: int,
        quota: Tensor | None,
        most: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        before: Tensor,
    ) -> Written:
        """Encode one rank's step.

        Args:
            how: how the memory accumulates the gradient.
            scope: which elements compete.
            form: byte layout of the body.
            turn: the step.
            quota: elements to send of each group, int64 [groups]; None for the most.
            most: limits of the quotas.
            hint: where to look first; float32 [groups].
            memory: r and, with momentum, u; float32 [size]. Donating.
            gradient: float32 [size].
            before: int64 [layers], number of elements sent of each before.
        """
        memory = [self.ops.own(x) for x in memory[: 2 if how.momentum else 1]]
        written = self._write(how, scope, form, turn, quota, most, hint, memory, memory, gradient)

        def commit() -> None:
            given = self._bucket(scope.layout), _form(form), written.body
            self.native("topk_commit", given, memory, (how.masking,))

        sent = before + written.per_layer
        return written._replace(memory=memory, per_layer=sent, commit=commit)

    def choose(
        self,
        scope: Scope,
        form: Form,
        turn: int,
        most: Sequence[int],
        r: Tensor,
        gradient: Tensor,
    ) -> Written:
        """Return the payload that `write` would send of r and the gradient; both stay unchanged."""
        hint = torch.full((scope.count,), float("inf"), dtype=torch.float32, device="cpu")
        how = Collecting()
        return self._write(how, scope, form, turn, None, most, hint, (r,), (), gradient)

    def _write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        turn: int,
        quota: Tensor | None,
        most: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        committed: Sequence[Tensor],
        gradient: Tensor,
    ) -> Written:
        """Encode a step from r and u in `memory`, updated in `committed` unless that is empty."""
        layout, sent, chosen = scope.layout, array("q", (0,)), array("q", (0,))
        per_layer = torch.empty(len(layout.names), dtype=torch.int64, device="cpu")
        body, fresh = self.ops.body(form.size), torch.empty_like(hint)
        counted = most if quota is None else quota, scope.slack(most)
        limits = [torch.as_tensor(x, dtype=torch.int64, device="cpu") for x in counted]
        strides = self.ops.table(layout, "strides")
        given = self._bucket(layout), _form(form), strides, *limits, hint, gradient, *memory
        out = body, sent, chosen, per_layer, fresh, *committed
        ints = turn, scope.whole, how.nesterov, how.masking, 0
        self.native("topk_write", given, out, ints, (how.momentum,))
        return Written(body, sent[0], chosen[0], per_layer, (), hint=fresh)

    def values(
        self, layout: Layout, form: Form, body: Tensor, r: Tensor, gradient: Tensor
    ) -> Tensor:
        """Return r plus the gradient at a body's indices; float32 [capacity].

        Raises:
            PayloadError: an index points outside of the bucket.
        """
        _require(body, form.size)
        values = torch.empty(form.capacity, dtype=torch.float32, device="cpu")
        given = self._bucket(layout), _form(form), body, r, gradient
        self.native("topk_values", given, (values,))
        return values

    def replace(
        self,
        layout: Layout,
        form: Form,
        body: Tensor,
        total: Tensor,
        beta: float,
        r: Tensor,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace this rank's values at a body's indices by the result of all ranks.

        Args:
            layout, form, body: as for `values`.
            total: the result at the indices; float32 [capacity].
            beta: share of the new gradient that r accumulates, and of sent values that leaves it.
            r, gradient: float32 [size]. Donating.

        Returns:
            `total` at the indices and 0 elsewhere, [size]; `r + beta * gradient`, and at the
            indices `(1 - beta) * r`; and how many of each layer were sent, int64 [layers].

        Raises:
            PayloadError: an index points outside of the bucket.
        """
        _require(body, form.size)
        mean, after = self.ops.room(gradient), self.ops.room(r)
        per_layer = torch.empty(len(layout.names), dtype=torch.int64, device="cpu")
        given = self._bucket(layout), _form(form), body, r, gradient, total
        self.native("topk_replace", given, (mean, after, per_layer), (), (beta, 1.0 - beta))
        return mean, after, per_layer

    def add(
        self, layout: Layout, form: Form, bodies: Tensor, weights: Tensor, room: Tensor
    ) -> Tensor:
        """Sum `weights[rank] * values of the rank` over ranks, in rank order.

        Args:
            layout, form: as for `write`, equal on all ranks.
            bodies: uint8 [world, bytes].
            weights: float32 [world].
            room: float32 [size] that the sum may be written to; its values are ignored.

        Raises:
            PayloadError: an index points outside of the bucket; bodies have another capacity level.
        """
        _require(bodies, form.size)
        room = self.ops.room(room)
        given = self._bucket(layout), _form(form), walkable(bodies), weights, room
        self.native("topk_add", given, (room,))
        return room


@lru_cache(maxsize=64)
def _form(form: Form) -> array[int]:
    return array("q", form.numbers)


def _require(bodies: Tensor, size: int) -> None:
    """Raise an error unless each body has `size` bytes."""
    if bodies.shape[-1] != size:
        raise PayloadError(f"a payload has {bodies.shape[-1]} bytes where {size} are due")
