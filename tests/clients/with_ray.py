"""Ray Train: `prepare_model` wraps a model, which we compress, on two workers of a local cluster.

Without compression the updates are those of `DistributedDataParallel`; with it replicas stay equal,
and the loss falls. A worker that fails ends the training of both; Ray starts them again, and they
go on to the bit from the checkpoint that all have reported to. No Horovod.

python -m tests.clients.with_ray FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset

from hvd_gradcomp import Compressor
from hvd_gradcomp.torch import ddp
from tests.clients.with_ddp import BATCH, METHODS, RATE, RESUMED, digest, loss, network, points
from tests.clients.with_ddp import vector as vector_of

EPOCHS = 2


class Training:
    """Model, optimizer and compressor of a worker.

    Args:
        compressor: None to leave the model as `prepare_model` returns it.
    """

    def __init__(self, compressor: Compressor | None) -> None:
        self.bare = network()
        model = prepare_model(self.bare)
        self.state: Any = None if compressor is None else ddp.compress(model, compressor)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.loader = prepare_data_loader(DataLoader(TensorDataset(*points()), BATCH))

    def epoch(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.model(x, y)["loss"].backward()
            self.optimizer.step()

    def report(self) -> None:
        """Hand Ray a checkpoint: the compressor's state of each rank, and one model."""
        rank = train.get_context().get_world_rank()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(self.state.state_dict(), Path(folder, f"compressor-{rank}.pt"))
            if rank == 0:
                both = {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(both, Path(folder, "model.pt"))
            ratio = {"ratio": self.state.stats().ratio}
            train.report(ratio, checkpoint=train.Checkpoint.from_directory(folder))

    def resume(self, checkpoint: Any) -> None:
        rank = train.get_context().get_world_rank()
        with checkpoint.as_directory() as folder:
            both = torch.load(Path(folder, "model.pt"), weights_only=True)
            self.bare.load_state_dict(both["model"])
            self.optimizer.load_state_dict(both["optimizer"])
            self.state.load_state_dict(torch.load(Path(folder, f"compressor-{rank}.pt")))


def loop(settings: dict[str, str]) -> None:
    """Train as a worker: first without a stop, then with one that fails after an epoch."""
    rank = train.get_context().get_world_rank()
    checkpoint = train.get_checkpoint()
    path = Path(settings["folder"], f"{rank}.json")
    if checkpoint is None:
        plain, results = Training(None), {}
        for _ in range(EPOCHS):
            plain.epoch()
        for compressor in (*METHODS, RESUMED):
            training = Training(compressor)
            for _ in range(EPOCHS):
                training.epoch()
            results[repr(compressor)] = {
                "off": float((vector_of(training.bare) - vector_of(plain.bare)).abs().max()),
                "losses": [loss(network()), loss(training.bare)],
                "ratio": training.state.stats().ratio,
                "digest": digest(training.bare),
            }
        path.write_text(json.dumps({"methods": results, "straight": digest(training.bare)}))
    training = Training(RESUMED)
    if checkpoint is not None:
        training.resume(checkpoint)
    for epoch in range(int(checkpoint is not None), EPOCHS):
        training.epoch()
        training.report()
        if rank == 1 and epoch == 0:
            raise RuntimeError("a worker fails")
    result = json.loads(path.read_text())
    result |= {"resumed": digest(training.bare), "again": checkpoint is not None}
    assert not [name for name in sys.modules if name.startswith("horovod.")]
    path.write_text(json.dumps(result))


def main(folder: str) -> None:
    place = tempfile.mkdtemp(prefix="ray-")  # short: paths of sockets begin with it
    try:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=place)
        TorchTrainer(
            loop,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(
                storage_path=f"{folder}/runs", failure_config=train.FailureConfig(max_failures=1)
            ),
        ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
