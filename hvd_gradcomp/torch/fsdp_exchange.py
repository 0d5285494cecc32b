"""Exchange of the gradients of a sharded model by FSDP's all-reduce hook; see `fsdp`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare, values
from hvd_gradcomp.torch.autograd_callbacks import after_backward, backward_id
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup
from hvd_gradcomp.torch.fsdp_units import Shard, Unit, left_out
from hvd_gradcomp.torch.reducer import Reducer


class ShardExchange:
    """Exchange of this rank's shards with those of other replicas, step by step.

    Args:
        run: reduces the buckets.
        model: the sharded one.
        units: of the model.
        replicas: the ranks with the same shard.
        everybody: all ranks of the mesh.
        steps: compares the steps of all ranks.
    """

    def __init__(
        self,
        run: Reducer,
        model: Any,
        units: Sequence[Unit],
        replicas: ProcessGroup,
        everybody: ProcessGroup,
        steps: C10dBackend,
    ) -> None:
        self._run, self._model, self._units = run, model, units
        self._shards = [shard for unit in units for shard in unit.shards]
        self._replicas, self._everybody, self._steps = replicas, everybody, steps
        self._given: set[str] = set()  # parameters whose gradient has arrived in this step
        self._backward = -1  # that is running, as autograd counts them
        self._exchanging = False  # in this backward
        self._error: Exception | None = None

    @torch.no_grad()
    def take_in(self, unit: Unit, flat: torch.Tensor) -> None:
        """Take this rank's part of a unit's gradient; leave zeros, to which the mean is added."""
        now = backward_id()
        try:
            if now != self._backward:
                self._backward = now
                after_backward(self._finish)
                self._forget_interrupted()
            if self._error is None:
                self._add_pass(unit, flat)
            if self._error is None and unit.exchanges:
                self._give(unit, flat)
        except Exception as error:
            self._fail(error)
        flat.zero_()

    def _forget_interrupted(self) -> None:
        """Drop what is left of a backward that has failed, on all ranks."""
        if self._run.started or self._given:
            self._run.abort()
            self._given.clear()
            for unit in self._units:
                unit.earlier = None
        self._exchanging = False

    def _add_pass(self, unit: Unit, flat: torch.Tensor) -> None:
        """Sum up the gradients of a unit since the last exchange, and their squares if needed."""
        sources, weight = self._run.sources, self._weight(unit, flat)
        for shard, gradient in unit.cut(flat):
            self._check(shard)
            if sources.source == "microbatch" and shard.local.numel():
                sources.add_pass(shard.local, gradient, anew=shard.dropped, weight=weight)
        earlier = unit.take_earlier()
        if earlier is not None:
            flat.add_(earlier)
        if not unit.exchanges:
            unit.earlier = flat.clone()

    def _give(self, unit: Unit, flat: torch.Tensor) -> None:
        """Give the sum of a unit's passes to the programs."""
        if not self._exchanging:
            self._begin()
            self._exchanging = True
        weight = self._weight(unit, flat)
        for shard, gradient in unit.cut(flat):
            self._given.add(shard.name)
            if shard.local.numel():
                self._run.mark_ready(shard.local, gradient, weight)

    def _weight(self, unit: Unit, flat: torch.Tensor) -> float:
        return unit.weight(flat, self._replicas.size())

    def _check(self, shard: Shard) -> None:
        """Check that a gradient can be taken now.

        Raises:
            ValueError: it cannot.
        """
        if getattr(shard.held.sharded_param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a hook waits for the gradient of {shard.name}, as for an optimizer's step in "
                "backward: gradients are there only after backward. Step then"
            )
        if shard.name in self._given:
            raise ValueError(
                f"the unit with {shard.name} was reduced twice in one backward: sum its uses up by "
                "model.set_requires_gradient_sync(False) for all but the last"
            )

    def _begin(self) -> None:
        """Begin a step, after a check that all ranks begin the same one.

        Raises:
            OutOfStepError: on all ranks.
            ValueError: passes were summed up before they came here.
        """
        if self._everybody.closed:
            raise RuntimeError(
                "the exchange of an earlier step has failed, and what was kept is lost: start all "
                "ranks again, from a checkpoint"
            )
        run = self._run
        outside = left_out(self._model, self._units) if run.steps == 0 else []
        if outside:
            raise ValueError(
                "the model of fsdp.compress is a part of what fully_shard was called on, and the "
                f"replicas of other units would differ: {', '.join(outside)}. Call fsdp.compress "
                "on the outermost module"
            )
        if run.sources.source == "microbatch" and run.steps == 0 and run.sources.passes < 2:
            raise ValueError(
                "moments='microbatch' are of several passes, and only one was seen before this "
                "exchange: for all backwards but the last of a step call "
                "model.set_requires_all_reduce(False), and not set_requires_gradient_sync(False), "
                "which sums passes up before they are reduced"
            )
        run.begin_step()
        frozen = [s.name for s in self._shards if not s.trained]
        header = StepHeader(
            Kind.STEP,
            run.steps,
            policy=int(run.rolls_back_nonfinite),
            settings=zlib.crc32("\n".join(frozen).encode()),
        )
        headers = self._steps.gather_headers(header, "the beginning of a step")
        if error := compare(headers):
            raise error
        if len({each.settings for each in headers.values()}) > 1:
            raise OutOfStepError(
                "the ranks have frozen different parameters: freeze the same ones on all ranks, "
                f"between the same two steps. Here it is {', '.join(frozen) or 'none'}"
            )
        for bucket in run.buckets:
            names = bucket.layout.names
            bucket.mask_frozen({at for at, x in enumerate(names) if x in frozen}, run.steps)
        run.planner.warn_if_unprofitable()

    @torch.no_grad()
    def _finish(self) -> None:
        """Run all programs to their ends, and hand out the gradients, after backward.

        Raises:
            NonFiniteGradientError: on all ranks, also if it was in another shard.
            Exception: what has stopped this rank's exchange.
        """
        try:
            if self._error is None and self._exchanging:
                self._exchange()
        except Exception as found:
            self._fail(found)
        error, self._error, self._backward = self._error, None, -1
        given, run = self._given, self._run
        self._given = set()
        if error is None and not self._exchanging:
            return
        self._exchanging = False
        for shard in self._shards:
            if error is None and shard.local.numel() and shard.trained:
                shard.add(run.reduced_grad(shard.local))
            elif shard.name in given and shard.held.sharded_param.grad is not None:
                shard.held.sharded_param.grad.to_local().fill_(float("nan"))
        run.finish_step()
        if error is not None:
            run.scaling.reset()
            raise error

    def _exchange(self) -> None:
        run = self._run
        for unit in self._units:  # those that this backward has not reached
            earlier = unit.take_earlier()
            gradients = {} if earlier is None else dict(unit.cut(earlier))
            weight = 1.0 if earlier is None else self._weight(unit, earlier)
            for shard in unit.shards:
                if shard.name not in self._given and shard.local.numel() and shard.trained:
                    run.mark_ready(shard.local, gradients.get(shard), weight)
        run.programs.wait_all()
        found: NonFiniteGradientError | None = None
        try:
            run.finish_exchange()
        except NonFiniteGradientError as error:
            ranks = ", ".join(map(str, self._replicas.ranks))
            found = NonFiniteGradientError(
                f"{error}. Its numbers of ranks are places among the replicas of this shard, which "
                f"are ranks {ranks}"
            )
        bad = run.rolled_back or found is not None
        header = StepHeader(Kind.STEP, run.steps, fault=int(bad))
        headers = self._steps.gather_headers(header, "the end of a step")
        elsewhere = [str(rank) for rank in values(headers, "fault")]
        if elsewhere and not bad:
            found = NonFiniteGradientError(
                f"the shard of rank {', '.join(elsewhere)} has a NaN or an infinity in its gradient"
            )
            if run.rolls_back_nonfinite:
                run.rollback_nonfinite(found)
                found = None
        if found is not None:
            raise found

    def _fail(self, error: Exception) -> None:
        """Record an error; close the connections unless all ranks have the same error."""
        self._error = error
        if not isinstance(error, (NonFiniteGradientError, OutOfStepError)):
            self._run.abort()
            self._replicas.hang_up()
            self._everybody.hang_up()
