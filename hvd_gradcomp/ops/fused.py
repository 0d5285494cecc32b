"""Fused CPU kernels: one pass over a bucket does the work of a dozen ops.

`codecs.threshold` and `codecs.topk` define in plain ops what each kernel does. The plain ops run
wherever there is no kernel, and tests compare each kernel with them, bit by bit.

    write   accumulates the gradient, selects elements, writes the payload's body
    commit  removes the sent elements from the memory, once the exchange has succeeded
    add     adds up the bodies of all ranks

If one rank chooses for all: `choose` writes the indices, `values` reads a rank's values there, and
`replace` stores the result there.

Where kernels write in place (PyTorch), a step commits when it has succeeded. Elsewhere (TensorFlow)
memory is assigned only then, so `write` commits at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops.errors import PayloadError
from hvd_gradcomp.ops.interface.header import Headers
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Collecting, Form, Rule, Written
from hvd_gradcomp.ops.scope import Scope
from hvd_gradcomp.ops.tensors import Tensor


class FusedKernels:
    """Base of the fused kernels.

    Args:
        ops: the tensor ops, on a CPU with the C library.
    """

    def __init__(self, ops: Headers) -> None:
        self.ops = ops
        self.native: Any = ops.native


class ThresholdKernels(FusedKernels):
    """Fused kernels of the methods with a rule for each element.

    Attributes:
        checks: whether `write` can check the gradient in its walk.
    """

    def __init__(self, ops: Headers) -> None:
        super().__init__(ops)
        self.checks = ops.in_place

    def write(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        step: Any,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
        before: Tensor,
        checks: bool = False,
    ) -> Written:
        """Encode one rank's step.

        Args:
            rule: which elements are selected, and what a code means.
            layout: of the bucket.
            level: the capacity level.
            step: number of the step.
            memory: r and, with `rule.ambiguity`, v; float32 [size]. Donating.
            gradient: float32 [size].
            moment: float32 [size]; None if the step is the sample.
            before: int64 [layers], number of elements sent of each before.
            checks: as for top-k.
        """
        ops, old = self.ops, list(memory[: 1 + rule.ambiguity])
        moments = () if moment is None or not rule.ambiguity else (moment,)
        bucket, capacity = ops.numbers_of(layout), _capacity(ops, level)
        body, sent, wanted, per_layer, *new = self.native(
            "threshold_write",
            (bucket, gradient, *old, *moments),
            (
                ops.body(_body_bytes(ops, rule, layout, level)),
                *(ops.number(), ops.number()),
                ops.empty((len(layout.sizes),), "int64"),
                *map(ops.writable, old),
                *((ops.flag(),) if checks else ()),
            ),
            (step, capacity, rule.flags, not ops.in_place),
            rule.reals,
        )
        finite = new.pop() if checks else True
        written = Written(body, sent, wanted, before + per_layer, new, finite=finite)
        if not finite:
            return written

        def commit() -> None:
            ints = sent, capacity, rule.flags
            self.native("threshold_commit", (bucket, body), new, ints, rule.reals)

        return written._replace(commit=commit) if ops.in_place else written

    def add(
        self,
        rule: Rule,
        layout: Layout,
        level: CapacityLevel,
        bodies: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Sum `weights[rank] * values of the rank` over ranks, in rank order.

        Args:
            rule, layout, level: as for `write`, equal on all ranks.
            bodies: uint8 [world, bytes].
            weights: float32 [world].
            out: float32 [size] that the sum may be written to; its values are ignored.

        Raises:
            PayloadError: an index points outside of the bucket; bodies have another capacity level.
                In a graph the former is TensorFlow's error with the same text.
        """
        ops = self.ops
        _require(bodies, _body_bytes(ops, rule, layout, level))
        inputs = ops.numbers_of(layout), ops.rows(bodies), weights, out
        ints = _capacity(ops, level), rule.flags
        return self.native("threshold_add", inputs, (ops.writable(out),), ints, rule.reals)


