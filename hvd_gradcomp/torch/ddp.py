"""Gradient compression for PyTorch's own `DistributedDataParallel`: no Horovod.

    from hvd_gradcomp import VarianceCompressor
    from hvd_gradcomp.torch import ddp

     model = DistributedDataParallel(model)
    +state = ddp.compress(model, VarianceCompressor(alpha=2.0))

How. A communication hook sees the gradients of each of DDP's buckets, lays them into our own
(`DistributedDataParallel` plans its buckets anew after the first step; what a compressor keeps must
not move), and begins a bucket's program with the last of its gradients. What the program asks for
first travels while earlier layers are differentiated. Ranks meet by the order in which they ask,
so everything after it waits for DDP's last bucket: then all programs are run to their ends, bucket
by bucket, in the same order on all ranks.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import assignment, checkpoint, failures, handshake, hierarchy, worth
from hvd_gradcomp.aggregator import Compressor, leaves, with_leaves
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.checkpoint import Source
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.stats import CompressionStats
from hvd_gradcomp.torch import exchange, momentum
from hvd_gradcomp.torch.buckets import (
    BUCKET_BYTES,
    Bucket,
    Named,
    as_used,
    carry_over,
    leaving_dense,
    planned,
)
from hvd_gradcomp.torch.moments import track_moments
from hvd_gradcomp.torch.parameters import layers_of
from hvd_gradcomp.torch.process_groups import Distributed, Group
from hvd_gradcomp.torch.rounds import OutOfStepError
from hvd_gradcomp.torch.sources import Sources, source_of

__all__ = ["CompressionState", "compress", "hook", "track_moments"]

LOGGER = logging.getLogger("hvd_gradcomp")


def compress(model: DistributedDataParallel, compression: Any = None, **options: Any) -> Any:
    """Lets a model exchange its gradients compressed; all ranks call it, before the first forward.

    Args:
        model: a `DistributedDataParallel`.
        compression, options: as in `CompressionState`.

    Returns:
        The `CompressionState`: keep it, it has what a checkpoint needs, and `stats()`.
    """
    state = CompressionState(model, compression, **options)
    model.register_comm_hook(state, hook)
    return state


def hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What `model.register_comm_hook(state, ddp.hook)` takes."""
    return state.take_in(bucket)


# DDP compares these with its classes, and takes no texts.
hook.__annotations__.update(
    bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}
)


class _Exchange(exchange.Exchange):
    """The programs of a model, over `torch.distributed`."""

    def _explained(self, what: str) -> AbstractContextManager[None]:
        return failures.named(RuntimeError, what, "torch.distributed")

    def _make_groups(self, place: hierarchy.Place) -> hierarchy.Groups:
        raise NotImplementedError

    def begin_step(self) -> bool:
        """Begins a step; whether a gradient that is not finite undoes it."""
        self._begin_step()
        for bucket in self.buckets:
            bucket.refresh()
        return self._undoes

    def finish(self) -> None:
        """Runs all programs to their ends, in the same order on all ranks.

        Raises:
            NonFiniteGradientError: on all ranks.
            Exception: what one of this rank's programs has raised.
        """
        while running := [bucket for bucket in self.buckets if bucket.stack is not None]:
            self._resume(running)
            others = [e for e in self._errors if not isinstance(e, NonFiniteGradientError)]
            if others:  # what this rank does not ask for, the others must not wait for
                raise others[0]
        self._end_step()

    def end(self) -> None:
        """All results were taken."""
        self.sources.end_step()
        self.scaling.end_step()
        for bucket in self.buckets:
            bucket.result = None

    def settle_on(self, buckets: list[Bucket]) -> None:
        """Goes on with these."""
        self._settle_on(buckets)

    lay = exchange.Exchange._lay
    taken = exchange.Exchange._taken
    place_of = property(lambda self: self._places.__getitem__)


