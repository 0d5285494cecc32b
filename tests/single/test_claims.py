"""Claims of parameters, and `DistributedDataParallel` that is switched off: one rank as two."""

from __future__ import annotations

import copy
import gc
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel, distributed

from hvd_gradcomp import NoneCompressor
from hvd_gradcomp.runtime.config_check import REFUSED, MismatchError
from hvd_gradcomp.torch.hooks import setup_check
from hvd_gradcomp.torch.interop import ddp_reduction
from hvd_gradcomp.torch.reduce.claims import Claim

RANKS = SimpleNamespace(ranks=[0, 1])
FIRST = "optimizer that exchanged in its place, and is gone"


@pytest.fixture(autouse=True)
def two_ranks(one_process, monkeypatch):
    """Models are reduced over two ranks, says their group."""
    monkeypatch.setattr(ddp_reduction, "ranks_of", lambda model: [0, 1])


def claim_of(module, name="ddp.LocalSteps", **how):
    claim = Claim(name, module.parameters(), RANKS, **{"in_step": True, **how})
    claim.take()
    return claim


def switched_off(model):
    claim = claim_of(model)
    claim.switch_off_models()
    assert type(model) is not DistributedDataParallel
    return claim


def gradient_of(model):
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    return next(model.parameters()).grad


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_stays_off_whenever_its_optimizer_is_collected(static_graph, inside):
    """Ranks collect at different times; each would begin to reduce at another one."""
    model = DistributedDataParallel(nn.Linear(4, 4), static_graph=static_graph)
    claim = switched_off(model)
    gradient_of(model)
    claim.itself = claim  # a cycle, as of a class of the user's that keeps its own method
    off = type(model)
    del claim
    with model.no_sync() if inside else torch.enable_grad():
        gc.collect()
        assert type(model) is off
        with pytest.raises(RuntimeError, match=FIRST):
            model(torch.ones(2, 4))
    assert not model.require_backward_grad_sync
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
    copied = copy.deepcopy(model)
    assert type(copied) is DistributedDataParallel and copied.require_backward_grad_sync
    gradient_of(copied)
    gradient_of(DistributedDataParallel(model.module))
    claim = switched_off(model)  # by another one
    gradient_of(model)
    del claim


@pytest.mark.parametrize("inside", [False, True])
def test_a_saved_model_reduces(inside):
    model = DistributedDataParallel(nn.Linear(4, 4))
    with model.no_sync() if inside else torch.enable_grad():
        claim = switched_off(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is DistributedDataParallel
    assert loaded.require_backward_grad_sync and loaded.require_forward_param_sync
    assert torch.equal(gradient_of(loaded), gradient_of(model))
    del claim


def test_a_frozen_model_is_switched_off():
    """`gc.freeze()` takes objects out of what the garbage collector lists."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    gc.collect()
    gc.freeze()  # as for all tests, see conftest
    assert not any(x is model for x in gc.get_objects())
    claim = switched_off(model)
    del claim


def test_a_model_whose_constructor_has_failed_is_no_exchange(monkeypatch):
    """An exception keeps it alive."""

    def fail(*_):
        raise RuntimeError("parameters of other shapes on another rank")

    module = nn.Linear(4, 4)
    monkeypatch.setattr(distributed, "_verify_param_shape_across_processes", fail)
    with pytest.raises(RuntimeError, match="of other shapes") as kept:
        DistributedDataParallel(module)
    claim = claim_of(module)
    del claim, kept


def test_claimed_parameters_can_be_swapped():
    """As `to` of a model of FSDP2 does; tensors with weak references cannot."""
    module = nn.Linear(4, 4)
    claim = claim_of(module)
    torch.utils.swap_tensors(module.weight, nn.Parameter(torch.zeros(4, 4)))
    with pytest.raises(ValueError, match=r"ddp\.MomentumExchange and ddp\.LocalSteps would both"):
        claim_of(module, "ddp.MomentumExchange")
    del claim


def test_models_that_nobody_uses_are_none():
    """One rank may have collected them already."""
    gc.disable()
    try:
        module = nn.Linear(4, 4)
        dead = DistributedDataParallel(module)
        dead.itself = lambda model=dead: model
        dead.register_comm_hook(None, fp16_compress_hook)
        del dead
        claim_of(module).switch_off_models()
    finally:
        gc.enable()


class Named(DistributedDataParallel):
    """A user's class, whose subclasses must say something."""

    def __init_subclass__(cls, *, family, **more):
        super().__init_subclass__(**more)


def test_a_class_that_asks_something_of_its_subclasses():
    model = Named(nn.Linear(4, 4))
    claim = switched_off(model)
    assert isinstance(model, Named) and type(copy.deepcopy(model)) is Named
    gradient_of(model)
    del claim


@pytest.mark.parametrize("place", [0, 1])
def test_a_refusal_leaves_models_on(place):
    module = nn.Linear(4, 4)
    models = [DistributedDataParallel(module) for _ in range(2)]
    models[place].register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(ValueError, match="fp16_compress_hook"):
        claim_of(module)
    assert [type(model) for model in models] == [DistributedDataParallel] * 2


def test_gradients_that_are_reduced_by_a_hook_of_its_own():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    delayed = list(module[1].named_parameters(prefix="1"))
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[1].weight
    )
    with pytest.raises(ValueError, match=r"delay_all_reduce_named_params=\.\.\.\) reduces"):
        claim_of(module)
    assert type(model) is DistributedDataParallel


