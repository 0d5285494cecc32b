"""Situations of users: two exchanges of one model, weights set and put back, calls in other modes.

Nobody makes a mistake alone here, as in `ranks`: all ranks do the same, and it is what people do.
Each case is held to an oracle, the same training without the situation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.chaos import ranks
from tests.chaos.outcomes import BAD, Input
from tests.chaos.ranks import Job

PAIRS, BACK, ANEW, AGAIN, MODES = "pairs", "back", "anew", "again", "modes"
ATTACKS = {
    PAIRS: "two exchanges of one model",
    BACK: "weights set and put back",
    ANEW: "new weights on all ranks",
    AGAIN: "made, trained and dropped, again and again",
    MODES: "calls in other modes, then more steps",
}
ALLOWED = ("DDP of one rank", "DDP of a host")  # what the documentation tells people to do
EVERY, STEPS = 3, 9  # local steps between two exchanges; steps of a training
GRAD_MODES = ("inference_mode", "no_grad", "set_grad_enabled(False)", "autocast", "compiled")
TF_MODES = ("a tape", "stop_recording", "mixed_bfloat16", "compiled")
METHODS = ("None", "QSGD", "Sparse GD", "1-bit", "Int8", "chunked", "PowerSGD")
SWAPS = ("copy_", "copy_, one rank", ".data", ".data, one rank", "load_state_dict")
TF_SWAPS = ("assign", "assign, one rank")
FIT_SWAPS = ("set_weights", "set_weights, one rank", "SwapEMAWeights")


class Case(NamedTuple):
    """One case, as a worker gets it.

    Attributes:
        kind: of `ATTACKS`.
        host: what exchanges.
        what: the other exchange, how weights are set, or the call.
        how: the mode, the order of wrapping, or the dtype.
        method: the compressor.
        step: after so many steps.
    """

    kind: str
    host: str
    what: str = ""
    how: str = ""
    method: str = "None"
    step: int = 0

    def __str__(self) -> str:
        return " | ".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Case:
        *words, step = text.split(" | ")
        return cls(*words, int(step))


class Host(NamedTuple):
    """An exchange, and what a user may do to it.

    Attributes:
        name: as users write it.
        calls: public ones, between steps.
        dtypes: of its models.
        pairs: (another exchange of the same model, in which order).
        swaps: how weights are set and put back.
        modes: in which calls are made.
        methods: compressors.
        drawn_methods: how many of them are drawn; each has an oracle of its own.
    """

    name: str
    calls: Sequence[str]
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16")
    pairs: Sequence[tuple[str, str]] = ()
    swaps: Sequence[str] = SWAPS
    modes: Sequence[str] = GRAD_MODES
    methods: Sequence[str] = METHODS
    drawn_methods: int = 3

    @property
    def is_local(self) -> bool:
        """Return True if weights are each rank's own between exchanges."""
        return "LocalSteps" in self.name


KEPT = ("make", "evaluate", "step", "state_dict", "load_state_dict", "verify", "stats", "zero_grad")
BY_HVD = ("allreduce", "broadcast_parameters", "save_checkpoint", "load_checkpoint")
ROUNDS = ("exchange", "restart")
IN_BACKWARD = ("discard_step", "retrain")
# In which order: of two wrappers the one that is named last is around, or comes later.
ORDERS = ("before", "after")
_BY_DDP = (
    *itertools.product(("DDP", "ddp.compress", "ddp.hook"), ORDERS),
    ("DDP of one rank", "before"),
)
_INSIDE = tuple(
    (name, "inside")
    for name in ("hvd.DistributedOptimizer", "Horovod's", "LocalSteps", "MomentumExchange")
)
_BESIDE = (("hvd.DistributedOptimizer", "beside"), ("LocalSteps", "beside"))
_SHARDED = (*((x, "before") for x in ("fully_shard", "fsdp.compress")), ("fsdp.compress", "after"))
MOMENTA = ("float32", "bfloat16")  # Adam's second moments underflow in float16

