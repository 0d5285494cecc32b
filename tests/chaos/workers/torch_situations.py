"""Situations on PyTorch, with Horovod, DDP and FSDP2 in one process: folder, options, cases.

Each trial has a default process group of its own, so that what fails in one is not in the way of
the next.
"""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch
import torch.distributed as dist
from horovod.torch import mpi_ops
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.torch import ddp, fsdp, trainers
from tests.chaos.situations import AGAIN, ANEW, BACK, EVERY, MODES, PAIRS, STEPS, Case
from tests.chaos.workers import trials
from tests.chaos.workers.traces import Leftovers, Trace, compare, compare_pair
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

TIMEOUT = datetime.timedelta(seconds=30)
METHODS = {
    "None": hvd.NoneCompressor(),
    "QSGD": hvd.QSGDCompressor(),
    "Sparse GD": hvd.SparseGDCompressor(density=0.1),
    "1-bit": hvd.OneBitCompressor(),
    "Int8": hvd.Int8Compressor(),
    "chunked": hvd.ChunkedTopKCompressor(),
    "PowerSGD": hvd.PowerSGDCompressor(),
}
OUTER = hvd.OuterSGD(0.7, 0.9)
CYCLES = 6  # trainings one after another
WORDS = 32  # elements of a collective that is more than a message
Mode = Callable[["Training"], AbstractContextManager[Any]]


# -- collectives, counted -----------------------------------------------------------------------


class _Counted:
    """Horovod's library, whose enqueued collectives are counted if they carry more than words."""

    def __init__(self, library: Any) -> None:
        self._library, self.count = library, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if "_async" not in name:
            return function

        def enqueue(tensor: Any, *arguments: Any) -> Any:
            large = not isinstance(tensor, torch.Tensor) or tensor.numel() >= WORDS
            self.count += large
            return function(tensor, *arguments)

        return enqueue


_counted = mpi_ops.mpi_lib = _Counted(mpi_ops.mpi_lib)


@contextmanager
def _count() -> Iterator[Callable[[], int]]:
    """Count collectives of Horovod's and of `torch.distributed`'s; the result is there behind."""
    before, activities = _counted.count, [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        yield (
            lambda: (
                _counted.count
                - before
                + sum(event.name.startswith("c10d::") for event in profiler.events() or ())
            )
        )


# -- hosts --------------------------------------------------------------------------------------


def rank() -> int:
    return hvd.rank()


def model_of(dtype: str = "float32", table: bool = False) -> nn.Module:
    torch.manual_seed(1)
    first = [nn.Embedding(20, 12, max_norm=1.0)] if table else []
    layers = nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4)
    return nn.Sequential(*first, *layers).to(getattr(torch, dtype))


def inner_of(host: str, model: nn.Module) -> torch.optim.Optimizer:
    if "Momentum" in host:
        return torch.optim.AdamW(model.parameters(), 0.01)
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)


class Training:
    """A model in training, with what exchanges for it.

    Attributes:
        model: what is called.
        module: the plain module, or the sharded one.
        optimizer: what steps.
        holder: what keeps the exchange's state.
        table: the model begins with an embedding.
        backward: takes a loss.
        other: what is to live as long.
        made: steps so far.
    """

    def __init__(
        self, model: Any, module: Any, optimizer: Any, holder: Any = None, table: bool = False
    ) -> None:
        self.model, self.module, self.optimizer = model, module, optimizer
        self.holder = optimizer if holder is None else holder
        self.table, self.backward = table, lambda loss: loss.backward()
        self.other: Any = None
        self.made = 0
        self._compiled: Any = None

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * self.made + rank())
        if self.table:
            x = torch.randint(20, (8,), generator=generator)
            return self.model(x).square().mean()
        x = torch.randn(8, 12, generator=generator).to(next(self.module.parameters()).dtype)
        return (self.model(x) - x[:, :4]).float().square().mean()

    def backwards(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss())

    def step(self) -> None:
        self.backwards()
        self.optimizer.step()
        self.made += 1

    def evaluate(self, module: Any = None) -> None:
        (module or self.module)(self._inputs())
        if isinstance(self.module, fsdp.FSDPModule):
            self.module.reshard()  # else the parameters stay the gathered ones

    def evaluate_compiled(self) -> None:
        if self._compiled is None:
            self._compiled = torch.compile(self.module, backend="eager")
        with torch.no_grad():
            self.evaluate(self._compiled)

    def _inputs(self) -> torch.Tensor:
        return torch.ones(2, 12, dtype=next(self.module.parameters()).dtype)

    def locals(self) -> list[torch.Tensor]:
        """This rank's part of each parameter, to be written to."""
        return [_local(p.detach()) for p in self.module.parameters()]

    def weights(self) -> np.ndarray:
        return torch.cat([x.float().flatten() for x in self.locals()]).numpy().copy()

    def saved(self) -> Any:
        return copy.deepcopy(self.holder.state_dict())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_mesh() -> DeviceMesh:
    """Two replicas of two shards; one for each default process group."""
    group = dist.group.WORLD
    if group not in _meshes:
        _meshes.clear()
        _meshes[group] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "inside"))
    return _meshes[group]


