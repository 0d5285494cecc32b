"""What happens to an optimizer's parameters in a long training: replicas agree, nothing is lost."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.handover import residual_of
from tests.methods import ONE_OF_EACH
from tests.parallel.workers.results import digest, errors_of, finish

STEPS = 12
KEEP = (  # what is not sent stays in their residual
    hvd.StromCompressor(tau=2.0),
    hvd.VarianceCompressor(alpha=1.0, feedback_rounding=True, moments="step"),
    hvd.SparseGDCompressor(density=0.1),
    hvd.DGCCompressor(density=0.1, momentum=0.0),
    hvd.ScaleComCompressor(density=0.1, beta=1.0),
    hvd.OneBitCompressor(),
    hvd.ChunkedTopKCompressor(chunk=32, k=4, decay=1.0),
)
GRADIVEQ = hvd.GradiVeQCompressor(ratio=4, warmup_steps=1, sample_steps=3, compress_steps=2)
LGC = hvd.LGCCompressor(
    alpha=0.1, full_steps=2, train_steps=4, first_layer=(), last_layer=(), momentum=0.0
)


def bits(parameters):
    return digest(p.detach().numpy() for p in parameters)


def mean_over_ranks(x):
    return hvd.allreduce(x, op=hvd.Average)


def layer_residual(optimizer, p):
    bucket, slot = optimizer._gradcomp.planner.places[p]
    return bucket.cut(residual_of(bucket.compressor, bucket.state))[slot].clone()


def ledger(compressor, bucket_bytes):
    """Gradients are what the data say, whatever the parameters: each has to arrive or to wait."""
    torch.manual_seed(1)
    always, frozen, seldom, late, thawed = ps = [nn.Parameter(torch.randn(6, 20)) for _ in range(5)]
    thawed.requires_grad_(False)
    start = [p.detach().clone() for p in ps]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([always, frozen, seldom, thawed], lr=1.0),
        compression=compressor,
        bucket_bytes=bucket_bytes,
    )
    generator = torch.Generator().manual_seed(5 + hvd.rank())
    gradients_ = [torch.zeros_like(p) for p in ps]
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 3:
            frozen.requires_grad_(False)
            before = frozen.detach().clone(), layer_residual(optimizer, frozen)
        if step == 5:
            optimizer.add_param_group({"params": [late], "lr": 0.5})
        if step == 6:
            thawed.requires_grad_(True)
        if step == 8:
            assert torch.equal(frozen, before[0])
            assert torch.equal(layer_residual(optimizer, frozen), before[1])
            frozen.requires_grad_(True)
        loss = torch.zeros(())
        for place, p in enumerate(ps):
            x = torch.randn(p.shape, generator=generator)
            unused = p is seldom and (step + hvd.rank()) % 3 == 0
            if not p.requires_grad or unused or (p is late and step < 5):
                continue
            loss = loss + (p * x).sum()
            gradients_[place] += x
        loss.backward()
        optimizer.step()
    for place, p in enumerate(ps):
        rate = 0.5 if p is late else 1.0
        arrived = (start[place] - p.detach()) / rate
        waits = mean_over_ranks(layer_residual(optimizer, p))
        assert (arrived + waits - mean_over_ranks(gradients_[place])).abs().max() < 1e-4, place
    assert hvd.compression_stats(optimizer).steps == STEPS
    return bits(ps)


class Network(nn.Module):
    """With a layer that some steps do not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.extra = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.later = nn.Linear(4, 4)

    def forward(self, x, extra):
        x = self.body(x).mean((2, 3))
        return self.later(self.head(self.extra(x) if extra else x))


def fine_tuning(compressor, grows=True):
    """The body thaws step by step, a layer joins, rates change, passes add up."""
    model = Network()
    model.body[0].requires_grad_(False)
    first = [*model.body.parameters(), *model.extra.parameters(), *model.head.parameters()]
    if not grows:
        model.body[0].requires_grad_(True)
        first += model.later.parameters()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first, lr=0.05, momentum=0.9, weight_decay=0.01),
        model.named_parameters(),
        compression=compressor,
        backward_passes_per_step=2,
        bucket_bytes=1024,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(5 + hvd.rank())
    for step in range(STEPS):
        if step == 2:
            model.head.requires_grad_(False)
            fixed = bits(model.head.parameters())
        if step == 4 and grows:
            model.body[0].requires_grad_(True)
            optimizer.add_param_group({"params": model.later.parameters(), "lr": 0.01})
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        if step == 6:
            assert bits(model.head.parameters()) == fixed
            model.head.requires_grad_(True)
        for turn in range(2):
            extra = (step + hvd.rank() + turn) % 3 > 0
            x = torch.randn(4, 1, 6, 6, generator=generator)
            model(x, extra).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scheduler.step()
    assert bits(model.head.parameters()) != fixed
    return bits(model.parameters())


