"""DistributedDataParallel with every method, on one rank of several; no Horovod."""

from __future__ import annotations

import copy
import datetime
import gc
import io
import itertools
import json
import logging
import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    DGCCompressor,
    OneBitCompressor,
    OuterSGD,
    PowerSGDCompressor,
    QSGDCompressor,
    StromCompressor,
    VarianceCompressor,
    partition,
    smaller,
)
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import is_replicated
from hvd_gradcomp.method.learned import owner_of
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.torch import ddp, trainers
from tests.methods import (
    BALANCED,
    CHUNKED,
    GRADIVEQ,
    LGC,
    LGC_SERVER,
    ONE_OF_EACH,
    ONE_OF_TODAY,
    PRODUCTS,
    ROBUST,
    TODAY,
    VARIANCE,
)
from tests.parallel.workers.lifetimes import leaves_nothing
from tests.parallel.workers.perceptron import STEPS, Model, loss, vector

TIMEOUT = datetime.timedelta(minutes=3)
AVERAGE = OuterSGD(1, 0)
COLLECTIVES = "gloo:all_reduce", "gloo:broadcast"
BACKWARD = "a backward of the test"


def ddp_model(before=None, **options):
    torch.manual_seed(1)
    model = Model()
    for p in model.unused.parameters():
        p.requires_grad_("find_unused_parameters" in options)
    if before is not None:
        before(model)
    # Buckets that are small, and that are planned anew after the first step.
    return DistributedDataParallel(model, bucket_cap_mb=0.003, **options)


def wrapped(compression, before=None, of_ddp=None, **options):
    model = ddp_model(before, **(of_ddp or {}))
    return model, ddp.compress(model, compression, **options)


def backward(model, step):
    loss(model, step, dist.get_rank()).backward()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def alike(x, group=None):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.clone(), group=group)
    assert all(torch.equal(one, every[0]) for one in every), "replicas differ"
    assert x.isfinite().all()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


def every_method():
    for compression in [
        *ONE_OF_EACH,
        GRADIVEQ,
        LGC,
        LGC_SERVER,
        *ONE_OF_TODAY,
        *PRODUCTS,
        *ROBUST,
        *BALANCED[::2],
    ]:
        model, state = wrapped(compression)
        start = vector(model)
        train(model, sgd(model), STEPS)
        alike(vector(model))
        assert not torch.equal(start, vector(model))
        stats = state.stats()
        assert stats.steps == state.steps == STEPS
        assert stats.bytes_sent and stats.bytes_received
        assert stats.elements == STEPS * vector(model.module.first).numel() + STEPS * sum(
            vector(m).numel() for m in (model.module.second, model.module.third)
        )


def dense_is_what_ddp_does():
    """Divided by the ranks of its own process group, also where the graph is static."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    for options in (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"process_group": groups[dist.get_rank()]},
    ):
        plain, (ours, _) = ddp_model(**options), wrapped(None, of_ddp=options)
        for model in (plain, ours):
            optimizer = sgd(model)
            train(model, optimizer, 2)
            if "static_graph" not in options:
                optimizer.zero_grad()
                with model.no_sync():
                    backward(model, 2)
                backward(model, 3)
                optimizer.step()
        assert torch.allclose(vector(plain), vector(ours), atol=1e-6), options


def options_of_ddp():
    """Unused layers, accumulation, views, subsets, phases, a partition."""
    for options in ({"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        model, state = wrapped(StromCompressor(tau=0.01), of_ddp=options)
        train(model, sgd(model), STEPS)
        alike(vector(model))
    unused = [p.grad for p in model.module.unused.parameters()]
    assert unused == [None, None] and state.steps == STEPS
    model, state = wrapped(
        partition(
            [(smaller(100), None), ("*", VarianceCompressor(alpha=0.5, moments="microbatch"))]
        ),
        backward_passes_per_step=2,
        batch_size=16,
    )
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, 10 * step)
        backward(model, 10 * step + 1)
        optimizer.step()
    alike(vector(model))
    assert state.steps == STEPS
    model, state = wrapped(
        VarianceCompressor(alpha=0.5, moments="sample"), before=ddp.track_moments
    )
    train(model, sgd(model), STEPS)
    alike(vector(model))
    assert 0 < state.stats().elements_sent < state.stats().elements


class Sometimes(torch.nn.Module):
    """A layer that is used in some steps only; in the others not at all, or times zero."""

    def __init__(self, times_zero):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.times_zero = times_zero

    def forward(self, x, used):
        y = self.always(x)
        if used or self.times_zero:
            y = y + self.sometimes(x) * used
        return y


def unused_for_a_step():
    """What is kept for a layer that no rank uses is sent, and arrives; as with a gradient of 0."""
    for views in (False, True):
        for to_none in (False, True):
            trained = []
            for times_zero in (True, False):
                torch.manual_seed(1)
                model = DistributedDataParallel(
                    Sometimes(times_zero),
                    find_unused_parameters=True,
                    gradient_as_bucket_view=views,
                )
                ddp.compress(model, StromCompressor(tau=0.5))
                optimizer = sgd(model)
                for step in range(STEPS):
                    optimizer.zero_grad(set_to_none=to_none)
                    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
                    model(x + dist.get_rank(), step % 3 == 0).square().sum().backward()
                    optimizer.step()
                trained.append(vector(model))
            assert torch.equal(*trained), (views, to_none)


def passes_thrown_away():
    """Their squares do not count among the moments of the passes that follow."""
    trained = []
    for thrown in (False, True):
        model, _ = wrapped(
            VarianceCompressor(alpha=0.5, moments="microbatch"), backward_passes_per_step=2
        )
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                if thrown:
                    backward(model, 99)
                    optimizer.zero_grad()
                backward(model, 10 * step)
            backward(model, 10 * step + 1)
            optimizer.step()
        trained.append(vector(model))
    assert torch.equal(*trained)


def some_ranks():
    ranks = [dist.get_world_size() - 2, dist.get_world_size() - 1]
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return
    model, _ = wrapped(LGC_SERVER, of_ddp={"process_group": group})
    train(model, sgd(model), STEPS)
    alike(vector(model), group)


def momentum_is_taken_over():
    """Layers that go dense have it back after the exchange: what SGD does."""
    how = {"momentum": 0.9, "weight_decay": 0.01}
    compression = partition([(smaller(10**6), None), ("*", DGCCompressor(density=0.1))])
    plain, _ = wrapped(None)
    train(plain, sgd(plain, **how), STEPS)
    model = ddp_model()
    optimizer = sgd(model, **how)
    ddp.compress(model, compression, optimizer=optimizer)
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["momentum"] == 0
    train(model, optimizer, STEPS)
    assert torch.allclose(vector(plain), vector(model), atol=1e-5)
    raises(ValueError, "optimizer=", lambda: wrapped(DGCCompressor(density=0.1)))


def goes_on(begin, compression):
    """Require that a training that is loaded ends where one that was not stopped does.

    begin: wraps a model for a compressor, and returns it with its state.
    """
    model, state = begin(compression)
    train(model, sgd(model), 3)
    saved = copy.deepcopy((model.state_dict(), state.state_dict()))
    train(model, sgd(model), 3, first=3)
    again, other = begin(compression)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, sgd(again), 3, first=3)
    assert torch.equal(vector(model), vector(again)), compression
    assert other.steps == 6 and other.stats() == state.stats()


def state_goes_on():
    for compression in (LGC, DGCCompressor(density=0.05, momentum=0.9), VARIANCE):
        goes_on(wrapped, compression)


def other_ranks_go_on():
    """One rank alone has the sum of what all kept, as many have each its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    for compression in (LGC, DGCCompressor(density=0.05, momentum=0.9)):
        model, state = wrapped(compression)
        train(model, sgd(model), 3)
        every = [None] * size
        dist.all_gather_object(every, state.state_dict())
        again, other = wrapped(compression, of_ddp={"process_group": alone})
        other.load_states(reversed(every))
        assert other.steps == 3
        counters = [saved["counters"]["bytes_sent"] for saved in every]
        assert other.stats().bytes_sent == sum(counters) // size
        for number, entry in enumerate(other.state_dict()["buckets"]):
            for path, x in entry["state"].items():
                parts = [saved["buckets"][number]["state"][path] for saved in every]
                compressor = state.reducer.buckets[number].compressor
                owner = owner_of(compressor, path, 3)
                if is_replicated(compressor, path) or owner is not None:
                    torch.testing.assert_close(x, parts[owner or 0], rtol=0, atol=0, equal_nan=True)
                elif path not in compressor.reset_on_merge and x.is_floating_point():
                    assert torch.equal(x, sum(part.double() for part in parts).float()), path
        train(again, sgd(again), 2, first=3)
        for states, text in (
            (every[:1], "of ranks 1 are missing"),
            ([every[0], every[0]], "the state of rank 0 is there twice"),
            ([every[0], {**every[1], "steps": 4}], "one has steps=3, another 4"),
            ([], "there is no state"),
        ):
            raises(CheckpointError, text, lambda x=other, y=states: x.load_states(y))
        third, same = wrapped(compression)
        third.load_state_dict(model.state_dict())
        same.load_states(every)
        for one in (model, third):
            train(one, sgd(one), 2, first=3)
        assert torch.equal(vector(model), vector(third))
        assert same.stats() == state.stats()


