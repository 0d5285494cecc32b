"""Base of the handles that users hold: `ddp.CompressionState` and `fsdp.ShardedCompression`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.hooks import setup_check
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.monitoring import inspection
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.backend import GroupBackend
from hvd_gradcomp.torch.reduce.claims import Claim
from hvd_gradcomp.torch.reduce.momentum import (
    MomentumTransfer,
    resolve_compressor,
    take_over_momentum,
)
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.reducer_state import OF_HOOKS


@dataclass
class SetUp:
    """Description of an exchange that this rank sets up; incomplete if the rank refuses to.

    Attributes:
        compressor: as the user passed it, until it is resolved.
        claim: this rank's to the parameters, so that nothing else exchanges them.
        layers: all that are exchanged, in the model's order.
        layouts: those of the buckets, if they have to be equal on all ranks.
        momentum: (momentum, nesterov) of SGD that the compressor takes over; None for none.
    """

    compressor: Any
    claim: Claim | None = None
    layers: Sequence[Layer] = ()
    layouts: list[Layout] = field(default_factory=list)
    momentum: tuple[float, bool] | None = None

    def resolve(self, compression: Any, optimizer: torch.optim.Optimizer | None) -> Compressor:
        """Return the compressor that the user passed; see `resolve_compressor`."""
        self.compressor, self.momentum = resolve_compressor(compression, optimizer)
        compressor: Compressor = self.compressor
        return compressor


class HookCompression:
    """Compression of one model's gradients by a hook, and its state from step to step.

    Attributes:
        reducer: exchanges the gradients.
    """

    reducer: Reducer
    _no_snapshot = "call it once, after backward()"

    def _set_up(
        self,
        set_up: SetUp,
        make_reducer: Callable[[SetUp], Reducer],
        optimizer: torch.optim.Optimizer | None,
        group: ProcessGroup,
        transport: GroupBackend,
        settings: str,
    ) -> None:
        """Make the reducer, once all ranks have found that they train the same in the same way.

        Args:
            set_up: completed by `make_reducer`.
            make_reducer: makes the reducer. A TypeError or ValueError is this rank's refusal, and
                an error on all ranks.
            optimizer: the SGD whose momentum may be taken over.
            group: the ranks.
            transport: has the versions that are compared.
            settings: options that must be equal on all ranks.

        Raises:
            TypeError, ValueError: from `make_reducer`, if all ranks raise one.
            MismatchError: on all ranks, if they do not train the same model in the same way.
        """
        refusal: Exception | None = None
        try:
            self.reducer = make_reducer(set_up)
            assert set_up.claim is not None
            set_up.claim.take()
        except (TypeError, ValueError) as error:
            refusal = error
        what = set_up.layers, set_up.compressor, set_up.layouts, settings
        setup_check.agree(group, transport, *what, refusal, set_up.claim)
        if set_up.momentum is not None:
            assert optimizer is not None
            transfer = MomentumTransfer(optimizer, *set_up.momentum)
            take_over_momentum(optimizer, transfer, self.reducer)
        self._claim = set_up.claim
        inspection.know(self, self.reducer)

    @property
    def steps(self) -> int:
        """Return the number of exchanges so far."""
        return self.reducer.steps

    def stats(self) -> CompressionStats:
        """Return the measured traffic of this rank's exchanges so far; see `CompressionStats`.

        The headers that ranks compare in each step, of 72 bytes, are not counted, nor is what FSDP
        moves inside a replica.
        """
        return self.reducer.stats()

    @outside_inference()
    def discard_step(self) -> None:
        """Roll back the compressor's state, bit-exactly, to that before the last exchange.

        Skips a step: call it after backward, and `zero_grad()` instead of the optimizer's step, on
        all ranks; otherwise the next exchange is an OutOfStepError on all. So a bad batch leaves
        nothing in the residual. The exchange is counted in `stats().skipped`.

        Raises:
            RuntimeError: nothing was exchanged since the last call, or rollback is False.
        """
        reducer = self.reducer
        if not reducer.rollback() and not (reducer.planner.compressor.is_linear and reducer.steps):
            raise RuntimeError(
                "discard_step() restores the state from before the last exchange: "
                f"{self._no_snapshot}"
            )

    @outside_inference()
    def retrain(self) -> None:
        """Retrain the compressor, from the next step on; all ranks call it."""
        self.reducer.retrain()

    @outside_inference()
    def state_dict(self) -> dict[str, Any]:
        """Return the compressor's state of this rank; each rank saves its own."""
        return reducer_state.save(self.reducer)

    @outside_inference()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of `state_dict`; on all ranks, between the same two steps.

        From another rank's state, only replicated fields are loaded.

        Raises:
            CheckpointError: it is of another format, compressor, model or number of ranks.
        """
        reducer_state.load(self.reducer, saved, OF_HOOKS)

    @outside_inference()
    def load_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Load what all ranks saved by `state_dict`, on any number of ranks; all ranks call it.

        Each of as many ranks loads its own, to the bit. With another number the residuals are
        summed up, and each rank takes an equal share; what ranks have in common stays.

        Args:
            states: those of all ranks that saved, in any order; an iterator that reads one file
                after the other needs the memory for one of them, and for the sum.

        Raises:
            CheckpointError: the state of a rank is missing, or they are of several checkpoints, or
                of another format, compressor or model.
        """
        reducer_state.load_states(self.reducer, states, OF_HOOKS)
