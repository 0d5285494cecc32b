"""The commands that measure, on two real ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs import follow
from hvd_gradcomp.core.cost_model import KINDS
from tests.parallel.forkserver import interpreter
from tests.parallel.launch import ROOT, environment, horovodrun, python

pytestmark = pytest.mark.parallel

CHOOSING = ROOT / "docs" / "tutorial" / "choosing.md"
WORKER = "tests.parallel.workers.trained"
LOCAL = "local(Int8Compressor(), every=4)"
METHODS = ("qsgd", "DGCCompressor(density=0.01)", "ScaleComCompressor()")


def command(
    *arguments: str, ranks: int = 2, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    variables = environment()
    start = python("horovod.torch", variables)
    if path is not None:
        variables = without_horovod(path)
        start = python("torch", variables)
    return subprocess.run(
        [*(horovodrun(variables) if ranks == 2 else ()), *start, "-m", "hvd_gradcomp", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """A folder where importing Horovod is an error, and a model is."""
    (tmp_path / "horovod.py").write_text("raise ImportError('no Horovod here')\n")
    (tmp_path / "users_model.py").write_text(MODEL)
    return tmp_path


MODEL = """
import torch
from torch import nn

def factory():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(256, 64), torch.randint(10, (256,))

    def loss():
        batch = torch.randint(256, (32,))
        return nn.functional.cross_entropy(model(x[batch]), y[batch])

    return model, loss

