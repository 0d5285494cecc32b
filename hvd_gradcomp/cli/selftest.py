"""Self-test for `doctor`: a few compressed steps on each rank with one framework.

    horovodrun --gloo -np 2 python -m hvd_gradcomp.cli.selftest torch

With "ddp" it starts its two ranks itself, for `DistributedDataParallel` over gloo, without Horovod.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_STEPS = 4
_RANK, _MET = "HVD_GRADCOMP_SELFTEST_RANK", "HVD_GRADCOMP_SELFTEST_MET"  # for ranks started here


def _torch() -> int:
    import torch

    hvd: Any = importlib.import_module("hvd_gradcomp.torch")

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # so that ranks differ in everything that is not exchanged
    model = torch.nn.Linear(256, 16)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.StromCompressor(tau=0.01),
    )
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    hvd.verify(optimizer)
    ranks: int = hvd.size()
    return ranks


def _tensorflow() -> int:
    import tensorflow as tf

    hvd: Any = importlib.import_module("hvd_gradcomp.tensorflow")

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.random.set_seed(hvd.rank())
    weight = tf.Variable(tf.random.normal((256, 16)))
    hvd.broadcast_variables([weight], root_rank=0)
    for _ in range(_STEPS):
        with tf.GradientTape() as plain:
            loss = tf.reduce_mean(tf.square(tf.random.normal((8, 256)) @ weight))
        tape = hvd.DistributedGradientTape(plain, compression=hvd.StromCompressor(tau=0.01))
        weight.assign_sub(0.1 * tape.gradient(loss, [weight])[0])
    hvd.verify([weight])
    ranks: int = hvd.size()
    return ranks


def _ddp() -> int:
    """Train one of the two ranks that `_start_ddp` starts."""
    import torch
    import torch.distributed as dist

    ddp: Any = importlib.import_module("hvd_gradcomp.torch.ddp")
    compressors: Any = importlib.import_module("hvd_gradcomp")

    rank = int(os.environ[_RANK])
    dist.init_process_group("gloo", f"file://{os.environ[_MET]}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 16))
    state = ddp.compress(model, compressors.StromCompressor(tau=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    ddp.verify(state)
    ranks: int = dist.get_world_size()
    dist.destroy_process_group()
    return ranks


def _start_ddp(until: str) -> None:
    """Start two ranks, end both when one fails, and exit with their status."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "ddp", until]
        places = {_MET: str(Path(folder, "met"))}
        ranks = [
            subprocess.Popen(command, env={**os.environ, **places, _RANK: str(rank)})
            for rank in range(2)
        ]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):  # let the other one print its error
                    time.sleep(2)
                    break
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def main(framework: str, until: str = "inf") -> None:
    """Train, compare replicas and print their number.

    Args:
        framework: "torch", "tensorflow" or "ddp".
        until: deadline, in seconds since the epoch, to print a traceback and exit.
    """
    left = float(until) - time.time()
    if left < float("inf"):
        faulthandler.dump_traceback_later(max(1.0, left), exit=True)
    if framework == "ddp" and _RANK not in os.environ:
        _start_ddp(until)
    ranks = {"torch": _torch, "tensorflow": _tensorflow, "ddp": _ddp}[framework]()
    if ranks < 2:
        sys.exit(f"the launcher started {ranks} rank: nothing was exchanged")
    print(f"{ranks} equal replicas after {_STEPS} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
