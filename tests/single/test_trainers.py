"""`trainers.compress` on one rank: what it refuses, and when."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import OuterSGD, QSGDCompressor
from hvd_gradcomp.torch import ddp, trainers


def test_another_loop_is_told_what_to_do():
    with pytest.raises(TypeError, match=r"got Linear. For a loop of your own .* call ddp.compress"):
        trainers.compress(nn.Linear(1, 1), QSGDCompressor())


def test_local_steps_of_another_loop():
    with pytest.raises(TypeError, match=r"got Linear. For a loop of your own .* ddp.local_steps$"):
        trainers.local_steps(nn.Linear(1, 1), every=3)
    with pytest.raises(ValueError, match="a trainer logs, evaluates and saves after as many"):
        trainers.local_steps(nn.Linear(1, 1), every=3, deadline=1.0)


def test_local_steps_of_a_model_that_is_not_wrapped():
    training = trainers.LocalTraining({"every": 3})
    training.exchange()  # nothing is there yet
    with pytest.raises(RuntimeError, match="the training has not begun"):
        _ = training.optimizer
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"its type is Linear. Start several ranks, with torchrun"):
        training.begin(model, torch.optim.SGD(model.parameters(), 0.1))
    assert not training.begun


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

    def free_memory(self, *objects):
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


def test_several_models_of_an_accelerator(one_process):
    with pytest.raises(ValueError, match=r"call trainers\.local_steps before"):
        trainers.local_steps(Accelerator(_models=[1]), every=3)
    hooks = ("save_state", "save_model", "load_state")
    hooks += ("register_save_state_pre_hook", "register_load_state_pre_hook")
    accelerator = Accelerator(**dict.fromkeys(hooks, lambda *_: None))
    training = trainers.local_steps(accelerator, every=3)
    model = DistributedDataParallel(nn.Linear(2, 2))
    accelerator.prepare(model)
    assert not training.begun
    with pytest.raises(ValueError, match="prepares 2 models and 0 optimizers"):
        accelerator.prepare(DistributedDataParallel(nn.Linear(2, 2)))
    optimizers = []
    for _ in range(2):
        accelerator.free_memory()
        model = DistributedDataParallel(nn.Linear(2, 2))
        prepared = AcceleratedOptimizer(torch.optim.Adam(model.parameters()))
        accelerator.prepare(model, prepared)
        accelerator.prepare(prepared)  # as the Trainer does where it goes on
        optimizers.append(training.optimizer)
        assert prepared.optimizer is training.optimizer
    assert optimizers[0] is not optimizers[1]
    accelerator.free_memory()
    accelerator.prepare(DistributedDataParallel(model.module), prepared)  # wrapped anew
    assert training.optimizer.inner is optimizers[1].inner


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


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Stand-in for Accelerate's, which leaves out the steps of accumulated gradients."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __setstate__(self, state):
        vars(self).update(state)

    def step(self):
        self.optimizer.step()


def test_local_steps_in_a_library_that_evaluates_between_exchanges(one_process, monkeypatch):
    accelerate = SimpleNamespace(AcceleratedOptimizer=AcceleratedOptimizer)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", accelerate)
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    local = ddp.LocalSteps(adam, model.named_parameters(), 3, OuterSGD(1, 0))
    prepared = AcceleratedOptimizer(local)
    with pytest.raises(TypeError, match=r"ddp\.LocalSteps was handed to Accelerate, which"):
        prepared.step()
    for make in (ddp.LocalSteps, ddp.MomentumExchange):
        with pytest.raises(ValueError, match="AcceleratedOptimizer of a library"):
            make(AcceleratedOptimizer(adam))
    momenta = ddp.MomentumExchange(adam, model.named_parameters(), None, warmup_steps=1)
    model(torch.ones(2)).sum().backward()
    AcceleratedOptimizer(momenta).step()  # ranks are equal after each step
    assert momenta.steps_made == 1


def test_an_elastic_state_takes_no_wrapped_model(one_process):
    model = DistributedDataParallel(nn.Linear(2, 2))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = ddp.LocalSteps(sgd, model.named_parameters(), 3, OuterSGD(1, 0))
    with pytest.raises(TypeError, match="takes a plain module: DistributedDataParallel"):
        ddp.ElasticState(model, optimizer)