def trained():
    model, loss = factory()
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def without_horovod(folder: Path) -> dict[str, str]:
    """The environment of commands that find modules in a folder; their ranks are forked too."""
    variables = interpreter(folder / "bin", "torch", environment())
    return {**variables, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on two ranks of torchrun, without Horovod."""
    variables = without_horovod(folder)
    return subprocess.run(
        [*python("torch", variables), *TORCHRUN, "-m", "hvd_gradcomp", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )


def chosen(*methods: str) -> list[str]:
    return [word for method in methods for word in ("-c", method)]


def test_demo(without: Path):
    """Over `torch.distributed`, where importing anything but PyTorch and scikit-learn fails."""
    for name in ("tensorflow", "keras", "matplotlib"):
        (without / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    figures = without / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "hvd_gradcomp", "demo", "--epochs", "1", "--json", str(figures)],
        cwd=without,
        env={**environment(), "PYTHONPATH": f"{without}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    dense, qsgd, local = report["rows"]
    assert (report["ranks"], dense["steps"], dense["ratio"]) == (2, 19, 1.0)
    assert dense["bytes"] == 4 * 62_250
    assert 7 < qsgd["ratio"] < 8, "4 bits"
    assert 100 < local["ratio"] < 130, "4 exchanges in 19 steps, 4 bits and a place for 1 in 8"
    assert all(row["accuracy"] > 25 and row["ms"] > 0 for row in report["rows"]), "chance is 10 %"
    assert done.stderr.startswith("starting 2 ranks by torchrun\n")
    for row in report["rows"]:
        assert f"{row['method']}: {row['accuracy']:.2f} % of the test images" in done.stderr
        assert row["method"] in done.stdout
    last = " ".join(done.stdout.rpartition("\n\n")[2].split())
    assert (
        last.startswith("On one machine a compressed exchange is no faster") and "worth.md" in last
    )


def test_bench(tmp_path: Path):
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    files = ("--json", str(figures), "--png", str(picture))
    done = command("bench", "-m", f"{WORKER}:factory", "-r", "2", *chosen(*METHODS), *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    dense, qsgd, dgc, _ = report["rows"]
    assert (report["ranks"], dense["method"]) == (2, "dense (stock Horovod)")
    elements = dense["bytes"] / 4
    assert elements == 16 * 9 + 16 + 576 * 64 + 64 + 64 * 10 + 10
    assert qsgd["bytes"] < 0.52 * elements + 1500
    assert 50 < dgc["element_ratio"] < 200
    for row in report["rows"]:
        assert row["min"] <= row["ms"] <= row["max"]
        assert row["method"].partition("(")[0] in done.stdout
        parts = row["encode"] + row["collective"] + row["decode"]
        assert math.isclose(parts, row["ms"]), "the bars of the picture are as long as they say"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advise(tmp_path: Path):
    figures, picture = tmp_path / "advice.json", tmp_path / "advice.png"
    files = ("--json", str(figures), "--png", str(picture))
    methods = (*METHODS, "variance")
    done = command("advise", "-m", f"{WORKER}:tracked", *chosen(*methods), *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    assert (report["optimizer"], report["moments"], report["for_hosts"]) == (
        "AdamW",
        "sample",
        None,
    )
    ways = [row["method"] for row in report["rows"]]
    assert ways[2:] == ["DGC(density=0.01, momentum=0.0)", "ScaleCom()", "Variance()"]
    assert "DGC(density=0.01) cannot take AdamW's momentum over" in done.stderr
    text = " ".join(done.stdout.replace("[0]<stdout>:", "").split())
    assert "with per-sample moments, as the factory tracks them" in text
    assert "Ranks 0 and 1 share" in text and "fastest by hosts: " in text
    probed = report["probes"]
    assert 0 <= probed["chance"] < probed["mutual_information"] < 0.95 * probed["entropy"]
    assert report["backward_ms"] > 0
    assert report["bandwidth"] > 1e6
    assert set(report["link"]["curves"]) == set(KINDS)
    assert 0 < report["probes"]["density_variance"] < 1
    assert len(report["rows"]) == 1 + len(methods)
    for row in report["rows"]:
        assert row["predicted_ms"] > 0
        assert row["step_ms"] >= report["forward_ms"] + report["backward_ms"]
        assert math.isclose(row["error"], row["predicted_ms"] / row["measured_ms"] - 1)
        assert set(row["hosts"]) == {str(2**k) for k in range(1, 11)}
    assert report["rows"][0]["hosts"] == {str(2**k): 1.0 for k in range(1, 11)}
    assert math.isclose(report["rows"][1]["hosts"]["2"], report["rows"][1]["faster"][1])
    dense, *ways = report["rows"]
    used = next((row for row in ways if row["method"] == report["use"]), None)
    assert (report["answer"] == "use") == (used is not None)
    assert {"use": "Use ", "none": "Use none", "cannot say": "Cannot say"}[report["answer"]] in (
        done.stdout
    )
    if used is not None:
        assert used["step_span_ms"][2] < dense["step_span_ms"][0]
        assert (
            used["pays_below_span"][0] is None or used["pays_below_span"][0] > report["bandwidth"]
        )
    for row in report["rows"]:
        low, middle, high = row["exchange_span_ms"]
        assert low <= middle == row["measured_ms"] <= high
        assert row["byte_ratio"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advise_for_a_link_that_is_not_here(tmp_path: Path):
    figures = tmp_path / "advice.json"
    done = command(
        *("advise", "-m", f"{WORKER}:factory", "--bandwidth", "1"),
        *("--optimizer", "adam", "--for-hosts", "16"),
        *chosen("dgc", "qsgd", "lgc-server"),
        *("--json", str(figures)),
        ranks=1,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stderr  # the parameter server
    report = json.loads(figures.read_text())
    text = " ".join(done.stdout.split())
    assert "are for 16 hosts, extrapolated from 2 ranks" in text
    assert "Use QSGDCompressor()" in text  # 37,000 elements take a second at 1 Mb/s
    assert "Faster yet is DGCCompressor(momentum=0.0)" in text
    assert (report["use"], report["fastest"]) == ("QSGD()", "DGC(momentum=0.0)")
    assert report["rows"][1]["hosts"]["2"] > 2
    for row in report["rows"]:
        assert math.isclose(row["hosts"]["16"], row["faster"][1], rel_tol=1e-6)


def test_compare(tmp_path: Path):
    figures = tmp_path / "compare.json"
    done = command(
        *("compare", f"{WORKER}:train", "--steps", "12", "--json", str(figures)),
        *chosen("QSGDCompressor(bits=8)", "DGCCompressor(density=0.01)"),
    )
    assert done.returncode == 0, done.stderr
    none, qsgd, dgc = json.loads(figures.read_text())["rows"]
    assert none["method"] == "None()"
    assert len(none["losses"]) == 12
    assert none["losses"][0] == qsgd["losses"][0] == dgc["losses"][0]  # all begin alike
    assert abs(qsgd["loss"] - none["loss"]) < 0.1
    assert dgc["element_ratio"] > 50


def test_compare_knows_local_steps(tmp_path: Path):
    figures = tmp_path / "compare.json"
    done = command(
        *("compare", f"{WORKER}:local", "--steps", "12", "--json", str(figures)),
        *chosen("QSGDCompressor(bits=8)"),
    )
    assert done.returncode == 0, done.stderr
    none, qsgd = json.loads(figures.read_text())["rows"]
    assert none["losses"][0] == qsgd["losses"][0]
    assert none["ratio"] == 4.0 and qsgd["ratio"] > 14  # of gradients in each step


def test_advise_under_torchrun_without_horovod(without: Path):
    figures = without / "advice.json"
    methods = chosen("qsgd", "OkTopKCompressor()", "dgc")
    files = ("--json", str(figures))
    done = torchrun(without, "advise", "-m", "users_model:factory", *methods, *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    assert (report["ranks"], report["hosts"], report["library"]) == (2, 1, "torch.distributed")
    assert set(report["link"]["curves"]) == set(KINDS) and report["bandwidth"] > 1e6
    assert [row["method"] for row in report["rows"]][:2] == ["dense (DDP)", "QSGD()"]
    assert all(row["measured_ms"] > 0 for row in report["rows"])
    assert done.stdout.count("median error of the model") == 1, "one rank prints"


def test_methods_beside_compressors_are_measured_without_horovod(without: Path):
    """Local steps, momenta, and the shards of FSDP2: two of each of two hosts."""
    figures = without / "bench.json"
    methods = chosen("int8", LOCAL, "momentum(OneBitCompressor())")
    done = command(
        *("bench", "-np", "4", "--ddp", "--shards", "2", "-m", "users_model:factory", "-r", "2"),
        *methods,
        *("--json", str(figures)),
        ranks=1,
        path=without,
    )
    assert done.returncode == 0, done.stderr
    dense, int8, local, momentum = json.loads(figures.read_text())["rows"]
    assert dense["method"] == "dense (HSDP)"
    elements = 64 * 64 + 64 + 64 * 10 + 10
    assert dense["bytes"] == 4 * elements / 2, "of a shard"
    assert local["bytes"] == int8["bytes"] / 4 and local["element_ratio"] == 4.0
    assert momentum["bytes"] < int8["bytes"] / 3
    assert "a step's share of a round of LocalSteps" in " ".join(done.stdout.split())


def test_compare_trains_a_model_by_every_method(without: Path):
    """Local steps of one step, with SGD, average gradients."""
    figures = without / "compare.json"
    methods = chosen("qsgd", "local(None, every=1)", LOCAL)
    rest = ("--steps", "12", "--json", str(figures))
    done = torchrun(without, "compare", "-m", "users_model:trained", *methods, *rest)
    assert done.returncode == 0, done.stderr
    none, qsgd, averaged, local = json.loads(figures.read_text())["rows"]
    assert none["losses"][0] == qsgd["losses"][0] == local["losses"][0]
    assert averaged["losses"] == pytest.approx(none["losses"], abs=1e-5)
    assert local["ratio"] > 12
    assert abs(local["loss"] - none["loss"]) < 0.2
    assert "trainings of 12 steps take about" in done.stderr


def test_bench_starts_its_ranks_itself_without_horovod(without: Path):
    done = command(
        *("bench", "-np", "2", "--ddp", "-m", "users_model:factory", "-r", "2"),
        *chosen("qsgd", "OkTopKCompressor()", "powersgd"),
        ranks=1,
        path=without,
    )
    assert done.returncode == 0, done.stderr
    assert "\ndense (DDP) " in done.stdout and "\nQSGD() " in done.stdout
    assert "2 ranks on 1 host, over torch.distributed\n" in done.stderr
    assert "default0" not in done.stdout + done.stderr


def test_a_rank_that_fails_alone_leaves_no_other_waiting(without: Path):
    """Here while the others measure."""
    model = MODEL.replace("def loss():", "def loss(calls=iter(range(5))):\n        next(calls)")
    model = model.replace("next(calls)", "os.environ['RANK'] == '0' or next(calls)")
    (without / "users_model.py").write_text(f"import os\n{model}")
    done = torchrun(without, "advise", "-m", "users_model:factory", *chosen("qsgd"))
    assert done.returncode != 0
    assert "StopIteration" in done.stderr, done.stderr


def test_compare_over_torch_distributed_starts_its_ranks_itself(without: Path):
    """The program of docs/tutorial/choosing.md, where importing Horovod is an error."""
    (program,) = (block.text for block in follow.blocks(CHOOSING) if block.file == "train_ddp.py")
    (without / "train_ddp.py").write_text(program)
    figures = without / "compare.json"
    done = command(
        *("compare", "-np", "2", "--ddp", "train_ddp:train"),
        *("--steps", "12", "--json", str(figures), *chosen("QSGDCompressor(bits=8)", "lgc", LOCAL)),
        ranks=1,
        path=without,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    assert report["ranks"] == 2
    none, qsgd, *_, local = report["rows"]
    assert local["method"] == "local(Int8(), every=4)" and local["ratio"] > 12
    assert len(none["losses"]) == 12 and none["losses"][0] == qsgd["losses"][0]
    assert abs(qsgd["loss"] - none["loss"]) < 0.1 and qsgd["ratio"] > 3.5
    assert "default0" not in done.stdout + done.stderr


def test_compare_says_what_the_function_lacks():
    done = command("compare", f"{WORKER}:short", "--steps", "12", ranks=1)
    assert done.returncode != 0
    assert "ended after 3 steps" in done.stderr


def test_ranks_that_it_starts_itself_print_once_and_without_a_prefix():
    done = command(
        *("bench", "-np", "2", "-m", f"{WORKER}:factory", "-r", "2", *chosen("dgc")),
        ranks=1,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("DGC() ")
    assert done.stdout.count("DGC()") == 1 and "[0]" not in done.stdout + done.stderr
    assert "2 ranks on 1 host, over Horovod\n" in done.stderr and "1/3  DGC()" in done.stderr


def test_json_takes_the_place_of_the_table():
    done = command(
        "bench", "-m", f"{WORKER}:factory", "-r", "2", "-c", "dgc", "--json", "-", ranks=1
    )
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in json.loads(done.stdout)["rows"]][1:] == ["DGC()"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_factory_that_raises_shows_its_own_traceback_only(ranks):
    done = command("bench", "-np", str(ranks), "-m", f"{WORKER}:broken", ranks=1)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert "KeyError: 'no such data'" in done.stderr and "broken" in done.stderr
    for file in ("click", "hvd_gradcomp/cli", "horovod/", "Terminated"):
        assert file not in done.stderr, done.stderr
    assert done.stdout == ""


def test_what_has_nothing_to_compress_is_left_out():
    done = command(
        "bench", "-m", f"{WORKER}:small", "-r", "2", *chosen("gradiveq", "qsgd"), ranks=1
    )
    assert done.returncode == 0, done.stderr
    assert "left out: GradiVeQ(ratio=8): it would compress none" in done.stderr
    assert "QSGD()" in done.stdout and "GradiVeQ" not in done.stdout
