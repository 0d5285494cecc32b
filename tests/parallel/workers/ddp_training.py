"""DistributedDataParallel with every method, on one rank of several; no Horovod."""

from __future__ import annotations

import copy
import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import (
    DGCCompressor,
    StromCompressor,
    VarianceCompressor,
    partition,
    smaller,
)
from hvd_gradcomp.engine.handshake import MismatchError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.saving import checkpoint
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.rounds import OutOfStepError
from tests.methods import GRADIVEQ, LGC, LGC_SERVER, ONE_OF_EACH, VARIANCE
from tests.parallel.workers.perceptron import STEPS, Model, loss, vector

TIMEOUT = datetime.timedelta(minutes=3)


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
    for compression in [*ONE_OF_EACH, GRADIVEQ, LGC, LGC_SERVER]:
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
    torch.manual_seed(1)
    plain = DistributedDataParallel(Model(), find_unused_parameters=True)
    ours, _ = wrapped(None, of_ddp={"find_unused_parameters": True})
    for model in (plain, ours):
        train(model, sgd(model), 3)
    assert torch.allclose(vector(plain), vector(ours), atol=1e-6)


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


def state_goes_on():
    for compression in (LGC, DGCCompressor(density=0.05, momentum=0.9), VARIANCE):
        model, state = wrapped(compression)
        train(model, sgd(model), 3)
        saved = copy.deepcopy((model.state_dict(), state.state_dict()))
        train(model, sgd(model), 3, first=3)
        again, other = wrapped(compression)
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        train(again, sgd(again), 3, first=3)
        assert torch.equal(vector(model), vector(again)), compression
        assert other.steps == 6 and other.stats() == state.stats()


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
    model, state = wrapped(StromCompressor(tau=0.1))
    saved = state.state_dict()
    train(model, sgd(model), 2)
    if rank == 0:
        state.load_state_dict(saved)
    raises(OutOfStepError, "different steps", lambda: backward(model, 5))


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
            checkpoint.CheckpointError,
            "is missing, or no",
            lambda s=other: state.load_state_dict(s),
        )
        for one, before in zip(state.state_dict()["buckets"], saved["buckets"]):
            assert all(torch.equal(x, before["state"][path]) for path, x in one["state"].items())
    train(model, sgd(model), 2, first=2)
    alike(vector(model))
    table = DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))
    ddp.compress(table, StromCompressor(tau=0.1))
    raises(
        ValueError, "make the embedding with sparse=False", table(torch.tensor([1])).sum().backward
    )


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


def fewer_batches():
    """`join`, and a rank whose batch is empty."""
    trained = []
    for compression in (None, "plain", StromCompressor(tau=0.01), LGC_SERVER):
        model = ddp_model()
        if compression != "plain":
            ddp.compress(model, compression)
        with model.join():
            train(model, sgd(model), 3 + dist.get_rank())
        alike(vector(model))
        trained.append(vector(model))
    assert torch.allclose(trained[0], trained[1], atol=1e-6)
    model, _ = wrapped(VarianceCompressor(alpha=0.5, moments="sample"), before=ddp.track_moments)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8 * dist.get_rank(), 12)).square().sum().backward()
        optimizer.step()
    alike(vector(model))


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


def one_ends():
    """The last part of all: a rank that is gone is an error on the others."""
    model, _ = wrapped(StromCompressor(tau=0.01))
    train(model, sgd(model), 2)
    if dist.get_rank() == 0:
        raises(RuntimeError, "another rank has stopped", lambda: train(model, sgd(model), 9))


def one_fails():
    """A rank that meets an error of its own does not leave the others waiting."""
    model, state = wrapped(StromCompressor(tau=0.01))
    train(model, sgd(model), 2)
    if dist.get_rank() == 1:
        bucket = state._run.buckets[0]
        bucket.state = None
    raises(Exception, "", lambda: backward(model, 3))
    raises(RuntimeError, "", lambda: backward(model, 4))


def compared(folder):
    """What `torch_compared` does over Horovod."""
    for place, compression in enumerate(ONE_OF_EACH):
        model, _ = wrapped(compression)
        train(model, sgd(model), STEPS)
        torch.save(vector(model), folder / f"ddp-{place}-{dist.get_rank()}.pt")


def main():
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    met = f"file://{folder}/met"
    dist.init_process_group("gloo", met, timeout=TIMEOUT, rank=rank, world_size=size)
    done = []
    for name in sys.argv[4:]:
        if name == "compared":
            compared(folder)
        else:
            globals()[name]()
        done.append(name)
        (folder / f"{rank}.json").write_text(json.dumps(done))
    assert not [name for name in sys.modules if name.startswith("horovod.")]


if __name__ == "__main__":
    main()
