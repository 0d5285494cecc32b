"""The doctor where all is well, with real ranks, and where its ranks hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from hvd_gradcomp.cli import doctor
from tests.parallel.launch import ROOT
from tests.processes import alive

pytestmark = pytest.mark.parallel


def test_a_sound_installation_passes():
    command = [sys.executable, "-m", "hvd_gradcomp", "doctor", "--json", "-", "--backend", "gloo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)
    marks = {finding["what"]: finding["mark"] for finding in findings}
    for what in ("PyTorch", "TensorFlow", "Keras", "Horovod", "gloo", "exchange of TensorFlow"):
        assert marks[what] == "ok", findings
    for what in ("PyTorch over gloo", "TensorFlow over gloo", "DistributedDataParallel"):
        (ranks,) = (finding for finding in findings if finding["what"] == what)
        assert "two ranks trained, replicas are equal" in ranks["fact"]
    (code,) = (finding for finding in findings if finding["what"] == "your code")
    assert code["mark"] == "warn"
    assert "Keras 3" in code["fact"]


def test_ddp_needs_no_horovod(tmp_path, monkeypatch):
    """Its self-test runs where importing Horovod is an error; one that fails is told."""
    (tmp_path / "horovod.py").write_text("raise ImportError('no Horovod here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    program = [sys.executable, "-m", "hvd_gradcomp.cli.selftest", "ddp"]
    finding = doctor._tested("DistributedDataParallel", program, {}, 100, "")
    assert finding.mark == "ok", finding.fact
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    finding = doctor._tested("DistributedDataParallel", program, {}, 100, "again")
    assert (finding.mark, finding.remedy) == ("fail", "again")
    assert "no torch here" in finding.fact and finding.fact.startswith("self-test fails with 1")


def test_ranks_that_hang_are_ended_and_named(tmp_path, monkeypatch):
    """Each rank writes who it is, and waits where it should import its framework."""
    (tmp_path / "torch.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    began = time.monotonic()
    facts = {"seam": "", "gloo": True}
    (finding,) = doctor._self_test(doctor._FRAMEWORKS[0], facts, "gloo", timeout=5)
    assert time.monotonic() - began < 60
    assert (finding.mark, finding.what) == ("fail", "PyTorch over gloo")
    assert finding.fact.startswith("self-test hangs: not done after 5 s")
    assert finding.remedy.startswith("horovodrun --gloo -np 2 ")
    ranks = list(tmp_path.glob("*.pid"))  # none, where starting them takes long
    time.sleep(1)
    assert not any(alive(int(path.stem)) for path in ranks)
