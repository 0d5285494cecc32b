"""Lightning, Accelerate and the Trainer with FSDP2: two replicas of two shards.

Without compression the updates are those of one process on all samples; with it replicas stay
equal, and the loss falls. What they have saved halfway goes on to the bit. No Horovod.

python -m tests.clients.with_sharded FOLDER [LIBRARY ...]
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_gradcomp import Compressor, NoneCompressor, QSGDCompressor
from hvd_gradcomp.torch import fsdp, trainers
from tests.clients.with_ddp import BATCH, CLIPPED, PASSES, RATE, RESUMED, SAMPLES, network, points
from tests.clients.with_ddp import digest as digest_of

METHODS = (NoneCompressor(), QSGDCompressor())
REPLICAS, SHARDS = 2, 2
STEPS = SAMPLES // (REPLICAS * SHARDS * BATCH * PASSES)  # of an epoch
EPOCHS = 2


def by_lightning(
    compressor: Compressor, folder: str | None = None, resume: bool = False
) -> tuple[nn.Module, Any]:
    """Return the model and the state of its exchange."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def configure_model(self) -> None:
            fully_shard(self.model, mesh=self.device_mesh["tensor_parallel"])

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return self.model(x, y)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=REPLICAS * SHARDS,
        strategy=ModelParallelStrategy(REPLICAS, SHARDS, process_group_backend="gloo"),
        max_epochs=EPOCHS,
        accumulate_grad_batches=PASSES,
        gradient_clip_val=CLIPPED,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else [],
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = trainers.compress(trainer, compressor, backward_passes_per_step=PASSES)
    data = TensorDataset(*points())
    sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
    path = f"{folder}/epoch=0.ckpt" if resume else None
    trainer.fit(module, DataLoader(data, BATCH, sampler=sampler), ckpt_path=path)
    return module.model, training.state


def shards_on_cpus() -> None:
    """Tell Accelerate that there are accelerators: on CPUs it leaves FSDP out, without a word."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    init = PartialState.__init__

    def with_state(state: Any, *arguments: Any, **named: Any) -> None:
        init(state, *arguments, **named)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = with_state


def by_accelerate(
    compressor: Compressor, folder: str | None = None, resume: bool = False
) -> tuple[nn.Module, Any]:
    """Return the model and the state of its exchange."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    AcceleratorState._reset_state(True)  # or it keeps the type of the earlier one, without a plugin
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=PASSES,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True),
        parallelism_config=ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
    )
    training = trainers.compress(accelerator, compressor)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TensorDataset(*points()), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(int(resume), EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x, y)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIPPED)
                optimizer.step()
                optimizer.zero_grad()
        if folder and epoch == 0:
            accelerator.save_state(folder)
    return model, training.state


def by_trainer(
    compressor: Compressor, folder: str | None = None, resume: bool = False
) -> tuple[nn.Module, Any]:
    """Return the model and the state of its exchange."""
    from accelerate.utils import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    model = network()
    arguments = TrainingArguments(
        output_dir=folder or "unused",
        use_cpu=True,
        fsdp=True,
        fsdp_config={"auto_wrap_policy": "NO_WRAP", "state_dict_type": "SHARDED_STATE_DICT"},
        parallelism_config=ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
        save_strategy="epoch" if folder else "no",
        report_to="none",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=PASSES,
        max_grad_norm=CLIPPED,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
    )
    samples = [{"x": x, "labels": y} for x, y in zip(*points())]
    trainer = Trainer(model, arguments, train_dataset=samples)
    training = trainers.compress(trainer, compressor)
    trainer.train(f"{folder}/checkpoint-{STEPS}" if resume else None)
    return trainer.model, training.state


LIBRARIES: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "lightning": by_lightning,
    "accelerate": by_accelerate,
    "trainer": by_trainer,
}
IMPORTED = {  # before ranks are forked
    "lightning": "lightning.pytorch.strategies",
    "accelerate": "accelerate",
    "trainer": "transformers.trainer",
}


