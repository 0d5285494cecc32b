"""`LocalSteps`: an optimizer that steps alone, and exchanges the change of parameters now and then.

See `algorithms.local_steps` for the method and its sources. The inner optimizer, its options,
schedulers and hooks are the user's own. The global parameters are copies; the outer optimizer is a
plain one over them, whose gradients are the reduced pseudogradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.local_steps import LocalSchedule, OuterSGD, cut
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.stats import CompressionStats, combined
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.torch.bucket import Named
from hvd_gradcomp.torch.momentum import MomentumTransfer, resolve_compressor
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.reducer import Reducer, sum_of_bits
from hvd_gradcomp.torch.step_sync import OutOfStepError
from hvd_gradcomp.torch.tensor_exchange import Connection, TensorExchange

LOGGER = logging.getLogger("hvd_gradcomp")
_KEPT = "gradcomp"  # in a state_dict: what is not the inner optimizer's
_PRIME = 2**31 - 1
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtypes of global copies

Outer = Any  # OuterSGD, or a function that makes an optimizer from a list of parameters


@dataclass
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        parameters: of the model.
        copies: the global parameters, in float32 if the model's are narrower.
        exchange: of the pseudogradients.
        sent: pseudogradients that travel; None if none do.
        versions: of the model's parameters since the global ones were applied; None after a step.
    """

    parameters: list[torch.nn.Parameter]
    copies: list[torch.nn.Parameter]
    exchange: TensorExchange
    sent: list[torch.Tensor] | None = None
    versions: list[int] | None = field(default=None)

    def pseudogradients(self) -> list[torch.Tensor]:
        """Return the global parameters minus those of this rank; zeros where nothing trains."""
        return [
            c.detach() - p.detach() if p.requires_grad else torch.zeros_like(c)
            for c, p in zip(self.copies, self.parameters)
        ]

    def take_copies(self) -> None:
        """Set the global parameters to those of this rank."""
        for c, p in zip(self.copies, self.parameters):
            c.copy_(p)

    def hand_out(self, blend: float) -> None:
        """Set this rank's parameters to the global ones, blended with its own."""
        for c, p in zip(self.copies, self.parameters):
            if blend:
                p.copy_(blend * p + (1.0 - blend) * c)
            else:
                p.copy_(c)
        self.versions = None if blend else [p._version for p in self.parameters]

    def follow_changes(self) -> None:
        """Take parameters that were set since the global ones were applied, by a load say."""
        if self.versions is not None and self.versions != [p._version for p in self.parameters]:
            self.take_copies()
        self.versions = None

    def digest(self) -> int:
        """Return a checksum of the global parameters."""
        return int(sum(sum_of_bits(c) % _PRIME for c in self.copies)) % _PRIME


