"""Reducer that runs the programs of a model's buckets over a transport, while gradients arrive.

A bucket's program starts when the last of its gradients has arrived, so its communication overlaps
with the backward of earlier layers. `finishing` resumes the programs until all have ended.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvd_gradcomp.core.collectives import Collective
from hvd_gradcomp.core.compressor import Context
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import hierarchy, stats
from hvd_gradcomp.runtime.collectives import CollectiveRunner, PendingCollective, Transport
from hvd_gradcomp.runtime.program_runner import ProgramRunner
from hvd_gradcomp.torch.amp import GradScalerAdapter
from hvd_gradcomp.torch.bucket import Bucket
from hvd_gradcomp.torch.moments.sources import Sources
from hvd_gradcomp.torch.parameters import as_real
from hvd_gradcomp.torch.participants import Participants

LOGGER = logging.getLogger("hvd_gradcomp")
_SENT, _RECEIVED, _SKIPPED = range(3)  # of a ledger's counters
_PRIME = 2**31 - 1


class TrafficCounter:
    """Counter of this rank's traffic.

    Attributes:
        counters: bytes sent, bytes received, steps skipped.
        gathered: values of sparse gradients gathered uncompressed, by the layer's name.
    """

    def __init__(self) -> None:
        self.counters = [0, 0, 0]
        self.gathered: dict[str, int] = {}
        self._heard: list[torch.Tensor] = []

    def sent(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was passed to a collective."""
        self.counters[_SENT] += tensor.numel() * tensor.element_size()

    def received(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a collective returned."""
        self.counters[_RECEIVED] += tensor.numel() * tensor.element_size()

    def heard(self, reply: torch.Tensor) -> None:
        """Checksum a result that must be bit-identical on all ranks."""
        if not reply.is_cuda:
            self._heard.append(_sum_of_bits(reply))

    def digest(self) -> int:
        """Return a digest of the results since the last call; 0 for none."""
        sums, self._heard = self._heard, []
        return sum(int(x) for x in sums) % _PRIME


class Reducer(Participants):
    """Buckets of one model, and their programs.

    Args:
        transport: moves tensors; its collectives return handles with `ready()`.
        process_set: the ranks that take part.
        place: position of this rank among hosts.
        prescale, postscale: see `Context`.
        nonfinite: policy for a step with a non-finite gradient.
        scaler: of the loss; None looks for one.
        rollback: keep the state from before an exchange until the next one, for `discard`.

    Attributes:
        buckets: in the order in which backward fills them.
        sources: of second moments.
        steps: exchanges so far.
        undone: the last exchange was rolled back.
        summed: a digest of the sums of the previous exchange; 0 for none.
        joined: this rank has run out of batches, and contributes only its residuals.
    """

    buckets: list[Bucket]
    sources: Sources

    def __init__(
        self,
        transport: Transport,
        *,
        process_set: Any,
        prescale: float,
        postscale: float,
        place: hierarchy.HostPosition | None = None,
        nonfinite: str | None = None,
        scaler: Any = None,
        rollback: bool = False,
    ) -> None:
        self.process_set, self.place = process_set, place
        self.rollback = rollback
        self.prescale, self.postscale = prescale, postscale
        self.nonfinite, self.scaling = nonfinite, GradScalerAdapter(scaler)
        self._policy = nonfinite or "raise"
        self.joined = False
        self.ledger = TrafficCounter()
        # A weak reference: what refers to itself would live on after its optimizer.
        self.dispatch = CollectiveRunner(transport, self.ledger, weakref.proxy(self))
        self.steps = self.summed = 0
        self.undone = False
        self._open = False  # a program of this step has started
        self._can_discard = False  # the last exchange can still be taken back
        self.errors: list[Exception] = []  # that programs of this step have ended with

    @abstractmethod
    def _explained(self, what: str) -> AbstractContextManager[None]:
        """Return a context that names the operation `what` in errors of the transport."""

    def leader(self, bucket: Bucket) -> int:
        return bucket.leader

    def adopt(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._places = {
            p: (bucket, slot) for bucket in self.buckets for slot, p in enumerate(bucket.parameters)
        }
        self.sources.places = self._places

    def bucket_of(self, parameter: torch.nn.Parameter) -> Bucket:
        """Return the bucket in which the gradient of a parameter lies."""
        return self._places[parameter][0]

    @property
    def parameters(self) -> Set[torch.nn.Parameter]:
        """Return the parameters that have a place in a bucket."""
        return self._places.keys()

    def _begin_step(self) -> None:
        """Commit the last step; fix the loss scale and the non-finite policy of this one."""
        self.commit()
        scaled = self.scaling.begin_step()
        if not self.joined:  # then other ranks scale their loss, or do not, as before
            self._policy = self.nonfinite or ("skip" if scaled else "raise")

    def _copy_to_bucket(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into its bucket; start the bucket's program if it was the last one."""
        bucket, slot = self._places[parameter]
        with torch.no_grad():
            if gradient is None:
                bucket.views[slot].zero_()
            else:
                power = 0 if bucket.scaled else 1
                self.scaling.unscale(as_real(gradient), bucket.views[slot], power)
            self.sources.give(bucket, slot)
        if bucket.flat.is_cuda:
            bucket.streams.add(torch.cuda.current_stream(bucket.flat.device))
        bucket.absent.discard(slot)
        if not bucket.absent and bucket.stack is None and bucket.result is None:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._open = True
        if bucket.streams:
            here = torch.cuda.current_stream(bucket.flat.device)
            for stream in bucket.streams - {here}:
                here.wait_stream(stream)
            bucket.streams.clear()
        context = Context(bucket.layout, *self.seat, self.steps, self.prescale, self.postscale)
        extra = {} if bucket.moment is None else {"moment": bucket.moment}
        if self._undoes or self.rollback:
            bucket.keep_before()
        how = bucket.ops, context, bucket.flat, bucket.state
        with torch.no_grad():
            if self.place is None:
                program = bucket.compressor.aggregate(*how, **extra)
            else:
                program = hierarchy.aggregate(
                    bucket.compressor, *how, place=self.place, leader=bucket.leader, **extra
                )
            bucket.stack = ProgramRunner(program)
            try:
                self._step_program(bucket, None)
            except Exception:
                bucket.abandon()
                raise

    def _step_program(self, bucket: Bucket, reply: Any) -> None:
        """Resume a bucket's program until it requests a collective or ends."""
        assert bucket.stack is not None
        bucket.ops.take_turn()
        request = bucket.stack.send(reply)
        if request is None:
            bucket.result, bucket.state = bucket.stack.result
            bucket.stack, bucket.round = None, 0
            return
        with self._explained(f"the exchange of {bucket.name} in step {self.steps}"):
            bucket.sent = self._submit(bucket, request)
        bucket.round += 1

    def _submit(self, bucket: Bucket, request: Collective) -> PendingCollective:
        return self.dispatch.submit(request, bucket.name, bucket.round)

    def _wait(self, bucket: Bucket) -> torch.Tensor:
        sent = bucket.sent
        assert sent is not None
        with self._explained(f"the exchange of {bucket.name} in step {self.steps}"):
            reply: torch.Tensor = self.dispatch.receive(sent)
        bucket.sent = None
        return reply

    def _resume(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the buckets' pending collectives, and resume their programs."""
        for bucket in buckets:
            try:
                with torch.no_grad():
                    self._step_program(bucket, self._wait(bucket))
            except Exception as error:
                self.errors.append(error)
                bucket.abandon()

    def poll(self) -> bool:
        """Resume the programs whose collective has completed; return True if there were any."""
        running = [bucket for bucket in self.buckets if bucket.stack is not None]
        ready = [bucket for bucket in running if bucket.sent and bucket.sent.pending.ready()]
        self._resume(ready)
        return bool(ready)

    def finishing(self) -> Iterator[None]:
        """Run every started program to its end; yield while all wait for other ranks.

        Raises:
            PayloadError: and the like, from a program; after all other programs have ended, so
                that no rank waits for this one.
        """
        while any(bucket.stack is not None for bucket in self.buckets):
            if not self.poll():
                yield
        if self._open:
            self._end_step()

    def _end_step(self) -> None:
        """Commit or roll back the step, after all programs have ended."""
        self._open, errors, self.errors = False, self.errors, []
        if self._undoes:
            for ops in {id(bucket.ops): bucket.ops for bucket in self.buckets}.values():
                try:
                    ops.raise_found()
                except NonFiniteGradientError as error:
                    errors.append(error)
        for bucket in self.buckets:
            bucket.absent = set(range(len(bucket.parameters)))
            if errors or not self.rollback:
                bucket.end(undo=bool(errors) and self._undoes)
        others = [e for e in errors if not isinstance(e, NonFiniteGradientError)]
        self.undone = bool(errors) and not others and self._undoes
        self.summed = self.ledger.digest()
        if self.undone:
            self._skip(errors[0])
            return
        self.steps += 1
        self._can_discard = self.rollback and not errors
        if errors:
            for bucket in self.buckets:
                bucket.result = None
            raise (others or errors)[0]

    @property
    def _undoes(self) -> bool:
        """Return True if a step with a non-finite gradient is rolled back."""
        return self._policy != "raise"

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
        self.ledger.counters[_SKIPPED] += 1
        return True

    @property
    def leaves_out(self) -> bool:
        """Return True if the optimizer must skip the step that was exchanged last."""
        return self.undone and self._policy == "skip"

    def poisoned(self, what: str) -> None:
        """Handle a non-finite gradient that was summed outside the buckets, on all ranks.

        Raises:
            NonFiniteGradientError: if that is the policy; else the step counts as undone.
        """
        if not self._undoes:
            raise NonFiniteGradientError(what)
        self.undone = True

    def _skip(self, error: Exception) -> None:
        """Return NaN gradients on all ranks, which a loss scaler or `step` will see."""
        counters = self.ledger.counters
        counters[_SKIPPED] += 1
        expected = self.scaling.scaler is not None or counters[_SKIPPED] > 1
        LOGGER.log(
            logging.DEBUG if expected else logging.WARNING,
            "step left out (%d so far): %s",
            counters[_SKIPPED],
            error,
        )
        for bucket in self.buckets:
            bucket.result = bucket.flat.zero_()  # what lies between the layers has to stay 0
            for view in bucket.views:
                view.fill_(float("nan"))

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the reduced gradient of a parameter, in its shape and its bucket's precision."""
        bucket, slot = self._places[parameter]
        if bucket.result is None:
            raise RuntimeError("a gradient without an exchange; this is a bug in hvd_gradcomp")
        gradient = bucket.layer(bucket.result, slot)
        gradient = gradient if bucket.scaled else self.scaling.scale(gradient)
        return torch.view_as_complex(gradient) if parameter.is_complex() else gradient


def stats_of(exchange: Reducer, order: Sequence[str]) -> CompressionStats:
    """Return totals since the start; synchronizes with the device.

    Args:
        exchange: the reducer.
        order: names of layers, in the model's order.
    """
    return stats.stats(
        [
            stats.BucketTotals(b.layout, b.compressor, b.state, exchange.steps - b.since)
            for b in filter(exchange.leads, exchange.buckets)
        ],
        stats.Counters(*exchange.ledger.counters),
        steps=exchange.steps,
        order=order,
        beside=exchange.ledger.gathered,
        unplanned={},
        norm=_norm,
        gradient_norms=[_norm(p.grad) for p in exchange.parameters if p.grad is not None],
    )


def synchronized(exchange: Reducer) -> None:
    """Wait for pending copies from a GPU to the host."""
    for device in {bucket.flat.device for bucket in exchange.buckets}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def retrain(exchange: Reducer) -> None:
    """Retrain compressors that learn, from the next step on."""
    exchange.commit()
    for bucket in exchange.buckets:
        bucket.state = bucket.compressor.retrained(bucket.ops, bucket.state, exchange.steps)


def _sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum that any flipped bit changes."""
    data = x.detach().reshape(-1).view(torch.uint8)
    whole = data.shape[0] // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


def _norm(x: torch.Tensor) -> float:
    values = x.detach().coalesce().values() if x.is_sparse else x.detach()
    dtype = torch.promote_types(values.dtype, torch.float32)  # halves overflow, doubles stay
    return float(torch.linalg.vector_norm(values, dtype=dtype))
