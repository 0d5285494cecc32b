"""`trainers.compress` on one rank: what it refuses, and when."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import OuterSGD, QSGDCompressor, SparseGDCompressor
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.torch import ddp, trainers
from hvd_gradcomp.torch.local.wrapped_optimizer import KEPT


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


def saved_by(size, folder, training, key=None):
    """Write the files of so many ranks, whose residuals are 1, 2, ... in all places."""
    for rank in range(size):
        state = training.exchange_state.state_dict()
        exchanges = [state] if key is None else [f["exchange"] for f in state[key]["fragments"]]
        for exchange in exchanges:
            exchange |= {"rank": rank, "size": size}
            for bucket in exchange["buckets"]:
                bucket["state"]["memory.r"].fill_(rank + 1)
        torch.save(state, folder / training.file_of(rank, size))
    return state


def residuals(*states):
    """Return all values of the residuals in states of an exchange."""
    kept = [bucket["state"]["memory.r"] for state in states for bucket in state["buckets"]]
    return torch.cat(kept).unique().tolist()


def test_a_checkpoint_of_another_number_of_ranks(alone, tmp_path, caplog):
    """It has files, so nobody is told that it has no state."""
    training = trainers.CompressedTraining(SparseGDCompressor(density=0.1), {})
    model = DistributedDataParallel(nn.Linear(8, 8))
    training.begin(model)
    model(torch.ones(2, 8)).sum().backward()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    trainers._read_from(folder, training)
    assert "has no compressor state: the training continues without" in caplog.text
    saved_by(3, folder, training)
    trainers._read_from(folder, training)
    assert residuals(training.state.state_dict()) == [1 + 2 + 3]
    assert "was saved by 3 ranks, and here are 1: each takes an equal share" in caplog.text
    (folder / "compressor-1-of-3.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"of rank 1, but of others: restore compressor-1-of-3\.pt, or"
    ):
        trainers._read_from(folder, training)
    trainers._write_into(folder, training)
    assert [path.name for path in folder.iterdir()] == ["compressor-0-of-1.pt"]
    trainers._read_from(folder, training)
    assert residuals(training.state.state_dict()) == [6]


def test_local_steps_of_another_number_of_ranks(alone, tmp_path):
    """The library has loaded the first rank's optimizer by then."""
    options = {"every": 1, "outer": OuterSGD(1, 0), "compression": SparseGDCompressor(density=0.1)}
    training = trainers.LocalTraining(options)
    model = DistributedDataParallel(nn.Linear(8, 8))
    local = training.begin(model, torch.optim.Adam(model.parameters(), 0.1))
    model(torch.ones(2, 8)).sum().backward()
    local.step()
    kept = [p.detach().clone() for p in model.parameters()]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = saved_by(2, folder, training, KEPT)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    local.load_state_dict(state)
    trainers._read_from(folder, training)
    fragments = local.state_dict()[KEPT]["fragments"]
    assert residuals(*(f["exchange"] for f in fragments)) == [1 + 2]
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), kept))
    assert local.steps_made == local.rounds == 1
    local.library_exchanges = False
    with pytest.raises(CheckpointError, match=r"by 2 ranks, and 1 are here.*load_states\(\)"):
        local.load_state_dict(state)


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
