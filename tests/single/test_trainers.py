"""`trainers.compress` on one rank: what it refuses, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import QSGDCompressor
from hvd_gradcomp.torch import trainers


def test_another_loop_is_told_what_to_do():
    with pytest.raises(TypeError, match=r"got Linear. For a loop of your own .* call ddp.compress"):
        trainers.compress(nn.Linear(1, 1), QSGDCompressor())


def test_a_model_that_is_not_wrapped():
    training = trainers.CompressedTraining(QSGDCompressor(), {})
    with pytest.raises(RuntimeError, match="the training has not begun"):
        _ = training.state
    with pytest.raises(TypeError, match=r"its type is Linear. Start several ranks, with torchrun"):
        training.begin(nn.Linear(1, 1))
    assert not training.begun


def test_ranks_of_which_the_trainer_knows_nothing(monkeypatch):
    """Accelerate trains each rank alone where there is no GPU, and it was not told to use CPUs."""
    training = trainers.CompressedTraining(QSGDCompressor(), {})
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        with monkeypatch.context() as context:
            context.setenv(name, "2")
            with pytest.raises(
                TypeError, match=r"2 ranks were started, .* Accelerator\(cpu=True\)"
            ):
                training.begin(nn.Linear(1, 1))


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path}/met", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_was_compiled_once_it_was_wrapped(alone):
    """As by Accelerate with a backend of `torch.compile`, and by the Trainer's `torch_compile`."""
    model = torch.compile(DistributedDataParallel(nn.Linear(4, 4)), backend="eager")
    training = trainers.CompressedTraining(QSGDCompressor(), {})
    training.begin(model)
    model(torch.ones(2, 4)).sum().backward()
    assert training.state.steps == 1


@pytest.mark.parametrize(
    "module, name", [("lightning.pytorch", "LightningModule"), ("transformers", "PreTrainedModel")]
)
def test_what_is_of_such_a_library_and_no_trainer(module, name):
    model = type(name, (nn.Module,), {"__module__": module})()
    with pytest.raises(TypeError, match=rf"takes a transformers.Trainer, .* got {name}"):
        trainers.compress(model, QSGDCompressor())


class Accelerator:
    """Stand-in for Accelerate's, which shards on GPUs alone."""

    __module__ = "accelerate.accelerator"
    distributed_type, is_fsdp2, parallelism_config = "FSDP", True, None

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        return model

    def prepare(self, *objects):
        return objects


def config(replicas, others=()):
    return SimpleNamespace(dp_replicate_enabled=replicas > 1, non_dp_dim_names=list(others))


@pytest.mark.parametrize(
    "attributes, error, message",
    [
        ({"_models": [1]}, ValueError, "call trainers.compress before accelerator.prepare, or ddp"),
        ({"is_fsdp2": False}, TypeError, "shards by FSDP1, .* take fsdp_version=2"),
        ({}, ValueError, r"single replica, .*=ParallelismConfig\(dp_replicate_size=hosts"),
        ({"parallelism_config": config(1)}, ValueError, "single replica"),
        ({"parallelism_config": config(2, ["tp"])}, ValueError, "has tp beside replicas"),
    ],
)
def test_accelerators_that_cannot_be_compressed(attributes, error, message):
    with pytest.raises(error, match=message):
        trainers.compress(Accelerator(**attributes), QSGDCompressor())


def test_an_accelerator_of_a_single_process():
    accelerator = Accelerator(
        distributed_type="NO",
        register_save_state_pre_hook=lambda hook: None,
        register_load_state_pre_hook=lambda hook: None,
    )
    trainers.compress(accelerator, QSGDCompressor())
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    with pytest.raises(TypeError, match=r"its type is Linear\. Start several ranks"):
        accelerator.prepare_model(model)
