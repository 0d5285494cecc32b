"""`hvd.LocalSteps`: local steps over Horovod; see `local_steps`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import mpi_ops

from hvd_gradcomp.algorithms.local_steps import DILOCO, LocalSchedule
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.participants import Participants
from hvd_gradcomp.torch import checkpoint
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.local_steps import LocalStepsOptimizer, Outer
from hvd_gradcomp.torch.optimizer import DistributedOptimizer
from hvd_gradcomp.torch.tensor_exchange import Connection


def LocalSteps(  # noqa: N802 - beside DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    every: int = 15,
    outer: Outer = DILOCO,
    compression: Any = None,
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
) -> LocalStepsOptimizer:
    """Wrap an optimizer so that each rank steps alone, and ranks exchange every so many steps.

    What travels is the change of the parameters since the last exchange, through any compressor
    with its error feedback, into an outer optimizer (Douillard et al. 2023, DiLoCo). Bytes a step
    are those of an exchange divided by `every`. ::

        optimizer = hvd.LocalSteps(torch.optim.AdamW(model.parameters()), model.named_parameters(),
                                   **hvd.sparse_loco(every=15))

    Parameters, and the inner optimizer's state, differ between ranks from one exchange to the next.
    Evaluate and save the model after an exchange: the schedule's, or `optimizer.exchange()`, which
    all ranks call. `hvd.verify(optimizer)` compares the global parameters.

    Works with accumulated gradients, clipping, autocast and `GradScaler` (a step that it skips
    counts, so ranks stay together), and with schedulers of the result (inner) and of
    `optimizer.outer`. Per-sample and micro-batch moments are those of gradients, and refused:
    Variance and Hybrid take `moments="step"`.

    Args:
        optimizer: the inner one, any `torch.optim.Optimizer`; it keeps its own state on each rank.
        named_parameters: usually `model.named_parameters()`; named by place if None.
        every: steps between two exchanges; 15 to 100 are usual, 500 in DiLoCo's own experiments.
        outer: the outer optimizer's settings, an `OuterSGD`, or a function that makes an optimizer
            from the list of global parameters. `OuterSGD(lr=1, momentum=0)` averages parameters.
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

    Returns:
        A `torch.optim.Optimizer`, with the inner one's groups, state and hooks, and `exchange()`,
        `restart()`, `outer`, `steps_made` and `exchanges`.

    Memory: a copy of the parameters, the outer momentum, and what the compressor keeps. With a
    delay another copy while an exchange is on its way.

    Raises:
        ValueError: Horovod is not initialised; a setting is out of range; a parameter cannot be
            compressed; moments of samples are asked for.
        TypeError: `compression` is no compressor, `optimizer` or `outer` no optimizer.
        MismatchError, OutOfStepError, DivergedError, NonFiniteGradientError: in `step`, on all
            ranks; see `LocalStepsOptimizer.step`.
    """
    if not horovod.is_initialized():
        raise ValueError("call hvd.init() before hvd.LocalSteps(...)")
    if not process_set.included():
        raise ValueError(
            "this rank is not in process_set=: make LocalSteps on its ranks alone, and keep the "
            "plain optimizer on the others"
        )
    schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend)
    place = hierarchy.place_of(mpi_ops, process_set, True) if hierarchical else None
    name = comm_horovod.TITLES.take()
    main = comm_horovod.HorovodBackend(name, process_set)
    participants = Participants(process_set, place, main.make_groups)

    def connect(part: str) -> Connection:
        return Connection(
            comm_horovod.HorovodBackend(f"{name}.{part}", process_set),
            participants,
            checkpoint.save,
            checkpoint.load,
            lambda: None,  # named collectives: nothing else waits for them
        )

    inner = optimizer
    if place is not None and place.slots > 1:
        named_parameters = list(named_parameters) if named_parameters is not None else None
        inside = participants.groups.inside
        inner = DistributedOptimizer(
            optimizer, named_parameters, process_set=inside, nonfinite="propagate", scaler=False
        )
    return LocalStepsOptimizer(
        inner,
        named_parameters,
        connect,
        schedule,
        outer,
        compression,
        stock=horovod.Compression,
        named_buffers=named_buffers,
        bucket_bytes=bucket_bytes,
        nonfinite=nonfinite,
    )
