"""Attacks on ranks that train a model sharded by FSDP2; arguments: folder, options, cases.

Started as those of Horovod are, but Horovod is not imported. Each trial has a mesh of its own, so
that what fails in one is not in the way of the next. The ranks are two replicas of two shards: 0
and 1 share the first, and rank 3 has the same shard as 1, the faulty one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hvd_gradcomp import NoneCompressor, StromCompressor, VarianceCompressor
from hvd_gradcomp.torch import fsdp
from tests.chaos.workers import trials
from tests.chaos.workers.ddp_trials import FAULTY, METHODS, STROM, TIMEOUT, _Fails
from tests.chaos.workers.trials import Trial
from tests.parallel.workers.results import digest

MESH = [[0, 1], [2, 3]]
NAN = "None", "Strom", "DGC", "QSGD"


def mesh_of() -> Any:
    """A mesh whose groups wait for as long as a trial may."""
    groups = {}
    for ranks in (*zip(*MESH), *MESH):
        groups[tuple(ranks)] = dist.new_group(list(ranks), timeout=TIMEOUT)
    member_of = [group for ranks, group in groups.items() if dist.get_rank() in ranks]
    return DeviceMesh.from_group(member_of, "cpu", mesh=MESH, mesh_dim_names=("hosts", "inside"))


def build(compressor: Any = STROM, outputs: int = 4, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()
    model, mesh = nn.Sequential(*layers, nn.Linear(96, outputs)), mesh_of()
    for layer in list(model)[:2]:
        fully_shard(layer, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    fsdp.compress(model, compressor, mesh=mesh, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(model: Any) -> torch.Tensor:
    return model(torch.randn(4, 1, 3, 4) * (1 + dist.get_rank())).square().mean()


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def replicas(model: Any) -> str:
    return digest([p.full_tensor().detach().numpy() for p in model.parameters()])


def around(change: Callable[[Any], Any], **options: Any) -> Callable[[Trial], str]:
    """Some steps, what one rank does alone, and more steps."""

    def case(trial: Trial) -> str:
        model, optimizer = build(**options)
        train(model, optimizer, 4)
        if dist.get_rank() == FAULTY:
            trial.now()
            change(model)
        train(model, optimizer, 8)
        return replicas(model)

    return case


def not_finite(compressor: Any, nonfinite: str | None) -> Callable[[Trial], str]:
    """A loss that is no number, on one rank, in one step."""

    def case(trial: Trial) -> str:
        model, optimizer = build(compressor, nonfinite=nonfinite)
        train(model, optimizer, 4)
        trial.now()
        (loss_of(model) * (float("nan") if dist.get_rank() == FAULTY else 1.0)).backward()
        assert all(p.grad.full_tensor().isnan().all() for p in model.parameters())
        train(model, optimizer, 4)
        return replicas(model)

    return case


def differs(here: dict[str, Any], elsewhere: dict[str, Any]) -> Callable[[Trial], str]:
    """Arguments of `build` on one rank, and on the others."""

    def case(trial: Trial) -> str:
        trial.now()
        model, optimizer = build(**(here if dist.get_rank() == FAULTY else elsewhere))
        train(model, optimizer, 2)
        return replicas(model)

    return case


def fewer(trial: Trial) -> str:
    """Fewer batches, then what all ranks do after an epoch."""
    model, optimizer = build()
    trial.now()
    train(model, optimizer, 4 if dist.get_rank() == FAULTY else 9)
    fsdp.verify(model)
    return replicas(model)


def fewer_on_a_replica(trial: Trial) -> str:
    model, optimizer = build()
    trial.now()
    train(model, optimizer, 4 if dist.get_rank() in MESH[0] else 9)
    fsdp.verify(model)
    return replicas(model)


def passes_on_a_replica(trial: Trial) -> str:
    """One replica sums up two backwards, and one does not."""
    model, optimizer = build()
    trial.now()
    for _ in range(4):
        optimizer.zero_grad()
        if dist.get_rank() in MESH[0]:
            model.set_requires_all_reduce(False)
            loss_of(model).backward()
            model.set_requires_all_reduce(True)
        loss_of(model).backward()
        optimizer.step()
    return replicas(model)


def other_state(trial: Trial) -> str:
    """One rank loads a state of a step before."""
    model, optimizer = build()
    state = fsdp.state_of(model)
    train(model, optimizer, 3)
    saved = state.state_dict()
    train(model, optimizer, 1)
    trial.now()
    if dist.get_rank() == FAULTY:
        state.load_state_dict(saved)
    train(model, optimizer, 4)
    return replicas(model)


def other_weights(trial: Trial) -> str:
    """One rank's shard is not that of the other replica; `verify` says so."""
    model, optimizer = build()
    train(model, optimizer, 2)
    trial.now()
    if dist.get_rank() in (FAULTY, 0):  # each has a shard of its own
        with torch.no_grad():
            model[0].weight.to_local().add_(1.0)
    fsdp.verify(model)
    return replicas(model)


def fails_inside(model: Any) -> None:
    """An error of the compressor's, on one rank, in the next step."""
    fsdp.state_of(model).reducer.buckets[0].compressor = _Broken()


class _Broken(NoneCompressor):
    def aggregate(self, *arguments: Any, **named: Any) -> Any:
        raise ArithmeticError("this rank has failed")


def fails(model: Any) -> None:
    _Fails.apply(model(torch.ones(4, 1, 3, 4))).sum().backward()


def killed(model: Any) -> None:
    del model
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_backward(model: Any) -> None:
    """In the middle of a backward, when one unit was reduced and another was not."""
    model[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


CASES: dict[str, Callable[[Trial], Any]] = {
    **{f"nan on one rank, {name}": not_finite(METHODS[name], None) for name in NAN},
    **{
        f"nan on one rank, propagate, {name}": not_finite(METHODS[name], "propagate")
        for name in NAN
    },
    "another compressor on one rank": differs({"compressor": StromCompressor(tau=0.1)}, {}),
    "another class of compressor on one rank": differs({"compressor": NoneCompressor()}, {}),
    "another policy on one rank": differs({"nonfinite": "raise"}, {"nonfinite": "propagate"}),
    "what no hook can do on one rank": differs({"nonfinite": "skip"}, {}),
    "moments that are not known on one rank": differs(
        {"compressor": VarianceCompressor(moments="sample")}, {}
    ),
    "another model on one rank": differs({"outputs": 5}, {}),
    "more passes on one replica": passes_on_a_replica,
    "an older state on one rank": other_state,
    "other weights on one replica": other_weights,
    "fewer batches on one rank": fewer,
    "fewer batches on one replica": fewer_on_a_replica,
    "verify on one rank": around(fsdp.verify),
    "an error of the exchange on one rank": around(fails_inside),
    "an exception on one rank": around(fails),
    "SIGSTOP for 5 s": around(lambda model: trials.stop_for(5)),
    "exit on one rank": around(lambda model: os._exit(1)),
    "kill -9": around(killed),
    "kill -9 in backward": around(killed_in_backward),
}


def main(folder: str, cases: str, *names: str) -> None:
    del cases
    torch.set_num_threads(1)
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    trials.run(folder, rank, CASES, names, trials.meeting(folder, rank, size))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
