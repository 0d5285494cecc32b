"""What a run survives: slow ranks, caught errors, planted differences, refused settings."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import leaves
from tests.parallel.workers.results import digest, errors_of, finish

os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
FAULTY = 1
SENT = hvd.StromCompressor(0.01)
BASIS = hvd.GradiVeQCompressor(ratio=4, warmup_steps=2, sample_steps=4, compress_steps=20)
SEVERAL = [
    BASIS,
    hvd.DGCCompressor(density=0.1, momentum=0.9),
    hvd.ScaleComCompressor(density=0.1),
    hvd.OneBitCompressor(exchange="two_shot"),
    hvd.LGCCompressor("parameter_server", alpha=0.1, full_steps=2, train_steps=3, momentum=0.0),
]


class Failing(nn.Module):
    """Passes on what comes, and fails on the way back where it is told to."""

    def __init__(self):
        super().__init__()
        self.fails = False

    def forward(self, x):
        if self.fails:
            x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise ArithmeticError("this rank has failed")


def make(compressor=SENT, dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Flatten(), Failing(), nn.Linear(64, 4), nn.Linear(4, 2), Failing()
    )
    model.to(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        model.named_parameters(),
        compression=compressor,
        bucket_bytes=64,
        **options,
    )
    return model, optimizer


def train(model, optimizer, steps=8, before=None):
    """Training goes on behind a backward pass that fails."""
    generator = torch.Generator().manual_seed(hvd.rank())
    dtype = model[0].weight.dtype
    for step in range(steps):
        x = torch.randn(4, 1, 6, 6, generator=generator).to(dtype)
        if before is not None and hvd.rank() == FAULTY:
            before(step)
        optimizer.zero_grad()
        try:
            model(x).square().sum().backward()
        except ArithmeticError:
            model[2].fails = model[5].fails = False
            if optimizer._synchronizer.exchanging:  # other ranks wait for what is left of this step
                try:
                    optimizer.zero_grad()
                except AssertionError as error:
                    assert "the other ranks wait for this one" in str(error)
            else:
                continue
        optimizer.step()
    return digest(p.detach().double().numpy() for p in model.parameters())


def clean():
    for compressor in SEVERAL:
        model, optimizer = make(compressor, verify_every=3)
        train(model, optimizer, 12)
        hvd.verify(optimizer)


def planted(change, compressor=SENT, **options):
    model, optimizer = make(compressor, **options)
    train(model, optimizer)
    with torch.no_grad():
        model[3].bias.zero_()
        if hvd.rank() == FAULTY:
            change(model, optimizer)
    if options:
        train(model, optimizer, 2)
    else:
        hvd.verify(optimizer)


def negative_zero(model, optimizer):
    model[3].bias[2] = -0.0


def nudge(model, optimizer):
    model[4].weight[1, 1] *= 1 + 2.0**-20


def other_state(name):
    def change(model, optimizer):
        for bucket in optimizer._gradcomp.buckets:
            for path, x in leaves(bucket.state):
                if path.endswith(name):
                    x.view(-1)[-1] += 1
                    return
        raise AssertionError(f"no {name}")

    return change


def other_version():
    if hvd.rank() == FAULTY:
        wire.VERSION += 1
    try:
        train(*make())
    finally:
        wire.VERSION = 1


def encoder_fails():
    """On one rank, once; the error leaves `backward`, and `step` encodes anew."""
    model, optimizer = make()
    bucket = optimizer._gradcomp.buckets[-1]
    start, failed = type(bucket.compressor).encode, []

    def encode(*arguments):
        if hvd.rank() == FAULTY and not failed:
            failed.append(True)
            raise ArithmeticError("this rank has failed")
        return start(*arguments)

    type(bucket.compressor).encode = encode
    try:
        return train(model, optimizer)
    finally:
        type(bucket.compressor).encode = start


def slow():
    model, optimizer = make()
    return train(model, optimizer, 8, lambda step: time.sleep(2.5 * (step == 3)))


def failing(place):
    model, optimizer = make(verify_every=1)

    def before(step):
        model[place].fails = step == 3

    # Backward that fails before it has given any gradient costs that rank a batch, no step.
    steps = 9 if place == 5 and hvd.rank() == FAULTY else 8
    return train(model, optimizer, steps, before)


def main(folder: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    errors = errors_of(
        {
            "clean": clean,
            "one element": lambda: planted(nudge),
            "sign of zero": lambda: planted(negative_zero),
            "while training": lambda: planted(nudge, verify_every=2),
            "level": lambda: planted(other_state("capacity.level")),
            "basis": lambda: planted(other_state("basis"), compressor=BASIS),
            "verify_every": lambda: make(verify_every=-1),
            "version": other_version,
            "dtype": lambda: train(*make(dtype=[torch.float32, torch.float64][hvd.rank() % 2])),
        }
    )
    print("errors:", errors, flush=True)
    replicas = {
        "in time": train(*make()),
        "slow": slow(),
        "no gradient yet": failing(5),
        "some gradients": failing(2),
        "encoder": encoder_fails(),
    }
    finish(hvd, folder, {"errors": errors, "replicas": replicas})


if __name__ == "__main__":
    main(sys.argv[1])
