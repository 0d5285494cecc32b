"""Sources of a gradient's second moments: samples, micro-batches, or the step itself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from hvd_gradcomp.algorithms.threshold.variance import weight_of_passes
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.torch.interop.amp import GradScalerAdapter
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.reduce.bucket import Bucket, Named, as_real

LOGGER = logging.getLogger("hvd_gradcomp")
STORED = ("sample", "microbatch")  # sources whose moments buckets store; a step's are its squares


def source_of(
    compressor: Compressor, named_parameters: Named, passes: int, tell: bool, how: str | None
) -> str:
    """Return the source of second moments: "sample", "microbatch", "step", or "" if unused.

    Args:
        compressor: of the exchange.
        named_parameters: those whose compressor uses moments.
        passes: backward passes for each exchange.
        tell: this rank warns if nothing better than "step" is set up.
        how: the call that sets up per-sample moments, for messages; None if there is none, since
            what is exchanged are no gradients of samples.

    Raises:
        ValueError: the source that the compressor requests is not set up.
    """
    if not compressor.uses_moments:
        return ""
    source = str(getattr(compressor, "moments", "auto"))
    if how is None:
        if passes > 1 and source in ("auto", "microbatch"):
            return "microbatch"
        if source in STORED:
            raise ValueError(
                f"moments={source!r} are those of the gradients of samples, and what is exchanged "
                "here (a change of parameters, or a momentum) has none: pass moments='step'. It is "
                f"{compressor}"
            )
        return "step"
    tracked = [tracker.is_tracked(p) for _, p in named_parameters]
    if source == "auto":
        if tracked and all(tracked):
            return "sample"
        if passes > 1:
            return "microbatch"
        if tell:
            LOGGER.warning(
                "the compressor takes each step as one sample (moments='step'): nothing better "
                "is set up. %s gives per-sample moments, backward_passes_per_step > 1 those of "
                "micro-batches. It is %s",
                how,
                compressor,
            )
        return "step"
    if source == "sample" and not all(tracked):
        untracked = [
            name for (name, _), is_tracked in zip(named_parameters, tracked) if not is_tracked
        ]
        raise ValueError(f"moments='sample' needs {how}; not tracked: {', '.join(untracked[:8])}")
    if source == "microbatch" and passes < 2:
        raise ValueError(
            f"moments='microbatch' needs backward_passes_per_step of at least 2, got {passes}"
        )
    return source


@interpreted
def _take_pass(
    alive: weakref.ref[Sources],
    owner: weakref.ref[torch.nn.Parameter],  # which keeps the hook
    contribution: torch.Tensor,
) -> None:
    """Take one pass's contribution before it is accumulated; a tensor hook."""
    sources, parameter = alive(), owner()
    if sources is not None and parameter is not None:
        # Without a gradient nothing was accumulated: earlier passes were dropped.
        sources.add_pass(parameter, contribution, anew=parameter.grad is None)


class Sources:
    """Second moments of one exchange.

    Args:
        source: the result of `source_of`.
        places: the bucket of each parameter, and its slot there.
        batch_size: samples that a rank sees for each exchange, for micro-batches.
        scaling: of the loss.
    """

    def __init__(
        self,
        source: str,
        places: Mapping[torch.nn.Parameter, tuple[Bucket, int]],
        batch_size: int | None,
        scaling: GradScalerAdapter,
    ) -> None:
        self.source, self._places = source, places
        self._batch_size, self._scaling = batch_size, scaling
        self._counted: dict[torch.nn.Parameter, int] = {}
        self._made = 0  # passes of this step; a layer contributes zero to passes that do not use it

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Register hooks on parameters that need the moments of micro-batches."""
        for bucket in buckets:
            if self.source == "microbatch" and bucket.moment is not None:
                for parameter in bucket.parameters:
                    hook = partial(_take_pass, weakref.ref(self), weakref.ref(parameter))
                    parameter.register_hook(hook)

    def add_pass(
        self,
        parameter: torch.nn.Parameter,
        contribution: torch.Tensor,
        *,
        anew: bool,
        weight: float = 1.0,
    ) -> None:
        """Add the square of one pass's contribution to the moment of a parameter.

        Args:
            parameter: of a bucket that stores moments.
            contribution: to its gradient, of this pass alone.
            anew: earlier passes of this step were dropped.
            weight: factor of the contribution.
        """
        bucket, slot = self._places[parameter]
        square = bucket.moment_views[slot]
        dense = contribution.to_dense() if contribution.is_sparse else contribution
        dense = as_real(dense.detach()).to(square.dtype)
        counted = 0 if anew else self._counted.get(parameter, 0)
        if counted == 0:
            square.zero_()
        square.addcmul_(dense, dense, value=weight**2)
        self._counted[parameter] = counted + 1
        self._made = max(self._made, self._counted[parameter])

    @property
    def passes(self) -> int:
        """Return the number of passes of this step so far."""
        return self._made

    def fill_bucket(self, bucket: Bucket, slot: int) -> None:
        """Copy the moment of a layer into the bucket, which has the layer's gradient already."""
        parameter, view = bucket.parameters[slot], bucket.moment_views[slot]
        if self.source == "sample":
            moment = tracker.take(parameter, bucket.views[slot])
            if moment is None:
                view.zero_()
            elif isinstance(moment, tracker.Step):
                view.copy_(bucket.views[slot]).square_()
            else:
                self._scaling.unscale(moment, view, power=2)
            return
        if self._counted.pop(parameter, 0) == 0:
            view.zero_()
            return
        gradient = bucket.views[slot].to(view.dtype)
        if self._made < 2:  # a step that ends with its first pass is one sample
            torch.square(gradient, out=view)
            return
        weight = weight_of_passes(self._made, self._batch_size)
        self._scaling.unscale(view, view, power=2)
        view.mul_(weight).addcmul_(gradient, gradient, value=1.0 - weight).clamp_(min=0.0)

    def clear(self, those: Collection[torch.nn.Parameter] | None = None) -> None:
        """Drop the contributions of passes, for all parameters or for these."""
        if those is None:
            self._made = 0
        for p in list(self._counted) if those is None else those:
            self._counted.pop(p, None)

    def end_step(self) -> None:
        """Reset the count of passes for the next step."""
        self._made = 0
