"""Two hosts of two ranks: dense inside, compressed between."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import residual_of
from tests.methods import ONE_OF_EACH_EXCHANGE
from tests.parallel.workers.results import digest, errors_of, write

LEARNED = [
    hvd.GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=2, compress_steps=3),
    hvd.LGCCompressor(alpha=0.1, full_steps=1, train_steps=4, ae_lr=0.1, momentum=0.9),
    hvd.LGCCompressor(
        "parameter_server", alpha=0.1, full_steps=1, train_steps=4, ae_lr=0.1, momentum=0.9
    ),
]
STROM = hvd.StromCompressor(0.01)


def distributed(compressor, **options):
    torch.manual_seed(1)
    sizes = (12, 40, 30, 4)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))
    options = {"hierarchical": True, "bucket_bytes": 2500, **options}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        model.named_parameters(),
        compression=compressor,
        **options,
    )
    return model, optimizer


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + hvd.rank())
    return [torch.randn(4, 12, generator=generator) for _ in range(steps)]


def train(model, optimizer, xs):
    for x in xs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def kept(optimizer):
    """What this rank's buckets keep: one digest each, None where another rank leads."""
    states = [bucket.state for bucket in optimizer._gradcomp.buckets]
    tensors = [[x.numpy() for _, x in leaves(state)] for state in states]
    return [digest(some) if some else None for some in tensors]


def replicas():
    ends = {}
    for compressor in [*ONE_OF_EACH_EXCHANGE, *LEARNED]:
        print("method:", compressor, flush=True)
        model, optimizer = distributed(compressor, verify_every=3)
        train(model, optimizer, batches(5))
        ends[repr(compressor)] = digest(x.numpy() for x in weights(model))
    return ends


def exact():
    """Without compression, and with the mean or the sum over ranks that Horovod makes itself."""
    errors = []
    for options in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
        ends = [
            weights(train(*distributed(None, hierarchical=inside, **options), batches(3)))
            for inside in (True, False)
        ]
        errors.append(max(float((x - y).abs().max()) for x, y in zip(*ends)))
    return errors


def micro_batches():
    compressor = hvd.VarianceCompressor(alpha=0.5, moments="microbatch")
    model, optimizer = distributed(compressor, backward_passes_per_step=2)
    for x in batches(4):
        optimizer.zero_grad()
        for piece in x.split(2):
            (model(piece).square().mean() / 2).backward()
        optimizer.step()
    return digest(x.numpy() for x in weights(model))


def stats():
    """A rank counts what it leads, and only what goes between hosts."""
    model, optimizer = distributed(None)
    train(model, optimizer, batches(3))
    counted = hvd.compression_stats(optimizer)
    engine = optimizer._gradcomp
    elements = [bucket.layout.elements for bucket in filter(engine.leads, engine.buckets)]
    assert counted.bytes_sent == counted.bytes_dense == 4 * 3 * sum(elements)
    assert counted.ratio == 1.0 and set(counted.density.values()) == {1.0}
    model, optimizer = distributed(STROM)
    train(model, optimizer, batches(3))
    return list(hvd.compression_stats(optimizer).layers), kept(optimizer)


def nonfinite(policy):
    """A NaN on rank 1, in the last layer alone: (raised, unchanged weights, state, skipped)."""
    model, optimizer = distributed(hvd.DGCCompressor(density=0.1), nonfinite=policy)
    *first, spoilt, last = batches(4)
    train(model, optimizer, first)
    before = weights(model), kept(optimizer)

    def spoil(gradient):
        return gradient * float("nan") if hvd.rank() == 1 else gradient

    hook = model[-1].bias.register_hook(spoil)
    error = errors_of({"": lambda: train(model, optimizer, [spoilt])})[""]
    hook.remove()
    same = all(torch.equal(x, y) for x, y in zip(weights(model), before[0]))
    skipped = hvd.compression_stats(optimizer).skipped
    result = [error, same, kept(optimizer) == before[1], skipped]
    train(model, optimizer, [last])
    return result, digest(x.numpy() for x in weights(model))


def resumed(folder):
    """(weights after six steps, the same with a stop after three)."""
    compressor = hvd.EGCCompressor(K=8, momentum=0.9, entropy_interval=2)
    model, optimizer = distributed(compressor)
    xs = batches(6)
    train(model, optimizer, xs[:3])
    objects = {"model": model, "optimizer": optimizer}
    hvd.save_checkpoint(f"{folder}/sharded", **objects)
    hvd.save_checkpoint(f"{folder}/consolidated", mode="consolidated", **objects)
    total = residual(optimizer)
    for inside in (True, False):  # also by ranks that exchange without a hierarchy
        other, its = distributed(compressor, hierarchical=inside)
        hvd.load_checkpoint(f"{folder}/consolidated", model=other, optimizer=its)
        assert total.any() and torch.allclose(residual(its), total, atol=1e-6)
    moved = digest(x.numpy() for x in weights(train(other, its, xs[3:])))
    other, its = distributed(compressor)
    hvd.load_checkpoint(f"{folder}/sharded", model=other, optimizer=its)
    ends = [train(model, optimizer, xs[3:]), train(other, its, xs[3:])]
    return [digest(x.numpy() for x in weights(end)) for end in ends], moved


