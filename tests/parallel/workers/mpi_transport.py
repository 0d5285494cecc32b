"""Hosts over `torch.distributed` whose transport is MPI: parameters are the same, to the bit."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_gradcomp.torch import ddp, fsdp
from hvd_gradcomp.torch.comm.c10d import C10dBackend
from tests.methods import LGC_SERVER, ONE_OF_EACH_EXCHANGE, QSGD_TWO_SHOT
from tests.parallel.workers import ddp_training
from tests.parallel.workers.ddp_training import sgd, train
from tests.parallel.workers.perceptron import STEPS, Model, vector
from tests.parallel.workers.results import write

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "extending"))
from mpi_backend import MPIBackend, connect

CALLS: Counter[str] = Counter()


class Counted(MPIBackend):
    """MPI, and the number of collectives of each kind."""

    def _communicator(self, group):
        CALLS[self.name] += 1
        return super()._communicator(group)


def by_ddp(compression, backend):
    model, _ = ddp_training.wrapped(compression, backend=backend)
    train(model, sgd(model), STEPS)
    return vector(model)


def by_fsdp(compression, backend):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("between", "inside"))
    torch.manual_seed(1)
    model = Model()
    model.unused.requires_grad_(False)
    fully_shard(model, mesh=mesh["inside"])
    fsdp.compress(model, compression, mesh=mesh, backend=backend)
    train(model, sgd(model), STEPS)
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def by_local_steps(compression, backend):
    torch.manual_seed(1)
    model = Model()
    wrapped = ddp.LocalSteps(
        sgd(model), model.named_parameters(), 3, compression=compression, backend=backend
    )
    train(model, wrapped, STEPS)
    return vector(model)


def by_momentum_exchange(compression, backend):
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped = ddp.MomentumExchange(
        optimizer, model.named_parameters(), compression, warmup_steps=2, backend=backend
    )
    train(model, wrapped, STEPS)
    return vector(model)


def main(folder: str) -> None:
    connect()
    torch.set_num_threads(1)
    for train_by in (by_ddp, by_fsdp, by_local_steps, by_momentum_exchange):
        methods = [None, QSGD_TWO_SHOT]
        if train_by is by_ddp:
            methods = [*ONE_OF_EACH_EXCHANGE, LGC_SERVER]
        for compression in methods:
            over_mpi, over_gloo = (
                train_by(compression, backend) for backend in (Counted, C10dBackend)
            )
            assert over_mpi.isfinite().all()
            assert torch.equal(over_mpi, over_gloo), (train_by, compression)
    write(folder, dist.get_rank(), CALLS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