class TopKKernels(FusedKernels):
    """Fused kernels of the methods with a number of elements.

    Attributes:
        leads: whether `choose`, `values` and `replace` exist.
        looks: whether `add` itself checks that the sum is finite.
        shares: whether `write` accepts the `wanted` of `Indexing.shares` as the quota.
        removes: whether `write` removes the sent elements from the memory, before `commit`.
        checks: whether `write` can check the gradient in its walk.
    """

    leads = True
    looks = shares = False

    def __init__(self, ops: Headers) -> None:
        super().__init__(ops)
        self.removes, self.checks = not ops.in_place, ops.in_place

    def write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        step: Any,
        quota: Tensor | None,
        limits: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        before: Tensor,
        checks: bool = False,
    ) -> Written:
        """Encode one rank's step.

        Args:
            how: how the memory accumulates the gradient.
            scope: which elements compete.
            form: byte layout of the body; in a graph, `Form.numbers` may be a tensor.
            step: number of the step.
            quota: elements to send of each group, int64 [groups]; None for the limits.
            limits: of the quotas.
            hint: where to look first; float32 [groups].
            memory: r and, with momentum, u; float32 [size]. Donating.
            gradient: float32 [size].
            before: int64 [layers], number of elements sent of each before.
            checks: check the gradient's squares, as `Headers.check_finite` does, and leave the
                memory as it is unless they are finite.
        """
        memory = memory[: 2 if how.momentum else 1]
        written = self._write(
            how, scope, form, step, quota, limits, hint, memory, gradient, checks=checks
        )
        if not written.finite:
            return written

        def commit() -> None:
            inputs = self.ops.numbers_of(scope.layout), self.ops.numbers_of(form), written.body
            self.native("topk_commit", inputs, written.memory, (how.masking,))

        sent = before + written.per_layer
        if not self.ops.in_place:
            return written._replace(per_layer=sent)
        return written._replace(per_layer=sent, commit=commit)

    def choose(
        self,
        scope: Scope,
        form: Form,
        step: Any,
        limits: Sequence[int],
        r: Tensor,
        gradient: Tensor,
    ) -> Written:
        """Return the payload that `write` would send of r and the gradient; both stay unchanged."""
        hint = self.ops.full((scope.count,), float("inf"), "float32")
        how = Collecting()
        return self._write(how, scope, form, step, None, limits, hint, (r,), gradient, False)

    def _write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        step: Any,
        quota: Tensor | None,
        limits: Sequence[int],
        hint: Tensor,
        memory: Sequence[Tensor],
        gradient: Tensor,
        accumulates: bool = True,
        checks: bool = False,
    ) -> Written:
        """Encode a step from r and u in `memory`, which stay unchanged unless it accumulates."""
        ops, layout = self.ops, scope.layout
        counts = ops.numbers(limits) if quota is None else quota
        body, sent, chosen, per_layer, fresh, *new = self.native(
            "topk_write",
            (
                *(ops.numbers_of(layout), ops.numbers_of(form), ops.numbers_of(layout, "strides")),
                *(counts, ops.numbers(scope.slack(limits)), hint, gradient, *memory),
            ),
            (
                ops.body(ops.extent(_body_size(form))),
                *(ops.number(), ops.number()),
                ops.empty((len(layout.sizes),), "int64"),
                ops.empty(hint.shape),
                *(map(ops.writable, memory) if accumulates else ()),
                *((ops.flag(),) if checks else ()),
            ),
            (step, scope.whole, how.nesterov, how.masking, not ops.in_place),
            (how.momentum,),
        )
        finite = new.pop() if checks else True
        return Written(body, sent, chosen, per_layer, new, hint=fresh, finite=finite)

    def values(
        self, layout: Layout, form: Form, body: Tensor, r: Tensor, gradient: Tensor
    ) -> Tensor:
        """Return r plus the gradient at a body's indices; float32 [capacity].

        Raises:
            PayloadError: an index points outside of the bucket.
        """
        _require(body, form.size)
        ops = self.ops
        inputs = ops.numbers_of(layout), ops.numbers_of(form), body, r, gradient
        return self.native("topk_values", inputs, (ops.empty((form.capacity,)),))

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
        ops, reals = self.ops, (beta, 1.0 - beta)
        inputs = ops.numbers_of(layout), ops.numbers_of(form), body, r, gradient, total
        counts = ops.empty((len(layout.sizes),), "int64")
        outputs = ops.writable(gradient), ops.writable(r), counts
        mean, r, per_layer = self.native("topk_replace", inputs, outputs, (), reals)
        return mean, r, per_layer

    def add(
        self, layout: Layout, form: Form, bodies: Tensor, weights: Tensor, out: Tensor
    ) -> Tensor:
        """Sum `weights[rank] * values of the rank` over ranks, in rank order.

        Args:
            layout, form: as for `write`, equal on all ranks.
            bodies: uint8 [world, bytes].
            weights: float32 [world].
            out: float32 [size] that the sum may be written to; its values are ignored.

        Raises:
            PayloadError: an index points outside of the bucket; bodies have another capacity level.
        """
        ops = self.ops
        _require(bodies, _body_size(form))
        inputs = ops.numbers_of(layout), ops.numbers_of(form), ops.rows(bodies), weights, out
        return self.native("topk_add", inputs, (ops.writable(out),))


def _capacity(ops: Headers, level: CapacityLevel) -> Any:
    """Return the capacity as C takes it; -1 for dense."""
    return ops.pick(level.dense, -1, level.capacity)


def _body_bytes(ops: Headers, rule: Rule, layout: Layout, level: CapacityLevel) -> Any:
    """Return the bytes of a body, as an extent: a graph may not know the level."""
    if isinstance(level.dense, bool) and isinstance(level.capacity, int):
        return rule.body_bytes(layout, level)
    return ops.extent(None)


def _body_size(form: Form) -> int | None:
    """Return the bytes of a body; None if a graph knows them only when it runs."""
    return form.size if isinstance(form.capacity, int) else None


def _require(bodies: Tensor, size: Any) -> None:
    """Raise an error unless each body has `size` bytes, if both are known."""
    length = bodies.shape[-1]
    if isinstance(length, int) and isinstance(size, int) and length != size:
        raise PayloadError(f"a payload has {length} bytes where {size} are due")