def distributed_checkpoint(folder):
    """A state under a name of each rank; that of another rank is told; and no step is made."""
    rank = dist.get_rank()
    model, state = wrapped(VARIANCE)
    optimizer = sgd(model)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    weights, others = get_state_dict(model, optimizer)
    assert state.steps == 3
    parts = {"model": weights, "optimizer": others, f"compressor/{rank}": state.state_dict()}
    dcp.save(parts, checkpoint_id=folder / "dcp")
    train(model, optimizer, 3, first=3)
    again, other = wrapped(VARIANCE)
    second = sgd(again)
    weights, others = get_state_dict(again, second)
    parts = {"model": weights, "optimizer": others, f"compressor/{rank}": other.state_dict()}
    dcp.load(parts, checkpoint_id=folder / "dcp")
    set_state_dict(
        again, second, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    other.load_state_dict(parts[f"compressor/{rank}"])
    train(again, second, 3, first=3)
    assert torch.equal(vector(model), vector(again))
    alike(vector(again))
    foreign = {**state.state_dict(), "rank": (rank + 1) % dist.get_world_size()}
    messages = logged(lambda: other.load_state_dict(foreign))
    assert len(messages) == 1 and "Each rank saves and loads its own" in messages[0], messages
    # A first state is made by a step with gradients of zero, which decay takes no part in.
    how = {"momentum": 0.9, "weight_decay": 0.01}
    trained = []
    for gets_state in (False, True):
        model = ddp_model()
        optimizer = sgd(model, **how)
        ddp.compress(model, DGCCompressor(density=0.1), optimizer=optimizer)
        if gets_state:
            get_state_dict(model, optimizer)
        train(model, optimizer, 3)
        trained.append(vector(model))
    assert torch.equal(*trained)


def raises(kind, text, function):
    try:
        function()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def what_differs():
    rank = dist.get_rank()
    raises(MismatchError, "compression", lambda: wrapped(StromCompressor(tau=1.0 + rank)))
    raises(MismatchError, "settings", lambda: wrapped(None, bucket_bytes=1000 + rank))
    # What one rank refuses by itself.
    for refused in ("strom", DGCCompressor(density=0.1)):
        one = (StromCompressor(tau=0.1), refused)[rank % 2]
        raises(MismatchError, "what is refused: nothing", lambda one=one: wrapped(one))
    # The compressor may have run by then; what it keeps is as before, and ranks go on.
    for options in ({}, {"rollback": False}, {"bucket_bytes": 2500}):
        model, state = wrapped(StromCompressor(tau=0.1), **options)
        saved = copy.deepcopy(state.state_dict())
        train(model, sgd(model), 2)
        if rank == 0:
            state.load_state_dict(saved)
        kept = copy.deepcopy(state.state_dict())
        raises(OutOfStepError, "different steps", lambda m=model: backward(m, 5))
        for one, other in zip(kept["buckets"], state.state_dict()["buckets"]):
            assert all(torch.equal(x, other["state"][path]) for path, x in one["state"].items())
        state.load_state_dict(saved)
        train(model, sgd(model), 1)


def what_is_no_state():
    """It is refused as a whole, and training goes on; what no hook can compress is named."""
    model, state = wrapped(StromCompressor(tau=0.1))
    train(model, sgd(model), 2)
    saved = copy.deepcopy(state.state_dict())
    for spoil in ("missing", "another shape"):
        other = copy.deepcopy(saved)
        last = other["buckets"][-1]["state"]
        for path in list(last):
            if spoil == "missing":
                del last[path]
            else:
                last[path] = torch.zeros(3)
        for bucket in other["buckets"][:-1]:
            for x in bucket["state"].values():
                x.zero_()
        raises(
            CheckpointError,
            "is missing, or no",
            lambda s=other: state.load_state_dict(s),
        )
        for one, before in zip(state.state_dict()["buckets"], saved["buckets"]):
            assert all(torch.equal(x, before["state"][path]) for path, x in one["state"].items())
    train(model, sgd(model), 2, first=2)
    alike(vector(model))


class Words(torch.nn.Module):
    """A table of which a batch needs some rows, and a layer."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 4, sparse=True)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, words):
        return self.layer(self.table(words).mean(1))


def words_of(step):
    """Return this rank's rows: as many as its number, none for rank 0 at first, some twice."""
    rank = dist.get_rank()
    count = 0 if rank == 0 and step == 0 else 2 + 3 * rank
    return torch.randint(
        0, 25, (count, 2), generator=torch.Generator().manual_seed(100 * step + rank)
    )


def train_words(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(words_of(step)).square().sum().backward()
        assert model.module.table.weight.grad.is_sparse
        optimizer.step()


def sparse_gradients():
    """Rows are gathered as they are, or compressed as a dense gradient; sparse for an optimizer."""

    def words(compression, **options):
        torch.manual_seed(1)
        model = DistributedDataParallel(Words())
        return model, ddp.compress(model, compression, **options)

    torch.manual_seed(1)
    plain = DistributedDataParallel(Words())
    train_words(plain, sgd(plain), 4)
    for as_dense in (None, True, False):
        model, state = words(None, sparse_as_dense=as_dense)
        messages = logged(lambda m=model: train_words(m, sgd(m), 4))
        assert torch.allclose(vector(plain), vector(model), atol=1e-6), as_dense
        alike(vector(model))
        may_warn = as_dense is None and dist.get_rank() == 0
        assert [line for line in messages if "compressed as a dense one" in line] == messages
        assert bool(messages) <= may_warn
    rows = sum(words_of(step).unique().numel() for step in range(4))
    rows_sent = sum(_largest_count(words_of(step).unique().numel()) for step in range(4))
    stats = state.stats()
    assert stats.layers["table.weight"] == 4 * rows and stats.sizes["table.weight"] == 200
    assert stats.elements == stats.steps * vector(model).numel()
    assert stats.bytes_sent == 4 * 4 * 15 + rows_sent * (8 + 4 * 4)
    ddp.verify(state)
    with torch.no_grad():
        model.module.table.weight.add_(dist.get_rank())
    raises(ddp.DivergedError, "table.weight", lambda: ddp.verify(state))
    for as_dense in (True, False):
        model, state = words(StromCompressor(tau=0.05), sparse_as_dense=as_dense)
        adam = torch.optim.SparseAdam([model.module.table.weight], 0.01)
        train_words(model, adam, 2)
        saved = copy.deepcopy((model.state_dict(), state.state_dict()))
        again, other = words(StromCompressor(tau=0.05), sparse_as_dense=as_dense)
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        for each in (model, again):
            train_words(each, sgd(each), 3, first=2)
        assert torch.equal(vector(model), vector(again)) and other.stats() == state.stats()
        alike(vector(model))
    # What is not finite in a row of one rank alone.
    for policy in ("raise", "propagate"):
        for as_dense in (True, False):
            how = {"sparse_as_dense": as_dense, "nonfinite": policy, "release_buckets": as_dense}
            model, state = words(StromCompressor(tau=0.05), **how)
            train_words(model, sgd(model), 2)
            kept = copy.deepcopy(state.state_dict()["buckets"])
            factor = float("nan" if dist.get_rank() == 1 else "1")
            bad = (model.module.table(words_of(3)) * factor).sum() + 0 * model(words_of(3)).sum()
            if policy == "raise":
                raises(NonFiniteGradientError, "table" * (not as_dense), bad.backward)
            else:
                bad.backward()
                assert all(p.grad.to_dense().isnan().any() for p in model.parameters())
                for one, now in zip(kept, state.state_dict()["buckets"]):
                    assert all(torch.equal(x, now["state"][k]) for k, x in one["state"].items())
                assert state.stats().skipped == 1 and state.steps == 2
            train_words(model, sgd(model), 1, first=4)
            alike(vector(model))
    table = DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))  # and nothing else
    ddp.compress(table, StromCompressor(tau=0.1), sparse_as_dense=False)
    table(torch.tensor([1, dist.get_rank()])).sum().backward()
    mean = torch.tensor([0.5, 1.5, 0, 0, 0])
    assert torch.equal(table.module.weight.grad.to_dense(), torch.stack([mean, mean], 1))
    raises(
        MismatchError, "sparse_as_dense", lambda: words(None, sparse_as_dense=dist.get_rank() > 0)
    )


