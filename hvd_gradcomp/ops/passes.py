"""Passes: one walk over a bucket that does what a dozen verbs did, on a CPU.

`codecs.words` says in verbs what a pass has to do, and that is what runs wherever there is no pass,
and what tests hold each pass against, to the bit. A pass writes to what it is given in place, and
uses as many threads as PyTorch does.

    write   takes the gradient in, finds what the rule wants, writes the payload's body
    settle  takes out of the memory what was sent, once the exchange has succeeded
    add     adds up the bodies of all ranks
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_gradcomp.ops import PayloadError, Tensor
from hvd_gradcomp.ops.rules import Rule, Written

if TYPE_CHECKING:
    from hvd_gradcomp.ladder import Rung
    from hvd_gradcomp.layout import Layout
    from hvd_gradcomp.ops.torch import TorchOps


class WordPasses:
    """Those of the methods with a rule for each element.

    Args:
        ops: the verbs, on a CPU with the C library.
    """

    def __init__(self, ops: TorchOps) -> None:
        self.ops = ops
        self.native: Any = ops.native
        self._rooms = torch.empty(0, dtype=torch.uint8, device="cpu")

    def write(
        self,
        rule: Rule,
        layout: Layout,
        rung: Rung,
        turn: int,
        memory: Sequence[Tensor],
        gradient: Tensor,
        moment: Tensor | None,
    ) -> Written:
        """One rank's step.

        Args:
            rule: what is wanted, and what a code stands for.
            layout: of the bucket.
            rung: what fits.
            turn: the step.
            memory: r and, where the rule is one of ambiguity, v; float32 [size]. Donating.
            gradient: float32 [size].
            moment: float32 [size]; None where the step is the sample.
        """
        how, where, threads = self._rule(rule), self._place(rule, layout), _threads()
        memory = [self.ops.own(x) for x in memory]
        r, v = _at(memory[0]), _at(memory[1]) if rule.ambiguity else None
        top = torch.empty(len(layout.names), dtype=torch.int32, device="cpu")
        per_layer = torch.empty(len(layout.names), dtype=torch.int64, device="cpu")
        body = torch.empty(rule.body_bytes(layout, rung), dtype=torch.uint8, device="cpu")
        given = how, where, r, v, r, v, _at(gradient), _at(moment)
        out = _at(body), _at(per_layer)
        if rung.dense:
            flags = body[-layout.size :] if rule.powers else self._room(layout.size)
            _check(self.native.words_find(*given, None, _at(flags), _at(top), threads))
            sent = wanted = self.native.words_places(
                how, where, r, _at(flags), _at(top), *out, threads
            )
        else:
            found = _at(self._room(4 * layout.size))
            wanted = _check(self.native.words_find(*given, found, None, _at(top), threads))
            wanted = _check(self.native.words_code(how, where, r, found, wanted, _at(top), threads))
            sent = self.native.words_write(
                how, where, found, wanted, _at(top), rung.capacity, turn, v, *out
            )

        def settle() -> None:
            number = -1 if rung.dense else sent
            self.native.words_settle(how, where, _at(body), number, r, v, _threads())

        return Written(body, sent, wanted, per_layer, memory, settle)

    def add(
        self,
        rule: Rule,
        layout: Layout,
        rung: Rung,
        bodies: Tensor,
        weights: Tensor,
        room: Tensor,
    ) -> Tensor:
        """`sum over ranks of weights[rank] * what the rank sent`, in rank order.

        Args:
            rule, layout, rung: as for `write`, on all ranks alike.
            bodies: uint8 [world, bytes].
            weights: float32 [world].
            room: float32 [size] that the sum may be written to; its values do not count.

        Raises:
            PayloadError: an index points outside of the bucket.
        """
        how, where, room = self._rule(rule), self._place(rule, layout), self.ops.room(room)
        ranks = how, where, _at(bodies), bodies.stride(0), bodies.shape[0]
        into = _at(weights), _at(room), _threads()
        if rung.dense:
            self.native.words_add_places(*ranks, *into)
        elif self.native.words_add(*ranks, rung.capacity, *into) < 0:
            raise PayloadError("an index points outside of its bucket: a payload is damaged")
        return room

    def _room(self, size: int) -> Tensor:
        """Bytes that are used again: fresh pages cost as much as a pass."""
        if self._rooms.shape[0] < size:
            self._rooms = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._rooms

    def _rule(self, rule: Rule) -> Any:
        return ctypes.byref(_Rule(*rule.numbers))

    def _place(self, rule: Rule, layout: Layout) -> Any:
        table = _at(self.ops.table(layout, "layer_of_block"))
        numbers = layout.size, len(layout.names), layout.block_bits, rule.side_bytes(layout)
        return ctypes.byref(_Place(table, *numbers))


class _Rule(ctypes.Structure):
    """`rule` in words.c."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("ambiguity", "large", "powers")),
        *((name, ctypes.c_int32) for name in ("subtracts", "corrects")),
        *((name, ctypes.c_float) for name in ("alpha", "tau", "zeta", "twice_tau", "tau_squared")),
    ]


class _Place(ctypes.Structure):
    """`place` in words.c."""

    _fields_ = [
        ("layer_of_block", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("block_bits", ctypes.c_int32),
        ("side", ctypes.c_int32),
    ]


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _check(count: int) -> int:
    if count < 0:
        raise MemoryError("no memory to compress a bucket with")
    return count


def _threads() -> int:
    return torch.get_num_threads()
