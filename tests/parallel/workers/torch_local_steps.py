"""Local steps over Horovod on some ranks: every method, checkpoints, what ranks do differently."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_gradcomp.torch as hvd
from tests.methods import LGC, ONE_OF_EACH, TODAY
from tests.parallel.workers.results import digest, errors_of, finish

EVERY = 3


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Linear(30, 4))


def local(compression=None, every=EVERY, **options):
    model = network()
    optimizer = hvd.LocalSteps(
        torch.optim.AdamW(model.parameters(), 0.01),
        model.named_parameters(),
        every=every,
        compression=compression,
        **options,
    )
    return model, optimizer


def train(model, optimizer, steps, first=0, spoil=None):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        x = torch.randn(8, 12, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
        if spoil is not None and step == spoil:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")


def weights(model):
    return digest(p.detach().numpy() for p in model.parameters())


def takes_no_samples(compression):
    return getattr(compression, "moments", "step") in ("step", "auto")


def methods():
    ends = {}
    for compression in [c for c in [*ONE_OF_EACH, *TODAY, LGC] if takes_no_samples(c)]:
        print("method:", compression, flush=True)
        model, optimizer = local(compression, outer=hvd.OuterSGD(0.7, 0.9))
        train(model, optimizer, EVERY + 1)
        apart = weights(model)
        train(model, optimizer, EVERY - 1, EVERY + 1)
        hvd.verify(optimizer)
        assert hvd.compression_stats(optimizer).steps == 2 * EVERY
        ends[repr(compression)] = apart, weights(model)
    return ends


def averaging_is_stock():
    """After each step and without momentum it is DistributedOptimizer with SGD, to rounding."""
    ends = []
    for wrap in (
        lambda sgd, named: hvd.DistributedOptimizer(sgd, named),
        lambda sgd, named: hvd.LocalSteps(sgd, named, 1, hvd.OuterSGD(1.0, 0.0), None),
    ):
        model = network()
        optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        train(model, optimizer, 6)
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return (ends[0] - ends[1]).abs().max().item()


def resumed(folder):
    """From a checkpoint between two exchanges, and while one is on its way."""
    ends = {}
    options = {"compression": hvd.SparseGDCompressor(density=0.1), "fragments": 2, "every": 4}
    for name, more in {"apart": {}, "on its way": {"delay": 1}}.items():
        model, optimizer = local(**options, **more)
        train(model, optimizer, 6)
        hvd.save_checkpoint(Path(folder, name), optimizer=optimizer, model=model)
        train(model, optimizer, 6, 6)
        optimizer.exchange()
        again, other = local(**options, **more)
        hvd.load_checkpoint(Path(folder, name), optimizer=other, model=again)
        train(again, other, 6, 6)
        other.exchange()
        ends[name] = weights(model), weights(again)
    return ends


def consolidated(folder):
    model, optimizer = local(hvd.SparseGDCompressor(density=0.1))
    train(model, optimizer, EVERY)
    shared = weights(model)
    train(model, optimizer, 1, EVERY)
    where = Path(folder, "consolidated")
    hvd.save_checkpoint(where, mode="consolidated", optimizer=optimizer, model=model)
    model, optimizer = local(hvd.SparseGDCompressor(density=0.1))
    hvd.load_checkpoint(where, optimizer=optimizer, model=model)
    before = weights(model)
    train(model, optimizer, 2, EVERY + 1)
    return shared, before, weights(model)


def handed_out():
    """All ranks go on from the last rank, which alone has trained before."""
    root, ends = hvd.size() - 1, []
    model, optimizer = local(hvd.SparseGDCompressor(density=0.1))
    if hvd.rank() == root:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    ends.append(weights(model))
    train(model, optimizer, EVERY)
    ends.append(weights(model))
    train(model, optimizer, 1, EVERY)
    hvd.broadcast_optimizer_state(optimizer, root)
    train(model, optimizer, EVERY - 1, EVERY + 1)
    ends.append(weights(model))
    return ends


def momenta(folder):
    """Adam that exchanges momenta: replicas are equal in each step; saved, resumed, handed out."""
    ends = {}
    for compression in [hvd.OneBitCompressor(), hvd.SparseGDCompressor(density=0.1), *TODAY[:3]]:
        runs = []
        for resumes in (False, True):
            model = network()
            adam = torch.optim.AdamW(model.parameters(), 0.01)
            how = model.named_parameters(), compression, 3
            optimizer = hvd.MomentumExchange(adam, *how)
            if resumes:
                hvd.load_checkpoint(Path(folder, "momenta"), optimizer=optimizer, model=model)
                hvd.broadcast_optimizer_state(optimizer, 0)
            else:
                train(model, optimizer, 5)
                hvd.save_checkpoint(Path(folder, "momenta"), optimizer=optimizer, model=model)
            train(model, optimizer, 3, 5)
            hvd.verify(optimizer)
            runs.append(weights(model))
        ends[repr(compression)] = runs
    return ends


def rounds_of_slow_ranks():
    """Train rounds in which the first rank is quick; return how many steps each has made."""
    ends = {}
    for compression in (None, hvd.Int8Compressor(), hvd.ChunkedTopKCompressor(chunk=64, k=8)):
        model, optimizer = local(compression, deadline=0.5, warmup_steps=2)
        train(model, optimizer, 2)
        while optimizer.rounds < 4:
            time.sleep(0.02 * hvd.rank())
            train(model, optimizer, 1, optimizer.steps_made)
        optimizer.exchange()
        hvd.verify(optimizer)
        ends[repr(compression)] = optimizer.steps_made, optimizer.rounds, weights(model)
    return ends


def rounds_that_grow(folder):
    """Rounds that follow a falling rate; the second run resumes in the middle of one."""
    ends = []
    for resumes in (False, True):
        model, optimizer = local(every=hvd.QuadraticRule(0.01, base=2), fragments=2, delay=1)
        if resumes:
            hvd.load_checkpoint(Path(folder, "grown"), optimizer=optimizer, model=model)
        for step in range(optimizer.steps_made, 30):
            optimizer.param_groups[0]["lr"] = 0.01 * 0.95**step
            train(model, optimizer, 1, step)
            if step == 13 and not resumes:
                hvd.save_checkpoint(Path(folder, "grown"), optimizer=optimizer, model=model)
        rounds = optimizer.rounds
        optimizer.exchange()
        hvd.verify(optimizer)
        ends.append((rounds, weights(model)))
    return ends


def of_ddp():
    """Local steps of a model that DistributedDataParallel has wrapped are those of a plain one."""
    ends = []
    for wrap in (lambda model: model, DistributedDataParallel):
        model = wrap(network())
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        optimizer = hvd.LocalSteps(adam, model.named_parameters(), 3, hvd.OuterSGD(1.0, 0.0))
        train(model, optimizer, EVERY + 1)
        ends.append(weights(model))
    return ends


def different():
    def deadline():
        model, optimizer = local(deadline=1.0 + hvd.rank())
        train(model, optimizer, 1)
        optimizer.exchange()

    def every():
        model, optimizer = local(every=2 + 2 * hvd.rank())
        train(model, optimizer, 2 + 2 * hvd.rank())

    def lengths():
        rank = hvd.rank()
        train(*local(every=lambda step: 2 if step < 4 else 2 + rank), 8)

    def fails_alone():
        def length(step):
            return 2 if step < 4 or hvd.rank() else 1 // 0

        train(*local(every=length, fragments=2, delay=1), 8)

    def rates():
        model, optimizer = local(every=hvd.QuadraticRule(0.01, base=2))
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.01 * (0.9 - 0.1 * hvd.rank()) ** step
            train(model, optimizer, 1, step)

    def not_finite():
        train(*local(), EVERY + 1, spoil=1 if hvd.rank() == 1 else None)

    def start():
        model, optimizer = local()
        with torch.no_grad():
            next(model.parameters())[0, 0] += hvd.rank()
        train(model, optimizer, EVERY)

    def steps():
        model, optimizer = local()
        train(model, optimizer, 1)
        if hvd.rank() == 0:
            optimizer.exchange()
        train(model, optimizer, EVERY - 1)

    def samples():
        local(hvd.VarianceCompressor(moments="microbatch"))

    def momenta_of_sgd():
        hvd.MomentumExchange(torch.optim.SGD(network().parameters(), 0.1))

    def twice():
        model, local_steps = local()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        hvd.DistributedOptimizer(sgd, model.named_parameters())
        train(model, local_steps, 1)

    def around_ddp():
        model = DistributedDataParallel(network())
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    def wrapped_by_ddp_later():
        model = network()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        train(DistributedDataParallel(model), optimizer, 1)

    def exchanges_already():
        sgd = torch.optim.SGD(network().parameters(), 0.1)
        hvd.LocalSteps(hvd.DistributedOptimizer(sgd))

    cases = [deadline, exchanges_already, momenta_of_sgd, every, not_finite, start, steps, samples]
    cases += [twice, around_ddp, wrapped_by_ddp_later, lengths, fails_alone, rates]
    return errors_of({case.__name__: case for case in cases})


def main(folder: str) -> None:
    hvd.init()
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    met = f"file://{folder}/met"
    torch.distributed.init_process_group("gloo", met, rank=hvd.rank(), world_size=hvd.size())
    model, optimizer = local(hvd.SparseGDCompressor(density=0.1), nonfinite="skip")
    train(model, optimizer, 2 * EVERY, spoil=1 if hvd.rank() == 1 else None)
    result = {
        "methods": methods(),
        "stock": averaging_is_stock(),
        "resumed": resumed(folder),
        "consolidated": consolidated(folder),
        "handed out": handed_out(),
        "momenta": momenta(folder),
        "skipped": weights(model),
        "slow": rounds_of_slow_ranks(),
        "grown": rounds_that_grow(folder),
        "ddp": of_ddp(),
        "errors": different(),
    }
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(sys.argv[1])
