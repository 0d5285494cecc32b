"""What the class of a distributed optimizer has beside PyTorch's: gradients that get reduced.

A hook takes each gradient when its last pass has accumulated it; the exchange of a bucket begins
with the last of its gradients. It ends with backward, in a callback of the autograd engine, as with
`DistributedDataParallel`: then `p.grad` holds the reduced gradient, and clipping, unscaling, norms
and surgery mean what they mean everywhere. What no backward has brought is left to `synchronize`
and `step`, and so is what `rounds` does not let end before.

What is changed where it cannot be honoured is an error on all ranks: gradients carry a version.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import optimizer as _stock

from hvd_gradcomp.torch import checkpoint, digests, lending, moments, parameters
from hvd_gradcomp.torch.engine import Engine
from hvd_gradcomp.torch.rounds import (
    CHANGED,
    HERE,
    LATE,
    SPARSE,
    GradientChangedError,
    OutOfStepError,
    Rounds,
    Word,
    all_plain,
    all_set_alike,
    any_told,
    changed_alone,
    digest_of,
    read,
    usual,
)

_SUPPORTS_SCALING = "_step_supports_amp_scaling"  # as PyTorch calls it
_STOCK: Any = _stock._DistributedOptimizer
# torch.compile leaves what is marked so as it is, and all that it calls. PyTorch marks its own
# optimizers' methods with it; before 2.1 there is none.
_interpreted: Any = getattr(torch, "_disable_dynamo", lambda function: function)
_OF_EACH_CLASS = ("__dict__", "__weakref__", "__module__", "__doc__")
_Version = tuple[Any, int]  # of a gradient: the tensor, and how often it was written to

# Optimizers with news, by the autograd engine's run in which their hooks have fired.
_backwards: dict[int, weakref.WeakSet[Any]] = {}


class _LeftOutError(Exception):
    """Leaves an optimizer's step from within its closure."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Exchanging:
    """An optimizer whose gradients are exchanged; `DistributedOptimizer` makes it."""

    # Horovod's.
    _allreduce_delay: dict[Any, int]
    _handles: dict[Any, Any]
    _parameter_names: dict[Any, str]
    _requires_update: set[Any]
    _should_synchronize: bool
    _synchronized: bool
    backward_passes_per_step: int
    op: Any
    param_groups: list[dict[str, Any]]
    process_set: Any
    sparse_as_dense: bool

    def _exchange_by(self, engine: Engine, takeover: Any, verify_every: int) -> None:
        """Begins to watch gradients. Horovod has made the rest of the optimizer."""
        self._gradcomp, self._takeover, self._verify_every = engine, takeover, verify_every
        self._rounds: Rounds = engine.rounds
        lending.waiting.among(engine.process_set)
        self._news = False  # since the last round
        self._versions: dict[Any, _Version] = {}  # of gradients that were taken, or reduced
        self._late: dict[Any, torch.Tensor] = {}
        self._late_hooks: list[Any] = []
        self._watched: dict[Any, Any] = {}
        self._accumulators: list[Any] = []  # they live as long as somebody refers to them
        self._watch(engine.parameters)
        parameters.take_over(self, engine.parameters)

    def _plain(self) -> Any:
        """The methods of the optimizer that was wrapped; this one's class may have heirs."""
        ours = next(cls for cls in type(self).__mro__ if "_exchange_by" in vars(cls))
        return super(ours, self)

    def _register_hooks(self) -> None:
        """Horovod would, before there is anything to exchange by."""

    # -- gradients arrive --------------------------------------------------------------------

    def _watch(self, new: Collection[torch.nn.Parameter]) -> None:
        for p in new:
            if p in self._watched:
                continue
            with torch.enable_grad():
                accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
            self._watched[p] = accumulator.register_hook(_hook(weakref.ref(self), p))
            self._accumulators.append(accumulator)

    def _arrive(self, p: torch.nn.Parameter) -> None:
        """A pass has added to the gradient of a parameter."""
        if p.grad is not None and p.grad.requires_grad:
            raise AssertionError(
                f"the gradient of {self._parameter_names[p]} requires a gradient itself: "
                "backward(create_graph=True) cannot be exchanged. Use torch.autograd.grad for "
                "higher derivatives"
            )
        if p in self._late:
            self._versions[p] = _version(p)  # a zero was added
            self._gradcomp.sources.forget([p])
            self._at_end_of_backward()
            return
        if p.grad is None:
            raise RuntimeError(
                f"the gradient of {self._parameter_names[p]} was gone before it could be "
                "exchanged: a hook of the parameter steps or clears it. Step after backward()"
            )
        if self._rounds.ended or self._allreduce_delay[p] <= 0:
            known = self._versions.get(p)
            if not self._rounds.ended or (known is not None and p.grad is known[0]):
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call "
                    "to step(). Increase backward_passes_per_step to accumulate gradients locally."
                )
            self._begin()  # the reduced gradients were dropped, by `model.zero_grad()` say
        self._synchronized = False
        self._allreduce_delay[p] -= 1
        self._handles[p] = (None, None)
        if self._allreduce_delay[p] == 0:
            self._handles[p] = self._allreduce_grad_async(p)
            self._at_end_of_backward()
        self._versions[p] = _version(p)

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> tuple[Callable[[], Any], None]:
        """Gives a gradient away; what stands for it reduces it, and is no handle of Horovod's."""
        engine = self._gradcomp
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if self._goes_sparse(p):
            engine.give_sparse(p, p.grad)
            return self._gather_rows(p, p.grad), None
        engine.give(p, p.grad.to_dense() if p.grad.is_sparse else p.grad)
        return lambda: engine.take(p), None

    def _goes_sparse(self, p: torch.nn.Parameter) -> bool:
        return p.grad is not None and p.grad.is_sparse and not self.sparse_as_dense

    def _gather_rows(self, p: torch.nn.Parameter, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gathers a sparse gradient; what comes back waits for those of all ranks, and adds up."""
        average, name = self.op == horovod.Average, self._parameter_names[p]
        wait = lending.sparse_allreduce(rows, name, self.process_set, average)
        return lambda: self._gradcomp.take_sparse(wait())

    def _at_end_of_backward(self) -> None:
        self._news = True
        run = _RUN_OF_ENGINE()
        if run not in _backwards:
            _backwards[run] = weakref.WeakSet()
            callback = functools.partial(_backward_has_ended, run)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        _backwards[run].add(self)

    # -- the exchange ends -------------------------------------------------------------------

    def _ending(self, last: bool) -> Iterator[None]:
        """Rounds until the exchange has ended here; yields while it waits for other ranks.

        Args:
            last: no gradient comes any more in this step: goes on until none can come anywhere.
        """
        engine, rounds = self._gradcomp, self._rounds
        try:
            while not rounds.closed:
                self._news = False
                parameters.join(self)
                engine.agreement.agree()
                words = yield from self._tell(last)
                ended = rounds.ended
                names = [self._parameter_names[p] for p in engine.ordered_parameters]
                ranks = self.process_set.ranks or range(len(words))
                try:
                    late = rounds.hear(words, names, ranks)
                except GradientChangedError:
                    if not ended:  # so that nothing of it is left on its way
                        yield from self._end()
                    raise
                except OutOfStepError:
                    engine.abandon()
                    raise
                if rounds.ended and not ended:
                    yield from self._end()
                yield from self._add_late([engine.ordered_parameters[i] for i in late])
                if not last:
                    return
        except BaseException:  # an interrupt in the middle, too
            self._abandon()
            raise

    def _tell(self, last: bool) -> Any:
        """One round: this rank's word to all, and theirs."""
        engine = self._gradcomp
        codes = self._codes()
        watch, known = lending.waiting.among(self.process_set), self._rounds.sparse
        settings = digest_of(engine.in_step)
        summed = engine.summed
        word = Word(engine.steps, last, self._rounds.ended, codes, settings, summed, watch.pending)
        heads = yield from engine.agreement.tell(word.head(known), "end")
        if any_told(heads):
            watch.settle()
        if not all_set_alike(heads):
            engine.compare_step()
        layers: Sequence[Sequence[int]] = [usual(len(codes), known)] * len(heads)
        if not all_plain(heads):
            layers = yield from engine.agreement.tell(codes, "end.layers")
        return read(heads, layers)

    def _codes(self) -> list[int]:
        return [self._code(p) for p in self._gradcomp.ordered_parameters]

    def _code(self, p: torch.nn.Parameter) -> int:
        taken = p in self._handles and self._handles[p][0] is not None
        here = taken or self._rounds.ended or not p.requires_grad
        sparse = taken and self._goes_sparse(p)
        changed = p in self._versions and not _is(self._versions[p], p)
        return HERE * here | SPARSE * sparse | LATE * (p in self._late) | CHANGED * changed

    def _end(self) -> Iterator[None]:
        """Ends the exchange, with zeros for what has not come; `p.grad` is reduced then."""
        engine = self._gradcomp
        engine.order_is_known()
        parameters.leave_out(self, engine.begin())
        order = engine.ordered_parameters
        missing = []
        for place, p in enumerate(order):
            if p in self._requires_update and self._handles.get(p, (None, None))[0] is None:
                missing.append(p)
                if p.grad is None and place in self._rounds.sparse - self._rounds.both:
                    p.grad = _no_rows(p)
                self._handles[p] = self._allreduce_grad_async(p)
        for place in sorted(self._rounds.both):
            self._add_up_both(order[place])
        try:
            yield from engine.finishing()
            _STOCK.synchronize(self)
        finally:
            engine.clear()
        self._synchronized = False
        for p in order:
            self._allreduce_delay[p] = 0
        self._versions = {p: _version(p) for p in order if p.grad is not None}
        if not self._rounds.closed:
            self._late_hooks = [
                p.register_hook(self._late_hook(p)) for p in missing if p.requires_grad
            ]

    def _add_up_both(self, p: torch.nn.Parameter) -> None:
        """A gradient that is sparse on some ranks and dense on others becomes dense on all."""
        if self._goes_sparse(p):
            rows = self._handles[p][0]
            p.grad = torch.zeros_like(p)
        else:
            rows = self._gather_rows(p, _no_rows(p))
        self._handles[p] = (lambda: self._gradcomp.take(p).add(rows()), None)

    def _late_hook(self, p: torch.nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """Keeps what a later pass brings away from the gradient, which is reduced already."""

        def hook(contribution: torch.Tensor) -> torch.Tensor | None:
            if p.grad is not self._versions[p][0]:
                return None  # the reduced gradient was dropped: this one begins a step
            dense = contribution.to_dense() if contribution.is_sparse else contribution
            known = self._late.get(p)
            self._late[p] = dense.detach().clone() if known is None else known + dense
            moments.discard(p)
            return torch.zeros_like(contribution)

        return hook

    def _add_late(self, late: list[torch.nn.Parameter]) -> Iterator[None]:
        """Adds up what came after the end, uncompressed."""
        engine = self._gradcomp
        average = 1.0 / self.process_set.size() if self.op == horovod.Average else 1.0
        loans = []
        for p in late:
            mine = self._late.pop(p, None)
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            mine = torch.zeros_like(p, dtype=wide) if mine is None else mine.to(wide)
            engine.count(mine)
            name = f"{engine.name}.late.{self._parameter_names[p]}"
            mine = mine.contiguous()
            loans.append((p, lending.allreduce(mine, name, self.process_set, 1.0, average)))
        poisoned = []
        for p, loan in loans:
            while not loan.ready():
                yield
            total = loan.wait().to(p.dtype)
            if not bool(total.isfinite().all()):
                poisoned.append(self._parameter_names[p])
            with torch.no_grad():
                reduced = p.grad.to_dense() if p.grad.is_sparse else p.grad
                reduced.add_(total)
                if p.grad.is_sparse:
                    p.grad = reduced.to_sparse()
            self._versions[p] = _version(p)
        if poisoned:
            engine.poisoned(
                f"a gradient of {', '.join(poisoned)} that came late has a NaN or an infinity on "
                "one of the ranks"
            )

    @property
    def exchanging(self) -> bool:
        """Whether a step has begun: from its first gradient to the end of `step`."""
        return bool(self._handles) or self._rounds.ended

    def _travelling(self) -> bool:
        """Whether gradients were taken that are not reduced yet."""
        return any(handle is not None for handle, _ in self._handles.values())

    def _has_everything(self) -> bool:
        return all(code & (HERE | LATE) for code in self._codes())

    def _begin(self) -> None:
        """Begins a step: nothing has arrived."""
        for hook in self._late_hooks:
            hook.remove()
        self._late_hooks = []
        for run in [run for run, those in _backwards.items() if self in those]:
            _backwards[run].discard(self)  # a backward that has failed, or was compiled
            if not _backwards[run]:
                del _backwards[run]
        self._late.clear()
        self._handles.clear()
        self._versions.clear()
        self._rounds.begin()
        for p in self._allreduce_delay:
            self._allreduce_delay[p] = self.backward_passes_per_step

    def _abandon(self) -> None:
        """The exchange has failed: the next backward begins a step."""
        self._gradcomp.give_up()
        self._begin()

    def _check_mixed(self) -> None:
        """Gradients were reduced for some ranks in backward, and for others in `step`.

        Raises:
            GradientChangedError: they have changed since, which those others could not do.
        """
        changed = [p for p in self._versions if not _is(self._versions[p], p)]
        if self._rounds.closed and self._rounds.mixed and changed:
            name = self._parameter_names[changed[0]]
            self._begin()
            raise GradientChangedError(changed_alone(name, self.process_set.rank()))

    # -- what a user calls -------------------------------------------------------------------

    @_interpreted
    def synchronize(self) -> None:
        """Ends the exchange, where it has not ended with backward: `p.grad` is reduced then.

        Raises:
            GradientChangedError: on all ranks, if a gradient was changed that was not reduced.
            OutOfStepError: on all ranks, if they are in different steps.
        """
        if self._synchronized and not self.exchanging:
            return  # a second exchange would add to the residual what was exchanged
        self._check_mixed()
        lending.complete([self._ending(last=True)])
        self._begin()
        self._synchronized = True

    @_interpreted
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the reduced gradients; ends the exchange first if it has not ended."""
        if self._takeover is not None:
            self._takeover.check()
        self._gradcomp.scaling.check_stepped(self)
        loss = self._step(closure)
        if self._verify_every and self._gradcomp.steps % self._verify_every == 0:
            digests.check(self._gradcomp)
        return loss

    # PyTorch would wrap it once more, as it has wrapped that of the optimizer's class, and the
    # hooks of `register_step_pre_hook` would run twice.
    step.hooked = True

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        engine = self._gradcomp
        if closure is None or not self._should_synchronize:
            if self._should_synchronize:
                self.synchronize()
            self._check_mixed()
            if self._travelling():
                raise AssertionError(
                    "step() was called under skip_synchronize() while gradients are being "
                    "exchanged: call synchronize() before it"
                )
            self._begin()
            self._synchronized = False
            self._decay()
            return None if engine.leaves_out else self._plain().step(closure)

        def reduced_closure() -> Any:
            # Horovod reduces before the closure computes the gradients; they are reduced here.
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            self._decay()
            if engine.leaves_out:
                raise _LeftOutError(loss)
            return loss

        self._synchronized = False
        try:
            return self._plain().step(reduced_closure)
        except _LeftOutError as left_out:
            return left_out.loss

    def _decay(self) -> None:
        if self._takeover is not None and not self._gradcomp.undone:
            self._takeover.decay()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`GradScaler.step` asks for this before it looks at gradients: here they get reduced."""
        if self.exchanging and self._should_synchronize:
            self.synchronize()
        return bool(vars(self).get(_SUPPORTS_SCALING, False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)[_SUPPORTS_SCALING] = value

    @_interpreted
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, reduced ones and those of passes of an unfinished step."""
        if self._travelling():
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(); "
                "it would clear gradients that are being exchanged. Where backward() has raised an "
                "error the other ranks wait for this one: call step() to go on with the gradients "
                "that there are, or end the process"
            )
        self._begin()
        self._synchronized = False
        self._gradcomp.sources.forget()
        for parameter in self._parameter_names:
            moments.discard(parameter)
        parameters.join(self)  # what has thawed is reduced when the next backward ends
        self._plain().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's; the parameters join the exchange, on all ranks before the same step.

        What the group does not say is as in the optimizer that was wrapped. In stock Horovod it is
        as in an optimizer of that class which was told nothing: SGD(lr=1.0) trains it at 0.001.
        """
        if not hasattr(self, "_gradcomp"):  # PyTorch adds the first ones
            self._plain().add_param_group(param_group)
            return
        if self.exchanging:
            raise RuntimeError(
                "add_param_group() was called after backward() and before step(): parameters join "
                "between steps, on all ranks between the same two"
            )
        self._plain().add_param_group(param_group)
        names = dict(self._parameter_names)
        try:
            if self._takeover is not None:
                self._takeover.take()
            parameters.name(self, self.param_groups[-1])
            parameters.join(self)
        except ValueError:
            self.param_groups.pop()
            self._parameter_names = names
            raise

    def plain_state_dict(self) -> dict[str, Any]:
        """The state of the optimizer that was wrapped."""
        return self._plain().state_dict()

    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """With what the compressor keeps: this rank's, or that of all ranks, which all call it.

        See `hvd.save_checkpoint` for the two modes.
        """
        plain = self.plain_state_dict()
        if self._takeover is not None:
            plain = self._takeover.restored(plain)
        return {**plain, "gradcomp": checkpoint.save(self._gradcomp, mode)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, or that of an optimizer that is not distributed.

        After an error everything is as it was, but for an exchange that was on its way.
        """
        parameters.join(self)  # unfrozen since the optimizer was made, as in the run that saved
        plain = {key: value for key, value in state_dict.items() if key != "gradcomp"}
        if self.exchanging:
            self._abandon()
        undo = checkpoint.way_back(self)
        try:
            if "gradcomp" in state_dict:
                checkpoint.load(self._gradcomp, state_dict["gradcomp"])
            self._begin()
            self._synchronized, self._should_synchronize = False, True
            self._plain().load_state_dict(plain)
            if self._takeover is not None:
                self._takeover.take()
        except Exception:
            undo()
            raise


def class_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of a distributed optimizer: Horovod's set-up, our exchange, PyTorch's update.

    All in one class, as Horovod makes it: its helpers reach past that one for what PyTorch does.
    """
    ours = {name: value for name, value in vars(Exchanging).items() if name not in _OF_EACH_CLASS}
    return type(
        type(optimizer).__name__,
        (type(optimizer),),
        {**vars(_STOCK), **ours, "__module__": _stock.__name__},
    )


def _hook(optimizer: weakref.ref[Any], p: torch.nn.Parameter) -> Callable[..., None]:
    @_interpreted
    def hook(*_: Any) -> None:
        there = optimizer()
        if there is None:
            return
        try:
            there._arrive(p)
        except BaseException:
            there._gradcomp.scaling.forget()
            raise

    return hook


@_interpreted
def _backward_has_ended(run: int) -> None:
    having_news = [optimizer for optimizer in _backwards.pop(run, ()) if optimizer._news]
    nested, function = _surroundings()
    early = [o for o in having_news if nested and not o._has_everything()]
    if early and function is not None:  # asks again at the end of the backward around this one

        def pass_on(*_: Any) -> None:
            for optimizer in early:
                optimizer._at_end_of_backward()

        function.register_hook(pass_on)
    # Of all optimizers at once: their hooks fire in another order on other ranks.
    lending.complete(o._ending(last=False) for o in having_news if o not in early)


def _surroundings() -> tuple[bool, Any]:
    """Whether this backward is part of another, as with reentrant checkpoints, and of what there.

    What is the function that has called it, None if it was none.
    """
    runs = 0
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is _APPLY:
            return True, frame.f_locals.get("self")
        runs += frame.f_code is _RUN
    return runs > 1, None


# Before PyTorch 2.1 `backward` calls the engine itself.
_RUN = getattr(torch.autograd.graph, "_engine_run_backward", torch.autograd.backward).__code__
_RUN_OF_ENGINE = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__


def _version(p: torch.nn.Parameter) -> _Version:
    assert p.grad is not None
    return p.grad, p.grad._version


def _is(version: _Version, p: torch.nn.Parameter) -> bool:
    return p.grad is version[0] and p.grad._version == version[1]


def _no_rows(p: torch.nn.Parameter) -> torch.Tensor:
    shape = (0, *p.shape[1:])
    indices = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(shape), p.shape, check_invariants=False)
