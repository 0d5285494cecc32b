"""Overflows on random ranks, at random steps: nothing of them may stay, on any rank."""

from __future__ import annotations

import random
import sys

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import correction_of
from tests.methods import CHUNKED, EVERY, ONE_OF_EACH, learned_by
from tests.parallel.workers.results import digest, errors_of, finish


def build(seed=1):
    torch.manual_seed(seed)
    convolutions = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, 10))


def wrapped(model, compressor, **options):
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    sgd = torch.optim.SGD(model.parameters(), lr=0.001, weight_decay=0.01)
    plain = adam if compressor is None or correction_of(compressor) is None else sgd
    return hvd.DistributedOptimizer(
        plain, model.named_parameters(), compression=compressor, bucket_bytes=4096, **options
    )


def loss_of(model, generator):
    x = torch.randn(8, 1, 8, 8, generator=generator)
    y = torch.randint(0, 10, (8,), generator=generator)
    return 20 * nn.functional.cross_entropy(model(x), y)


def overflow(model, generator, where):
    """A loss whose gradient is infinite in one layer."""
    parameter = list(model.parameters())[where]
    return loss_of(model, generator) + (parameter * float("inf")).sum()


def train(compressor, steps, disturbed):
    """A run with a scaler; the disturbed one has steps that the other does not have."""
    model = build()
    tracker = hvd.track_moments(model) if compressor.uses_moments else None
    optimizer = wrapped(model, compressor)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=40)
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    other = torch.Generator().manual_seed(7)
    dice = random.Random(5)

    def step(loss, clips):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clips:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()

    injected = 0
    for number in range(steps):
        if disturbed and dice.random() < 0.1:
            injected += 1
            culprit, where = dice.randrange(hvd.size()), dice.randrange(4)
            is_culprit = hvd.rank() == culprit
            step(overflow(model, other, where) if is_culprit else loss_of(model, other), number % 2)
        step(loss_of(model, generator), number % 2)
    stats = hvd.compression_stats(optimizer)
    assert (stats.skipped, stats.steps) == (injected, steps), (compressor, disturbed, stats)
    if tracker is not None:
        tracker.remove()
    state = [x for b in optimizer._gradcomp.buckets for _, x in leaves(b.state)]
    return digest([p.detach().numpy() for p in model.parameters()] + state), scaler.get_scale()


def without_scaler(policy):
    """One step with an overflow on rank 1: what changes, and what is raised."""
    model = build()
    optimizer = wrapped(model, hvd.DGCCompressor(density=0.1, momentum=0.0), nonfinite=policy)
    generator = torch.Generator().manual_seed(hvd.rank())

    def everything():
        state = [x for b in optimizer._gradcomp.buckets for _, x in leaves(b.state)]
        return digest([p.detach().numpy() for p in model.parameters()]), digest(state)

    def step(make):
        optimizer.zero_grad()
        make().backward()
        optimizer.step()

    for _ in range(3):
        step(lambda: loss_of(model, generator))
    before = everything()
    bad = hvd.rank() == 1
    raised = errors_of(
        {
            "step": lambda: step(
                lambda: overflow(model, generator, 2) if bad else loss_of(model, generator)
            )
        }
    )["step"]
    after = everything()
    kept = [a == b for a, b in zip(before, after)]
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return [raised, *kept, finite, hvd.compression_stats(optimizer).skipped]


def in_closure():
    model = build()
    optimizer = wrapped(model, None, nonfinite="skip")
    before = digest([p.detach().numpy() for p in model.parameters()])

    def closure():
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(hvd.rank())
        loss = overflow(model, generator, 0) if hvd.rank() else loss_of(model, generator)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    same = before == digest([p.detach().numpy() for p in model.parameters()])
    return [same, (hvd.rank() == 1) != bool(loss.isfinite())]


def misused():
    """Scalers that fit, and that do not."""

    def unscaled():
        model = build()
        optimizer, scaler = wrapped(model, None), torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, torch.Generator())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    def of_another():
        model = build()
        optimizer, scaler = wrapped(model, None), torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, torch.Generator()))
        loss_of(model, torch.Generator()).backward()
        try:
            optimizer.step()
        finally:
            optimizer.synchronize()

    def no_policy():
        wrapped(build(), None, nonfinite="ignore")

    cases = (unscaled, of_another, no_policy)
    return errors_of({case.__name__: case for case in cases})


def main(folder: str, steps: int, settings: str) -> None:
    """Goes through "all" settings, or one of each method."""
    hvd.init()
    torch.set_num_threads(1)
    methods = [*EVERY, *learned_by("torch", 2)] if settings == "all" else [*ONE_OF_EACH, CHUNKED]
    pairs = {repr(c): [train(c, steps, disturbed) for disturbed in (True, False)] for c in methods}
    policies = {policy: without_scaler(policy) for policy in ("raise", "skip", "propagate")}
    finish(
        hvd,
        folder,
        {"pairs": pairs, "policies": policies, "closure": in_closure(), "errors": misused()},
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