def _largest_count(count):
    """The largest number of all ranks."""
    largest = torch.tensor(count)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def settled_by_ddp():
    """What is frozen or thawed between `DistributedDataParallel` and `compress`."""
    for frozen in (True, False):
        model = ddp_model(find_unused_parameters=True) if frozen else ddp_model()
        for p in model.module.unused.parameters():
            p.requires_grad_(not frozen)
        ddp.compress(model, StromCompressor(tau=0.1))
        raises(ValueError, "before DistributedDataParallel(model)", lambda m=model: backward(m, 0))


def waits_as_long():
    """Our connections give up when those of the process group do."""
    _, state = wrapped(None)
    cpu = torch.device("cpu")
    ours, users = (g._get_backend(cpu) for g in (state._group.handle, dist.group.WORLD))
    assert ours.options._timeout == users.options._timeout == TIMEOUT


def batches_of(rank):
    """The last rank has the most; the first has none."""
    return 3 * rank


def with_zeros(model, optimizer, steps, scaler=None):
    """As `join` has it: a rank that has no batches gives zeros, and does not step."""
    for step in range(steps):
        optimizer.zero_grad()
        share = float(step < batches_of(dist.get_rank()))
        one = loss(model, step, dist.get_rank()) * share
        (scaler.scale(one) if scaler else one).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def joined(model, optimizer, scaler=None, **how):
    with model.join(**how):
        for step in range(batches_of(dist.get_rank())):
            optimizer.zero_grad()
            one = loss(model, step, dist.get_rank())
            (scaler.scale(one) if scaler else one).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()


def fewer_batches():
    """`join` is what gradients of zero are, to the bit, with every compressor."""
    steps = batches_of(dist.get_world_size() - 1)
    last = dist.get_rank() == dist.get_world_size() - 1  # its optimizer has made all steps
    for compression in [*ONE_OF_EACH, GRADIVEQ, LGC, LGC_SERVER]:
        trained, kept = [], []
        for train_by in (with_zeros, joined):
            model, state = wrapped(compression)
            arguments = (steps,) if train_by is with_zeros else ()
            train_by(model, sgd(model), *arguments)
            alike(vector(model))
            assert state.steps == steps, (compression, state.steps)
            trained.append(vector(model))
            kept.append(state.state_dict()["buckets"])
        if not compression.needs_execution_order:  # rank 0 has seen none
            assert torch.equal(*trained), compression
            for one, other in zip(*kept):
                assert all(torch.equal(x, other["state"][k]) for k, x in one["state"].items())
        train(model, sgd(model), 2, first=steps)  # all together again
        alike(vector(model))
    # Unused layers, moments of samples, a scaler; and a mean over those that take part.
    for options, compression, before in (
        ({"find_unused_parameters": True}, StromCompressor(tau=0.01), None),
        ({}, VarianceCompressor(alpha=0.5, moments="sample"), ddp.track_moments),
    ):
        model, _ = wrapped(compression, before=before, of_ddp=options)
        joined(model, sgd(model))
        alike(vector(model))
    trained = []
    for scaler in (None, torch.amp.GradScaler("cpu")):
        model, state = wrapped(StromCompressor(tau=0.01))
        joined(model, sgd(model), scaler)
        trained.append(vector(model))
        assert state.steps == steps and state.stats().skipped == 0
    assert torch.equal(*trained)
    for initial in (True, False):
        trained = []
        for compress in (False, True):
            model = ddp_model()
            if compress:
                ddp.compress(model, None)
            joined(model, sgd(model), divide_by_initial_world_size=initial)
            trained.append(vector(model))
        assert torch.allclose(*trained, atol=1e-6), initial
    trained = []  # with a compressor as the hook's state, which rank 0 makes without a backward
    for by_hook in (False, True):
        model = ddp_model()
        if by_hook:
            model.register_comm_hook(QSGDCompressor(), ddp.hook)
        else:
            ddp.compress(model, QSGDCompressor())
        joined(model, sgd(model))
        trained.append(vector(model))
    assert torch.equal(*trained)
    # What fails, fails on all ranks: those that have joined, too.
    model, _ = wrapped(StromCompressor(tau=0.01))
    x = torch.full((2, 12), float("nan" if last else "1"))

    def not_a_number():
        with model.join():
            if last:
                model(x).sum().backward()

    raises(NonFiniteGradientError, "", not_a_number)
    # A batch may be empty.
    model, _ = wrapped(VarianceCompressor(alpha=0.5, moments="sample"), before=ddp.track_moments)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8 * dist.get_rank(), 12)).square().sum().backward()
        optimizer.step()
    alike(vector(model))


