"""Drop-in for `horovod.torch.elastic`, whose states keep each rank's residuals and momenta.

Stock Horovod copies rank 0's optimizer state to all ranks. Here rank 0's parameters, optimizer
state and replicated compressor fields are copied; residuals and momenta stay with their rank.
"""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch.elastic import ElasticSampler, init, run, run_fn, sampler, shutdown, state
from horovod.torch.elastic import TorchState as _StockState
from horovod.torch.elastic.state import ModelStateHandler, StateHandler

from hvd_gradcomp.runtime.elastic import LOGGER, Lost, Membership, RankState
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.comm.broadcast_objects import from_root
from hvd_gradcomp.torch.comm.horovod import TITLES, gather_objects
from hvd_gradcomp.torch.drop_in.broadcast_state import hand_out, hand_out_rounds, plain_state
from hvd_gradcomp.torch.drop_in.grad_synchronizer import GradSynchronizer, synchronizer_of
from hvd_gradcomp.torch.drop_in.optimizer import scales
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce.reducer import Reducer, wait_for_copies
from hvd_gradcomp.torch.reduce.reducer_state import Snapshot, reset_local, resize, squares

__all__ = [
    "ElasticSampler",
    "Lost",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "sampler",
    "shutdown",
    "state",
]


class TorchState(Membership, _StockState):
    """State that an elastic run commits, restores and broadcasts to ranks that join.

    Horovod's `TorchState` for objects that include a `hvd.DistributedOptimizer` of this package:
    the compressor's state is committed and restored with the rest, bit-exactly. At `sync` survivors
    keep their own residuals and momenta, and a rank that joins begins with none. The residual of a
    rank that died is lost: its norm is logged, and in `lost`.

    Memory: two commits, each a copy of all objects; see `Membership`.

    Args:
        model, optimizer: optional.
        kwargs: further models, optimizers, samplers (`ElasticSampler`) and plain Python objects;
            all become attributes.

    Raises:
        ValueError: an optimizer exchanges over a process set, which does not survive a reset.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, optimizer, **kwargs)
        for name, handler in self._handlers.items():
            if synchronizer_of(handler.value) is not None:
                self._handlers[name] = CompressedOptimizer(handler.value)
            elif isinstance(handler.value, WrappedOptimizer):
                self._handlers[name] = ExchangingOptimizer(handler.value)
            elif type(handler) is ModelStateHandler:
                self._handlers[name] = Model(handler.value)
        self.begin()

    def reset(self) -> None:
        comm_horovod.forget()
        super().reset()

    def _gather(self, seat: RankState) -> list[RankState]:
        return gather_objects(seat, RankState, "gradcomp.elastic.roll", horovod.global_process_set)

    def _place(self) -> tuple[int, int]:
        return horovod.rank(), horovod.local_rank()

    def _compressed(self) -> list[CompressedOptimizer | ExchangingOptimizer]:
        kinds = CompressedOptimizer, ExchangingOptimizer
        return [h for h in self._handlers.values() if isinstance(h, kinds)]

    def _squares(self) -> float:
        return sum(squares(r) for handler in self._compressed() for r in handler.reducers)

    def _committed(self) -> Any:
        # A handler binds new copies when it saves, so a shallow copy of it keeps the old ones.
        return {name: copy.copy(h) for name, h in self._handlers.items()}, self._saved_state

    def _recommit(self, copies: Any) -> None:
        self._handlers, self._saved_state = copies

    def _forget(self) -> None:
        for handler in self._compressed():
            handler.forget()

    def _resize(self) -> None:
        for handler in self._compressed():
            handler.resize()


class Model(StateHandler):
    """Handler of a module of any dtype."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    @outside_inference()
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    @outside_inference()
    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    @outside_inference()
    def sync(self) -> None:
        self.value.load_state_dict(from_root(self.value.state_dict()))


