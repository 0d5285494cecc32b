"""Dense inside hosts, compressed between them; a host is a name of this machine."""

from __future__ import annotations

import pytest

from tests.parallel.launch import LOOPBACK, launch, says

pytestmark = pytest.mark.parallel
TWO_HOSTS = f"{LOOPBACK[0]}:2,{LOOPBACK[1]}:2"

MESSAGES = {
    "process set": "leave process_set= out",
    "disagreeing": "hierarchical=True, nonfinite=None",
    "diverged": "state capacity.level of bucket 1",
    "forgotten": "rank 0, 1, 2, 3 has averaged none since the last exchange",
    "sharded elsewhere": "it was saved sharded with 2 hosts, here it is hierarchical=False",
}


def test_pytorch_on_two_hosts_of_two_ranks(tmp_path):
    results = launch("torch_hierarchy", 4, "gloo", tmp_path, "whole", hosts=TWO_HOSTS)
    for rank, result in enumerate(results):
        for what in ("replicas", "micro-batches"):
            assert result[what] == results[0][what], what
        assert max(result["exact"]) < 1e-6
        layers, states = result["stats"]
        assert layers and set(layers).isdisjoint(results[1 - rank % 2]["stats"][0])
        led = [place % 2 == rank % 2 for place in range(len(states))]
        assert [state is not None for state in states] == led and any(led)
        (whole, resumed), moved = result["resumed"]
        assert whole == resumed and moved == results[0]["resumed"][1]
        (error, *unchanged, skipped), end = result["nonfinite"]["skip"]
        assert error == "nothing was raised" and all(unchanged) and skipped == 1
        assert end == results[0]["nonfinite"]["skip"][1]
        (error, same, _, skipped), end = result["nonfinite"]["raise"]
        assert error.startswith("NonFiniteGradientError") and same and skipped == 0
        assert end == results[0]["nonfinite"]["raise"][1]
        assert result["rank 0's state"]
        whole, again, *_ = result["documented"]
        assert whole == again and result["documented"] == results[0]["documented"]
        (here, end), (neighbour, _), (first, last) = (
            each["local steps"] for each in (result, results[rank ^ 1], results[0])
        )
        assert here == neighbour and end == last
        equal = [one == other for one, other in zip(here, first)]
        assert rank < 2 or equal == [False, False, True, False, False, True]
        expected = {**MESSAGES, "join": "nothing was raised"}
        says(result["errors"], {k: v for k, v in expected.items() if k != "forgotten"})


def test_what_hosts_have_to_be(tmp_path):
    """Hosts of two and of one rank; and Horovod without process sets."""
    hosts = f"{LOOPBACK[0]}:2,{LOOPBACK[1]}:1"
    for result in launch("torch_hierarchy", 3, "gloo", tmp_path, "unequal", hosts=hosts):
        assert "the same number of ranks on all hosts" in result["refused"]


@pytest.mark.parametrize(
    ("what", "says"),
    [("refused", "hvd.init(process_sets='dynamic')"), ("one host", "nothing was raised")],
)
def test_one_host(what, says, tmp_path):
    for result in launch("torch_hierarchy", 2, "mpi", tmp_path, what):
        assert says in next(iter(result.values()))


def test_tensorflow_on_two_hosts_of_two_ranks(tmp_path):
    results = launch("tensorflow_hierarchy", 4, "gloo", tmp_path, hosts=TWO_HOSTS)
    for rank, result in enumerate(results):
        for what in ("replicas", "joined", "skip", "raise", "micro-batches", "broadcast"):
            assert result[what] == results[0][what], what
        assert result["exact"] < 1e-6
        assert set(result["layers"]).isdisjoint(results[1 - rank % 2]["layers"])
        led = [place % 2 == rank % 2 for place in range(len(result["states"]))]
        assert result["states"] == led and any(led)
        whole, resumed = result["sharded"]
        assert whole == resumed
        assert "has a NaN or an infinity" in result["raise"][0][0]
        (here, fits), (neighbour, neighbour_fits), (first, others) = (
            each["local steps"] for each in (result, results[rank ^ 1], results[0])
        )
        assert here == neighbour and fits == neighbour_fits
        equal = [one == other for one, other in zip(here, first)]
        assert rank < 2 or equal == [True, False, False, True, False, False, True]
        equal = [one == other for one, other in zip(fits, others)]
        assert rank < 2 or equal == [False, False, True, False, False]
        kinds = ("diverged", "forgotten", "sharded elsewhere")
        says(result["errors"], {kind: MESSAGES[kind] for kind in kinds})
