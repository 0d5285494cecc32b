"""The layers that parameters are, and layers of a bucket that are frozen.

A parameter joins the exchange by `optimizer.add_param_group`, or by `requires_grad_(True)` where it
did not train when the optimizer was made. It gets a bucket beside those that are there, which keep
their layers and state. A frozen one, `requires_grad_(False)`, is left out of the exchange; what the
compressor has accumulated for it waits. All ranks do the same before the same step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_gradcomp.core.compressor import State, leaves
from hvd_gradcomp.core.layers import Layer, Weight, convolving

if TYPE_CHECKING:
    from hvd_gradcomp.torch.bucket import Bucket


def layers_of(named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[Layer]:
    """Return the `Layer` of each parameter: (name, shape, dtype), a `Weight` if its use is known.

    A complex parameter is described as a real one of shape [..., 2].
    """
    kernels = _kernels([p for _, p in named_parameters if p.dim() > 2 and not p.is_complex()])
    layers: list[Layer] = []
    for name, p in named_parameters:
        real = as_real(p.detach())
        described = name, tuple(real.shape), str(real.dtype).removeprefix("torch.")
        known = kernels.get(id(p))
        layers.append(described if known is None else Weight(*described, convolves=known))
    return layers


def as_real(x: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as a real one, [..., 2]; return other tensors as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _kernels(parameters: Sequence[torch.nn.Parameter]) -> dict[int, bool]:
    """Return, by id, True if the parameter belongs to a convolution; omit those of unknown modules.

    An optimizer has parameters, not their modules, so all live objects are searched for these. The
    search inspects types, not objects: some lazy objects load when inspected.
    """
    wanted, found = {id(p) for p in parameters}, dict[int, bool]()
    for module in gc.get_objects() if wanted else ():
        if not issubclass(type(module), torch.nn.Module):
            continue
        for held in module.__dict__.get("_parameters", {}).values():
            known = convolving(type(module)) if id(held) in wanted else None
            if known is not None:
                found[id(held)] = known or found.get(id(held), False)
    return found


def mask_frozen(bucket: Bucket, slots: set[int], step: int) -> None:
    """Exclude layers of a bucket from a step, before any of its gradients arrive.

    They send zeros, with zeros as their state; a bucket without other layers does not start. When a
    layer returns, the compressor retrains, because it has learned without that layer.
    """
    if bucket.held - slots:
        bucket.state = bucket.compressor.retrained(bucket.ops, bucket.state, step)
    bucket.held = slots
    if not slots or len(slots) == len(bucket.parameters):
        return
    bucket.absent -= slots
    with torch.no_grad():
        for vector in (bucket.flat, bucket.moment):
            if vector is not None:
                for piece in _pieces(bucket, vector):
                    piece.zero_()
        for path, vector in _vectors(bucket, bucket.state):
            pieces = _pieces(bucket, vector)
            bucket.waiting[path] = [piece.clone() for piece in pieces]
            for piece in pieces:
                piece.zero_()


def restore_frozen(bucket: Bucket) -> None:
    """Restore the state of excluded layers, in the bucket's current state and its rollback copy."""
    if not bucket.waiting:
        return
    with torch.no_grad():
        for state in (bucket.state, bucket.before):
            for path, vector in () if state is None else _vectors(bucket, state):
                for piece, value in zip(_pieces(bucket, vector), bucket.waiting[path]):
                    piece.copy_(value)
    bucket.waiting.clear()


def _vectors(bucket: Bucket, state: State) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a state that have one entry for each element of the bucket."""
    shape = (bucket.layout.size,)
    return [(path, x) for path, x in leaves(state) if tuple(x.shape) == shape]


def _pieces(bucket: Bucket, vector: torch.Tensor) -> list[torch.Tensor]:
    cut = bucket.cut(vector)
    return [cut[slot] for slot in sorted(bucket.held)]
