"""One fault that ends the run: each living rank writes what it was told."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from tests.parallel.workers.results import noted

FAULTY = 1
STEP = 5


def killed(optimizer):
    """Dies in the middle of an exchange: its payload of one bucket has travelled, others not."""
    engine = optimizer._gradcomp
    submit, count = engine.programs._submit, [0]

    def dies(bucket, request):
        count[0] += 1
        if count[0] == 2:
            time.sleep(0.5)  # the others wait by now
            os.kill(os.getpid(), signal.SIGKILL)
        return submit(bucket, request)

    engine.programs._submit = dies


def late(optimizer):
    """Enqueues its second payload once the other rank has ended, and keeps the GIL until then.

    Horovod's thread lets go of the first payload meanwhile, and must not need the GIL for it.
    """
    engine = optimizer._gradcomp
    submit, count = engine.programs._submit, [0]

    def enqueues(bucket, request):
        count[0] += 1
        if count[0] == 2:
            sys.setswitchinterval(1000)  # seconds until Python takes the GIL from this thread
            ctypes.PyDLL(None).usleep(1_000_000)
        return submit(bucket, request)

    engine.programs._submit = enqueues


def damaged(optimizer):
    """What arrives at this rank, and at no other, is not what was sent."""
    engine = optimizer._gradcomp
    wait = engine.programs._wait

    def tampered(bucket):
        reply = wait(bucket)
        reply.view(-1)[20] ^= 8  # in the header of rank 0
        return reply

    engine.programs._wait = tampered


class Fails(torch.autograd.Function):
    """Passes a tensor on, and fails on its way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.5)  # the others wait by now
        raise ArithmeticError("this rank has failed")


def train(fault):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.StromCompressor(0.01),
        bucket_bytes=64,
    )
    x = torch.ones(4, 6) * (1 + hvd.rank())
    for step in range(20):
        middle = model[1](model[0](x))
        if hvd.rank() == FAULTY and step == STEP:
            if fault == "killed":
                killed(optimizer)
            elif fault == "raises":
                middle = Fails.apply(middle)
            elif fault == "ends early":
                time.sleep(0.5)  # the other has enqueued its first payload by now
                return
            elif fault == "received":
                damaged(optimizer)
        if hvd.rank() != FAULTY and step == STEP and fault == "ends early":
            late(optimizer)
        optimizer.zero_grad()
        model[3](model[2](middle)).square().sum().backward()
        optimizer.step()
    raise AssertionError("nothing was raised")


def main(folder: str, fault: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    with noted(folder, hvd.rank()):
        train(fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
