"""The command line: help, and what it says of bad input; what it measures is in tests/parallel."""

from __future__ import annotations

import sys
import sysconfig

import pytest
import torch
from click import ClickException
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hvd_gradcomp
from hvd_gradcomp import NoneCompressor, StromCompressor
from hvd_gradcomp.cli import COMMANDS, advised, bench, compare, launching, main, options, output
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.tuning import models
from tests.methods import CLASSES, EVERY

pytestmark = pytest.mark.usefixtures("horovod_ends")


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments), prog_name="hvd-gradcomp")
    return result.exit_code, result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    code, text = said(command, "--help")
    assert code == 0
    assert command in said("--help")[1]
    assert "hvd-gradcomp" in text


def test_the_list_of_commands_has_whole_sentences():
    listed = said("--help")[1].partition("Commands:")[2]
    assert listed.count("\n  ") == len(COMMANDS) and "..." not in listed, listed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "-c", "NoSuchCompressor()"), "NoSuchCompressor"),
        (("bench", "-c", "1 + 1"), "is no compressor"),
        (("bench", "-c", "QSGDCompressor(bits=99)"), "bits"),
        (("bench", "-m", "resnet51"), "there are resnet50, vgg16, bert-base, lstm"),
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
        (("compare", "train"), "module:function"),
        (("bench", "-H", "localhost:2"), "say with -np how many"),
        (("advise", "-r", "4"), "4 is not in the range"),
    ],
)
def test_bad_input_is_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = said(*arguments)
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


WRITTEN = [
    "after(3, StromCompressor(tau=0.7), DGCCompressor(density=0.05, momentum=-0.0))",
    "partition([(role('bias', 'norm'), None), (smaller(100), NoneCompressor()), ('*', "
    "QSGDCompressor(bits=8))])",
    "partition({'*.weight': VarianceCompressor(2.0), '*': None})",
]


@pytest.mark.parametrize("text", [repr(c) for c in EVERY] + WRITTEN)
def test_a_compressor_is_written_as_in_python(text):
    assert options.chosen([text]) == [eval(text, vars(hvd_gradcomp))]


figures = st.floats(1e-3, 1e6)


@given(st.lists(figures, min_size=9, max_size=9), st.sampled_from([*options.usual().values()]))
def test_tables_fit_a_terminal(drawn, compressor):
    low, middle, high, *_ = sorted(drawn)
    step = {"way": brief(compressor), "ms": middle, "min": low, "max": high, "bytes": high}
    ratios = dict(zip(("element_ratio", "byte_ratio", "ratio", "times_faster"), drawn))
    rest = dict(zip(("encode", "collective", "decode", "loss"), drawn[4:]))
    row = {**step, **ratios, **rest, "ms": middle + 1e-3}
    advice = {
        **row,
        "predicted_ms": middle,
        "exchange_span_ms": (low, middle, high),
        "step_ms": middle,
        "faster": (low, middle, high),
        "pays_below": high,
        "hosts": dict.fromkeys(advised.HOSTS, high),
    }
    for text in (
        bench.table([row]),
        compare._table([row]),
        advised.table([advice], measured=True),
        advised.hosts([advice]),
    ):
        assert max(map(len, text.splitlines())) <= options.WIDTH, text


def test_ranks_without_horovod_are_a_plain_error(monkeypatch):
    monkeypatch.setattr(launching, "find_spec", lambda name: None, raising=False)
    monkeypatch.setattr(launching, "run", lambda command: 1)  # as Python ends without it
    code, text = said("bench", "-np", "2")
    assert code == 1
    assert "Horovod is not installed: `hvd-gradcomp doctor` says what to do" in text


def test_what_a_launcher_says_is_held_back_unless_it_fails(capsys):
    lines = ["[0]<stdout>:mine", "[1]<stdout>:same", "[1,0]<stderr>:and over MPI", "launcher's"]
    program = f"import sys; print(*{lines}, sep=chr(10)); sys.exit(%d)"
    assert launching.run([sys.executable, "-c", program % 0]) == 0
    assert capsys.readouterr() == ("mine\nand over MPI\n", "")
    assert launching.run([sys.executable, "-c", program % 3]) == 3
    assert capsys.readouterr() == ("mine\nand over MPI\n", "[1] same\n")


def test_what_cannot_be_written_in_the_end_is_a_plain_error(tmp_path):
    with pytest.raises(ClickException, match=r"cannot be written: .*directory"):
        output.report(tmp_path, {})
    with pytest.raises(ClickException, match=r"cannot be written: .*directory"):
        (tmp_path / "x.png").mkdir()
        with options.drawing(tmp_path / "x.png", 1, 1):
            pass


def test_a_short_name_has_usual_settings_for_the_size_of_the_gradients():
    assert options.chosen(["strom"], 0.01) == [StromCompressor(tau=0.191)]


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
