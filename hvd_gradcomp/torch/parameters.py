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
from hvd_gradcomp.core.protocols.learning import retrained

if TYPE_CHECKING:
    from hvd_gradcomp.torch.bucket import Bucket


def layers_of(named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[Layer]:
    """(name, shape, dtype) of each, with what the module that holds it makes of it.

    A complex parameter is a real one of shape [..., 2].
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
    """A complex tensor as a real one, [..., 2]; others as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _kernels(parameters: Sequence[torch.nn.Parameter]) -> dict[int, bool]:
    """Whether each belongs to a convolution; without those that only a user's own class knows.

    An optimizer is given parameters and not their modules, so these are looked for among all
    objects there are. A type is asked, not an object: some load what they stand for when asked.
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
    """Leaves layers of a bucket out of a step, before any of its gradients arrive.

    They send zeros from a state of zeros; a bucket that has no other layers does not start. What
    was learned while a layer was out does not fit it: with its return the compressor learns anew.
    """
    if bucket.held - slots:
        bucket.state = retrained(bucket.compressor, bucket.ops, bucket.state, step)
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
    """Gives the layers that were left out their state back; to the state from before as well."""
    if not bucket.waiting:
        return
    with torch.no_grad():
        for state in (bucket.state, bucket.before):
            for path, vector in () if state is None else _vectors(bucket, state):
                for piece, value in zip(_pieces(bucket, vector), bucket.waiting[path]):
                    piece.copy_(value)
    bucket.waiting.clear()


def _vectors(bucket: Bucket, state: State) -> list[tuple[str, torch.Tensor]]:
    """What a state holds of each element."""
    shape = (bucket.layout.size,)
    return [(path, x) for path, x in leaves(state) if tuple(x.shape) == shape]


def _pieces(bucket: Bucket, vector: torch.Tensor) -> list[torch.Tensor]:
    cut = bucket.cut(vector)
    return [cut[slot] for slot in sorted(bucket.held)]