def residual(optimizer):
    """The sum over ranks of what is not sent yet."""
    engine, pieces = optimizer._gradcomp, []
    for bucket in engine.buckets:
        piece = residual_of(bucket.compressor, bucket.state)
        pieces.append(torch.zeros(bucket.layout.size) if piece is None else piece)
    return hvd.allreduce(torch.cat(pieces), op=hvd.Sum, name="residual")


def rank_zeros_state():
    """Rank 0's state_dict, broadcast to all, leaves what others keep where it is."""
    model, optimizer = distributed(STROM)
    train(model, optimizer, batches(2))
    before = kept(optimizer)
    optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), 0))
    return before == kept(optimizer)


def documented():
    """Weights without a stop, and after rank 0 alone has loaded and broadcast its state."""
    ends = []
    for compressor in (hvd.QSGDCompressor(), STROM):
        model, optimizer = distributed(compressor)
        xs = batches(6)
        train(model, optimizer, xs[:3])
        again, its = distributed(compressor)
        if hvd.rank() == 0:
            again.load_state_dict(model.state_dict())
            its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        hvd.broadcast_parameters(again.state_dict(), 0)
        hvd.broadcast_optimizer_state(its, 0)
        for pair in ((model, optimizer), (again, its)):
            ends.append(digest(x.numpy() for x in weights(train(*pair, xs[3:]))))
    return ends


def disagreeing():
    model, optimizer = distributed(STROM, hierarchical=hvd.rank() != 3)
    train(model, optimizer, batches(1))


def diverged():
    """A level of a bucket that ranks 1 and 3 lead."""
    model, optimizer = distributed(STROM)
    train(model, optimizer, batches(2))
    if hvd.rank() == 3:
        optimizer._gradcomp.buckets[1].state.capacity.level.add_(1)
    hvd.verify(optimizer)


def joining():
    """Ranks with other numbers of batches, in one host and in the other."""
    model, optimizer = distributed(STROM)
    train(model, optimizer, batches(1 + hvd.rank()))
    assert hvd.join() == hvd.size() - 1
    hvd.verify(optimizer)


def sharded_elsewhere(folder):
    model, optimizer = distributed(STROM)
    train(model, optimizer, batches(2))
    hvd.save_checkpoint(folder, model=model, optimizer=optimizer)
    model, optimizer = distributed(STROM, hierarchical=False)
    hvd.load_checkpoint(folder, model=model, optimizer=optimizer)


def local_steps():
    """Ranks of a host are equal in each step, hosts after each exchange; momenta in each step."""
    model = distributed(None)[0]  # without its optimizer, which would exchange as well
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = hvd.LocalSteps(
        sgd, model.named_parameters(), 3, compression=STROM, hierarchical=True, bucket_bytes=2500
    )
    ends = []
    for x in batches(6):
        train(model, optimizer, [x])
        ends.append(digest(p.numpy() for p in weights(model)))
    hvd.verify(optimizer)
    del optimizer
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    how = model.named_parameters(), hvd.OneBitCompressor(), 2
    train(model, hvd.MomentumExchange(adam, *how, hierarchical=True), batches(4))
    # Several leaders in a host, and a second round between hosts: none waits for another.
    two_rounds = hvd.QSGDCompressor(bits=8, exchange="two_shot")
    how = model.named_parameters(), two_rounds, 2
    several = {"hierarchical": True, "bucket_bytes": 2500}
    train(model, hvd.MomentumExchange(adam, *how, **several), batches(4))
    return ends, digest(p.numpy() for p in weights(model))


def main(folder: str, what: str) -> None:
    hvd.init(process_sets=None if what == "refused" else "dynamic")
    torch.set_num_threads(1)
    if what != "whole":
        errors = {"refused": lambda: distributed(STROM), "trained": lambda: None}
        if what == "one host":
            errors = {"trained": lambda: train(*distributed(STROM, verify_every=1), batches(3))}
        write(folder, hvd.rank(), errors_of(errors))
        hvd.barrier()
        return
    subset = hvd.add_process_set([0, 2, 3])
    errors = {
        "process set": lambda: distributed(STROM, process_set=subset),
        "disagreeing": disagreeing,
        "diverged": diverged,
        "join": joining,
        "sharded elsewhere": lambda: sharded_elsewhere(f"{folder}/elsewhere"),
    }
    result = {
        "replicas": replicas(),
        "exact": exact(),
        "micro-batches": micro_batches(),
        "stats": stats(),
        "nonfinite": {policy: nonfinite(policy) for policy in ("skip", "raise")},
        "resumed": resumed(folder),
        "rank 0's state": rank_zeros_state(),
        "documented": documented(),
        "local steps": local_steps(),
        "errors": errors_of(errors),
    }
    write(folder, hvd.rank(), result)
    hvd.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
