"""What the demo says beside its tables, without training; and what its first table needs."""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from hvd_gradcomp.cli import demo as command
from hvd_gradcomp.cli import main

pytest.importorskip("matplotlib")
from benchmarks.worth import slow_link
from examples import demo

ROOT = Path(demo.__file__).parents[1]
FIRST = "the first table"
ROW = {
    "accuracy": 97.0,
    "element_ratio": 20.0,
    "ratio": 10.0,
    "bytes_sent": 1e6,
    "steps": 10,
    "seconds_per_step": 0.01,
}


def printed(monkeypatch, tmp_path, *words):
    output = io.StringIO()
    rows = lambda module, method, *_: {**ROW, "framework": "PyTorch", "method": method}  # noqa: E731
    monkeypatch.delenv("HVD_GRADCOMP_HOSTS", raising=False)
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path / "results"), *words])
    monkeypatch.setattr(demo, "first_table", lambda options: print(FIRST, file=output))
    monkeypatch.setattr(demo, "find_spec", lambda name: True)
    monkeypatch.setattr(demo, "run", rows)
    monkeypatch.setattr(slow_link, "refusal", lambda: "no hosts here")
    monkeypatch.setattr(demo, "plot", lambda rows, path: path.parent.mkdir(exist_ok=True))
    monkeypatch.setattr(demo, "Console", lambda: Console(file=output, width=100))
    demo.main()
    return " ".join(output.getvalue().split())


def test_it_says_why_compressed_steps_are_slower_and_what_a_link_makes_of_them(
    monkeypatch, tmp_path
):
    text = printed(monkeypatch, tmp_path)
    assert demo.ONE_MACHINE in text
    runs = {run["rate"]: run["exchange"] for run in json.loads(demo.HOSTS.read_text())["runs"]}
    for rate, name in (("1gbit", "QSGD()"), ("100mbit", "Variance(alpha=4.3)")):
        (one,) = [one for one in runs[rate] if one["method"] == name]
        assert f"{one['ms']:,.0f} ({one['times_faster']:.1f}x)" in text
    assert text.index("dense") < text.index("QSGD()") < text.index("Variance(alpha=1.0)")


def test_it_ends_with_what_a_slow_link_makes_of_a_training(monkeypatch, tmp_path):
    """Predicted where no hosts can be made, and it says so."""
    text = printed(monkeypatch, tmp_path)
    last = text[text.index("A transformer to one loss") :]
    assert "predicted from docs/measured" in last
    sooner = [
        last.partition(f"{name} │")[2].split("│")[3]
        for name in ("dense", "every 15, averaged, Int8")
    ]
    assert float(sooner[0]) == 1.0 and float(sooner[1]) > 2.0


def test_hosts_that_fail_do_not_end_the_demo(monkeypatch, capsys):
    def fail(*_, **__):
        raise slow_link.JobError("a rank is gone", "")

    monkeypatch.setattr(slow_link, "refusal", lambda: None)
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: name)
    monkeypatch.setattr(slow_link, "Hosts", fail)
    assert "predicted" in str(slow_link.training(demo.WORTH).title)
    assert "a rank is gone" in capsys.readouterr().err