def logged(function):
    """What is logged meanwhile."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hvd_gradcomp").addHandler(handler)
    function()
    logging.getLogger("hvd_gradcomp").removeHandler(handler)
    return messages


def saved_and_loaded(item):
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies():
    """A copy of a model exchanges gradients as they are; the original goes on as without it."""
    how = {"momentum": 0.9}
    for compression, before in (
        (VarianceCompressor(alpha=0.5, moments="sample"), ddp.track_moments),
        (DGCCompressor(density=0.1), None),
        (LGC, None),
        (QSGDCompressor(), None),
    ):
        plain = ddp_model(before)
        trained = []
        for copy_it in (None, copy.deepcopy, saved_and_loaded, AveragedModel):
            model = ddp_model(before)
            optimizer = sgd(model, **how)
            no_optimizer = compression.needs_execution_order or compression == QSGDCompressor()
            takes = {} if no_optimizer or before else {"optimizer": optimizer}
            state = ddp.compress(model, compression, **takes)
            train(model, optimizer, 2)
            if copy_it is not None:
                copied = copy_it(model)
                train(model, optimizer, 1, first=2)
                again = copied.module if copy_it is AveragedModel else copied
                plain.load_state_dict(again.state_dict())
                for one in (plain, again):
                    train(one, sgd(one), 2)
                assert torch.allclose(vector(plain), vector(again), atol=1e-6), compression
                raises(TypeError, "nothing compresses", lambda m=again: ddp.state_of(m))
                train(model, optimizer, STEPS - 3, first=3)
            else:
                train(model, optimizer, STEPS - 2, first=2)
            trained.append(vector(model))
            assert state.steps == STEPS and ddp.state_of(model) is state
        assert all(torch.equal(one, trained[0]) for one in trained), compression
    model, state = wrapped(StromCompressor(tau=0.01))
    messages = logged(
        lambda: (saved_and_loaded(model), saved_and_loaded(state), copy.deepcopy(state))
    )
    assert len(messages) == 1 and "save state.state_dict()" in messages[0], messages
    # It is compressed if it is asked for, with what belongs to it alone.
    model, state = wrapped(StromCompressor(tau=0.01))
    train(model, sgd(model), 2)
    again, none = copy.deepcopy((model, state))
    raises(RuntimeError, "ddp.compress(copy", lambda: none.stats())
    other = ddp.compress(again, StromCompressor(tau=0.01))
    kept = copy.deepcopy(state.state_dict())
    train(again, sgd(again), 2)
    assert other.steps == state.steps == 2
    for one, before in zip(state.state_dict()["buckets"], kept["buckets"]):
        assert all(torch.equal(x, before["state"][k]) for k, x in one["state"].items())
    # An optimizer has its momentum back, which a compressor has taken over from the original.
    model = ddp_model()
    optimizer = sgd(model, **how)
    ddp.compress(model, DGCCompressor(density=0.1), optimizer=optimizer)
    train(model, optimizer, 2)
    for again in (copy.deepcopy(optimizer), saved_and_loaded(optimizer)):
        assert again.param_groups[0]["momentum"] == 0.9
        assert type(again) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0


def tools_of_a_user(folder):
    """What looks into an exchange takes a model, or its state; and `Probe` needs no Horovod."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, state = wrapped(StromCompressor(tau=0.01))
    writers = [
        ddp.StatsWriter(source, every=2, writers=[ddp.JSONLines(folder / name, all_ranks=True)])
        for source, name in ((model, "model.jsonl"), (state, "state.jsonl"))
    ]
    probe = ddp.Probe(model.named_parameters(), 2)
    pair = ddp.Probe(model.named_parameters(), 1, process_set=dist.group.WORLD)
    optimizer = sgd(model)
    readings = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        readings.append(probe.step())
        assert pair.step()
        optimizer.step()
        for writer in writers:
            writer.step()
    for writer, name in zip(writers, ("model", "state")):
        writer.close()
        lines = (folder / f"{name}.{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [2, 4]
    assert [bool(each) for each in readings] == [True, False, True, False]
    assert readings[0][0].mutual_information is not None and readings[0][0].entropy > 0
    entropies = torch.tensor([each.entropy for each in readings[0]])
    alike(entropies)
    # The same to the bit as without: `every_method` trains without.
    plain, _ = wrapped(StromCompressor(tau=0.01))
    train(plain, sgd(plain), 4)
    assert torch.equal(vector(plain), vector(model))
    for source in (model, state, torch.compile(model)):
        assert ddp.compression_stats(source) == state.stats()
        assert "Strom(tau=0.01)" in ddp.describe(source)
        ddp.retrain(source)
        ddp.verify(source)
    report = str(state.stats())
    assert report.startswith("steps ") and "first.weight" in report, report
    assert repr(state.stats()).startswith("CompressionStats(steps=4")
    for other in (model.module, optimizer, None, 3, [], "model"):
        raises(TypeError, "ddp.compress", lambda x=other: ddp.describe(x))
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    raises(ddp.DivergedError, "", lambda: ddp.verify(state))
    assert size > 1


def given_to_the_hook():
    """A compressor as the hook's state, where a library makes the model."""
    for compression in (QSGDCompressor(), StromCompressor(tau=0.01), QSGDCompressor):
        trained = []
        for by_hook in (False, True):
            pair = [ddp_model(), ddp_model()]  # such as a generator and a discriminator
            for model in pair:
                if by_hook:
                    model.register_comm_hook(compression, ddp.hook)
                    raises(TypeError, "nothing compresses", lambda m=model: ddp.state_of(m))
                else:
                    ddp.compress(model, compression)
            for step in range(STEPS):
                for place, model in enumerate(pair):
                    train(model, sgd(model), 1, first=10 * place + step)
            for model in pair:
                alike(vector(model))
                assert ddp.state_of(model).steps == STEPS
            assert ddp.state_of(pair[0]) is not ddp.state_of(pair[1])
            trained.append([vector(model) for model in pair])
        assert all(torch.equal(*both) for both in zip(*trained)), compression
    for argument, kind, text in (
        (None, TypeError, "such as QSGDCompressor()"),
        ({"start": 3}, TypeError, "such as QSGDCompressor()"),
        (LGC, ValueError, "ddp.compress(model, compressor)"),
        (DGCCompressor(density=0.1), ValueError, "momentum"),
        ((QSGDCompressor(), None)[dist.get_rank() % 2], MismatchError, "what is refused"),
    ):
        model = ddp_model()
        model.register_comm_hook(argument, ddp.hook)
        raises(kind, text, lambda m=model: backward(m, 0))


def not_finite():
    for compression in (None, StromCompressor(tau=0.01), LGC):
        model, state = wrapped(compression)
        train(model, sgd(model), 2)
        x = torch.full((2, 12), float("nan" if dist.get_rank() == 1 else "1"))
        raises(NonFiniteGradientError, "", model(x).sum().backward)
        if compression is None:
            train(model, sgd(model), 1)  # the model is not in the middle of a step
    model, state = wrapped(StromCompressor(tau=0.01), nonfinite="propagate")
    train(model, sgd(model), 2)
    kept = state.state_dict()["buckets"]
    model(x).sum().backward()
    assert all(p.grad.isnan().all() for p in model.parameters() if p.requires_grad)
    now = state.state_dict()["buckets"]
    for one, other in zip(kept, now):
        assert all(torch.equal(one["state"][k], other["state"][k]) for k in one["state"])
    assert state.stats().skipped == 1 and state.steps == 2


def scaled():
    """A GradScaler changes nothing, and leaves a step out that is not finite."""
    trained = []
    for enabled in (False, True):
        model, state = wrapped(StromCompressor(tau=0.01))
        scaler, optimizer = torch.amp.GradScaler("cpu", enabled=enabled), sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss(model, step, dist.get_rank())).backward()
            scaler.step(optimizer)
            scaler.update()
        trained.append(vector(model))
    assert torch.equal(*trained)
    scaler.scale(model(torch.full((2, 12), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(vector(model), trained[1]) and state.stats().skipped == 1
    # The scaler of a step that has failed has nothing to do with the next one.
    saved = state.state_dict()
    state.load_state_dict({**saved, "steps": dist.get_rank()})
    raises(OutOfStepError, "", scaler.scale(loss(model, 7, dist.get_rank())).backward)
    state.load_state_dict(saved)
    x = torch.full((2, 12), float("nan"))
    raises(NonFiniteGradientError, "", model(x).sum().backward)


def left_alone():
    """Whoever waits for a rank that does something else waits for the timeout, and no longer.

    With fewer batches, with a collective of the user's own on one rank, and an exception there.
    """
    seconds = 2
    for does in ("nothing", "all_reduce", "raises"):
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        model, _ = wrapped(StromCompressor(tau=0.01), of_ddp={"process_group": group})
        train(model, sgd(model), 2)
        began = time.monotonic()
        if dist.get_rank() == 0:
            raises(
                RuntimeError,
                "has stopped" if does == "raises" else "fewer batches",
                lambda m=model: train(m, sgd(m), 1),
            )
        elif does == "all_reduce":
            raises(RuntimeError, "", lambda g=group: dist.all_reduce(torch.ones(3), group=g))
        elif does == "raises":
            state = ddp.state_of(model)
            raises(ValueError, "sparse=False", lambda m=model, s=state: fails_in_backward(m, s))
        else:
            time.sleep(seconds + 2)
        assert time.monotonic() - began < 5 * seconds
        dist.barrier()


def fails_in_backward(model, state):
    """An error of this rank alone while it exchanges: its gradient cannot be taken."""

    def refuse(*_):
        raise ValueError("sparse=False")

    state.reducer.mark_all_ready = refuse
    backward(model, 5)


def one_ends():
    """The last part of all: a rank that is gone is an error on the others."""
    model, _ = wrapped(StromCompressor(tau=0.01))
    train(model, sgd(model), 2)
    if dist.get_rank() == 0:
        raises(RuntimeError, "torchrun --max-restarts", lambda: train(model, sgd(model), 9))


def one_fails():
    """A rank that meets an error of its own does not leave the others waiting.

    Also where it has sent a part before.
    """
    for place in (0, -1):
        model, state = wrapped(QSGDCompressor(bits=8, exchange="two_shot"), bucket_bytes=2500)
        train(model, sgd(model), 2)
        if dist.get_rank() == 1:
            state.reducer.buckets[place].compressor = None
        began = time.monotonic()
        raises(Exception, "", lambda m=model: backward(m, 3))
        raises(RuntimeError, "", lambda m=model: backward(m, 4))
        dist.barrier()
        assert time.monotonic() - began < 60


def compiled():
    """A whole step, by `torch.compile` in each of its ways with DDP: ours is left out of it."""
    traced = torch._dynamo.convert_frame.input_codes

    def model_of(mode):
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = mode
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

    def steps(model, optimizer, by, at_once):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
        forward = by(model) if not at_once else model

        def step():
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            optimizer.step()

        step = by(step) if at_once else step
        for _ in range(3):
            step()
        seen = [code() for code in traced.seen]
        ours = [code.co_filename for code in seen if code is not None]
        assert not [name for name in ours if "hvd_gradcomp" in name], ours
        return vector(model)

    def by_ddp(model, compression):
        model = DistributedDataParallel(model)
        ddp.compress(model, compression)
        return model, sgd(model)

    def by_hook(model, compression):
        model = DistributedDataParallel(model)
        model.register_comm_hook(compression, ddp.hook)
        return model, sgd(model)

    def by_momenta(model, compression):
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        return model, ddp.MomentumExchange(adam, model.named_parameters(), compression)

    def by_local_steps(model, compression):
        named = model.named_parameters()
        return model, ddp.LocalSteps(sgd(model), named, 2, compression=compression)

    strom, variance = StromCompressor(tau=0.01), VarianceCompressor(alpha=0.5, moments="step")
    compile = partial(torch.compile, backend="aot_eager")
    modes = [True, "no_optimization", "python_reducer_without_compiled_forward"]
    cases = [(wrap, strom, True) for wrap in (by_hook, by_momenta, by_local_steps)]
    cases += [(by_ddp, variance, mode) for mode in modes]
    try:
        for wrap, compression, mode in cases:
            eagerly = steps(*wrap(model_of(mode), compression), by=lambda x: x, at_once=False)
            for at_once in (False, True):
                compiled = steps(*wrap(model_of(mode), compression), by=compile, at_once=at_once)
                torch.testing.assert_close(compiled, eagerly)
                if wrap is not by_local_steps:
                    alike(compiled)
        text = "has no buckets whose exchange could be compressed"
        raises(ValueError, text, lambda: by_ddp(model_of("python_reducer"), strom))
        if dist.get_rank() == 1:  # what one rank alone has set
            raises(MismatchError, text, lambda: by_ddp(model_of("python_reducer"), strom))
        else:
            raises(MismatchError, text, lambda: by_ddp(model_of(True), strom))
        model, _ = by_hook(model_of("python_reducer"), strom)
        with torch._dynamo.config.patch(compiled_autograd=True):
            loss = torch.compile(lambda: model(torch.ones(2, 5)).sum(), backend="eager")
            raises(ValueError, text, lambda: loss().backward())
    finally:
        torch._dynamo.config.optimize_ddp = True
        torch._dynamo.reset()


def local_steps():
    """Each rank trains a plain module alone; saved and resumed to the bit between exchanges."""
    ends = []
    for compression in [None, *ONE_OF_EACH[1:4], *TODAY[:4]]:
        torch.manual_seed(1)
        model = Model()
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        how = {"compression": compression, "fragments": 2, "delay": 1}
        optimizer = ddp.LocalSteps(adam, model.named_parameters(), 3, **how)
        train(model, optimizer, 5)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for _ in range(2):
            train(model, optimizer, 4, 5)
            optimizer.exchange()
            ends.append(vector(model))
            alike(ends[-1])
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        assert torch.equal(*ends[-2:]), compression
        assert ddp.compression_stats(optimizer).steps == 5
    torch.manual_seed(1)
    model = Model()
    how = {"compression": TODAY[0], "deadline": 0.5}
    optimizer = ddp.LocalSteps(sgd(model), model.named_parameters(), 3, **how)
    while optimizer.rounds < 3:
        time.sleep(0.02 * dist.get_rank())
        train(model, optimizer, 1, optimizer.steps_made)
    ddp.verify(optimizer)  # the clock of rounds has connections of its own
    optimizer.exchange()
    alike(vector(model))
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, optimizer.steps_made)
    assert steps[0] == max(steps) and (len(steps) == 1 or min(steps) < max(steps)), steps
    torch.manual_seed(1)
    model = Model()
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    momenta = ddp.MomentumExchange(adam, model.named_parameters(), TODAY[0], warmup_steps=2)
    train(model, momenta, 5)
    alike(vector(model))
    every = 2 + 2 * dist.get_rank()
    model = Model()
    named = model.named_parameters()
    raises(MismatchError, "every=", lambda: ddp.LocalSteps(sgd(model), named, every))


def reductions(run):
    """Return how many collectives that are not ours alone `run` has made: those of DDP."""
    with torch.profiler.profile() as profile:
        run()
    return [e.name for e in profile.events() if e.name in COLLECTIVES]


def a_backward():
    """Mark a part of what `reductions_by_backward` runs."""
    return torch.profiler.record_function(BACKWARD)


def reductions_by_backward(run):
    """Return, for each part that `a_backward` marks, the collectives that began in it.

    What our optimizers send begins between these parts. The events are taken as they were recorded:
    to arrange some thousands of them takes longer than to train.
    """
    with torch.profiler.profile() as profile:
        run()
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profile.profiler.kineto_results.events()
    ]
    spans = sorted((start, end) for start, end, name in events if name == BACKWARD)
    begun = [(start, name) for start, _, name in events if name in COLLECTIVES]
    return [[name for at, name in begun if start <= at <= end] for start, end in spans]


class Normed(torch.nn.Module):
    """A model with buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
        )

    def forward(self, x):
        return self.layers(x)


OPTIONS_OF_DDP = (
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
)


def local_steps_of_ddp():
    """Local steps and momenta of a wrapped model: DDP makes no collective, nor trains after.

    With every option of DDP, under `no_sync`, where a loop sets `require_backward_grad_sync`, after
    a warm-up. One that is wrapped later has reduced a gradient, which momenta begin with anyhow.
    """
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(dist.get_rank()))

    def backward_twice(model):
        for _ in range(2):
            with a_backward():
                model(x).square().mean().backward()

    def plain_and_wrapped(wrap, make, steps=8):
        def trained(model, optimizer, of_ddp):
            for step in range(steps):
                optimizer.zero_grad()
                if of_ddp is not None:
                    model.require_backward_grad_sync = True  # as loops that accumulate do
                apart = of_ddp is not None and step and "static_graph" not in of_ddp
                with model.no_sync() if apart else nullcontext(), a_backward():
                    model(x + step).square().mean().backward()
                optimizer.step()

        ends = []
        for of_ddp in (None, *OPTIONS_OF_DDP):
            model = Normed()
            names = list(model.named_parameters())
            if of_ddp is not None and wrap == "before":
                model = DistributedDataParallel(model, **of_ddp)
                names = list(model.named_parameters())
            optimizer = make(model, names)
            if of_ddp is not None and wrap == "after":
                model = DistributedDataParallel(model, **of_ddp)
            made = reductions_by_backward(partial(trained, model, optimizer, of_ddp))
            assert len(made) == steps
            first, second, *others = made
            assert not any(others), (of_ddp, made)
            if wrap == "before":  # else it plans its buckets anew in the second forward
                assert not first and not second, (of_ddp, made)
            optimizer.exchange() if hasattr(optimizer, "exchange") else None
            alike(vector(model))
            ends.append(vector(model))
            if of_ddp is not None:
                copied = copy.deepcopy(model)
                assert type(copied) is DistributedDataParallel is not type(model)
                assert isinstance(model, DistributedDataParallel)
                off = type(model)
                optimizer.itself = optimizer  # a cycle, which ranks collect at different times
                del optimizer
                if dist.get_rank() == 0:
                    gc.collect()
                assert type(model) is off
                gc.collect()
                raises(RuntimeError, "wrap the module in", lambda m=model: m(x))
                with torch.no_grad():
                    model(x)
                anew = DistributedDataParallel(model.module, **of_ddp)
                made = reductions_by_backward(partial(backward_twice, anew))
                assert len(made) == 2, made
                assert all("gloo:all_reduce" in one for one in made), (of_ddp, made)
        return ends

    for how in ({}, {"warmup_steps": 3}):

        def local(model, names, how=how):
            return ddp.LocalSteps(sgd(model), names, 4, AVERAGE, ChunkedTopKCompressor(k=8), **how)

        plain, *others = plain_and_wrapped("before", local, 8 if how else 20)
        assert all(torch.equal(plain, other) for other in others)
    late = Normed()
    optimizer = local(late, list(late.named_parameters()))
    late = DistributedDataParallel(late)
    late(x).square().mean().backward()
    raises(ValueError, "was wrapped around the model after", optimizer.step)

    def momenta(model, names):
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        return ddp.MomentumExchange(adam, names, TODAY[0], warmup_steps=2)

    plain_and_wrapped("after", momenta)
    plain, *others = plain_and_wrapped("before", momenta)
    assert all(torch.equal(plain, other) for other in others)


def two_exchanges():
    """Check that two exchanges of the same parameters are an error on all ranks, naming both."""

    def local(model, optimizer=None, **how):
        optimizer = optimizer or sgd(model)
        return ddp.LocalSteps(optimizer, model.named_parameters(), 4, AVERAGE, **how)

    def momenta(model):
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        return ddp.MomentumExchange(adam, model.named_parameters(), None, warmup_steps=2)

    model, _ = wrapped(None)
    raises(ValueError, "has a communication hook", lambda: ddp.compress(model, TODAY[0]))
    both = "ddp.LocalSteps and ddp.compress would both exchange"
    model, _ = wrapped(None)
    raises(ValueError, both, lambda: local(model))
    raises(ValueError, "ddp.MomentumExchange and ddp.compress", lambda: momenta(model))
    train(model, sgd(model), 1)
    model = ddp_model()
    optimizer = local(model)
    raises(ValueError, "ddp.compress and ddp.LocalSteps", lambda: ddp.compress(model, None))
    raises(ValueError, "ddp.MomentumExchange and ddp.LocalSteps", lambda: momenta(model))
    for inner in (optimizer, momenta(Model())):
        raises(ValueError, "exchanges already, as a", lambda x=inner: local(model, x))
    earlier, optimizer = optimizer, local(model)  # made anew
    raises(RuntimeError, "another ddp.LocalSteps was made since", earlier.step)
    del earlier
    train(model, optimizer, 4)
    del optimizer
    raises(RuntimeError, "or make such an optimizer", lambda: backward(model, 0))
    optimizer = momenta(model)  # the other one is gone
    train(model, optimizer, 3)
    alike(vector(model))
    # PyTorch's own hooks, and a compressor as the state of ours.
    for state, hook in ((None, fp16_compress_hook), (QSGDCompressor(), ddp.hook)):
        model = ddp_model()
        model.register_comm_hook(state, hook)
        raises(ValueError, hook.__name__, lambda m=model: local(m))
    # Wrapped after it was made.
    model = Model()
    optimizer = local(model)
    late = DistributedDataParallel(model, find_unused_parameters=True)
    late.register_comm_hook(None, fp16_compress_hook)
    raises(ValueError, "fp16_compress_hook", lambda: train(late, optimizer, 1))
    # Parameters of DDP that no optimizer exchanges; two optimizers that share them.
    model = ddp_model()
    heads = [sgd(part) for part in (model.module.first, model.module.second, model.module.third)]
    makes = [lambda h=head: ddp.LocalSteps(h, None, 4, AVERAGE) for head in heads]
    optimizers = [make() for make in makes[:2]]
    backward(model, 0)
    raises(ValueError, "that ddp.LocalSteps does not exchange", optimizers[0].step)
    raises(ValueError, "third.weight", optimizers[1].step)
    optimizers = [make() for make in makes]
    assert not reductions(lambda: backward(model, 1))
    for step in range(4):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
    alike(vector(model))
    # Levels of a hierarchy have one rank in common.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = ddp_model(process_group=alone)
    optimizer = local(model)
    assert type(model) is DistributedDataParallel
    train(model, optimizer, 4)
    alike(vector(model))
    # One rank alone refuses, when it is made and at its first step.
    model, kept = Model(), []
    base = "adam" if dist.get_rank() == 0 else sgd(model)
    raises(
        MismatchError,
        "Optimizer, got str on rank 0, nothing on rank 1",
        lambda: local(model, base),
    )
    refused = ddp_model()
    base = "adam" if dist.get_rank() == 0 else sgd(refused)
    for make in (
        lambda: local(refused, base),
        lambda: ddp.compress(refused, "adam" if dist.get_rank() == 0 else None),
    ):
        try:
            make()
        except MismatchError as error:
            kept.append(error)  # with its traceback, which has what was made
        assert type(refused) is DistributedDataParallel
    assert len(kept) == 2
    train(refused, momenta(refused), 2)
    optimizer = local(model)
    if dist.get_rank() == 0:
        optimizer._claim.check_models = lambda whole: fails("wrapped here alone")
    raises(MismatchError, "wrapped here alone on rank 0", lambda: train(model, optimizer, 1))


def fails(text):
    raise ValueError(text)


def sharded_models():
    """Are refused by name when the optimizer is made, and at the first step if sharded since."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def by_fsdp2():
        return fully_shard(Model(), mesh=mesh)

    def by_fsdp1():
        return FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))

    for shard, message in ((by_fsdp2, "by fully_shard or tensor"), (by_fsdp1, "by FSDP1")):
        model = shard()
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        for make in (
            lambda x=adam: ddp.LocalSteps(x, None, 4, AVERAGE),
            lambda x=adam: ddp.MomentumExchange(x, None, None, warmup_steps=2),
        ):
            raises(TypeError, message, make)
    plain = Model()
    inner = sgd(plain)
    optimizer = ddp.LocalSteps(inner, plain.named_parameters(), 4, AVERAGE)
    inner.param_groups[0]["params"] = list(by_fsdp2().parameters())  # as Accelerate does
    raises(TypeError, "by fully_shard", optimizer.step)


