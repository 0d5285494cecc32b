"""Exact selection of the k largest elements of each layer, or of the model.

No layer is sorted: elements above a bound are found while the gradient is accumulated, and only
they are sorted. About 1.3 k passed the bound in the previous step; that changes slowly, since the
memory changes slowly. Layers with fewer than k candidates (all, in the first step) are scanned
again: small ones completely, others with a bound from a strided sample, and once more with a lower
bound if the sample misled. Ties with the k-th largest take turns, so that no position is
preferred: those at `step * k` and after come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hvd_gradcomp.codecs.compaction import Indexed, Masked, Selection
from hvd_gradcomp.ops import Ops, Tensor
from hvd_gradcomp.ops.scope import Scope

_SMALL = 4096  # layers up to this size are not sampled
_BITS = 31  # of a magnitude
_FINE = 18  # bits below a bin of the sample's histogram: 32 bins for each octave
_BINS = 512  # 16 octaves below the largest; the last bin takes the rest


def largest(
    ops: Ops,
    scope: Scope,
    r: Tensor,
    k: Tensor,
    limits: Sequence[int],
    turn: Any,
    passing: Tensor | None,
) -> tuple[Selection, Tensor, Tensor]:
    """Select the k largest |r| of each group, never zeros.

    Args:
        r: float32 [size].
        k: int64 [groups], at most `limits`.
        turn: the step; decides which of equal magnitudes come first.
        passing: indices of all elements above some bound, ascending; None if not searched.

    Returns:
        The selection, the bits of its values, and for each group a magnitude that about 1.3 k
        elements reach; infinite with static shapes, 0 for a group with fewer than k.
    """
    layout = scope.layout
    if ops.dynamic_shapes:
        candidates = _candidates(ops, scope, r, k, limits, passing)
        code = ops.float_bits(ops.gather(r, candidates))
        bits = code % (1 << _BITS)
        selection: Selection = Indexed(ops, layout, candidates)
        last, hint = _last_of_sorted(ops, scope, candidates, bits, k)
    else:
        code = ops.float_bits(r)
        bits = code % (1 << _BITS)
        selection = Masked(ops, layout, bits > 0)
        last = _last_of_layers(ops, scope, r, k, limits)
        hint = ops.full((scope.count,), float("inf"), "float32")
    last_of_item = selection.of_layer(scope.of_layers(ops, last))
    selection, code = selection.only((bits > 0) & (bits >= last_of_item), code)
    if ops.dynamic_shapes:
        surplus = scope.count_of(ops, selection.index_of_items()) > k
        index, code = ops.cond(
            _some(ops, surplus),
            lambda: _dropped(_without_surplus(ops, scope, selection, code, last, k, turn)),
            lambda: (selection.index_of_items(), code),
        )
        return Indexed(ops, layout, index), code, hint
    return *_without_surplus(ops, scope, selection, code, last, k, turn), hint


def _some(ops: Ops, flags: Tensor) -> Any:
    """Return True, as a branch condition, if any flag is set."""
    return ops.staged(ops.stage(ops.max(ops.cast(flags, "int64")))) > 0


def _dropped(selected: tuple[Selection, Tensor]) -> tuple[Tensor, Tensor]:
    return selected[0].index_of_items(), selected[1]


def _candidates(
    ops: Ops, scope: Scope, r: Tensor, k: Tensor, limits: Sequence[int], passing: Tensor | None
) -> Tensor:
    """Return indices of at least the k largest of each group, or of all nonzeros; ascending."""

    def short_of(index: Tensor) -> Tensor:
        return scope.count_of(ops, index) < k

    def again(candidates: Tensor, short: Tensor, bound: Tensor) -> Tensor:
        """Scan only the groups with too few candidates."""
        kept = ops.nonzero(~ops.gather(short, scope.of_index(ops, candidates)))
        more = ops.find(r, of_blocks(ops, scope, ops.where(short, bound, float("inf"))))
        return ops.sort(ops.concat((ops.gather(candidates, kept), more)))

    candidates = ops.full((0,), 0) if passing is None else passing
    short = short_of(candidates)
    large = ops.words(scope.sizes) > _SMALL
    zero = ops.full((scope.count,), 0.0, "float32")
    bound = ops.cond(
        _some(ops, short & large), lambda: _bound_by_sample(ops, scope, r, k, limits), lambda: zero
    )
    bound = ops.where(large, bound, 0.0)
    for factor in (0.25, 0.0, 0.0):
        candidates = ops.cond(
            _some(ops, short),
            partial(again, candidates, short, bound),
            partial(lambda f: f, candidates),
        )
        short = short_of(candidates) & (bound > 0)
        bound = bound * factor
    return candidates


def of_blocks(ops: Ops, scope: Scope, bound: Tensor) -> Tensor:
    """Expand a value of each group to one of each block."""
    table = ops.table(scope.layout, "layer_of_block")
    return ops.gather(scope.of_layers(ops, bound), table)


def _bound_by_sample(ops: Ops, scope: Scope, r: Tensor, k: Tensor, limits: Sequence[int]) -> Tensor:
    """Estimate for each group a magnitude that somewhat more than k elements reach."""
    layout = scope.layout
    index, layer = ops.table(layout, "sample"), ops.table(layout, "layer_of_sample")
    magnitude, _ = ops.split_bits(ops.float_bits(ops.abs(ops.gather(r, index))), _FINE)
    group = ops.table(layout, "no_layer_of_sample") if scope.whole else layer
    top = ops.segment_max(magnitude, group, scope.count)
    bin_ = ops.minimum(ops.gather(top, group) - magnitude, _BINS - 1)
    strides = ops.table(layout, "stride_of_sample")
    counts = ops.segment_sum(strides, group * _BINS + bin_, scope.count * _BINS)
    counts = ops.reshape(counts, (scope.count, _BINS))
    reached = ops.reshape(ops.cumsum(ops.reshape(counts, (-1,))), (scope.count, _BINS))
    reached = reached - reached[:, :1] + counts[:, :1]
    target = ops.reshape(k + ops.words(scope.slack(limits)), (-1, 1))
    below = ops.sum(ops.cast(reached < target, "int64"), -1)
    bits = ops.where(below < _BINS - 1, ops.maximum(top - below, 0), 0)
    return ops.bits_float(bits * (1 << _FINE))


def _last_of_sorted(
    ops: Ops, scope: Scope, candidates: Tensor, bits: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Sort the candidates; return the bits of each group's k-th largest and the next hint."""
    group = scope.of_index(ops, candidates)
    limit = (1 << _BITS) - 1
    ascending = ops.sort(group * (1 << _BITS) + (limit - bits))
    ascending = ops.concat((ascending, ops.full((1,), limit)))
    count = scope.count_of(ops, candidates)
    start = ops.cumsum(count) - count

    def magnitude(rank: Tensor) -> Tensor:
        place = start + ops.maximum(ops.minimum(rank, count) - 1, 0)
        return limit - ops.split_bits(ops.gather(ascending, place), _BITS)[1]

    # A quarter more, plus the count's fluctuation; if too few passed, search deeper next time.
    spread = ops.cast(ops.sqrt(ops.cast(k, "float64")) * 4.0, "int64")
    wished = k + ops.split_bits(k, 2)[0] + spread + 8
    hint = ops.bits_float(magnitude(wished)) * ops.where(count < wished, ops.reals([0.97]), 1.0)
    few = count < ops.maximum(k, 1)
    return ops.where(few, 0, magnitude(k)), ops.where(few, 0.0, hint)


