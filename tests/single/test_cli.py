"""The command line: help, and what it says of bad input; what it measures is in tests/parallel."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from click import BadParameter, ClickException
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hvd_gradcomp
from hvd_gradcomp import NoneCompressor, StromCompressor
from hvd_gradcomp.cli import (
    COMMANDS,
    advise_report,
    bench,
    compare,
    hosts,
    launching,
    main,
    options,
    output,
)
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.tuning import models
from hvd_gradcomp.tuning.recommend import Span
from tests.methods import CLASSES, EVERY

pytestmark = pytest.mark.usefixtures("horovod_ends")

ROOT = Path(hvd_gradcomp.__file__).parents[1]


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments), prog_name="hvd-gradcomp")
    return result.exit_code, result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    code, text = run_command(command, "--help")
    assert code == 0
    assert command in run_command("--help")[1]
    assert "hvd-gradcomp" in text


def test_the_list_of_commands_has_whole_sentences():
    listed = run_command("--help")[1].partition("Commands:")[2]
    assert listed.count("\n  ") == len(COMMANDS) and "..." not in listed, listed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "-c", "NoSuchCompressor()"), "NoSuchCompressor"),
        (("bench", "-c", "1 + 1"), "is no compressor"),
        (("bench", "-c", "QSGDCompressor(bits=99)"), "bits"),
        (("bench", "-m", "resnet51"), "did you mean 'resnet50'? There are resnet50, vgg16, bert-b"),
        (("bench", "-m", "pickle:dunps"), "has no 'dunps'; did you mean 'dumps'?"),
        (("bnch",), "no command 'bnch'; did you mean 'bench'?"),
        (("quux",), "no command 'quux'; there are demo, doctor, build,"),
        (("bench", "--rond", "3"), "'--rounds'"),
        (("doctor", "--framework", "troch"), "'torch', 'tensorflow'"),
        (("bench", "-c", "dgcc"), "'dgcc' is no compressor; did you mean 'dgc'?"),
        (("bench", "-c", "VarianceCompresor(alpha=2)"), "did you mean 'VarianceCompressor'?"),
        (("bench", "-c", "after(3, None, DGCCompresor())"), "did you mean 'DGCCompressor'?"),
        (
            ("bench", "-c", "VarianceCompressor(alpa=2)"),
            "VarianceCompressor has no parameter 'alpa'; did you mean 'alpha'? It takes alpha=2.0, "
            "zeta=0.999, moments='auto'",
        ),
        (
            ("bench", "-c", "robust(QSGDCompressor(), rule='mediam')"),
            "got 'mediam'; did you mean 'median'?",
        ),
        (("bench", "-c", "robust(QSGDCompressor(), rul='median')"), "did you mean 'rule'?"),
        (("bench", "-m", "no_such_module:factory"), "no module 'no_such_module'"),
        (("bench", "-m", "json:factory"), "has no 'factory'"),
        (("bench", "-m", "builtins:dict"), "has to return a torch.nn.Module"),
        (("bench", "-c", "__import__('os').system('touch ran')"), "is no compressor"),
        (
            ("bench", "-c", "[c for c in ().__class__.__base__.__subclasses__()]"),
            "is no compressor",
        ),
        (("bench", "-c", "QSGDCompressor(bits=open('ran', 'w'))"), "open"),
        (("bench", "-c", "QSGDCompressor(bits=9**9**9)"), "QSGDCompressor(bits=9**9**9)"),
        (("bench", "-c", "QSGDCompressor(**{'bits': 4})"), "is no compressor"),
        (("bench", "-c", "after(3, QSGDCompressor(), annotations)"), "annotations"),
        (("bench", "-c", "role('bias')"), "is no compressor"),
        (("bench", "-c", "local(Int8Compressor(), every=0)"), "every must be a whole number in [1"),
        (("bench", "-c", "local(Int8Compressor(), evry=5)"), "did you mean 'every'?"),
        (("bench", "-c", "local(7)"), "compression= takes a compressor of hvd_gradcomp, got 7"),
        (("bench", "-c", "local(None, outer=3)"), "outer= takes an OuterSGD, got 3"),
        (("bench", "-c", "local(Int8Compresor())"), "did you mean 'Int8Compressor'?"),
        (
            ("bench", "-c", "local(every=15, Int8Compressor())"),
            "or 'local(Int8Compressor(), every=15)'",
        ),
        (("bench", "-c", "lokal(None)"), "did you mean 'local'?"),
        (("bench", "-c", "momentum(DGCCompressor())"), "corrects momentum, and here momenta"),
        (("bench", "-c", "momentum(None, warmup_steps=0)"), "warmup_steps must be a whole number"),
        (("bench", "-c", "after(3, None, local(None))"), "after(3, None, local(None))"),
        (("bench", "--shards", "0"), "0 is not in the range"),
        (("bench", "-c", "QSGDCompressor(bits=4"), "QSGDCompressor(bits=4"),
        (("bench", "-c", "(" * 5000), "is no compressor"),
        (("bench", "-m", "os:system"), "os:system is no function that can be called without"),
        (("bench", "-m", "os:abort"), "os:abort is no function that can be called without"),
        (("bench", "-m", "os:sep"), "os:sep is no function that can be called without"),
        (("bench", "-m", "../../etc/passwd:x"), "no factory '../../etc/passwd:x'"),
        (("bench", "-m", "os:path.join"), "no factory 'os:path.join'"),
        (("compare", "../../etc/passwd:x"), "no function '../../etc/passwd:x'"),
        (("compare", "os:system"), "os:system is no generator function"),
        (("bench", "--png", "nosuch/x.png"), "there is no folder nosuch"),
        (("bench", "--json", "nosuch/x.json"), "there is no folder nosuch"),
        (("bench", "--png", "x.exe"), "ends in none of .png, .svg, .pdf"),
        (("bench", "-r", "0"), "0 is not in the range"),
        (("advise",), "--bandwidth"),
        (("advise", "--bandwidth", "1", "--optimizer", "adum"), "torch.optim has adadelta"),
        (("advise", "--for-hosts", "1"), "1 is not in the range"),
        (("advise", "--bandwidth", "0"), "0"),
        (("compare", "json:dumps"), "no generator function"),
        (("compare",), "name either your training, MODULE:FUNCTION, or with -m a model"),
        (("compare", "a:b", "-m", "a:b"), "name either your training"),
        (("compare", "-m", "resnet50"), "has to return (module, loss, optimizer)"),
        (("compare", "train"), "module:function"),
        (("bench", "-H", "localhost:2"), "say with -np how many"),
        (("bench", "-np", "3", "-H", "localhost:1"), "asks for 3 ranks, and -H localhost:1 has 1"),
        (("advise", "-np", "5", "-H", "a:2,b:2"), "asks for 5 ranks, and -H a:2,b:2 has 4"),
        (("bench", "-np", "1", "-H", "nosuch.invalid:1"), "'nosuch.invalid' has no address here"),
        (("compare", "-np", "1", "-H", f"{'x' * 64}:1", "a:b"), "has no address here"),
        (("bench", "-np", "1", "-H", "localhost"), "'localhost' is no host; write each as NAME:RA"),
        (("bench", "-np", "1", "-H", "localhost:0"), "'localhost:0' is no host"),
        (("bench", "-np", "1", "-H", "localhost:1,"), "'' is no host"),
        (("bench", "-np", "1", "--horovodrun", "--gloo 'x"), "no closing quotation"),
        (("bench", "-np", "1", "-H", "me@localhost:1"), "'me@localhost:1' is no host"),
        (("doctor", "--hosts", "@node1"), "'@node1' is no host; write each as [USER@]NAME"),
        (("doctor", "--hosts", "a b"), "'a b' is no host; write each as [USER@]NAME"),
        (("doctor", "nosuch.py"), "'nosuch.py' does not exist"),
        (("bench", "--json", "/proc/nosuch.json"), "/proc/nosuch.json cannot be written"),
        (("compare", "a:b", "--png", "/proc/nosuch.png"), "/proc/nosuch.png cannot be written"),
        (("build-horovod", "/nosuch/python"), "/nosuch/python is no Python"),
        (("rendezvous", "--port", "70000"), "70000 is not in the range"),
        (("advise", "-r", "4"), "4 is not in the range"),
    ],
)
def test_bad_input_is_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = run_command(*arguments)
    assert code == 2, text
    assert words in " ".join(text.split())
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir()), "nothing was run, and no folder made"


def test_a_traceback_is_of_a_users_code_alone_wherever_click_is(tmp_path, monkeypatch):
    """Such as in the packages of the system, which an environment sees."""
    (tmp_path / "users_model.py").write_text("def factory():\n    raise LookupError('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "elsewhere"))
    done = CliRunner().invoke(main, ["bench", "-m", "users_model:factory", "-c", "dgc"])
    lines = [line for line in done.output.splitlines() if line.startswith("  File ")]
    assert len(lines) == 1 and "users_model.py" in lines[0], done.output


USERS = """
import torch