def different_seeds():
    """Are an error in the first step, on all ranks; not if parameters are broadcast before it."""
    for seeded in ("apart", "broadcast", "loaded"):
        for make in (
            lambda m: ddp.LocalSteps(sgd(m), m.named_parameters(), 50, AVERAGE),
            lambda m: ddp.LocalSteps(sgd(m), m.named_parameters(), 50, AVERAGE, warmup_steps=3),
            lambda m: ddp.LocalSteps(sgd(m), m.named_parameters(), 50, AVERAGE, deadline=60.0),
            lambda m: ddp.MomentumExchange(
                torch.optim.AdamW(m.parameters(), 0.01), m.named_parameters(), None, warmup_steps=2
            ),
        ):
            torch.manual_seed(dist.get_rank())
            model = Model()
            optimizer = make(model)
            if seeded == "apart":
                raises(
                    ddp.DivergedError,
                    "the global parameters of the ranks differ",
                    lambda m=model, o=optimizer: train(m, o, 1),
                )
                continue
            if seeded == "broadcast":
                for p in model.parameters():
                    dist.broadcast(p.detach(), 0)
            else:
                torch.manual_seed(3)
                model.load_state_dict(Model().state_dict())
            train(model, optimizer, 2)


def discarded():
    """A step that all leave out leaves no trace; one that some leave out is an error on all."""
    ends = []
    for bad in (False, True):
        for compression in (DGCCompressor(density=0.1, momentum=0.9), StromCompressor(tau=0.01)):
            model, state = wrapped(compression)
            optimizer = sgd(model)
            for step in range(STEPS):
                if bad:
                    optimizer.zero_grad()
                    (1e4 * loss(model, step + 50, dist.get_rank())).backward()
                    state.discard_step()
                train(model, optimizer, 1, step)
            kept = [x for bucket in state.state_dict()["buckets"] for x in bucket["state"].values()]
            ends.append([vector(model), *kept])
            assert (state.steps, state.stats().skipped) == (STEPS, STEPS * bad)
    half = len(ends) // 2
    for one, other in zip(ends[:half], ends[half:]):
        assert all(map(torch.equal, one, other))
    state.discard_step()
    raises(RuntimeError, "call it once, after backward", state.discard_step)
    model, state = wrapped(StromCompressor(tau=0.01), rollback=False)
    train(model, sgd(model), 1)
    raises(RuntimeError, "without rollback=False", state.discard_step)
    model, state = wrapped(StromCompressor(tau=0.01))
    train(model, sgd(model), 1)
    if dist.get_rank() == 0:
        state.discard_step()
    raises(OutOfStepError, "the ranks are in different steps", lambda: backward(model, 1))


