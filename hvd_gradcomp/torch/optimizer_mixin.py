"""Optimizer mixin that reduces gradients.

A hook takes each gradient (`autograd_hooks`); the exchange of a bucket begins with the last of its
gradients. It ends with backward (`backward_end`), as in `DistributedDataParallel`: then `p.grad`
holds the reduced gradient, and clipping, unscaling and norms mean the same as everywhere.
`synchronize` and `step` handle gradients that no backward produced, and exchanges that `step_sync`
does not let end in backward.

A change of a gradient that cannot be applied on all ranks is an error on all: versions detect it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import optimizer as _stock

from hvd_gradcomp.core.compressor import leaves
from hvd_gradcomp.torch import (
    autograd_hooks,
    backward_end,
    checkpoint,
    checksums,
    dcp,
    grad_delivery,
    parameters,
)
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.engine import HorovodReducer
from hvd_gradcomp.torch.exchange import LOGGER
from hvd_gradcomp.torch.grad_versions import GradVersions
from hvd_gradcomp.torch.late_grads import LateGradients
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.moments.dynamo import interpreted
from hvd_gradcomp.torch.step_sync import StepSync

_SUPPORTS_SCALING = "_step_supports_amp_scaling"  # as PyTorch calls it
_STOCK: Any = _stock._DistributedOptimizer
_OF_EACH_CLASS = ("__dict__", "__weakref__", "__module__", "__doc__")
# An optimizer has its own `step` if a scheduler counts its calls.
_OF_EACH_OPTIMIZER = ("defaults", "state", "param_groups", "step", _SUPPORTS_SCALING)


class _StepSkippedError(Exception):
    """Signal that ends an optimizer's step from within its closure."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class DistributedOptimizerMixin:
    """Methods of an optimizer whose gradients are exchanged; `DistributedOptimizer` makes it."""

    # Horovod's.
    _allreduce_delay: dict[Any, int]
    _handles: dict[Any, Any]
    _parameter_names: dict[Any, str]
    _requires_update: set[Any]
    _should_synchronize: bool
    _synchronized: bool
    backward_passes_per_step: int
    op: Any
    param_groups: list[dict[str, Any]]
    process_set: Any
    sparse_as_dense: bool

    def _exchange_by(self, engine: HorovodReducer, takeover: Any, verify_every: int) -> None:
        """Set up the exchange and register hooks. Horovod has made the rest of the optimizer."""
        self._gradcomp, self._takeover, self._verify_every = engine, takeover, verify_every
        self._rounds: StepSync = engine.rounds
        comm_horovod.waiting.among(engine.process_set)
        self._versions, self._reduced = GradVersions(), GradVersions()
        self._said_dropped = self._discarding = False
        self._late = LateGradients(self._versions)
        self._arrivals = autograd_hooks.GradHooks(self)
        self._arrivals.watch(engine.parameters)
        parameters.take_over(self, engine.parameters)

    def _plain(self) -> Any:
        """Return the wrapped optimizer's methods, by `super()`; this class may be subclassed."""
        return super(self._own_class(), self)

    @classmethod
    def _own_class(cls) -> type:
        return next(each for each in cls.__mro__ if "_exchange_by" in vars(each))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy as the wrapped optimizer, with its state, over the copied parameters.

        Hooks, buckets and compressor state belong to this optimizer and its model alone.
        """
        del protocol
        lineage = type(self).__mro__
        wrapped = lineage[lineage.index(self._own_class()) + 2]
        state = torch.optim.Optimizer.__getstate__(self)
        if self._takeover is not None:
            state = self._takeover.restored(state)
        return object.__new__, (wrapped,), state

    def _register_hooks(self) -> None:
        """Register nothing: Horovod calls this before there is a reducer."""

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> tuple[grad_delivery.Reduced, None]:
        """Deliver a gradient; return a callable in place of Horovod's handle."""
        return grad_delivery.give(self, p), None

    @property
    def exchanging(self) -> bool:
        """Return True from a step's first gradient to the end of `step`."""
        return bool(self._handles) or self._rounds.ended

    def _travelling(self) -> bool:
        """Return True if gradients were taken but not reduced yet."""
        return any(handle is not None for handle, _ in self._handles.values())

    def _begin(self) -> None:
        """Begin a step without any gradient."""
        autograd_hooks.forget(self)
        self._late.forget()
        self._handles.clear()
        self._versions.clear()
        self._rounds.begin()
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = self.backward_passes_per_step

    def _drop(self, asked: bool = False) -> None:
        """Begin a step; if the last one was reduced but not applied, roll its exchange back.

        Args:
            asked: the user has called `discard_step`.
        """
        engine = self._gradcomp
        if (self._rounds.ended or self._synchronized) and not engine.undone:
            undone = engine.discard()
            keeps = any(True for bucket in engine.buckets for _ in leaves(bucket.state))
            if keeps and not (asked or self._said_dropped) and engine.process_set.rank() == 0:
                LOGGER.warning(
                    "gradients that were reduced were dropped, without step(): %s. The compressor "
                    "is %s",
                    "what it keeps is as before their exchange. If they were applied by hand, pass "
                    "rollback=False to DistributedOptimizer"
                    if undone
                    else "with rollback=False what it keeps of that step goes with later gradients",
                    engine.compressor,
                )
            self._said_dropped = True
        self._begin()
        self._synchronized = False

    def _abandon(self) -> None:
        """Abort a failed exchange; the next backward begins a step."""
        self._gradcomp.abort()
        self._begin()

    # -- public methods ----------------------------------------------------------------------

    @interpreted
    def synchronize(self) -> None:
        """End the exchange, if backward has not ended it; then `p.grad` is reduced.

        Raises:
            GradientChangedError: on all ranks, if a gradient was changed that was not reduced.
            OutOfStepError: on all ranks, if they are in different steps.
        """
        if self._synchronized and not self.exchanging:
            return  # a second exchange would corrupt the residual
        gone = all(p.grad is None for p in self._handles)
        if gone and self._travelling() and self.process_set.size() == 1:
            self._abandon()  # `model.zero_grad()` after a failed backward
        backward_end.check_mixed(self)
        comm_horovod.complete([backward_end.ending(self, last=True)])
        self._begin()
        self._reduced.only(self._gradcomp.parameters)
        self._synchronized = True

    @interpreted
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the reduced gradients; end the exchange first if it has not ended."""
        if self._takeover is not None:
            self._takeover.check()
        if not self.exchanging and dcp.from_checkpoint():
            # It makes the first state from zero gradients; an exchange would add residuals.
            return self._plain().step(closure)
        self._gradcomp.scaling.check_stepped(self)
        loss = self._step(closure)
        verifies = self._verify_every and self._gradcomp.steps % self._verify_every == 0
        if verifies and not self._rounds.joined:  # joined ranks lag behind until the end
            checksums.check(self._gradcomp)
        return loss

    # Else PyTorch would wrap it again, as it has wrapped `step` of the optimizer's class, and
    # hooks of `register_step_pre_hook` would run twice.
    step.hooked = True

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        engine = self._gradcomp
        if closure is None or not self._should_synchronize:
            if self._should_synchronize:
                self.synchronize()
            backward_end.check_mixed(self)
            if self._travelling():
                raise AssertionError(
                    "step() was called under skip_synchronize() while gradients are being "
                    "exchanged: call synchronize() before it"
                )
            self._begin()
            self._synchronized = False
            self._decay()
            return None if engine.leaves_out else self._plain().step(closure)

        def reduced_closure() -> Any:
            # Horovod reduces before the closure has computed gradients; we reduce after it.
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            self._decay()
            if engine.leaves_out:
                raise _StepSkippedError(loss)
            return _of_all(self, loss) if isinstance(self, torch.optim.LBFGS) else loss

        self._synchronized = False
        try:
            return self._plain().step(reduced_closure)
        except _StepSkippedError as left_out:
            return left_out.loss

    def _decay(self) -> None:
        if self._takeover is not None and not self._gradcomp.undone:
            self._takeover.decay()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """End the exchange; `GradScaler.step` reads this before it inspects gradients."""
        if self.exchanging and self._should_synchronize:
            self.synchronize()
        return bool(vars(self).get(_SUPPORTS_SCALING, False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)[_SUPPORTS_SCALING] = value

    @interpreted
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, reduced or accumulated in an unfinished step.

        If gradients were reduced and `step` was not called, this is `discard_step`.
        """
        if self._travelling() and self.process_set.size() == 1:
            self._abandon()  # a backward has failed; no other rank waits for it
        if self._travelling():
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(); "
                "it would clear gradients that are being exchanged. Where backward() has raised an "
                "error the other ranks wait for this one: call step() to go on with the gradients "
                "that there are, or end the process"
            )
        self._drop(asked=self._discarding)
        self._gradcomp.sources.forget()
        for parameter in self._parameter_names:
            tracker.discard(parameter)
        parameters.join(self)  # unfrozen parameters take part from the next backward on
        self._plain().zero_grad(set_to_none=set_to_none)

    def take_part(self) -> Iterator[None]:
        """Take part in other ranks' exchanges, without gradients, until all ranks have joined.

        Yield while waiting for them. Parameters are not updated; see `uneven_inputs.join`.
        """
        engine = self._gradcomp
        engine.joined = True
        try:
            while True:
                for p in engine.parameters:
                    if p not in self._handles:  # from passes of an unfinished step
                        p.grad = None
                        tracker.discard(p)
                if not (yield from backward_end.ending(self, last=True, joined=True)):
                    return
                self._begin()
        finally:
            engine.joined = False
            self._synchronized = False

    def discard_step(self) -> None:
        """Skip a step whose gradients are reduced: drop them, and roll back the exchange.

        The compressor's state is rolled back bit-exactly on all ranks, so a bad batch leaves
        nothing in the residual. All ranks call it, or none: otherwise the next exchange is an
        OutOfStepError on all of them. `zero_grad` without `step` does the same. The exchange is
        counted in `compression_stats(...).skipped`.

        Raises:
            RuntimeError: no gradients are reduced, or the optimizer was made with rollback=False.
        """
        if not (self._rounds.ended or self._synchronized):
            raise RuntimeError(
                "discard_step() leaves out a step whose gradients are reduced: call it after "
                "backward(), or after synchronize(), and before step()"
            )
        if not self._gradcomp.rollback and not self._gradcomp.compressor.is_linear:
            raise RuntimeError(
                "discard_step() needs the state from before the exchange: make "
                "DistributedOptimizer without rollback=False"
            )
        self._discarding = True
        try:
            self.zero_grad()
        finally:
            self._discarding = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in PyTorch; its parameters join, on all ranks before the same step.

        Missing options default to those of the wrapped optimizer. In stock Horovod they default to
        those of its class: with SGD(lr=1.0) the group trains at 0.001.
        """
        if not hasattr(self, "_gradcomp"):  # PyTorch adds the first ones
            self._plain().add_param_group(param_group)
            return
        if self.exchanging:
            raise RuntimeError(
                "add_param_group() was called after backward() and before step(): parameters join "
                "between steps, on all ranks between the same two"
            )
        self._plain().add_param_group(param_group)
        names = dict(self._parameter_names)
        try:
            if self._takeover is not None:
                self._takeover.take()
            parameters.name(self, self.param_groups[-1])
            parameters.join(self)
        except ValueError:
            self.param_groups.pop()
            self._parameter_names = names
            raise

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, without that of the compressor."""
        return self._plain().state_dict()

    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """Return the optimizer's state, with the compressor's under "gradcomp".

        See `hvd.save_checkpoint` for the two modes; all ranks call it for "consolidated".
        """
        plain = self.plain_state_dict()
        if self._takeover is not None:
            plain = self._takeover.restored(plain)
        if dcp.from_checkpoint():
            dcp.warn_of_loss(self._gradcomp.buckets)
        return {**plain, "gradcomp": checkpoint.save(self._gradcomp, mode)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or one of an optimizer that is not distributed.

        After an error everything is rolled back, except that an exchange in flight was aborted.
        """
        parameters.join(self)  # unfrozen since the optimizer was made, as in the saving run
        plain = {key: value for key, value in state_dict.items() if key != "gradcomp"}
        if self.exchanging:
            self._abandon()
        undo = checkpoint.make_rollback(self)
        try:
            if "gradcomp" in state_dict:
                checkpoint.load(self._gradcomp, state_dict["gradcomp"])
            self._begin()
            self._synchronized, self._should_synchronize = False, True
            self._plain().load_state_dict(plain)
            if self._takeover is not None:
                self._takeover.take()
        except Exception:
            undo()
            raise


def _of_all(optimizer: Any, loss: Any) -> torch.Tensor:
    """Reduce a loss as gradients are: line searches by each rank's own loss would diverge."""
    mine = torch.as_tensor(loss).detach()
    average = 1.0 / optimizer.process_set.size() if optimizer.op == horovod.Average else 1.0
    name = f"{optimizer._gradcomp.name}.loss"
    wide = mine.double().reshape(1)
    total: torch.Tensor = comm_horovod.allreduce(
        wide, name, optimizer.process_set, 1.0, average
    ).wait()
    return total.to(mine.dtype).reshape(mine.shape)


def class_of(optimizer: torch.optim.Optimizer) -> type:
    """Make the class of a distributed optimizer: Horovod's set-up, our exchange, PyTorch's update.

    It is a single class, as Horovod makes it: Horovod's helpers skip it to reach PyTorch's methods.
    """
    ours = {
        name: value
        for name, value in vars(DistributedOptimizerMixin).items()
        if name not in _OF_EACH_CLASS
    }
    return derived(optimizer, ours)


def derived(optimizer: torch.optim.Optimizer, ours: Mapping[str, Any]) -> type:
    """Make Horovod's class for an optimizer, whose instances keep its options and hooks.

    Horovod itself calls the class's constructor again with the parameters alone, and would lose
    them.
    """
    cls = type(optimizer)

    def like_it(self: Any, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, dict(optimizer.defaults))
        for name, value in vars(optimizer).items():
            if name in _OF_EACH_OPTIMIZER:
                continue
            bound = getattr(value, "__self__", None) is optimizer
            vars(self)[name] = value.__func__.__get__(self) if bound else value

    between = type(cls.__name__, (cls,), {"__init__": like_it})
    methods = {**vars(_STOCK), **ours, "__module__": _stock.__name__}
    return type(cls.__name__, (between,), methods)