def model():
    module = torch.nn.Linear(4, 4)
    return module, lambda: LOSS

def train(compression):
    yield torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 0.1)

def unready():
    yield
"""


@pytest.mark.parametrize(
    ("command", "loss", "words", "code"),
    [
        (("bench", "-m"), "3.0", "not a float", 2),
        (("bench", "-m"), "torch.ones(())", "not a tensor of shape () that needs no gradient", 2),
        (("bench", "-m"), "module(torch.ones(1, 4))", "not a tensor of shape (1, 4)", 2),
        (("advise", "--bandwidth", "9", "-m"), "module.weight.sum() * 1e400", "no gradient for", 2),
        (
            ("bench", "-m"),
            "module(torch.ones(4)).sum() * float('nan')",
            "gradients of its loss are not finite",
            2,
        ),
        (
            ("bench", "-m"),
            "module(torch.ones(4)).sum() * 0",
            "gradients of its loss are all zero",
            2,
        ),
        (("compare", "train"), "0", "yield its hvd_gradcomp optimizer before the first step", 1),
        (("compare", "-c", "local-int8", "train"), "0", "takes no argument 'local', in which", 2),
        (("compare", "unready"), "0", "has to take one argument, the compressor: too many", 2),
    ],
)
def test_code_of_a_user_that_does_not_fit_is_a_sentence(
    command, loss, words, code, tmp_path, monkeypatch
):
    # A training that yields something else is TensorFlow's where that frontend was imported.
    monkeypatch.delitem(sys.modules, "hvd_gradcomp.tensorflow", raising=False)
    name = f"users_{abs(hash((command, loss)))}"
    (tmp_path / f"{name}.py").write_text(USERS.replace("LOSS", loss))
    monkeypatch.syspath_prepend(str(tmp_path))
    *before, last = command
    last = (last, f"{name}:model") if last == "-m" else (f"{name}:{last}",)
    done, text = run_command(*before, *last, "-c", "dgc")
    assert done == code, text
    assert words in " ".join(text.split()) and "Traceback" not in text
    assert len(text.splitlines()) <= 5


@pytest.mark.parametrize("command", [("bench", "-c", "dgc", "-m"), ("compare",)])
def test_a_module_that_cannot_be_loaded_shows_its_own_traceback(command, tmp_path, monkeypatch):
    (tmp_path / "users_broken.py").write_text("int('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(main, [*command, "users_broken:train"])
    assert done.exit_code == 1, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("  File ")]
    assert len(lines) == 1 and "users_broken.py" in lines[0], done.output


def test_what_lies_beside_what_is_installed_is_a_users(tmp_path, monkeypatch):
    """A folder whose name goes on after that of an installed one."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "users_beside.py").write_text("def factory():\n    raise OSError\n")
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    done = CliRunner().invoke(main, ["bench", "-m", "users_beside:factory", "-c", "dgc"])
    lines = [line for line in done.output.splitlines() if line.startswith("  File ")]
    assert len(lines) == 1 and "users_beside.py" in lines[0], done.output


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("local(Int8Compressor(), every=15)", "local(Int8(), every=15)"),
        (
            "local(None, every=30, warmup_steps=9, outer=OuterSGD(lr=0.7, momentum=0.9))",
            "local(None(), every=30, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True), "
            "warmup_steps=9)",
        ),
        ("momentum(OneBitCompressor(), warmup_steps=20)", "momentum(OneBit(), warmup_steps=20)"),
        ("local-int8", "local(Int8(), every=15)"),
    ],
)
def test_local_steps_and_momenta_are_written_as_compressors_are(text, name):
    (method,) = options.chosen([text])
    assert (method.name, method.overlaps) == (name, False)


