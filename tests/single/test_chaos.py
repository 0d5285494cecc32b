"""A short part of `make chaos`, and that the rig sees what it is there to see."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hvd_gradcomp.checkpoint import files as checkpoint_files
from hvd_gradcomp.ops.torch import TorchOps
from tests.chaos import files, outcomes, payloads, situations, stragglers
from tests.chaos.__main__ import PARTS
from tests.chaos.outcomes import BAD, MEANINGS, Input
from tests.chaos.workers.traces import SURVIVED, Leftovers, Trace, compare, compare_pair
from tests.methods import ONE_OF_EACH, VARIANCE

FILES = functools.partial(files.attacks, 3, 0.25, ["threads"])
PAYLOADS = functools.partial(payloads.attacks, 3, 1.0, ["PyTorch"])


def met(monkeypatch, methods):
    """Methods that are attacked, in their fifth step."""
    monkeypatch.setattr(payloads, "points", lambda name: [(one, (4,)) for one in methods])


@pytest.mark.parametrize("attacks", [FILES, PAYLOADS], ids=["files", "payloads"])
def test_nothing_is_lost_or_diverges(attacks, monkeypatch):
    met(monkeypatch, ONE_OF_EACH)
    inputs = list(attacks())
    assert len(inputs) > 200
    assert not [one for one in inputs if one.outcome in BAD]


def came_to(inputs):
    return {one.outcome for one in inputs}


def test_a_file_that_is_not_checked_is_seen(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_compare", lambda *_: None)
    assert "diverged" in came_to(FILES())


def test_a_payload_that_is_not_checked_is_seen(monkeypatch):
    met(monkeypatch, [VARIANCE])
    monkeypatch.setattr(TorchOps, "require", lambda *_: None)
    assert came_to(PAYLOADS()) & {"lost", "diverged"}


def test_a_lost_step_of_a_slow_rank_is_seen():
    quick = {"made": [3.0, 1.0], "held": [0.0, 0.0], "parameters": [-2.0, 0.0]}
    slow = {"made": [2.0, -2.0], "held": [1.0, -1.0], "parameters": [-2.0, 0.0]}
    assert stragglers.outcome([quick, slow]) == "survived"
    assert stragglers.outcome([quick, slow | {"held": [0.0, 0.0]}]) == "lost"
    assert stragglers.outcome([quick, slow | {"parameters": [-2.0, 1.0]}]) == "diverged"


def test_each_situation_is_drawn_and_can_be_told_to_a_worker():
    for job, hosts in situations.JOBS:
        for host in hosts:
            cases = situations.drawn(host, Random(1))
            assert [situations.Case.parse(str(case)) for case in cases] == cases
            assert len(set(cases)) == len(cases) > 0, (job.where, host.name)
            assert {case.what for case in cases if case.kind == situations.MODES} == {*host.calls}
            few = [*situations.some(host, Random(1), 0.01)]
            assert {case.kind for case in few} == {case.kind for case in cases}


def test_a_training_that_goes_another_way_is_seen():
    here = Trace([np.ones(3, "f4"), np.zeros(3, "f4")], "kept", 4)
    assert compare(here, here) == SURVIVED
    moved = here._replace(weights=[np.ones(3, "f4"), np.full(3, 1e-9, "f4")])
    assert compare(moved, here) == ("altered", "weights differ by 1e-09 after step 2")
    assert compare(here._replace(kept="other"), here)[0] == "altered"
    assert compare_pair(moved, {"one alone": here}) == SURVIVED
    assert compare_pair(here._replace(collectives=5), {"one alone": here})[0] == "doubled"
    away = here._replace(weights=[np.ones(3, "f4"), np.ones(3, "f4")])
    assert compare_pair(away, {"one alone": here})[0] == "doubled"


def test_what_is_never_closed_is_seen():
    kept = []
    count = {"files": lambda: len(kept)}
    assert Leftovers(count).after(lambda: None, 4) == SURVIVED
    assert Leftovers(count).after(lambda: kept.append(1), 4) == (
        "leaked",
        "2 files in 2 trainings",
    )


def told_by_rank(message="", replicas=SURVIVED, names=True, step=0):
    return {"said": message, "replicas": replicas, "names": names, "step": step}


@pytest.mark.parametrize(
    ("kind", "lines", "outcome"),
    [
        ("modes", [told_by_rank(), told_by_rank()], "survived"),
        ("modes", [told_by_rank(), told_by_rank(replicas=["altered", "by 1"])], "altered"),
        ("modes", [told_by_rank(), told_by_rank("ValueError: no")], "failed"),
        ("pairs", [told_by_rank("ValueError: no")] * 2, "ended"),
        ("pairs", [told_by_rank("ValueError: no", step=3)] * 2, "late"),
        ("pairs", [told_by_rank("RuntimeError: storage", names=False)] * 2, "unexplained"),
        ("pairs", [told_by_rank("ValueError: no"), told_by_rank()], "diverged"),
        ("pairs", [told_by_rank()], "hung"),
    ],
)
def test_a_situation_comes_to_the_worst_that_a_rank_tells(kind, lines, outcome):
    case = situations.Case(kind, "ddp.LocalSteps", "DDP", "before")
    assert situations.judge(case, lines, 2, hung=len(lines) < 2)[0] == outcome


def test_inputs_are_counted_by_what_came_of_them():
    inputs = [
        Input("here", "cut", "ended", "SomeError: it was cut", 2.04, "a"),
        Input("here", "cut", "ended", "SomeError: it was cut", 11.0, "b"),
        Input("here", "cut", "diverged", "", None, "c"),
        Input("there", "cut", "survived"),
    ]
    parts = {"files": {"seed": 5, "seconds": 3, "rows": outcomes.tallied(inputs)}}
    first, second = json.loads(json.dumps(parts))["files"]["rows"]
    assert first["outcomes"] == {"ended": 2, "diverged": 1} and first["seconds"] == 11.0
    assert first["bad"] == [["diverged", "c", ""]] and second["inputs"] == 1
    assert outcomes.bad(parts) == 1
    again = outcomes.renewed(parts["files"], {"seed": 5, "seconds": 1, "rows": [second]})
    assert again["rows"] == [first, second] and again["seconds"] == 4
    table = outcomes.table(parts)
    assert "2 ended, 1 diverged" in table and "diverged: here, cut, c" in table
    assert all(f"{name} " in table for name in MEANINGS)


def test_what_the_site_shows_is_what_was_measured():
    path = Path(__file__).parents[2] / "docs" / "measured" / "chaos.json"
    parts = json.loads(path.read_text())["parts"]
    assert [*parts] == [*PARTS]
    assert sum(row["inputs"] for part in parts.values() for row in part["rows"]) >= 2000
