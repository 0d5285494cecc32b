"""Samples of the mean gradient, and the bases that each rank computes from them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hvd_gradcomp.algorithms.gradiveq.slices import Slices, Slicing, sizes_of
from hvd_gradcomp.algorithms.gradiveq.state import GradiVeQState
from hvd_gradcomp.codecs.principal_components import Components, components, dimension
from hvd_gradcomp.core.collectives import Allgather, Broadcast, Switch
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Context
from hvd_gradcomp.ops import Ops, Tensor

APART = (
    "GradiVeQ: the ranks have computed bases that differ in their last bits, so one rank sends its "
    "own, {:,} bytes. Give all ranks the same number of threads, and the same kind of processor."
)


def recorded(
    slicing: Slicing,
    ops: Ops,
    layout: Layout,
    total: Tensor,
    row: Any,
    state: GradiVeQState,
) -> GradiVeQState:
    """Record for each basis some slices of this step's result, and their energy."""
    pieces: list[Any] = []
    for cut in slicing.slices(layout):
        slices = cut.cut(ops, total)
        for group in range(cut.groups):
            first, members = group * cut.reuse, cut.members(group)
            turn = (ops.arange(cut.rows) + row * cut.rows) % members * cut.length
            place = ops.reshape(turn, (-1, 1)) + ops.reshape(ops.arange(cut.length), (1, -1))
            neighbours = ops.reshape(slices[first : first + members], (-1,))
            pieces.append(ops.gather(neighbours, ops.reshape(place, (-1,))))
            pieces.append(ops.reshape(ops.inner(neighbours, neighbours), (1,)))
    taken = ops.concat(pieces)
    taken = ops.where(taken - taken == 0, taken, 0.0)  # non-finite samples count as 0
    place = ops.arange(taken.shape[0]) + row * taken.shape[0]
    return state._replace(samples=ops.put(state.samples * 1, place, taken))


def learned(
    slicing: Slicing, ops: Ops, context: Context, state: GradiVeQState
) -> Generator[Any, Any, GradiVeQState]:
    """Compute the bases, which are the same on all ranks: so are the samples.

    Where the bits differ nevertheless (other processors, or another number of threads), those of
    one rank go to all.
    """
    layout = context.layout
    root = layout.digest % context.size
    vector = _bases(slicing, ops, layout, state)
    digest = ops.checksum(ops.words((0,)), ops.to_bytes(vector, "float32"))
    digests = yield Allgather(ops.reshape(digest, (1,)))
    apart = ops.staged(ops.stage(ops.cast(ops.max(ops.abs(digests - digest)) > 0, "int64")))
    ops.warn(apart > 0, APART.format(slicing.basis_bytes(layout)))

    def equal() -> Generator[Any, Any, tuple[Tensor]]:
        yield from ()
        return (vector,)

    def from_root() -> Generator[Any, Any, tuple[Tensor]]:
        return ((yield Broadcast(vector, root)),)

    (vector,) = yield Switch(ops.pick(apart > 0, 1, 0), (equal, from_root))
    return _taken(slicing, ops, layout, vector, state)


def computed(slicing: Slicing, ops: Ops, layout: Layout, state: GradiVeQState) -> GradiVeQState:
    """Return the state with bases of its samples, without an exchange."""
    return _taken(slicing, ops, layout, _bases(slicing, ops, layout, state), state)


def _taken(
    slicing: Slicing, ops: Ops, layout: Layout, vector: Tensor, state: GradiVeQState
) -> GradiVeQState:
    """Return the state with the bases that `_bases` has computed."""
    sizes = sizes_of(slicing.slices(layout))
    ends = sizes.basis, sizes.basis + sizes.offset
    return state._replace(
        basis=vector[: ends[0]] * 1,
        offset=vector[ends[0] : ends[1]] * 1,
        dimensions=ops.stage(ops.cast(vector[ends[1] :], "int64")),
    )


def _bases(slicing: Slicing, ops: Ops, layout: Layout, state: GradiVeQState) -> Tensor:
    """Return all bases, then the offsets, then the dimensions; float32."""
    samples = ops.reshape(state.samples, (slicing.sample_steps, -1))
    bases, offsets, dimensions = [], [], []
    start = 0
    for cut in slicing.slices(layout):
        for _ in range(cut.groups):
            end = start + cut.rows * cut.length
            part_samples, energy = samples[:, start:end], samples[:, end]
            start = end + 1
            pca, used = _basis(slicing, ops, cut, part_samples, ops.cast(energy, "float64"))
            column = ops.arange(cut.max_dimensions) >= cut.max_dimensions - used
            basis = ops.where(column, pca.vectors, 0.0)  # [length, max_dimensions]
            mean = ops.reshape(pca.mean, (1, cut.length))
            inside = ops.matmul(ops.matmul(mean, basis), ops.transpose(basis, (1, 0)))
            bases.append(ops.reshape(ops.cast(basis, "float32"), (-1,)))
            offsets.append(ops.reshape(ops.cast(mean - inside, "float32"), (-1,)))
            dimensions.append(ops.cast(used, "float32"))
    return ops.concat((*bases, *offsets, *dimensions))


def _basis(
    slicing: Slicing, ops: Ops, cut: Slices, samples: Tensor, energy: Tensor
) -> tuple[Components, Tensor]:
    """Return the components of samples [steps, rows * length], and how many of them to use.

    Each step has the same weight, whatever its energy: the relative loss matters.
    """
    weight = ops.where(energy > 0, 1.0 / ops.where(energy > 0, energy, 1.0), 0.0)

    def part(first: int, last: int) -> tuple[Tensor, Tensor]:
        rows = ops.reshape(samples[first:last], (-1, cut.length))
        each = ops.reshape(weight[first:last], (-1, 1)) * ops.full((1, cut.rows), 1.0, "float64")
        return rows, ops.reshape(each, (-1,))

    limit = cut.max_dimensions
    everything = components(ops, *part(0, slicing.sample_steps), limit)
    if slicing.loss_threshold is None:
        return everything, ops.full((1,), limit)
    fitted = slicing.fitted_steps
    pca = components(ops, *part(0, fitted), limit)
    share = part(fitted if fitted < slicing.sample_steps else 0, slicing.sample_steps)
    return everything, dimension(ops, pca, *share, slicing.loss_threshold, limit)