_meshes: dict[Any, DeviceMesh] = {}


def sharded(module: nn.Module) -> nn.Module:
    mesh = sharded_mesh()["inside"]
    fully_shard(module[0], mesh=mesh)
    return fully_shard(module, mesh=mesh)


def wrap(host: str, inner: Any, named: Any, method: Any, **options: Any) -> Any:
    """Return the optimizer of a host that is one."""
    library, _, name = host.partition(".")
    if name == "DistributedOptimizer":
        return hvd.DistributedOptimizer(inner, named, compression=method, **options)
    functions = vars(ddp) if library == "ddp" else vars(hvd)
    function = functions[name] if name in functions else getattr(hvd, name)
    if name == "LocalSteps":
        return function(inner, named, EVERY, OUTER, method, **options)
    return function(inner, named, method, 2, **options)


def make(case: Case, dtype: str = "float32", mode: Mode | None = None) -> Training:
    """Make a model with what exchanges for it, as its documentation says."""
    mode = mode or IN_MODES[""]
    method, module = METHODS[case.method], model_of(dtype)
    if case.host == "trainers.compress":
        return accelerated(module, method)
    if case.host == "fsdp.compress":
        sharded(module)
        training = Training(module, module, inner_of(case.host, module))
        with mode(training):
            training.holder = fsdp.compress(module, method, mesh=sharded_mesh())
        return training
    inner = inner_of(case.host, module)
    if case.host == "ddp.compress":
        model = DistributedDataParallel(module)
        training = Training(model, module, inner)
        with mode(training):
            training.holder = ddp.compress(model, method)
        return training
    training = Training(module, module, inner)
    with mode(training):
        optimizer = wrap(case.host, inner, module.named_parameters(), method)
    training.optimizer = training.holder = optimizer
    return training


def accelerated(module: nn.Module, method: Any) -> Training:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    compressed = trainers.compress(accelerator, method)
    model, optimizer = accelerator.prepare(module, inner_of("trainers", module))
    training = Training(model, module, optimizer, compressed.state)
    training.backward = accelerator.backward
    return training


Situation = Callable[[Training], Any]


def train(training: Training, at: int = -1, situation: Situation | None = None) -> Trace:
    """Train, with something between two steps."""
    weights = []
    for step in range(STEPS):
        if step == at and situation is not None:
            situation(training)
        training.step()
        weights.append(training.weights())
    return Trace(weights, digest(_arrays(training.saved())))


def _arrays(saved: Any) -> Iterator[np.ndarray]:
    """Return what is saved, without times and traffic."""
    if isinstance(saved, torch.Tensor):
        yield _local(saved.detach()).contiguous().flatten().view(torch.uint8).numpy()
    elif isinstance(saved, dict):
        for name, value in saved.items():
            if name not in ("counters", "gathered"):
                yield from _arrays(value)
    elif isinstance(saved, (list, tuple)):
        for value in saved:
            yield from _arrays(value)


@functools.cache
def undisturbed(host: str, method: str, dtype: str = "float32") -> Trace:
    """The training without a situation: what largest cases are held to."""
    return train(make(Case(MODES, host, method=method), dtype))