def plain() -> nn.Module:
    """Return the model after the same steps of one process, on the samples of all ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    samples = points()
    for _ in range(EPOCHS):
        for x, y in zip(*(part.split(SAMPLES // STEPS) for part in samples)):
            model(x, y)["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
            optimizer.step()
            optimizer.zero_grad()
    return model


def whole(model: nn.Module) -> nn.Module:
    """Return a copy of the model that is not sharded."""
    names = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert names, "the model is not sharded"
    copied = network()
    copied.load_state_dict({name: p.full_tensor().detach() for name, p in names.items()})
    return copied


def loss(model: nn.Module) -> float:
    x, y = points()
    with torch.no_grad():
        return float(cross_entropy(model(x, y)["logits"], y))


def refused() -> dict[str, str]:
    """Return the errors of models that cannot be compressed, by what is wrong."""

    def begin(
        shape: tuple[int, int], inside: bool = True, head: bool = False, seed: bool = True
    ) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        body = network()
        if not seed:
            nn.init.constant_(body.layers[0].bias, mesh.get_local_rank("replicas"))
        fully_shard(body, mesh=mesh["shards"] if inside else mesh)
        model = nn.ModuleList([body, nn.Linear(4, 4)]) if head else body
        trainers.CompressedTraining(QSGDCompressor(), {}).begin(model, mesh)

    cases: dict[str, Callable[[], None]] = {
        "one replica": lambda: begin((1, REPLICAS * SHARDS)),
        "both dimensions": lambda: begin((REPLICAS, SHARDS), inside=False),
        "a head outside": lambda: begin((REPLICAS, SHARDS), head=True),
        "other replicas": lambda: begin((REPLICAS, SHARDS), seed=False),
        "no mesh": lambda: trainers.CompressedTraining(QSGDCompressor(), {}).begin(
            fully_shard(network(), mesh=init_device_mesh("cpu", (REPLICAS * SHARDS,)))
        ),
    }
    results = {}
    for name, case in cases.items():
        try:
            case()
        except (TypeError, ValueError, fsdp.DivergedError) as error:
            results[name] = str(error)
    return results


def main(folder: str, *libraries: str) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    right = plain()
    shards_on_cpus()
    for library in libraries or LIBRARIES:
        train = LIBRARIES[library]
        results = {}
        for compressor in METHODS:
            model, state = train(compressor)
            fsdp.verify(state)
            model = whole(model)
            pairs = zip(model.parameters(), right.parameters())
            results[repr(compressor)] = {
                "off": max(float((p - q).detach().abs().max()) for p, q in pairs),
                "losses": [loss(network()), loss(model)],
                "steps": state.steps,
                "ratio": state.stats().ratio,
                "digest": digest_of(model),
            }
        place = str(Path(folder, library))
        straight, state = train(RESUMED, place)
        again, resumed = train(RESUMED, place, resume=True)
        result[library] = {
            "methods": results,
            "resumed": [digest_of(whole(straight)), digest_of(whole(again))],
            "steps": [state.steps, resumed.steps],
        }
    result["refused"] = refused()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    assert not [name for name in sys.modules if name.startswith("horovod.")]
    dist.destroy_process_group()


def start(folder: str, *libraries: str) -> int:
    """Fork the ranks, as `torchrun` would start them, once the libraries are imported.

    Returns:
        How many have failed; all end with the first one that fails.
    """
    for library in libraries or LIBRARIES:
        import_module(IMPORTED[library])
    with socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(REPLICAS * SHARDS):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": rank}
            place |= {"LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": REPLICAS * SHARDS}
            place |= {"LOCAL_WORLD_SIZE": REPLICAS * SHARDS, "TORCHELASTIC_RUN_ID": "none"}
            os.environ |= {name: str(value) for name, value in place.items()}
            code = 1
            try:
                main(folder, *libraries)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    failed = 0
    while ranks:
        rank, status = os.wait()
        ranks.remove(rank)
        if status:
            failed += 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    sys.exit(start(*sys.argv[1:]))
