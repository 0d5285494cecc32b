"""Reduction of gradients by `DistributedDataParallel`, switched off where an optimizer exchanges.

A switched-off model behaves as under `no_sync()`, whatever sets `require_backward_grad_sync`: no
gradient is reduced, no map of unused parameters, and no buffer is broadcast. Its class says so, as
`fully_shard` changes the class of what it shards; so nothing is lost when it is switched on again.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LOGGER = logging.getLogger("hvd_gradcomp")
# By model, the identities of those that have switched it off and still live.
_switched_off: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def models_of(parameters: Collection[torch.nn.Parameter]) -> list[DistributedDataParallel]:
    """Return the models that have some of these parameters, for a search now and then: it is slow.

    `DistributedDataParallel` keeps no record of its models, so all objects are searched.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    wanted = set(parameters)
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), DistributedDataParallel)
        and "_modules" in vars(each)  # else its own constructor has failed
        and any(p in wanted for p in each.parameters())
    ]


def ranks_of(model: DistributedDataParallel) -> list[int]:
    """Return the ranks over which a model is reduced; none once its process group was destroyed."""
    ranks: list[int] = []
    with suppress(KeyError, RuntimeError, ValueError):
        ranks = dist.get_process_group_ranks(model.process_group)
    return ranks


def reduced_parameters(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the (name, parameter) pairs that a model reduces, or would if it were switched on."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    return [
        (name, p)
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in ignored
    ]


def comm_hook_of(model: DistributedDataParallel) -> str | None:
    """Return the name of the communication hook of a model; None if it has none."""
    for hook, _ in getattr(model, "_comm_hooks", ()):  # since PyTorch 2.1
        return getattr(hook, "__qualname__", repr(hook))
    return None


def switch_off(model: DistributedDataParallel, owner: Any, reason: str) -> None:
    """Switch the reduction of a model off, for as long as the owner lives.

    Args:
        model: which is not kept alive.
        owner: exchanges the model.
        reason: for the log.
    """
    if not isinstance(model, _NotReduced):
        _switched_off[model] = set()
        if vars(model).get("forward") is _refuse_static_graph:
            del vars(model)["forward"]
        cls: Any = type(model)
        model.__class__ = _not_reduced(cls)
        if ranks_of(model)[:1] == [dist.get_rank()]:
            LOGGER.warning("%s", reason)
    if id(owner) not in _switched_off[model]:
        _switched_off[model].add(id(owner))
        weakref.finalize(owner, _let_go, weakref.ref(model), id(owner)).atexit = False


def _let_go(reference: weakref.ref[DistributedDataParallel], owner: int) -> None:
    """Switch the reduction of a model on again, if nobody has it switched off any longer."""
    model: Any = reference()
    if model is None:
        return
    _switched_off[model].discard(owner)
    if not _switched_off[model] and issubclass(type(model), _NotReduced):
        model.__class__ = type(model).reduced
        vars(model).update(require_backward_grad_sync=True, require_forward_param_sync=True)
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            vars(model)["forward"] = _refuse_static_graph


def _refuse_static_graph(*_: Any, **__: Any) -> None:
    """Raise an error: PyTorch would take all local backwards for one, and then reduce nothing."""
    raise RuntimeError(
        "DistributedDataParallel(static_graph=True) has counted the backwards while its reduction "
        "was switched off, and would reduce no gradient: wrap the module in it anew"
    )


class _NotReduced:
    """Mixin of `DistributedDataParallel` that is always under `no_sync()`.

    Attributes:
        reduced: the class of the model when it is switched on.
    """

    reduced: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the class that reduces: nobody exchanges the copy."""
        how: Any = super().__reduce_ex__(protocol)
        function, (_, *rest), *more = how
        return function, (type(self).reduced, *rest), *more


def _always(value: bool) -> property:
    """Return a property with a fixed value, whatever is set."""
    return property(lambda self: value, lambda self, wish: None)


@functools.lru_cache(None)
def _not_reduced(cls: Any) -> Any:
    """Return a class of models that reduce nothing."""
    fixed = {
        "require_backward_grad_sync": False,
        "require_forward_param_sync": False,
        # Else the first backward with static_graph=True would end in a reduction all the same.
        "_static_graph_delay_allreduce_enqueued": True,
    }
    members = {name: _always(value) for name, value in fixed.items()}
    how = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "reduced": cls}
    return type(cls.__name__, (_NotReduced, cls), {**members, **how})
