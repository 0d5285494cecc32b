"""Methods that are made for some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.layers import Layer


@runtime_checkable
class Chooses(Protocol):
    """Leaves layers to others."""

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> Sequence[Compressor]:
        """Who compresses which layer.

        Args:
            layers: (name, shape, dtype) in the order of the model.
            ranks: how many exchange.

        Raises:
            ValueError: it cannot work on these layers, or with so many ranks.
        """


@runtime_checkable
class Weighs(Protocol):
    """Knows what a layer will take."""

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        """About what a layer takes of a payload; None where that depends on the gradients.

        Args:
            shape: with the outputs first, as `core.layout.outputs_first` has it.
        """


def of_layers(compressor: Compressor, layers: Sequence[Layer], ranks: int) -> Sequence[Compressor]:
    """See `Chooses`; by default it takes all of them."""
    if isinstance(compressor, Chooses):
        return compressor.of_layers(layers, ranks)
    return [compressor] * len(layers)


def layer_bytes(compressor: Compressor, shape: Sequence[int]) -> float | None:
    """See `Weighs`; by default None."""
    return compressor.layer_bytes(shape) if isinstance(compressor, Weighs) else None