def test_what_some_rank_has_refused_claims_nothing():
    """The traceback of the error keeps what was made on this rank."""
    module = nn.Linear(4, 4)
    earlier = claim_of(module)
    claim = claim_of(module)
    assert earlier.superseded and not claim.superseded

    def gather_objects(description, kind):
        return [description, {**description, REFUSED: "an error of rank 1"}]

    group = SimpleNamespace(ranks=[0, 1], gather_objects=gather_objects)
    transport = SimpleNamespace(version="none")
    how = [], NoneCompressor(), [], "", None
    with pytest.raises(MismatchError, match="an error of rank 1 on rank 1"):
        setup_check.agree(group, transport, *how, claim)
    assert not earlier.superseded
    del earlier
    claim_of(module, "ddp.MomentumExchange")


FOUR = SimpleNamespace(ranks=[0, 1, 2, 3])


def test_ranks_of_a_host_reduce_below_an_exchange_between_hosts():
    """The model stays on, and may be compressed, if all of it is exchanged between hosts."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    inside = Claim("ddp.compress", model.parameters(), RANKS, by_hook=True)
    inside.take()
    claims = []
    for parameters in (model.parameters(), [model.module.weight]):
        how = {"in_step": True, "alone": True, "host": [0, 1]}
        claims.append(Claim("ddp.LocalSteps", parameters, FOUR, **how))
    whole, part = claims
    whole.take()
    whole.switch_off_models()
    assert type(model) is DistributedDataParallel
    assert whole.refusal() is None
    with pytest.raises(ValueError, match=r"hvd\.LocalSteps and ddp\.compress would both"):
        Claim("hvd.LocalSteps", model.parameters(), FOUR, in_step=True).take()
    again = Claim("ddp.compress", model.parameters(), RANKS, by_hook=True)
    again.take()  # in the other order
    whole.drop()
    part.take()
    assert "hosts would drift apart: bias" in str(part.refusal())


def test_a_model_that_is_reduced_over_other_ranks():
    model = DistributedDataParallel(nn.Linear(4, 4))
    claim = Claim("ddp.LocalSteps", model.parameters(), FOUR, in_step=True, alone=True)
    with pytest.raises(ValueError, match=r"reduces over ranks \[0, 1\], .* ddp\.local_steps\("):
        claim.take()
    assert type(model) is DistributedDataParallel


def test_a_model_that_is_switched_off_joins_nothing():
    model = DistributedDataParallel(nn.Linear(4, 4))
    claim = switched_off(model)
    with pytest.raises(RuntimeError, match="give all ranks as many steps"):
        model.join()
    del claim