class LocalStepsOptimizer(torch.optim.Optimizer):
    """Optimizer that steps alone, and exchanges pseudogradients; `LocalSteps` makes it.

    It is the inner optimizer to everybody who asks for groups, state, options and hooks.

    Args:
        optimizer: the inner one.
        named_parameters: (name, parameter) of all that it trains; by place if None.
        connect: returns the connection of one exchange, by its name; all ranks call it alike.
        schedule: of the exchanges.
        outer: the outer optimizer, or what makes it from a list of the global parameters.
        compression: of the pseudogradients, as in `DistributedOptimizer`.
        stock: Horovod's `Compression`, if there is Horovod.
        named_buffers: buffers whose mean over ranks is taken with the last fragment.
        bucket_bytes, nonfinite: as in `DistributedOptimizer`.

    Attributes:
        schedule: of the exchanges.
        outer: the outer optimizer, over the global parameters; a scheduler of its own may drive it.
        steps_made: local steps so far, skipped ones included.
        exchanges: pseudogradients of the whole model that were applied so far.
    """

    _step_supports_amp_scaling = True  # so a step is counted in which a GradScaler finds infinities

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        connect: Callable[[str], Connection],
        schedule: LocalSchedule,
        outer: Outer,
        compression: Any,
        *,
        stock: Any = None,
        named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
    ) -> None:
        # Options, groups and state are the inner optimizer's: nothing of the base class is set up.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer= takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if isinstance(optimizer, LocalStepsOptimizer):
            raise ValueError(
                "optimizer= takes local steps already: pass the optimizer inside of it"
            )
        if isinstance(optimizer, torch.optim.LBFGS) and schedule.warmup_steps:
            raise ValueError(
                "warmup_steps= averages the gradients of a step once, and LBFGS computes them many "
                "times: use warmup_steps=0"
            )
        if nonfinite not in (None, "raise", "skip"):
            raise ValueError(
                f"nonfinite must be 'raise', 'skip' or None, got {nonfinite!r}: there is no "
                "mean of parameters that are not finite"
            )
        self._inner, self.schedule = optimizer, schedule
        named = _named(optimizer, named_parameters)
        self._skips = nonfinite == "skip"
        options = ExchangeOptions(bucket_bytes=bucket_bytes, nonfinite=nonfinite, scaler=False)
        copies = [torch.nn.Parameter(_wide(p)) for _, p in named]
        self.outer = _outer_of(outer, copies)
        compressor, own = resolve_compressor(compression, self.outer, stock)
        self._transfer = None if own is None else MomentumTransfer(self.outer, *own)
        settings = f"{schedule}, outer={_described(self.outer)}, {nonfinite=}, {bucket_bytes=}"
        self._fragments = []
        for number, places in enumerate(cut([p.numel() for _, p in named], schedule.fragments)):
            own_named = [named[place] for place in places]
            held = [copies[place] for place in places]
            exchange = TensorExchange(
                [(name, c) for (name, _), c in zip(own_named, held)],
                own_named,
                compressor,
                connect(f"local{number}"),
                options,
                settings,
            )
            self._fragments.append(Fragment([p for _, p in own_named], held, exchange))
        self._warmup = self._averaging(named, connect, "warmup") if schedule.warmup_steps else None
        buffers = [(n, b) for n, b in named_buffers or () if b.is_floating_point()]
        self._buffers = [b for _, b in buffers]
        self._averager = self._averaging(buffers, connect, "buffers") if buffers else None
        self._names = [name for name, _ in named]
        self.steps_made = self.exchanges = 0
        self._started = False

    @staticmethod
    def _averaging(named: Any, connect: Callable[[str], Connection], name: str) -> TensorExchange:
        """Return an exchange of dense means; what is not finite counts as skipped."""
        shapes = [(n, torch.nn.Parameter(_wide(x))) for n, x in named]
        options = ExchangeOptions(nonfinite="skip", scaler=False)
        return TensorExchange(shapes, shapes, NoneCompressor(), connect(name), options, name)

    # -- the inner optimizer -------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's groups."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:
        """Return the inner optimizer's state, which belongs to this rank."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's default options."""
        return self._inner.defaults

    def __repr__(self) -> str:
        return f"LocalSteps({self.schedule}, {self._inner!r})"

    def __getstate__(self) -> Any:
        raise TypeError(
            "an optimizer with local steps cannot be copied or pickled: save and load what it "
            "keeps by state_dict() and load_state_dict(), on each rank its own"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the inner optimizer does."""
        self._inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the global parameters are those that there were when it was made."""
        raise RuntimeError(
            "add_param_group() comes too late for the global parameters: add the group to the "
            "inner optimizer, and make LocalSteps anew, on all ranks"
        )

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook of the inner optimizer."""
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook of the inner optimizer."""
        return self._inner.register_step_post_hook(hook)

    # -- one step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer; exchange where the schedule says so.

        Raises:
            OutOfStepError: on all ranks, if they have made different numbers of steps.
            DivergedError: on all ranks, if their global parameters differ.
            MismatchError: on all ranks, in the first exchange, if they train different models.
            NonFiniteGradientError: on all ranks, if the parameters of one of them are not finite;
                with nonfinite="skip" all ranks go back to the global parameters instead.
        """
        self._begin()
        step = self.steps_made + 1
        found_inf = self._unscale()
        if self._warmup is not None and self.schedule.warms_up(step):
            loss = self._warm_step(self._warmup, closure, found_inf)
        else:
            loss = None if found_inf else self._inner.step(closure)
        self.steps_made = step
        for number in self.schedule.applies(step) if self.schedule.delay else ():
            self._apply(number)
        for number in self.schedule.sends(step):
            self._send(number)
            if not self.schedule.delay:
                self._apply(number)
        if step == self.schedule.warmup_steps:
            self._take_copies()
        return loss

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange now, whatever the schedule says: at the end of a training, or of an epoch.

        All ranks call it at the same place, also if they have made different numbers of steps
        since the last exchange. What travels is applied first. Afterwards all ranks have the
        global parameters, and the schedule begins again.

        Raises:
            OutOfStepError: on all ranks, if others are in the exchange of a step.
        """
        self._begin()
        for number, fragment in enumerate(self._fragments):
            if fragment.sent is not None:
                self._apply(number)
        for number, fragment in enumerate(self._fragments):
            steps = self._send(number, asked=True)
            self._apply(number)
            fragment.hand_out(0.0)
        rounds = max(0, max(steps) - self.schedule.warmup_steps + self.schedule.every - 1)
        rounds //= self.schedule.every
        self.steps_made = self.schedule.warmup_steps + rounds * self.schedule.every

    @torch.no_grad()
    def restart(self) -> None:
        """Take this rank's parameters as the global ones, after they were set in mid-training.

        All ranks call it, with equal parameters: the next exchange compares them. What travels is
        dropped. Not needed before the first step, nor directly after an exchange without `blend`.
        """
        for fragment in self._fragments:
            fragment.exchange.abort()
            fragment.sent = None
        self._take_copies()

    @torch.no_grad()
    def _take_copies(self) -> None:
        for fragment in self._fragments:
            fragment.take_copies()
            fragment.versions = None

    @torch.no_grad()
    def _begin(self) -> None:
        """Take what the user has set since the last step."""
        if not self._started:
            self._started = True
            self._take_copies()
        for fragment in self._fragments:
            fragment.follow_changes()
            if fragment.sent is not None and not fragment.exchange.started:  # it was loaded
                fragment.exchange.start(fragment.sent)

    def _unscale(self) -> bool:
        """Unscale gradients as a GradScaler asks for it; return True if it has found infinities."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            factor = scale.double().reciprocal().float()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(factor.to(p.grad.device))
        return found is not None and bool(found)

    def _warm_step(
        self, warmup: TensorExchange, closure: Callable[[], Any] | None, found_inf: bool
    ) -> Any:
        """Average the gradients, then step the inner optimizer; on all ranks or on none."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for fragment in self._fragments for p in fragment.parameters]
        self._compare(warmup, _WARMUP, asked=False)
        with torch.no_grad():
            warmup.start([_gradient(p) for p in parameters])
            means = warmup.finish()
        if means is None:
            if not (found_inf or hasattr(self, "found_inf") or self._skips):
                raise NonFiniteGradientError(
                    f"a gradient of some rank is not finite in step {self.steps_made + 1}"
                )
            return loss
        for p, mean in zip(parameters, means):
            if p.requires_grad:
                p.grad = mean.to(p.dtype, copy=True)
        self._inner.step()
        return loss

    @torch.no_grad()
    def _send(self, number: int, asked: bool = False) -> list[int]:
        """Send a fragment's pseudogradients; return the steps that each rank has made."""
        fragment = self._fragments[number]
        steps = self._compare(fragment.exchange, number, asked, fragment.digest())
        fragment.sent = fragment.pseudogradients()
        fragment.exchange.start(fragment.sent)
        return steps

    @torch.no_grad()
    def _apply(self, number: int) -> None:
        """Step the outer optimizer by a fragment's reduced pseudogradients."""
        fragment = self._fragments[number]
        fragment.sent = None
        means = fragment.exchange.finish()
        if means is None:
            LOGGER.warning(
                "parameters of some rank were not finite: all ranks go back to the global ones, "
                "and lose up to %d steps",
                self.schedule.every,
            )
            fragment.hand_out(0.0)
            return
        for c, p, mean in zip(fragment.copies, fragment.parameters, means):
            c.grad = mean if p.requires_grad else None
        if self._transfer is not None:
            self._transfer.check()
            self._transfer.decay()
        with torch.enable_grad():
            self.outer.step()
        for c in fragment.copies:
            c.grad = None
        blend = self.schedule.blend
        assert blend is not None
        fragment.hand_out(blend)
        if number == len(self._fragments) - 1:
            self.exchanges += 1
            self._average_buffers()

    def _average_buffers(self) -> None:
        if self._averager is None:
            return
        self._averager.start(self._buffers)
        means = self._averager.finish()
        for buffer, mean in zip(self._buffers, means or ()):
            buffer.copy_(mean)

    def _compare(
        self, exchange: TensorExchange, what: int, asked: bool, digest: int = 0
    ) -> list[int]:
        """Compare what the ranks are about to exchange; return the steps that each has made.

        Raises:
            OutOfStepError: on all ranks, if it is something else.
            DivergedError: on all ranks, if their global parameters differ.
        """
        words = [what, int(asked), exchange.reducer.steps, self.steps_made, digest]
        every = exchange.compare(words)
        if len({(w, a, n, 0 if a else s) for w, a, n, s, _ in every.values()}) > 1:
            listed = ", ".join(
                f"rank {rank} after {s} steps{' in exchange()' * a}, with {n} exchanges before it"
                for rank, (_, a, n, s, _) in every.items()
            )
            raise OutOfStepError(
                f"the ranks are in different exchanges: {listed}. Call step() equally often on all "
                "ranks, exchange() on all or none, and load the same checkpoint on all ranks"
            )
        if len({digest for *_, digest in every.values()}) > 1:
            raise DivergedError(
                "the global parameters of the ranks differ before an exchange; digests by rank: "
                f"{ {rank: digest for rank, (*_, digest) in every.items()} }. Give all ranks the "
                "same parameters at first, by broadcast_parameters or a seed, and call restart() "
                "on all of them after setting parameters in mid-training"
            )
        return [steps for *_, steps, _ in every.values()]

    # -- what it keeps, and what it has done ---------------------------------------------------

    @property
    def reducers(self) -> list[Reducer]:
        """Return the reducer of each fragment."""
        return [fragment.exchange.reducer for fragment in self._fragments]

    @property
    def other_reducers(self) -> list[Reducer]:
        """Return those of gradients in the first steps, and of buffers."""
        return [each.reducer for each in (self._warmup, self._averager) if each is not None]

    def stats(self) -> CompressionStats:
        """Return the measured traffic of this rank so far; `steps` are local steps.

        So `ratio` compares with an exchange of dense gradients in every step.
        """
        fragments = [reducer.stats() for reducer in self.reducers]
        others = [reducer.stats() for reducer in self.other_reducers]
        return combined(fragments, others, self.steps_made)

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer on this rank."""
        return self._inner.state_dict()

    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """Return the inner optimizer's state, and under "gradcomp" all that belongs to the rounds.

        Each rank saves its own: inner state and local parameters differ between exchanges.
        `hvd.save_checkpoint` does so; it calls this with mode="consolidated" for a checkpoint that
        any number of ranks loads, which begin with the global parameters.
        """
        fragments = [
            {
                "global": [c.detach().clone() for c in fragment.copies],
                "local": [p.detach().clone() for p in fragment.parameters],
                "sent": None if fragment.sent is None else [x.clone() for x in fragment.sent],
                "exchange": fragment.exchange.save(mode),
            }
            for fragment in self._fragments
        ]
        outer = self.outer.state_dict()
        kept = {
            "schedule": repr(self.schedule),
            "mode": mode,
            "names": self._names,
            "started": self._started,
            "steps": self.steps_made,
            "exchanges": self.exchanges,
            "outer": outer if self._transfer is None else self._transfer.restored(outer),
            "fragments": fragments,
            "warmup": None if self._warmup is None else self._warmup.save(mode),
            "buffers": None if self._averager is None else self._averager.save(mode),
        }
        state = {**self._inner.state_dict(), _KEPT: kept}
        return state if mode == "sharded" else common(state)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or that of a plain optimizer; after the model's.

        A rank that loads its own state goes on to the bit, with its own parameters. One that loads
        another rank's, or a consolidated one, goes on from the global parameters.

        Raises:
            CheckpointError: it is of another model, schedule, compressor or number of ranks.
        """
        kept = state_dict.get(_KEPT)
        if kept is None:
            self.load_inner(state_dict)
            self.restart()
            return
        self._check_fits(kept)
        self.load_inner(state_dict)
        for fragment, saved in zip(self._fragments, kept["fragments"]):
            fragment.exchange.load(saved["exchange"])
        for exchange, name in ((self._warmup, "warmup"), (self._averager, "buffers")):
            if exchange is not None and kept[name] is not None:
                exchange.load(kept[name])
        self.load_rounds(state_dict)

    @torch.no_grad()
    def load_rounds(self, state_dict: dict[str, Any]) -> None:
        """Load what `load_state_dict` does but the inner optimizer and what compressors keep."""
        kept = state_dict[_KEPT]
        self.outer.load_state_dict(kept["outer"])
        if self._transfer is not None:
            self._transfer.take()
        for fragment, saved in zip(self._fragments, kept["fragments"]):
            fragment.exchange.abort()
            for c, value in zip(fragment.copies, saved["global"]):
                c.copy_(value)
            own, fragment.sent, fragment.versions = _is_own(fragment, saved), None, None
            if own and saved["sent"] is not None:
                fragment.sent = [x.to(c.device) for x, c in zip(saved["sent"], fragment.copies)]
            if kept["started"]:
                local = saved["local"] if own else saved["global"]
                for p, value in zip(fragment.parameters, local):
                    p.copy_(value)
        self._started = kept["started"]
        self.steps_made, self.exchanges = kept["steps"], kept["exchanges"]

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state alone."""
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != _KEPT})

    def compare_again(self) -> None:
        """Compare the settings of all ranks again before the next exchange."""
        exchanges = [fragment.exchange for fragment in self._fragments]
        for exchange in (*exchanges, self._warmup, self._averager):
            if exchange is not None:
                exchange.compare_again()

    def _check_fits(self, kept: Any) -> None:
        mine = {"schedule": repr(self.schedule), "names": self._names}
        for what, value in mine.items():
            found = kept.get(what) if isinstance(kept, dict) else kept
            if found != value:
                raise CheckpointError(
                    f"the state was saved with another {what}: {found}, and here it is {value}"
                )


_WARMUP = -1  # said in the place of a fragment


def _named(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> Named:
    """Return (name, parameter) of what the optimizer trains, in the user's order.

    Raises:
        ValueError: a parameter has no name, or two have the same.
    """
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if named_parameters is None:
        return [(f"parameter.{place}", p) for place, p in enumerate(trained)]
    names: dict[torch.nn.Parameter, str] = {}
    for name, p in named_parameters:
        names.setdefault(p, name)
    wanted = set(trained)
    named = [(name, p) for p, name in names.items() if p in wanted]
    if len(named) < len(wanted):
        raise ValueError(
            f"named_parameters= names {len(named)} of the {len(wanted)} parameters that the "
            "optimizer trains: pass model.named_parameters() of the whole model"
        )
    if len({name for name, _ in named}) < len(named):
        raise ValueError("named_parameters= gives the same name to several parameters")
    return named


def _wide(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=_WIDE.get(x.dtype, x.dtype), requires_grad=False)


def _outer_of(outer: Any, copies: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer over the global parameters.

    Raises:
        TypeError: it is neither settings nor something that makes an optimizer.
    """
    if isinstance(outer, OuterSGD):
        nesterov = bool(outer.nesterov)
        return torch.optim.SGD(copies, outer.lr, outer.momentum, nesterov=nesterov)
    made = outer(copies) if callable(outer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "outer= takes OuterSGD(lr=..., momentum=...), or a function that makes a "
            f"torch.optim.Optimizer from a list of parameters, got {outer!r}"
        )
    return made


def _described(optimizer: torch.optim.Optimizer) -> str:
    """Describe the options of an optimizer, which must be equal on all ranks."""
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return f"{type(optimizer).__name__}({options})"


def _gradient(p: torch.nn.Parameter) -> torch.Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad.to_dense() if p.grad.is_sparse else p.grad


def _is_own(fragment: Fragment, saved: Any) -> bool:
    """Return True if a fragment's state was saved by this rank, with its own parameters."""
    process_set = fragment.exchange.reducer.participants.process_set
    return saved["local"] is not None and saved["exchange"]["rank"] == process_set.rank()


def common(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that all ranks may go on from: the global parameters' rounds."""
    kept = state_dict[_KEPT]
    fragments = [{**each, "local": None, "sent": None} for each in kept["fragments"]]
    return {**state_dict, _KEPT: {**kept, "fragments": fragments}}
