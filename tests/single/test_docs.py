"""The site's pages, without running what they say; `tests/parallel/test_docs.py` does that."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import hvd_gradcomp
from docs import follow, methods
from hvd_gradcomp.method.handover import takes_momentum
from hvd_gradcomp.ops import Ops
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.runtime.program_runner import Transport
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup
from hvd_gradcomp.torch.reduce.backend import Backend
from tests.conftest import STANDS_IN

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if not {"_build", "generated"} & {*page.parts})
BLOCKS = [block for page in PAGES for block in follow.blocks(page)]
DIRECTIVES = {"toctree", "figure", "include", "literalinclude"}
MARKERS = {"start-after", "start-at", "end-before", "end-at"}
INCLUDED = {"pyobject", "lines", "language", "caption", "relative-docs", "relative-images"}
COMPRESSORS = DOCS / "api" / "compressors.rst"
AUTOMATIC = {"autoclass", "autoexception", "autofunction", "automodule"}
not_run = pytest.mark.parametrize(
    "block",
    [b for b in BLOCKS if b.language == "console" and b.reason],
    ids=lambda b: f"{b.page.name}:{b.line}",
)


def title(page):
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_each_block_says_what_it_is_for(page):
    """So that no command is left out because a fence is spelled another way."""
    text = page.read_text()
    fences = re.findall(r"^( *)(`{3,}|~{3,}|:{3,})(.+)$", text, re.MULTILINE)
    for indent, _, kind in fences:
        name = kind.strip().removeprefix("{code-block}").strip()
        directive = re.match(r"\{(\w+)\}", kind)
        if directive and directive[1] != "code-block":
            assert directive[1] in DIRECTIVES, kind
        else:
            assert name in follow.LANGUAGES, kind
            assert not indent or name == "text", f"an indented block is not run: {kind}"
    for block in follow.blocks(page):
        assert block.reason is None or block.reason in follow.REASONS, block.place
        assert {*block.options} <= {"class", "caption"}, block.place
        if block.language == "console":
            assert follow.commands(block), block.place
        if block.language == "diff":
            assert block.file or block.reason == "excerpt", block.place


def test_a_page_that_shows_a_change_runs_a_program():
    """So that a reader can type it, and `tests/parallel/test_docs.py` does."""
    shown = {block.page for block in BLOCKS if block.language == "diff"}
    run = {block.page for block in BLOCKS if block.language == "console" and not block.reason}
    assert len(shown) > 8 and not shown - run


def includes():
    """Each directive that includes a file: its page, the path and its options."""
    directive = r"^ *(?:`{3,}|:{3,}|~{3,})\{(?:literal)?include\} *(\S+)\n((?: *:[\w-]+:.*\n)*)"
    for page in PAGES:
        for path, options in re.findall(directive, page.read_text(), re.MULTILINE):
            if not path.startswith("generated/"):  # conf.py makes these
                yield page, path, dict(re.findall(r":([\w-]+): *(.*)", options))


def defined(tree, path):
    """Return True if the module has this class, function or method."""
    name, _, rest = path.partition(".")
    for node in getattr(tree, "body", []):
        if getattr(node, "name", None) == name:
            return not rest or defined(node, rest)
    return False


def test_what_pages_include_exists():
    """Files, and the part of a file that is shown; otherwise a page would have a hole."""
    every = list(includes())
    assert len(every) >= 10
    for page, path, options in every:
        place = f"{page.name}: {path} {options}"
        file = page.parent / path
        assert file.is_file(), place
        text = file.read_text()
        assert options.keys() <= INCLUDED | MARKERS, place
        if "pyobject" in options:
            assert defined(ast.parse(text), options["pyobject"]), place
        for marker in MARKERS & options.keys():
            assert options[marker] in text, place
        if "lines" in options:
            numbers = [int(n) for n in re.findall(r"\d+", options["lines"])]
            assert numbers and max(numbers) <= len(text.splitlines()), place


def test_every_compressor_is_in_the_reference():
    listed = re.findall(r"^\.\. autoclass:: (\w+)$", COMPRESSORS.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    exported = {name for name in hvd_gradcomp.__all__ if name.endswith("Compressor")}
    assert exported - {"Compressor"} == {name for name in listed if name.endswith("Compressor")}


PUBLIC = ["", ".torch.ddp", ".torch.fsdp", ".torch.trainers"]
OVER_HOROVOD = [".torch", ".torch.elastic", ".tensorflow", ".tensorflow.elastic"]
OVER_HOROVOD += [".tensorflow.keras", ".tensorflow.keras.elastic"]


@pytest.mark.parametrize("module", [*PUBLIC, *([] if STANDS_IN else OVER_HOROVOD)])
def test_every_public_name_is_in_the_reference(module):
    """Functions and classes that are ours; Horovod's have a reference of their own."""
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))
    listed = set(re.findall(rf"^\.\. (?:{'|'.join(AUTOMATIC)}):: (?:\w+\.)*(\w+)$", text, re.M))
    exported = import_module(f"hvd_gradcomp{module}")
    ours = {
        name
        for name in exported.__all__
        if (getattr(getattr(exported, name), "__module__", None) or "").startswith("hvd_gradcomp")
    }
    assert ours and not ours - listed


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.rst")), ids=title)
def test_reference_has_no_commands(page):
    directives = set(re.findall(r"^\.\. ([\w-]+)::", page.read_text(), re.MULTILINE))
    assert directives <= {"toctree", "currentmodule", *AUTOMATIC}
    assert "$ " not in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_changes_apply(page, tmp_path):
    """Each diff fits the file that it changes, and what comes out is Python."""
    text, _ = follow.script([page])
    for name, source in re.findall(
        r"^cat > (.+) <<'END OF FILE'\n(.*?)END OF FILE$", text, re.S | re.M
    ):
        if name.endswith(".py"):
            compile(source, f"{page.name}: {name}", "exec")


