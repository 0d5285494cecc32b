"""`hvd.LocalSteps` and `hvd.MomentumExchange`: optimizers around another one, over Horovod."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, EIGHTH, LocalSchedule
from hvd_gradcomp.algorithms.combined.round_length import Every
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.drop_in import checkpoint
from hvd_gradcomp.torch.drop_in.optimizer import DistributedOptimizer
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.local.outer import Outer
from hvd_gradcomp.torch.local.tensor_exchange import Connection
from hvd_gradcomp.torch.local.wrapped_optimizer import refuse_exchanging
from hvd_gradcomp.torch.reduce import reducer_state
from hvd_gradcomp.torch.reduce.reducer_state import OF_OPTIMIZERS


def LocalSteps(  # noqa: N802 - beside DistributedOptimizer
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
    process_set: Any = horovod.global_process_set,
    hierarchical: bool = False,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
    deadline: float | None = None,
) -> LocalStepsOptimizer:
    """Wrap an optimizer so that each rank steps alone, and ranks exchange every so many steps.

    What travels is the change of the parameters since the last exchange, through any compressor
    with its error feedback, into an outer optimizer (Douillard et al. 2023, DiLoCo). Bytes a step
    are those of an exchange divided by `every`. ::

        adam = torch.optim.AdamW(model.parameters())
        optimizer = hvd.LocalSteps(adam, model.named_parameters())

    Parameters, and the inner optimizer's state, differ between ranks from one exchange to the next.
    Evaluate and save the model after an exchange: the schedule's, or `optimizer.exchange()`, which
    all ranks call. `hvd.verify(optimizer)` compares the global parameters.

    The reduction of a `DistributedDataParallel` around the model is switched off for good: to train
    on without the result, wrap the module anew. Another exchange of the same parameters between
    these ranks is an error, and so is a sharded model. Ranks wait for each other in the first step,
    and compare their parameters.

    Works with accumulated gradients, clipping, autocast and `GradScaler` (a step that it skips
    counts, so ranks stay together), and with schedulers of the result (inner) and of
    `optimizer.outer`. Per-sample and micro-batch moments are those of gradients, and refused:
    Variance and Hybrid take `moments="step"`.

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        optimizer: the inner one, any `torch.optim.Optimizer`; it keeps its own state on each rank.
        named_parameters: usually `model.named_parameters()`; named by place if None.
        every: steps between two exchanges; 5 did best on slow links (docs/worth.md), and DiLoCo's
            own experiments have 500.
            Or a `QuadraticRule`, which exchanges more rarely as the learning rate falls; or a
            function of the steps so far, called when a round begins, which returns its steps, the
            same on all ranks.
        outer: the outer optimizer's settings, an `OuterSGD`, or a function that makes an optimizer
            from the list of global parameters. The default averages what ranks send. A
            momentum wants `warmup_steps`, unless the model was trained before: see `diloco`.
        compression: of the changes, as in `DistributedOptimizer`. Momentum correction (DGC, EGC)
            takes over the outer optimizer's momentum.
        warmup_steps: first steps, in which gradients are averaged in every step, dense.
        fragments: parts of the model that are exchanged in turn, `every / fragments` steps apart,
            so that traffic is even (Douillard et al. 2025, Streaming DiLoCo).
        delay: steps between sending and applying, so that the exchange overlaps with them.
        blend: weight of a rank's own parameters where global ones arrive; 0.5 with a delay, else 0.
        named_buffers: usually `model.named_buffers()`: floating-point buffers, such as running
            means, are averaged after each exchange of all fragments. None leaves them to each rank.
        process_set: the ranks that take part.
        hierarchical: ranks of a host average their gradients in every step, dense, and hosts
            exchange. Needs `hvd.init(process_sets="dynamic")` where a host has several ranks.
        bucket_bytes: as in `DistributedOptimizer`.
        nonfinite: if the parameters of some rank are not finite at an exchange: "raise", or "skip":
            all ranks go back to the global parameters. The same on all ranks; None for "raise".
        deadline: seconds, for ranks of different speeds. A rank that has made `every` steps goes on
            training until the others have, but no longer than this; then all exchange what they
            have, each after its step. So ranks make different numbers of steps, and equally many
            rounds: train until `optimizer.rounds`, and call no collective of your own in between.
            Without fragments, delay, hierarchical and `QuadraticRule`. None: all make `every`
            steps, and wait.

    Returns:
        A `torch.optim.Optimizer`, with the inner one's groups, state and hooks, and `exchange()`,
        `restart()`, `outer`, `steps_made` and `rounds`.

    Memory: a copy of the parameters, the outer momentum, and what the compressor keeps. With a
    delay another copy while an exchange is on its way.

    Raises:
        ValueError: Horovod is not initialised; a setting is out of range; a parameter cannot be
            compressed; moments of samples are asked for.
        TypeError: `compression` is no compressor, `optimizer` or `outer` no optimizer.
        MismatchError, OutOfStepError, DivergedError, NonFiniteGradientError: in `step`, on all
            ranks; see `LocalStepsOptimizer.step`.
    """
    refuse_exchanging(optimizer)
    schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend, deadline)
    ranks = _Ranks("LocalSteps", process_set, hierarchical)
    inner = optimizer
    place = ranks.participants.place
    if place is not None and place.slots > 1:
        schedule.check_averages_in_hosts()
        named_parameters = list(named_parameters) if named_parameters is not None else None
        inside = ranks.participants.groups.inside
        inner = DistributedOptimizer(
            optimizer,
            named_parameters,
            process_set=inside,
            nonfinite="propagate",
            scaler=False,
            _claims=False,
        )
    made = LocalStepsOptimizer(
        inner,
        named_parameters,
        ranks.connect,
        schedule,
        outer,
        compression,
        stock=horovod.Compression,
        named_buffers=named_buffers,
        bucket_bytes=bucket_bytes,
        nonfinite=nonfinite,
        connect_clock=lambda: ranks.connect("rounds"),
    )
    made.begin()
    return made


def MomentumExchange(  # noqa: N802 - beside DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    warmup_steps: int = 100,
    *,
    process_set: Any = horovod.global_process_set,
    hierarchical: bool = False,
    bucket_bytes: int | None = None,
    nonfinite: str | None = None,
) -> MomentumExchangeOptimizer:
    """Wrap Adam or AdamW so that its momentum is exchanged compressed, instead of gradients.

    The way of 1-bit Adam (Tang et al. 2021) with any compressor that keeps what it does not send:
    in the first steps gradients are averaged dense, and Adam is plain. Then its second moment is
    fixed, each rank adds its gradient to the common momentum, and the mean over ranks of what the
    compressor sends of it is the new momentum. ::

        optimizer = hvd.MomentumExchange(torch.optim.AdamW(model.parameters()),
                                         model.named_parameters(), hvd.OneBitCompressor(), 500)

    The exchange happens in `step`, so it does not overlap with backward. Gradients are this rank's
    own until then: clip by value or by each rank's own norm. An element whose gradient was 0 on all
    ranks in all of the first steps has no second moment, and stays as it is.

    Default: `warmup_steps=100`, which was not measured: docs/papers.md has trainings with 240 dense
    steps of 1,200, a fifth.

    Args:
        optimizer: `torch.optim.Adam` or `AdamW`, without amsgrad.
        named_parameters: usually `model.named_parameters()`; named by place if None.
        compression: of the momenta, best one with error feedback; without momentum correction.
        warmup_steps: first steps, dense; at least 1. Its authors take 15 to 20 % of a training.
        process_set, hierarchical, bucket_bytes: as in `DistributedOptimizer`.
        nonfinite: if a gradient of some rank is not finite: "raise", or "skip" on all ranks. None
            for "raise"; with a `GradScaler` all ranks skip.

    Returns:
        A `torch.optim.Optimizer`, with the inner one's groups, state and hooks.

    Raises:
        ValueError: Horovod is not initialised; a setting is out of range; the compressor corrects
            momentum itself, or needs moments of samples.
        TypeError: the optimizer is another one, or `compression` no compressor.
        MismatchError, OutOfStepError, NonFiniteGradientError: in `step`, on all ranks.
    """
    refuse_exchanging(optimizer)
    ranks = _Ranks("MomentumExchange", process_set, hierarchical)
    made = MomentumExchangeOptimizer(
        optimizer,
        named_parameters,
        ranks.connect,
        compression,
        warmup_steps,
        stock=horovod.Compression,
        bucket_bytes=bucket_bytes,
        nonfinite=nonfinite,
    )
    made.begin()
    return made


class _Ranks:
    """Ranks of a process set, and their connections under one name.

    Args:
        what: the function that was called, for errors.
        process_set: the ranks.
        hierarchical: only sums of hosts are compressed.

    Raises:
        ValueError: Horovod is not initialised, or this rank takes no part.
    """

    def __init__(self, what: str, process_set: Any, hierarchical: bool) -> None:
        if not horovod.is_initialized():
            raise ValueError(f"call hvd.init() before hvd.{what}(...)")
        if not process_set.included():
            raise ValueError(
                f"this rank is not in process_set=: make {what} on its ranks alone, and keep the "
                "plain optimizer on the others"
            )
        place = hierarchy.place_of(mpi_ops, process_set, True) if hierarchical else None
        self._name, self._process_set = comm_horovod.TITLES.take(), process_set
        main = comm_horovod.HorovodBackend(self._name, process_set)
        self.participants = Participants(process_set, place, main.make_groups)
        self._stalls = comm_horovod.stalls.among(process_set)

    def connect(self, part: str) -> Connection:
        """Return the connection for one exchange."""
        transport = comm_horovod.HorovodBackend(f"{self._name}.{part}", self._process_set)
        # Collectives have names: nothing else waits for those that a failed rank leaves out.
        load = partial(reducer_state.load, remedies=OF_OPTIMIZERS)
        how = checkpoint.save, load, lambda: None
        return Connection(transport, self.participants, *how, self._stalls)