_HVD_LOCAL = Host("hvd.LocalSteps", (*KEPT, *BY_HVD, *ROUNDS), pairs=(*_BY_DDP, *_INSIDE, *_BESIDE))
_HVD_MOMENTA = Host(
    "hvd.MomentumExchange", (*KEPT, *BY_HVD), MOMENTA, (*_BY_DDP, *_INSIDE, *_BESIDE)
)
_HVD_GRADIENTS = Host(
    "hvd.DistributedOptimizer",
    (*KEPT, *BY_HVD, *IN_BACKWARD, "synchronize", "broadcast_optimizer_state"),
    pairs=(*_BY_DDP, *_INSIDE, ("LocalSteps", "beside")),
)
# Without Horovod's collectives among their calls.
_DDP_LOCAL = _HVD_LOCAL._replace(name="ddp.LocalSteps", calls=(*KEPT, *ROUNDS))
_DDP_MOMENTA = _HVD_MOMENTA._replace(name="ddp.MomentumExchange", calls=KEPT)
_DDP = Host("ddp.compress", (*KEPT, *IN_BACKWARD), pairs=[("ddp.compress", "twice")])
_TRAINER = Host(
    "trainers.compress",
    ("evaluate", "step", "state_dict", "load_state_dict", "discard_step"),
    ("float32", "bfloat16"),
    [("ddp.LocalSteps", "after"), ("hvd.LocalSteps", "after"), ("ddp.MomentumExchange", "after")],
)
_MPI = _HVD_LOCAL._replace(
    calls=("exchange", "verify", "load_checkpoint"), swaps=SWAPS[:2], pairs=(*_BY_DDP[:2], *_INSIDE)
)
_FSDP = Host("fsdp.compress", (*KEPT, *IN_BACKWARD), ("float32", "bfloat16"))
_OVER_FSDP = [
    Host(name, (), pairs=_SHARDED)
    for name in ("ddp.LocalSteps", "ddp.MomentumExchange", "hvd.LocalSteps", "hvd.MomentumExchange")
]
_OVER_FSDP.append(Host("hvd.DistributedOptimizer", (), pairs=_SHARDED))
_OVER_FSDP[0] = _OVER_FSDP[0]._replace(pairs=(*_SHARDED, ("DDP of a host", "before")))

_TF_CALLS = ("evaluate", "verify", "stats", "allreduce", "load_checkpoint")
_FIT_CALLS = ("evaluate", "verify", "load_checkpoint")  # each training is traced, for seconds
_TF: dict[str, Any] = {"modes": TF_MODES, "drawn_methods": 1}
_FIT = {**_TF, "swaps": FIT_SWAPS, "dtypes": ("float32",)}
_TF |= {"swaps": TF_SWAPS, "dtypes": ("float32", "bfloat16")}
_TF_HOSTS = (
    Host(
        "tensorflow.LocalSteps",
        (*_TF_CALLS, "make", "step", *ROUNDS),
        pairs=[("tape", "inside"), ("DistributedOptimizer", "inside"), ("LocalSteps", "beside")],
        **_TF,
    ),
    Host(
        "DistributedGradientTape",
        (*_TF_CALLS, "discard_step", "broadcast_variables"),
        pairs=[("tape", "inside"), ("DistributedOptimizer", "inside")],
        **_TF,
    ),
    Host(
        "keras.DistributedOptimizer",
        (*_FIT_CALLS, "broadcast_variables"),
        pairs=[("DistributedOptimizer", "inside")],
        **_FIT,
    ),
    Host(
        "keras.callbacks.LocalSteps",
        (*_FIT_CALLS, "exchange"),
        pairs=[
            ("DistributedOptimizer", "inside"),
            ("MomentumExchange", "inside"),
            ("LocalSteps", "beside"),
            ("callbacks.LocalSteps", "beside"),
        ],
        **_FIT,
    ),
    Host(
        "keras.MomentumExchange",
        (*_FIT_CALLS, "broadcast_variables"),
        pairs=[("DistributedOptimizer", "inside"), ("DistributedOptimizer", "around")],
        **_FIT,
    ),
)

