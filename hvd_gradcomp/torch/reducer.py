"""Reducer of a model's gradients: buckets fill as gradients arrive, and are reduced by programs.

A bucket's program starts when the last of its gradients has arrived, so its communication overlaps
with the backward of earlier layers; `bucket_programs` runs them. Horovod's
optimizer and the hook of `DistributedDataParallel` say when gradients are there, and where the
reduced ones go; what else differs between the two is in their `Backend`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Set

import torch

from hvd_gradcomp.core.compressor import Context
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import stats
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.amp import GradScalerAdapter
from hvd_gradcomp.torch.bucket import Bucket, Named, as_real
from hvd_gradcomp.torch.bucket_programs import BucketPrograms, TrafficCounter
from hvd_gradcomp.torch.bucketing import BucketPlanner
from hvd_gradcomp.torch.comm.backend import Backend
from hvd_gradcomp.torch.moments.sources import Sources
from hvd_gradcomp.torch.options import ExchangeOptions

LOGGER = logging.getLogger("hvd_gradcomp")


class Reducer:
    """Reducer of one model's gradients.

    Args:
        planner: plans the buckets.
        transport: moves tensors.
        participants: the ranks.
        options: of the exchange.
        prescale, postscale: see `Context`.
        in_order: launch programs in the order of the buckets, whatever the order in which gradients
            arrive. For transports that match collectives by order, where ranks may differ in it.
        beside: (name, parameter) of sparse gradients that have no bucket: their rows are gathered.
        releases: release the memory of buckets between steps. Reduced gradients must be copied.

    Attributes:
        programs: of the buckets.
        traffic: of this rank.
        scaling: of the loss.
        sources: of second moments.
        steps: exchanges so far.
        undone: the last exchange was rolled back.
        summed: a digest of the sums of the previous exchange; 0 for none.
        joined: this rank has run out of batches, and contributes only its residuals.
        started: a program of this step has started, and the exchange has not ended.
        policy: of this step, for non-finite gradients.
    """

    def __init__(
        self,
        planner: BucketPlanner,
        transport: Backend,
        participants: Participants,
        options: ExchangeOptions,
        *,
        prescale: float,
        postscale: float,
        in_order: bool = False,
        beside: Named = (),
        releases: bool = False,
    ) -> None:
        transport.check(planner.named_parameters)
        self.planner, self.transport, self.participants = planner, transport, participants
        self.rollback, self._nonfinite = options.rollback, options.nonfinite
        self.prescale, self.postscale = prescale, postscale
        self.beside, self._releases = list(beside), releases
        self.scaling, self.traffic = GradScalerAdapter(options.scaler), TrafficCounter()
        self.sources = Sources(planner.source, planner.places, options.batch_size, self.scaling)
        self.sources.watch(planner.buckets)
        self.programs = BucketPrograms(
            planner, transport, participants, self.traffic, in_order=in_order
        )
        self.policy = options.nonfinite or "raise"
        self.joined = self.undone = False
        self.steps = self.summed = 0
        self.started = False
        self._can_discard = False  # the last exchange can still be rolled back
        for bucket in self.buckets if releases else ():
            bucket.release()

    @property
    def buckets(self) -> list[Bucket]:
        """Return the buckets, in the order in which backward fills them."""
        return self.planner.buckets

    @property
    def parameters(self) -> Set[torch.nn.Parameter]:
        """Return the parameters that have a place in a bucket."""
        return self.planner.places.keys()

    def leads(self, bucket: Bucket) -> bool:
        """Return True if this rank compresses a bucket and keeps its state."""
        return self.participants.leads(bucket.leader)

    def add(self, named_parameters: Named) -> None:
        """Add parameters, on all ranks before the same step; see `BucketPlanner.add`."""
        self.transport.check(named_parameters)
        self.sources.watch(self.planner.add(named_parameters, self.steps))

    def rename(self, name: str) -> None:
        """Change the prefix of all names on the timeline."""
        self.transport.name = name
        self.planner.rename(name)

    # -- one step ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Commit the last step; fix the loss scale and the non-finite policy of this one."""
        self.commit()
        scaled = self.scaling.begin_step()
        if not self.joined:  # then other ranks scale their loss, or do not, as before
            self.policy = self._nonfinite or ("skip" if scaled else "raise")
        for bucket in self.buckets:
            bucket.refresh()

    @property
    def undoes(self) -> bool:
        """Return True if a step with a non-finite gradient is rolled back."""
        return self.policy != "raise"

    def follow(self, undoes: bool) -> None:
        """Adopt the policy for non-finite gradients of the ranks that still have batches."""
        if self._nonfinite is None:
            self.policy = "skip" if undoes else "raise"

    def mark_ready(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into its bucket; start the bucket's program if it was the last one.

        Args:
            gradient: dense, of the parameter's shape or one number; None stands for zero.
        """
        bucket, slot = self.planner.places[parameter]
        if self._releases:
            bucket.allocate()
        with torch.no_grad():
            if gradient is None:
                bucket.views[slot].zero_()
            else:
                power = 0 if bucket.scaled else 1
                self.scaling.unscale(as_real(gradient), bucket.views[slot], power)
            if bucket.moment_views:
                self.sources.give(bucket, slot)
        if bucket.flat.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(bucket.flat.device))
        bucket.absent.discard(slot)
        for ready in self.programs.ready(bucket):
            self._launch(ready)

    def _launch(self, bucket: Bucket) -> None:
        self.started = True
        bucket.wait_for_streams()
        participants = self.participants
        keeps = participants.place is None and bucket.compressor.keeps_gradient
        context = Context(
            bucket.layout,
            *participants.rank_and_size,
            self.steps,
            self.prescale,
            self.postscale,
            keeps and bucket.owns_flat,
        )
        if self.undoes or self.rollback:
            bucket.keep_before()
        self.programs.launch(bucket, context)

    def finalize(self) -> Iterator[None]:
        """Run every started program to its end; yield while all wait for other ranks.

        Raises:
            PayloadError: and the like, from a program; after all other programs have ended, so
                that no rank waits for this one.
        """
        yield from self.programs.finish()
        if self.started:
            self.end_exchange()

    def end_exchange(self) -> None:
        """Commit or roll back the exchange, after all programs have ended."""
        self.started, found = False, self.programs.take_errors()
        if self.undoes:
            for ops in {id(bucket.ops): bucket.ops for bucket in self.buckets}.values():
                try:
                    ops.raise_found()
                except NonFiniteGradientError as error:
                    found.append(error)
        for bucket in self.buckets:
            bucket.absent = set(range(len(bucket.parameters)))
            if found or not self.rollback:
                bucket.end(undo=bool(found) and self.undoes)
        others = [e for e in found if not isinstance(e, NonFiniteGradientError)]
        self.undone = bool(found) and not others and self.undoes
        self.summed = self.traffic.digest()
        if self.undone:
            self._skip(found[0])
            return
        self.steps += 1
        self._can_discard = self.rollback and not found
        if found:
            for bucket in self.buckets:
                bucket.result = None
            raise (others or found)[0]

    def _skip(self, error: Exception) -> None:
        """Return NaN gradients on all ranks, which a loss scaler or `step` will see."""
        count = self.traffic.skipped()
        expected = self.scaling.scaler is not None or count > 1
        level = logging.DEBUG if expected else logging.WARNING
        LOGGER.log(level, "step left out (%d so far): %s", count, error)
        for bucket in self.buckets:
            bucket.result = bucket.flat.zero_()  # what lies between the layers has to stay 0
            for view in bucket.views:
                view.fill_(float("nan"))

    def reduced_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the reduced gradient of a parameter, in its shape and its bucket's precision."""
        bucket, slot = self.planner.places[parameter]
        if bucket.result is None:
            raise RuntimeError("a gradient without an exchange; this is a bug in hvd_gradcomp")
        gradient = bucket.layer(bucket.result, slot)
        gradient = gradient if bucket.scaled else self.scaling.scale(gradient)
        return torch.view_as_complex(gradient) if parameter.is_complex() else gradient

    def end_step(self) -> None:
        """End a step after all results were taken: release them and the frozen parameters."""
        if self.sources.source:
            self.sources.end_step()
        self.scaling.end_step()
        if self.planner.arrived:  # in a step that was left out, of layers that it had not used
            self.planner.arrived.clear()
        for bucket in self.buckets:
            bucket.result = None
            if bucket.waiting:
                bucket.restore_frozen()
            if self._releases:
                bucket.release()

    def taken(self, parameter: torch.nn.Parameter) -> None:
        """Release a bucket if it is one to release and this reduced gradient was its last."""
        place = self.planner.places.get(parameter) if self._releases else None
        if place is None:
            return
        bucket, slot = place
        bucket.taken.add(slot)
        if len(bucket.taken) == len(bucket.parameters):
            bucket.result = None
            bucket.release()

    def abort(self) -> None:
        """Abort an exchange, e.g. after another rank's end."""
        interrupted, self.started = self.started, False
        self.programs.take_errors()
        self._can_discard = False
        self.sources.forget()
        if self.planner.arrived:
            self.planner.arrived.clear()
        self.scaling.end_step()
        for bucket in self.buckets:
            bucket.end(undo=interrupted)
            bucket.restore_frozen()
            bucket.abandon()
            bucket.streams.clear()
            bucket.result = None
            bucket.absent = set(range(len(bucket.parameters)))

    def forget_sums(self) -> None:
        """Forget the sums of the last exchange, which other ranks may not know."""
        self.traffic.digest()
        self.summed = 0

    # -- what was exchanged --------------------------------------------------------------------

    def commit(self) -> None:
        """Release the state from before the last exchange, which can then not be discarded."""
        self._can_discard = False
        for bucket in self.buckets:
            bucket.end(undo=False)

    def discard(self) -> bool:
        """Roll back the last exchange, bit-exactly; all ranks do the same.

        The exchange is counted as skipped, and the next one repeats its step.

        Returns:
            True if the state is that from before the exchange, also if it was rolled back already.
        """
        if self.undone:
            return True
        if not self._can_discard:
            return False
        self._can_discard = False
        for bucket in self.buckets:
            bucket.end(undo=True)
        self.steps -= 1
        self.traffic.skipped()
        return True

    def undo(self, error: Exception) -> None:
        """Roll back the exchange that has just ended, because it has failed on ranks elsewhere.

        Args:
            error: that the ranks there have found.

        Raises:
            RuntimeError: the state from before it was not kept.
        """
        if not self._can_discard:
            raise RuntimeError("an exchange that cannot be rolled back; a bug in hvd_gradcomp")
        self._can_discard = False
        for bucket in self.buckets:
            bucket.end(undo=True)
        self.steps -= 1
        self.undone = True
        self._skip(error)

    @property
    def leaves_out(self) -> bool:
        """Return True if the optimizer must skip the step that was exchanged last."""
        return self.undone and self.policy == "skip"

    def poisoned(self, what: str) -> None:
        """Handle a non-finite gradient that was summed outside the buckets, on all ranks.

        Raises:
            NonFiniteGradientError: if that is the policy; else the step counts as undone.
        """
        if not self.undoes:
            raise NonFiniteGradientError(what)
        self.undone = True

    def retrain(self) -> None:
        """Retrain compressors that learn, from the next step on."""
        self.commit()
        for bucket in self.buckets:
            bucket.state = bucket.compressor.retrained(bucket.ops, bucket.state, self.steps)

    def stats(self) -> CompressionStats:
        """Return totals since the start; synchronizes with the device."""
        parameters = [*self.parameters, *(p for _, p in self.beside)]
        return stats.stats(
            [
                stats.BucketTotals(b.layout, b.compressor, b.state, self.steps - b.since)
                for b in filter(self.leads, self.buckets)
            ],
            stats.Counters(*self.traffic.counters),
            steps=self.steps,
            order=[name for name, _, _ in self.planner.layers] + [name for name, _ in self.beside],
            beside=self.traffic.gathered,
            unplanned={name: p.numel() for name, p in self.beside},
            norm=_norm,
            gradient_norms=[_norm(p.grad) for p in parameters if p.grad is not None],
            seconds_waited=self.traffic.waited,
        )


def wait_for_copies(buckets: Collection[Bucket]) -> None:
    """Wait for pending copies from a GPU to the host."""
    for device in {bucket.flat.device for bucket in buckets}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _norm(x: torch.Tensor) -> float:
    values = x.detach().coalesce().values() if x.is_sparse else x.detach()
    dtype = torch.promote_types(values.dtype, torch.float32)  # halves overflow, doubles stay
    return float(torch.linalg.vector_norm(values, dtype=dtype))
