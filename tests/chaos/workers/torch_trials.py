"""Attacks on ranks that train with PyTorch; arguments: folder, options as JSON, names of cases."""

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
from hvd_gradcomp.monitoring.reports import JSONLines, TensorBoard
from tests.chaos.workers import trials
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

FAULTY = 1
STROM = hvd.StromCompressor(tau=0.01)
METHODS = {
    "None": hvd.NoneCompressor(),
    "Strom": STROM,
    "DGC": hvd.DGCCompressor(density=0.05, momentum=0.9),
    "ScaleCom": hvd.ScaleComCompressor(density=0.05),
    "QSGD": hvd.QSGDCompressor(exchange="two_shot"),
    "after": hvd.after(3, None, hvd.StromCompressor(tau=0.01)),
    "GradiVeQ": hvd.GradiVeQCompressor(
        ratio=4, warmup_steps=1, sample_steps=2, compress_steps=4, feedback=True
    ),
    "LGC": hvd.LGCCompressor(alpha=0.1, full_steps=3, train_steps=8, momentum=0.9),
    "LGC with a server": hvd.LGCCompressor(
        "parameter_server", alpha=0.1, full_steps=3, train_steps=8, momentum=0.9
    ),
}
options: dict[str, Any] = {}


def build(compressor=STROM, outputs=4, **more):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(192, outputs),
    )
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    names = model.named_parameters()
    more = {"bucket_bytes": 4096, **options, **more}
    return model, hvd.DistributedOptimizer(plain, names, compression=compressor, **more)


def loss_of(model):
    return model(torch.randn(4, 1, 3, 4) * (1 + hvd.rank())).square().mean()


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def replicas(model):
    return digest([p.detach().numpy() for p in model.parameters()])


def alone(trial: Trial, change: Callable[[], Any]) -> None:
    """One rank does what the others do not."""
    if hvd.rank() == FAULTY:
        trial.now()
        change()


def around(change: Callable[[Any, Any], Any], compressor=STROM) -> Callable[[Trial], str]:
    """Some steps, what one rank does alone, and more steps."""

    def case(trial: Trial) -> str:
        model, optimizer = build(compressor)
        train(model, optimizer, 4)
        alone(trial, lambda: change(model, optimizer))
        train(model, optimizer, 8)
        return replicas(model)

    return case


def apart(compressor: Any, steps: int) -> Callable[[Trial], str]:
    """Each rank loads its own state, and these are a step apart."""

    def case(trial: Trial) -> str:
        model, optimizer = build(compressor)
        kept = []
        for _ in range(steps + 1):
            train(model, optimizer, 1)
            kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        state_here = kept[-1 if hvd.rank() == FAULTY else -2]
        trial.now()
        model.load_state_dict(kept[-2][0])
        optimizer.load_state_dict(state_here[1])
        train(model, optimizer, 12)
        return replicas(model)

    return case


def added(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})


def other_modes(trial: Trial) -> str:
    model, optimizer = build()
    train(model, optimizer, 2)
    trial.now()
    mode = "consolidated" if hvd.rank() == FAULTY else "sharded"
    hvd.save_checkpoint(trial.folder, mode=mode, model=model, optimizer=optimizer)
    return replicas(model)


def saves_alone(mode: str) -> Callable[[Trial], str]:
    def case(trial: Trial) -> str:
        def save(model, optimizer):
            hvd.save_checkpoint(trial.folder, mode=mode, model=model, optimizer=optimizer)

        return around(save)(trial)

    return case


def not_scaled(trial: Trial) -> str:
    model, optimizer = build()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = loss_of(model)
    trial.now()
    (loss if hvd.rank() == FAULTY else scaler.scale(loss)).backward()
    optimizer.step()
    return replicas(model)


def other_compressor(trial: Trial) -> str:
    trial.now()
    model, optimizer = build(hvd.StromCompressor(tau=0.1 if hvd.rank() == FAULTY else 0.2))
    train(model, optimizer, 2)
    return replicas(model)


def other_model(trial: Trial) -> str:
    trial.now()
    model, optimizer = build(outputs=5 if hvd.rank() == FAULTY else 4)
    train(model, optimizer, 2)
    return replicas(model)


def damaged(trial: Trial) -> str:
    model, optimizer = build()
    train(model, optimizer, 2)
    engine = optimizer._gradcomp
    submit = engine.programs._submit

    def tampered(bucket, request):
        if hvd.rank() == FAULTY and not trial.made and request.tensor.numel() > 40:
            trial.now()
            request.tensor[40] ^= 8
        return submit(bucket, request)

    engine.programs._submit = tampered
    train(model, optimizer, 2)
    return replicas(model)


def stopped(model, optimizer):
    trials.stop_for(5)


def checkpoint_on_full_disk(trial: Trial) -> str:
    model, optimizer = build()
    train(model, optimizer, 2)
    trial.now()
    objects = {"model": model, "optimizer": optimizer}
    if hvd.rank() == FAULTY:
        with trials.full_disk():
            hvd.save_checkpoint(trial.folder, **objects)
    else:
        hvd.save_checkpoint(trial.folder, **objects)
    return replicas(model)


