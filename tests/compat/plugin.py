"""What a rank's pytest does for `make compat`: it notes each result at once, and in step.

Of a test that hangs or takes its process along it is known that it began and did not end. All ranks
wait for each other after a test; where it failed on some alone, they are no longer in step, so the
processes end and the rest is run in new ones.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ["COMPAT_FOLDER"])
PLAN = json.loads((FOLDER / "plan.json").read_text())
RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
LOG = FOLDER / f"rank-{RANK}.jsonl"
TRACE = (FOLDER / f"trace-{RANK}").open("w")

outcomes: dict[str, tuple[str, str]] = {}
started = LOG.open("a")


def note(**entry: Any) -> None:
    started.write(json.dumps(entry) + "\n")
    started.flush()


def watch() -> None:
    faulthandler.dump_traceback_later(PLAN["limit"], exit=True, file=TRACE)


def others(test: str) -> list[str]:
    """What this test came to on all ranks, once they have noted it."""
    owners: dict[int, str] = {}
    while len(owners) < PLAN["ranks"]:
        for rank in set(range(PLAN["ranks"])) - set(owners):
            path = FOLDER / f"rank-{rank}.jsonl"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            for line in reversed(lines):
                if line.startswith('{"ended"') and (entry := json.loads(line))["ended"] == test:
                    owners[rank] = entry["outcome"]
                    break
        time.sleep(0.002)
    return list(owners.values())


def pytest_configure() -> None:
    watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done, only = set(PLAN["done"]), PLAN["only"]
    items[:] = [item for item in items if item.nodeid not in done]
    if only is not None:
        place = {test: index for index, test in enumerate(only)}
        items[:] = [item for item in items if item.nodeid in place]
        items.sort(key=lambda item: place[item.nodeid])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(ended=f"{report.nodeid}::(import)", outcome="failed", message=brief(report))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    note(began=item.nodeid)
    watch()
    result = yield
    outcome, message = outcomes.get(item.nodeid, ("passed", ""))
    note(ended=item.nodeid, outcome=outcome, message=message)
    if len(set(others(item.nodeid))) > 1:
        item.session.shouldstop = "a test failed on some ranks"
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed" and outcomes.get(report.nodeid, ("",))[0] != "failed":
        outcomes[report.nodeid] = (report.outcome, brief(report))


def brief(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return text.strip()[-1500:]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.shouldstop:
        note(finished=True)
        watch()
        return
    sys.stdout.flush()
    os._exit(3)  # ranks may be waiting for each other, and would at their end