def test_it_needs_no_benchmarks_where_hosts_are_given(monkeypatch, tmp_path):
    """As in an image, which has none."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(demo)
    assert "plot:" in printed(monkeypatch, tmp_path, "--hosts", "one:1,two:1")


def test_between_hosts_it_says_no_such_thing(monkeypatch, tmp_path):
    assert demo.ONE_MACHINE not in printed(monkeypatch, tmp_path, "--hosts", "one:1,two:1")


def test_the_first_table_comes_before_horovod_and_may_be_all(monkeypatch, tmp_path):
    text = printed(monkeypatch, tmp_path)
    assert text.index(FIRST) < text.index("Handwritten digits over Horovod")
    assert printed(monkeypatch, tmp_path, "--no-horovod") == FIRST
    assert FIRST not in printed(monkeypatch, tmp_path, "--no-ddp")
    assert FIRST not in printed(monkeypatch, tmp_path, "--hosts", "one:1,two:1")


def test_the_first_table_is_the_package_s_own(monkeypatch):
    """With the arguments of the demo, and its end if it fails."""
    started = []

    def run(words):
        started.append(words)
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.delenv("HVD_GRADCOMP_HOSTS", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo", "--epochs", "2", "--ranks", "4"])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    program = [sys.executable, "-m", "hvd_gradcomp", "demo"]
    assert started == [[*program, "--seed", "1", "-np", "4", "--epochs", "2"]]
    assert ended.value.code == 3


def test_without_horovod_it_ends_with_a_remedy(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo", "--no-ddp"])
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="`make demo` builds it"):
        demo.main()


def test_the_first_table_needs_no_figures(monkeypatch):
    """Nor anything else that the package does not require."""
    monkeypatch.setattr(sys, "argv", ["demo", "--no-horovod"])
    for name in ("matplotlib", "sklearn", "tensorflow", "horovod"):
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(demo)
    monkeypatch.setattr(demo, "first_table", lambda options: None)
    demo.main()


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (("sklearn",), "Not installed: scikit-learn. Install with: pip install scikit-learn"),
        (("sklearn", "torch"), "pip install torch scikit-learn"),
    ],
)
def test_without_scikit_learn_the_command_says_what_to_install(monkeypatch, modules, words):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(command.launching, "launcher", lambda: "")
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 1 and words in done.output


def test_under_horovodrun_the_command_starts_no_ranks(monkeypatch):
    monkeypatch.setattr(command.launching, "launcher", lambda: "Horovod")
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 2 and "call it without horovodrun" in done.output


def test_the_table_fits_a_terminal():
    rows = [command.Row(title, 100.0, 1_234_567.0, 126.2, 1234.5, 380) for title in command.METHODS]
    lines = command.table(rows).splitlines()
    assert max(map(len, lines)) <= command.options.WIDTH
    assert re.fullmatch(r"uncompressed +100.00 % +1,234,567 +126.2 +1234.5", lines[3])


def made(*words: str) -> str:
    """Return what `make` would run in a checkout where nothing is set up."""
    command = ["make", "--no-print-directory", "-n", "VENV=no-such-folder", "SETUP=1", *words]
    environment = {"PATH": f"{Path(shutil.which('make')).parent}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_the_first_table_installs_neither_tensorflow_nor_horovod():
    script = made("demo", "ARGS=--no-horovod")
    assert "examples.demo --no-horovod" in script
    named = script.replace("--no-horovod", "").replace(str(ROOT), "")
    assert not re.search("tensorflow|keras|horovod", named, re.IGNORECASE)
    # What it names by a pattern: the frameworks' own pins, without the others.
    (pattern,) = re.findall(r"^grep -E '(.+)' docker/frameworks.txt", script, re.MULTILINE)
    pins = (ROOT / "docker/frameworks.txt").read_text().splitlines()
    packages = {re.match(r"[\w-]+", pin)[0] for pin in pins if re.match(pattern, pin)}
    assert packages == {"torch", "numpy", "setuptools", "wheel"}


@needs_make
def test_make_demo_shows_the_first_table_before_it_installs_the_rest():
    script = made("demo")
    first = script.index("examples.demo --no-horovod")
    announced = script.index("now Horovod: building it takes about 8 minutes, once;")
    built, last = script.index("build-horovod.sh"), script.index("examples.demo --no-ddp")
    frameworks = script.index("--requirement docker/frameworks.txt")
    assert first < announced < frameworks < built < last


@needs_make
def test_make_setup_takes_the_same_stages():
    script = made("setup")
    stages = re.findall(r"^touch no-such-folder/.stamp-(\w+)", script, re.MULTILINE)
    assert stages == ["venv", "tools", "torch", "frameworks", "horovod"]