def _last_of_layers(ops: Ops, scope: Scope, r: Tensor, k: Tensor, limits: Sequence[int]) -> Tensor:
    """Return the bits of each group's k-th largest with static shapes, layer by layer."""
    layout, magnitude = scope.layout, ops.abs(r)
    if scope.whole:
        pieces = [magnitude]
    else:
        pieces = [magnitude[o : o + n] for o, n in zip(layout.offsets, layout.sizes)]
    last = [  # an empty layer has none
        ops.gather(ops.float_bits(ops.largest(piece, m)), k[group : group + 1] - 1)
        if m
        else ops.full((1,), 0)
        for group, (piece, m) in enumerate(zip(pieces, limits))
    ]
    return ops.concat(last)


def _without_surplus(
    ops: Ops,
    scope: Scope,
    selection: Selection,
    code: Tensor,
    last: Tensor,
    k: Tensor,
    turn: Any,
) -> tuple[Selection, Tensor]:
    """Drop ties with the k-th largest in excess of k, different ones each step."""
    bits = code % (1 << _BITS)
    tie = ops.cast(bits == selection.of_layer(scope.of_layers(ops, last)), "int64")
    tie = selection.items_only(tie)
    greater = selection.items_only(1 - tie)

    def per_group(items: Tensor) -> Tensor:
        by_layer = selection.sum_of_layer(items)
        return ops.reshape(ops.sum(by_layer), (1,)) if scope.whole else by_layer

    def of_item(groups: Tensor) -> Tensor:
        return selection.of_layer(scope.of_layers(ops, groups))

    ties_kept = k - per_group(greater)
    first = turn * k % ops.words([max(size, 1) for size in scope.sizes])
    number = selection.index_of_items() - selection.of_layer(ops.words(scope.starts()))
    early = ops.cast(number < of_item(first), "int64") * tie
    ties, earlies = per_group(tie), per_group(early)
    before = ops.cumsum(ties) - ties
    rank = ops.cumsum(tie) - of_item(before)  # from 1, in the order of indices
    rank = rank + ops.where(early > 0, of_item(ties - earlies), of_item(0 - earlies))
    kept = (greater > 0) | (rank <= of_item(ties_kept))
    return selection.only(kept & (tie + greater > 0), code)
