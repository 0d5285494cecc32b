"""Projection of slices to coefficients in their bases, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.gradiveq.slices import Slices, Slicing
from hvd_gradcomp.algorithms.gradiveq.state import GradiVeQState
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Ops, Tensor


class Group(NamedTuple):
    """Group of slices of a layer that share a basis."""

    cut: Slices
    number: int  # in its layer
    used: Any  # dimensions
    basis: Tensor  # [length, dimensions]
    offset: Tensor  # [1, length]


def groups_of(slicing: Slicing, ops: Ops, layout: Layout, state: GradiVeQState) -> list[Group]:
    """Return all groups of slices that share a basis, in order."""
    groups = []
    start = offset = number = 0
    for cut in slicing.slices(layout):
        for group in range(cut.groups):
            basis = state.basis[start : start + cut.length * cut.max_dimensions]
            basis = ops.reshape(basis, (cut.length, cut.max_dimensions))
            used: Any = cut.max_dimensions
            if slicing.loss_threshold is not None and ops.dynamic_shapes:
                used = ops.staged(state.dimensions[number])
                basis = basis[:, cut.max_dimensions - used :]
            beside = ops.reshape(state.offset[offset : offset + cut.length], (1, cut.length))
            groups.append(Group(cut, group, used, basis, beside))
            start += cut.length * cut.max_dimensions
            offset += cut.length
            number += 1
    return groups


def encode(
    slicing: Slicing, ops: Ops, layout: Layout, gradient: Tensor, state: GradiVeQState
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients (linear in the gradient), its energy, and the energy lost.

    The local loss needs no decoding: with the offset `c`, which is orthogonal to `U`,
    `||s - U U^T s - c||^2 = ||s||^2 - ||U^T s||^2 - 2 c.s + ||c||^2`.
    """
    codes: list[Any] = []
    energy = lost = ops.zeros(())
    slices: Any = None
    of_layer = None
    for cut, group, _, basis, offset in groups_of(slicing, ops, layout, state):
        if cut.groups > 1 and cut is not of_layer:
            slices, of_layer = cut.cut(ops, gradient), cut
        first, members = group * cut.reuse, cut.members(group)
        block = cut.turned(ops, gradient) if cut.groups == 1 else slices[first : first + members]
        code, whole, beside = ops.project(block, basis, offset)
        codes.append(ops.reshape(code, (-1,)))
        beside = beside * 2.0 - ops.inner(offset, offset) * float(members)
        energy = energy + whole
        lost = lost + ops.maximum(whole - ops.inner(code, code) - beside, 0.0)
    return ops.concat(codes), energy, lost


def decode(
    slicing: Slicing,
    ops: Ops,
    layout: Layout,
    code: Tensor,
    state: GradiVeQState,
    share: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Decode coefficients to slices, plus `share` times the offset of the basis.

    Args:
        out: buffer for the result; donated. None to allocate one.
    """
    pieces: list[Any] = []
    rows: list[Any] = []
    done, start = 0, 0
    for cut, group, used, basis, offset in groups_of(slicing, ops, layout, state):
        members = cut.members(group)
        block = ops.reshape(code[start : start + members * used], (members, used))
        start = start + members * used
        if group == 0 and cut.start > done:
            pieces.append(ops.zeros((cut.start - done,)))
        if cut.groups == 1:
            pieces.append(ops.lift(block, basis, offset * share, cut.shape, cut.order))
        else:
            back = ops.matmul_plus(block, ops.transpose(basis, (1, 0)), offset * share)
            rows.append(ops.reshape(back, (-1,)))
        if rows and group == cut.groups - 1:
            pieces.append(ops.unturned(ops.concat(rows), cut.shape, cut.order))
            rows = []
        done = cut.start + cut.size
    if layout.size > done:
        pieces.append(ops.zeros((layout.size - done,)))
    return ops.assemble(ops.zeros((layout.size,)) if out is None else out, pieces)


def coefficients(slicing: Slicing, ops: Ops, layout: Layout, state: GradiVeQState) -> Tensor:
    """Return the number of coefficients that each layer sends; int64 [layers]."""
    counts: list[Any] = []
    for cut, group, used, _, _ in groups_of(slicing, ops, layout, state):
        if group == 0:
            counts.append(0)
        counts[-1] = counts[-1] + cut.members(group) * used
    return ops.words(counts)
