"""Optimizers around another one, which exchange something else than gradients in backward."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.stats import CompressionStats, combined
from hvd_gradcomp.planning.announcement import announce, announcement
from hvd_gradcomp.runtime.config_check import Description
from hvd_gradcomp.runtime.live_objects import live_instances
from hvd_gradcomp.torch.interop.amp import unscale
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.sharding import Sharding
from hvd_gradcomp.torch.local.tensor_exchange import TensorExchange
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.claims import Claim
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.reducer_state import NO_STATES, Consolidation, is_own

_WRAPPERS = (  # of libraries that step an optimizer inside of one of their own
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"),
)
KEPT = "gradcomp"  # in a state_dict: what is not the inner optimizer's


class WrappedOptimizer(torch.optim.Optimizer, ABC):
    """Optimizer that has another one's groups, options, state and hooks.

    A `GradScaler` calls its `step` also where it has found infinities, so that all ranks count the
    same steps: `unscale` does what the scaler would have done. Hooks of the inner optimizer, such
    as `register_step_post_hook`, could not take its place: the scaler does not step that one then,
    so no hook would run on this rank alone; and no hook can leave out a step whose mean gradients
    are not finite, or have a closure computed before they are averaged.

    Args:
        optimizer: the inner one.
        sharding: of the model, if this rank has shards of it.

    Attributes:
        inner: as given.
        description: of what must be equal on all ranks, also on those with other shards.
        library_exchanges: a library that steps this one evaluates and saves the model after
            exchanges alone; set by `trainers.local_steps`.

    Raises:
        TypeError: it is no optimizer.
    """

    description: Description
    library_exchanges = False
    _step_supports_amp_scaling = True  # as PyTorch calls it
    _ranks_differ = False  # between exchanges

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding | None = None) -> None:
        # Options, groups and state are the inner optimizer's: nothing of the base class is set up.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer= takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        self.inner, self.sharding = optimizer, sharding

    def __getattr__(self, name: str) -> Any:
        """Return what the inner optimizer has, such as its hooks."""
        if name in ("inner", "sharding", "_claim", "found_inf", "grad_scale"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    # -- what it claims ------------------------------------------------------------------------

    def _claim_parameters(self, function: str, named: Named, host: Collection[int] = ()) -> None:
        """Claim the parameters; the last act of a constructor.

        Args:
            function: that the user has called, of a model that is not sharded.
            named: what is exchanged.
            host: the ranks that reduce gradients in each step, and count as one.

        Raises:
            TypeError: the model is sharded, and was not passed as such.
            ValueError: something else exchanges it.
        """
        reducer, sharding = self.all_reducers[0], self.sharding
        frontend = "hvd" if reducer.transport.library == "Horovod" else "ddp"
        name, ranks = f"{frontend}.{function}", reducer.participants.process_set
        if sharding is not None:
            name, ranks = sharding.function, sharding.ranks
        how = {"in_step": True, "alone": self._ranks_differ, "sharded": sharding is not None}
        claim = Claim(name, [p for _, p in named], ranks, host=host, **how)
        claim.take()
        self._claim = claim

    def begin(self) -> None:
        """Exchange in place of `DistributedDataParallel`, once all ranks have made their own."""
        self._claim.switch_off_models()
        sharding, participants = self.sharding, self.all_reducers[0].participants
        planners = [reducer.planner for reducer in self.reducers]
        scope = "" if participants.place is None else "between hosts"
        is_first = participants.process_set.rank() == 0
        if sharding is not None:
            scope, is_first = "of this rank's shards", sharding.is_first
        if is_first:
            plan = [pair for planner in planners for pair in planner.assigned]
            _, ranks = participants.rank_and_size
            compressor = planners[0].compressor
            announce(announcement(compressor, plan, ranks, self.exchange_schedule, scope))

    def withdraw(self) -> None:
        """Leave the parameters to others: some rank has made no optimizer."""
        self._claim.drop()

    def _check_superseded(self) -> None:
        """Raise a RuntimeError if the parameters are another optimizer's by now."""
        if self._claim.superseded:
            raise RuntimeError(
                f"another {self._claim.name} was made since over the same parameters, and "
                "exchanges them: step that one alone"
            )

    def _refusal(self) -> Exception | None:
        """Return the error of what was done to the model or to this optimizer since it was made."""
        library = None
        if self._ranks_differ and not self.library_exchanges:
            library = _library_of(self)
        if library is not None:
            return TypeError(
                f"{self._claim.name} was handed to {library}, which evaluates and saves the model "
                "between exchanges, when it is another one on each rank: hand the plain optimizer "
                "to the library, and call trainers.local_steps(trainer, every=...)"
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        refusal = self._claim.refusal(parameters)
        if refusal is None and self.sharding is not None:
            refusal = self.sharding.refusal()
        return refusal

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        """Return the inner optimizer's state."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's default options."""
        return self.inner.defaults

    @property
    @abstractmethod
    def exchanges(self) -> tuple[list[TensorExchange], list[TensorExchange]]:
        """Return those of disjoint layers, which make up the model, and all others."""

    @property
    @abstractmethod
    def exchange_schedule(self) -> LocalSchedule:
        """Return when it exchanges."""

    @property
    @abstractmethod
    def steps_taken(self) -> int:
        """Return the steps so far, for statistics."""

    @property
    def _shard(self) -> str | None:
        """Return the place of what this rank saves in the model; None for all of it."""
        return None if self.sharding is None else self.sharding.place

    @property
    def is_exchanged(self) -> bool:
        """Return True if parameters are those of all ranks; between local steps they are not."""
        return True

    @property
    def reducers(self) -> list[Reducer]:
        """Return the reducers of disjoint layers, which make up the model."""
        return [exchange.reducer for exchange in self.exchanges[0]]

    @property
    def all_reducers(self) -> list[Reducer]:
        """Return the reducers of all exchanges, in the same order on all ranks."""
        return [exchange.reducer for some in self.exchanges for exchange in some]

    def stats(self) -> CompressionStats:
        """Return the measured traffic of this rank so far: of this optimizer, and of nothing else.

        Counted where tensors are handed to its collectives: what it exchanges, dense first steps,
        and buffers that are averaged. Not counted are the few integers that ranks compare before an
        exchange, and what others send: `DistributedDataParallel` or `fully_shard` inside of a host,
        other optimizers, collectives of the program. So with hosts all of it travels between them.

        `ratio` compares with an exchange of dense gradients in every step so far. Local steps since
        the last exchange have sent nothing yet: read it after an exchange.
        """
        parts, others = ([x.reducer.stats() for x in some] for some in self.exchanges)
        return combined(parts, others, self.steps_taken, self._memory)

    @property
    def _memory(self) -> dict[str, int]:
        """Return the bytes that it keeps besides its exchanges; see `CompressionStats.memory`."""
        return {}

    def compare_again(self) -> None:
        """Compare the settings of all ranks again before the next exchange."""
        for some in self.exchanges:
            for exchange in some:
                exchange.compare_again()

    @abstractmethod
    def load_rounds(self, state_dict: dict[str, Any]) -> None:
        """Load what `load_state_dict` does but the inner optimizer and what compressors keep."""

    @outside_inference()
    def load_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Load what all ranks saved by `state_dict`, on any number of ranks; all ranks call it.

        Each of as many ranks loads its own, to the bit. Each of another number begins with the
        optimizer's state of the first rank, the global parameters if ranks step locally, and an
        equal share of what all compressors kept. Local steps since the last exchange are lost: call
        `exchange()` before you save.

        Args:
            states: those of all ranks that saved, in any order.

        Raises:
            CheckpointError: the state of a rank is missing, or they are of several checkpoints, or
                of another model, schedule or compressor; or the model is sharded.
        """
        if self.sharding is not None:
            raise CheckpointError(
                "what compressors keep of a sharded model goes on with the same mesh only: "
                "load_state_dict loads this rank's; on another mesh load fsdp.Checkpoint(model, "
                "optimizer, whole=True) of local steps, or begin without it"
            )
        totals: list[Consolidation] = []
        first: dict[str, Any] = {}
        for state in states:
            saved = state.get(KEPT)
            if saved is None:
                raise CheckpointError("it is a plain optimizer's state: load it by load_state_dict")
            self._check_fits(saved)
            parts = self._exchanges_in(saved)
            if is_own(parts[0][0].reducer, parts[0][1]):
                self.load_state_dict(state)
                return
            totals = totals or [Consolidation(exchange.reducer) for exchange, _ in parts]
            for total, (_, part) in zip(totals, parts):
                total.add(part)
            if parts[0][1]["rank"] == 0:
                first = state
        if not totals:
            raise CheckpointError(NO_STATES)
        sums = [total.state() for total in totals]
        self.load_inner(first)
        for (exchange, _), state in zip(self._exchanges_in(first[KEPT]), sums):
            exchange.load(state)
        self.load_rounds({**first, KEPT: self._without_local(first[KEPT])})

    @abstractmethod
    def _check_fits(self, saved: Any) -> None:
        """Check that a state was saved with this schedule, and these parameters.

        Raises:
            CheckpointError: it was not.
        """

    @abstractmethod
    def _exchanges_in(self, saved: dict[str, Any]) -> list[tuple[TensorExchange, dict[str, Any]]]:
        """Return the exchanges, each with its saved state."""

    def _without_local(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's state without what is its own, from which any rank may go on."""
        return saved

    def common_state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks may go on from."""
        return self.state_dict()

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state alone."""
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != KEPT})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getstate__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: save and load what it keeps by "
            "state_dict() and load_state_dict(), on each rank its own"
        )

    @interpreted
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what is exchanged is what there was when it was made."""
        raise RuntimeError(
            "add_param_group() comes too late for the exchange: add the group to the inner "
            f"optimizer, and make the {type(self).__name__} anew, on all ranks"
        )

    @property
    def scaled(self) -> bool:
        """Return True if a GradScaler calls this step."""
        return hasattr(self, "found_inf")

    def unscale(self) -> bool:
        """Unscale gradients as a GradScaler asks for it; return True if it has found infinities."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            unscale(self.param_groups, scale)
        return found_inf is not None and bool(found_inf)


