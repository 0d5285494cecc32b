"""Optimizer mixin that reduces gradients; see `grad_synchronizer` for how.

A gradient that is changed where that cannot be honoured is an error on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import horovod.torch as horovod
import torch
from horovod.torch import optimizer as _stock

from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.drop_in import checkpoint
from hvd_gradcomp.torch.drop_in.grad_synchronizer import (
    GradSynchronizer,
    synchronizer_of,
    synchronizers,
)
from hvd_gradcomp.torch.interop import dcp
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.monitoring import inspection
from hvd_gradcomp.torch.reduce import checksums, reducer_state
from hvd_gradcomp.torch.reduce.momentum import MomentumTransfer
from hvd_gradcomp.torch.reduce.reducer_state import OF_OPTIMIZERS

_SUPPORTS_SCALING = "_step_supports_amp_scaling"  # as PyTorch calls it
_STOCK: Any = _stock._DistributedOptimizer
_OF_EACH_CLASS = ("__dict__", "__weakref__", "__module__", "__doc__")
# `step` is there where a scheduler counts calls of it.
_OF_EACH_OPTIMIZER = ("defaults", "state", "param_groups", "step", _SUPPORTS_SCALING)


class _StepSkippedError(Exception):
    """Signal that ends an optimizer's step from within its closure."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class DistributedOptimizerMixin:
    """Methods of an optimizer whose gradients are exchanged; `DistributedOptimizer` makes it."""

    # Horovod's.
    _parameter_names: dict[Any, str]
    _should_synchronize: bool
    backward_passes_per_step: int
    op: Any
    param_groups: list[dict[str, Any]]
    process_set: Any
    sparse_as_dense: bool

    def _exchange_by(
        self,
        synchronizer: GradSynchronizer,
        transfer: MomentumTransfer | None,
        verify_every: int,
    ) -> None:
        """Begin to reduce gradients. Horovod has set up the rest of the optimizer."""
        self._gradcomp, self._synchronizer = synchronizer.reducer, synchronizer
        self._transfer, self._verify_every = transfer, verify_every
        optimizer = cast(torch.optim.Optimizer, self)
        synchronizers[optimizer] = synchronizer
        inspection.know(optimizer, synchronizer.reducer)

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
        if self._transfer is not None:
            state = self._transfer.restored(state)
        return object.__new__, (wrapped,), state

    def _register_hooks(self) -> None:
        """Register nothing: Horovod calls this before there is a reducer."""

    @property
    def exchanging(self) -> bool:
        """Return True from the first gradient of a step to the end of `step`."""
        return self._synchronizer.exchanging

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step, as in Horovod."""
        self.backward_passes_per_step = passes
        self._synchronizer.set_passes(passes)

    def retake_momentum(self) -> None:
        """Hand the momentum to the compressor again, after something has set the optimizer's."""
        if self._transfer is not None:
            self._transfer.take()

    # -- what a user calls -------------------------------------------------------------------

    @interpreted
    @outside_inference()
    def synchronize(self) -> None:
        """End the exchange, if backward has not ended it; then `p.grad` is reduced.

        Raises:
            GradientChangedError: on all ranks, if a gradient was changed that was not reduced.
            OutOfStepError: on all ranks, if they are in different steps.
        """
        self._synchronizer.synchronize()

    @interpreted
    @outside_inference()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the reduced gradients; end the exchange first if it has not ended."""
        if self._transfer is not None:
            self._transfer.check()
        if not self.exchanging and dcp.from_checkpoint():
            # It makes the first state, of zeros: exchanged, they would take along what is kept.
            return self._plain().step(closure)
        self._gradcomp.scaling.check_stepped(cast(torch.optim.Optimizer, self))
        loss = self._step(closure)
        verifies = self._verify_every and self._gradcomp.steps % self._verify_every == 0
        # A rank that has joined makes no updates until the end.
        if verifies and not self._synchronizer.sync.joined:
            checksums.check(self._gradcomp)
        return loss

    # PyTorch would wrap it once more, as it has wrapped that of the optimizer's class, and the
    # hooks of `register_step_pre_hook` would run twice.
    step.hooked = True

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        reducer, synchronizer = self._gradcomp, self._synchronizer
        if closure is None or not self._should_synchronize:
            if self._should_synchronize:
                self.synchronize()
            synchronizer.check_mixed()
            if synchronizer.travelling:
                raise AssertionError(
                    "step() was called under skip_synchronize() while gradients are being "
                    "exchanged: call synchronize() before it"
                )
            synchronizer.begin()
            synchronizer.synchronized = False
            self._decay()
            return None if reducer.skips_step else self._plain().step(closure)

        def reduced_closure() -> Any:
            # Horovod reduces before the closure computes the gradients; they are reduced here.
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            synchronizer.synchronized = False
            self._decay()
            if reducer.skips_step:
                raise _StepSkippedError(loss)
            return self._reduced_loss(loss) if isinstance(self, torch.optim.LBFGS) else loss

        synchronizer.synchronized = False
        try:
            return self._plain().step(reduced_closure)
        except _StepSkippedError as left_out:
            return left_out.loss

    def _reduced_loss(self, loss: Any) -> torch.Tensor:
        """Reduce a loss as gradients are: by their own losses, ranks would search apart."""
        local = torch.as_tensor(loss).detach()
        average = 1.0 / self.process_set.size() if self.op == horovod.Average else 1.0
        name, wide = f"{self._gradcomp.transport.name}.loss", local.double().reshape(1)
        work = comm_horovod.allreduce(wide, name, self.process_set, 1.0, average)
        total: torch.Tensor = work.wait()
        return total.to(local.dtype).reshape(local.shape)

    def _decay(self) -> None:
        if self._transfer is not None and not self._gradcomp.rolled_back:
            self._transfer.decay()

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
        self._clear(set_to_none)

    @interpreted
    @outside_inference()
    def _clear(self, set_to_none: bool = True, *, explicit: bool = False) -> None:
        self._synchronizer.clear(explicit)
        self._plain().zero_grad(set_to_none=set_to_none)

    def discard_step(self) -> None:
        """Skip a step whose gradients are reduced: drop them, and roll back the exchange.

        The compressor's state is rolled back bit-exactly on all ranks, so a bad batch leaves
        nothing in the residual. All ranks call it, or none: otherwise the next exchange is an
        OutOfStepError on all of them. `zero_grad` without `step` does the same. The exchange is
        counted in `compression_stats(...).skipped`.

        Raises:
            RuntimeError: no gradients are reduced, or the optimizer was made with rollback=False.
        """
        if not self._synchronizer.reduced:
            raise RuntimeError(
                "discard_step() leaves out a step whose gradients are reduced: call it after "
                "backward(), or after synchronize(), and before step()"
            )
        if not self._gradcomp.keeps_snapshots and not self._gradcomp.planner.compressor.is_linear:
            raise RuntimeError(
                "discard_step() needs the state from before the exchange: make "
                "DistributedOptimizer without rollback=False"
            )
        self._clear(explicit=True)

    @outside_inference()
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
        try:
            self.retake_momentum()
            self._synchronizer.add_last_group()
        except ValueError:
            self.param_groups.pop()
            raise

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, without that of the compressor."""
        return self._plain().state_dict()

    @outside_inference()
    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """Return the optimizer's state, with the compressor's under "gradcomp".

        See `hvd.save_checkpoint` for the two modes; all ranks call it for "consolidated".
        """
        plain = self.plain_state_dict()
        if self._transfer is not None:
            plain = self._transfer.restored(plain)
        if dcp.from_checkpoint():
            dcp.warn_of_loss(self._gradcomp.buckets)
        return {**plain, "gradcomp": checkpoint.save(self._gradcomp, mode)}

    @outside_inference()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or one of an optimizer that is not distributed.

        After an error everything is rolled back, except that an exchange in flight was aborted.
        """
        # Those that were unfrozen since the optimizer was made, as in the run that saved.
        self._synchronizer.join_parameters()
        plain = {key: value for key, value in state_dict.items() if key != "gradcomp"}
        if self.exchanging:
            self._synchronizer.abort_step()
        rollback = checkpoint.make_rollback(self)
        try:
            if "gradcomp" in state_dict:
                reducer_state.load(self._gradcomp, state_dict["gradcomp"], OF_OPTIMIZERS)
            self._synchronizer.begin()
            self._synchronizer.synchronized, self._should_synchronize = False, True
            self._plain().load_state_dict(plain)
            self.retake_momentum()
        except Exception:
            rollback()
            raise


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

    def like_it(self: torch.optim.Optimizer, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, dict(optimizer.defaults))
        for name, value in vars(optimizer).items():
            if name in _OF_EACH_OPTIMIZER:
                continue
            bound = getattr(value, "__self__", None) is optimizer
            vars(self)[name] = value.__func__.__get__(self) if bound else value

    between = type(cls.__name__, (cls,), {"__init__": like_it})
    methods = {**vars(_STOCK), **ours, "__module__": _stock.__name__}
    return type(cls.__name__, (between,), methods)


def distributed(item: Any) -> DistributedOptimizerMixin | None:
    """Return a distributed optimizer as what it is; None of everything else."""
    return cast(DistributedOptimizerMixin, item) if synchronizer_of(item) is not None else None
