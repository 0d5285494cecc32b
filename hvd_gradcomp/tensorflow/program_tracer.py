"""Tracing of programs: their collectives become part of the graph that is built."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.core.collectives import Gather, Switch
from hvd_gradcomp.core.compressor import Program
from hvd_gradcomp.ops.tensorflow import TensorFlowOps
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.collectives import CollectiveRunner
from hvd_gradcomp.runtime.participants import Participants
from hvd_gradcomp.runtime.program_runner import ProgramRunner, known, run
from hvd_gradcomp.tensorflow import comm
from hvd_gradcomp.tensorflow.counters import ExchangeCounters


class ProgramTracer:
    """Runner of programs to their ends, round by round.

    Args:
        counters: of what they send.
        participants: the ranks.
        ops: the tensor operations, which collect whether gradients were finite.
    """

    def __init__(
        self, counters: ExchangeCounters, participants: Participants, ops: TensorFlowOps
    ) -> None:
        self._runner = CollectiveRunner(comm.HorovodBackend(), counters, participants)
        self._counters, self._ops = counters, ops

    def finish(
        self, programs: Sequence[ProgramRunner], requests: list[Any], names: Sequence[str]
    ) -> None:
        """Run all programs from their first requests to their ends.

        Args:
            programs: of the buckets.
            requests: the first ones; None of a program that has ended.
            names: of the buckets.
        """
        rounds = 0
        while any(request is not None for request in requests):
            due = [request for request in requests if request is not None]
            # In an eager run, results from other leaders come last.
            due = [request for request in due if not hierarchy.is_result(request)] or due
            replies = [
                self.perform(request, name, rounds) if any(request is d for d in due) else None
                for name, request in zip(names, requests)
            ]
            for bucket, reply in enumerate(replies):
                if reply is not None:
                    requests[bucket] = programs[bucket].send(reply)
            rounds += 1

    def perform(
        self, request: Any, name: str, path: Any, taken: Any = None, among: Any = None
    ) -> Any:
        """Perform a collective, or run the branches of a `Switch`; return its reply.

        Args:
            request: what a program yields.
            name: of the bucket.
            path: the round.
            taken: true if the branch that requests it is the one that runs.
            among: the process set, if it is another than the request is for.
        """
        if isinstance(request, Switch):
            index = request.index
            branches = [
                lambda branch=branch, i=i: self._branch(
                    branch(), name, f"{path}.{i}", tf.equal(index, i)
                )
                for i, branch in enumerate(request.branches)
            ]
            reply, finite, summed = tf.switch_case(tf.cast(index, tf.int32), branches)
            if self._ops.verdicts is not None:
                self._ops.verdicts.append(finite)
            self._counters.checksums.append(summed)
            return reply
        if taken is not None:
            request = comm.requested_in_branch(request, taken)
        sent = self._runner.submit(request, name, path, among)
        reply = self._runner.receive(sent)
        if isinstance(request, Gather):  # counted before its shape is known, see `comm`
            here = sent.group.rank()
            reply = tf.reshape(reply, (sum(request.lengths) if request.root == here else 0,))
        return reply

    def _branch(self, program: Program, name: str, path: str, taken: tf.Tensor) -> Any:
        """Run a branch to its end; return its result, finiteness and checksum."""
        rounds = itertools.count()
        ops, counters = self._ops, self._counters
        outside, checksums = ops.verdicts, counters.checksums
        ops.verdicts = None if outside is None else []
        counters.checksums = [tf.constant(0, tf.int64)]
        try:
            result = run(
                program, lambda r: self.perform(r, name, f"{path}.{next(rounds)}", taken), known
            )
            return result, self.verdict(), tf.add_n(counters.checksums)
        finally:
            ops.verdicts, counters.checksums = outside, checksums

    def verdict(self) -> tf.Tensor:
        """Return True if all gradients so far were finite, unless that has raised already."""
        verdicts, self._ops.verdicts = self._ops.verdicts, None
        return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)
