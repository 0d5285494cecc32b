"""A short part of `make chaos`: what users do, held to the same training without it."""

from __future__ import annotations

from tests.chaos import situations
from tests.chaos.outcomes import BAD

HOSTS = tuple(
    f"{host}, 2 ranks, gloo"
    for host in ("hvd.DistributedOptimizer", "hvd.LocalSteps", "ddp.compress", "ddp.LocalSteps")
)


def test_what_users_do_is_named_or_trains_as_without_it():
    inputs = [*situations.attacks(1, 0.01, HOSTS)]
    assert len(inputs) >= 20
    assert not [x for x in inputs if x.outcome in BAD]
