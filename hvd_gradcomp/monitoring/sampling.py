"""Which elements of each layer a probe looks at, and how they lie in what it exchanges.

Of each layer a sample is taken, and of a recorded convolution two neighbouring slices after it. A
plan says which; the other functions take apart the vector of all layers, and put rows together.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import gcd, prod
from typing import NamedTuple

from hvd_gradcomp.ops import Ops, Tensor


class Plan(NamedTuple):
    """What is taken of one layer."""

    name: str
    size: int
    stride: int
    sampled: int  # elements of it that are looked at
    shape: tuple[int, ...]  # of a recorded convolution, else ()
    sizes: tuple[int, ...]  # of its slices, ascending

    @property
    def recorded(self) -> int:
        """Elements of the two neighbouring slices of the largest size."""
        return 2 * self.sizes[-1] if self.sizes else 0

    @property
    def taken(self) -> int:
        """How many elements are."""
        return self.sampled + self.recorded

    def places(self, filters_last: bool) -> list[int]:
        """Which elements of the flat gradient are taken: the sample, then the slices.

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
    """A plan for each layer.

    Args:
        what: is planned for, to be named in errors.
        layers: name and shape of each.
        kernels: the names of those that are convolutions.
        sample: elements of a layer, at most.
        slice_sizes: lengths of slices.
        convolutions: how many are recorded, at most.

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
    """By layer, the samples and (of all that have any) the slices."""
    samples, slices, start = [], [], 0
    for plan in plans:
        middle, end = start + plan.sampled, start + plan.taken
        samples.append(taken[start:middle])
        if plan.recorded:
            slices.append(taken[middle:end])
        start = end
    return samples, slices


def padded(ops: Ops, plans: Sequence[Plan], samples: Sequence[Tensor]) -> Tensor:
    """One row a layer; float64 [layers, longest]."""
    longest = max(plan.sampled for plan in plans)
    rows = [
        ops.concat((ops.cast(x, "float64"), ops.zeros((longest - plan.sampled,), "float64")))
        for plan, x in zip(plans, samples)
    ]
    return ops.stack(rows)


def own(ops: Ops, plans: Sequence[Plan]) -> Tensor:
    """Which elements of the padded rows are some; bool [layers, longest]."""
    longest = max(plan.sampled for plan in plans)
    counts = ops.reshape(ops.words([plan.sampled for plan in plans]), (-1, 1))
    return ops.reshape(ops.arange(longest), (1, -1)) < counts


def numbered(ops: Ops, counts: Sequence[int]) -> Tensor:
    """0 as often as the first count says, then 1, and so on."""
    return ops.concat([ops.full((count,), i) for i, count in enumerate(counts)])
