"""Reducer of a model's gradients: buckets fill as gradients arrive, and are reduced by programs.

A bucket's program starts when the last of its gradients has arrived, so its communication overlaps
with the backward of earlier layers; `BucketPrograms` runs them. Horovod's
optimizer and the hook of `DistributedDataParallel` say when gradients are there, and where the
reduced ones go; what else differs between the two is in their `Backend`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from typing import Any

import torch

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.method.compressor import Context, leaves
from hvd_gradcomp.method.learned import retrained
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import errors, hierarchy, stats
from hvd_gradcomp.runtime.program_runner import (
    CollectiveRunner,
    Participants,
    PendingCollective,
    ProgramRunner,
)
from hvd_gradcomp.torch.interop.amp import GradScalerAdapter
from hvd_gradcomp.torch.reduce.backend import Backend
from hvd_gradcomp.torch.reduce.bucket import Bucket, Named, as_complex, as_real
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner
from hvd_gradcomp.torch.reduce.memory import memory_of
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.sources import Sources

LOGGER = logging.getLogger("hvd_gradcomp")
_PRIME = 2**31 - 1
_FOREACH_COPY: Any = getattr(torch, "_foreach_copy_", None)  # since PyTorch 2.1 or so


class TrafficCounter:
    """Counter of this rank's traffic.

    Args:
        checks_sums: checksum results that must be bit-identical, for `digest`.

    Attributes:
        counts: bytes, and steps skipped.
        gathered: values of sparse gradients gathered uncompressed, by the layer's name.
        waited: seconds in which steps stood still for exchanges.
    """

    def __init__(self, checks_sums: bool = False) -> None:
        self._checks_sums = checks_sums
        self.counts = stats.TrafficCounts()
        self.gathered: dict[str, int] = {}
        self.waited = 0.0
        self._checksums: list[torch.Tensor] = []

    def sent(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was passed to a collective."""
        self.counts.bytes_sent += tensor.numel() * tensor.element_size()

    def received(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a collective returned."""
        self.counts.bytes_received += tensor.numel() * tensor.element_size()

    def skipped(self) -> int:
        """Count a skipped step; return the number of them."""
        self.counts.skipped += 1
        return self.counts.skipped

    def record_checksum(self, reply: torch.Tensor) -> None:
        """Checksum a result that must be bit-identical on all ranks, if these are compared."""
        if self._checks_sums and not reply.is_cuda:
            self._checksums.append(sum_of_bits(reply))

    def digest(self) -> int:
        """Return a digest of the results since the last call; 0 for none."""
        sums, self._checksums = self._checksums, []
        return sum(int(x) for x in sums) % _PRIME

    @property
    def totals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return copies of the counts and of `gathered`, for checkpoints and rollback."""
        return asdict(self.counts), dict(self.gathered)

    @totals.setter
    def totals(self, totals: tuple[dict[str, int], dict[str, int]]) -> None:
        counts, gathered = totals
        self.counts, self.gathered = stats.TrafficCounts(**counts), dict(gathered)


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum that any flipped bit changes."""
    data = x.detach().reshape(-1).view(torch.uint8)
    whole = data.shape[0] // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


class BucketPrograms:
    """Running programs of a reducer, one for each bucket that was launched.

    Args:
        planner: has the buckets.
        transport: moves tensors.
        participants: the ranks.
        traffic: counts bytes, and the seconds in which the step stands still.
        in_order: launch programs in the order of the buckets; see `Reducer`.

    Attributes:
        errors: with which programs of this step have ended.
    """

    def __init__(
        self,
        planner: BucketPlanner,
        transport: Backend,
        participants: Participants,
        traffic: TrafficCounter,
        *,
        in_order: bool,
    ) -> None:
        self._planner, self._transport, self._participants = planner, transport, participants
        self._traffic, self._in_order, self._step = traffic, in_order, 0
        self._collectives = CollectiveRunner(transport, traffic, participants)
        self._agree: Callable[[], object] | None = None
        self.errors: list[Exception] = []

    @property
    def running(self) -> list[Bucket]:
        """Return the buckets whose program has started and not ended."""
        return [bucket for bucket in self._planner.buckets if bucket.runner is not None]

    def pop_errors(self) -> list[Exception]:
        """Return the errors of this step, and clear them."""
        errors, self.errors = self.errors, []
        return errors

    def begin_step(self, agree: Callable[[], object] | None) -> None:
        """Begin a step, with what is to be called before its first collective; None for nothing."""
        self._agree = agree

    def agree(self) -> None:
        """Call what precedes the first collective of the step, unless it was called already."""
        agree, self._agree = self._agree, None
        if agree is not None:
            agree()

    def ready(self, filled: Bucket) -> Iterator[Bucket]:
        """Yield buckets whose program can start, now that a gradient of `filled` has arrived."""
        for bucket in self._planner.buckets if self._in_order else (filled,):
            started = bucket.runner is not None or bucket.result is not None
            if started or len(bucket.frozen_slots) == len(bucket.parameters):
                continue
            if bucket.absent:
                return
            yield bucket

    def launch(self, bucket: Bucket, context: Context) -> None:
        """Start the program of a bucket that has all of its gradients.

        Raises:
            Exception: of the program.
        """
        place, self._step = self._participants.place, context.step
        extra = {} if bucket.moment is None else {"moment": bucket.moment}
        how = bucket.ops, context, bucket.flat, bucket.state
        with torch.no_grad():
            if place is None:
                program = bucket.compressor.aggregate(*how, **extra)
            else:
                program = hierarchy.aggregate(
                    bucket.compressor,
                    *how,
                    place=place,
                    leader=bucket.leader,
                    shares_errors=not self._transport.hangs_up,
                    **extra,
                )
            bucket.runner = ProgramRunner(program)
            try:
                self._step_program(bucket, None)
            except Exception:
                bucket.abort()
                raise

    def _step_program(self, bucket: Bucket, reply: Any, in_order: bool = False) -> None:
        """Resume a bucket's program until it requests a collective or ends; see `resume`."""
        assert bucket.runner is not None
        bucket.ops.take_turn()
        request = bucket.runner.send(reply)
        if request is None:
            bucket.set_result(*bucket.runner.result)
            return
        if in_order and isinstance(request, Inside) and hierarchy.is_result(request):
            bucket.outcome = request
            return
        self._send(bucket, request)

    def _send(self, bucket: Bucket, request: Collective) -> None:
        self.agree()
        try:
            bucket.sent = self._submit(bucket, request)
        except self._transport.failure as error:
            raise self._explained(bucket, error) from error
        bucket.round += 1

    def _submit(self, bucket: Bucket, request: Collective) -> PendingCollective:
        return self._collectives.submit(request, bucket.name, bucket.round)

    def _wait(self, bucket: Bucket) -> torch.Tensor:
        assert bucket.sent is not None
        begin = time.perf_counter()
        try:
            reply: torch.Tensor = self._collectives.receive(bucket.sent)
        except self._transport.failure as error:
            raise self._explained(bucket, error) from error
        self._traffic.waited += time.perf_counter() - begin
        bucket.sent = None
        return reply

    def _explained(self, bucket: Bucket, error: Exception) -> Exception:
        what = f"the exchange of {bucket.name} in step {self._step}"
        return self._transport.failure(errors.explain(what, str(error), self._transport.library))

    def resume(self, buckets: Sequence[Bucket], *, in_order: bool = False) -> None:
        """Wait for the buckets' pending collectives, and resume their programs.

        Args:
            buckets: those whose collective is pending.
            in_order: leave results that leaders share with their hosts to `wait_all`.
        """
        for bucket in buckets:
            try:
                with torch.no_grad():
                    self._step_program(bucket, self._wait(bucket), in_order)
            except Exception as error:
                self.errors.append(error)
                bucket.abort()

    def resume_led(self) -> None:
        """Begin the exchange between hosts of buckets whose sum in the host was requested earlier.

        So it overlaps with backward where collectives are matched by order. Called at the same
        places on all ranks; without hosts it does nothing.

        Raises:
            Exception: of a program; see `wait_all`.
        """
        place = self._participants.place
        if place is None or place.slots == 1:
            return
        for bucket in self.running:
            if self._participants.leads(bucket.leader) and bucket.round == 1:
                self._resume_in_order(bucket)

    def resume_earlier(self, earlier: Sequence[Bucket]) -> None:
        """Resume programs that started earlier and have more rounds to come.

        So those overlap with backward too where collectives are matched by order. How many rounds a
        program has is known from the exchange before. Called at the same places on all ranks, after
        the next program has started: the link is busy with its first round meanwhile.

        Args:
            earlier: buckets whose programs run.

        Raises:
            Exception: of a program; see `wait_all`.
        """
        if self._participants.place is not None:
            return
        for bucket in earlier:
            if bucket.runner is not None and bucket.round < bucket.rounds:
                self._resume_in_order(bucket)

    def wait_all(self) -> None:
        """Run all programs to their ends, bucket by bucket, in the same order on all ranks.

        Results go from leaders to their hosts last: in a host each rank leads other buckets, so
        ranks would share them in different orders, or wait for each other's.

        Raises:
            Exception: of a program, at once: what this rank does not ask for, the others must not
                wait for. A NonFiniteGradientError, which all ranks have, is left to `errors`.
        """
        while due := [bucket for bucket in self.running if bucket.outcome is None]:
            for bucket in due:
                self._resume_in_order(bucket)
        for bucket in self.running:
            outcome, bucket.outcome = bucket.outcome, None
            assert outcome is not None
            self._send(bucket, outcome)
        for bucket in self.running:
            self._resume_in_order(bucket)

    def _resume_in_order(self, bucket: Bucket) -> None:
        self.resume([bucket], in_order=True)
        if self.errors and not isinstance(self.errors[-1], NonFiniteGradientError):
            raise self.errors[-1]

    def poll(self) -> bool:
        """Resume the programs whose collective has completed; return True if there were any."""
        ready = [b for b in self.running if b.sent and b.sent.pending.ready()]
        self.resume(ready)
        return bool(ready)

    def poll_all(self) -> Iterator[None]:
        """Run all programs to their ends, in any order; yield while all wait for other ranks."""
        while self.running:
            if not self.poll():
                begin = time.perf_counter()
                yield
                self._traffic.waited += time.perf_counter() - begin


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
        releases: buckets have memory from the first gradient of a step to its end alone; see
            `finish_step`. Reduced gradients must be copied by then.
        checks_sums: compute `checksum`, for those who compare it.

    Attributes:
        programs: of the buckets.
        traffic: of this rank.
        scaling: of the loss.
        sources: of second moments.
        steps: exchanges so far.
        rolled_back: the last exchange was rolled back.
        checksum: a digest of the sums of the previous exchange; 0 for none.
        joined: this rank has run out of batches, and contributes only its residuals.
        started: a program of this step has started, and the exchange has not ended.
        keeps_snapshots: an exchange can be rolled back until the next one begins.
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
        checks_sums: bool = False,
    ) -> None:
        transport.check(planner.named_parameters)
        self.planner, self.transport, self.participants = planner, transport, participants
        self.keeps_snapshots, self._nonfinite = options.rollback, options.nonfinite
        self.prescale, self.postscale = prescale, postscale
        self.beside, self._releases = list(beside), releases
        self.scaling, self.traffic = GradScalerAdapter(options.scaler), TrafficCounter(checks_sums)
        self.sources = Sources(planner.source, planner.places, options.batch_size, self.scaling)
        self.sources.watch(planner.buckets)
        self.programs = BucketPrograms(
            planner, transport, participants, self.traffic, in_order=in_order
        )
        self.policy = options.nonfinite or "raise"
        self.joined = self.rolled_back = False
        self.steps = self.checksum = 0
        self.started = False
        self._has_snapshot = False  # the last exchange can still be rolled back
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

    def begin_step(self, agree: Callable[[], object] | None = None) -> None:
        """Commit the last step; fix the loss scale and the non-finite policy of this one.

        Args:
            agree: called once before anything is sent, while the first bucket is compressed
                already; an error ends the step.
        """
        self.commit()
        self.programs.begin_step(agree)
        scaled = self.scaling.begin_step()
        if not self.joined:  # then other ranks scale their loss, or do not, as before
            self.policy = self._nonfinite or ("skip" if scaled else "raise")
        for bucket in self.buckets:
            bucket.refresh()

    @property
    def can_abort(self) -> bool:
        """Return True if `abort` restores all states, whatever programs have done in this step."""
        keeps = self.keeps_snapshots or self.rolls_back_nonfinite
        return keeps or not any(True for bucket in self.buckets for _ in leaves(bucket.state))

    @property
    def rolls_back_nonfinite(self) -> bool:
        """Return True if a step with a non-finite gradient is rolled back."""
        return self.policy != "raise"

    def adopt_policy(self, rolls_back: bool) -> None:
        """Adopt the policy for non-finite gradients of the ranks that still have batches."""
        if self._nonfinite is None:
            self.policy = "skip" if rolls_back else "raise"

    def memory_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the memory of a gradient in its bucket, real and [..., 2] if it is complex.

        Who writes a gradient there passes this memory to `mark_ready`, which does not copy then.
        """
        bucket, slot = self.planner.places[parameter]
        if self._releases:
            bucket.allocate()
        return bucket.views[slot]

    def mark_ready(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, weight: float = 1.0
    ) -> None:
        """Copy a gradient into its bucket; start the bucket's program if it was the last one.

        Args:
            parameter: has the gradient.
            gradient: dense, of the parameter's shape or one number; None stands for zero. May be
                what `memory_of` has returned in this step.
            weight: factor of the gradient, applied in the bucket's precision.
        """
        bucket, slot = self.planner.places[parameter]
        if self._releases:
            bucket.allocate()
        with torch.no_grad():
            if gradient is None:
                bucket.views[slot].zero_()
            elif gradient is not bucket.views[slot] or self.scaling.is_active or weight != 1.0:
                power = 0 if bucket.scaled else 1
                self.scaling.unscale(as_real(gradient), bucket.views[slot], power)
                if weight != 1.0:
                    bucket.views[slot].mul_(weight)
            if bucket.moment_views:
                self.sources.fill_bucket(bucket, slot)
        self._mark_arrived(bucket, slot)

    def mark_all_ready(
        self, gradients: Sequence[tuple[torch.nn.Parameter, torch.Tensor]], weight: float = 1.0
    ) -> None:
        """Copy gradients into their buckets, all in one call of PyTorch where it has one.

        As `mark_ready` of each, whose programs start in the same order.
        """
        places = [self.planner.places[p] for p, _ in gradients]
        plain = not self._releases and not any(bucket.moment_views for bucket, _ in places)
        if not plain or self.scaling.is_active:
            for p, gradient in gradients:
                self.mark_ready(p, gradient, weight)
            return
        with torch.no_grad():
            views = [bucket.views[slot] for bucket, slot in places]
            copy_all(views, [as_real(gradient) for _, gradient in gradients])
            if weight != 1.0 and views:  # a rank may have no shard of a unit
                torch._foreach_mul_(views, weight)
        for bucket, slot in places:
            self._mark_arrived(bucket, slot)

    def _mark_arrived(self, bucket: Bucket, slot: int) -> None:
        """Record that a gradient is in its bucket; start the program if it was the last one."""
        if bucket.flat.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(bucket.flat.device))
        bucket.absent.discard(slot)
        for ready in () if bucket.absent else self.programs.ready(bucket):
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
        if self.rolls_back_nonfinite or self.keeps_snapshots:
            bucket.snapshot()
        self.programs.launch(bucket, context)

    def commit_or_roll_back(self) -> None:
        """Commit or roll back the exchange, after all programs have ended.

        Raises:
            PayloadError: and the like, from a program. No rank waits for this one any more.
        """
        self.started, errors = False, self.programs.pop_errors()
        if self.rolls_back_nonfinite:
            for ops in {id(bucket.ops): bucket.ops for bucket in self.buckets}.values():
                try:
                    ops.raise_found()
                except NonFiniteGradientError as error:
                    errors.append(error)
        for bucket in self.buckets:
            bucket.absent = set(range(len(bucket.parameters)))
            if errors and self.rolls_back_nonfinite:
                bucket.rollback()
            elif errors or not self.keeps_snapshots:
                bucket.commit()
        others = [e for e in errors if not isinstance(e, NonFiniteGradientError)]
        self.rolled_back = bool(errors) and not others and self.rolls_back_nonfinite
        self.checksum = self.traffic.digest()
        if self.rolled_back:
            self._skip(errors[0])
            return
        self.steps += 1
        self._has_snapshot = self.keeps_snapshots and not errors
        if errors:
            for bucket in self.buckets:
                bucket.result = None
            raise (others or errors)[0]

    def commit_or_roll_back_among(
        self, nonfinite_ranks: Callable[[bool], list[int]] | None
    ) -> None:
        """Commit or roll back alike on all ranks of a model, of which others have other shards.

        Args:
            nonfinite_ranks: takes True if a value here is not finite, and returns the ranks of all
                shards on which one is not; None if all ranks are in this exchange.

        Raises:
            NonFiniteGradientError: on all ranks, if a value of any shard is not finite, and that
                is the policy.
            Exception: as `commit_or_roll_back`.
        """
        if nonfinite_ranks is None:
            self.commit_or_roll_back()
            return
        failure: NonFiniteGradientError | None = None
        try:
            self.commit_or_roll_back()
        except NonFiniteGradientError as error:
            ranks = ", ".join(map(str, self.participants.process_set.ranks))
            failure = NonFiniteGradientError(
                f"{error}. Its numbers of ranks are places among the replicas of this shard, which "
                f"are ranks {ranks}"
            )
        nonfinite = self.rolled_back or failure is not None
        elsewhere = nonfinite_ranks(nonfinite)
        if elsewhere and not nonfinite:
            listed = ", ".join(map(str, elsewhere))
            failure = NonFiniteGradientError(
                f"the shard of rank {listed} has a NaN or an infinity in its gradient"
            )
            if self.rolls_back_nonfinite:
                self._rollback_nonfinite(failure)
                failure = None
        if failure is not None:
            raise failure

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
        return as_complex(gradient) if parameter.is_complex() else gradient

    def copy_out(self, gradients: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Copy reduced gradients into other tensors, in one call of PyTorch where it has one."""
        if self._releases or self.scaling.is_active:
            for p, gradient in gradients:
                gradient.copy_(self.reduced_grad(p))
                self.mark_copied(p)
            return
        places = [self.planner.places[p] for p, _ in gradients]
        views = _result_views(bucket for bucket, _ in places)
        with torch.no_grad():
            copy_all(
                [as_real(gradient) for _, gradient in gradients],
                [views[id(bucket)][slot] for bucket, slot in places],
            )

    def reduced(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Return `reduced_grad` of each parameter; views, which the next step may overwrite."""
        places = [self.planner.places[p] for p in parameters]
        if self.scaling.is_active or any(p.is_complex() for p in parameters):
            return [self.reduced_grad(p) for p in parameters]
        views = _result_views(bucket for bucket, _ in places)
        return [views[id(bucket)][slot].detach() for bucket, slot in places]

    def finish_step(self, keeps_memory: bool = False) -> None:
        """End a step after all results were copied out: release them and the frozen parameters.

        Args:
            keeps_memory: results are still read, until `release`.
        """
        if self.sources.source:
            self.sources.end_step()
        self.scaling.end_step()
        if self.planner.arrived:  # in a step that was left out, of layers that it had not used
            self.planner.arrived.clear()
        for bucket in self.buckets:
            bucket.result = None
            if bucket.frozen_state:
                bucket.restore_frozen()
        if not keeps_memory:
            self.release()

    def release(self) -> None:
        """Release the memory of buckets until the next step, if it is to be released."""
        for bucket in self.buckets if self._releases else ():
            bucket.release()

    def release_spare(self) -> None:
        """Release the memory that is kept for the states of later steps."""
        for bucket in self.buckets:
            bucket.ops.release_spare()

    def mark_copied(self, parameter: torch.nn.Parameter) -> None:
        """Release a bucket if it is one to release and this reduced gradient was its last one."""
        place = self.planner.places.get(parameter) if self._releases else None
        if place is None:
            return
        bucket, slot = place
        bucket.copied.add(slot)
        if len(bucket.copied) == len(bucket.parameters):
            bucket.result = None
            bucket.release()

    def abort(self) -> None:
        """Abort an exchange, e.g. after another rank's end."""
        interrupted, self.started = self.started, False
        self.programs.pop_errors()
        self._has_snapshot = False
        self.sources.clear()
        if self.planner.arrived:
            self.planner.arrived.clear()
        self.scaling.end_step()
        for bucket in self.buckets:
            if interrupted:
                bucket.rollback()
            else:
                bucket.commit()
            bucket.restore_frozen()
            bucket.abort()
            bucket.streams.clear()
            bucket.result = None
            bucket.absent = set(range(len(bucket.parameters)))

    def clear_checksum(self) -> None:
        """Clear the checksum of the last exchange, whose sums other ranks may not know."""
        self.traffic.digest()
        self.checksum = 0

    # -- what was exchanged --------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the last exchange, which can then not be rolled back any more."""
        self._has_snapshot = False
        for bucket in self.buckets:
            bucket.commit()

    def rollback(self) -> bool:
        """Roll back the last exchange, bit-exactly; all ranks do the same.

        The exchange is counted as skipped, and the next one repeats its step.

        Returns:
            True if the state is that from before the exchange, also if it was rolled back already.
        """
        if self.rolled_back:
            return True
        if not self._has_snapshot:
            return False
        self._restore_snapshot()
        self.traffic.skipped()
        return True

    def _rollback_nonfinite(self, error: Exception) -> None:
        """Roll back the exchange that has just ended, because of a gradient of another shard.

        Args:
            error: describes that gradient.

        Raises:
            RuntimeError: the state from before it was not kept.
        """
        if not self._has_snapshot:
            raise RuntimeError("an exchange that cannot be rolled back; a bug in hvd_gradcomp")
        self._restore_snapshot()
        self.rolled_back = True
        self._skip(error)

    def _restore_snapshot(self) -> None:
        self._has_snapshot = False
        for bucket in self.buckets:
            bucket.rollback()
        self.steps -= 1

    @property
    def skips_step(self) -> bool:
        """Return True if the optimizer must skip the step that was exchanged last."""
        return self.rolled_back and self.policy == "skip"

    def record_nonfinite(self, what: str) -> None:
        """Handle a non-finite gradient that was summed outside the buckets, on all ranks.

        Raises:
            NonFiniteGradientError: if that is the policy; otherwise the step counts as rolled back.
        """
        if not self.rolls_back_nonfinite:
            raise NonFiniteGradientError(what)
        self.rolled_back = True

    def retrain(self) -> None:
        """Retrain compressors that learn, from the next step on."""
        self.commit()
        for bucket in self.buckets:
            bucket.state = retrained(bucket.compressor, bucket.ops, bucket.state, self.steps)

    def stats(self) -> CompressionStats:
        """Return totals since the start; synchronizes with the device."""
        parameters = [*self.parameters, *(p for _, p in self.beside)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        return stats.stats(
            [
                stats.BucketTotals(b.layout, b.compressor, b.state, self.steps - b.since)
                for b in filter(self.leads, self.buckets)
            ],
            self.traffic.counts,
            steps=self.steps,
            order=[name for name, _, _ in self.planner.layers] + [name for name, _ in self.beside],
            beside=self.traffic.gathered,
            unplanned={name: p.numel() for name, p in self.beside},
            norm=_norm,
            gradient_norms=map(_norm, gradients),
            memory=memory_of(self.buckets, gradients),
            seconds_waited=self.traffic.waited,
        )


def _result_views(buckets: Iterable[Bucket]) -> dict[int, list[torch.Tensor]]:
    """Return the views of each bucket's result, by its `id`."""
    views: dict[int, list[torch.Tensor]] = {}
    for bucket in buckets:
        if id(bucket) not in views:
            views[id(bucket)] = bucket.result_views()
    return views


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target; in one call where PyTorch has one."""
    if not targets:
        return
    if _FOREACH_COPY is not None:
        _FOREACH_COPY(targets, sources)
        return
    for target, source in zip(targets, sources):
        target.copy_(source)


def wait_for_copies(buckets: Collection[Bucket]) -> None:
    """Wait for pending copies from a GPU to the host."""
    for device in {bucket.flat.device for bucket in buckets}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _norm(x: torch.Tensor) -> float:
    values = x.detach().coalesce().values() if x.is_sparse else x.detach()
    dtype = torch.promote_types(values.dtype, torch.float32)  # halves overflow, doubles stay
    return float(torch.linalg.vector_norm(values, dtype=dtype))
