"""FSDP2 on two replicas of two shards with every method, one rank of four; no Horovod."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import (
    DGCCompressor,
    Int8Compressor,
    PowerSGDCompressor,
    StromCompressor,
    VarianceCompressor,
)
from hvd_gradcomp.algorithms.threshold.variance import weight_of_passes
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import is_replicated, leaves
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.torch import ddp, fsdp
from tests.methods import (
    BALANCED,
    GRADIVEQ,
    LGC,
    ONE_OF_EACH,
    ONE_OF_TODAY,
    PRODUCTS,
    ROBUST,
    TODAY,
)
from tests.parallel.workers.ddp_training import TIMEOUT, alike, raises
from tests.parallel.workers.lifetimes import leaves_nothing

STROM, STEPS, WIDTH, WORDS = StromCompressor(tau=0.003), 5, 18, 11
SHAPES = (5, 3), (6, 4), (4, 3), (1,)
EVERY = range(len(SHAPES))
# The ways of FSDP: exchange between replicas, or all reduction, in the last backward only.
WAYS = FSDPModule.set_requires_all_reduce, FSDPModule.set_requires_gradient_sync


class Transformer(nn.Module):
    """Two layers over characters; with a bias of 11 elements, which 2 ranks share unevenly."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = (WIDTH, 2, 2 * WIDTH, 0.0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(*layer, batch_first=True) for _ in range(2)
        )
        self.out, self.unused = nn.Linear(WIDTH, WORDS), nn.Linear(3, 2)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Products(nn.Module):
    """One parameter, whose gradient are the numbers that it is multiplied with: whole ones."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x, y):
        return (self.weight * (x + 0.0 * y)).sum() + y


class Chain(nn.Module):
    """Units that a pass uses in the order it is given; sums of their gradients are exact."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(map(lambda shape: Products(*shape), SHAPES))

    def forward(self, factors, order):
        y = torch.zeros((), requires_grad=True)
        for unit in order:
            y = self.units[unit](factors[unit], y)
        return y


def chain(compression, mesh=None, **options):
    """Each parameter is a unit but the last, of one element, which is the root's."""
    mesh = mesh or mesh_of()
    model = Chain()
    for unit in model.units[:-1]:
        fully_shard(unit, mesh=mesh["in"])
    fully_shard(model, mesh=mesh["in"])
    return model, fsdp.compress(model, compression, mesh=mesh, **options)


