"""Claims of parameters: two exchanges of one model over the same ranks are found, and named.

Each host claims the parameters that it exchanges, for as long as it lives. Exchanges that have one
rank in common are levels of a hierarchy, and so is one inside of a host whose ranks another takes
as one, as of `DistributedDataParallel` over the ranks of a host and local steps between hosts. With
two ranks in common otherwise both would exchange between these.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from hvd_gradcomp.torch.interop import ddp_reduction
from hvd_gradcomp.torch.interop.shards import is_sharded

# By claim, not by parameter: a tensor with weak references cannot be swapped, as FSDP2's `to` does.
_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_numbers = itertools.count()
_lock = threading.Lock()  # of the set


class Claim:
    """Exclusive ownership of parameters by one exchange; released with its last reference.

    Args:
        name: of what the user has called, such as "ddp.LocalSteps".
        parameters: that are exchanged.
        process_set: the ranks, which an elastic run changes.
        in_step: the exchange happens in the optimizer's step, on gradients of this rank alone, so
            `DistributedDataParallel` around the model is switched off. Otherwise it is an error,
            unless `by_hook`.
        alone: ranks train alone between exchanges, so none of their gradients may be reduced.
        by_hook: the exchange is the model's communication hook, and the only one it can have.
        sharded: parameters may be shards.
        host: ranks that count as one, as they reduce gradients in each step by another exchange.

    Attributes:
        name, host: as given.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[torch.nn.Parameter],
        process_set: Any,
        *,
        in_step: bool = False,
        alone: bool = False,
        by_hook: bool = False,
        sharded: bool = False,
        host: Collection[int] = (),
    ) -> None:
        self.host = frozenset(host)
        self.name, self._parameters, self._process_set = name, list(parameters), process_set
        self._in_step, self._by_hook, self._sharded = in_step, by_hook, sharded
        self._alone = alone
        self._identities = {id(p) for p in self._parameters}
        self._number = next(_numbers)  # later ones are higher

    @property
    def superseded(self) -> bool:
        """Return True if a later exchange of this name has some of the parameters, and lives."""
        return any(
            other.name == self.name and other._number > self._number for other in self._rivals()
        )

    @property
    def ranks(self) -> set[int]:
        """Return the ranks that exchange now."""
        process_set = self._process_set
        return set(process_set.ranks or range(process_set.size()))

    def take(self) -> None:
        """Claim the parameters; the last act of a constructor, which may have failed until then.

        Raises:
            TypeError: parameters are sharded.
            ValueError: something else exchanges them.
        """
        if not self._sharded:
            refuse_sharded(self.name, self._parameters)
        if self._rivals():
            gc.collect()  # what nobody uses any more exchanges nothing
        for other in self._rivals():
            if other.name != self.name:
                raise ValueError(_twice(self.name, other.name))
        self.check_models()
        with _lock:
            _claims.add(self)

    def drop(self) -> None:
        """End the claim, of an exchange that some rank has refused: a traceback may keep it."""
        with _lock:
            _claims.discard(self)

    def _rivals(self) -> list[Claim]:
        return [
            claim
            for claim in _live()
            if claim is not self
            and not self._identities.isdisjoint(claim._identities)
            and self._meets(claim.ranks)
            and not claim.host.issuperset(self.ranks)
        ]

    def _meets(self, ranks: Collection[int]) -> bool:
        """Return True if an exchange over some ranks is no level below this one."""
        return len(self.ranks.intersection(ranks)) > 1 and not self.host.issuperset(ranks)

    def check_models(self, whole: bool = False) -> list[Any]:
        """Return each `DistributedDataParallel` to be switched off; refuse one that cannot be.

        Args:
            whole: all that a model reduces must be claimed by now.

        Raises:
            ValueError: it would exchange as well.
        """
        if self._by_hook or len(self.ranks) < 2:
            return []
        # One that has a rank in common, or is inside a host, goes with steps that exchange. During
        # backward it would write its own gradient over what was reduced.
        models = []
        for model in ddp_reduction.models_of(self._parameters):
            if not self._in_step or self._meets(ddp_reduction.ranks_of(model)):
                self._check_model(model)
                models.append(model)
            if whole:
                self._check_whole(model)
        return models

    def _check_model(self, model: Any) -> None:
        ranks = ddp_reduction.ranks_of(model)
        if not self._in_step:
            if self._meets(ranks):
                raise ValueError(_twice(self.name, "DistributedDataParallel"))
            raise ValueError(
                f"DistributedDataParallel writes its own gradients over those that {self.name} has "
                "reduced: pass the parameters of model.module, and call that instead of the model"
            )
        hook = ddp_reduction.comm_hook_of(model)
        if hook is not None:
            raise ValueError(
                f"the model has a communication hook of DistributedDataParallel, {hook}, and "
                f"{self.name} exchanges in its place: leave out register_comm_hook and "
                "ddp.compress, and pass compression= to one of the two"
            )
        if getattr(model, "_delay_all_reduce_params", ()):
            raise ValueError(
                "DistributedDataParallel(delay_all_reduce_named_params=...) reduces these "
                f"parameters by a hook of its own, and {self.name} exchanges in its place: leave "
                "delay_all_reduce_named_params out"
            )
        if self._alone and set(ranks) != self.ranks:
            raise ValueError(
                f"DistributedDataParallel reduces over ranks {ranks}, and {self.name} exchanges "
                f"between ranks {sorted(self.ranks)}: give both the same process_group=; or call "
                "ddp.local_steps(model, optimizer), which takes the ranks that reduce in each step "
                "for a host, and exchanges between hosts"
            )

    def _check_whole(self, model: Any) -> None:
        """Check that all that a model reduces, or would, is exchanged by now.

        Raises:
            ValueError: it is not.
        """
        ranks = ddp_reduction.ranks_of(model)
        in_host = len(ranks) > 1 and self.host.issuperset(ranks)
        unclaimed = self._not_exchanged(model) if in_host or self._meets(ranks) else []
        if unclaimed:
            state = "and hosts would drift apart" if in_host else "and its reduction is off"
            raise ValueError(
                f"DistributedDataParallel reduces parameters that {self.name} does not "
                f"exchange, {state}: {_listed(unclaimed)}. Freeze them before the optimizer is "
                "made, or wrap what another optimizer trains in a DistributedDataParallel of its "
                "own"
            )

    def switch_off_models(self) -> None:
        """Switch off each `DistributedDataParallel` around the parameters.

        Raises:
            ValueError: one of them cannot be; then none is.
        """
        self._switch_off(self.check_models())

    def _switch_off(self, models: Iterable[Any]) -> None:
        for model in models:
            ddp_reduction.switch_off(
                model,
                self,
                f"{self.name} exchanges what DistributedDataParallel would reduce in each step: "
                "its reduction is switched off for good, and so is its broadcast of buffers",
            )

    def _not_exchanged(self, model: Any) -> list[str]:
        """Return the names of parameters that a model would reduce, and nobody has claimed."""
        claimed: set[int] = set().union(*(c._identities for c in _live() if c._in_step))
        return [name for name, p in ddp_reduction.reduced_parameters(model) if id(p) not in claimed]

    def refusal(self, now: Collection[torch.nn.Parameter] | None = None) -> Exception | None:
        """Return the error of what has wrapped the model since; None if there is none.

        Args:
            now: the parameters that the optimizer has now; None if they are the same.
        """
        try:
            if now is not None and not self._sharded:
                refuse_sharded(self.name, now)
            models = self.check_models(whole=True)
            if self._alone and not all(map(ddp_reduction.is_switched_off, models)):
                raise ValueError(
                    f"DistributedDataParallel was wrapped around the model after {self.name} was "
                    "made, and has reduced the gradients of this step: wrap the model first"
                )
            self._switch_off(models)
        except (TypeError, ValueError) as error:
            return error
        return None