class Mixed(torch.nn.Module):
    """Layers of every precision; behind odd ones complex numbers lie at odd places of a bucket."""

    def __init__(self):
        super().__init__()
        self.single = torch.nn.Linear(3, 1, bias=False)
        self.waves = torch.nn.Linear(3, 2, dtype=torch.complex64)
        self.wide = torch.nn.Linear(1, 1, dtype=torch.float64)
        self.wide_waves = torch.nn.Linear(2, 1, bias=False, dtype=torch.complex128)

    def forward(self, x):
        waves = self.wide_waves(self.waves(x).to(torch.complex128)).abs()
        return self.wide(waves * self.single(x.real)).square().sum()


def complex_parameters():
    """Two real ones, by the hook as by plain DistributedDataParallel."""
    x = torch.randn(
        4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    gradients = []
    powers = PowerSGDCompressor(rank=2)
    for compression in ("plain", None, powers, QSGDCompressor(bits=8), CHUNKED):
        torch.manual_seed(1)
        model = DistributedDataParallel(Mixed())
        if compression != "plain":
            ddp.compress(model, compression)
        model(x).backward()
        real = [
            torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in model.parameters()
        ]
        gradients.append(torch.cat([g.double().flatten() for g in real]))
        alike(gradients[-1])
    plain, dense, factors, levels, _ = gradients
    torch.testing.assert_close(dense, plain)
    torch.testing.assert_close(factors, plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(levels, plain, rtol=0.05, atol=0.02 * float(plain.abs().max()))


def in_inference_mode():
    """Check that no call between steps makes state that later steps cannot write to."""
    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        for compression in (DGCCompressor(density=0.1, momentum=0.9), CHUNKED):
            model = ddp_model()
            with mode():
                state = ddp.compress(model, compression)
            optimizer = sgd(model)
            for step in range(6):
                train(model, optimizer, 1, step)
                with mode():
                    state.load_state_dict(state.state_dict())
                    state.retrain()
                    ddp.verify(model)
                optimizer.zero_grad()
                loss(model, step + 50, dist.get_rank()).backward()
                with mode():
                    state.discard_step()
                optimizer.zero_grad()
            ends.append(vector(model))
    assert all(map(torch.equal, ends[:2], ends[2:]))


def later_rounds_during_backward():
    """From the second step on they are requested before the last gradient is there."""
    model, state = wrapped(PowerSGDCompressor(rank=1), bucket_bytes=2000)
    reduce, requested = dist.all_reduce, []

    def counted(*arguments, **named):
        requested.append("round")
        return reduce(*arguments, **named)

    model.module.first.weight.register_hook(lambda _: requested.append("last gradient"))
    dist.all_reduce = counted
    before = []
    try:
        for step in range(3):
            requested.clear()
            backward(model, step)
            before.append(requested.index("last gradient"))
    finally:
        dist.all_reduce = reduce
    assert before[1] == before[2] > before[0], (before, requested)
    assert len(state.reducer.buckets) > 2


def released_buckets():
    """Gradients to the bit those of kept buckets; and where they lie meanwhile."""
    for view, compression in itertools.product(
        (False, True),
        (ChunkedTopKCompressor(k=8), OneBitCompressor(), PowerSGDCompressor(rank=1), None),
    ):
        results = []
        for released in (False, True):
            of_ddp = (
                {"gradient_as_bucket_view": True, "find_unused_parameters": True} if view else {}
            )
            how = {"bucket_bytes": 9000, "release_buckets": released}
            model, state = wrapped(compression, of_ddp=of_ddp, **how)
            optimizer, seen = sgd(model), []
            last, first = model.module.third.weight, model.module.first.weight
            first.register_hook(lambda _, p=last, seen=seen: seen.append(p.grad))
            for step in range(STEPS):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                with model.no_sync():
                    backward(model, step + STEPS)
                seen.clear()
                backward(model, step)
                if view:  # and step 0 has one bucket of DDP
                    assert (seen[-1] is None) is released or step == 0, (step, seen)
                optimizer.step()
            kept = [bucket.flat.untyped_storage().nbytes() for bucket in state.reducer.buckets]
            assert released is not any(kept), kept
            results.append(vector(model))
        assert torch.equal(*results), (view, compression)
        alike(results[1])
    step_left_out(release_buckets=True)


def step_left_out(**options):
    """A step with an infinity, and the steps after it."""
    model, state = wrapped(OneBitCompressor(), nonfinite="propagate", **options)
    optimizer = sgd(model)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    (loss(model, 2, dist.get_rank()) * float("inf")).backward()
    assert all(p.grad.isnan().all() for p in model.parameters() if p.grad is not None)
    assert state.stats().skipped == 1
    train(model, optimizer, 2, first=3)
    alike(vector(model))


def made_and_dropped():
    """Cross-validation, sweeps: a process holds as much after the fifth model as after the second.

    With three ranks two of them take part.
    """
    group = dist.new_group([0, 1]) if dist.get_world_size() > 2 else None
    if dist.get_rank() < 2:
        for name, make in lifetimes_of(group).items():
            leaves_nothing(name, make)
        kept_by_one_rank(group)
    dist.barrier()


def lifetimes_of(group):
    of_ddp = {"process_group": group}

    def stock():
        model = ddp_model(**of_ddp)
        train(model, sgd(model), 3)
        return [model.module]

    def compressed(compression=None, momentum=0.0, **options):
        compression = compression or QSGDCompressor()
        model = ddp_model(**of_ddp)
        optimizer = sgd(model, momentum=momentum)
        if momentum:
            options["optimizer"] = optimizer
        state = ddp.compress(model, compression, **options)
        train(model, optimizer, 3)
        state.load_state_dict(state.state_dict())
        ddp.verify(model)
        return [model.module, state, state.reducer, optimizer]

    def in_a_cycle():
        made = compressed()
        made[1].itself = made[1]
        return made

    def micro_batches():
        model = ddp_model(**of_ddp)
        compression = VarianceCompressor(alpha=2.0)
        state = ddp.compress(model, compression, backward_passes_per_step=2)
        for step in range(3):
            with model.no_sync():
                backward(model, step)
            backward(model, step)
        return [model.module, state, state.reducer]

    def per_sample():
        model = ddp_model(ddp.track_moments, **of_ddp)
        state = ddp.compress(model, VarianceCompressor(alpha=2.0))
        train(model, sgd(model), 3)
        return [model.module, state, state.reducer]

    def hook():
        model = ddp_model(**of_ddp)
        model.register_comm_hook(QSGDCompressor(), ddp.hook)
        train(model, sgd(model), 3)
        return [model.module, ddp.state_of(model)]

    def scaled_and_logged():
        model = ddp_model(**of_ddp)
        state, optimizer = ddp.compress(model, QSGDCompressor()), sgd(model)
        scaler = torch.amp.GradScaler("cpu")
        writer = ddp.StatsWriter(state, every=1, writers=[ddp.JSONLines(os.devnull)])
        for step in range(3):
            scaler.scale(loss(model, step, dist.get_rank())).backward()
            scaler.step(optimizer)
            scaler.update()
            writer.step()
        return [model.module, state, scaler, writer]

    def trainer():
        training = trainers.CompressedTraining(QSGDCompressor(), {})
        model = ddp_model(**of_ddp)
        training.begin(model)
        train(model, sgd(model), 3)
        saved, size = training.state.state_dict(), dist.get_world_size()
        training.load(trainers.SavedStates(size, [], lambda _: saved), "a file")
        return [model.module, training, training.state]

    def wrapped_optimizer(make, deadline=None):
        torch.manual_seed(1)
        model = Model()
        optimizer = make(model)
        train(model, optimizer, 3)
        if deadline:
            optimizer.exchange()  # else one rank may begin a round after another's last step
        return [model, optimizer, *optimizer.all_reducers]

    def local_steps(**options):
        how = {"every": 2, "compression": QSGDCompressor(), **of_ddp, **options}
        return lambda: wrapped_optimizer(
            lambda m: ddp.LocalSteps(sgd(m), m.named_parameters(), **how), options.get("deadline")
        )

    def buffers():
        return local_steps(named_buffers=[("mean", torch.ones(3))])()

    def momentum_exchange():
        return wrapped_optimizer(
            lambda m: ddp.MomentumExchange(
                torch.optim.Adam(m.parameters()),
                m.named_parameters(),
                OneBitCompressor(),
                1,
                **of_ddp,
            )
        )

    every = {
        "stock": stock,
        "compress": compressed,
        "momentum": lambda: compressed(DGCCompressor(density=0.1), momentum=0.9),
        "in a cycle": in_a_cycle,
        "micro-batches": micro_batches,
        "moments of samples": per_sample,
        "hook": hook,
        "GradScaler, StatsWriter": scaled_and_logged,
        "trainer": trainer,
        "LocalSteps": local_steps(warmup_steps=1, fragments=2),
        "LocalSteps, on its way": local_steps(delay=1),
        "LocalSteps, deadline": local_steps(deadline=60.0),
        "LocalSteps, buffers": buffers,
        "MomentumExchange": momentum_exchange,
    }
    if group is None:
        mesh = init_device_mesh("cpu", (1, 2))
        every["hierarchical"] = lambda: compressed(hierarchical=mesh)
        every["LocalSteps, ranks apart"] = local_steps_apart
    return every


def local_steps_apart():
    """A rank has submitted the number of its steps, and the other one never does."""
    torch.manual_seed(1)
    model = Model()
    how = {"every": 3, "deadline": 60.0}
    optimizer = ddp.LocalSteps(sgd(model), model.named_parameters(), **how)
    train(model, optimizer, 2)
    optimizer.exchange()
    train(model, optimizer, 1 + dist.get_rank())
    return [model, optimizer]


def kept_by_one_rank(group):
    """Check that a connection that one rank alone has dropped is not used again."""
    models = []
    for _ in range(3):
        model, state = wrapped(StromCompressor(tau=0.01), of_ddp={"process_group": group})
        train(model, sgd(model), 2)
        models += [(model, state)] if dist.get_rank() == 1 or not models else []
    train(models[0][0], sgd(models[0][0]), 2)
    alike(vector(models[0][0]), group)


def compared(folder):
    """What `torch_compared` does over Horovod."""
    for place, compression in enumerate(ONE_OF_EACH):
        model, _ = wrapped(compression)
        train(model, sgd(model), STEPS)
        torch.save(vector(model), folder / f"ddp-{place}-{dist.get_rank()}.pt")


def main(parts=None):
    parts = parts or globals()
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    met = f"file://{folder}/met"
    dist.init_process_group("gloo", met, timeout=TIMEOUT, rank=rank, world_size=size)
    done = []
    for name in sys.argv[4:]:
        if name in ("compared", "tools_of_a_user", "distributed_checkpoint"):
            parts[name](folder)
        else:
            parts[name]()
        done.append(name)
        (folder / f"{rank}.json").write_text(json.dumps(done))
    assert not [name for name in sys.modules if name.startswith("horovod.")]


if __name__ == "__main__":
    main()