class CompressedOptimizer(StateHandler):
    """Handler of an optimizer that exchanges gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        _require_all_ranks(self.reducer)
        self.save()

    @property
    def _synchronizer(self) -> GradSynchronizer:
        synchronizer = synchronizer_of(self.value)
        assert synchronizer is not None
        return synchronizer

    @property
    def reducer(self) -> Reducer:
        return self._synchronizer.reducer

    @property
    def reducers(self) -> list[Reducer]:
        return [self.reducer]

    @outside_inference()
    def save(self) -> None:
        wait_for_copies(self.reducer.buckets)
        self._saved_plain = copy.deepcopy(plain_state(self.value))
        self._snapshot = Snapshot.of(self.reducer).copy()

    @outside_inference()
    def restore(self) -> None:
        self._synchronizer.abort_exchange()
        self._snapshot.copy().restore(self.reducer)
        # `load_state_dict` keeps tensors by reference; those of the commit must not change.
        self.value.load_state_dict(copy.deepcopy(self._saved_plain))

    @outside_inference()
    def sync(self) -> None:
        name, number = from_root((self.reducer.transport.name, TITLES.draw()))
        self.reducer.rename(name)
        TITLES.continue_from(number)
        hand_out(self.value, 0, elastic=True)
        self._synchronizer.abort_exchange()

    def forget(self) -> None:
        """Reset this rank's own state, but not replicated fields, to that before the first step."""
        reset_local(self.reducer)

    def resize(self) -> None:
        """Adapt scales and compressor state to the number of ranks."""
        optimizer = self.value
        ranks = self.reducer.participants.process_set.size()
        how = scales(optimizer.op, optimizer.gradient_predivide_factor, ranks)
        resize(self.reducer, *how, horovod.rank() == 0)
        self._synchronizer.abort_exchange()


class ExchangingOptimizer(StateHandler):
    """Handler of an optimizer that exchanges in its `step`: local steps, or momenta.

    With local steps survivors go back to the commit, with their own parameters and residuals; at
    `sync` all ranks go on from the global parameters of the commit, and keep their residuals.
    """

    def __init__(self, optimizer: WrappedOptimizer) -> None:
        super().__init__(optimizer)
        for reducer in self.reducers:
            _require_all_ranks(reducer)
        self.save()

    @property
    def reducers(self) -> list[Reducer]:
        reducers: list[Reducer] = self.value.all_reducers
        return reducers

    @outside_inference()
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())
        self._snapshots = [Snapshot.of(reducer).copy() for reducer in self.reducers]

    @outside_inference()
    def restore(self) -> None:
        saved = copy.deepcopy(self._saved)
        self.value.load_rounds(saved)
        for reducer, snapshot in zip(self.reducers, self._snapshots):
            snapshot.copy().restore(reducer)
        self.value.load_inner(saved)

    @outside_inference()
    def sync(self) -> None:
        if horovod.rank() == 0 and not self.value.is_exchanged:
            LOGGER.warning(
                "all ranks go on from the global parameters: the local steps of each since the "
                "last exchange are lost"
            )
        names, number = from_root(([r.transport.name for r in self.reducers], TITLES.draw()))
        for reducer, name in zip(self.reducers, names):
            reducer.rename(name)
        TITLES.continue_from(number)
        hand_out_rounds(self.value, 0)

    def forget(self) -> None:
        """Reset this rank's own state, but not replicated fields, to that before the first step."""
        for reducer in self.reducers:
            reset_local(reducer)

    def resize(self) -> None:
        """Adapt scales and compressor state to the number of ranks."""
        for reducer in self.reducers:
            mean = 1.0 / reducer.participants.process_set.size()
            resize(reducer, 1.0, mean, horovod.rank() == 0)
        self.value.compare_again()


def _require_all_ranks(reducer: Reducer) -> None:
    if reducer.participants.process_set is not horovod.global_process_set:
        raise ValueError(
            "elastic training exchanges over all ranks: a process set does not outlive a reset. "
            "Make the optimizer without process_set="
        )
