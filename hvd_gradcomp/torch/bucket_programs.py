"""Programs of a reducer's buckets, from their start to their end.

A transport that matches collectives by name runs them as replies come (`finish`). One that matches
by order resumes them at the same places on all ranks (`resume_led`, `resume_earlier`, `drive`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.core.compressor import Context
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import errors, hierarchy
from hvd_gradcomp.runtime.program_runner import (
    CollectiveRunner,
    Participants,
    PendingCollective,
    ProgramRunner,
)
from hvd_gradcomp.torch.bucket import Bucket
from hvd_gradcomp.torch.bucketing import BucketPlanner
from hvd_gradcomp.torch.comm.backend import Backend

_SENT, _RECEIVED, _SKIPPED = range(3)  # of the counters
_PRIME = 2**31 - 1


class TrafficCounter:
    """Counter of this rank's traffic.

    Attributes:
        counters: bytes sent, bytes received, steps skipped.
        gathered: values of sparse gradients gathered uncompressed, by the layer's name.
        waited: seconds in which steps stood still for exchanges.
    """

    def __init__(self) -> None:
        self.counters = [0, 0, 0]
        self.gathered: dict[str, int] = {}
        self.waited = 0.0
        self._heard: list[torch.Tensor] = []

    def sent(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was passed to a collective."""
        self.counters[_SENT] += tensor.numel() * tensor.element_size()

    def received(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a collective returned."""
        self.counters[_RECEIVED] += tensor.numel() * tensor.element_size()

    def skipped(self) -> int:
        """Count a skipped step; return the number of them."""
        self.counters[_SKIPPED] += 1
        return self.counters[_SKIPPED]

    def heard(self, reply: torch.Tensor) -> None:
        """Checksum a result that must be bit-identical on all ranks."""
        if not reply.is_cuda:
            self._heard.append(sum_of_bits(reply))

    def digest(self) -> int:
        """Return a digest of the results since the last call; 0 for none."""
        sums, self._heard = self._heard, []
        return sum(int(x) for x in sums) % _PRIME

    @property
    def totals(self) -> tuple[list[int], dict[str, int]]:
        """Return copies of what is counted, for checkpoints and rollback."""
        return list(self.counters), dict(self.gathered)

    @totals.setter
    def totals(self, totals: tuple[list[int], dict[str, int]]) -> None:
        counters, gathered = totals
        self.counters, self.gathered = list(counters), dict(gathered)


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
        self.errors: list[Exception] = []

    @property
    def running(self) -> list[Bucket]:
        """Return the buckets whose program has started and not ended."""
        return [bucket for bucket in self._planner.buckets if bucket.runner is not None]

    def take_errors(self) -> list[Exception]:
        """Return the errors of this step, and forget them."""
        found, self.errors = self.errors, []
        return found

    def ready(self, filled: Bucket) -> Iterator[Bucket]:
        """Yield buckets whose program can start, now that a gradient of `filled` has arrived."""
        for bucket in self._planner.buckets if self._in_order else (filled,):
            started = bucket.runner is not None or bucket.result is not None
            if started or len(bucket.held) == len(bucket.parameters):
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
                bucket.abandon()
                raise

    def _step_program(self, bucket: Bucket, reply: Any, in_order: bool = False) -> None:
        """Resume a bucket's program until it requests a collective or ends; see `resume`."""
        assert bucket.runner is not None
        bucket.ops.take_turn()
        request = bucket.runner.send(reply)
        if request is None:
            bucket.finish(*bucket.runner.result)
            return
        if in_order and isinstance(request, Inside) and hierarchy.is_result(request):
            bucket.outcome = request
            return
        self._send(bucket, request)

    def _send(self, bucket: Bucket, request: Collective) -> None:
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
            in_order: leave results that leaders share with their hosts to `drive`.
        """
        for bucket in buckets:
            try:
                with torch.no_grad():
                    self._step_program(bucket, self._wait(bucket), in_order)
            except Exception as error:
                self.errors.append(error)
                bucket.abandon()

    def resume_led(self) -> None:
        """Begin the exchange between hosts of buckets whose sum in the host was requested earlier.

        So it overlaps with backward where collectives are matched by order. Called at the same
        places on all ranks; without hosts it does nothing.

        Raises:
            Exception: of a program; see `drive`.
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
            Exception: of a program; see `drive`.
        """
        if self._participants.place is not None:
            return
        for bucket in earlier:
            if bucket.runner is not None and bucket.round < bucket.rounds:
                self._resume_in_order(bucket)

    def drive(self) -> None:
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

    def finish(self) -> Iterator[None]:
        """Run every program to its end; yield while all wait for other ranks."""
        while self.running:
            if not self.poll():
                begin = time.perf_counter()
                yield
                self._traffic.waited += time.perf_counter() - begin


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum that any flipped bit changes."""
    data = x.detach().reshape(-1).view(torch.uint8)
    whole = data.shape[0] // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()
