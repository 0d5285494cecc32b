"""Hosts of several ranks do what as many ranks as there are hosts would do."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import NoneCompressor, NonFiniteGradientError, PayloadError, StromCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.hierarchy import LaunchedRank
from hvd_gradcomp.runtime.program_runner import HostPosition
from hvd_gradcomp.testing import World
from tests.hosts_world import Hosts
from tests.methods import (
    BALANCED,
    EVERY,
    GRADIVEQ,
    HYBRID,
    INT32,
    LGC,
    LGC_SERVER,
    NONE,
    ONE_OF_EACH,
    PHASED,
    PRODUCTS,
    ROBUST,
    ROUNDED,
    TODAY,
    VARIANCE_FED_BACK,
)

SHAPES = ((40, 9), (7,), (300,))


def layout_of(compressor):
    names = tuple(f"layer{i}" for i in range(len(SHAPES)))
    return Layout(names, SHAPES, block=compressor.block)


def drawn(random, world, count):
    shapes = world.layout.shapes
    return [
        world.flat([torch.from_numpy(random.standard_normal(s).astype("f4")) for s in shapes])
        for _ in range(count)
    ]


def of_hosts(values, slots, factor):
    """What a host hands to its leader, added up in the order of ranks."""
    hosts = [values[start : start + slots] for start in range(0, len(values), slots)]
    return [sum(host[1:], host[0] * 1) * factor for host in hosts]


def same(x, y):
    """To the bit; a loss that is not known yet is NaN."""
    return x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes()


def compared(compressor, hosts, slots, steps, *, seed=0, leader=0, average=True):
    """Runs both worlds side by side, and requires the same bits of them at each step."""
    layout = layout_of(compressor)
    flat = World(compressor, TorchOps(), layout, hosts, average=average)
    world = Hosts(compressor, TorchOps(), layout, hosts, slots, leader=leader, average=average)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        gradients, extra, of_host = drawn(random, world, hosts * slots), {}, {}
        if compressor.uses_moments:
            extra["moment"] = [g * g * 0.1 for g in gradients]
            shares = [moment * world.share for moment in extra["moment"]]
            of_host["moment"] = of_hosts(shares, slots, world.share)
        expected = flat.step(of_hosts(gradients, slots, world.share), **of_host)
        for total in world.step(gradients, **extra):
            assert torch.equal(total, expected[0])
        assert len(world.traffic) == len(flat.traffic)
        for ours, theirs in zip(chain(*world.traffic), chain(*flat.traffic)):
            assert type(ours) is type(theirs) and same(ours.tensor, theirs.tensor)
        for ours, theirs in zip(world.states, flat.states):
            for (path, x), (_, y) in zip(leaves(ours), leaves(theirs)):
                assert same(x, y), path


@pytest.mark.parametrize(
    "compressor", [*EVERY, *TODAY, *ROUNDED, *INT32, *PRODUCTS, *ROBUST, *BALANCED], ids=repr
)
def test_a_host_is_a_rank_to_every_compressor(compressor):
    compared(compressor, 3, 2, 6)


@pytest.mark.parametrize("compressor", [GRADIVEQ, LGC, LGC_SERVER], ids=repr)
def test_a_host_is_a_rank_to_those_that_learn(compressor):
    compared(compressor, 2, 2, 45)


@pytest.mark.parametrize("compressor", [VARIANCE_FED_BACK, HYBRID, *PHASED], ids=repr)
@given(
    seed=st.integers(0, 2**32 - 1),
    hosts=st.integers(1, 4),
    slots=st.integers(1, 4),
    leader=st.integers(0, 3),
    average=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_whatever_the_hosts(compressor, seed, hosts, slots, leader, average):
    compared(compressor, hosts, slots, 4, seed=seed, leader=leader % slots, average=average)


@pytest.mark.parametrize("compressor", [NONE], ids=repr)
@pytest.mark.parametrize("average", [True, False])
def test_without_compression_it_is_the_mean_or_the_sum_over_all_ranks(compressor, average):
    world = Hosts(compressor, TorchOps(), layout_of(compressor), 2, 4, average=average)
    gradients = [torch.full((world.layout.size,), float(rank)) for rank in range(8)]
    for total in world.step(gradients):
        assert (total == (3.5 if average else 28.0)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("compressor", [*ONE_OF_EACH, *PHASED, GRADIVEQ, LGC_SERVER], ids=repr)
def test_one_rank_that_is_not_finite_is_an_error_on_all(compressor, value):
    world = Hosts(compressor, TorchOps(), layout_of(compressor), 2, 3, leader=1)
    gradients = drawn(np.random.default_rng(3), world, 6)
    gradients[3][5] = value  # on a rank that does not lead
    with pytest.raises(NonFiniteGradientError):
        world.step(gradients)
    assert all(isinstance(error, NonFiniteGradientError) for error in world.failures)


def test_infinities_that_cancel_are_an_error_as_well():
    world = Hosts(NoneCompressor(), TorchOps(), layout_of(NoneCompressor()), 2, 2)
    gradients = drawn(np.random.default_rng(3), world, 4)
    gradients[0][5], gradients[1][5] = float("inf"), -float("inf")
    with pytest.raises(NonFiniteGradientError):
        world.step(gradients)
    assert None not in world.failures


def test_what_one_leader_cannot_read_reaches_its_host():
    """Others of the host raise as well, and do not wait."""
    damage = torch.zeros(1000, dtype=torch.uint8)

    def tamper(host, request):
        tensor = request.tensor.clone()
        if host == 1:
            tensor[:] = damage[: tensor.numel()]
        return request._replace(tensor=tensor)

    one = StromCompressor(tau=0.5)
    world = Hosts(one, TorchOps(), layout_of(one), 2, 3, tamper=tamper)
    with pytest.raises(PayloadError, match="between hosts, each counted as one rank: rank 1 sent"):
        world.step(drawn(np.random.default_rng(3), world, 6))
    assert all(isinstance(error, PayloadError) for error in world.failures)
    assert "look at what it has written" in str(world.failures[1])


def started(*where, local_size=2):
    """Return what `torchrun` says of ranks on (launcher, place there, machine)."""
    return [LaunchedRank(group, slot, local_size, node) for group, slot, node in where]


def test_hosts_of_torchrun():
    """Launchers are told apart by number; one machine may have two of them."""
    places = [(0, 0, "a"), (0, 1, "a"), (3, 0, "a"), (3, 1, "a")]
    hosts = hierarchy.hosts_of(range(4), started(*places))
    assert hosts == [[0, 1], [2, 3]]
    place = hierarchy.place_among(hosts, range(4), 3)
    assert place == HostPosition(1, 2, 1, 2, 0.5)
    with pytest.raises(ValueError, match="take the same ranks for both"):
        hierarchy.place_among(hosts, range(3), 0)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (started((0, 0, "a"), (0, -1, "a")), "start all ranks with torchrun"),
        (started((0, 0, "a"), (1, 0, "b"), (0, 1, "a"), (1, 1, "b")), "counted host by host"),
        (started((0, 1, "a"), (0, 0, "a")), "counted host by host"),
        (started((0, 0, "a"), (0, 0, "a")), "counted host by host"),
        (started((0, 0, "a"), (0, 1, "b")), "counted host by host"),
        (started((0, 0, "a"), (0, 1, "a"), local_size=1), "counted host by host"),
        (started((0, 0, "a"), (0, 1, "a"), (1, 0, "b")), "the same number of ranks on all hosts"),
    ],
)
def test_hosts_that_do_not_fit(ranks, text):
    with pytest.raises(ValueError, match=text):
        hierarchy.hosts_of(range(len(ranks)), ranks)