def joined(compressor):
    """A new run in which the same join goes on from the state as if nothing had happened."""

    def build(weights=None):
        model = Network()
        if weights is not None:
            model.load_state_dict(weights)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.body.parameters(), lr=0.05, momentum=0.9),
            model.named_parameters(),
            compression=compressor,
        )
        return model, optimizer

    def join(model, optimizer):
        rest = (model.extra, model.head, model.later)
        optimizer.add_param_group({"params": [p for m in rest for p in m.parameters()]})

    ends = []
    for stop in (None, 8):
        model, optimizer = build()
        generator = torch.Generator().manual_seed(5 + hvd.rank())
        for step in range(STEPS):
            if step == 4:
                join(model, optimizer)
            if step == stop:
                saved = optimizer.state_dict()
                model, optimizer = build(model.state_dict())
                join(model, optimizer)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            model(torch.randn(4, 1, 6, 6, generator=generator), True).square().mean().backward()
            optimizer.step()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]
    return ends[0]


ODD = {  # options that no optimizer has by itself
    **{"lr": 0.7, "weight_decay": 0.03, "eps": 0.001, "maximize": True, "foreach": False},
    **{"alpha": 0.6, "rho": 0.5, "momentum": 0.4, "dampening": 0.2, "betas": (0.5, 0.6)},
    **{"etas": (0.3, 1.5), "momentum_decay": 0.1, "lr_decay": 0.2, "amsgrad": True, "d": 2.0},
}


def defaults():
    """The options of a group that joins without any: of the optimizer inside, or of its class."""
    results = {}
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    for kind in sorted(set(kinds) - {torch.optim.Optimizer, torch.optim.LBFGS}, key=str):
        named = inspect.signature(kind).parameters
        options = {name: value for name, value in ODD.items() if name in named}
        if kind is torch.optim.Adafactor:
            del options["eps"]  # a pair there
        groups = []
        for distributed in (False, True):
            weight, late = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
            optimizer = kind([weight], **options)
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)])
            optimizer.add_param_group({"params": [late]})
            group = dict(optimizer.param_groups[-1])
            groups.append(str({k: v for k, v in sorted(group.items()) if k != "params"}))
        results[kind.__name__] = groups
    return results


def refused_group():
    """A group that cannot join is not there, neither here nor in the exchange."""
    weight, late = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.05, momentum=0.9),
        [("weight", weight)],
        compression=hvd.DGCCompressor(density=0.1),
    )
    messages = errors_of(
        {"momentum": lambda: optimizer.add_param_group({"params": [late], "momentum": 0.5})}
    )
    registered = late in optimizer._gradcomp.parameters or late in optimizer._parameter_names
    return [messages["momentum"], len(optimizer.param_groups), registered]


def errors():
    def optimizer(compressor, momentum=0.0):
        return hvd.DistributedOptimizer(
            torch.optim.SGD(model.body.parameters(), lr=0.05, momentum=momentum),
            model.named_parameters(),
            compression=compressor,
        )

    model = Network()
    group = {"params": list(model.head.parameters())}

    def between_backward_and_step():
        one = optimizer(hvd.NoneCompressor())
        model(torch.ones(4, 1, 6, 6), True).sum().backward()
        one.add_param_group(dict(group))

    def another_momentum():
        one = optimizer(hvd.DGCCompressor(density=0.1), momentum=0.9)
        one.add_param_group({**group, "momentum": 0.5})

    def untracked():
        hvd.track_moments(model.body)
        one = optimizer(hvd.VarianceCompressor(moments="sample"))
        one.add_param_group(dict(group))

    return errors_of(
        {
            "lgc": lambda: optimizer(replace(LGC, first_layer=None)).add_param_group(dict(group)),
            "momentum": another_momentum,
            "untracked": untracked,
            "in between": between_backward_and_step,
        }
    )


def main(folder: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    result = {}

    def run(name, case, *arguments):
        print("case:", name, flush=True)  # the last one is what hangs, should one hang
        result[name] = case(*arguments)

    for compressor in KEEP:
        for bucket_bytes in (None, 64):
            run(f"ledger, {bucket_bytes}, {compressor!r}", ledger, compressor, bucket_bytes)
    for compressor in (*ONE_OF_EACH, GRADIVEQ):
        run(f"fine-tuning, {compressor!r}", fine_tuning, compressor)
    run("fine-tuning, LGC", fine_tuning, LGC, False)
    run("joined", joined, hvd.DGCCompressor(density=0.1))
    result["defaults"] = defaults()
    result["refused"] = refused_group()
    result["errors"] = errors()
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
