"""Sampling plans of a probe, and the layout of the samples in its buffer.

A probe takes a sample of each layer and, after it, two neighbouring slices of a recorded
convolution. A plan has their indices; the other functions split the vector of all layers and pad
its parts to rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import gcd, prod
from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor


class Plan(NamedTuple):
    """Sampling plan of one layer."""

    name: str
    size: int
    stride: int
    sampled: int  # number of sampled elements
    shape: tuple[int, ...]  # of a recorded convolution, else ()
    sizes: tuple[int, ...]  # of its slices, ascending

    @property
    def recorded(self) -> int:
        """Elements of the two neighbouring slices of the largest size."""
        return 2 * self.sizes[-1] if self.sizes else 0

    @property
    def taken(self) -> int:
        """Number of elements taken."""
        return self.sampled + self.recorded

    def places(self, filters_last: bool) -> list[int]:
        """Return the indices to take of the flat gradient: the sample, then the slices.

        Args:
            filters_last: the shape is [..., depth, filters] and not [filters, depth, ...].
        """
        sample = list(range(0, self.size, self.stride))
        if filters_last or not self.shape:
            return sample + list(range(self.recorded))
        filters, depth = self.shape[:2]
        around = prod(self.shape[2:])
        slices = []
        for place in range(self.recorded):
            rest, f = divmod(place, filters)
            where, d = divmod(rest, depth)
            slices.append((f * depth + d) * around + where)
        return sample + slices


def planned(
    what: str,
    layers: list[tuple[str, tuple[int, ...]]],
    kernels: Set[str],
    *,
    sample: int,
    slice_sizes: Sequence[int],
    convolutions: int,
) -> list[Plan]:
    """Make a plan for each layer.

    Args:
        what: name of the caller, for errors.
        layers: name and shape of each.
        kernels: the names of the convolutions.
        sample: maximum number of elements of a layer.
        slice_sizes: lengths of slices.
        convolutions: maximum number of recorded convolutions.

    Raises:
        ValueError: a name repeats, a layer is empty, or there is none.
    """
    names = [name for name, _ in layers]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{what}: names must be unique, got {twice} again")
    empty = [name for name, shape in layers if not prod(shape)]
    if empty or not layers:
        raise ValueError(
            f"{what}: layers must have elements, got none" + (f" in {empty}" if empty else "")
        )
    sliced = {
        name: tuple(sorted({m for m in slice_sizes if 2 * m <= prod(shape)}))
        for name, shape in layers
        if name in kernels
    }
    able = [name for name in names if sliced.get(name)]
    few = min(convolutions, len(able))
    chosen = {able[i * (len(able) - 1) // max(few - 1, 1)] for i in range(few)}
    plans = []
    for name, shape in layers:
        size = prod(shape)
        stride = max(-(-size // sample), 1)
        while stride > 1 and gcd(stride, size) > 1:
            stride += 1
        sizes = sliced[name] if name in chosen else ()
        plans.append(Plan(name, size, stride, -(-size // stride), shape if sizes else (), sizes))
    return plans


def divided(plans: Sequence[Plan], taken: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Split a vector into each layer's samples and the slices of recorded layers."""
    samples, slices, start = [], [], 0
    for plan in plans:
        middle, end = start + plan.sampled, start + plan.taken
        samples.append(taken[start:middle])
        if plan.recorded:
            slices.append(taken[middle:end])
        start = end
    return samples, slices


def padded(ops: Ops, plans: Sequence[Plan], samples: Sequence[Tensor]) -> Tensor:
    """Pad samples to one row for each layer; float64 [layers, longest]."""
    longest = max(plan.sampled for plan in plans)
    rows = [
        ops.concat((ops.cast(x, "float64"), ops.zeros((longest - plan.sampled,), "float64")))
        for plan, x in zip(plans, samples)
    ]
    return ops.stack(rows)


def own(ops: Ops, plans: Sequence[Plan]) -> Tensor:
    """Return the mask of valid elements in the padded rows; bool [layers, longest]."""
    longest = max(plan.sampled for plan in plans)
    counts = ops.reshape(ops.words([plan.sampled for plan in plans]), (-1, 1))
    return ops.reshape(ops.arange(longest), (1, -1)) < counts


def numbered(ops: Ops, counts: Sequence[int]) -> Tensor:
    """Repeat 0 as often as the first count, then 1, and so on."""
    return ops.concat([ops.full((count,), i) for i, count in enumerate(counts)])