class CompressionState:
    """What compresses the gradients of one model, and what it keeps from step to step.

    All ranks of the process group make it, before the first forward. Layers that do not require a
    gradient are left out, as `DistributedDataParallel` leaves them out.

    Args:
        model: a `DistributedDataParallel`.
        compression: a compressor of this package; None for none.
        process_group: the ranks that take part; the model's if None.
        optimizer: the SGD whose momentum a compressor that corrects it takes over (DGC, EGC, LGC).
            Without it the compressor is given its `momentum=`, and the optimizer none.
        backward_passes_per_step: backwards for each exchange, all but the last under
            `model.no_sync()`; more than one gives the moments of micro-batches.
        batch_size: samples that a rank sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of our buckets; 25 MiB if None.
        nonfinite: what becomes of a step with a gradient that is not finite on any rank. All ranks
            do the same. "raise": a NonFiniteGradientError from backward. "propagate": gradients are
            NaN, and what the compressor keeps is as before the step. None: "propagate" with a
            GradScaler, which then leaves the step out; else "raise".
        scaler: the `GradScaler` that scales the loss; None finds it, False for none.

    Raises:
        TypeError: the model or `compression` is something else.
        ValueError: the compressor cannot take these layers; a momentum is to be taken over from
            nowhere; moments are not set up.
        MismatchError: on all ranks, if they do not train the same model in the same way.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        compression: Any = None,
        process_group: Any = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        backward_passes_per_step: int = 1,
        batch_size: int | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        scaler: Any = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"a DistributedDataParallel is compressed, got {type(model).__name__}")
        if nonfinite not in (None, "raise", "propagate"):
            raise ValueError(
                f"nonfinite must be 'raise', 'propagate' or None, got {nonfinite!r}: a hook cannot "
                "leave out the optimizer's step. A GradScaler does, by itself"
            )
        compressor, gives_up = _settled(compression, optimizer)
        self._group = Group(process_group or model.process_group)
        self._named = _reduced(model)
        self.compressor = leaving_dense(compressor, self._named)
        self._bucket_bytes = bucket_bytes
        self._layers = layers_of(self._named)
        self._arrived: list[str] | None = [] if compressor.needs_order else None
        self._order: list[str] = []
        self._exchange = _Exchange(
            Distributed(),
            process_set=self._group,
            place=None,
            prescale=1.0,
            postscale=1.0 / self._group.size(),
            nonfinite=nonfinite,
            scaler=scaler,
        )
        try:
            self._prepare(backward_passes_per_step, batch_size)
            refused = ""
        except ValueError as error:
            refused = str(error)
        self._agree(refused, f"{backward_passes_per_step=}, {bucket_bytes=}, {nonfinite=}")
        self._watch_order()
        self._takeover = _take_over(optimizer, self._exchange) if gives_up else None
        self._waiting: list[tuple[Any, torch.Tensor, list[Any]]] = []  # DDP's, in this step
        self._error: Exception | None = None

    # -- set-up --------------------------------------------------------------------------------

    def _prepare(self, passes: int, batch_size: int | None) -> None:
        assigned = assignment.assign(self.compressor, self._layers, self._group.size())
        used = [pair for pair, one in zip(self._named, assigned) if one.uses_moments]
        how = "ddp.track_moments(module) before DistributedDataParallel"
        source = source_of(self.compressor, used, passes, self._group.rank() == 0, how)
        run = self._exchange
        run.sources = Sources(source, batch_size, run.scaling, lambda p: run.place_of(p))
        run.settle_on(self._planned(self._named))
        run.sources.watch(run.buckets)

    def _planned(self, named: Named) -> list[Bucket]:
        layers = {layer[0]: layer for layer in self._layers}
        return list(
            planned(
                named,
                [layers[name] for name, _ in named],
                self.compressor,
                name="ddp",
                ranks=self._group.size(),
                bucket_bytes=self._bucket_bytes,
                with_moments=self._exchange.sources.kept,
            )
        )

    def _agree(self, refused: str, settings: str) -> None:
        """Compares with the other ranks what is about to be trained.

        Raises:
            ValueError: this model cannot be compressed so.
            MismatchError: on all ranks.
        """
        layouts = [] if refused else [bucket.layout for bucket in self._exchange.buckets]
        mine = handshake.describe(
            self._layers,
            self.compressor,
            layouts,
            settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=f"none, torch.distributed's {self._group.backend}",
        )
        every = self._group.gather_objects({**mine, "refused": refused}, handshake.Description)
        handshake.agree(every, self._group.ranks)
        if refused:
            raise ValueError(refused)
        if self._group.rank() == 0 and self._arrived is None:
            size = self._group.size()
            target = self._bucket_bytes or BUCKET_BYTES
            plan = assignment.plan(self.compressor, self._layers, target, ranks=size)
            for line in worth.warnings(self.compressor, plan, size):
                LOGGER.warning("%s", line)

    def _watch_order(self) -> None:
        """In the first step, sees in which order backward comes by the layers."""
        self._hooks: list[Any] = []
        arrived = self._arrived
        if arrived is not None:
            for name, p in self._named:
                self._hooks.append(p.register_hook(lambda _, name=name: arrived.append(name)))

    def _reorder(self, order: list[str]) -> None:
        """Plans the buckets for layers that are used in this order, on all ranks alike."""
        for one in self._hooks:
            one.remove()
        self._arrived, self._order, left = None, order, self._exchange.buckets
        known = dict(self._named)
        names = as_used(self._layers, order)
        self._exchange.settle_on(self._planned([(name, known[name]) for name in names]))
        carry_over(left, self._exchange.buckets)

    # -- one step ------------------------------------------------------------------------------

    @torch.no_grad()
    def take_in(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Takes the gradients of one of DDP's buckets; with the last one the exchange ends."""
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        pairs = list(zip(bucket.parameters(), bucket.gradients()))
        first = not self._waiting
        self._waiting.append((future, buffer, pairs))
        try:
            if first:
                self._begin()
            if self._error is None:
                self._give(buffer, pairs)
            if bucket.is_last() and self._error is None:
                self._exchange.finish()
        except Exception as error:
            self._fail(error)
        if bucket.is_last():
            self._hand_out()
        return future

    def _begin(self) -> None:
        """Begins a step, once all ranks have said that they begin the same.

        Raises:
            OutOfStepError: on all ranks.
        """
        if self._group.handle is None:
            raise RuntimeError(
                "the exchange of an earlier step has failed, and what was kept is lost: start all "
                "ranks again, from a checkpoint"
            )
        undoes = self._exchange.begin_step()
        mine = torch.tensor([self._exchange.steps, undoes], device=self._group.device)
        transport = self._exchange.dispatch.transport
        with failures.named(RuntimeError, "the beginning of a step", "torch.distributed"):
            every = transport.wait(transport.allgather(mine, "begin", self._group)).tolist()
        if any(one != every[0] for one in every):
            said = {r: tuple(one) for r, one in zip(self._group.ranks, every)}
            raise OutOfStepError(
                "the ranks are in different steps, or only some of them use a GradScaler: load the "
                f"same checkpoint on all ranks. By rank (step, whether it can be undone): {said}"
            )
        if self._arrived is not None and self._exchange.steps > 0:
            arrived = list(dict.fromkeys(self._arrived))[::-1]
            self._reorder(self._group.gather_objects(arrived, list[str])[0])

    def _give(self, buffer: torch.Tensor, pairs: list[Any]) -> None:
        if buffer.is_sparse:
            raise ValueError(
                "a sparse gradient cannot be compressed in a hook of DistributedDataParallel: make "
                "the embedding with sparse=False, or use hvd.DistributedOptimizer"
            )
        for p, gradient in pairs:
            self._exchange.lay(p, gradient)

    def _hand_out(self) -> None:
        """Gives DDP the reduced gradients; an error is raised once its backward has ended.

        So the model is not left in the middle of a step.
        """
        waiting, self._waiting = self._waiting, []
        error, self._error = self._error, None
        for future, buffer, pairs in waiting:
            for p, gradient in pairs if error is None else ():
                gradient.copy_(self._exchange.taken(p))
            if error is not None:
                buffer.fill_(float("nan"))
            future.set_result(buffer)
        self._exchange.end()
        if error is not None:
            _raise_after_backward(error)

    def _fail(self, error: Exception) -> None:
        """This step has failed: here alone, unless all ranks have found the same."""
        self._error = error
        if not isinstance(error, (NonFiniteGradientError, OutOfStepError)):
            self._group.hang_up()

    # -- what it keeps, and what it has done ---------------------------------------------------

    @property
    def steps(self) -> int:
        """Exchanges so far."""
        return self._exchange.steps

    def stats(self) -> CompressionStats:
        """What this rank's exchanges have moved so far, measured; see `CompressionStats`.

        Without what ranks say of themselves at the beginning of each step, 16 bytes.
        """
        return exchange.stats_of(self._exchange, [name for name, _, _ in self._layers], {})

    def retrain(self) -> None:
        """Lets the compressor learn anew from the next step on; all ranks call it."""
        exchange.retrain(self._exchange)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's compressor keeps. It belongs to this rank: each saves its own."""
        exchange.settled(self._exchange)
        return {
            "format": checkpoint.FORMAT,
            "compressor": repr(self.compressor),
            "formats": checkpoint.formats(self.compressor),
            "rank": self._group.rank(),
            "size": self._group.size(),
            "steps": self._exchange.steps,
            "order": list(self._order),
            "arrived": None if self._arrived is None else list(self._arrived),
            "counters": list(self._exchange.ledger.counters),
            "buckets": [
                {
                    "digest": bucket.layout.digest,
                    "names": bucket.layout.names,
                    "state": {path: x.detach().clone() for path, x in leaves(bucket.state)},
                }
                for bucket in self._exchange.buckets
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; on all ranks, between the same two steps.

        Of what another rank has saved only what all ranks have alike is taken.

        Raises:
            CheckpointError: it is of another format, compressor, model or number of ranks.
        """
        if isinstance(saved, dict) and saved.get("order"):
            self._reorder(saved["order"])
        checkpoint.check_exchange(
            saved, self.compressor, [bucket.layout for bucket in self._exchange.buckets]
        )
        rank, size = self._group.rank(), self._group.size()
        if saved["size"] != size:
            raise checkpoint.CheckpointError(checkpoint.other_size(saved["size"], size))
        for bucket, entry in zip(self._exchange.buckets, saved["buckets"]):
            how = saved["steps"], "sharded", saved["rank"], rank
            values = [
                entry["state"][path].to(current.device, copy=True)
                if checkpoint.source_of(bucket.compressor, path, *how) is Source.SAVED
                else current
                for path, current in leaves(bucket.state)
            ]
            bucket.state = with_leaves(bucket.state, values)
        self._exchange.steps = saved["steps"]
        if saved["rank"] == rank:
            self._exchange.ledger.counters = list(saved["counters"])
        if self._arrived is not None:
            self._arrived[:] = saved["arrived"]


def _reduced(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that DDP reduces, by name."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    return [
        (name, p)
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in ignored
    ]


def _settled(compression: Any, optimizer: torch.optim.Optimizer | None) -> tuple[Compressor, bool]:
    """The compressor with its momentum settled, and whether the optimizer gives its up."""
    if compression is None:
        return NoneCompressor(), False
    if isinstance(compression, type) and issubclass(compression, Compressor):
        compression = compression()
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression= takes a compressor of hvd_gradcomp, got {compression!r}")
    if optimizer is not None:
        return momentum.settle(optimizer, compression)
    if compression.correction is not None and compression.correction[0] is None:
        raise ValueError(
            "the compressor corrects momentum: pass optimizer=, whose momentum it takes over; or "
            "give the compressor momentum=0.9 and the optimizer none; or momentum=0 to go without. "
            f"Got {compression}"
        )
    return compression, False


def _take_over(optimizer: Any, run: _Exchange) -> momentum.Takeover:
    """Takes the momentum of SGD, which goes on as without it: what is saved has it still."""
    own = momentum.momentum_of(optimizer)
    assert own is not None
    taken = momentum.Takeover(optimizer, *own)

    def before_step(*_: Any) -> None:
        taken.check()
        if not run.undone:
            taken.decay()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_state_dict_post_hook(lambda _, state: taken.restored(state))
    optimizer.register_load_state_dict_post_hook(lambda _: taken.take())
    return taken


def _raise_after_backward(error: Exception) -> None:
    """Raises an error from backward, behind the callback that DDP is about to queue."""
    engine: Any = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    engine.queue_callback(lambda: engine.queue_callback(fail))
