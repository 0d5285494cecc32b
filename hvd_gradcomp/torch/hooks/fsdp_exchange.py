"""Exchange of the gradients of a sharded model by FSDP's all-reduce hook; see `fsdp`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, values
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.hooks.fsdp_units import Shard, Unit, left_out
from hvd_gradcomp.torch.hooks.hook_exchange import HookExchange
from hvd_gradcomp.torch.interop.autograd_callbacks import after_backward, backward_id
from hvd_gradcomp.torch.reduce.backend import GroupBackend
from hvd_gradcomp.torch.reduce.reducer import Reducer


class ShardExchange(HookExchange):
    """Exchange of this rank's shards with those of other replicas, step by step.

    Args:
        reducer: reduces the buckets.
        model: the sharded one.
        units: those of the model.
        replicas: the ranks with the same shard.
        everybody: all ranks of the mesh.
        transport: compares the steps of all ranks.
    """

    def __init__(
        self,
        reducer: Reducer,
        model: Any,
        units: Sequence[Unit],
        replicas: ProcessGroup,
        everybody: ProcessGroup,
        transport: GroupBackend,
    ) -> None:
        super().__init__(reducer, transport, [replicas, everybody])
        self._model, self._units = model, units
        self._replicas, self._everybody = replicas, everybody
        self._shards = [shard for unit in units for shard in unit.shards]
        self._arrived: set[str] = set()  # parameters whose gradient has arrived in this step
        self._backward = -1  # that is running, as autograd counts them
        self._exchanging = False  # in this backward

    @torch.no_grad()
    def reduce(self, unit: Unit, flat: torch.Tensor) -> None:
        """Exchange this rank's part of a unit's gradient; leave zeros, to which the mean is added.

        The exchange ends after backward.
        """
        now = backward_id()
        try:
            if now != self._backward:
                self._backward = now
                after_backward(self._finish_step)
                self._abort_interrupted()
            if self._error is None:
                self._add_pass(unit, flat)
            if self._error is None and unit.exchanges:
                self._fill_buckets(unit, flat)
        except Exception as error:
            self._fail(error)
        flat.zero_()

    def _abort_interrupted(self) -> None:
        """Abort the exchange of a backward that has failed, on all ranks."""
        if self._reducer.started or self._arrived:
            self._reducer.abort()
            self._arrived.clear()
            for unit in self._units:
                unit.earlier = None
        self._exchanging = False

    def _add_pass(self, unit: Unit, flat: torch.Tensor) -> None:
        """Sum up the gradients of a unit since the last exchange, and their squares if needed."""
        sources, weight = self._reducer.sources, self._weight(unit, flat)
        for shard, gradient in unit.cut(flat):
            self._check(shard)
            if sources.source == "microbatch" and shard.local.numel():
                sources.add_pass(shard.local, gradient, anew=shard.dropped, weight=weight)
        earlier = unit.take_earlier()
        if earlier is not None:
            flat.add_(earlier)
        if not unit.exchanges:
            unit.earlier = flat.clone()

    def _fill_buckets(self, unit: Unit, flat: torch.Tensor) -> None:
        """Copy the sum of a unit's passes into buckets, whose programs start when they are full."""
        if not self._exchanging:
            self._begin()
            self._exchanging = True
        gradients = [*unit.cut(flat)]
        self._arrived.update(shard.name for shard, _ in gradients)
        filled = [(shard.local, gradient) for shard, gradient in gradients if gradient.numel()]
        self._reducer.mark_all_ready(filled, self._weight(unit, flat))

    def _weight(self, unit: Unit, flat: torch.Tensor) -> float:
        return unit.weight(flat, self._replicas.size())

    def _check(self, shard: Shard) -> None:
        """Check that a gradient can be taken now.

        Raises:
            ValueError: it cannot.
        """
        if getattr(shard.record.sharded_param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{shard.name} has a post-accumulate-grad hook, as for an optimizer's step in "
                "backward. Reduced gradients exist only after backward: call optimizer.step() there"
            )
        if shard.name in self._arrived:
            raise ValueError(
                f"the unit with {shard.name} was reduced twice in one backward: sum its uses up by "
                "model.set_requires_gradient_sync(False) for all but the last"
            )

    def _begin(self) -> None:
        """Begin a step; see `_begin_step`.

        Raises:
            OutOfStepError: on all ranks.
            ValueError: passes were summed up before they came here.
        """
        self._require_connections()
        reducer = self._reducer
        outside = left_out(self._model, self._units) if reducer.steps == 0 else []
        if outside:
            raise ValueError(
                "the model of fsdp.compress is a part of what fully_shard was called on, and the "
                f"replicas of other units would differ: {', '.join(outside)}. Call fsdp.compress "
                "on the outermost module"
            )
        sources = reducer.sources
        if sources.source == "microbatch" and reducer.steps == 0 and sources.passes < 2:
            raise ValueError(
                "moments='microbatch' are of several passes, and only one was seen before this "
                "exchange: for all backwards but the last of a step call "
                "model.set_requires_all_reduce(False), and not set_requires_gradient_sync(False), "
                "which sums passes up before they are reduced"
            )
        frozen = [s.name for s in self._shards if not s.trained]
        masks = bool(frozen) or any(bucket.frozen_slots for bucket in reducer.buckets)
        settings = zlib.crc32("\n".join(frozen).encode())
        self._begin_step(Kind.STEP, settings, at_once=masks)
        for bucket in reducer.buckets:
            slots = {slot for slot, name in enumerate(bucket.layout.names) if name in frozen}
            bucket.mask_frozen(slots, reducer.steps)
        reducer.planner.report(self._everybody.rank() == 0, "of this rank's shards")

    def _take_headers(self, headers: dict[int, StepHeader]) -> None:
        if len({each.settings for each in headers.values()}) > 1:
            frozen = ", ".join(s.name for s in self._shards if not s.trained)
            raise OutOfStepError(
                "the ranks have frozen different parameters: freeze the same ones on all ranks, "
                f"between the same two steps. Here it is {frozen or 'none'}"
            )

    @torch.no_grad()
    def _finish_step(self) -> None:
        """Finish the exchange, and add the reduced gradients to the model's, after backward.

        Raises:
            NonFiniteGradientError: on all ranks, also if it was in another shard.
            Exception: what has stopped this rank's exchange.
        """
        try:
            if self._error is None and self._exchanging:
                self._finish_programs()
        except Exception as failure:
            self._fail(failure)
        error, self._backward = self._pop_error(), -1
        arrived, reducer = self._arrived, self._reducer
        self._arrived = set()
        if error is None and not self._exchanging:
            return
        self._exchanging = False
        if error is None:
            exchanged = [s for s in self._shards if s.local.numel() and s.trained]
            for shard, reduced in zip(exchanged, reducer.reduced([s.local for s in exchanged])):
                shard.add(reduced)
        else:
            for shard in self._shards:
                if shard.name in arrived and shard.record.sharded_param.grad is not None:
                    shard.record.sharded_param.grad.to_local().fill_(float("nan"))
        reducer.finish_step()
        if error is not None:
            reducer.scaling.reset()
            raise error

    def _finish_programs(self) -> None:
        """Run all programs to their ends, in the same order on all ranks.

        Raises:
            NonFiniteGradientError: on all ranks, also if it was in another shard.
        """
        reducer = self._reducer
        for unit in self._units:  # those that this backward has not reached
            earlier = unit.take_earlier()
            gradients = {} if earlier is None else dict(unit.cut(earlier))
            weight = 1.0 if earlier is None else self._weight(unit, earlier)
            for shard in unit.shards:
                if shard.name not in self._arrived and shard.local.numel() and shard.trained:
                    reducer.mark_ready(shard.local, gradients.get(shard), weight)
        reducer.programs.agree()  # there may be nothing to send
        reducer.programs.wait_all()
        reducer.commit_or_roll_back_among(self._nonfinite_ranks)

    def _nonfinite_ranks(self, here: bool) -> list[int]:
        """Return the ranks with a non-finite gradient, among all ranks of the mesh."""
        header = StepHeader(Kind.STEP, self._reducer.steps, fault=int(here))
        headers = self._transport.gather_headers(header, "the end of a step")
        return [*values(headers, "fault")]

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OutOfStepError):
            self._arrived.clear()  # nothing was exchanged, so FSDP's gradients are as they were
        elif not isinstance(error, NonFiniteGradientError):
            self._reducer.abort()
        super()._fail(error)