# -- weights set, and put back ------------------------------------------------------------------


def swapped(what: str) -> Situation:
    """Weights are set, used, and put back to the bit, on all ranks or on one."""
    how, _, alone = what.partition(", ")

    def situation(training: Training) -> None:
        if alone and rank() != 1:
            return
        before = [x.clone() for x in training.locals()]
        states = copy.deepcopy(training.module.state_dict())
        place(training, how, [0.5 * x + 1.0 for x in before])
        if not alone:
            with torch.no_grad():
                training.evaluate()
        if how == "load_state_dict":
            training.module.load_state_dict(states)
        else:
            place(training, how, before)

    return situation


@torch.no_grad()
def place(training: Training, how: str, values: list[torch.Tensor]) -> None:
    """Set the weights."""
    if how == ".data":
        for p, value in zip(training.module.parameters(), values):
            target = p.data
            if isinstance(target, DTensor):  # its shard is FSDP's own
                target.to_local().copy_(value)
            else:
                p.data = value.clone()
    elif how == "load_state_dict":
        states = copy.deepcopy(training.module.state_dict())
        for state, value in zip(states.values(), values, strict=True):
            _local(state).copy_(value)
        training.module.load_state_dict(states)
    else:
        for target, value in zip(training.locals(), values):
            target.copy_(value)


def put_back(case: Case, trial: Trial) -> Any:
    trial.details["step"] = case.step
    if case.what == "max_norm":
        return renormalized(case)
    oracle = undisturbed(case.host, case.method, case.how)
    return compare(train(make(case, case.how), case.step, swapped(case.what)), oracle)


def renormalized(case: Case) -> Any:
    """`Embedding(max_norm=...)` sets weights in forward; held to averages by hand."""
    module = model_of(table=True)
    function = ddp.LocalSteps if case.host.startswith("ddp") else hvd.LocalSteps
    inner, named = inner_of(case.host, module), module.named_parameters()
    optimizer = function(inner, named, EVERY, hvd.OuterSGD(1, 0), None)
    trace = train(Training(module, module, optimizer, table=True))
    module = model_of(table=True)
    plain = Training(module, module, inner_of(case.host, module), table=True)
    for step in range(STEPS):
        plain.step()
        if step % EVERY == EVERY - 1:
            for x in plain.locals():
                dist.all_reduce(x)
                x.div_(dist.get_world_size())
        largest = np.abs(plain.weights() - trace.weights[step]).max()
        if largest > 1e-5:
            return "altered", f"weights differ by {largest:.2g} after step {step + 1}"
    return "survived", ""


def set_anew(case: Case, trial: Trial) -> Any:
    """New weights on all ranks; held to the same, set by `copy_`, and a restart."""
    trial.details["step"] = case.step

    def situation(training: Training) -> None:
        place(training, case.what, _new(training))

    oracle = train(make(case, case.how), case.step, _anew)
    return compare(train(make(case, case.how), case.step, situation), oracle)


def _new(training: Training) -> list[torch.Tensor]:
    return [0.5 * x + 1.0 for x in training.locals()]


def _anew(training: Training) -> None:
    place(training, "copy_", _new(training))
    if training.made and hasattr(training.optimizer, "restart"):
        training.optimizer.restart()


# -- calls in other modes -----------------------------------------------------------------------


@contextmanager
def _after_compiled(training: Training) -> Iterator[None]:
    training.evaluate_compiled()
    yield


IN_MODES: dict[str, Mode] = {
    "": lambda _: nullcontext(),
    "no_grad": lambda _: torch.no_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "set_grad_enabled(False)": lambda _: torch.set_grad_enabled(False),
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "compiled": _after_compiled,
}


MOVING = ("step", "synchronize", "exchange", "restart", "discard_step")  # calls that train


