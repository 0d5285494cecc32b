"""Everything that a user of Horovod's optimizer does, with a compressor; replicas must agree."""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import hvd_gradcomp.torch as hvd
from tests.parallel.workers.lifetimes import leaves_nothing
from tests.parallel.workers.results import digest, finish, on_timeline

COMPRESSOR = hvd.HybridCompressor(tau=0.01, alpha=0.5, moments="step")


def distributed(model, optimizer=None, compression=COMPRESSOR, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression, **options
    )


def linear(*sizes):
    torch.manual_seed(1)
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*layers)


def batches(steps, *shape):
    generator = torch.Generator().manual_seed(10 + hvd.rank())
    for _ in range(steps):
        yield torch.randn(*shape, generator=generator)


def no_gradient_on_some_ranks():
    model = linear(10, 10, 3)
    optimizer = distributed(model)
    for step, x in enumerate(batches(12, 4, 10)):
        optimizer.zero_grad(set_to_none=True)
        used = model if (step + hvd.rank()) % 3 else model[1]
        used(x).square().sum().backward()
        optimizer.step()
    return model


def shared_parameters():
    model = linear(10, 10)
    model.tied = model[0]
    optimizer = distributed(model)
    for x in batches(12, 4, 10):
        optimizer.zero_grad(set_to_none=False)
        model.tied(model(x)).square().sum().backward()
        optimizer.step()
    return model


def sparse_gradients(as_dense):
    torch.manual_seed(1)
    model = nn.ModuleDict({"table": nn.Embedding(50, 4, sparse=True), "head": nn.Linear(4, 2)})
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = distributed(model, plain, sparse_as_dense=as_dense)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(12):
        tokens = torch.randint(0, 50, (6,), generator=generator)
        optimizer.zero_grad()
        model["head"](model["table"](tokens)).square().sum().backward()
        optimizer.step()
    return model