WRITTEN = [
    "after(3, StromCompressor(tau=0.7), DGCCompressor(density=0.05, momentum=-0.0))",
    "partition([(role('bias', 'norm'), None), (smaller(100), NoneCompressor()), ('*', "
    "QSGDCompressor(bits=8))])",
    "partition({'*.weight': VarianceCompressor(2.0), '*': None})",
]


@pytest.mark.parametrize("text", [str(c) for c in EVERY] + WRITTEN)
def test_a_compressor_is_written_as_in_python(text):
    (method,) = options.chosen([text])
    assert method.compressor == eval(text, vars(hvd_gradcomp)) and method.overlaps


figures = st.floats(1e-3, 1e6)


@given(st.lists(figures, min_size=9, max_size=9), st.sampled_from([*options.usual().values()]))
def test_tables_fit_a_terminal(drawn, compressor):
    low, middle, high, *_ = sorted(drawn)
    step = {"method": brief(compressor), "ms": middle, "min": low, "max": high, "bytes": high}
    ratios = dict(zip(("element_ratio", "byte_ratio", "ratio", "times_faster"), drawn))
    rest = dict(zip(("encode", "collective", "decode", "loss"), drawn[4:]))
    row = {**step, **ratios, **rest, "ms": middle + 1e-3}
    span = Span(low, middle, high)
    advice = advise_report.Row(
        method=brief(compressor),
        element_ratio=row["element_ratio"],
        byte_ratio=row["byte_ratio"],
        predicted_ms=middle,
        measured_ms=None,
        error=None,
        exchange_span_ms=span,
        step_ms=middle,
        step_span_ms=span,
        faster=span,
        local_ms=dict.fromkeys(advise_report.EVERY, high),
        pays_below=high,
        pays_below_span=span,
        hosts=dict.fromkeys(advise_report.HOSTS, high),
    )
    for text in (
        bench.table([row]),
        compare._table([row]),
        advise_report.table([advice], measured=True),
        advise_report.hosts([advice]),
        advise_report.local_steps([advice]),
    ):
        assert max(map(len, text.splitlines())) <= options.WIDTH, text