_TORCH, _TENSORFLOW = "torch_situations", "tensorflow_situations"
JOBS: Sequence[tuple[Job, Sequence[Host]]] = (
    (
        Job("2 ranks, gloo", _TORCH, 2, "gloo"),
        (
            _HVD_GRADIENTS,
            _HVD_LOCAL,
            _HVD_MOMENTA,
            _DDP,
            _DDP_LOCAL,
            _DDP_MOMENTA,
            _TRAINER,
        ),
    ),
    (Job("2 ranks, MPI", _TORCH, 2, "mpi"), (_MPI,)),
    (Job("2 replicas of 2 shards, gloo", _TORCH, 4, "gloo"), (_FSDP, *_OVER_FSDP)),
    (Job("TensorFlow, 2 ranks, gloo", _TENSORFLOW, 2, "gloo"), _TF_HOSTS),
)


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part.

    Args:
        seed: of what is drawn.
        share: of the cases.
        only: words, of which one has to be in what the table calls a host; all if empty.
    """
    for job, hosts in JOBS:
        names: list[str] = []
        for host in hosts:
            where = place(job, host.name)
            if not only or any(word in where for word in only):
                dice = Random(f"{seed} {where}")
                names += map(str, drawn(host, dice) if share >= 1 else some(host, dice, share))
        yield from ranks.series(job, names, judged)


def place(job: Job, host: str) -> str:
    """Return what the table calls a host."""
    return f"{host}, {job.where}"


def drawn(host: Host, dice: Random) -> list[Case]:
    """Draw the cases of a host; all of its calls, swaps and pairs are among them."""
    return [*dict.fromkeys(_drawn(host, dice))]


def _drawn(host: Host, dice: Random) -> Iterator[Case]:
    methods = dice.sample(host.methods, host.drawn_methods)
    for what, how in host.pairs:
        yield Case(PAIRS, host.name, what, how, dice.choice(methods))
    if not host.calls:
        return
    rounds = range(EVERY, STEPS, EVERY)  # right behind an exchange
    for what in host.swaps:
        for dtype in host.dtypes if host.is_local else [dice.choice(host.dtypes)]:
            # Keras swaps by sums, which are rounded; a compressor would make more of that.
            method = "None" if what == "SwapEMAWeights" else dice.choice(methods)
            yield Case(BACK, host.name, what, dtype, method, dice.choice(rounds))
        if host.modes is GRAD_MODES:
            step = dice.randrange(1, STEPS - 1)
            yield Case(BACK, host.name, what, host.dtypes[0], dice.choice(methods), step)
    if host.is_local and host.modes is GRAD_MODES:
        yield Case(BACK, host.name, "max_norm", "float32")
    # In a loop TensorFlow's users are asked to restart; in Keras weights are set between two fits.
    set_alike = [x for x in host.swaps if "rank" not in x and x not in ("assign", "SwapEMAWeights")]
    for what in set_alike:
        between = host.is_local or host.modes is TF_MODES
        step = dice.choice([0, *rounds] if between else range(STEPS - 1))
        yield Case(ANEW, host.name, what, dice.choice(host.dtypes), dice.choice(methods), step)
    for method in ("None", dice.choice(host.methods[1:]))[-host.drawn_methods :]:
        yield Case(AGAIN, host.name, method=method)
    for call in host.calls:
        mode = dice.choice(host.modes[host.modes is GRAD_MODES :])
        stock = call == "step" and "inference_mode" in host.modes  # makes states nobody can use
        for how in (mode,) if stock or host.modes is TF_MODES else (host.modes[0], mode):
            # A state that is made in a mode, and one that was there before.
            for steps in ((1, 2), (4, 5)) if call == "exchange" else (range(1, STEPS - 1),):
                step = 0 if call == "make" else dice.choice(steps)
                yield Case(MODES, host.name, call, how, dice.choice(methods), step)


def some(host: Host, dice: Random, share: float) -> Iterator[Case]:
    """Draw a share of a host's cases, of each kind at least one."""
    cases = drawn(host, dice)
    for kind in ATTACKS:
        same = [case for case in cases if case.kind == kind]
        if same:
            yield from dice.sample(same, max(1, round(len(same) * share)))


def judged(job: Job, folder: Path, name: str, output: str) -> Input | None:
    """Return what came of a case; None if it was not reached."""
    lines = ranks.read(folder, "trials", range(job.ranks), name)
    reached = ranks.read(folder, "mistakes", range(job.ranks), name)
    if not lines and not reached:
        return None
    case = Case.parse(name)
    hung = any(path.stat().st_size for path in folder.glob("hangs-*"))
    outcome, message = judge(case, [*lines.values()], job.ranks, hung)
    if len(lines) < job.ranks and not message:
        places = (f"rank {r}: {ranks.place(folder, r)}" for r in range(job.ranks) if r not in lines)
        message = "; ".join(places) if hung else output.strip()[-300:]
    return Input(place(job, case.host), ATTACKS[case.kind], outcome, message, case=name)


def judge(
    case: Case, lines: Sequence[Mapping[str, Any]], expected: int, hung: bool
) -> tuple[str, str]:
    """Return an outcome, and the first rank's words.

    Args:
        case: that the ranks went through.
        lines: of each rank that came to the end of it: the error that it has `said`; whether that
            `names` a cause, and the `step` it was in; or its outcome, and words, as `replicas`.
        expected: number of ranks.
        hung: a rank has waited for too long.
    """
    errors = [line["said"] for line in lines if line["said"]]
    results = [line["replicas"] for line in lines if not line["said"]]
    bad = [(outcome, message) for outcome, message in results if outcome in BAD]
    message = next(iter(errors), bad[0][1] if bad else "")
    if len(lines) < expected:
        return ("hung" if hung else "unexplained"), message
    if not errors:
        return bad[0] if bad else ("survived", "")
    allowed = case.what in ALLOWED and "LocalSteps" in case.host
    if allowed or (case.kind != PAIRS and case.what != "make"):
        return "failed", message
    if len(errors) < expected:
        return "diverged", f"an error on {len(errors)} of {expected} ranks: {message}"
    if not all(line["names"] or ranks.CAUSES.search(line["said"]) for line in lines):
        return "unexplained", message
    step = max(line["step"] for line in lines)
    return ("late", f"in step {step + 1}: {message}") if step > 0 else ("ended", message)
