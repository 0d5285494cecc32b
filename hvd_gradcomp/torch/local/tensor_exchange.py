"""Exchange of a list of tensors at a place of the program that all ranks reach.

What is exchanged is complete when it begins, so there is nothing of what gradients need that arrive
one by one (`grad_synchronizer`): the ranks say which exchange it is, all programs start, and later
all are run to their ends, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import config_check, errors
from hvd_gradcomp.runtime.config_check import Description
from hvd_gradcomp.runtime.local_rounds import Agreement, Exchange
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.runtime.stall_inspector import StallChannel
from hvd_gradcomp.runtime.step_header import SIZE, different_comparisons
from hvd_gradcomp.torch.reduce.backend import Backend
from hvd_gradcomp.torch.reduce.bucket import Named, as_real
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner, layers_of
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.step_sync import ConfigCheck

Write = Callable[[int, torch.Tensor], object]  # writes one of several tensors into some memory


def copied(tensors: Sequence[torch.Tensor]) -> Write:
    """Return what writes copies of tensors; see `TensorExchange.start`."""
    return lambda place, memory: memory.copy_(as_real(tensors[place]))


@dataclass(frozen=True)
class Connection:
    """Connection of this rank to the others, for one exchange.

    Attributes:
        transport: of its tensors.
        participants: the ranks.
        save: returns the reducer's state; takes the mode of a checkpoint.
        load: loads such a state.
        hang_up: lets ranks that wait for this one fail.
        stalls: of the ranks, where the transport can tell that they wait for each other.
        replicas: the ranks in sets that have the same parameters; () if all of them do.
        nonfinite_ranks: takes True if what was exchanged here is not finite; returns the ranks on
            which it is not, among all that undo an exchange together. None if all take part in it.
    """

    transport: Backend
    participants: Participants
    save: Callable[[Reducer, str], dict[str, Any]]
    load: Callable[[Reducer, dict[str, Any]], None]
    hang_up: Callable[[], None]
    stalls: StallChannel | None = None
    replicas: Sequence[Collection[int]] = ()
    nonfinite_ranks: Callable[[bool], list[int]] | None = None


class RankSync:
    """Comparison of what ranks are about to do, at one place for all exchanges of an optimizer.

    So ranks that are about to do different things meet here, instead of waiting for each other.

    Args:
        connection: to the other ranks.
        device: of the numbers, for which the transport has collectives.
    """

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection, self._device = connection, device

    @property
    def replicas(self) -> Sequence[Collection[int]]:
        """Return the ranks in sets that have the same parameters; () if all of them do."""
        return self._connection.replicas

    def described(self, named: Named, compressor: Compressor, settings: str) -> Description:
        """Describe what must be equal on all ranks, also on those with other shards.

        Args:
            named: (name, parameter) of what is exchanged.
            compressor: of all of them.
            settings: of this rank.
        """
        return config_check.describe(
            layers_of(named),
            compressor,
            (),
            settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=self._connection.transport.version,
        )

    def compare_settings(self, settings: Description, refusal: Exception | None = None) -> None:
        """Compare settings, on all ranks.

        Args:
            settings: of this rank, by their names.
            refusal: error with which this rank refuses to go on; None if it does not.

        Raises:
            MismatchError: on all ranks, if they differ, or some ranks alone refuse.
            Exception: the one with which this rank refuses, if all ranks refuse alike.
        """
        ranks = self._connection.participants.process_set.ranks
        config_check.compare(settings, self._gather, ranks, refusal)

    def start_gather(self, row: Sequence[int]) -> Callable[[], dict[int, list[int]]]:
        """Start to gather a row of integers from every rank; at most as many as a header has.

        In one collective of one size, whatever ranks are about to do: over a long link it takes as
        long as the link's latency.

        Returns:
            A function that waits for the rows of all ranks, by rank; it raises an OutOfStepError
            if others compare something else.
        """
        stalls, transport = self._connection.stalls, self._connection.transport
        reported = int(stalls is not None and stalls.pending)
        padded = [reported, *row, *[0] * (SIZE - len(row))]
        tensor = torch.tensor(padded, dtype=torch.int64).to(self._device)
        group = self._connection.participants.process_set
        with self._explained():
            pending = transport.allgather(tensor, f"{transport.name}.header", group)

        def wait() -> dict[int, list[int]]:
            with self._explained():
                rows = transport.wait(pending).tolist()
            by_rank = dict(zip(group.ranks or range(len(rows)), rows))
            flags = {rank: each[0] for rank, each in by_rank.items()}
            if different := different_comparisons(flags):
                raise different
            if stalls is not None and any(flags.values()):
                stalls.complete()
            return {rank: each[1 : 1 + len(row)] for rank, each in by_rank.items()}

        return wait

    def _gather(self, item: Any, kind: Any) -> list[Any]:
        with self._explained():
            return self._connection.transport.gather_objects(item, kind, "sync")

    def _explained(self) -> AbstractContextManager[None]:
        transport, what = self._connection.transport, "the comparison of what the ranks exchange"
        return errors.explain_errors(transport.failure, what, transport.library)


class TensorExchange(Exchange):
    """Exchange of tensors of the shapes of some parameters; the mean over ranks is returned.

    Args:
        named_parameters: their names and shapes; what has no element is not exchanged.
        owners: the parameters of the model, if these are copies.
        compressor: of all of them.
        connection: to the other ranks.
        options: of the exchange.
        settings: that must be equal on all ranks.

    Raises:
        ValueError: the compressor cannot take these layers, or needs moments of samples, which
            these tensors do not have.

    Attributes:
        reducer: of the buckets.
    """

    def __init__(
        self,
        named_parameters: Named,
        owners: Named,
        compressor: Compressor,
        connection: Connection,
        options: ExchangeOptions,
        settings: str,
    ) -> None:
        self._connection = connection
        transport, participants = connection.transport, connection.participants
        pairs = list(zip(named_parameters, owners))
        pairs = [pair for pair in pairs if pair[0][1].numel()]  # a shard may be empty
        self._shapes = [p for _, p in named_parameters]
        named_parameters = [named for named, _ in pairs]
        planner = BucketPlanner(
            named_parameters,
            compressor,
            participants,
            options,
            name=transport.name,
            tracking=None,
            owners=[owner for _, owner in pairs],
        )
        if not planner.ordered:  # that of the model: there is no backward to learn it from
            planner.reorder([name for name, _ in named_parameters])
        mean = 1.0 / participants.rank_and_size[1]
        self.reducer = Reducer(
            planner,
            transport,
            participants,
            options,
            prescale=1.0,
            postscale=mean,
            releases=True,
        )
        self._check = ConfigCheck(self.reducer, settings)
        self._totals = self.reducer.traffic.totals  # before the exchange that was started last

    @property
    def made(self) -> int:
        return self.reducer.steps

    @property
    def started(self) -> bool:
        """Return True from `start` to `finish`."""
        return self.reducer.started

    def agree(self) -> None:
        """Compare the settings of all ranks, once; all of them call it.

        Raises:
            MismatchError: on all ranks, if they do not train the same model in the same way.
        """
        self._check.agree()

    def compare_again(self) -> None:
        """Compare the settings of all ranks again before the next exchange."""
        self._check.reached = False

    @torch.no_grad()
    def start(self, write: Write, agree: Agreement = lambda: None) -> None:
        """Start the exchange of a tensor for each parameter.

        Args:
            write: writes the tensor of a parameter into the memory from which it is sent; takes
                the parameter's place and the memory, real and [..., 2] if the parameter is complex.
            agree: called once, before anything is sent; the first bucket is compressed by then.

        Raises:
            Exception: of a program; ranks that wait for this one fail. Or of `agree`, which has to
                raise on all ranks alike: the state is as before then.
        """
        reducer, refusals = self.reducer, []

        def agree_once() -> None:
            try:
                agree()
            except Exception as error:
                refusals.append(error)
                raise

        reducer.begin_step(agree_once)
        self._totals = reducer.traffic.totals
        reducer.planner.warn_if_unprofitable()
        try:
            for place, p in enumerate(self._shapes):
                if p.numel():
                    memory = reducer.memory_of(p)
                    write(place, memory)
                    reducer.mark_ready(p, memory)
            reducer.programs.agree()  # there may be nothing to send
        except Exception as error:
            if error in refusals:
                reducer.abort()
            else:
                self._give_up()
            raise

    @torch.no_grad()
    def finish(self) -> list[torch.Tensor] | None:
        """End the exchange; return the mean of each tensor, None if it was undone on all ranks.

        Means have the dtype of their parameter, whatever that of the bucket. They are valid until
        `release` or the next `start`.

        Raises:
            NonFiniteGradientError: on all ranks, if that is the policy.
            Exception: of a program; ranks that wait for this one fail.
        """
        reducer = self.reducer
        try:
            reducer.programs.wait_all()
            reducer.commit_or_roll_back_among(self._connection.nonfinite_ranks)
        except NonFiniteGradientError:
            reducer.finish_step(keeps_memory=True)
            raise
        except Exception:
            self._give_up()
            raise
        undone = reducer.rolled_back
        reduced = iter(reducer.reduced([p for p in self._shapes if p.numel()]))
        means = [
            next(reduced).to(p.dtype) if p.numel() else torch.zeros_like(p) for p in self._shapes
        ]
        reducer.finish_step(keeps_memory=True)
        return None if undone else means

    def release(self) -> None:
        self.reducer.release()
        self.reducer.release_spare()

    def commit(self) -> None:
        self.reducer.commit()

    def rollback(self) -> None:
        self.reducer.rollback()

    @torch.no_grad()
    def forget(self, places: Mapping[int, torch.Tensor]) -> None:
        """Drop what this rank has not sent of some elements.

        Args:
            places: True for these elements, by the place of their tensor, in its shape.
        """
        by_bucket: dict[int, dict[int, torch.Tensor]] = {}
        for place, chosen in places.items():
            shape = self._shapes[place]
            if shape.numel():
                bucket, slot = self.reducer.planner.places[shape]
                chosen = chosen.unsqueeze(-1) if shape.is_complex() else chosen
                by_bucket.setdefault(id(bucket), {})[slot] = chosen
        for bucket in self.reducer.buckets:
            if id(bucket) in by_bucket:
                bucket.forget(by_bucket[id(bucket)])

    def abort(self) -> None:
        """Drop an exchange that was started, on all ranks; the state is as before it."""
        if self.started:
            self.reducer.abort()

    def _give_up(self) -> None:
        self.reducer.abort()
        self._connection.hang_up()

    def save(self, mode: str) -> dict[str, Any]:
        """Return the state, as it was before an exchange that was started."""
        buckets, traffic = self.reducer.buckets, self.reducer.traffic
        now, totals = [bucket.state for bucket in buckets], traffic.totals
        if self.started:
            traffic.totals = self._totals
        for bucket in buckets if self.started else ():
            bucket.state = bucket.state if bucket.snapshot_state is None else bucket.snapshot_state
        try:
            return self._connection.save(self.reducer, mode)
        finally:
            traffic.totals = totals
            for bucket, state in zip(buckets, now):
                bucket.state = state

    def load(self, saved: dict[str, Any]) -> None:
        """Load a state of `save`.

        Raises:
            CheckpointError: it is of another format, compressor, model or number of ranks.
        """
        self.abort()
        self._connection.load(self.reducer, saved)
        self.compare_again()