def _library_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the library that steps an optimizer in a wrapper of its own; None if none does."""
    for module, name in _WRAPPERS:
        kind = getattr(sys.modules.get(module), name, None)
        for wrapper in () if kind is None else live_instances(kind):
            attributes = vars(wrapper)
            if optimizer in (attributes.get("optimizer"), attributes.get("_optimizer")):
                return module.partition(".")[0].removeprefix("pytorch_").capitalize()
    return None


def refuse_exchanging(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if an optimizer exchanges by itself, or is no plain one."""
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError(
            f"optimizer= exchanges already, as a {type(optimizer).__name__}: pass the plain one "
            "inside of it"
        )
    module, name = type(optimizer).__module__, type(optimizer).__name__
    if module == "horovod.torch.optimizer":  # stock, and ours
        raise ValueError(
            f"optimizer= is distributed already: pass the {name} that it was made from, or make "
            "another one over the same parameters"
        )
    if module.partition(".")[0] in ("accelerate", "lightning", "pytorch_lightning"):
        raise ValueError(
            f"optimizer= is the {name} of a library, which leaves out steps by itself: call "
            "trainers.local_steps(trainer, every=...), or pass the plain optimizer that the "
            "library has wrapped"
        )


def named_of(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> Named:
    """Return (name, parameter) of what an optimizer trains, in the user's order.

    Raises:
        ValueError: a parameter has no name, or two have the same.
    """
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if named_parameters is None:
        return [(f"parameter.{place}", p) for place, p in enumerate(trained)]
    names: dict[torch.nn.Parameter, str] = {}
    for name, p in named_parameters:
        names.setdefault(p, name)
    wanted = set(trained)
    named = [(name, p) for p, name in names.items() if p in wanted]
    if len(named) < len(wanted):
        raise ValueError(
            f"named_parameters= names {len(named)} of the {len(wanted)} parameters that the "
            "optimizer trains: pass model.named_parameters() of the whole model"
        )
    if len({name for name, _ in named}) < len(named):
        raise ValueError("named_parameters= gives the same name to several parameters")
    return named


def device_of(named: Named) -> torch.device:
    """Return the device of the first parameter: where ranks have collectives for them."""
    return next((p.device for _, p in named), torch.device("cpu"))


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the largest learning rate of an optimizer's groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def thawed(optimizer: torch.optim.Optimizer, known: Collection[torch.nn.Parameter]) -> int:
    """Return the number of parameters that train now, and are not among the known ones."""
    groups = optimizer.param_groups
    return sum(p.requires_grad and p not in known for g in groups for p in g["params"])


def refuse_thawed(counts: Mapping[int, int]) -> None:
    """Raise an error, on all ranks, if parameters have thawed on one of them.

    Args:
        counts: by rank.

    Raises:
        RuntimeError: naming the ranks.
    """
    listed = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items() if count)
    if listed:
        raise RuntimeError(
            "parameters train that did not when the optimizer was wrapped, so they are not "
            f"exchanged: {listed}. Thaw layers before, or wrap the inner optimizer anew on all "
            "ranks"
        )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that a closure computes, whose gradients are then there; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
