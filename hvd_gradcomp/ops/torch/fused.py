"""Fused CPU kernels: one pass over a bucket does the work of a dozen ops.

`codecs.threshold` and `codecs.topk` define in plain ops what each kernel does. The plain ops run
wherever there is no kernel, and tests compare each kernel with them, bit by bit. A kernel writes to
its inputs in place, and uses as many threads as PyTorch does.

    write   accumulates the gradient, selects elements, writes the payload's body
    settle  removes the sent elements from the memory, once the exchange has succeeded
    add     adds up the bodies of all ranks

If one rank chooses for all: `choose` writes the indices, `values` reads a rank's values there, and
`replace` stores the result there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Collecting, Form, Rule, Written
from hvd_gradcomp.ops.scope import Scope

_BEYOND = -2  # in kernels.h


class KernelOps(Protocol):
    """Part of `TorchOps` that the fused kernels use."""

    native: Any

    def room(self, x: Tensor) -> Tensor: ...

    def own(self, x: Tensor) -> Tensor: ...

    def body(self, size: int) -> Tensor: ...

    def table(self, layout: Layout, field: str) -> Tensor: ...


class Passes:
    """Base of the fused kernels.

    Args:
        ops: the tensor ops, on a CPU with the C library.
    """

    def __init__(self, ops: KernelOps) -> None:
        self.ops = ops
        self.native: Any = ops.native
        self._rooms = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _room(self, size: int) -> Tensor:
        """Return reused memory, in bytes: fresh pages cost as much as a kernel."""
        if self._rooms.shape[0] < size:
            self._rooms = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._rooms

    def _place(self, layout: Layout, side: int = 0) -> _Place:
        table = self.ops.table(layout, "layer_of_block")
        return _Place(_at(table), layout.size, len(layout.names), layout.block_bits, side)


class ThresholdKernels(Passes):
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
        how, where, threads = self._rule(rule), self._where(rule, layout), torch.get_num_threads()
        memory = [self.ops.own(x) for x in memory]
        r, v = _at(memory[0]), _at(memory[1]) if rule.ambiguity else None
        top = torch.empty(len(layout.names), dtype=torch.int32, device="cpu")
        per_layer = torch.empty(len(layout.names), dtype=torch.int64, device="cpu")
        body = self.ops.body(rule.body_bytes(layout, level))
        given = how, where, r, v, r, v, _at(gradient), _at(moment)
        out = _at(body), _at(per_layer)
        if level.dense:
            flags = body[-layout.size :] if rule.powers else self._room(layout.size)
            _check(self.native.threshold_find(*given, None, _at(flags), _at(top), threads))
            sent = wanted = self.native.threshold_places(
                how, where, r, _at(flags), _at(top), *out, threads
            )
        else:
            found = _at(self._room(8 * layout.size))
            wanted = _check(self.native.threshold_find(*given, found, None, _at(top), threads))
            wanted = _check(
                self.native.threshold_code(how, where, found, wanted, _at(top), threads)
            )
            sent = self.native.threshold_write(
                how, where, found, wanted, _at(top), level.capacity, turn, v, *out
            )

        def commit() -> None:
            number = -1 if level.dense else sent
            self.native.threshold_settle(
                how, where, _at(body), number, r, v, torch.get_num_threads()
            )

        return Written(body, sent, wanted, before + per_layer, memory, commit)

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
        how, where, room = self._rule(rule), self._where(rule, layout), self.ops.room(room)
        ranks = how, where, _at(bodies), bodies.stride(0), bodies.shape[0]
        into = _at(weights), _at(room), torch.get_num_threads()
        if level.dense:
            self.native.threshold_add_places(*ranks, *into)
        else:
            _check(self.native.threshold_add(*ranks, level.capacity, *into))
        return room

    def _rule(self, rule: Rule) -> Any:
        return ctypes.byref(_Rule(*rule.numbers))

    def _where(self, rule: Rule, layout: Layout) -> Any:
        return ctypes.byref(self._place(layout, rule.side_bytes(layout)))


class TopKKernels(Passes):
    """Fused kernels of the methods with a number of elements.

    Attributes:
        leads: whether `choose`, `values` and `replace` exist.
        looks: whether `add` itself checks that the sum is finite.
        shares: whether `write` accepts the `wanted` of `Indexing.shares` as the quota.
    """

    leads = True
    looks = shares = False

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
        quota, slack = self._numbers(scope, quota, most)
        layout, memory = scope.layout, [self.ops.own(x) for x in memory]
        room = memory[0], memory[1] if how.momentum else None
        written = self._write(how, scope, form, turn, quota, slack, hint, room, room, gradient)
        r, u = (_at(x) for x in room)
        taking, indices = ctypes.byref(_Collecting(*how)), _unpacked(form)

        def commit() -> None:
            given = self._where(layout), _form(form), _at(written.body), _at(self._room(indices))
            self.native.topk_settle(taking, *given, r, u, torch.get_num_threads())

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
        quota, slack = self._numbers(scope, None, most)
        hint = torch.full(quota.shape, float("inf"), dtype=torch.float32, device="cpu")
        nowhere, before, how = (None, None), (r, None), Collecting()
        return self._write(how, scope, form, turn, quota, slack, hint, nowhere, before, gradient)

    def _write(
        self,
        how: Collecting,
        scope: Scope,
        form: Form,
        turn: int,
        quota: Tensor,
        slack: Tensor,
        hint: Tensor,
        memory: tuple[Tensor | None, Tensor | None],
        before: tuple[Tensor, Tensor | None],
        gradient: Tensor,
    ) -> Written:
        """Encode a step from r and u in `before`, updated in `memory`; None keeps them as is."""
        native, layout, threads = self.native, scope.layout, torch.get_num_threads()
        where = ctypes.byref(self._scope(scope))
        per_layer = torch.empty(len(layout.names), dtype=torch.int64, device="cpu")
        body = self.ops.body(form.size)
        room, count = self._room(8 * layout.size + _unpacked(form)), quota.clone()
        fresh, start = hint.clone(), room.data_ptr()
        found = ctypes.byref(_Elements(start, start + 4 * layout.size, _at(count)))
        numbers = _at(quota), _at(slack)
        given = *map(_at, memory), *map(_at, before), _at(gradient), *numbers, _at(hint)
        taking = ctypes.byref(_Collecting(*how))
        _check(native.topk_find(taking, where, *given, found, threads))
        look = (before[0], gradient) if memory[0] is None else (memory[0], None)
        native.topk_again(where, *map(_at, look), *numbers, found, threads)
        chosen = native.topk_choose(where, turn, _at(quota), found, _at(fresh), threads)
        out = start + 8 * layout.size, _at(body), form.size, _at(per_layer), threads
        native.topk_write(where, _form(form), found, chosen, turn, *out)
        return Written(body, int(per_layer.sum()), chosen, per_layer, (), hint=fresh)

    def values(
        self, layout: Layout, form: Form, body: Tensor, r: Tensor, gradient: Tensor
    ) -> Tensor:
        """Return r plus the gradient at a body's indices; float32 [capacity].

        Raises:
            PayloadError: an index points outside of the bucket.
        """
        _require(body, form.size)
        values = torch.empty(form.capacity, dtype=torch.float32, device="cpu")
        given = self._where(layout), _form(form), _at(body), _at(self._room(_unpacked(form)))
        into = _at(r), _at(gradient), _at(values), torch.get_num_threads()
        _check(self.native.topk_values(*given, *into))
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
        scratch = self._room(_unpacked(form) + 4 * form.capacity)
        given = self._where(layout), _form(form), _at(body), _at(total), beta, 1.0 - beta
        into = _at(after), _at(r), _at(mean), _at(gradient), _at(per_layer)
        _check(self.native.topk_replace(*given, _at(scratch), *into, torch.get_num_threads()))
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
        room, ranks = self.ops.room(room), bodies.shape[0]
        scratch = self._room(_unpacked(form) * ranks)
        given = _at(bodies), bodies.stride(0), ranks, _at(weights), _at(scratch), _at(room)
        threads = torch.get_num_threads()
        _check(self.native.topk_add(self._where(layout), _form(form), *given, threads))
        return room

    def _numbers(
        self, scope: Scope, quota: Tensor | None, most: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the quota, and the margin of error of a sample about it; int64 [groups]."""
        numbers = most if quota is None else quota, scope.slack(most)
        quota, slack = (torch.as_tensor(x, dtype=torch.int64, device="cpu") for x in numbers)
        return quota, slack

    def _where(self, layout: Layout) -> Any:
        return ctypes.byref(self._place(layout))

    def _scope(self, scope: Scope) -> _Scope:
        layout = scope.layout
        tables = (_at(self.ops.table(layout, name)) for name in ("offsets", "sizes", "strides"))
        return _Scope(self._place(layout), *tables, layout.elements, scope.whole)


