"""Attacks on ranks with local steps, or that exchange momenta: folder, options, names of cases."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from tests.chaos.workers import trials
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

FAULTY, EVERY = 1, 3
SPARSE = hvd.SparseGDCompressor(density=0.1)
options: dict[str, Any] = {}


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 4))


def local(every=EVERY, compressor=SPARSE, **more):
    model = model_of()
    adam, named = torch.optim.AdamW(model.parameters(), 0.01), model.named_parameters()
    how = {"fragments": 2, "delay": 1, **options, **more} if every > 2 else more
    return model, hvd.LocalSteps(adam, named, every, compression=compressor, **how)


def momenta(**more):
    model = model_of()
    adam, named = torch.optim.AdamW(model.parameters(), 0.01), model.named_parameters()
    return model, hvd.MomentumExchange(adam, named, SPARSE, 3, **more)


BUILDS = {"local": local, "momenta": momenta}


def backward(model):
    (model(torch.randn(8, 12)) * (1 + hvd.rank())).square().mean().backward()


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def end(model, optimizer):
    if hasattr(optimizer, "exchange"):
        optimizer.exchange()
    return digest([p.detach().numpy() for p in model.parameters()])


ATTACKS = trials.LocalAttacks(local, train, end, lambda: hvd.rank() == FAULTY)
alone, around, other_settings = ATTACKS.alone, ATTACKS.around, ATTACKS.other_settings


def other_parameters(trial: Trial) -> str:
    model, optimizer = local()
    alone(trial, lambda: nn.init.ones_(model[0].bias))
    train(model, optimizer, 6)
    return end(model, optimizer)


def poisoned(policy: str, build: Any) -> Callable[[Trial], str]:
    """One rank's gradient, and so its parameters, are not finite in one step."""

    def case(trial: Trial) -> str:
        model, optimizer = build(nonfinite=policy)
        train(model, optimizer, 4)
        optimizer.zero_grad()
        backward(model)
        alone(trial, lambda: model[0].weight.grad.fill_(float("nan")))
        optimizer.step()
        train(model, optimizer, 6)
        end(model, optimizer)
        if hvd.rank() == FAULTY and build is local:  # what Adam keeps there is not finite any more
            optimizer.state.clear()
        train(model, optimizer, 3)
        return end(model, optimizer)

    return case


def overflow(build: Any) -> Callable[[Trial], str]:
    def case(trial: Trial) -> str:
        model, optimizer = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(9):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 12)).square().mean()
            if step == 4:
                trial.now()
                loss = loss * (float("inf") if hvd.rank() == FAULTY else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return end(model, optimizer)

    return case


def other_round(build: Any) -> Callable[[Trial], str]:
    """Each rank loads its own state, and one's is of another step."""

    def case(trial: Trial) -> str:
        model, optimizer = build()
        kept = []
        for _ in range(2):
            train(model, optimizer, 4)
            kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        trial.now()
        model.load_state_dict(kept[0][0])
        optimizer.load_state_dict(kept[hvd.rank() == FAULTY][1])
        train(model, optimizer, 8)
        return end(model, optimizer)

    return case


def full_disk(build: Any) -> Callable[[Trial], str]:
    def case(trial: Trial) -> str:
        model, optimizer = build()
        train(model, optimizer, 4)
        where = {"model": model, "optimizer": optimizer}
        trial.now()
        if hvd.rank() == FAULTY:
            with trials.full_disk():
                hvd.save_checkpoint(trial.folder, **where)
        else:
            hvd.save_checkpoint(trial.folder, **where)
        return end(model, optimizer)

    return case


CASES: dict[str, Callable[[Trial], Any]] = {
    "another every on one rank": other_settings(every=5),
    "another compressor on one rank": other_settings(compressor=hvd.OneBitCompressor()),
    "another outer rate on one rank": other_settings(outer=hvd.OuterSGD(0.5)),
    "other parameters on one rank": other_parameters,
    "a step more on one rank": around(lambda m, o: train(m, o, 1)),
    "exchange() on one rank": around(lambda m, o: o.exchange()),
    "restart() on one rank": around(lambda m, o: o.restart()),
    "a user's allreduce on one rank": around(
        lambda m, o: hvd.allreduce(torch.ones(1), name="metric")
    ),
    "verify on one rank": around(lambda m, o: hvd.verify(o)),
    "a parameter set on one rank": around(lambda m, o: nn.init.ones_(m[0].bias)),
    **{
        f"{what}, {name}": case(build)
        for name, build in BUILDS.items()
        for what, case in {
            "a scaler's overflow on one rank": overflow,
            "state_dict of another step": other_round,
            "a checkpoint, full disk on one rank": full_disk,
            "SIGSTOP for 5 s": lambda build: around(lambda m, o: trials.stop_for(5), build),
        }.items()
    },
    **{
        f"nan on one rank, {policy}, {name}": poisoned(policy, build)
        for name, build in BUILDS.items()
        for policy in ("raise", "skip")
    },
    "kill -9": around(lambda m, o: os.kill(os.getpid(), signal.SIGKILL)),
    "an exception on one rank": around(lambda m, o: (_ for _ in ()).throw(_FailedError())),
    "exit on one rank": around(lambda m, o: os._exit(0)),
    "SIGSTOP for ever": around(lambda m, o: trials.stop_for_ever()),
}


class _FailedError(ArithmeticError):
    def __init__(self) -> None:
        super().__init__("this rank has failed")


def main(folder: str, cases: str, *names: str) -> None:
    options.update(json.loads(cases))
    hvd.init()
    torch.set_num_threads(1)
    trials.run(folder, hvd.rank(), CASES, names, hvd.barrier)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