class Calls:
    """Public calls between two steps, each with what has to come before and after it.

    Args:
        mode: in which the call is made.
        folder: for checkpoints.
    """

    def __init__(self, mode: Mode, folder: Path) -> None:
        self._mode, self._folder = mode, folder

    def __call__(self, name: str) -> Situation:
        method = getattr(self, f"_{name}", None)

        def situation(training: Training) -> None:
            if method is not None:
                method(training)
            else:
                with self._mode(training):
                    self._plain(name, training)

        return situation

    def _plain(self, name: str, training: Training) -> None:
        by_ddp = isinstance(training.holder, ddp.CompressionState)
        by_fsdp = isinstance(training.holder, fsdp.ShardedCompression)
        library = ddp if by_ddp else fsdp if by_fsdp else hvd
        if name in ("evaluate", "exchange", "zero_grad"):
            owner = training if name == "evaluate" else training.optimizer
            getattr(owner, name)()
        elif name in ("verify", "retrain"):
            getattr(library, name)(training.holder)
        elif name == "stats":
            library.compression_stats(training.holder)
            library.describe(training.holder)
        elif name == "state_dict":
            training.saved()
        elif name == "allreduce":
            hvd.allreduce(torch.ones(3), name="metric")
        else:
            raise AssertionError(name)

    def _step(self, training: Training) -> None:
        training.backwards()
        with self._mode(training):
            training.optimizer.step()
        training.made += 1

    def _load_state_dict(self, training: Training) -> None:
        saved = training.saved()
        with self._mode(training):
            training.holder.load_state_dict(saved)

    def _restart(self, training: Training) -> None:
        training.optimizer.exchange()
        with self._mode(training):
            training.optimizer.restart()

    def _discard_step(self, training: Training) -> None:
        training.backwards()
        with self._mode(training):
            training.holder.discard_step()
        training.optimizer.zero_grad()

    def _synchronize(self, training: Training) -> None:
        training.backwards()
        with self._mode(training):
            training.optimizer.synchronize()
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
        training.made += 1

    def _broadcast_parameters(self, training: Training) -> None:
        self._exchanged(training)
        with self._mode(training):
            hvd.broadcast_parameters(training.module.state_dict(), 0)

    def _broadcast_optimizer_state(self, training: Training) -> None:
        with self._mode(training):
            hvd.broadcast_optimizer_state(training.optimizer, 0)

    def _save_checkpoint(self, training: Training) -> None:
        objects = {"model": training.module, "optimizer": training.optimizer}
        with self._mode(training):
            hvd.save_checkpoint(self._folder, **objects)

    def _load_checkpoint(self, training: Training) -> None:
        objects = {"model": training.module, "optimizer": training.optimizer}
        hvd.save_checkpoint(self._folder, **objects)
        with self._mode(training):
            hvd.load_checkpoint(self._folder, **objects)

    def _exchanged(self, training: Training) -> None:
        if hasattr(training.optimizer, "exchange"):
            training.optimizer.exchange()


def in_mode(case: Case, trial: Trial) -> Any:
    """A call in a mode; held to the same call outside of it, or to none where it moves nothing."""
    trial.details["step"] = case.step
    mode = IN_MODES[case.how]
    if case.what in MOVING or (case.what == "broadcast_parameters" and "Local" in case.host):
        call = Calls(IN_MODES[""], trial.folder / "oracle")(case.what)
        oracle = train(make(case), case.step, call)
    else:
        oracle = undisturbed(case.host, case.method)
    if case.what == "make":
        return compare(train(make(case, mode=mode)), oracle)
    call = Calls(mode, trial.folder / "tried")(case.what)
    return compare(train(make(case), case.step, call), oracle)


# -- trainings one after another ----------------------------------------------------------------


def made_again(case: Case, trial: Trial) -> Any:
    trial.details["step"] = 0
    models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    counts = {
        "models": lambda: len(models),
        "process groups": lambda: len(dist.distributed_c10d._world.pg_map),
    }
    if case.host == "fsdp.compress":
        sharded_mesh()

    def cycle() -> None:
        training = make(case)
        models.add(training.module)
        for _ in range(3):
            training.step()

    return Leftovers(counts).after(cycle, CYCLES)


# -- two exchanges ------------------------------------------------------------------------------


