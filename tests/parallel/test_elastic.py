"""Elastic runs: a worker is killed, another joins, and nothing of the others is lost."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launch_elastic

pytestmark = pytest.mark.parallel


def test_torch_outlives_a_killed_rank_and_takes_another_in(tmp_path):
    diaries, output = launch_elastic("torch_elastic", 3, tmp_path, patience=30, deadline=180)
    survives(diaries, output, ranks=3)


def survives(diaries, output, ranks):
    assert len(diaries) == ranks + 1
    killed = [d for d in diaries if d[-1]["event"] != "end"]
    joined = [d for d in diaries if d[0]["batch"] > 0]
    stayed = [d for d in diaries if d not in killed + joined]
    assert (len(killed), len(joined), len(stayed)) == (1, 1, ranks - 1)

    ends = [d[-1] for d in stayed + joined]
    assert {end["size"] for end in ends} == {ranks}
    assert len({(end["batch"], end["parameters"], end["replicated"]) for end in ends}) == 1

    # What the survivors keep back is to the bit what they had committed before the kill.
    last = killed[0][-1]
    for diary in stayed:
        first, resumed, grown = (e for e in diary if e["event"] == "start")
        assert (first["size"], resumed["size"], grown["size"]) == (ranks, ranks - 1, ranks)
        committed = [e for e in diary[: diary.index(resumed)] if e["event"] == "batch"]
        (before,) = (e for e in committed if e["batch"] == resumed["batch"])
        assert resumed["batch"] == last["batch"] and resumed["kept"] == before["kept"]
        assert grown["kept"] == diary[diary.index(grown) - 1]["kept"]
        ((rank, norm),) = diary[-1]["lost"]
        assert rank == killed[0][0]["rank"] and norm == pytest.approx(last["norm"])
    assert f"rank {killed[0][0]['rank']} (" in output and "is lost" in output
    assert "since the last exchange" in output and "are lost" in output

    # The loss falls before the kill, after it, and after another has joined.
    for name in last["losses"]:
        curve = [e["losses"][name] for e in stayed[0] if e["event"] == "batch"]
        at_kill = last["batch"]
        assert sum(curve[-5:]) < sum(curve[at_kill - 5 : at_kill]), name


def test_tensorflow_outlives_a_killed_rank_and_takes_another_in(tmp_path):
    diaries, output = launch_elastic("tensorflow_elastic", 2, tmp_path, patience=120, deadline=180)
    survives(diaries, output, ranks=2)
    ((resumed, stale),) = (
        (before, event)
        for diary in diaries
        for before, event in zip(diary, diary[1:])
        if event["event"] == "stale"
    )
    assert "traced for rank 1 of 2, and the ranks have changed since" in stale["said"]
    assert stale["kept"] == resumed["kept"]
