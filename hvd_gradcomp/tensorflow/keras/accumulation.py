"""Gradient accumulation over the passes of a step, and the source of second moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.algorithms.threshold.variance import weight_of_passes
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER


class GradientAccumulation:
    """Sums of gradients, and of their squares or moments, over the passes of a step.

    Args:
        options: of the exchange: passes of a step, whether sums are divided by their number, and
            samples that a rank sees in a step; None counts as many.
        number: a variable, the passes so far.
        added, squared: variables, one for each gradient.

    Attributes:
        number, added, squared: as given.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        number: tf.Variable,
        added: Sequence[tf.Variable],
        squared: Sequence[tf.Variable],
    ) -> None:
        self._passes, self._batch_size = options.backward_passes_per_step, options.batch_size
        self._share = 1.0 / self._passes if options.average_aggregated_gradients else 1.0
        self.number, self.added, self.squared = number, added, squared
        self._came: set[int] = set()  # places that had a gradient in any pass so far

    @property
    def pass_of_step(self) -> tf.Tensor:
        """Return the number of passes added since the last exchange."""
        return self.number % self._passes

    def add(self, gradients: list[Any], moments: list[Any] | None) -> None:
        """Add a pass."""
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._came.add(place)
            added = self.added[place]
            part = tf.cast(tf.convert_to_tensor(gradient), added.dtype) * self._share
            added.assign_add(part)
            if moments is None:
                square = tf.cast(part * part, tf.float32)
            else:
                square = moments[place] * (self._share * self._share)
            self.squared[place].assign_add(square)
        self.number.assign_add(1)

    def totals(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the sums of gradients that occurred in this pass or in another one.

        Args:
            gradients: of the last pass.
            variables: whose they are. A variable that was frozen meanwhile is left out.
        """
        return [
            None if g is None and not (place in self._came and v.trainable) else total.value()
            for place, (total, g, v) in enumerate(zip(self.added, gradients, variables))
        ]

    def moments(self, sampled: bool) -> list[Any]:
        """Return the second moments of the step; of samples, if those were added."""
        if sampled:
            return [s.value() for s in self.squared]
        weight = weight_of_passes(self._passes, self._batch_size)
        sums = [tf.cast(a.value(), tf.float32) for a in self.added]
        return [
            tf.maximum(weight * s.value() + (1.0 - weight) * a * a, 0.0)
            for s, a in zip(self.squared, sums)
        ]

    def clear(self, places: Sequence[int]) -> None:
        """Reset the sums that were exchanged, for the next step, and keep the rest."""
        for place in places:
            for total in (self.added[place], self.squared[place]):
                total.assign(tf.zeros_like(total))


class MomentSource:
    """Source of second moments, decided at the first trace.

    Args:
        compressor: which uses them, or does not.
        options: of the exchange.
    """

    def __init__(self, compressor: Compressor, options: ExchangeOptions) -> None:
        self._compressor, self._options = compressor, options
        self._decided = ""

    @property
    def is_passes(self) -> bool:
        """Return True if moments are computed from the sums over passes."""
        return self._decided not in ("", "step")

    def decide(self, moments: list[Any] | None) -> str:
        """Return the source, such as "sample"; "" if moments are not used.

        Args:
            moments: those of samples, if they are tracked.

        Raises:
            ValueError: the compressor needs moments of samples, and they are not tracked.
        """
        if not self._compressor.uses_moments or self._decided:
            return self._decided
        source = getattr(self._compressor, "moments", "auto")
        if source == "sample" and moments is None:
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before model.fit, from "
                "hvd_gradcomp.tensorflow.keras"
            )
        if source == "auto":
            several = self._options.backward_passes_per_step > 1
            source = "sample" if moments else "microbatch" if several else "step"
            if source == "step" and self._options.process_set.rank() == 0:
                LOGGER.warning(
                    "the compressor takes each step as one sample (moments='step'): nothing better "
                    "is set up. hvd.track_moments(model) gives per-sample moments, "
                    "backward_passes_per_step > 1 those of micro-batches. It is %s",
                    self._compressor,
                )
        self._decided = str(source)
        return self._decided
