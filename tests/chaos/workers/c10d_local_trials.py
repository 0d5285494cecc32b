"""Attacks on local steps without Horovod; arguments: folder, options, cases.

Options say `of` what: "ddp", a model in `DistributedDataParallel`, two ranks; or "fsdp", one that
`fully_shard` has sharded, two hosts of two shards, where rank 3 has the shard of the faulty one.
Ranks are started as those of Horovod are, but Horovod is not imported. Another model on one rank is
no attack here: PyTorch finds it first, DDP in its constructor and FSDP in the first forward.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import (
    NoneCompressor,
    OneBitCompressor,
    OuterSGD,
    QuadraticRule,
    SparseGDCompressor,
)
from hvd_gradcomp.torch import ddp, fsdp
from tests.chaos.workers import trials
from tests.chaos.workers.ddp_trials import FAULTY, TIMEOUT
from tests.chaos.workers.fsdp_trials import _Broken, mesh_of
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

EVERY, SPARSE = 3, SparseGDCompressor(density=0.1)
options = {"of": "ddp"}


def local(mesh: Any = None, **more: Any) -> tuple[Any, Any]:
    """Return a model, and its optimizer, which exchanges two fragments in a round."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 4))
    how = {"every": EVERY, "compression": SPARSE, "fragments": 2, "delay": 1, **more}
    if options["of"] == "ddp":
        group = dist.new_group(timeout=TIMEOUT)
        model = DistributedDataParallel(model, process_group=group)
        return model, ddp.local_steps(model, adam(model), process_group=group, **how)
    made = mesh_of()
    fully_shard(model[0], mesh=made["inside"])
    fully_shard(model, mesh=made["inside"])
    return model, fsdp.local_steps(model, adam(model), mesh=mesh or made, **how)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def part_of(x: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter, or of its gradient."""
    part: torch.Tensor = x.detach() if options["of"] == "ddp" else x.detach().to_local()
    return part


def backward(model: Any) -> None:
    (model(torch.randn(8, 12)) * (1 + dist.get_rank())).square().mean().backward()


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def end(model: Any, optimizer: Any) -> str:
    optimizer.exchange()
    whole = [p if options["of"] == "ddp" else p.full_tensor() for p in model.parameters()]
    return digest([p.detach().numpy() for p in whole])


ATTACKS = trials.LocalAttacks(local, train, end, lambda: dist.get_rank() == FAULTY)
alone, around, other_settings = ATTACKS.alone, ATTACKS.around, ATTACKS.other_settings


def other_mesh(trial: Trial) -> str:
    """A mesh in which each rank is a host, on one rank; the model is sharded as on the others."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("hosts", "inside"))
    trial.now()
    model, optimizer = local(mesh=mesh if dist.get_rank() == FAULTY else None)
    train(model, optimizer, 6)
    return end(model, optimizer)


def other_parameters(trial: Trial) -> str:
    model, optimizer = local()
    bias = model.module[0].bias if options["of"] == "ddp" else model[0].bias
    alone(trial, lambda: part_of(bias).fill_(1.0))
    train(model, optimizer, 6)
    return end(model, optimizer)


def poisoned(policy: str) -> Callable[[Trial], str]:
    """One rank's gradient, and so its parameters or its shard, are not finite in one step."""

    def case(trial: Trial) -> str:
        model, optimizer = local(nonfinite=policy)
        train(model, optimizer, 4)
        optimizer.zero_grad()
        backward(model)
        grads = [p.grad for p in model.parameters()]
        alone(trial, lambda: part_of(grads[0]).fill_(float("nan")))
        optimizer.step()
        train(model, optimizer, 6)
        end(model, optimizer)
        if dist.get_rank() in (FAULTY, 0):  # what Adam keeps there is not finite any more
            optimizer.state.clear()
        train(model, optimizer, 3)
        return end(model, optimizer)

    return case


def other_round(trial: Trial) -> str:
    """Each rank loads its own state, and one's is of another step."""
    model, optimizer = local()
    kept = []
    for _ in range(2):
        train(model, optimizer, 4)
        kept.append(copy.deepcopy(optimizer.state_dict()))
    trial.now()
    optimizer.load_state_dict(kept[dist.get_rank() == FAULTY])
    train(model, optimizer, 8)
    return end(model, optimizer)


class _Killed(NoneCompressor):
    def aggregate(self, *arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def in_exchange(compressor: Any) -> Callable[[Trial], str]:
    """In the next exchange, once all ranks have compared what they are about to send."""

    def change(model: Any, optimizer: Any) -> None:
        del model
        for reducer in optimizer.reducers:
            for bucket in reducer.buckets:
                bucket.compressor = compressor

    return around(change)


class _FailedError(ArithmeticError):
    def __init__(self) -> None:
        super().__init__("this rank has failed")


def fails(model: Any, optimizer: Any) -> None:
    raise _FailedError


CASES: dict[str, Callable[[Trial], Any]] = {
    "another every on one rank": other_settings(every=5),
    "a rule of rounds on one rank": other_settings(every=QuadraticRule(0.02, 3)),
    "another compressor on one rank": other_settings(compression=OneBitCompressor()),
    "another outer rate on one rank": other_settings(outer=OuterSGD(0.5)),
    "other fragments on one rank": other_settings(fragments=1),
    "another mesh on one rank": other_mesh,
    "other parameters on one rank": other_parameters,
    "a step more on one rank": around(lambda m, o: o.step()),
    "exchange() on one rank": around(lambda m, o: o.exchange()),
    "restart() on one rank": around(lambda m, o: o.restart()),
    "verify on one rank": around(lambda m, o: ddp.verify(o)),
    "state_dict of another step": other_round,
    "an error of the exchange on one rank": in_exchange(_Broken()),
    "SIGSTOP for 5 s": around(lambda m, o: trials.stop_for(5)),
    **{f"nan on one rank, {policy}": poisoned(policy) for policy in ("raise", "skip")},
    "kill -9": around(lambda m, o: os.kill(os.getpid(), signal.SIGKILL)),
    "kill -9 in an exchange": in_exchange(_Killed()),
    "an exception on one rank": around(fails),
    "exit on one rank": around(lambda m, o: os._exit(0)),
    "SIGSTOP for ever": around(lambda m, o: trials.stop_for_ever()),
}


def main(folder: str, settings: str, *names: str) -> None:
    options.update(json.loads(settings))
    torch.set_num_threads(1)
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    trials.run(folder, rank, CASES, names, trials.meeting(folder, rank, size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