def factors(step, rank=None):
    """Multiples of 8, so that their means are whole numbers too."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [8.0 * torch.randint(-9, 10, shape, generator=generator) for shape in SHAPES]


def passes(model, steps, accumulate, order=EVERY):
    """Backward over several batches, one exchange."""
    for step in steps:
        accumulate(model, step == steps[-1])
        model(factors(step), order).backward()


def mesh_of():
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("hosts", "in"))


def sharded(mesh, before=None, **options):
    torch.manual_seed(1)
    model = Transformer()
    for p in model.unused.parameters():
        p.requires_grad_(False)
    if before is not None:
        before(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def wrapped(compression, before=None, of_fsdp=None, **options):
    mesh = mesh_of()
    model = sharded(mesh["in"], before, **(of_fsdp or {}))
    return model, fsdp.compress(model, compression, mesh=mesh, **options)


def loss(model, step, factor=1.0):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randint(WORDS, (4, 9), generator=generator)
    y = model(x[:, :-1]).float()
    return factor * nn.functional.cross_entropy(y.flatten(0, 1), x[:, 1:].flatten())


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), 0.1, **options)


def vector(model):
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def gradients(model):
    return torch.cat(
        [p.grad.full_tensor().reshape(-1) for p in model.parameters() if p.grad is not None]
    )


def every_method():
    for compression in [
        *ONE_OF_EACH,
        GRADIVEQ,
        LGC,
        *ONE_OF_TODAY,
        *PRODUCTS,
        *ROBUST,
        *BALANCED[1::2],
    ]:
        model, state = wrapped(compression, bucket_bytes=4000)
        start = vector(model)
        train(model, torch.optim.AdamW(model.parameters(), 0.01), STEPS)
        alike(vector(model))
        fsdp.verify(model)
        assert not torch.equal(start, vector(model)), compression
        stats = fsdp.compression_stats(model)
        assert stats == state.stats() and stats.steps == state.steps == STEPS
        assert stats.bytes_sent and stats.bytes_received, compression


def dense_is_what_hybrid_sharding_does():
    """With plain steps, sums of two backwards, passes that are summed up, and in bfloat16."""
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": narrow}, {"reshard_after_forward": False}):
        plain = sharded(mesh_of(), **options)
        ours, _ = wrapped(None, of_fsdp=options)
        for model in (plain, ours):
            model.cpu()  # swaps tensors, which must have no weak references
            train(model, sgd(model, momentum=0.9), 3)
        torch.testing.assert_close(vector(plain), vector(ours), rtol=0, atol=1e-6)
        grads = []
        for model in (plain, ours):
            model.zero_grad()
            loss(model, 5).backward()
            loss(model, 6).backward()  # added to what is there
            model.set_requires_gradient_sync(False)
            loss(model, 7).backward()
            model.set_requires_gradient_sync(True)
            loss(model, 8).backward()
            grads.append(gradients(model))
        torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


class ScatteredSums:
    """FSDP's reduce-scatter on gloo, which has no sums of multiples."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if getattr(op, "op", None) == dist.ReduceOp.PREMUL_SUM:
            input_tensor.mul_(op.factor)
            op = dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def divide(model, factors, sums=False):
    """Set the factors of the units in turn; None is what FSDP does by itself."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit, factor in zip(units, itertools.cycle(factors)):
        unit.set_custom_reduce_scatter(ScatteredSums())
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(sums)


def divided_as_in_hybrid_sharding():
    """By factors set before and after `compress`, changed between steps, of some units alone."""
    every = [(None,), (2.0,), (4.0,), (3.0,), (1.0, None, 5.0)]
    kinds = (
        (None, 0.0),
        (torch.bfloat16, 0.02),
        (torch.float16, 2e-3),
        (torch.float64, 1e-6),
    )
    for (dtype, off), sums in itertools.product(kinds, (False, True)):
        options = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
        mesh = mesh_of()
        plain, ours = sharded(mesh, **options), sharded(mesh["in"], **options)
        divide(ours, (1.0,), sums)
        fsdp.compress(ours, None, mesh=mesh)
        for step, factors in enumerate([(1.0,), *every[3 if dtype else 0 :]]):
            grads = []
            for model in (plain, ours):
                if step or model is plain:
                    divide(model, factors, sums)
                model.zero_grad()
                for at in range(2):
                    model.set_requires_all_reduce(at == 1)
                    loss(model, 2 * step + at).backward()
                grads.append(gradients(model))
            off = max(off, 1e-6 * sums)  # a division behind the sum rounds otherwise
            torch.testing.assert_close(*grads, rtol=off, atol=off / 10)


def factors_leave_methods_alone():
    """A factor of all ranks is the mean, to the bit; and residuals are in the units of `p.grad`."""
    ranks = float(dist.get_world_size())
    microbatch = VarianceCompressor(alpha=0.5, moments="microbatch")
    for compression in [*ONE_OF_EACH, *ONE_OF_TODAY, *PRODUCTS, *ROBUST, *BALANCED, microbatch]:
        grads = []
        for factor in (None, ranks):
            model, state = chain(compression, backward_passes_per_step=2)
            divide(model, (factor,))
            for step in (0, 10):
                model.zero_grad()
                passes(model, [step, step + 1], WAYS[0])
                grads.append(gradients(model))
        assert all(map(torch.equal, grads[:2], grads[2:])), compression
    plain, (model, state) = Chain(), chain(StromCompressor(tau=40.0))
    for unit in (*plain.units[:-1], plain):
        fully_shard(unit, mesh=mesh_of())
    sums = []
    for each in (plain, model):
        total = torch.zeros(())
        for step, factor in enumerate((None, 1.0, ranks / 2, None, 8.0)):
            divide(each, (factor,))
            each.zero_grad()
            each(factors(step), EVERY).backward()
            total = total + each.units[1].weight.grad.to_local()
        sums.append(total)
    (kept,) = kept_for(state, "units.1.weight")
    dist.all_reduce(kept, dist.ReduceOp.AVG, state._replicas.handle)
    assert kept.any() and torch.equal(sums[0], sums[1] + kept)


def passes_are_exchanged_once():
    """By either way of FSDP's; and those that `zero_grad` drops are dropped.

    With some of the methods: they see nothing of it.
    """
    for compression in [*ONE_OF_EACH, *TODAY, *PRODUCTS][::6]:
        grads = []
        for accumulate in WAYS:
            model, state = chain(compression)
            for step in (0, 10, 20):
                model.zero_grad()
                if step and accumulate is WAYS[0]:
                    accumulate(model, False)
                    model(factors(99), EVERY).backward()
                    model.zero_grad()
                passes(model, [step, step + 1, step + 2], accumulate)
                grads.append(gradients(model))
            assert state.steps == 3, compression
        for one, other in zip(grads[:3], grads[3:]):
            assert torch.equal(one, other), compression
        alike(grads[-1])


def micro_batch_moments():
    """As computed from the gradients of each replica's passes."""
    compression, batch, seen = VarianceCompressor(alpha=0.5, moments="microbatch"), 24, {}
    model, state = chain(compression, backward_passes_per_step=3, batch_size=batch)
    sources = state.reducer.sources
    fill_bucket = sources.fill_bucket

    def fill_and_see(bucket, slot):
        fill_bucket(bucket, slot)
        seen[bucket.layout.names[slot]] = bucket.moment_views[slot].clone()

    sources.fill_bucket = fill_and_see
    rank, shards = dist.get_rank(), dist.get_world_size() // 2
    replica = [rank - rank % shards + shard for shard in range(shards)]
    for step, orders in ((0, (EVERY, EVERY, EVERY)), (10, ((0, 1, 3), EVERY, (3, 2, 1)))):
        model.zero_grad()
        for at, order in enumerate(orders):
            WAYS[0](model, at == len(orders) - 1)
            model(factors(step + at), order).backward()
        of_passes = [[factors(step + at, r) for r in replica] for at in range(3)]
        for unit, shape in enumerate(SHAPES):
            used = [float(unit in order) for order in orders]
            c = torch.stack(
                [u * sum(one[unit] for one in x) / shards for u, x in zip(used, of_passes)]
            )
            a = weight_of_passes(3, batch)
            q = (a * c.square().sum(0) + (1 - a) * c.sum(0).square()).clamp(min=0.0)
            shard = [*q.tensor_split([-(-shape[0] // shards)])][rank % shards] if shards > 1 else q
            if shard.numel():
                torch.testing.assert_close(seen[f"units.{unit}.weight"], shard)
    alike(gradients(model))
    assert state.steps == 2
    model, state = chain(compression, backward_passes_per_step=2)
    raises(ValueError, "not set_requires_gradient_sync", lambda: passes(model, [0, 1], WAYS[1]))


def micro_batch_moments_are_those_of_ddp():
    """With one shard."""
    compression, ends = VarianceCompressor(alpha=1.5, moments="microbatch"), []
    ours, _ = chain(compression, backward_passes_per_step=2, batch_size=8)
    other = DistributedDataParallel(Chain())
    ddp.compress(other, compression, backward_passes_per_step=2, batch_size=8)
    for model, accumulate in (
        (ours, WAYS[0]),
        (other, lambda model, last: setattr(model, "require_backward_grad_sync", last)),
    ):
        for step in (0, 10, 20, 30):
            model.zero_grad()
            passes(model, [step, step + 1], accumulate)
        ends.append(
            [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
        )
    assert all(map(torch.equal, *ends)) and any(x.any() for x in ends[0])


def units_in_another_order():
    """One replica uses the units in another order, or not all of them."""
    rank, shards = dist.get_rank(), dist.get_world_size() // 2
    for order in ((1, 0, 3, 2), (0, 3), (3, 1)):
        model, state = chain(None, bucket_bytes=40)
        orders = [EVERY if r < shards else order for r in range(2 * shards)]
        for step in range(3):
            model.zero_grad()
            model(factors(step), orders[rank]).backward()
            for unit, p in enumerate(model.parameters()):
                every = [factors(step, r)[unit] * (unit in orders[r]) for r in range(2 * shards)]
                assert torch.equal(p.grad.full_tensor(), sum(every) / (2 * shards)), (order, unit)
        assert state.steps == 3 and len(state.reducer.buckets) > 2


def kept_for(state, name):
    """The parts of a compressor's state that are of one parameter."""
    (bucket,) = (b for b in state.reducer.buckets if name in b.layout.names)
    slot = bucket.layout.names.index(name)
    vectors = [x for _, x in leaves(bucket.state) if tuple(x.shape) == (bucket.layout.size,)]
    return [bucket.layer(x, slot).clone() for x in vectors]


def frozen_for_some_steps():
    """A frozen parameter does not move, and its residual stays."""
    model, state = chain(StromCompressor(tau=50.0), bucket_bytes=200)
    optimizer = sgd(model)
    kept = []
    for step in range(6):
        for unit in (0, 3):
            model.units[unit].weight.requires_grad_(step not in (2, 3))
        before = vector(model)
        optimizer.zero_grad()
        model(factors(step), EVERY).backward()
        optimizer.step()
        moved = (vector(model) != before).split([15, 24, 12, 1])
        assert moved[1].any() and (step not in (2, 3) or not moved[0].any()), step
        kept.append(kept_for(state, "units.0.weight"))
    alike(vector(model))
    assert state.steps == 6 and any(x.any() for x in kept[1])
    assert all(map(torch.equal, kept[1], kept[3]))
    assert not all(map(torch.equal, kept[3], kept[4]))
    for unit in model.units:  # of one replica
        unit.weight.requires_grad_(dist.get_rank() // (dist.get_world_size() // 2) == 0)
    model.units[1].weight.requires_grad_(True)
    optimizer.zero_grad()
    text = "have frozen different parameters"
    raises(OutOfStepError, text, lambda: model(factors(7), EVERY).backward())


def policies():
    """Offloading to the CPU, where the gradients are there already, changes nothing."""
    trained = []
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for options in ({}, offload):
        model, _ = wrapped(STROM, of_fsdp=options)
        train(model, sgd(model), 3)
        trained.append(vector(model))
    assert torch.equal(*trained)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for compression in (STROM, DGCCompressor(density=0.1, momentum=0.9), Int8Compressor()):
        model, state = wrapped(compression, of_fsdp={"mp_policy": narrow})
        train(model, sgd(model), 3)
        alike(vector(model))
        assert state.steps == 3


def momentum_is_taken_over():
    trained = []
    for taken_over in (True, False):
        mesh = mesh_of()
        model = sharded(mesh["in"])
        optimizer = sgd(model, momentum=0.9 if taken_over else 0.0)
        compression = DGCCompressor(density=0.1, momentum=None if taken_over else 0.9)
        fsdp.compress(model, compression, mesh=mesh, optimizer=optimizer if taken_over else None)
        train(model, optimizer, STEPS)
        trained.append(vector(model))
    assert torch.equal(*trained)


def state_goes_on(folder):
    """By each rank's own files, and by `torch.distributed.checkpoint`."""
    rank = dist.get_rank()
    for place, compression in enumerate((LGC, STROM, PowerSGDCompressor(rank=2))):
        model, state = wrapped(compression)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        train(model, optimizer, 3)
        weights, others = get_state_dict(model, optimizer)
        parts = {"model": weights, "optimizer": others, f"own/{rank}": state.state_dict()}
        dcp.save(parts, checkpoint_id=folder / f"dcp-{place}")
        train(model, optimizer, 3, first=3)
        again, other = wrapped(compression)
        second = torch.optim.AdamW(again.parameters(), 0.01)
        weights, others = get_state_dict(again, second)
        parts = {"model": weights, "optimizer": others, f"own/{rank}": other.state_dict()}
        dcp.load(parts, checkpoint_id=folder / f"dcp-{place}")
        how = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}
        set_state_dict(again, second, **how)
        with torch.inference_mode():  # makes nothing that later steps cannot write to
            other.load_state_dict(parts[f"own/{rank}"])
            other.load_state_dict(other.state_dict())
        train(again, second, 3, first=3)
        assert torch.equal(vector(model), vector(again)), compression
        assert other.steps == 6 and other.stats() == state.stats()
    saved = state.state_dict()
    elsewhere = {**saved, "place": (0, 1 - saved["place"][1])}
    raises(CheckpointError, "and this rank has shard", lambda: state.load_state_dict(elsewhere))
    resized = {**saved, "mesh": (4, 1)}
    raises(CheckpointError, "is not sharded anew", lambda: state.load_state_dict(resized))
    raises(CheckpointError, "is not sharded anew", lambda: state.load_states([resized]))
    # A replica has saved, and two go on: each takes half of what is kept of a shard.
    every = [None] * 4
    dist.all_gather_object(every, saved)
    replica = [{**each, "mesh": (1, 2), "size": 1} for each in every[:2]]
    state.load_states(replica)
    for number, entry in enumerate(state.state_dict()["buckets"]):
        compressor = state.reducer.buckets[number].compressor
        for path, x in entry["state"].items():
            before = every[rank % 2]["buckets"][number]["state"][path]
            assert torch.equal(x, before if is_replicated(compressor, path) else before / 2), path


def not_finite():
    """In one shard of one replica: an error on all ranks, or a step that all leave out."""
    for compression in (None, STROM, LGC):
        model, state = wrapped(compression)
        train(model, sgd(model), 2)
        factor = float("nan") if dist.get_rank() == 1 else 1.0
        text = "the replicas of this shard, which are ranks"
        raises(NonFiniteGradientError, text, lambda m=model, f=factor: loss(m, 3, f).backward())
        if compression is None:
            train(model, sgd(model), 1)  # the model is not in the middle of a step
    trained = []
    for enabled in (False, True):
        model, state = wrapped(STROM)
        scaler, optimizer = torch.amp.GradScaler("cpu", enabled=enabled), sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        trained.append(vector(model))
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)
    kept = copy.deepcopy(state.state_dict())
    # What one shard of one replica alone finds out.
    exchange = state.reducer.mark_all_ready

    def one_shard(pairs, weight):
        if dist.get_rank() == 2:
            pairs = [(p, torch.full_like(gradient, float("inf"))) for p, gradient in pairs]
        exchange(pairs, weight)

    state.reducer.mark_all_ready = one_shard
    optimizer.zero_grad()
    scaler.scale(loss(model, 7)).backward()
    assert gradients(model).isnan().all()
    scaler.step(optimizer)
    scaler.update()
    state.reducer.mark_all_ready = exchange
    assert torch.equal(vector(model), trained[1])
    assert state.stats().skipped == 1 and state.steps == STEPS
    for one, other in zip(kept["buckets"], state.state_dict()["buckets"]):
        assert all(torch.equal(x, other["state"][path]) for path, x in one["state"].items())


def groups_of_some_ranks():
    """PyTorch names a group that members make by how many groups they know: nobody waits."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    model, _ = wrapped(STROM)
    train(model, sgd(model), 2)


def discarded():
    """A step is thrown away, and training goes on as if it had never been."""
    ends = []
    for bad in (0, 1):
        model, state = wrapped(STROM)
        optimizer = sgd(model)
        train(model, optimizer, 2)
        for _ in range(bad):
            optimizer.zero_grad()
            loss(model, 99).backward()
            with torch.inference_mode():
                state.discard_step()
        train(model, optimizer, 2, first=2)
        ends.append(vector(model))
    assert torch.equal(*ends)
    state.discard_step()
    raises(RuntimeError, "call it once, after backward", state.discard_step)


def unused():
    """Parameters that are not used in some steps: zeros are exchanged for them."""

    def thaw(model):
        for p in model.unused.parameters():
            p.requires_grad_(True)

    model, state = wrapped(STROM, thaw)
    raises(ValueError, "set_reduce_scatter_unused_params", lambda: loss(model, 0).backward())
    raises(RuntimeError, "start all ranks again", lambda: loss(model, 0).backward())
    model, state = wrapped(STROM, thaw)
    model.set_reduce_scatter_unused_params(True)
    train(model, sgd(model), STEPS)
    alike(vector(model))
    assert state.steps == STEPS


def what_cannot_go():
    rank, mesh = dist.get_rank(), mesh_of()
    compress = fsdp.compress
    raises(TypeError, "is compressed, got Linear", lambda: compress(nn.Linear(2, 2), mesh=mesh))
    raises(TypeError, "takes a DeviceMesh", lambda: compress(sharded(mesh["in"]), mesh=None))
    raises(ValueError, "of two dimensions", lambda: compress(sharded(mesh["in"]), mesh=mesh["in"]))
    raises(ValueError, "itself, dense", lambda: compress(sharded(mesh), mesh=mesh))
    raises(ValueError, "is sharded over ranks", lambda: compress(sharded(mesh["hosts"]), mesh=mesh))
    text = "are several replicas of mesh="
    raises(ValueError, text, lambda: compress(sharded(None), mesh=mesh))
    text = "call fully_shard on it, and on its blocks"
    raises(TypeError, text, lambda: compress(Transformer(), mesh=mesh))
    parts = nn.ModuleList([sharded(mesh["in"])])
    raises(TypeError, "whose parts were sharded (0, ", lambda: compress(parts, mesh=mesh))
    text = "before torch.compile"
    raises(TypeError, text, lambda: compress(torch.compile(sharded(mesh["in"])), mesh=mesh))
    plain = DistributedDataParallel(Chain())
    raises(TypeError, "for it call ddp.compress", lambda: compress(plain, mesh=mesh))
    raises(TypeError, "call fsdp.compress(model", lambda: ddp.compress(sharded(mesh["in"])))
    with torch.device("meta"):
        empty = sharded(mesh["in"])
    raises(ValueError, "call model.to_empty", lambda: compress(empty, mesh=mesh))
    outside = sharded(mesh["in"])
    compress(outside.layers[0], mesh=mesh)
    text = "the replicas of other units would differ: that at the root, layers.1. Call"
    raises(ValueError, text, lambda: loss(outside, 0).backward())
    sampled = VarianceCompressor(alpha=1.0, moments="sample")
    raises(ValueError, "pass moments='microbatch' or 'step'", lambda: wrapped(sampled))
    batches = VarianceCompressor(alpha=1.0, moments="microbatch")
    raises(ValueError, "backward_passes_per_step of at least 2", lambda: wrapped(batches))
    raises(ValueError, "cannot leave out", lambda: wrapped(None, nonfinite="skip"))
    raises(ValueError, "pass optimizer=", lambda: wrapped(DGCCompressor(density=0.1)))
    raises(TypeError, "", lambda: wrapped("strom"))
    raises(MismatchError, "compression", lambda: wrapped(StromCompressor(tau=1.0 + rank)))
    raises(MismatchError, "settings", lambda: wrapped(None, bucket_bytes=1000 + rank))
    one = (STROM, "strom")[rank % 2]
    raises(MismatchError, "what is refused: nothing", lambda: wrapped(one))
    model, state = wrapped(STROM)
    raises(TypeError, "cannot be copied", lambda: copy.deepcopy(state))
    raises(TypeError, "nothing compresses", lambda: fsdp.state_of(sharded(mesh["in"])))
    assert fsdp.state_of(model) is state and "out.bias" in str(fsdp.describe(model))
    train(model, sgd(model), 1)
    if rank == 3:
        with torch.no_grad():
            model.out.bias.to_local().add_(1.0)
    named = "out.bias" if rank in (1, 3) else "another shard differ, as ranks 1, 3 tell"
    raises(DivergedError, named, lambda: fsdp.verify(model))
    saved = state.state_dict()
    train(model, sgd(model), 2)
    if rank == 0:
        state.load_state_dict(saved)
    raises(OutOfStepError, "different steps", lambda: loss(model, 5).backward())


def compiled():
    """The units, or a whole step, by `torch.compile`: ours is left out of it."""
    traced = torch._dynamo.convert_frame.input_codes
    trained = []
    for at_once in (None, False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        mesh = mesh_of()
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=mesh["in"])
        fsdp.compress(model, STROM, mesh=mesh)
        optimizer = sgd(model)
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        forward = torch.compile(model, backend="eager") if at_once is False else model

        def step(optimizer=optimizer, forward=forward, x=x):
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            optimizer.step()

        step = torch.compile(step, backend="eager") if at_once else step
        for _ in range(3):
            step()
        files = [code().co_filename for code in traced.seen if code() is not None]
        assert not [name for name in files if "hvd_gradcomp" in name], files
        trained.append(vector(model))
        alike(trained[-1])
        torch.testing.assert_close(trained[-1], trained[0])
    torch._dynamo.reset()


def waits_as_long():
    """Our connections give up when those of the mesh do."""
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    timeout = TIMEOUT + datetime.timedelta(seconds=5)
    every = [*ranks.T.tolist(), *ranks.tolist()]
    groups = [(one, dist.new_group(one, timeout=timeout)) for one in every]
    member_of = [group for one, group in groups if dist.get_rank() in one]
    mesh = DeviceMesh.from_group(member_of, "cpu", ranks, mesh_dim_names=("hosts", "in"))
    _, state = chain(None, mesh)
    for ours in (state._replicas, state._everybody):
        assert ours.handle._get_backend(torch.device("cpu")).options._timeout == timeout


def made_and_dropped():
    """A process holds as much after the fifth model as after the second."""
    mesh = mesh_of()

    def compressed():
        model = sharded(mesh["in"])
        state = fsdp.compress(model, STROM, mesh=mesh)
        train(model, sgd(model), 3)
        return [model, state, state.reducer]

    leaves_nothing("fsdp.compress", compressed)


def one_fails():
    """A rank that meets an error of its own does not leave the others waiting."""
    model, state = wrapped(Int8Compressor())
    train(model, sgd(model), 2)
    if dist.get_rank() == 1:
        state.reducer.buckets[0].compressor = None
    raises(Exception, "", lambda: loss(model, 3).backward())
    raises(RuntimeError, "start all ranks again", lambda: loss(model, 4).backward())


def one_ends():
    """The last part of all: a rank that is gone is an error on the others."""
    model, _ = wrapped(STROM)
    train(model, sgd(model), 2)
    if dist.get_rank() != 3:
        raises(RuntimeError, "", lambda: train(model, sgd(model), 9))


def main():
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    met = f"file://{folder}/met"
    dist.init_process_group("gloo", met, timeout=TIMEOUT, rank=rank, world_size=size)
    done = []
    for name in sys.argv[4:]:
        if name == "state_goes_on":
            state_goes_on(folder)
        else:
            globals()[name]()
        done.append(name)
        (folder / f"{rank}.json").write_text(json.dumps(done))
    assert not [name for name in sys.modules if name.startswith("horovod.")]


if __name__ == "__main__":
    main()