class _Rule(ctypes.Structure):
    """Struct `rule` in kernels.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("ambiguity", "large", "powers")),
        *((name, ctypes.c_int32) for name in ("subtracts", "corrects")),
        *((name, ctypes.c_float) for name in ("alpha", "tau", "zeta", "twice_tau", "tau_squared")),
    ]


class _Place(ctypes.Structure):
    """Struct `place` in kernels.h."""

    _fields_ = [
        ("layer_of_block", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("block_bits", ctypes.c_int32),
        ("side", ctypes.c_int32),
    ]


class _Collecting(ctypes.Structure):
    """Struct `collecting` in kernels.h."""

    _fields_ = [
        ("momentum", ctypes.c_float),
        ("nesterov", ctypes.c_int32),
        ("masking", ctypes.c_int32),
    ]


class _Scope(ctypes.Structure):
    """Struct `scope` in kernels.h."""

    _fields_ = [
        ("where", _Place),
        *((name, ctypes.c_void_p) for name in ("offsets", "sizes", "strides")),
        ("elements", ctypes.c_int64),
        ("whole", ctypes.c_int32),
    ]


class _Elements(ctypes.Structure):
    """Struct `elements` in kernels.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("index", "bits", "count")]


class _Form(ctypes.Structure):
    """Struct `form` in kernels.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("capacity", "blocks", "room", "index", "deltas", "values")
    ]


def _form(form: Form) -> Any:
    return ctypes.byref(_Form(form.capacity, *form.places, form.values))


def _unpacked(form: Form) -> int:
    """Return the bytes that a body's packed indices take once unpacked."""
    return 4 * form.places.blocks * GROUP


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _require(bodies: Tensor, size: int) -> None:
    """Raise an error unless each body has `size` bytes: C reads that many unchecked."""
    if bodies.shape[-1] != size:
        raise PayloadError(f"a payload has {bodies.shape[-1]} bytes where {size} are due")


def _check(count: int) -> int:
    if count == _BEYOND:
        raise PayloadError("an index points outside of its bucket: a payload is damaged")
    if count < 0:
        raise MemoryError("no memory to compress a bucket with")
    return count
