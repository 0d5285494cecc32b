"""What happens between hosts: links that are slow, or down; and ranks that die in elastic runs."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rig import Hosts, JobError, refusal
from tests.chaos.outcomes import Input
from tests.chaos.ranks import CAUSES, LIMIT
from tests.chaos.workers.torch_links import BEGUN
from tests.parallel.launch import ROOT, launch_elastic
from tests.parallel.test_elastic import survives

STEPS = 120
FAST = "1gbit"
HOSTS, ELASTIC = "PyTorch, 2 hosts, gloo", "elastic"
# Seconds after training has begun, and what becomes of the links then: a rate, or down.
PLANS: dict[str, Sequence[tuple[float, str]]] = {
    "link of 5 Mb/s": [(0.0, "5mbit")],
    "link slow for 5 s": [(1.0, "200kbit"), (6.0, FAST)],
    "link down for 5 s": [(1.0, "down"), (6.0, FAST)],
    "link down for ever": [(1.0, "down")],
}
FOR_EVER = "link down for ever"
KILLED = (("PyTorch", "torch_elastic", 3, 30), ("TensorFlow", "tensorflow_elastic", 2, 120))


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part; nothing in it is drawn. Without hosts the links are left out.

    Args:
        seed: not used.
        share: below 1, only the first of the links' attacks.
        only: words, of which one has to be in what the table calls a place; all if empty.
    """

    def requested(where: str) -> bool:
        return not only or any(word in where for word in only)

    reason = refusal()
    if reason is not None:
        print(f"links are left out: {reason}")
    elif requested(HOSTS):
        alone = _trained("")["replicas"]
        for plan in [*PLANS][: 1 if share < 1 else None]:
            yield _input(plan, _trained(plan), alone)
    for framework, worker, ranks, patience in KILLED:
        where = f"{framework}, {ranks} ranks, {ELASTIC}"
        if requested(where):
            yield _elastic(where, worker, ranks, patience)


def _trained(plan: str) -> dict[str, Any]:
    """Two hosts train, and the plan comes to pass; what both have said in the end, together."""
    with tempfile.TemporaryDirectory() as name, Hosts(2, FAST) as hosts:
        folder, cut = Path(name), list[float]()

        def happen() -> None:
            while not (folder / BEGUN).exists():
                time.sleep(0.05)
            begun = time.time()
            for seconds, change in PLANS.get(plan, ()):
                time.sleep(max(0.0, begun + seconds - time.time()))
                cut.append(time.time())
                hosts.set_link("host2", change != "down")
                if change != "down":
                    hosts.set_rate(change)

        threading.Thread(target=happen, daemon=True).start()
        program = ["python", "-m", "tests.chaos.workers.torch_links", name, str(STEPS)]
        variables = {"PYTHONPATH": str(ROOT), "HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}
        with contextlib.suppress(JobError):  # what each rank has written says more
            hosts.horovodrun(program, env=variables, timeout=60 + 2 * LIMIT)
        paths = [folder / f"{rank}.json" for rank in range(2)]
        reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    return {
        "told": len(reports),
        "said": [one["said"] for one in reports if one["said"]],
        "replicas": {one["replicas"] for one in reports},
        "seconds": max((one["at"] for one in reports), default=0.0) - cut[0] if cut else 0.0,
    }


def _input(plan: str, report: dict[str, Any], alone: set[str]) -> Input:
    message, seconds = report["said"], report["seconds"]
    if report["told"] < 2 or (plan == FOR_EVER and seconds > LIMIT):
        outcome = "hung"
    elif message:
        causes = len(message) == 2 and all(map(CAUSES.search, message))
        outcome = "ended" if plan == FOR_EVER and causes else "unexplained"
    else:
        outcome = "survived" if report["replicas"] == alone else "diverged"
    waited = seconds if outcome == "ended" else None
    return Input(HOSTS, plan, outcome, message[0] if message else "", waited, plan)


def _elastic(where: str, worker: str, ranks: int, patience: int) -> Input:
    """A rank dies, the others go on with what they had, and another joins."""
    attack, message, outcome = "kill -9, and another joins", "", "survived"
    with tempfile.TemporaryDirectory() as name:
        try:
            reports = launch_elastic(worker, ranks, Path(name), patience=patience, deadline=180)
        except AssertionError as error:
            return Input(where, attack, "hung", str(error)[:300], case=worker)
        try:
            survives(*reports, ranks=ranks)
        except (AssertionError, ValueError) as error:
            outcome, message = "lost", str(error)[:300]
    return Input(where, attack, outcome, message, case=worker)