def alone(host: str, method: str, prefix: str = "") -> Trace:
    """A training with one exchange alone, its collectives counted.

    Args:
        host, method: as in `Case`.
        prefix: of the parameters' names, on which what a compressor draws may depend.
    """
    if not prefix:
        return counted(make(Case(PAIRS, host, method=method)), None)
    module = model_of()
    named = [(f"{prefix}{name}", p) for name, p in module.named_parameters()]
    optimizer = wrap(host, inner_of(host, module), named, METHODS[method])
    return counted(Training(module, module, optimizer), None)


def counted(training: Training, trial: Trial | None) -> Trace:
    weights: list[np.ndarray] = []

    def steps(number: int) -> None:
        for _ in range(number):
            if trial is not None:
                trial.details["step"] = training.made
            training.step()
            weights.append(training.weights())

    steps(2)
    with _count() as count:
        steps(STEPS - 2)
    return Trace(weights, "", count())


def paired(case: Case, trial: Trial) -> Any:
    trial.details["step"] = 0
    training, oracles = PAIRED[case.how if case.how in PAIRED else case.what](case)
    trace = counted(training, trial)
    return compare_pair(trace, {name: one() for name, one in oracles.items()})


def _over_ddp(case: Case) -> Any:
    """DDP, with or without compression, and an optimizer that exchanges, in either order."""
    module = model_of()
    inner, method = inner_of(case.host, module), METHODS[case.method]

    def data_parallel() -> Any:
        model = DistributedDataParallel(module)
        if case.what == "ddp.compress":
            ddp.compress(model, method)
        elif case.what == "ddp.hook":
            model.register_comm_hook(method, ddp.hook)
        return model

    def exchanging(model: Any) -> Any:
        return wrap(case.host, inner, model.named_parameters(), method)

    if case.how == "before":
        model = data_parallel()
        optimizer = exchanging(model)
    else:
        optimizer = exchanging(module)
        model = data_parallel()
    oracles = {case.host: functools.partial(alone, case.host, case.method)}
    if case.how == "before":  # names of DDP's parameters begin so
        named = f"{case.host} of names that DDP gives"
        oracles[named] = functools.partial(alone, case.host, case.method, "module.")
    if case.what in ("ddp.compress", "ddp.hook"):
        oracles["ddp.compress"] = functools.partial(_compressed_alone, case)
    elif case.what == "DDP":
        oracles["DDP"] = functools.partial(_compressed_alone, case._replace(method="None"))
    return Training(model, module, optimizer), oracles


def _compressed_alone(case: Case) -> Trace:
    module = model_of()
    model = DistributedDataParallel(module)
    if case.what != "DDP":
        ddp.compress(model, METHODS[case.method])
    return counted(Training(model, module, inner_of(case.host, module)), None)


def _inside(case: Case) -> Any:
    """An optimizer that exchanges, inside of another one."""
    module = model_of()
    inner = inner_of(case.host if "Momentum" in case.host else case.what, module)
    library = case.host.partition(".")[0]
    method = METHODS[case.method]
    if case.what == "Horovod's":
        first = horovod.DistributedOptimizer(inner, module.named_parameters())
    else:
        name = case.what if "." in case.what else f"{library}.{case.what}"
        first = wrap(name, inner, module.named_parameters(), method)
    second = wrap(case.host, first, module.named_parameters(), method)
    return Training(module, module, second), {case.host: lambda: alone(case.host, case.method)}


def _beside(case: Case) -> Any:
    """Two optimizers of one model, of which one steps."""
    module, method = model_of(), METHODS[case.method]
    library = case.host.partition(".")[0]
    name = case.what if "." in case.what else f"{library}.{case.what}"
    other = wrap(name, inner_of(name, module), module.named_parameters(), method)
    optimizer = wrap(case.host, inner_of(case.host, module), module.named_parameters(), method)
    training = Training(module, module, optimizer)
    training.other = other
    return training, {case.host: lambda: alone(case.host, case.method)}


def _twice(case: Case) -> Any:
    module, method = model_of(), METHODS[case.method]
    model = DistributedDataParallel(module)
    ddp.compress(model, method)
    state = ddp.compress(model, method)
    inner = inner_of(case.host, module)
    return Training(model, module, inner, state), {case.host: lambda: alone(case.host, case.method)}


