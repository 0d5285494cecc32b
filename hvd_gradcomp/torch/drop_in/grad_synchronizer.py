"""Synchronizes an optimizer's gradients over ranks, from autograd's hooks to `p.grad`.

The exchange of a bucket starts with the last of its gradients, and ends with backward, as with
`DistributedDataParallel`: then `p.grad` is reduced, and clipping, unscaling and norms mean what
they mean everywhere. `synchronize()` and `step()` reduce gradients that no backward produced, or
whose exchange had to wait for other ranks (`step_sync`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Set
from typing import Any, NamedTuple

import torch

from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.runtime.driver import run_until_done
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.step_header import Kind
from hvd_gradcomp.torch.comm import horovod
from hvd_gradcomp.torch.drop_in import autograd_hooks
from hvd_gradcomp.torch.drop_in.late_grads import GradVersions, LateGradients
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.reduce.reducer import LOGGER, Reducer
from hvd_gradcomp.torch.reduce.sparse_grads import SparseGradients, all_zero, no_rows
from hvd_gradcomp.torch.reduce.step_sync import (
    CHANGED,
    HERE,
    LATE,
    SPARSE,
    ConfigCheck,
    GradientChangedError,
    StepSync,
    SyncMessage,
    changed_alone,
    digest_of,
    usual,
)


class TrainedParameters:
    """Parameters of an optimizer: their names, and the passes that each lacks in a step.

    Args:
        names: of the parameters; new ones are added.
        groups: returns the optimizer's parameter groups.
        passes: backward passes per step.

    Attributes:
        left: passes that are missing, by parameter.
    """

    def __init__(
        self,
        names: dict[torch.nn.Parameter, str],
        groups: Callable[[], list[dict[str, Any]]],
        passes: int,
    ) -> None:
        self.names, self._groups, self.passes = names, groups, passes
        self.left = dict.fromkeys(names, passes)

    def begin(self) -> None:
        """Begin a step: all passes are missing."""
        for p in self.left:
            self.left[p] = self.passes

    def outside(self, known: Collection[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return the parameters that train and are not among the known ones."""
        return [
            p
            for group in self._groups()
            for p in group["params"]
            if p.requires_grad and p not in known
        ]

    def name_last_group(self) -> list[torch.nn.Parameter]:
        """Name the new parameters of the last group, as it says or by place; return them.

        Raises:
            ValueError: a name belongs to another parameter.
        """
        *_, group = groups = self._groups()
        count = len(group["params"])
        titles = group.get("param_names") or [f"group.{len(groups) - 1}.{i}" for i in range(count)]
        new = {p: name for p, name in zip(group["params"], titles) if p not in self.names}
        taken = set(self.names.values())
        for name in new.values():
            if name in taken:
                raise ValueError(f"add_param_group: {name} names another parameter already")
        self.names.update(new)
        self.left.update(dict.fromkeys(new, self.passes))
        return [*new]

    def remove(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Remove these parameters."""
        for p in parameters:
            del self.names[p], self.left[p]


class Submitted(NamedTuple):
    """A gradient that was handed to the reducer or to Horovod, and is not reduced yet.

    Attributes:
        dense: it lies in its bucket.
        rows: waits for the gathered rows of a sparse gradient; None for a dense one.
    """

    dense: bool
    rows: Callable[[], torch.Tensor] | None


_IN_BUCKET = Submitted(True, None)


class StepExchange:
    """Exchange of the gradients of one step after another, by a reducer.

    Args:
        reducer: of the buckets.
        sparse: gathers rows.
        check: compares the ranks.

    Attributes:
        submitted: by parameter; None while passes of an unfinished step are missing.
    """

    def __init__(self, reducer: Reducer, sparse: SparseGradients, check: ConfigCheck) -> None:
        self._reducer, self._sparse, self._check = reducer, sparse, check
        self.submitted: dict[torch.nn.Parameter, Submitted | None] = {}
        self._frozen: set[torch.nn.Parameter] | None = None  # known once a step has begun

    @property
    def travelling(self) -> bool:
        """Return True if gradients were submitted that are not reduced yet."""
        return any(each is not None for each in self.submitted.values())

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks in this step; {} before it begins."""
        if self._frozen is None:
            return {}
        reducer = self._reducer
        frozen = [name for name, p in reducer.planner.named_parameters if p in self._frozen]
        scaled = any(bucket.scaled for bucket in reducer.buckets)
        return {
            "the loss scale, in which gradients are added up": str(reducer.scaling.known * scaled),
            "parameters that are frozen": ", ".join(frozen) or "none",
            "a gradient that is not finite (nonfinite=, or a loss scaler)": reducer.policy,
        }

    def begin(self) -> Set[torch.nn.Parameter]:
        """Begin a step, unless it has begun; return its frozen parameters."""
        if self._frozen is None:
            reducer, planner = self._reducer, self._reducer.planner
            reducer.commit()
            self._check.agree()
            if planner.arrived is not None and reducer.steps > 0:
                planner.reorder(self._check.gather(planner.order, list[str])[0])
            planner.report()
            reducer.begin_step()
            self._frozen = {p for p in planner.places if not p.requires_grad}
            if self._frozen:
                reducer.sources.clear(self._frozen)
            for bucket in reducer.buckets:
                frozen = {slot for slot, p in enumerate(bucket.parameters) if p in self._frozen}
                bucket.mask_frozen(frozen, reducer.steps)
        return self._frozen

    def is_gathered(self, p: torch.nn.Parameter) -> bool:
        """Return True if the gradient of a parameter was submitted, and its rows are gathered."""
        submitted = self.submitted.get(p)
        if submitted is None or submitted.dense:
            return False
        return p.grad is not None and p.grad.is_sparse

    def submit(self, p: torch.nn.Parameter) -> None:
        """Hand a gradient to the reducer, or zeros if it is None; the rows of a sparse one too."""
        if p.grad is None:
            p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None))
        if not p.grad.is_sparse:
            self._fill_bucket(p, p.grad)
            self.submitted[p] = _IN_BUCKET
            return
        name = self._reducer.planner.names[p]
        if self._sparse.is_gathered(p):
            self._fill_bucket(p, self._sparse.in_bucket(p, p.grad))
            self.submitted[p] = Submitted(False, self._sparse.gather(name, p.grad))
        else:
            self._fill_bucket(p, self._sparse.as_dense(name, p.grad))
            self.submitted[p] = _IN_BUCKET

    def _fill_bucket(self, p: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        if p in self.begin():
            return  # frozen between forward and backward
        planner = self._reducer.planner
        if planner.arrived is not None:
            planner.arrived.append(planner.names[p])
        self._reducer.mark_ready(p, gradient)

    def submit_missing(self, sync: StepSync) -> list[torch.nn.Parameter]:
        """Submit zeros for gradients that have not arrived, and return those parameters."""
        planner, frozen, missing = self._reducer.planner, self.begin(), []
        for place, p in enumerate(planner.ordered_parameters):
            if p not in frozen and self.submitted.get(p) is None:
                missing.append(p)
                if p.grad is None and place in sync.sparse - sync.both:
                    p.grad = no_rows(p)
                self.submit(p)
        for place in sorted(sync.both):
            self._make_dense(planner.ordered_parameters[place])
        for p in self.submitted:
            if p.grad is None:  # dropped since it was submitted, after a backward that has failed
                p.grad = torch.zeros_like(p)
        return missing

    def _make_dense(self, p: torch.nn.Parameter) -> None:
        """Make a gradient dense on all ranks that is sparse on some and dense on others."""
        submitted = self.submitted[p]
        rows = None if submitted is None else submitted.rows
        if rows is not None:
            p.grad = torch.zeros_like(p)
        else:
            rows = self._sparse.gather(self._reducer.planner.names[p], no_rows(p))
        self.submitted[p] = Submitted(True, rows)

    def wait_and_copy_out(self) -> Iterator[None]:
        """Wait for the programs and put the results into `p.grad`; yield while waiting."""
        try:
            yield from self._reducer.programs.poll_all()
            if self._reducer.started:
                self._reducer.commit_or_roll_back()
            for p, submitted in self.submitted.items():
                assert submitted is not None
                self._copy_out(p, submitted)
            self.submitted.clear()
        finally:
            self.finish_step()

    def _copy_out(self, p: torch.nn.Parameter, submitted: Submitted) -> None:
        """Put the reduced gradient into `p.grad`, which stays the same tensor.

        If the parameter is not contiguous, the gradient has its strides: fused optimizers iterate
        over both in memory order.
        """
        assert p.grad is not None
        rows = None if submitted.rows is None else submitted.rows()
        if not submitted.dense:
            p.grad.zero_().add_(rows)
            return
        reduced = self._reducer.reduced_grad(p)
        if p.is_contiguous():
            reduced = reduced.to(p.grad.dtype)
        else:
            empty = torch.empty_like(p, dtype=p.grad.dtype, requires_grad=False)
            reduced = empty.copy_(reduced)
        if rows is not None:
            reduced = reduced.add(rows)
        if p.grad.is_sparse:  # it was compressed as a dense one
            p.grad.zero_().add_(reduced.to_sparse())
        else:
            p.grad.set_(reduced)

    def finish_step(self) -> None:
        """End a step after all results were copied out."""
        self._frozen = None
        self._reducer.finish_step()

    def abort(self) -> None:
        """Abort an exchange."""
        self._frozen = None
        self._reducer.abort()


class GradSynchronizer:
    """Hands one optimizer's gradients to a reducer as they arrive, and puts the reduced ones back.

    Args:
        reducer: exchanges the buckets.
        parameters: of the optimizer.
        check: compares the ranks.
        sparse: gathers the rows of sparse gradients.
        average: gradients are averaged, not summed.

    Attributes:
        news: a gradient has arrived since the last round of messages.
        synchronized: `synchronize` has ended the exchange, and `step` was not called yet.
        sync: rounds of messages.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: TrainedParameters,
        check: ConfigCheck,
        sparse: SparseGradients,
        *,
        average: bool,
    ) -> None:
        self.reducer, self.sync, self.check = reducer, StepSync(), check
        self._trained, self._names, self._average = parameters, parameters.names, average
        self._exchange = StepExchange(reducer, sparse, check)
        self._process_set = reducer.participants.process_set
        self._versions, self._reduced = GradVersions(), GradVersions()
        self._late = LateGradients(self._versions)
        self.news = self.synchronized = self._warned = False
        self._stalls = horovod.stalls.among(self._process_set)
        self._hooks = autograd_hooks.GradHooks(self)
        self._hooks.watch(reducer.parameters)

    @property
    def exchanging(self) -> bool:
        """Return True from the first gradient of a step to the end of `step`."""
        return bool(self._exchange.submitted) or self.sync.ended

    @property
    def travelling(self) -> bool:
        """Return True if gradients were submitted that are not reduced yet."""
        return self._exchange.travelling

    @property
    def reduced(self) -> bool:
        """Return True if the gradients of a step are reduced and not applied yet."""
        return self.sync.ended or self.synchronized

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self._trained.passes = passes
        self._trained.begin()

    # -- a gradient arrives ------------------------------------------------------------------

    def arrive(self, p: torch.nn.Parameter) -> None:
        """Handle a pass that has added to the gradient of a parameter."""
        left = self._trained.left
        if p.grad is not None and p.grad.requires_grad:
            raise AssertionError(
                f"the gradient of {self._names[p]} requires a gradient itself: "
                "backward(create_graph=True) cannot be exchanged. Use torch.autograd.grad for "
                "higher derivatives"
            )
        if p in self._late:
            self._versions.note(p)  # a zero was added
            self.reducer.sources.clear([p])
            autograd_hooks.finish_after_backward(self)
            return
        if p.grad is None:
            raise RuntimeError(
                f"the gradient of {self._names[p]} was gone before it could be "
                "exchanged: a hook of the parameter steps or clears it. Step after backward()"
            )
        if self.sync.ended or left[p] <= 0:
            if not self.sync.ended or self._versions.holds(p):
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call "
                    "to step(). Increase backward_passes_per_step to accumulate gradients locally."
                )
            self.begin_anew()  # the reduced gradients were dropped, by `model.zero_grad()` say
        elif self.synchronized and not self._reduced.holds(p):
            self.begin_anew()
        self.synchronized = False
        left[p] -= 1
        self._exchange.submitted[p] = None
        if left[p] == 0:
            self._exchange.submit(p)
            autograd_hooks.finish_after_backward(self)
        self._versions.note(p)

    def fail(self) -> None:
        """Handle an error of `arrive`: the scaler may live on in its traceback."""
        self.reducer.scaling.reset()

    # -- the exchange ends -------------------------------------------------------------------

    def synchronize(self) -> None:
        """End the exchange, where it has not ended with backward; see the optimizer's."""
        if self.synchronized and not self.exchanging:
            return  # a second exchange would add to the residual what was exchanged
        gone = all(p.grad is None for p in self._exchange.submitted)
        if gone and self.travelling and self._process_set.size() == 1:
            self.abort_step()  # `model.zero_grad()` after a backward that has failed
        self.check_mixed()
        run_until_done([self.agree_and_reduce(last=True)], horovod.pauses())
        self.begin()
        self._reduced.only(self.reducer.planner.places)
        self.synchronized = True

    def agree_and_reduce(self, last: bool, joined: bool = False) -> Generator[None, None, bool]:
        """Agree with all ranks on what has arrived, and reduce it; yield while waiting for them.

        Args:
            last: no gradient comes any more in this step: goes on until none can come anywhere.
            joined: this rank has no batches any more, and contributes zeros.

        Returns:
            False if all ranks have joined, so that there was no exchange.
        """
        planner, sync = self.reducer.planner, self.sync
        try:
            while not sync.closed:
                self.news = False
                self.join_parameters()
                self.check.agree()
                messages = yield from self._exchange_messages(last, joined)
                if all(message.joined for message in messages):
                    return False
                ended = sync.ended
                names = [self._names[p] for p in planner.ordered_parameters]
                ranks = self._process_set.ranks or range(len(messages))
                try:
                    late = sync.receive(messages, names, ranks)
                except GradientChangedError:
                    if not ended:  # so that nothing of it is left on its way
                        yield from self._reduce()
                    raise
                except OutOfStepError:
                    self.abort_exchange()
                    raise
                if sync.ended and not ended:
                    yield from self._reduce()
                named = [(names[i], planner.ordered_parameters[i]) for i in late]
                yield from self._late.add_up(self.reducer, named, self._average)
                if self.sync.closed:
                    self._clear_unused()
                if not last:
                    break
            return True
        except BaseException:  # an interrupt in the middle, too
            self.abort_step()
            raise

    def has_everything(self) -> bool:
        """Return True if no gradient is missing on this rank."""
        order = self.reducer.planner.ordered_parameters
        return all(self._code(p) & (HERE | LATE) for p in order)

    def check_mixed(self) -> None:
        """Check gradients that were reduced for some ranks in backward, for others in `step`.

        Raises:
            GradientChangedError: they have changed since, which those others could not do.
        """
        changed = self._versions.changed()
        if self.sync.closed and self.sync.mixed and changed:
            name = self._names[changed[0]]
            self.begin()
            raise GradientChangedError(changed_alone(name, self._process_set.rank()))

    def _exchange_messages(
        self, last: bool, joined: bool
    ) -> Generator[None, None, list[SyncMessage]]:
        """Send this rank's message to all ranks, and return those of all."""
        reducer, sync = self.reducer, self.sync
        order, sparse = reducer.planner.ordered_parameters, sync.sparse
        kind = Kind.REDUCED if sync.ended else Kind.STEP
        message = SyncMessage.of(
            Kind.JOINED if joined else kind,
            reducer.steps,
            usual(len(order), sparse) if joined else [self._code(p) for p in order],
            last=last,
            sparse=sparse,
            settings=0 if joined else digest_of(self._exchange.settings),
            digest=reducer.checksum,
        )
        return (yield from self.check.exchange(message, sparse, self._exchange, self._stalls))

    def _code(self, p: torch.nn.Parameter) -> int:
        submitted = self._exchange.submitted.get(p) is not None
        here = self.sync.ended or submitted or not p.requires_grad
        sparse = self._exchange.is_gathered(p)
        changed = self._versions.has_changed(p)
        return HERE * here | SPARSE * sparse | LATE * (p in self._late) | CHANGED * changed

    def _reduce(self) -> Iterator[None]:
        """Run the exchange to its end, with zeros for gradients that have not arrived."""
        planner, exchange = self.reducer.planner, self._exchange
        if planner.arrived is not None and self.reducer.steps == 0:
            planner.fix_order()
        for p in exchange.begin():  # frozen: so the optimizer leaves them alone
            p.grad = None
            exchange.submitted.pop(p, None)
            self._trained.left[p] = self._trained.passes
        missing = exchange.submit_missing(self.sync)
        yield from exchange.wait_and_copy_out()
        self.synchronized = False
        for p in planner.ordered_parameters:
            self._trained.left[p] = 0
        self._versions.only(planner.ordered_parameters)
        if not self.sync.closed:
            self._late.watch(missing)

    def _clear_unused(self) -> None:
        """Set gradients to None that no rank has used, and for which nothing has arrived.

        So the optimizer neither decays these layers nor moves them by its momentum.
        """
        for place in self.sync.unused:
            p = self.reducer.planner.ordered_parameters[place]
            if p.grad is not None and all_zero(p.grad):
                p.grad = None
                self._versions.remove(p)

    # -- steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: nothing has arrived."""
        autograd_hooks.cancel(self)
        self._late.clear()
        self._exchange.submitted.clear()
        self._versions.clear()
        self.sync.begin()
        self._trained.begin()

    def begin_anew(self, explicit: bool = False) -> None:
        """Begin a step; if the last one was reduced and not applied, roll its exchange back.

        Args:
            explicit: the user has called `discard_step`, so no warning is needed.
        """
        reducer = self.reducer
        if self.reduced and not reducer.rolled_back:
            rolled_back = reducer.rollback()
            keeps = any(True for bucket in reducer.buckets for _ in leaves(bucket.state))
            if keeps and not (explicit or self._warned) and self._process_set.rank() == 0:
                LOGGER.warning(
                    "gradients that were reduced were dropped, without step(): %s. The compressor "
                    "is %s",
                    "what it keeps is as before their exchange. If they were applied by hand, pass "
                    "rollback=False to DistributedOptimizer"
                    if rolled_back
                    else "with rollback=False what it keeps of that step goes with later gradients",
                    reducer.planner.compressor,
                )
            self._warned = True
        self.begin()
        self.synchronized = False

    def abort_step(self) -> None:
        """Abort a step that has failed: the next backward begins another one."""
        self.reducer.scaling.reset()
        if self.reducer.started:
            self.abort_exchange()
        else:
            self._exchange.finish_step()
        self.begin()

    def abort_exchange(self) -> None:
        """Abort the exchange, e.g. after another rank's end; the ranks compare again."""
        self._exchange.abort()
        self.compare_again()

    def compare_again(self) -> None:
        """Repeat the configuration check before the next step."""
        self.check.reached = False
        self.reducer.clear_checksum()
        self.sync.clear()

    def clear(self, explicit: bool) -> None:
        """Drop gradients for `zero_grad`, reduced ones and those of an unfinished step.

        Args:
            explicit: the user has called `discard_step`.

        Raises:
            AssertionError: other ranks wait for the gradients that are being exchanged.
        """
        if self.travelling and self._process_set.size() == 1:
            self.abort_step()  # a backward that has failed; nobody waits for the rest of it
        if self.travelling:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(); "
                "it would clear gradients that are being exchanged. Where backward() has raised an "
                "error the other ranks wait for this one: call step() to go on with the gradients "
                "that there are, or end the process"
            )
        self.begin_anew(explicit)
        self.reducer.sources.clear()
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
                for p in reducer.planner.places:
                    # What passes of an unfinished step have brought stays.
                    if p not in self._exchange.submitted:
                        p.grad = None
                        tracker.discard(p)
                if not (yield from self.agree_and_reduce(last=True, joined=True)):
                    return
                self.begin()
        finally:
            reducer.joined = False
            self.synchronized = False

    # -- parameters --------------------------------------------------------------------------

    def join_parameters(self) -> None:
        """Add parameters to the exchange that train now and are not in it yet.

        Raises:
            ValueError: the compressor cannot take them in; see `BucketPlanner.add`.
        """
        new = self._trained.outside(self.reducer.planner.places)
        if new:
            self.reducer.add([(self._names[p], p) for p in new])
            self.check.reached = False
            self._hooks.watch(new)

    def add_last_group(self) -> None:
        """Name the parameters of the optimizer's last group, and let them join.

        Raises:
            ValueError: a name belongs to another parameter, or see `join_parameters`; the names
                are as before.
        """
        new = self._trained.name_last_group()
        try:
            self.join_parameters()
        except ValueError:
            self._trained.remove(new)
            raise


synchronizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, GradSynchronizer] = (
    weakref.WeakKeyDictionary()
)
"""Those of the distributed optimizers of this rank."""


def synchronizer_of(item: Any) -> GradSynchronizer | None:
    """Return the synchronizer of a distributed optimizer; None of everything else."""
    return synchronizers.get(item) if isinstance(item, torch.optim.Optimizer) else None


def groups_of(optimizer: torch.optim.Optimizer) -> Callable[[], list[dict[str, Any]]]:
    """Return what returns an optimizer's groups, without keeping the optimizer alive."""
    reference = weakref.proxy(optimizer)
    return lambda: list(reference.param_groups)
