"""Entropy-based gradient compression (Kuang, Chen, Xiao, Wu 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.momentum import MomentumCorrected, validate_momentum
from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.capacity import CapacitySchedule, CapacityState
from hvd_gradcomp.method.compressor import Report
from hvd_gradcomp.ops import Ops, Tensor


class EGCState(NamedTuple):
    """State of one bucket."""

    memory: Memory  # r, and u with momentum; rank-local
    capacity: CapacityState  # replicated
    sent: Tensor  # int64 [layers], elements that this rank has sent so far
    hint: Tensor  # float32 [layers], magnitude to search from in the next step; rank-local
    quota: Tensor  # int64 [layers], elements to send of each layer; rank-local


@dataclass(frozen=True)
class EGCCompressor(MomentumCorrected):
    """EGC: sends the `n * H / K` largest elements of each layer (Kuang et al. 2019, IV.A).

    `H` is the entropy, in bits, of the histogram of the layer's gradient over `bins` equal bins
    between its smallest and largest element, recomputed every `entropy_interval` steps. Each
    step: `u = m*u + g`, `r += u`; of each layer the `k = max(1, round(n * H / K))` largest `|r|`
    are sent, and `r = u = 0` there.

    What travels: values, float32 by default, and packed indices, by allgather; about
    `4 + (log2(K/H) + 2) / 8` bytes for each element of capacity. The capacity follows the entropy:
    it is the smallest capacity level (four per octave, at least 16 elements) that fits every rank's
    quota; in the first step the largest. When the quota grows, the excess waits for the next step;
    when it shrinks, payloads shrink 16 steps later. If an allgather would move more bytes than
    dense gradients, 4 bytes for each element of the bucket, by allreduce. State: `r` and `u`,
    8 bytes for each element.

    Default: `EGCCompressor(K=1024)`, the paper's, as trained in docs/papers.md and
    docs/papers-long.md. `K=2048` lost more, smaller ones were at most a point more accurate.

    Args:
        K: the density is `H / K`; positive; larger sends less. The paper recommends 1024.
        bins: of the histogram, 2 to 256; more send more (`H` grows to at most `log2(bins)`). Each
            refresh makes one pass over the gradient for each bin.
        entropy_interval: steps from one histogram to the next, at least 1; an epoch in the paper.
        momentum: of the velocity, in [0, 1). None takes it over from the wrapped SGD, whose own
            momentum is then set to 0; 0 disables the correction.
        nesterov: the look-ahead variant; None takes it over as well.
        masking: also clear the velocity of sent elements.
        index_coding: "elias_fano", packed, or "int32", plain.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        values: code of the sent values: "float32", "bfloat16", "int8", "int4", "int2" or "sign";
            fewer bits send less of a layer that sends many. What rounding takes stays in `r`.
            Neighbours in a layer, some 4,096 at most, share a scale or a codebook, which is sent
            too: of a layer that sends few, it may take more than the bits save.

    Residual and momentum correction follow section IV.C, which takes them from DGC.

    Differs from the paper: a constant layer (`H = 0`) still sends one element; the entropy is
    refreshed by steps, not epochs. The paper's learning-rate correction (section IV.B) is
    `hvd_gradcomp.torch.EGCScheduler` and the Keras callback `EGCLearningRate`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    >>> EGCCompressor(K=512, momentum=0.9)  # doctest: +ELLIPSIS
    EGCCompressor(K=512, bins=2, entropy_interval=100, momentum=0.9, ...)
    """

    K: float = 1024
    bins: int = 2
    entropy_interval: int = 100
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    index_coding: str = "elias_fano"
    max_norm: float | None = None
    values: str = "float32"

    reset_on_merge = frozenset({"hint", "quota"})
    varies_in_size = True

    def __post_init__(self) -> None:
        validate.real(self, "K", low=0)
        validate.whole(self, "bins", low=2, high=256)
        validate.whole(self, "entropy_interval", low=1)
        validate_momentum(self)
        self.validate_codings()
        self.validate_max_norm()

    def count(self, size: int) -> int:
        return min(size, max(1, int(size * log2(self.bins) / self.K + 0.5)))

    def capacities(self, layout: Layout) -> tuple[int, ...]:
        return _capacities(len(layout.names), self.capacity(layout))

    def report(self, layout: Layout, state: EGCState, steps: int, since: int = 0) -> Report:
        report = super().report(layout, state, steps, since)
        return report._replace(level_changes=int(state.capacity.changes))

    def init(self, ops: Ops, layout: Layout) -> EGCState:
        memory, schedule, sent, hint = super().init(ops, layout)
        return EGCState(memory, schedule, sent, hint, ops.zeros((len(layout.names),), "int64"))

    def k_per_layer(
        self, ops: Ops, layout: Layout, step: Any, gradient: Tensor, state: EGCState
    ) -> tuple[Tensor, EGCState]:
        k_per_layer = ops.cond(
            step % self.entropy_interval == 0,
            lambda: self._k_by_entropy(ops, layout, gradient),
            lambda: state.quota,
        )
        # A rank that joins between two refreshes has no entropy yet: its quota is 0, which stands
        # for the maximum.
        return k_per_layer, state._replace(quota=k_per_layer)

    def looks_at_gradient(self, step: Any) -> bool:
        return bool(step % self.entropy_interval == 0)

    def _k_by_entropy(self, ops: Ops, layout: Layout, gradient: Tensor) -> Tensor:
        sizes = ops.cast(ops.words(layout.sizes), "float64")
        entropy = entropy_of_layers(ops, layout, gradient, self.bins)
        k_per_layer = ops.cast(sizes * entropy / self.K + 0.5, "int64")
        return ops.minimum(ops.maximum(k_per_layer, 1), ops.words(self.limits(layout)))


@lru_cache(maxsize=1024)
def _capacities(minimum: int, maximum: int) -> tuple[int, ...]:
    """Return the capacities, from one element of each layer to the maximum."""
    capacities = CapacitySchedule.up_to(maximum).capacities
    return (*(capacity for capacity in capacities if capacity >= minimum), maximum)


def entropy_of_layers(ops: Ops, layout: Layout, gradient: Tensor, bins: int) -> Tensor:
    """Return the entropy, in bits, of each layer's histogram of equal bins; float64 [layers]."""
    sizes = ops.cast(ops.words(layout.sizes), "float64")
    entropy = sizes * 0.0
    counts = ops.layer_histograms(layout, gradient, bins)
    for number in range(bins):
        share = ops.cast(counts[number], "float64") / sizes
        entropy = entropy - share * ops.log2(ops.maximum(share, 1e-300))
    return entropy
