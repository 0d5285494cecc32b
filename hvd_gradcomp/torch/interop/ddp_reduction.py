"""Reduction of gradients by `DistributedDataParallel`, switched off where an optimizer exchanges.

A switched-off model behaves as under `no_sync()`, whatever sets `require_backward_grad_sync`: no
gradient is reduced, no map of unused parameters, and no buffer is broadcast. Its class says so, as
`fully_shard` changes the class of what it shards.

It stays so. Were it switched on again when its optimizer is collected, ranks would begin to reduce
at different times. Without such an optimizer a forward for training is an error.
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
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.runtime.live_objects import live_callables
from hvd_gradcomp.torch.interop import dynamo

# Those that were made since this import: `gc.freeze()` takes them out of what a search finds.
_known: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
LOGGER = logging.getLogger("hvd_gradcomp")
# By model that is switched off, those that exchange in its place, and live.
_owners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def _know(model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Record a model of `DistributedDataParallel` when it gets the module that it wraps."""
    del name, module
    if isinstance(model, DistributedDataParallel):
        _known.add(model)


register_module_module_registration_hook(_know)


def models_of(parameters: Collection[torch.nn.Parameter]) -> list[DistributedDataParallel]:
    """Return the models that have some of these parameters, for a search now and then: it is slow.

    Dead models in cycles, which another rank may have collected already, are none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    wanted = set(parameters)
    if not _search(wanted):
        return []
    gc.collect()
    return _search(wanted)


def _search(wanted: Collection[torch.nn.Parameter]) -> list[DistributedDataParallel]:
    # Copies, and models from before the import of this module, are not known.
    others = live_callables(DistributedDataParallel)
    return [
        model
        for model in {id(x): x for x in (*_known, *others)}.values()
        if "_modules" in vars(model)  # else its own constructor has failed
        and any(p in wanted for p in model.parameters())
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
    # A copy has the list `_comm_hooks` of its original, but calls none of these hooks.
    if model.logger is None:  # its own constructor has failed
        return None
    return model._get_ddp_logging_data().get("comm_hook")


def is_switched_off(model: DistributedDataParallel) -> bool:
    """Return True if an optimizer has switched the reduction of a model off."""
    return isinstance(model, _NotReduced)


def switch_off(model: DistributedDataParallel, owner: Any, reason: str) -> None:
    """Switch the reduction of a model off, for good.

    Args:
        model: which is not kept alive.
        owner: exchanges the model while it lives, and is not kept alive either.
        reason: for the log.
    """
    if not is_switched_off(model):
        _owners[model] = weakref.WeakSet()
        # Of copies, which reduce: here `no_sync()` may have set them for a moment.
        vars(model).update(require_backward_grad_sync=True, require_forward_param_sync=True)
        cls: Any = type(model)
        model.__class__ = _not_reduced(cls)
        if ranks_of(model)[:1] == [dist.get_rank()]:
            LOGGER.warning("%s", reason)
    _owners[model].add(owner)


class _NotReduced:
    """Mixin of `DistributedDataParallel` that is always under `no_sync()`.

    Attributes:
        reduced: the class of the model before.
    """

    reduced: type

    def __init_subclass__(cls, **_: Any) -> None:
        """Leave out what a user's class does with its subclasses: this is no other class to it."""

    @dynamo.outside("it looks for the optimizer that exchanges in place of this model")
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            RuntimeError: for training, when no optimizer exchanges it any longer.
        """
        if torch.is_grad_enabled() and not _owners.get(self):
            raise RuntimeError(
                "the reduction of this DistributedDataParallel was switched off by an optimizer "
                "that exchanged in its place, and is gone: no rank would see another's gradients. "
                "To train on, wrap the module in DistributedDataParallel anew, "
                "DistributedDataParallel(model.module), on all ranks, or make such an optimizer; "
                "to evaluate, use torch.no_grad()"
            )
        above: Any = super()
        return above.forward(*inputs, **kwargs)

    def join(self, *_: Any, **__: Any) -> Any:
        """Refuse: a rank that has no batches left would shadow a reduction that nobody makes.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "model.join() shadows the reduction of DistributedDataParallel, which an optimizer has "
            "switched off: give all ranks as many steps, or pass local steps a deadline=, with "
            "which ranks make different numbers of them"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the class that reduces: nobody exchanges the copy."""
        # Protocol 0 names the class as an argument; later ones insist on the object's.
        above: Any = super()
        function, arguments, *others = above.__reduce_ex__(0)
        cls = type(self)
        return function, tuple(cls.reduced if x is cls else x for x in arguments), *others


def _always(value: bool) -> property:
    """Return a property with a fixed value, whatever is set."""
    return property(lambda self: value, lambda self, ignored: None)


@functools.lru_cache(None)
def _not_reduced(cls: Any) -> Any:
    """Return a class of models that reduce nothing."""
    fixed = {
        "require_backward_grad_sync": False,
        "require_forward_param_sync": False,
        # Else the first backward with static_graph=True would end in a reduction all the same.
        "_static_graph_delay_allreduce_enqueued": True,
    }
    members: dict[str, Any] = {name: _always(value) for name, value in fixed.items()}
    members.update(__module__=cls.__module__, __qualname__=cls.__qualname__, reduced=cls)
    return type(cls.__name__, (_NotReduced, cls), members)