def writers_on_full_disk(trial: Trial) -> str:
    model, optimizer = build()
    folder = trial.folder / str(hvd.rank())
    folder.mkdir(parents=True)
    writers = [JSONLines(folder / "stats.jsonl"), TensorBoard(folder / "events")]
    stats = hvd.StatsWriter(optimizer, every=1, writers=writers)
    trial.now()
    with trials.full_disk(1000):
        for _ in range(60):
            train(model, optimizer, 1)
            stats.step()
        stats.epoch(0)
    return replicas(model)


def poisoned(value: float, policy: str) -> Callable[[Trial], Any]:
    """One rank's gradient is not finite in one layer, in one step."""

    def case(trial: Trial) -> Any:
        model, optimizer = build(nonfinite=policy)
        train(model, optimizer, 3)
        before = replicas(model)
        optimizer.zero_grad()
        loss = loss_of(model)
        trial.now()
        if hvd.rank() == FAULTY:
            loss = loss + (model[0].weight * value).sum()
        loss.backward()
        optimizer.step()
        if policy != "skip":
            return [bool(p.isnan().any()) for p in model.parameters()]
        assert replicas(model) == before, "a step that is left out changes nothing"
        train(model, optimizer, 3)
        return replicas(model)

    return case


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("this rank has failed")


def fails(model, optimizer):
    optimizer.zero_grad()
    model[3](_Fails.apply(model[2](model[1](model[0](torch.ones(4, 1, 3, 4)))))).sum().backward()


def uneven(then: Callable[[Any], Any]) -> Callable[[Trial], str]:
    """One rank has a batch less; a collective, or none, that ends the epoch on all."""

    def case(trial: Trial) -> str:
        model, optimizer = build()
        train(model, optimizer, 3)
        trial.now()
        train(model, optimizer, 2 if hvd.rank() == FAULTY else 3)
        then(optimizer)
        train(model, optimizer, 2)
        return replicas(model)

    return case


def left_out(ranks: Callable[[int], bool]) -> Callable[[Trial], str]:
    """Some ranks discard a step that has been exchanged."""

    def case(trial: Trial) -> str:
        model, optimizer = build(rollback=True)
        train(model, optimizer, 3)
        optimizer.zero_grad()
        loss_of(model).backward()
        trial.now()
        if ranks(hvd.rank()):
            optimizer.discard_step()
        else:
            optimizer.step()
        train(model, optimizer, 3)
        return replicas(model)

    return case


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda _: hvd.allreduce(torch.ones(1), name="metric"),
    "allgather_object": lambda _: hvd.allgather_object(1),
    "barrier": lambda _: hvd.barrier(),
    "verify": hvd.verify,
}
CASES: dict[str, Callable[[Trial], Any]] = {
    **{
        f"a user's {name} on one rank": around(lambda _, o, call=call: call(o))
        for name, call in COLLECTIVES.items()
    },
    "uneven data, and an allreduce": uneven(COLLECTIVES["allreduce"]),
    "uneven data, and hvd.join()": uneven(lambda _: hvd.join()),
    "a step discarded on all ranks": left_out(lambda _: True),
    "a step discarded on one rank": left_out(lambda rank: rank == FAULTY),
    **{
        f"state_dict of another step, {name}, {steps}": apart(compressor, steps)
        for name, compressor in METHODS.items()
        for steps in (3, 8)
    },
    "add_param_group on one rank": around(added),
    "freezing on one rank": around(lambda m, o: m[0].bias.requires_grad_(False)),
    "freezing on one rank, dense": around(
        lambda m, o: m[0].bias.requires_grad_(False), hvd.NoneCompressor()
    ),
    "retrain on one rank, GradiVeQ": around(lambda m, o: hvd.retrain(o), METHODS["GradiVeQ"]),
    "retrain on one rank, LGC": around(lambda m, o: hvd.retrain(o), METHODS["LGC"]),
    "save_checkpoint in other modes": other_modes,
    "save_checkpoint on one rank, sharded": saves_alone("sharded"),
    "save_checkpoint on one rank, consolidated": saves_alone("consolidated"),
    "a scaler on all ranks but one": not_scaled,
    "another compressor on one rank": other_compressor,
    "another model on one rank": other_model,
    "a damaged payload of one rank": damaged,
    "SIGSTOP for 5 s": around(stopped),
    "a checkpoint, full disk on one rank": checkpoint_on_full_disk,
    "writers, full disk": writers_on_full_disk,
    **{
        f"{value} on one rank, {policy}": poisoned(value, policy)
        for value in (float("nan"), float("inf"))
        for policy in ("raise", "skip", "propagate")
    },
    "kill -9": around(lambda m, o: os.kill(os.getpid(), signal.SIGKILL)),
    "an exception on one rank": around(fails),
    "exit on one rank": around(lambda m, o: os._exit(0)),
    "SIGSTOP for ever": around(lambda m, o: trials.stop_for_ever()),
}


def main(folder: str, cases: str, *names: str) -> None:
    options.update(json.loads(cases))
    hvd.init(process_sets="dynamic" if options.get("hierarchical") else None)
    torch.set_num_threads(1)
    trials.run(folder, hvd.rank(), CASES, names, hvd.barrier)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