def is_exchanged_between(parameters: Iterable[torch.nn.Parameter], ranks: Collection[int]) -> bool:
    """Return True if parameters are all exchanged between some ranks, by what lives."""
    identities = {id(p) for p in parameters}
    claims = [claim for claim in _live() if claim.ranks >= set(ranks)]
    return identities <= set().union(*(claim._identities for claim in claims))


def _live() -> list[Claim]:
    """Return the claims that were taken, and whose exchanges live, in the order they were made."""
    with _lock:
        return sorted(_claims, key=lambda claim: claim._number)


def _twice(name: str, other: str) -> str:
    return (
        f"{name} and {other} would both exchange the same parameters between the same ranks: use "
        "only one of them. If the other one is not in use any more, drop all references to it "
        "first. For levels of a hierarchy give them process groups with one rank in common"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def refuse_sharded(name: str, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise a TypeError if one of the parameters is a shard.

    Args:
        name: of what the user has called.
        parameters: of the model.
    """
    for p in parameters:
        kind = ""
        if is_sharded(p):
            kind = "fully_shard or tensor parallelism, into DTensors"
        elif getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            kind = "FSDP1"
        if kind:
            raise TypeError(
                f"the model is sharded, by {kind}, and {name} does not take shards: its "
                "parameters must be whole on each rank. For what fully_shard has sharded there are "
                "fsdp.local_steps, fsdp.MomentumExchange, and fsdp.compress, which compresses the "
                "gradients between replicas in each step"
            )
