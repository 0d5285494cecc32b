"""DistributedDataParallel on two hosts of two ranks, one rank of four; no Horovod.

A host is what the variables of torchrun say.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    QSGDCompressor,
    StromCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.torch import ddp
from tests.methods import GRADIVEQ, LGC, LGC_SERVER, ONE_OF_EACH_EXCHANGE, PRODUCTS
from tests.parallel.workers import ddp_training
from tests.parallel.workers.ddp_training import (
    alike,
    backward,
    batches_of,
    joined,
    raises,
    sgd,
    train,
    with_zeros,
)
from tests.parallel.workers.perceptron import STEPS, Model, vector

STROM = StromCompressor(tau=0.01)
TWO_ROUNDS = QSGDCompressor(bits=8, exchange="two_shot")


@contextlib.contextmanager
def hosts(*sizes, order=None):
    """Hosts of so many ranks, as torchrun tells them; `order` has the ranks host by host."""
    order = order or range(sum(sizes))
    places = [(host, slot, size) for host, size in enumerate(sizes) for slot in range(size)]
    place = places[list(order).index(dist.get_rank())]
    variables = dict(zip(("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), map(str, place)))
    before = dict(os.environ)
    os.environ.update(variables)
    yield
    os.environ.clear()
    os.environ.update(before)


def wrapped(compression, before=None, of_ddp=None, **options):
    """Wrap a model in buckets of which each host's two ranks lead some."""
    options = {"hierarchical": True, "bucket_bytes": 2500, **options}
    with hosts(2, 2):
        return ddp_training.wrapped(compression, before, of_ddp, **options)


def led(state):
    """Return the buckets that this rank compresses."""
    return [state.reducer.leads(bucket) for bucket in state.reducer.buckets]


def every_method():
    for compression in [*ONE_OF_EACH_EXCHANGE, GRADIVEQ, LGC, LGC_SERVER, *PRODUCTS]:
        model, state = wrapped(compression)
        start = vector(model)
        train(model, sgd(model), STEPS)
        alike(vector(model))
        assert not torch.equal(start, vector(model))
        ddp.verify(state)
        assert state.stats().steps == STEPS


def dense_is_what_ddp_does():
    plain = ddp_training.ddp_model()
    train(plain, sgd(plain), 3)
    for sizes in ((2, 2), (4,), (1, 1, 1, 1)):
        with hosts(*sizes):
            model, _ = ddp_training.wrapped(None, hierarchical=True, bucket_bytes=2500)
        train(model, sgd(model), 3)
        assert torch.allclose(vector(plain), vector(model), atol=1e-6), sizes
        alike(vector(model))


def counted():
    """A rank counts what it leads, and only what goes between hosts."""
    model, state = wrapped(None)
    train(model, sgd(model), 3)
    stats = state.stats()
    sizes = [b.layout.elements for b, leads in zip(state.reducer.buckets, led(state)) if leads]
    assert stats.bytes_sent == stats.bytes_dense == 4 * 3 * sum(sizes) > 0
    kept = [torch.tensor(led(state), dtype=torch.uint8).clone() for _ in range(4)]
    dist.all_gather(kept, kept[dist.get_rank()].clone())
    assert torch.equal(kept[0], kept[2]) and torch.equal(kept[1], kept[3])
    assert (kept[0] + kept[1] == 1).all() and kept[0].any() and kept[1].any()
    model, state = wrapped(DGCCompressor(density=0.1, momentum=0.9))
    train(model, sgd(model), 1)
    states = [any(True for _ in leaves(bucket.state)) for bucket in state.reducer.buckets]
    assert states == led(state)


def moments_and_momentum():
    """Train with moments of micro-batches and of samples, and momentum taken over by DGC."""
    model, _ = wrapped(
        VarianceCompressor(alpha=0.5, moments="microbatch"),
        backward_passes_per_step=2,
        batch_size=16,
    )
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, 10 * step)
        backward(model, 10 * step + 1)
        optimizer.step()
    alike(vector(model))
    variance = VarianceCompressor(alpha=0.5, moments="sample")
    model, _ = wrapped(variance, before=ddp.track_moments)
    train(model, sgd(model), 4)
    alike(vector(model))
    model = ddp_training.ddp_model()
    optimizer = sgd(model, momentum=0.9)
    with hosts(2, 2):
        ddp.compress(model, DGCCompressor(density=0.1), optimizer=optimizer, hierarchical=True)
    train(model, optimizer, 4)
    alike(vector(model))


def state_goes_on():
    rank = dist.get_rank()
    for compression in (
        EGCCompressor(K=8, momentum=0.9, entropy_interval=2),
        DGCCompressor(density=0.05, momentum=0.9),
        TWO_ROUNDS,
        LGC,
    ):
        ddp_training.goes_on(wrapped, compression)
    # The state of a rank that leads other buckets leaves what is kept here where it is.
    model, state = wrapped(DGCCompressor(density=0.1, momentum=0.9))
    train(model, sgd(model), 2)
    every = [None] * 4
    dist.all_gather_object(every, state.state_dict())
    before = copy.deepcopy(state.state_dict()["buckets"])
    for other in (rank ^ 1, rank ^ 2):
        state.load_state_dict(every[other])
        for one, now in zip(before, state.state_dict()["buckets"]):
            assert one["state"].keys() == now["state"].keys()
            assert all(torch.equal(x, now["state"][k]) for k, x in one["state"].items())
    _, flat = wrapped(DGCCompressor(density=0.1, momentum=0.9), hierarchical=False)
    raises(
        CheckpointError,
        "saved sharded with 2 hosts, here it is hierarchical=False",
        lambda: flat.load_state_dict(every[rank]),
    )
    flat.load_states(every)
    for number, entry in enumerate(flat.state_dict()["buckets"]):
        states = [saved["buckets"][number]["state"] for saved in every]
        of_leaders = [state["memory.r"].double() for state in states if state]
        assert len(of_leaders) == 2, "of a rank of each host"
        assert torch.equal(entry["state"]["memory.r"], (sum(of_leaders) / 4).float())


