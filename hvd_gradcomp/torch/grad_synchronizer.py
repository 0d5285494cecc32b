"""Synchronizes an optimizer's gradients over ranks, from autograd's hooks to `p.grad`.

The exchange of a bucket starts with the last of its gradients, and ends with backward, as with
`DistributedDataParallel`: then `p.grad` is reduced, and clipping, unscaling and norms mean what
they mean everywhere. `synchronize` and `step` handle what no backward has brought, and what the
messages of `step_sync` do not let end before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch

from hvd_gradcomp.core.compressor import leaves
from hvd_gradcomp.torch import autograd_hooks
from hvd_gradcomp.torch.comm import horovod
from hvd_gradcomp.torch.engine import HorovodReducer
from hvd_gradcomp.torch.exchange import LOGGER
from hvd_gradcomp.torch.grad_versions import GradVersions
from hvd_gradcomp.torch.late_grads import LateGradients
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.sparse_grads import all_zero, no_rows
from hvd_gradcomp.torch.step_sync import (
    CHANGED,
    HERE,
    LATE,
    SPARSE,
    GradientChangedError,
    OutOfStepError,
    SyncMessage,
    all_plain,
    all_set_alike,
    any_told,
    changed_alone,
    digest_of,
    read,
    usual,
)


class Taken(NamedTuple):
    """A gradient that was handed to the reducer or to Horovod, and is not reduced yet.

    Attributes:
        dense: it lies in its bucket.
        rows: waits for the gathered rows of a sparse gradient; None where there are none.
    """

    dense: bool
    rows: Callable[[], torch.Tensor] | None


_IN_BUCKET = Taken(True, None)


class GradSynchronizer:
    """Hands one optimizer's gradients to a reducer as they arrive, and puts the reduced ones back.

    Args:
        reducer: exchanges the buckets.
        names: of the parameters; new ones are added.
        param_groups: returns those of the optimizer.
        passes: backward passes per step.
        average: gradients are averaged, not summed.
        sparse_as_dense: compress sparse gradients, and do not gather their rows.

    Attributes:
        news: a gradient has arrived since the last round of messages.
        synchronized: `synchronize` has ended the exchange, and `step` was not called yet.
    """

    def __init__(
        self,
        reducer: HorovodReducer,
        names: dict[torch.nn.Parameter, str],
        param_groups: Callable[[], list[dict[str, Any]]],
        *,
        passes: int,
        average: bool,
        sparse_as_dense: bool,
    ) -> None:
        self.reducer, self.sync = reducer, reducer.sync
        self._names, self._param_groups, self._passes = names, param_groups, passes
        self._average, self._sparse_as_dense = average, sparse_as_dense
        self._passes_left = dict.fromkeys(names, passes)
        # None while passes of an unfinished step are missing.
        self._taken: dict[torch.nn.Parameter, Taken | None] = {}
        self._versions, self._reduced = GradVersions(), GradVersions()
        self._late = LateGradients(self._versions)
        self.news = self.synchronized = self._warned = False
        horovod.waiting.among(reducer.process_set)
        self._hooks = autograd_hooks.GradHooks(self)
        self._hooks.watch(reducer.parameters)

    @property
    def exchanging(self) -> bool:
        """Return True from the first gradient of a step to the end of `step`."""
        return bool(self._taken) or self.sync.ended

    @property
    def travelling(self) -> bool:
        """Return True if gradients were taken that are not reduced yet."""
        return any(taken is not None for taken in self._taken.values())

    @property
    def reduced(self) -> bool:
        """Return True if the gradients of a step are reduced and not applied yet."""
        return self.sync.ended or self.synchronized

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self._passes = passes
        self._passes_left = dict.fromkeys(self._names, passes)

    # -- a gradient arrives ------------------------------------------------------------------

    def arrive(self, p: torch.nn.Parameter) -> None:
        """Handle a pass that has added to the gradient of a parameter."""
        if p.grad is not None and p.grad.requires_grad:
            raise AssertionError(
                f"the gradient of {self._names[p]} requires a gradient itself: "
                "backward(create_graph=True) cannot be exchanged. Use torch.autograd.grad for "
                "higher derivatives"
            )
        if p in self._late:
            self._versions.note(p)  # a zero was added
            self.reducer.sources.forget([p])
            autograd_hooks.finish_after_backward(self)
            return
        if p.grad is None:
            raise RuntimeError(
                f"the gradient of {self._names[p]} was gone before it could be "
                "exchanged: a hook of the parameter steps or clears it. Step after backward()"
            )
        if self.sync.ended or self._passes_left[p] <= 0:
            if not self.sync.ended or self._versions.holds(p):
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call "
                    "to step(). Increase backward_passes_per_step to accumulate gradients locally."
                )
            self.drop()  # the reduced gradients were dropped, by `model.zero_grad()` say
        elif self.synchronized and not self._reduced.holds(p):
            self.drop()
        self.synchronized = False
        self._passes_left[p] -= 1
        self._taken[p] = None
        if self._passes_left[p] == 0:
            self._take(p)
            autograd_hooks.finish_after_backward(self)
        self._versions.note(p)

    def fail(self) -> None:
        """Handle an error of `arrive`: the scaler may live on in its traceback."""
        self.reducer.scaling.forget()

    def _take(self, p: torch.nn.Parameter) -> None:
        """Hand a gradient to the reducer, zeros where there is none; sparse ones to Horovod."""
        if p.grad is None:
            p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None))
        if self._is_gathered(p):
            self.reducer.mark_sparse_ready(p, p.grad)
            self._taken[p] = Taken(False, self._gather_rows(p, p.grad))
            return
        if p.grad.is_sparse:
            self.reducer.say_rows_are_compressed(p)
        self.reducer.mark_ready(p, p.grad.to_dense() if p.grad.is_sparse else p.grad)
        self._taken[p] = _IN_BUCKET

    def _is_gathered(self, p: torch.nn.Parameter) -> bool:
        return p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense

    def _gather_rows(self, p: torch.nn.Parameter, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        group = self.reducer.process_set
        return horovod.sparse_allreduce(rows, self._names[p], group, self._average)

    # -- the exchange ends -------------------------------------------------------------------

    def synchronize(self) -> None:
        """End the exchange, where it has not ended with backward; see the optimizer's."""
        if self.synchronized and not self.exchanging:
            return  # a second exchange would add to the residual what was exchanged
        gone = all(p.grad is None for p in self._taken)
        if gone and self.travelling and self.reducer.process_set.size() == 1:
            self.abort()  # `model.zero_grad()` after a backward that has failed
        self.check_mixed()
        horovod.complete([self.finishing(last=True)])
        self.begin()
        self._reduced.only(self.reducer.parameters)
        self.synchronized = True

    def finishing(self, last: bool, joined: bool = False) -> Generator[None, None, bool]:
        """Exchange messages until the exchange has ended here; yield while waiting for other ranks.

        Args:
            last: no gradient comes any more in this step: goes on until none can come anywhere.
            joined: this rank has no batches any more, and contributes zeros.

        Returns:
            Whether there was an exchange: False where all ranks have joined.
        """
        reducer, sync = self.reducer, self.sync
        try:
            while not sync.closed:
                self.news = False
                self.join_parameters()
                reducer.agreement.agree()
                messages = yield from self._exchange_messages(last, joined)
                if all(message.joined for message in messages):
                    return False
                ended = sync.ended
                names = [self._names[p] for p in reducer.ordered_parameters]
                ranks = reducer.process_set.ranks or range(len(messages))
                try:
                    late = sync.receive(messages, names, ranks)
                except GradientChangedError:
                    if not ended:  # so that nothing of it is left on its way
                        yield from self._end()
                    raise
                except OutOfStepError:
                    reducer.abandon()
                    raise
                if sync.ended and not ended:
                    yield from self._end()
                yield from self._add_late([reducer.ordered_parameters[i] for i in late])
                if self.sync.closed:
                    self._clear_unused()
                if not last:
                    break
            return True
        except BaseException:  # an interrupt in the middle, too
            self.abort()
            raise

    def has_everything(self) -> bool:
        """Return True if no gradient is missing on this rank."""
        return all(code & (HERE | LATE) for code in self._codes())

    def check_mixed(self) -> None:
        """Check gradients that were reduced for some ranks in backward, for others in `step`.

        Raises:
            GradientChangedError: they have changed since, which those others could not do.
        """
        changed = self._versions.changed()
        if self.sync.closed and self.sync.mixed and changed:
            name = self._names[changed[0]]
            self.begin()
            raise GradientChangedError(changed_alone(name, self.reducer.process_set.rank()))

    def _exchange_messages(
        self, last: bool, joined: bool
    ) -> Generator[None, None, list[SyncMessage]]:
        """Send this rank's message to all ranks, and return those of all."""
        reducer, sync = self.reducer, self.sync
        channel, known = horovod.waiting.among(reducer.process_set), sync.sparse
        codes = [*usual(len(reducer.ordered_parameters), known)] if joined else self._codes()
        settings = 0 if joined else digest_of(reducer.in_step)
        said = last, sync.ended, codes, settings, reducer.summed, channel.pending, joined
        message = SyncMessage(reducer.steps, *said)
        heads = yield from reducer.agreement.exchange_flags(message.head(known), "end")
        if any_told(heads):
            channel.complete()
        if not all_set_alike(heads):
            reducer.compare_step()
        layers: Sequence[Sequence[int]] = [usual(len(codes), known)] * len(heads)
        if not all_plain(heads):
            layers = yield from reducer.agreement.exchange_flags(codes, "end.layers")
        return read(heads, layers)

    def _codes(self) -> list[int]:
        return [self._code(p) for p in self.reducer.ordered_parameters]

    def _code(self, p: torch.nn.Parameter) -> int:
        taken = self._taken.get(p) is not None
        here = taken or self.sync.ended or not p.requires_grad
        sparse = taken and self._is_gathered(p)
        changed = self._versions.has_changed(p)
        return HERE * here | SPARSE * sparse | LATE * (p in self._late) | CHANGED * changed

    def _end(self) -> Iterator[None]:
        """End the exchange, with zeros for what has not come; `p.grad` is reduced then."""
        reducer, sync = self.reducer, self.sync
        reducer.order_is_known()
        frozen = reducer.begin()
        self._skip(frozen)
        order = reducer.ordered_parameters
        missing = []
        for place, p in enumerate(order):
            if p not in frozen and self._taken.get(p) is None:
                missing.append(p)
                if p.grad is None and place in sync.sparse - sync.both:
                    p.grad = no_rows(p)
                self._take(p)
        for place in sorted(sync.both):
            self._make_dense(order[place])
        for p in self._taken:
            if p.grad is None:  # dropped since it was taken, after a backward that has failed
                p.grad = torch.zeros_like(p)
        try:
            yield from reducer.finishing()
            self._deliver()
        finally:
            reducer.clear()
        self.synchronized = False
        for p in order:
            self._passes_left[p] = 0
        self._versions.only(order)
        if not sync.closed:
            self._late.watch(missing)

    def _make_dense(self, p: torch.nn.Parameter) -> None:
        """Let a gradient be dense on all ranks that is sparse on some and dense on others."""
        taken = self._taken[p]
        rows = None if taken is None else taken.rows
        if rows is not None:
            p.grad = torch.zeros_like(p)
        else:
            rows = self._gather_rows(p, no_rows(p))
        self._taken[p] = Taken(True, rows)

    def _deliver(self) -> None:
        """Put the reduced gradients into `p.grad`, which stays the same tensor."""
        for p, taken in self._taken.items():
            assert taken is not None and p.grad is not None
            rows = None if taken.rows is None else self.reducer.gathered(taken.rows())
            if not taken.dense:
                assert rows is not None
                p.grad.zero_().add_(rows)
                continue
            reduced = self.reducer.reduced_grad(p)
            if rows is not None:
                reduced = reduced.add(rows)
            if p.grad.is_sparse:  # it was compressed as a dense one
                p.grad.zero_().add_(reduced.to_sparse())
            else:
                p.grad.set_(reduced)
        self._taken.clear()

    def _add_late(self, late: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        named = [(self._names[p], p) for p in late]
        yield from self._late.add_up(self.reducer, named, self._average)

    def _clear_unused(self) -> None:
        """Set gradients to None that no rank has used, and for which nothing has arrived.

        So the optimizer neither decays these layers nor moves them by its momentum.
        """
        for place in self.sync.unused:
            p = self.reducer.ordered_parameters[place]
            if p.grad is not None and all_zero(p.grad):
                p.grad = None
                self._versions.forget(p)

    def _skip(self, frozen: Set[torch.nn.Parameter]) -> None:
        """Drop the gradients of frozen parameters, so that the optimizer leaves these alone."""
        for p in frozen:
            p.grad = None
            self._taken.pop(p, None)
            self._passes_left[p] = self._passes

    # -- steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: nothing has arrived."""
        autograd_hooks.forget(self)
        self._late.forget()
        self._taken.clear()
        self._versions.clear()
        self.sync.begin()
        for p in self._passes_left:
            self._passes_left[p] = self._passes

    def drop(self, asked: bool = False) -> None:
        """Begin a step; if the last one was reduced and not applied, roll its exchange back.

        Args:
            asked: the user has called `discard_step`, so there is nothing to warn of.
        """
        reducer = self.reducer
        if self.reduced and not reducer.undone:
            undone = reducer.discard()
            keeps = any(True for bucket in reducer.buckets for _ in leaves(bucket.state))
            if keeps and not (asked or self._warned) and reducer.process_set.rank() == 0:
                LOGGER.warning(
                    "gradients that were reduced were dropped, without step(): %s. The compressor "
                    "is %s",
                    "what it keeps is as before their exchange. If they were applied by hand, pass "
                    "rollback=False to DistributedOptimizer"
                    if undone
                    else "with rollback=False what it keeps of that step goes with later gradients",
                    reducer.compressor,
                )
            self._warned = True
        self.begin()
        self.synchronized = False

    def abort(self) -> None:
        """End an exchange that has failed: the next backward begins a step."""
        self.reducer.abort()
        self.begin()

    def clear(self, asked: bool) -> None:
        """Drop gradients for `zero_grad`, reduced ones and those of an unfinished step.

        Args:
            asked: the user has called `discard_step`.

        Raises:
            AssertionError: other ranks wait for the gradients that are being exchanged.
        """
        if self.travelling and self.reducer.process_set.size() == 1:
            self.abort()  # a backward that has failed; nobody waits for the rest of it
        if self.travelling:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(); "
                "it would clear gradients that are being exchanged. Where backward() has raised an "
                "error the other ranks wait for this one: call step() to go on with the gradients "
                "that there are, or end the process"
            )
        self.drop(asked)
        self.reducer.sources.forget()
        for p in self._names:
            tracker.discard(p)
        self.join_parameters()  # what has thawed is reduced when the next backward ends

    def take_part(self) -> Iterator[None]:
        """Take part in other ranks' exchanges, without a gradient, until all ranks have joined.

        Yields while it waits for them. Parameters stay as they are; see `uneven_inputs.join`.
        """
        reducer = self.reducer
        reducer.joined = True
        try:
            while True:
                for p in reducer.parameters:
                    if p not in self._taken:  # what passes of an unfinished step have brought
                        p.grad = None
                        tracker.discard(p)
                if not (yield from self.finishing(last=True, joined=True)):
                    return
                self.begin()
        finally:
            reducer.joined = False
            self.synchronized = False

    # -- parameters --------------------------------------------------------------------------

    def join_parameters(self) -> None:
        """Add parameters to the exchange that train now and are not in it yet.

        Raises:
            ValueError: the compressor cannot take them in; see `HorovodReducer.add`.
        """
        reducer = self.reducer
        new = [
            p
            for group in self._param_groups()
            for p in group["params"]
            if p.requires_grad and p not in reducer.parameters
        ]
        if new:
            reducer.add([(self._names[p], p) for p in new])
            self._hooks.watch(new)

    def add_group(self, group: dict[str, Any]) -> None:
        """Name the parameters of a new group, as it says or by place, and let them join.

        Raises:
            ValueError: a name belongs to another parameter, or see `join_parameters`; the names
                are as before.
        """
        place = len(self._param_groups()) - 1
        count = len(group["params"])
        titles = group.get("param_names") or [f"group.{place}.{i}" for i in range(count)]
        new = {p: name for p, name in zip(group["params"], titles) if p not in self._names}
        taken = set(self._names.values())
        for name in new.values():
            if name in taken:
                raise ValueError(f"add_param_group: {name} names another parameter already")
        self._names.update(new)
        self._passes_left.update(dict.fromkeys(new, self._passes))
        try:
            self.join_parameters()
        except ValueError:
            for p in new:
                del self._names[p], self._passes_left[p]
            raise


synchronizers: weakref.WeakKeyDictionary[Any, GradSynchronizer] = weakref.WeakKeyDictionary()
"""Those of the distributed optimizers of this rank."""


def groups_of(optimizer: torch.optim.Optimizer) -> Callable[[], list[dict[str, Any]]]:
    """Return what returns an optimizer's groups, without keeping the optimizer alive."""
    reference = weakref.proxy(optimizer)
    return lambda: list(reference.param_groups)
