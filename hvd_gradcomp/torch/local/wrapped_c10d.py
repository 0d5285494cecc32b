"""`ddp.LocalSteps` and `ddp.MomentumExchange`, over `torch.distributed`: no Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, LocalSchedule
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.local.outer import Outer
from hvd_gradcomp.torch.local.tensor_exchange import Connection
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer, refuse_exchanging
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.reducer_state import OF_HOOKS

T = TypeVar("T", bound=WrappedOptimizer)


def LocalSteps(  # noqa: N802 - as over Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    every: int = 15,
    outer: Outer = AVERAGING,
    compression: Any = None,
    *,
    warmup_steps: int = 0,
    fragments: int = 1,
    delay: int = 0,
    blend: float | None = None,
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    process_group: Any = None,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
    deadline: float | None = None,
) -> LocalStepsOptimizer:
    """Wrap an optimizer so that each rank steps alone, and ranks exchange every so many steps.

    As `hvd_gradcomp.torch.LocalSteps`, over `torch.distributed`. All ranks of the group call it.
    If `DistributedDataParallel` is around the model, now or by the first step, its reduction and
    its broadcast of buffers are switched off for good: to train on without the result, wrap the
    module in `DistributedDataParallel` anew. It is left on if the two have a single rank in common:
    where ranks of a host are to reduce in each step, give `DistributedDataParallel` the group of
    the host's ranks, and `process_group` here one rank of each host, in as many groups as a host
    has ranks. Sharded models are refused.

    Args:
        optimizer, named_parameters, every, outer, compression: as over Horovod.
        warmup_steps, fragments, delay, blend: as over Horovod.
        named_buffers, bucket_bytes, nonfinite, deadline: as over Horovod.
        process_group: the ranks that take part; None for all.

    Returns:
        A `torch.optim.Optimizer`; each rank saves its own `state_dict()`.

    Raises:
        ValueError: `torch.distributed` is not initialized; and as over Horovod.
        TypeError, MismatchError, OutOfStepError, DivergedError, NonFiniteGradientError: as there.
    """
    group = _group_of("LocalSteps", process_group)
    clock_group = None if deadline is None else _group_of("LocalSteps", process_group)

    def make() -> LocalStepsOptimizer:
        refuse_exchanging(optimizer)
        schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend, deadline)
        return LocalStepsOptimizer(
            optimizer,
            named_parameters,
            _connections(group),
            schedule,
            outer,
            compression,
            named_buffers=named_buffers,
            bucket_bytes=bucket_bytes,
            nonfinite=nonfinite,
            connect_clock=lambda: _connections(clock_group or group)("rounds"),
        )

    return make_on_all(group, make)


def MomentumExchange(  # noqa: N802 - as over Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    warmup_steps: int = 100,
    *,
    process_group: Any = None,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
) -> MomentumExchangeOptimizer:
    """Wrap Adam or AdamW so that its momentum is exchanged compressed, instead of gradients.

    As `hvd_gradcomp.torch.MomentumExchange`, over `torch.distributed`. The reduction of a
    `DistributedDataParallel` around the model is switched off, as by `LocalSteps`.

    Args:
        optimizer, named_parameters, compression: as over Horovod.
        warmup_steps, bucket_bytes, nonfinite: as over Horovod.
        process_group: the ranks that take part; None for all.

    Returns:
        A `torch.optim.Optimizer`; each rank saves its own `state_dict()`.

    Raises:
        ValueError: `torch.distributed` is not initialized; and as over Horovod.
        TypeError, MismatchError, OutOfStepError, NonFiniteGradientError: as there.
    """
    group = _group_of("MomentumExchange", process_group)

    def make() -> MomentumExchangeOptimizer:
        refuse_exchanging(optimizer)
        return MomentumExchangeOptimizer(
            optimizer,
            named_parameters,
            _connections(group),
            compression,
            warmup_steps,
            bucket_bytes=bucket_bytes,
            nonfinite=nonfinite,
        )

    return make_on_all(group, make)


def _group_of(function: str, process_group: Any) -> ProcessGroup:
    """Make a group over the same ranks; all of them call it.

    Raises:
        ValueError: `torch.distributed` is not initialized.
    """
    if not dist.is_initialized():
        raise ValueError(f"call torch.distributed.init_process_group() before ddp.{function}(...)")
    return ProcessGroup(process_group)


def make_on_all(group: ProcessGroup, make: Callable[[], T]) -> T:
    """Make an optimizer on all ranks of a group, or on none of them.

    Raises:
        MismatchError: on all ranks, if some of them refuse to, or in another way.
        TypeError, ValueError: the error of `make`, if all ranks refuse alike.
    """
    refused: Exception | None = None
    try:
        optimizer = make()
    except (TypeError, ValueError) as error:
        refused = error
    try:
        config_check.compare({}, group.gather_objects, group.ranks, refused)
    except BaseException:
        if refused is None:
            optimizer.withdraw()  # a traceback may keep it
        raise
    optimizer.begin()
    return optimizer


def _connections(group: ProcessGroup) -> Callable[[str], Connection]:
    """Return what connects the ranks of a group."""
    participants = Participants(group)

    def connect(part: str) -> Connection:
        load = partial(reducer_state.load, remedies=OF_HOOKS)
        how = save_own, load, group.hang_up
        return Connection(C10dBackend(group, part), participants, *how)

    return connect


def save_own(reducer: Reducer, mode: str) -> dict[str, Any]:
    """Return the state of a reducer on this rank.

    Raises:
        ValueError: the mode asks for another rank's too.
    """
    if mode != "sharded":
        raise ValueError(
            f"over torch.distributed each rank saves its own, mode='sharded', got {mode!r}"
        )
    return reducer_state.save(reducer)