def not_finite():
    """A NaN on rank 1, in the last layer alone."""
    for policy in ("raise", "propagate"):
        model, state = wrapped(DGCCompressor(density=0.1, momentum=0.9), nonfinite=policy)
        optimizer = sgd(model)
        train(model, optimizer, 2)
        kept = copy.deepcopy(state.state_dict()["buckets"])

        def spoil(gradient):
            return gradient * float("nan") if dist.get_rank() == 1 else gradient

        hook = model.module.third.bias.register_hook(spoil)
        if policy == "raise":
            raises(NonFiniteGradientError, "", lambda m=model: backward(m, 2))
        else:
            backward(model, 2)
            assert all(p.grad.isnan().all() for p in model.parameters() if p.requires_grad)
            for one, now in zip(kept, state.state_dict()["buckets"]):
                assert all(torch.equal(x, now["state"][k]) for k, x in one["state"].items())
            assert state.stats().skipped == 1 and state.steps == 2
        hook.remove()
        train(model, optimizer, 1, first=3)
        alike(vector(model))


def steps_left_out():
    """A discarded step leaves no trace; ranks without batches take part, to the bit."""
    ends = []
    for bad in (False, True):
        model, state = wrapped(DGCCompressor(density=0.1, momentum=0.9))
        optimizer = sgd(model)
        for step in range(4):
            if bad:
                optimizer.zero_grad()
                backward(model, step + 50)
                state.discard_step()
            train(model, optimizer, 1, step)
        ends.append(vector(model))
    assert torch.equal(*ends)
    for compression in (STROM, TWO_ROUNDS):
        ends = []
        steps = batches_of(3)
        for train_by in (with_zeros, joined):
            model, state = wrapped(compression)
            train_by(model, sgd(model), *((steps,) if train_by is with_zeros else ()))
            alike(vector(model))
            assert state.steps == steps
            ends.append(vector(model))
        assert torch.equal(*ends), compression


def replicas_that_differ():
    model, state = wrapped(STROM)
    train(model, sgd(model), 2)
    if dist.get_rank() == 3:
        state.reducer.buckets[1].state.capacity.level.add_(1)
    raises(ddp.DivergedError, "state capacity.level of bucket 1", lambda: ddp.verify(model))


def hosts_as_they_have_to_be():
    """The same error on all ranks; and a mesh in place of torchrun."""
    rank = dist.get_rank()

    def compress(hierarchical=True, compression=STROM):
        return ddp_training.wrapped(compression, hierarchical=hierarchical, bucket_bytes=2500)

    raises(ValueError, "start all ranks with torchrun", compress)
    with hosts(3, 1):
        raises(ValueError, "the same number of ranks on all hosts", compress)
    with hosts(2, 2, order=(0, 2, 1, 3)):
        raises(ValueError, "counted host by host", compress)
    with hosts(2, 2, order=(1, 0, 2, 3)):
        raises(ValueError, "counted host by host", compress)
    with hosts(2, 2):
        raises(MismatchError, "hierarchical=", lambda: compress(rank != 3))
        refused = "yes" if rank == 1 else True
        raises(MismatchError, "what is refused", lambda: compress(refused))
        raises(TypeError, "DeviceMesh of two dimensions", lambda: compress("yes"))
        from_hosts, _ = compress()
        os.environ.pop("GROUP_RANK" if rank == 2 else "PATH")
        raises(ValueError, "2: (-1, 0, 2, ", compress)
    raises(ValueError, "got 1", lambda: compress(DeviceMesh("cpu", [0, 1, 2, 3])))
    raises(ValueError, "ascending", lambda: compress(DeviceMesh("cpu", [[2, 3], [0, 1]])))
    from_mesh, _ = compress(DeviceMesh("cpu", [[0, 1], [2, 3]]))
    crossed, _ = compress(DeviceMesh("cpu", [[0, 2], [1, 3]]))
    for model in (from_hosts, from_mesh, crossed):
        train(model, sgd(model), 3)
        alike(vector(model))
    assert torch.equal(vector(from_hosts), vector(from_mesh))
    assert not torch.equal(vector(from_hosts), vector(crossed))
    group = dist.new_group([1, 3])  # ranks know different numbers of groups then
    if rank in (1, 3):
        model = DistributedDataParallel(Model().third, process_group=group)
        raises(
            ValueError,
            "leave process_group= out",
            lambda: ddp.compress(model, STROM, hierarchical=True),
        )
    with hosts(2, 2):
        compress()


def one_fails():
    """A leader that meets an error of its own does not leave its host waiting, nor the others."""
    for rank in (0, 3):
        model, state = wrapped(TWO_ROUNDS)
        train(model, sgd(model), 2)
        if dist.get_rank() == rank:
            place = led(state).index(True)
            state.reducer.buckets[place].compressor = None
        began = time.monotonic()
        raises(Exception, "", lambda m=model: backward(m, 3))
        raises(RuntimeError, "start all ranks again", lambda m=model: backward(m, 4))
        dist.barrier()
        assert time.monotonic() - began < 60


def main():
    ddp_training.main(globals())


if __name__ == "__main__":
    main()