def _over_shards(case: Case) -> Any:
    module, method = model_of(), METHODS[case.method]
    sharded(module)
    inner = inner_of(case.host, module)
    if case.what == "fsdp.compress" and case.how == "before":
        fsdp.compress(module, method, mesh=sharded_mesh())
    optimizer = wrap(case.host, inner, module.named_parameters(), method)
    if case.what == "fsdp.compress" and case.how == "after":
        fsdp.compress(module, method, mesh=sharded_mesh())
    # Ranks that train shards alone have no oracle: each step needs those of the others.
    oracles = {}
    if case.what == "fsdp.compress":
        oracles["fsdp.compress"] = lambda: _shards_alone(case)
    return Training(module, module, optimizer), oracles


def _shards_alone(case: Case) -> Trace:
    module = model_of()
    sharded(module)
    fsdp.compress(module, METHODS[case.method], mesh=sharded_mesh())
    return counted(Training(module, module, inner_of(case.host, module)), None)


def _over_hosts(case: Case) -> Any:
    """DDP inside each host, and local steps between hosts: what the documentation says."""
    size = dist.get_world_size() // 2  # of two hosts
    hosts = [[*range(size)], [*range(size, 2 * size)]]
    insides = [dist.new_group(ranks) for ranks in hosts]
    across = [dist.new_group([*ranks]) for ranks in zip(*hosts)]
    inside, between = insides[rank() // size], across[rank() % size]

    def made(wrapped: bool) -> Training:
        module = model_of()
        model = DistributedDataParallel(module, process_group=inside) if wrapped else module
        inner, method = inner_of(case.host, module), METHODS[case.method]
        how = {"process_group": between} if size > 1 else {}
        named = [(f"module.{name}", p) for name, p in module.named_parameters()]
        training = Training(model, module, wrap(case.host, inner, named, method, **how))
        if not wrapped:

            def average(loss: torch.Tensor) -> None:
                loss.backward()
                for p in module.parameters():
                    dist.all_reduce(p.grad, group=inside)
                    p.grad.div_(size)

            training.backward = average
        return training

    oracles = {"an average in each host": lambda: counted(made(False), None)}
    return made(True), oracles


def _trained(case: Case) -> Any:
    """An optimizer that exchanges, in a trainer that compresses."""
    training = make(case)
    training.optimizer = wrap(
        case.what,
        inner_of(case.what, training.module),
        training.model.named_parameters(),
        METHODS[case.method],
    )
    return training, {
        case.what: lambda: alone(case.what, case.method),
        case.host: lambda: alone(case.host, case.method),
    }


PAIRED: dict[str, Callable[[Case], Any]] = {
    "inside": _inside,
    "beside": _beside,
    "twice": _twice,
    **dict.fromkeys(("DDP", "ddp.compress", "ddp.hook"), _over_ddp),
    **dict.fromkeys(("fully_shard", "fsdp.compress"), _over_shards),
    **dict.fromkeys(("DDP of one rank", "DDP of a host"), _over_hosts),
    **dict.fromkeys(("ddp.LocalSteps", "hvd.LocalSteps", "ddp.MomentumExchange"), _trained),
}
KINDS: dict[str, Callable[[Case, Trial], Any]] = {
    PAIRS: paired,
    BACK: put_back,
    ANEW: set_anew,
    AGAIN: made_again,
    MODES: in_mode,
}


def main(folder: str, options: str, *names: str) -> None:
    del options
    torch.set_num_threads(1)
    hvd.init()
    # Accelerate asks the environment how many ranks there are, and where.
    os.environ |= {"RANK": str(rank()), "LOCAL_RANK": str(rank()), "WORLD_SIZE": str(hvd.size())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    met = itertools.count()

    def meet() -> None:
        """Begin anew: groups that were destroyed on some ranks would give others other names."""
        hvd.barrier()
        _meshes.clear()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        path = Path(folder, f"met-{next(met)}").absolute()
        how = {"rank": rank(), "world_size": hvd.size(), "timeout": TIMEOUT}
        dist.init_process_group("gloo", f"file://{path}", **how)

    cases = {name: Case.parse(name) for name in names}
    tried = {name: functools.partial(KINDS[case.kind], case) for name, case in cases.items()}
    trials.run(folder, rank(), tried, names, meet)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