def counted_shots():
    """Of an alltoall the part that stays on its rank is not sent: two shots are as many bytes."""
    torch.manual_seed(1)
    model = nn.Linear(256, 256, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = distributed(model, plain, hvd.TernGradCompressor(exchange="two_shot"))
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    assert 15.0 < hvd.compression_stats(optimizer).ratio < 16.0
    return model


def counted_rows():
    """Of a sparse gradient the values of its rows are elements; their indices are bytes as well."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"table": nn.Embedding(50, 4, sparse=True), "head": nn.Linear(4, 2)})
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = distributed(model, plain, hvd.StromCompressor(tau=1e6), sparse_as_dense=False)
    tokens = torch.tensor([1, 1, 7, 40, 3])  # a row for each, not for each word
    for _ in range(3):
        optimizer.zero_grad()
        model["head"](model["table"](tokens)).sum().backward()
        optimizer.step()
    stats = hvd.compression_stats(optimizer)
    assert stats.layers["table.weight"] == stats.elements_sent == 3 * 5 * 4
    assert stats.element_ratio == stats.elements / 60
    assert stats.bytes_sent > 3 * (5 * 4 * 4 + 5 * 8)
    assert stats.bytes_received == hvd.size() * stats.bytes_sent
    again = distributed(model, plain, hvd.StromCompressor(tau=1e6))
    again.load_state_dict(optimizer.state_dict())
    assert hvd.compression_stats(again).layers == stats.layers
    share = distributed(model, plain, hvd.StromCompressor(tau=1e6))
    share.load_state_dict(optimizer.state_dict(mode="consolidated"))
    assert hvd.compression_stats(share).layers == stats.layers
    return model


def reduced_precision(dtype):
    model = linear(10, 10, 3).to(dtype)
    optimizer = distributed(model)
    for x in batches(12, 4, 10):
        optimizer.zero_grad()
        model(x.to(dtype)).square().sum().backward()
        optimizer.step()
    assert all(p.dtype == dtype and p.grad.dtype == dtype for p in model.parameters())
    reduced = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    norm = hvd.compression_stats(optimizer).gradient_norm
    assert math.isclose(norm, reduced.norm(), rel_tol=1e-5), (norm, reduced.norm())
    return model


def memory_formats():
    """Fused optimizers go through parameter and gradient as these lie in memory."""
    generator = torch.Generator().manual_seed(3)
    xs = torch.randn(3, 2, 3, 8, 8, generator=generator)

    def trained(wraps, memory_format):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        model.to(memory_format=memory_format)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if wraps:
            optimizer = distributed(model, optimizer, compression=None)
        for x in xs:
            optimizer.zero_grad()
            model(x.to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        return model

    for memory_format in (torch.contiguous_format, torch.channels_last):
        models = [trained(wraps, memory_format) for wraps in (False, True)]
        for p, ours in zip(*(model.parameters() for model in models)):
            assert ours.grad.stride() == p.grad.stride(), memory_format
            torch.testing.assert_close(ours, p)
    return models[1]


def gradients_of_another_dtype():
    """As PyTorch has them from 2.9 on, for parameters in half precision."""
    model = linear(10, 3).to(torch.bfloat16)
    if not hasattr(model[0].weight, "grad_dtype"):
        return model
    for p in model.parameters():
        p.grad_dtype = torch.float32
    optimizer = distributed(model)
    for step, x in enumerate(batches(4, 4, 10)):
        optimizer.zero_grad()
        if step != hvd.rank():
            model(x.to(torch.bfloat16)).square().sum().backward()
        optimizer.step()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return model


def large_rows():
    """The values of sparse rows are finite, their sum in half precision is not."""
    table = nn.Embedding(50, 64, sparse=True).half()
    with torch.no_grad():
        table.weight.zero_()
    plain = torch.optim.SGD(table.parameters(), lr=1e-3)
    optimizer = distributed(table, plain, sparse_as_dense=False)
    (table(torch.arange(40)).float().sum() * 100).backward()
    optimizer.step()
    assert (table.weight[:40] + 0.1).abs().max() < 1e-3
    return table


def small_gradients():
    """What a loss scale saves from underflow is added up in its units, where that is in halves."""
    small = 2.0**-30
    for dtype, compression in ((torch.float16, None), (torch.float32, hvd.Compression.fp16)):
        weight = nn.Parameter(torch.ones(64, dtype=dtype))
        model = nn.ParameterDict({"w": weight})
        optimizer = distributed(model, torch.optim.SGD([weight], lr=1.0), compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        scaler.scale(weight.float().sum() * small * (1 + hvd.rank())).backward()
        mean = small * 2.0**20 * (1 + (hvd.size() - 1) / 2)
        torch.testing.assert_close(weight.grad.float(), torch.full((64,), mean))
        optimizer._gradcomp.scaling.reset()  # no step, so no update of the scaler either
    return model


def two_names():
    """Of a parameter that is tied, each of which says where it is."""
    model = linear(10, 10, 10)
    model[1].weight = model[0].weight
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    named = model.named_parameters(remove_duplicate=False)
    optimizer = hvd.DistributedOptimizer(plain, named, compression=COMPRESSOR)
    for x in batches(4, 4, 10):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model


def all_frozen():
    model = linear(10, 3).requires_grad_(False)
    optimizer = distributed(model)
    optimizer.step()
    hvd.verify(optimizer)
    assert hvd.compression_stats(optimizer).steps == 0
    return model


def closure(kind):
    model = linear(10, 3)
    optimizer = distributed(model, kind(model.parameters(), lr=0.05))
    for x in batches(8, 4, 10):

        def loss(x=x):
            optimizer.zero_grad()
            value = model(x).square().sum()
            value.backward()
            return value

        assert optimizer.step(loss) is not None
    return model


def line_search():
    """Which goes by the loss: of all ranks, as in one process that has all batches."""
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(24 * hvd.size(), n, generator=generator).double() for n in (5, 1))
    part = slice(24 * hvd.rank(), 24 * (hvd.rank() + 1))

    def trained(wraps, x, y):
        model = linear(5, 6, 1).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        if wraps:
            optimizer = distributed(model, optimizer, compression=None)

        def loss():
            optimizer.zero_grad()
            value = functional.mse_loss(model(x).tanh(), y)
            value.backward()
            return value

        losses = [optimizer.step(loss) for _ in range(3)]
        return model, losses

    model, losses = trained(True, x[part], y[part])
    plain, expected = trained(False, x, y)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs)
    return model


class Turning(torch.optim.SGD):
    """Has arguments of its own, of which one is needed."""

    def __init__(self, params, sign, lr=0.1):
        super().__init__(params, lr=lr)
        self.sign, self.turn = sign, self.turned

    def turned(self, gradient):
        return gradient * self.sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.turn(p.grad), alpha=group["lr"])


def own_arguments():
    """An optimizer is what it was made with, and hooks run that it had before."""
    ends, steps = [], []
    for wraps in (False, True):
        model = linear(10, 3)
        optimizer = Turning(model.parameters(), -1.0, lr=0.3)
        optimizer.register_step_pre_hook(lambda one, *_: steps.append(one))
        torch.optim.lr_scheduler.StepLR(optimizer, 5)  # counts steps by a method of its own
        if wraps:
            optimizer = distributed(model, optimizer, compression=None)
        model(torch.ones(2, 10)).square().sum().backward()
        optimizer.step()
        assert steps[-1] is optimizer and optimizer.turn.__self__ is optimizer
        ends.append(list(model.parameters()))
    torch.testing.assert_close(*ends)
    assert len(steps) == 2
    return model


def clipping():
    model = linear(10, 10, 3)
    optimizer = distributed(model)
    for x in batches(12, 4, 10):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    return model


def synchronized_twice():
    """`step` after `synchronize` without `skip_synchronize` does not exchange once more."""
    ends = []
    for skips in (True, False):
        model = linear(10, 10, 3)
        optimizer = distributed(model)
        for x in batches(12, 4, 10):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.synchronize()
            if skips:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert hvd.compression_stats(optimizer).steps == 12
        ends.append(digest(p.detach().numpy() for p in model.parameters()))
    assert ends[0] == ends[1]
    return model


def micro_batches(moments, batch_size=None):
    model = linear(10, 10, 3)
    compressor = hvd.VarianceCompressor(alpha=0.5, moments=moments)
    optimizer = distributed(
        model, None, compressor, backward_passes_per_step=4, batch_size=batch_size
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for x in batches(12, 16, 10):
        optimizer.zero_grad()
        for piece in x.split(4):
            (model(piece).square().mean() / 4).backward()
        optimizer.step()
        scheduler.step()
    return model


def operations(**options):
    model = linear(10, 3)
    optimizer = distributed(model, **options)
    for x in batches(12, 4, 10):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def checkpoint():
    """A state that is saved and loaded continues as if nothing had happened, on its own rank."""
    ends = []
    for stop in (None, 6):
        model = linear(10, 10, 3)
        optimizer = distributed(model)
        for step, x in enumerate(batches(12, 4, 10)):
            if step == stop:
                saved = model.state_dict(), optimizer.state_dict()
                model = linear(10, 10, 3)
                optimizer = distributed(model)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            optimizer.zero_grad()
            functional.mse_loss(model(x), x[:, :3]).backward()
            optimizer.step()
        ends.append(digest(p.detach().numpy() for p in model.parameters()))
    assert ends[0] == ends[1]
    return model


def rank_zeros_state():
    """Rank 0's state_dict, broadcast to all, does not bring its residual to the others."""
    model = linear(10, 3)
    optimizer = distributed(model, compression=hvd.StromCompressor(tau=1e6))
    for x in batches(3, 4, 10):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = optimizer._gradcomp.buckets[0].state
    residual = state.memory.r.clone()
    assert residual.any()
    received = hvd.broadcast_object(optimizer.state_dict(), 0)
    optimizer.load_state_dict(received)
    assert torch.equal(optimizer._gradcomp.buckets[0].state.memory.r, residual)
    return model


def two_optimizers():
    """As in a GAN: both exchange, under their own names."""
    models = [linear(10, 5), linear(5, 10)]
    optimizers = [distributed(m) for m in models]
    for x in batches(8, 4, 10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](models[0](x)).square().mean().backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    return nn.ModuleList(models)


def made_again():
    """As in a notebook: one rank has not collected yet what the others have."""
    model = linear(10, 10, 3)
    kept = distributed(model, compression=hvd.DGCCompressor(density=0.2))
    optimizers = [distributed(model[1], compression=hvd.QSGDCompressor())]
    kept = kept if hvd.rank() == 0 else None
    try:
        failed = distributed(model, compression=hvd.VarianceCompressor(moments="sample"))
    except ValueError as error:
        failed = error if hvd.rank() == 1 else None
    gc.collect()
    optimizers.append(distributed(model))
    for x in batches(6, 4, 10):
        optimizers[-1].zero_grad()
        model(x).square().mean().backward()
        optimizers[-1].step()
    del kept, failed
    assert hvd.compression_stats(optimizers[0]).steps == 0
    assert hvd.compression_stats(optimizers[-1]).steps == 6
    return model


def watched(folder):
    """Records are of their spans, on one rank or on all; reading them changes nothing."""
    lines = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("hvd_gradcomp")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    alone, everywhere = Path(folder, "stats", "alone.jsonl"), Path(folder, "stats", "all.jsonl")
    ends = []
    for watches in (False, True):
        model = linear(10, 100, 3)
        optimizer = distributed(model, bucket_bytes=4 * 1000)
        if watches:
            writers = [hvd.JSONLines(alone), hvd.JSONLines(everywhere, all_ranks=True)]
            writer = hvd.StatsWriter(optimizer, every=20, writers=writers)
        for x in batches(50, 4, 10):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if watches:
                writer.step()
        ends.append(digest(p.detach().numpy() for p in model.parameters()))
    writer.epoch(1)
    writer.close()
    assert ends[0] == ends[1]

    stats = hvd.compression_stats(optimizer)
    kept = [b.state.memory.r for b in optimizer._gradcomp.buckets]
    assert math.isclose(stats.residual_norm, torch.cat(kept).norm(), rel_tol=1e-5)
    reduced = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert math.isclose(stats.gradient_norm, reduced.norm(), rel_tol=1e-5)
    assert stats.level_changes > 0 and len(set(hvd.allgather_object(stats.level_changes))) == 1
    assert stats.skipped == 0

    file = everywhere.with_name(f"all.{hvd.rank()}.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["step"], r["rank"]) for r in records] == [(20, hvd.rank()), (40, hvd.rank())]
    assert all(r["compression/steps"] == 20 for r in records)
    assert sum(r["compression/bytes_sent"] for r in records) < stats.bytes_sent
    assert 0 < records[1]["compression/density/0.weight"] < 1
    if hvd.rank() == 0:
        assert len(alone.read_text().splitlines()) == 2
        (line,) = (line for line in lines if not line.startswith("compressing "))
        assert line.startswith("epoch 1: 50 steps, ") and " x gradient" in line, line
    else:
        assert not lines
    logger.removeHandler(listener)
    return model


def made_and_dropped():
    """A process holds as much after the fifth model as after the second."""

    def distributed_optimizer(**how):
        model = linear(10, 10, 3)
        optimizer = distributed(model, **how)
        return model, optimizer, optimizer._gradcomp, optimizer._synchronizer

    def wrapped(make):
        model = linear(10, 10, 3)
        optimizer = make(model)
        return model, optimizer, *optimizer.all_reducers

    def local_steps(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        how = {"every": 2, "fragments": 2, "compression": hvd.QSGDCompressor()}
        return hvd.LocalSteps(inner, model.named_parameters(), **how)

    def momentum_exchange(model):
        inner = torch.optim.Adam(model.parameters())
        return hvd.MomentumExchange(inner, model.named_parameters(), hvd.OneBitCompressor(), 1)

    hosts = {
        "DistributedOptimizer": distributed_optimizer,
        "momentum": lambda: distributed_optimizer(compression=hvd.DGCCompressor(density=0.1)),
        "LocalSteps": lambda: wrapped(local_steps),
        "MomentumExchange": lambda: wrapped(momentum_exchange),
    }

    def trained(make):
        made = make()
        model, optimizer, *_ = made
        for x in batches(3, 4, 10):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return made

    for name, make in hosts.items():
        leaves_nothing(name, lambda make=make: trained(make))
    return linear(10, 10, 3)


def main(folder: str, ranks: str) -> None:
    subset = hvd.ProcessSet(range(int(ranks) - 1))
    torch.set_num_threads(1)
    result: dict[str, str] = {}

    def run(cases):
        for name, case in cases.items():
            print("case:", name, flush=True)  # the last one is what hangs, should one hang
            model = case()
            if name != "process set" or subset.included():
                result[name] = digest(p.detach().double().numpy() for p in model.parameters())

    with on_timeline(hvd, folder):
        run(
            {
                "no gradient": no_gradient_on_some_ranks,
                "shared": shared_parameters,
                "sparse": lambda: sparse_gradients(False),
            }
        )
    hvd.init(process_sets=[subset])
    run(
        {
            "sparse as dense": lambda: sparse_gradients(True),
            "counted rows": counted_rows,
            "counted shots": counted_shots,
            "float16": lambda: reduced_precision(torch.float16),
            "bfloat16": lambda: reduced_precision(torch.bfloat16),
            "float64": lambda: reduced_precision(torch.float64),
            "memory formats": memory_formats,
            "gradients of another dtype": gradients_of_another_dtype,
            "large rows": large_rows,
            "small gradients": small_gradients,
            "two names": two_names,
            "all frozen": all_frozen,
            "closure": lambda: closure(torch.optim.SGD),
            "closure, several times": lambda: closure(torch.optim.LBFGS),
            "line search": line_search,
            "own arguments": own_arguments,
            "clipping": clipping,
            "synchronized twice": synchronized_twice,
            "micro-batches": lambda: micro_batches("microbatch"),
            "micro-batches, auto": lambda: micro_batches("auto", batch_size=16),
            "sum": lambda: operations(op=hvd.Sum),
            "predivide": lambda: operations(gradient_predivide_factor=4.0),
            "process set": lambda: operations(process_set=subset),
            "small buckets": lambda: operations(bucket_bytes=64),
            "horovod's fp16": lambda: operations(compression=hvd.Compression.fp16),
            "no compression": lambda: operations(compression=None),
            "checkpoint": checkpoint,
            "rank 0's state": rank_zeros_state,
            "two optimizers": two_optimizers,
            "made again": made_again,
            "made and dropped": made_and_dropped,
            "watched": lambda: watched(folder),
        }
    )
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
