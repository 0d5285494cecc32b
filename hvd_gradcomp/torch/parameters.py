"""Parameters that join an optimizer, as it is made or while it trains, and those that are frozen.

A parameter joins by `optimizer.add_param_group`, or by `requires_grad_(True)` where it did not
train when the optimizer was made. It gets a bucket beside those that are there, which keep their
layers and state. A frozen one, `requires_grad_(False)`, is left out of the exchange; what the
compressor has accumulated for it waits. All ranks do the same before the same step.

A parameter's hooks belong to the optimizer that it joined last.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from hvd_gradcomp.core.compressor import State, leaves
from hvd_gradcomp.core.layers import Layer, Weight, convolving
from hvd_gradcomp.core.protocols.learning import retrained

if TYPE_CHECKING:
    from hvd_gradcomp.torch.bucket import Bucket

optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Distributed optimizers that may have hooks."""


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


def take_over(optimizer: Any, new: Collection[torch.nn.Parameter]) -> None:
    """Leaves parameters to this optimizer, and no hooks of earlier ones.

    Those would begin exchanges of their own for as long as they are not collected, which is longer
    on one rank than on another.
    """
    for earlier in optimizers:
        if earlier is not optimizer:
            earlier._arrivals.leave(new)
    optimizers.add(optimizer)


def name(optimizer: Any, group: dict[str, Any]) -> None:
    """Names the parameters of a new group: as before, as the group says, or by their place.

    Raises:
        ValueError: a name belongs to another parameter.
    """
    names, place = optimizer._parameter_names, len(optimizer.param_groups) - 1
    given = group.get("param_names") or [f"group.{place}.{i}" for i in range(len(group["params"]))]
    taken = set(names.values())
    for p, title in zip(group["params"], given):
        if p in names:
            continue
        if title in taken:
            raise ValueError(f"add_param_group: {title} names another parameter already")
        names[p] = title
        optimizer._allreduce_delay[p] = optimizer.backward_passes_per_step


def join(optimizer: Any) -> None:
    """Takes in what trains now and is not exchanged yet.

    Raises:
        ValueError: the compressor cannot take it in; see `Engine.add`.
    """
    engine = optimizer._gradcomp
    new = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p not in engine.parameters
    ]
    if not new:
        return
    engine.add([(optimizer._parameter_names[p], p) for p in new])
    take_over(optimizer, new)
    optimizer._arrivals.watch(new)


def leave_out(optimizer: Any, frozen: Set[torch.nn.Parameter]) -> None:
    """Lets Horovod wait for no gradient of these, and forget those of earlier passes."""
    optimizer._requires_update = optimizer._gradcomp.parameters - frozen
    for p in frozen:
        p.grad = None  # so that the optimizer leaves it alone, momentum and decay included
        optimizer._handles.pop(p, None)
        optimizer._allreduce_delay[p] = optimizer.backward_passes_per_step


def hold(bucket: Bucket, slots: set[int], step: int) -> None:
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


def release(bucket: Bucket) -> None:
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