def started_by(monkeypatch, *arguments: str, installed=("horovod", "torch")) -> list[str]:
    """Return the command by which ranks are started."""
    commands = []
    monkeypatch.setattr(launching, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(launching, "run", lambda command: commands.append(command) or 0)
    monkeypatch.setattr(sys, "argv", ["hvd-gradcomp", *arguments])
    code, text = run_command(*arguments)
    assert code == 0, text
    (command,) = commands
    return command


@pytest.mark.parametrize(
    ("options_", "installed", "launcher"),
    [
        ((), ("horovod", "torch"), "horovod.runner.launch"),
        (("--ddp",), ("horovod", "torch"), "torch.distributed.run"),
        ((), ("torch",), "torch.distributed.run"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "advise", "compare"])
def test_ranks_are_started_by_torchrun_where_there_is_no_horovod(
    command, options_, installed, launcher, monkeypatch
):
    more = ("train:train",) if command == "compare" else ()
    words = started_by(monkeypatch, command, "-np", "2", *options_, *more, installed=installed)
    assert words[1:3] == ["-m", launcher]
    count = "--nproc-per-node" if launcher.startswith("torch") else "-np"
    assert words[words.index(count) + 1] == "2"


@pytest.mark.parametrize(
    ("arguments", "installed", "words"),
    [
        (
            ("-H", "node1:2,node2:2"),
            ("torch",),
            "type on each of the 2 hosts, with advise's own options behind torchrun --nnodes 2 "
            "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 -m hvd_gradcomp "
            "advise ...",
        ),
        (("--horovodrun", "--mpi"), ("torch",), "'--mpi' has options of horovodrun, and torchrun"),
        ((), (), "ranks are started by PyTorch, which is not installed"),
    ],
)
def test_what_torchrun_cannot_do_is_named(arguments, installed, words, monkeypatch):
    monkeypatch.setattr(launching, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(launching, "run", lambda command: pytest.fail("ranks were started"))
    monkeypatch.setattr(sys, "argv", ["hvd-gradcomp", "advise"])
    code, text = run_command("advise", "-np", "4", *arguments)
    assert code in (1, 2) and words in " ".join(text.split()), text


@pytest.mark.parametrize("command", [("bench",), ("advise", "--bandwidth", "10")])
def test_horovodrun_without_horovod_for_pytorch_is_a_sentence(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.delitem(sys.modules, "hvd_gradcomp.tuning.over_horovod", raising=False)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    code, text = run_command(*command)
    assert code == 1 and len(text.splitlines()) == 1
    assert "Horovod for PyTorch does not import" in text
    assert "build-horovod` installs it; torchrun starts ranks without it" in text


WITHOUT = """
import sys
sys.modules["horovod"] = None
from hvd_gradcomp.cli import main
main()
"""


def test_a_link_that_is_given_needs_neither_horovod_nor_ranks(tmp_path):
    """One process answers, from the cost model and what it measures of its own work."""
    (tmp_path / "users_model.py").write_text(USERS.replace("LOSS", "module(torch.ones(4)).sum()"))
    for command in (("advise", "--bandwidth", "1"), ("bench", "-r", "2")):
        options_ = (*command, "-m", "users_model:model", "-c", "qsgd", "-c", "int8", "--json", "-")
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, *options_],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["ranks"], report["library"]) == (1, "torch.distributed")
        assert [row["method"] for row in report["rows"]] == ["dense (DDP)", "QSGD()", "Int8()"]


@pytest.mark.parametrize(
    ("host", "words"),
    [("nosuch.invalid", "Name or service not known"), ("127.0.0.1", "Address already in use")],
)
def test_a_rendezvous_that_cannot_be_is_a_sentence(host, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = run_command(
            "rendezvous", "--host", host, "--port", str(taken.getsockname()[1])
        )
    assert code == 1 and text.startswith(f"Error: cannot listen on {host}, port ")
    assert words in text and "Give an address of this machine" in text and "Traceback" not in text


HOROVODRUN = "  File '/site/horovod/runner/launch.py', line 3, in f\n    g()\n"
KILLED = (
    f"Process 0 exit with status code 137.\nTraceback (most recent call last):\n{HOROVODRUN}"
    "RuntimeError: Horovod detected a failed process\nProcess name: 0\nExit code: 137\n\n"
)
LAUNCHERS = {
    "ssh": (
        f"Launching\nTraceback (most recent call last):\n{HOROVODRUN}"
        "RuntimeError: could not connect to some hosts via ssh\n"
        "ssh not successful for host node1:\nssh: Could not resolve hostname node1\n",
        "ssh does not reach host node1: ssh: Could not resolve hostname node1",
    ),
    "interfaces": (
        f"Traceback (most recent call last):\n{HOROVODRUN}KeyError: 1\n\nDuring\n\n"
        f"Traceback (most recent call last):\n{HOROVODRUN}    ^^^\n"
        "horovod.Broken: No interface\nfor 127.0.0.1.\n",
        "No interface for 127.0.0.1.",
    ),
    "usage": (
        "usage: launch.py [-h]\n   [-v]\nlaunch.py: error: unrecognized arguments: --nosuch\n",
        "unrecognized arguments: --nosuch",
    ),
}


def launched(capsys, errors: str, printed: str = "") -> tuple[str, str]:
    """Show the output of a launcher that fails."""
    program = f"sys.stdout.write({printed!r}); sys.stderr.write({errors!r}); sys.exit(3)"
    assert launching.run([sys.executable, "-c", f"import sys; {program}"]) == 3
    return tuple(capsys.readouterr())


@pytest.mark.parametrize("case", LAUNCHERS)
def test_of_a_launcher_that_fails_the_reason_is_left(case, capsys):
    text, reason = LAUNCHERS[case]
    assert launched(capsys, text)[1] == f"Error: the ranks cannot be started: {reason}\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_die_have_been_started(rank, capsys):
    printed, shown = launched(capsys, KILLED, f"[{rank}]<stdout>:step 100\n")
    assert "step 100\n" in (printed if rank == "0" else shown)
    reason = "Horovod detected a failed process Process name: 0 Exit code: 137"
    assert shown.endswith(f"Error: the ranks have failed: {reason}\n")


OTHER_LINES = {
    "slots": "not enough slots\nfor 3\n",
    "compiler": "cc1plus: error: out of memory\nreal cause here\n",
    "rank": f"Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 1\n{KILLED}",
}


@pytest.mark.parametrize("case", OTHER_LINES)
def test_other_lines_of_a_launcher_are_shown(case, capsys):
    assert launched(capsys, OTHER_LINES[case])[1] == OTHER_LINES[case]


def test_an_error_of_a_rank_is_shown_without_the_launchers(capsys):
    rank = "Traceback (most recent call last):\nKeyError: 1\n".splitlines(keepends=True)
    text = "".join(f"[1]<stderr>:{line}" for line in rank)
    assert launched(capsys, text + KILLED)[1] == "".join(f"[1] {line}" for line in rank)


@pytest.mark.parametrize(
    ("configuration", "known"),
    [
        ("hostname localhost", True),
        ("hostname inner.invalid", False),
        ("hostname inner.invalid\nproxyjump bastion.invalid", True),
        ("hostname inner.invalid\nproxycommand nc -x proxy.invalid %h %p", True),
        ("hostname inner.invalid\nproxyjump none\nproxycommand none", False),
    ],
)
def test_a_name_that_sshs_configuration_explains_is_a_host(
    configuration, known, tmp_path, monkeypatch
):
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ncat <<EOF\nuser me\n{configuration}\nport 22\nEOF\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with nullcontext() if known else pytest.raises(BadParameter, match="no address here"):
        hosts.check_names(hosts.parse("inner.invalid:2"))


def test_what_a_launcher_says_is_held_back_unless_it_fails(capsys):
    lines = ["[0]<stdout>:mine", "[1]<stdout>:same", "[1,0]<stderr>:and over MPI", "launcher's"]
    program = f"import sys; print(*{lines}, sep=chr(10)); sys.exit(%d)"
    assert launching.run([sys.executable, "-c", program % 0]) == 0
    assert capsys.readouterr() == ("mine\nand over MPI\n", "")
    assert launching.run([sys.executable, "-c", program % 3]) == 3
    assert capsys.readouterr() == ("mine\nand over MPI\n", "[1] same\nlauncher's\n")


def test_what_cannot_be_written_in_the_end_is_a_plain_error(tmp_path):
    with pytest.raises(ClickException, match=r"cannot be written: .*directory"):
        output.report(tmp_path, {})
    with pytest.raises(ClickException, match=r"cannot be written: .*directory"):
        (tmp_path / "x.png").mkdir()
        with options.drawing(tmp_path / "x.png", 1, 1):
            pass


def test_a_named_pipe_gets_the_results_alone(tmp_path):
    pipe = tmp_path / "results"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert output.in_folder(None, None, pipe) == pipe
    events = select.poll()
    events.register(reader)
    assert not events.poll(0), "a writer has come and gone: the reader sees the end"
    output.report(pipe, {"ranks": 2})
    assert json.loads(os.read(reader, 4096)) == {"ranks": 2}
    os.close(reader)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_named_pipe_that_cannot_be_written_is_refused_at_once(tmp_path):
    pipe = tmp_path / "results"
    os.mkfifo(pipe, 0o400)
    with pytest.raises(BadParameter, match=r"results cannot be written \(Permission denied\)"):
        output.in_folder(None, None, pipe)


def test_a_short_name_has_usual_settings_for_the_size_of_the_gradients():
    (method,) = options.chosen(["strom"], 0.01)
    assert method.compressor == StromCompressor(tau=0.191)


def test_every_method_is_usual():
    assert {type(one) for one in options.usual().values()} == set(CLASSES) - {NoneCompressor}


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("resnet50", 25_557_032),
        ("vgg16", 138_357_544),
        ("bert-base", 108_890_112),
        ("lstm", 66_034_000),
    ],
)
def test_models_have_their_papers_sizes(name, elements):
    module = models.load(name, shapes_only=True).module
    assert sum(p.numel() for p in module.parameters()) == elements


def test_a_built_in_model_can_be_trained():
    model = models.load("resnet50", batch_size=1)
    model.module.eval()  # a batch of one has no variance
    model.loss().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.module.parameters())