def public():
    import hvd_gradcomp.tensorflow
    import hvd_gradcomp.tensorflow.keras
    import hvd_gradcomp.torch

    tensorflow = hvd_gradcomp.tensorflow
    return hvd_gradcomp.torch, tensorflow, tensorflow.keras


@pytest.mark.skipif(STANDS_IN, reason="Horovod is not installed")
def test_names_of_the_package_exist():
    """What excerpts and sentences call `hvd.something`."""
    modules = public()
    for page in PAGES:
        for path in set(re.findall(r"\bhvd((?:\.[A-Za-z_]\w*)+)", page.read_text())):
            if path == ".join" or path.startswith(".something"):
                continue
            first, *rest = path[1:].split(".")
            values = [getattr(m, first) for m in modules if hasattr(m, first)]
            for name in rest:
                values = [getattr(x, name) for x in values if hasattr(x, name)]
            assert values, f"{page.name}: hvd{path}"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: f"{b.page.name}:{b.line}"
)
def test_python_compiles(block):
    compile(block.text, block.place, "exec")


@not_run
def test_what_is_not_run_is_bash(block):
    for command in follow.commands(block):
        subprocess.run(["bash", "-n", "-c", command.text], check=True)


def help_of(*command):
    if command[0] == "hvd-gradcomp":  # which is this where the package is not installed
        command = (sys.executable, "-m", "hvd_gradcomp", *command[1:])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(STANDS_IN, reason="Horovod is not installed")
@pytest.mark.parametrize("program", ["horovodrun", "hvd-gradcomp"])
def test_options_of_what_is_not_run_exist(program):
    helps = {}
    for block in BLOCKS:
        if block.language != "console" or not block.reason:
            continue
        for command in follow.commands(block):
            for words in _calls(command.text, program):
                key = words[:2] if program == "hvd-gradcomp" else words[:1]
                if tuple(key) not in helps:
                    helps[tuple(key)] = help_of(*key)
                text = helps[tuple(key)]
                for option in (w.partition("=")[0] for w in words if w.startswith("-")):
                    assert re.search(rf"(?<![\w-]){option}\b", text), command.place


def _calls(text, program):
    """The words of each call of a program, those of what it starts left out."""
    words = shlex.split(text.replace("\\\n", " "))
    if program in words:
        arguments = words[words.index(program) :]
        if program == "horovodrun":
            starts = [i for i, word in enumerate(arguments) if word in ("python", "hvd-gradcomp")]
            arguments = arguments[: starts[0]]
        yield arguments


