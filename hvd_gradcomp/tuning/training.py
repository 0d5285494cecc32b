"""Training of a model from a factory by any method, for `hvd-gradcomp compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner
from hvd_gradcomp.torch.reduce.momentum import (
    MomentumTransfer,
    resolve_compressor,
    take_over_momentum,
)
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.step_sync import ConfigCheck
from hvd_gradcomp.tuning.job import Job
from hvd_gradcomp.tuning.models import ModelError, load

_SEED = 1


class GradientExchange:
    """Exchange of a model's gradients once backward has ended, over any job; all ranks make it.

    Args:
        job: the ranks.
        compression: as in `DistributedOptimizer`.
        named: (name, parameter) of the model, those that require a gradient.
        optimizer: of these; the compressor may take its momentum over.

    Raises:
        ValueError: the compressor cannot take these layers, or this optimizer.
    """

    def __init__(
        self, job: Job, compression: Any, named: Named, optimizer: torch.optim.Optimizer
    ) -> None:
        self._job, self._parameters = job, [p for _, p in named]
        compressor, momentum = resolve_compressor(compression, optimizer)
        transport, participants = job.backend(), Participants(job.group)
        options = ExchangeOptions(rollback=False, scaler=False)
        planner = BucketPlanner(
            named, compressor, participants, options, name=transport.name, tracking=None
        )
        if not planner.ordered:  # that of the model: nothing is exchanged during backward
            planner.reorder([name for name, _ in named])
        mean = 1.0 / job.group.size()
        self._reducer = Reducer(
            planner, transport, participants, options, prescale=1.0, postscale=mean
        )
        if momentum is not None:
            transfer = MomentumTransfer(optimizer, *momentum)
            take_over_momentum(optimizer, transfer, self._reducer)
        self._check = ConfigCheck(self._reducer, "")

    def stats(self) -> CompressionStats:
        """Return the measured traffic of this rank so far."""
        return self._reducer.stats()

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the mean over ranks into the gradients; all ranks call it in each step.

        Raises:
            MismatchError: on all ranks, in the first step, if they train different models.
            NonFiniteGradientError: on all ranks, if a gradient of one of them is not finite.
        """
        reducer = self._reducer
        self._check.agree()
        reducer.begin_step()
        for p in reversed(self._parameters):
            reducer.mark_ready(p, p.grad)
        self._job.run_to_end(reducer.programs, lambda waits: waits)
        reducer.commit_or_roll_back()
        for p in self._parameters:
            reduced = reducer.reduced_grad(p)
            p.grad = reduced.to(p.dtype, copy=True).view_as(p)
        reducer.finish_step()


def training_of(job: Job, name: str) -> Callable[..., Iterator[Any]]:
    """Return a training by a factory, as `compare` takes one from a user.

    The factory is called anew for each run, and all random numbers begin alike: parameters are
    those of the first rank, and batches another rank's on each. Gradients are exchanged after
    backward, so nothing overlaps with it.

    Args:
        job: the ranks.
        name: `module:factory`, which returns (module, loss, optimizer); see `models.load`.

    Returns:
        A generator function of a compressor, and of the settings of `LocalSteps` or of
        `MomentumExchange` as `local` or `momentum`. It yields what has statistics, and after each
        step the loss.
    """

    def train(
        compression: Any,
        local: dict[str, Any] | None = None,
        momentum: dict[str, Any] | None = None,
    ) -> Iterator[Any]:
        torch.manual_seed(_SEED)
        model = load(name)
        if model.loss is None or model.optimizer is None:
            raise ModelError(
                f"{name} is trained here, so it has to return (module, loss, optimizer): a "
                "function loss() that returns the loss of the next batch, and one of torch.optim"
            )
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        _copy_from_first(job, [*model.module.parameters(), *model.module.buffers()])
        torch.manual_seed(1000 + job.rank())
        optimizer: Any = model.optimizer
        exchange: Any = None
        if local is not None:
            optimizer = job.local_steps(optimizer, named, compression=compression, **local)
        elif momentum is not None:
            optimizer = job.momentum_exchange(optimizer, named, compression=compression, **momentum)
        else:
            exchange = GradientExchange(job, compression, named, optimizer)
        yield exchange or optimizer
        while True:
            optimizer.zero_grad()
            loss = model.loss()
            loss.backward()
            if exchange is not None:
                exchange.exchange()
            optimizer.step()
            yield loss.item()

    return train


@torch.no_grad()
def _copy_from_first(job: Job, tensors: list[torch.Tensor]) -> None:
    """Copy the tensors of the first rank to all others."""
    backend, root = job.backend(), (job.group.ranks or [0])[0]
    for place, tensor in enumerate(tensors):
        sent = backend.broadcast(tensor.detach(), root, f"first.{place}", job.group)
        tensor.copy_(backend.wait(sent))
