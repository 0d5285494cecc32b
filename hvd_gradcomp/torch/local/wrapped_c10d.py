"""Local steps and `ddp.MomentumExchange`, over `torch.distributed`: no Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, EIGHTH, LocalSchedule
from hvd_gradcomp.algorithms.combined.round_length import Every
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.config_check import Description
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup
from hvd_gradcomp.torch.comm.hosts import participants_by_reduction
from hvd_gradcomp.torch.interop.ddp_reduction import ranks_of
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.local.outer import Outer
from hvd_gradcomp.torch.local.tensor_exchange import Connection
from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer, refuse_exchanging
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.backend import MakeBackend
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.reducer_state import OF_HOOKS

T = TypeVar("T", bound=WrappedOptimizer)


def LocalSteps(  # noqa: N802 - as over Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    every: Every = 5,
    outer: Outer = AVERAGING,
    compression: Any = EIGHTH,
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
    backend: MakeBackend = C10dBackend,
) -> LocalStepsOptimizer:
    """Wrap an optimizer so that each rank steps alone, and ranks exchange every so many steps.

    As `hvd_gradcomp.torch.LocalSteps`, over `torch.distributed`. All ranks of the group call it.
    For a model that `DistributedDataParallel` has wrapped there is `local_steps`. This is for a
    plain module; if `DistributedDataParallel` over the same ranks is around it, now or by the first
    step, its reduction and its broadcast of buffers are switched off for good. It is left on if the
    two have a single rank in common. Sharded models are refused.

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        optimizer, named_parameters, every, outer, compression: as over Horovod.
        warmup_steps, fragments, delay, blend: as over Horovod.
        named_buffers, bucket_bytes, nonfinite, deadline: as over Horovod.
        process_group: the ranks that take part; None for all.
        backend: makes the transport of what is compressed from a group and a name, on all ranks;
            see docs/extending-transport.md. `torch.distributed` by default.

    Returns:
        A `torch.optim.Optimizer`; each rank saves its own `state_dict()`.

    Raises:
        ValueError: `torch.distributed` is not initialized; and as over Horovod.
        TypeError, MismatchError, OutOfStepError, DivergedError, NonFiniteGradientError: as there.
    """
    group = _group_of("LocalSteps", process_group)
    clock_group = _clock_group("LocalSteps", process_group, group, deadline)

    def make() -> LocalStepsOptimizer:
        refuse_exchanging(optimizer)
        schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend, deadline)
        return LocalStepsOptimizer(
            optimizer,
            named_parameters,
            _connections(Participants(group), backend),
            schedule,
            outer,
            compression,
            named_buffers=named_buffers,
            bucket_bytes=bucket_bytes,
            nonfinite=nonfinite,
            connect_clock=lambda: _connections(Participants(clock_group), backend)("rounds"),
        )

    return make_on_all(group, make)


def local_steps(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    every: Every = 5,
    outer: Outer = AVERAGING,
    compression: Any = EIGHTH,
    *,
    warmup_steps: int = 0,
    fragments: int = 1,
    delay: int = 0,
    blend: float | None = None,
    average_buffers: bool = False,
    process_group: Any = None,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
    deadline: float | None = None,
    backend: MakeBackend = C10dBackend,
) -> LocalStepsOptimizer:
    """Let each rank of a `DistributedDataParallel` step alone, and exchange every so many steps.

    The same training as that of a plain module by `LocalSteps`, to the bit, for programs and
    libraries that wrap their model. All ranks call it, before the first forward::

        model = DistributedDataParallel(model)
        optimizer = ddp.local_steps(model, torch.optim.AdamW(model.parameters()))

    The process group of the model says who reduces in each step. If it is all ranks that take part,
    as by default, its reduction is switched off for good, and so is its broadcast of buffers: ranks
    train alone between exchanges. If it is the ranks of a host, they go on as they are, dense in
    each step, and hosts exchange: a host is one rank to the compressor, and its ranks send a part
    of the model each. Then the first rank's parameters and buffers are broadcast to all hosts, as
    `DistributedDataParallel` does inside of one::

        mesh = init_device_mesh("cuda", (hosts, ranks_of_a_host), mesh_dim_names=("hosts", "ranks"))
        model = DistributedDataParallel(model, device_mesh=mesh["ranks"])
        optimizer = ddp.local_steps(model, torch.optim.AdamW(model.parameters()))

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        model: a `DistributedDataParallel`, without a communication hook if its group is all ranks.
        optimizer, every, outer, compression: as in `LocalSteps`.
        warmup_steps, fragments, delay, blend: as in `LocalSteps`.
        average_buffers: average buffers in floating point, such as running means, after each
            exchange of all fragments; otherwise each rank keeps its own, and those of a host have
            those of its first rank.
        process_group: the ranks that take part; None for all.
        bucket_bytes, nonfinite: as in `LocalSteps`.
        deadline: as in `LocalSteps`; not with hosts of several ranks.
        backend: as in `LocalSteps`.

    Returns:
        A `torch.optim.Optimizer`, with the inner one's groups, state and hooks; names in its
        `state_dict()` are those of the module.

    Raises:
        TypeError: the model is no `DistributedDataParallel`; and as in `LocalSteps`.
        ValueError: its process group is neither all ranks nor one of several of equally many; the
            model has a communication hook, or casts by `mixed_precision=`; something else exchanges
            it; and as in `LocalSteps`.
        MismatchError, OutOfStepError, DivergedError, NonFiniteGradientError: as in `LocalSteps`.
    """
    group = _group_of("local_steps", process_group)
    clock_group = _clock_group("local_steps", process_group, group, deadline)
    reduced = ranks_of(model) if isinstance(model, DistributedDataParallel) else []
    host: list[int] = []

    def make() -> LocalStepsOptimizer:
        participants = participants_by_reduction(group, reduced)  # all ranks meet in it
        _require_ddp(model)
        refuse_exchanging(optimizer)
        schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend, deadline)
        if participants.place is not None:
            schedule.check_averages_in_hosts()
            host[:] = participants.groups.inside.ranks
        return LocalStepsOptimizer(
            optimizer,
            model.module.named_parameters(),
            _connections(participants, backend),
            schedule,
            outer,
            compression,
            named_buffers=model.module.named_buffers() if average_buffers else None,
            bucket_bytes=bucket_bytes,
            nonfinite=nonfinite,
            connect_clock=lambda: _connections(Participants(clock_group), backend)("rounds"),
            host=host,
        )

    made = make_on_all(group, make)
    if host:
        _broadcast([*model.module.parameters(), *model.module.buffers()], group)
    return made


def _require_ddp(model: Any) -> None:
    """Check that local steps can take the place of the reduction of a model.

    Raises:
        TypeError: it is no `DistributedDataParallel`.
        ValueError: it casts parameters by itself.
    """
    if not isinstance(model, DistributedDataParallel):
        wrapped = isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel)
        raise TypeError(
            f"ddp.local_steps takes a DistributedDataParallel, got {type(model).__name__}. "
            + (
                "Call it on what DistributedDataParallel(...) returns, before torch.compile"
                if wrapped
                else "For a plain module call ddp.LocalSteps(optimizer, model.named_parameters())"
            )
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) casts gradients in its own communication "
            "hook, in whose place local steps exchange: leave it out, and use torch.autocast"
        )


@torch.no_grad()
def _broadcast(tensors: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Set tensors of any dtype to those of a group's first rank."""
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole.reshape(-1).view(torch.uint8), group.ranks[0], group=group.handle)
        tensor.copy_(whole)