def test_targets_exist():
    """`make TARGET`, wherever a page says it."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        commands = re.findall(r"(?:`|\$ )make ([a-z][a-z -]*[a-z])", page.read_text())
        missing = {target for words in commands for target in words.split()} - targets
        assert not missing, f"{page.name}: {missing}"


def literals():
    """All that the package may print: its string constants, `{}` for what is filled in."""
    for path in (ROOT / "hvd_gradcomp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                values = [getattr(v, "value", None) for v in node.values]
                yield "".join(v if isinstance(v, str) else "{}" for v in values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("table", ["traffic.txt", "traffic-tensorflow.txt"])
def test_the_tables_of_traffic_are_the_measured_ones(table):
    """`make traffic` writes them."""
    assert (DOCS / "measured" / table).read_text() in (DOCS / "gpu.md").read_text()


def test_messages_are_those_of_the_package():
    """The headings of the page, as far as they quote us."""
    ours = (DOCS / "troubleshooting.md").read_text().partition("## From Horovod")[0]
    headings = re.findall(r"^### `(.+)`$", ours, re.MULTILINE)
    assert len(headings) > 20
    known = list(literals())
    for heading in headings:
        for piece in heading.split("..."):
            assert any(piece.strip(" .") in text for text in known), heading


def test_a_page_that_is_wrong_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ cd /\n$ echo $PWD 1\n/ 22\n$ echo here\nthere\n$ echo on\n```\n")
    (problem,) = follow.follow([page], tmp_path)
    assert "has not printed" in problem and "there" in problem
    page.write_text("```console\n$ echo 1\n$ false\n$ echo never\n```\n")
    (problem,) = follow.follow([page], tmp_path)
    assert "page.md:3: failed: $ false" in problem
    page.write_text("```console\n$ sleep 60\n```\n")
    (problem,) = follow.follow([page], tmp_path, deadline=0.5)
    assert "failed: $ sleep 60" in problem
    page.write_text("```{code-block} diff\n:caption: a\n\n-b\n+c\n```\n")
    with pytest.raises((SyntaxError, KeyError)):
        follow.follow([page], tmp_path)


def test_numbers_may_differ_and_words_may_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo 'a 1.5 b'; echo c\na  22 b\n...\nc\n```\n")
    assert follow.follow([page], tmp_path) == []


def test_the_number_of_methods_is_that_of_the_package():
    """Wherever a text counts them: the exported compressors, of which "none" is no method.

    Wrappers (`robust`, `balanced`, `after`, `partition`), local steps and momenta take a method and
    are none. Settings of a method are no methods either.
    """
    names = {name for name in hvd_gradcomp.__all__ if name.endswith("Compressor")}
    count = len(names - {"Compressor", "NoneCompressor"})
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    files += [ROOT / "CITATION.cff", ROOT / "SECURITY.md", ROOT / "pyproject.toml"]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "api").glob("*.rst")]
    number = r"(1[1-9]|[2-9]\d|[Tt]hirteen|[Tt]wenty(?:-\w+)?|[Tt]hirty(?:-\w+)?)"
    pattern = re.compile(
        rf"\b{number} (?:\w+ )?(?:methods|compressors)\b|^\| methods \| (\d+)", re.MULTILINE
    )
    counted = {
        (file.name, hit[1] or hit[2])
        for file in files
        for hit in pattern.finditer(file.read_text())
    }
    assert {name for name, _ in counted} >= {"README.md", "compared.md", "CHANGELOG.md"}
    assert {number for _, number in counted} == {str(count)}, counted


def test_the_table_of_methods_is_that_of_the_code():
    """`python -m docs.methods` writes it."""
    page = methods.PAGE.read_text()
    assert methods.updated(page) == page


def test_the_table_of_methods_has_all_of_them():
    names = {name for name in hvd_gradcomp.__all__ if name.endswith("Compressor")} - {"Compressor"}
    rows = {type(row.instance).__name__: row for row in methods.METHODS if row.in_step is None}
    assert rows.keys() == names | {"Balanced", "Robust"}
    for name in names:
        row, text = rows[name], getattr(hvd_gradcomp, name).__doc__
        made = eval(row.code, vars(hvd_gradcomp))
        assert takes_momentum(made) == (row.optimizer == methods.TAKES_OVER), name
        plain = "SGD without momentum" in " ".join(text.split())
        assert plain == (row.optimizer == methods.PLAIN_SGD), name


def test_bytes_that_were_counted_are_those_of_the_settings_in_the_table():
    titles = {row["key"]: row["title"] for row in json.loads(methods.COUNTED.read_text())["rows"]}
    for row in methods.METHODS:
        if row.counted:
            assert brief(eval(row.code, vars(hvd_gradcomp))) == titles[row.counted]
    assert methods.elements() == json.loads(methods.COUNTED.read_text())["elements"]


@pytest.mark.parametrize(
    "key, code", [("qsgd", "QSGDCompressor(bits=4)"), ("dgc", "DGCCompressor()")]
)
def test_bytes_that_are_computed_are_those_that_were_counted(key, code):
    counted = json.loads(methods.COUNTED.read_text())
    sent = next(row["bytes"] for row in counted["rows"] if row["key"] == key)
    row = next(row for row in methods.METHODS if row.code == code)
    for ranks in methods.HOSTS:
        measured = counted["dense"][str(ranks)] / sent[str(ranks)]
        assert methods.fewer(row, ranks) == pytest.approx(measured, rel=0.02)


def test_the_ops_that_a_frontend_has_to_write_are_counted():
    text = (DOCS / "extending-frontend.md").read_text()
    modules = [sys.modules[getattr(Ops, name).__module__] for name in Ops.__abstractmethods__]
    counts = Counter(module.__name__.rpartition(".")[2] for module in modules)
    listed = {name: int(n) for name, n in re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.M)}
    assert listed == counts
    assert f"The abstract ones, {sum(counts.values())} today" in text


def test_what_a_transport_has_is_listed_for_contributors():
    text = (DOCS / "extending-transport.md").read_text()
    members = {*Backend.__annotations__, *vars(Backend), *vars(Transport)}
    members |= {*vars(C10dBackend), *vars(ProcessGroup), "sparse_allreduce", "make_groups"}
    for name in members:
        if not name.startswith("_"):
            assert re.search(rf"`{name}(\(\)[^`]*)?`", text), name
