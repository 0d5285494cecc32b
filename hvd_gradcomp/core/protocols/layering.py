"""Protocols of methods that are made for some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.layers import Layer


@runtime_checkable
class Chooses(Protocol):
    """Compressor that leaves some layers to others."""

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> Sequence[Compressor]:
        """Return the compressor of each layer.

        Args:
            layers: (name, shape, dtype) in the order of the model.
            ranks: how many exchange.

        Raises:
            ValueError: it cannot work on these layers, or with so many ranks.
        """


@runtime_checkable
class Weighs(Protocol):
    """Compressor that estimates a layer's share of a payload."""

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        """Return about how many bytes a layer sends; None if that depends on the gradients.

        Args:
            shape: with the outputs first, as in `core.layout.outputs_first`.
        """


def of_layers(compressor: Compressor, layers: Sequence[Layer], ranks: int) -> Sequence[Compressor]:
    """Return the compressor of each layer, see `Chooses`; by default this one for all."""
    if isinstance(compressor, Chooses):
        return compressor.of_layers(layers, ranks)
    return [compressor] * len(layers)


def layer_bytes(compressor: Compressor, shape: Sequence[int]) -> float | None:
    """Return a layer's estimated bytes, see `Weighs`; None by default."""
    return compressor.layer_bytes(shape) if isinstance(compressor, Weighs) else None