def MomentumExchange(  # noqa: N802 - as over Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    warmup_steps: int = 100,
    *,
    process_group: Any = None,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
    backend: MakeBackend = C10dBackend,
) -> MomentumExchangeOptimizer:
    """Wrap Adam or AdamW so that its momentum is exchanged compressed, instead of gradients.

    As `hvd_gradcomp.torch.MomentumExchange`, over `torch.distributed`. The reduction of a
    `DistributedDataParallel` around the model is switched off, as by `LocalSteps`.

    Default: `warmup_steps=100`, which was not measured: docs/papers.md has trainings with 240 dense
    steps of 1,200, a fifth.

    Args:
        optimizer, named_parameters, compression: as over Horovod.
        warmup_steps, bucket_bytes, nonfinite: as over Horovod.
        process_group: the ranks that take part; None for all.
        backend: makes the transport of what is compressed from a group and a name, on all ranks;
            see docs/extending-transport.md. `torch.distributed` by default.

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
            _connections(Participants(group), backend),
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


def _clock_group(
    function: str, process_group: Any, group: ProcessGroup, deadline: float | None
) -> ProcessGroup:
    """Return a group where nothing but the clock of rounds travels, if some rank has a deadline."""
    has_deadline = group.gather_objects(deadline is not None, bool)
    return _group_of(function, process_group) if any(has_deadline) else group


def make_on_all(group: ProcessGroup, make: Callable[[], T]) -> T:
    """Make an optimizer on all ranks of a group, or on none of them.

    Raises:
        MismatchError: on all ranks, if some of them refuse to, or in another way; or if they train
            different models, or in different ways.
        TypeError, ValueError: the error of `make`, if all ranks refuse alike.
    """
    refused: Exception | None = None
    description: Description = {}
    try:
        optimizer = make()
        description = optimizer.description
    except (TypeError, ValueError) as error:
        refused = error
    try:
        config_check.compare(description, group.gather_objects, group.ranks, refused)
    except BaseException:
        if refused is None:
            optimizer.withdraw()  # a traceback may keep it
        raise
    optimizer.begin()
    return optimizer


def _connections(participants: Participants, backend: MakeBackend) -> Callable[[str], Connection]:
    """Return what connects the ranks that take part."""
    group: ProcessGroup = participants.process_set

    def connect(part: str) -> Connection:
        load = partial(reducer_state.load, remedies=OF_HOOKS)
        how = save_own, load, group.hang_up
        return Connection(backend(group, part), participants, *how)

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
