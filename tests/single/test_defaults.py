"""Defaults are the settings that were measured: code, training, docstring and page say the same.

`docs.methods.METHODS` has a row for each method, which names the training of its defaults in
`docs/measured`. Nothing is trained here.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import ChainMap, defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import hvd_gradcomp as gc
from benchmarks.worth.methods import METHODS as RACED
from docs import methods
from hvd_gradcomp.algorithms.combined.balanced import Balanced
from hvd_gradcomp.algorithms.combined.robust import Robust
from hvd_gradcomp.algorithms.combined.wrappers import After
from hvd_gradcomp.cli import options
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning.methods import ExchangeMethod, Local, Momentum

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"
PACKAGE = ROOT / "hvd_gradcomp"
NO_METHODS = {  # public names that have no setting to measure, and why
    "Compressor": "base class",
    "after": "no optional arguments",
    "partition": "no optional arguments",
    "role": "no optional arguments",
    "smaller": "no optional arguments",
    "OuterSGD": "averages, as `LocalSteps` does by default",
    "QuadraticRule": "its trainings are not in docs/measured",
    "JSONLines": "writer",
    "TensorBoard": "writer",
    "NonFiniteGradientError": "error",
    "PayloadError": "error",
}
ENTRY_POINTS = {  # modules with local steps, and momenta
    "torch/drop_in/wrapped_horovod.py": ("LocalSteps", "MomentumExchange"),
    "torch/local/wrapped_c10d.py": ("LocalSteps", "local_steps", "MomentumExchange"),
    "torch/local/wrapped_fsdp.py": ("local_steps", "MomentumExchange"),
    "torch/trainers.py": ("local_steps",),
    "tensorflow/local_steps.py": ("LocalSteps",),
    "tensorflow/keras/local_steps.py": ("LocalSteps",),
    "tensorflow/keras/momentum_exchange.py": ("MomentumExchange",),
}
EVERYWHERE = [(file, name) for file, names in ENTRY_POINTS.items() for name in names]
SPAN = re.compile(r"`([^`]+)`")


def local_steps(*_, mesh=None, **settings):
    del mesh
    return Local(**settings)


def momentum_exchange(*_, compression=None, **settings):
    return Momentum(compression or gc.OneBitCompressor(), **settings)


NAMES = ChainMap(
    {
        "local_steps": local_steps,
        "LocalSteps": local_steps,
        "MomentumExchange": momentum_exchange,
    },
    vars(gc),
    defaultdict(lambda: 1),  # `steps`, `model`, `optimizer`
)


def name_of(row):
    """Return the public name that a user calls."""
    starred = re.search(r"\*\*(\w+)\(", row.code)
    return starred[1] if starred else row.code.partition("(")[0]


BY_NAME = {}
for each in methods.METHODS:  # the row with a training, or the only one
    if each.measured or name_of(each) not in BY_NAME:
        BY_NAME[name_of(each)] = each
IDS = list(BY_NAME)


def default_of(name):
    """Return the method without optional arguments."""
    row = BY_NAME[name]
    if name in ("sparse_loco", "diloco"):
        return Local(**getattr(gc, name)())
    if isinstance(row.in_step, Momentum):
        return Momentum(row.in_step.compressor)
    if row.in_step is not None:
        return Local()
    if name in ("balanced", "robust"):
        return ExchangeMethod(getattr(gc, name)(row.settings.compressor.inner))
    return ExchangeMethod(getattr(gc, name)())


def unlike(one, other):
    """Return the names of the settings in which two methods or compressors differ."""
    if isinstance(other, After) and not isinstance(one, After):
        return {"after"} | unlike(one, other.then)
    if type(one) is not type(other):
        return {"class"}
    names = set()
    for field in fields(one):
        values = getattr(one, field.name), getattr(other, field.name)
        if values[0] != values[1]:
            nested = isinstance(values[0], Compressor) and field.name != "inner"
            names |= unlike(*values) if nested else {field.name}
    return names


@cache
def rows_of(file):
    content = json.loads((MEASURED / file).read_text())
    if isinstance(content, list):
        return content
    return content["trained"] if "trained" in content else content["rows"]


def recorded(row):
    """Return the method of a row of docs/measured; None if the row records none, or a rule."""
    if "recipe" in row:  # of benchmarks.worth
        one = RACED[row["method"]]
        if one.peer or re.search(r"{|warmup|rate", one.compressor + one.local):
            return None
        settings = {"compressor": one.compressor or "NoneCompressor()", "local": one.local}
    else:
        settings = row.get("settings", row)
    text = settings.get("compressor", settings.get("method"))
    if text is None:
        return None
    text = text.replace("{0}", "1").replace("{1}", "2")  # ends of phases
    compressor = eval(text, vars(gc))
    if settings.get("momenta"):
        return Momentum(compressor, **eval(f"dict({settings['momenta']})", vars(gc)))
    if settings.get("local"):
        local = eval(f"dict({settings['local']})", vars(gc))
        return None if {"fragments", "delay"} & local.keys() else Local(compressor, **local)
    return ExchangeMethod(compressor)


@cache
def trained():
    """Return the methods of all trainings in docs/measured."""
    files = [*MEASURED.glob("papers*/*.json"), *MEASURED.glob("worth*.json")]
    rows = [row for file in files for row in rows_of(file.relative_to(MEASURED))]
    return [method for method in map(recorded, rows) if method is not None]


def documented(text, sign):
    """Return the paragraphs that begin with a sign, or have it, from there on; one line each."""
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [part[part.index(sign) :] for part in parts if sign in part]


def methods_in(text):
    """Return the methods that a text's code constructs, with their code."""
    made = []
    for span in SPAN.findall(" ".join(text.split())):
        try:
            tree = ast.parse(span.replace("**", ""), mode="eval")
        except SyntaxError:
            continue
        made += calls(tree.body)
    return made


def calls(node):
    """Yield the outermost calls that construct a method, inside other calls too."""
    if isinstance(node, ast.Call):
        code = ast.unparse(node)
        if isinstance(node.func, ast.Attribute):  # hvd.LocalSteps(...)
            code = code.replace(ast.unparse(node.func), node.func.attr, 1)
        name = code.partition("(")[0]
        if name in (*IDS, "LocalSteps") and code != f"{name}(...)":
            value = eval(code, {}, NAMES)
            yield code, Local(**value) if isinstance(value, dict) else as_method(value)
            return
        for child in (*node.args, *(word.value for word in node.keywords)):
            yield from calls(child)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for child in node.elts:
            yield from calls(child)


def as_method(value):
    return value if isinstance(value, ExchangeMethod) else ExchangeMethod(value)


def docstring(file, name):
    nodes = ast.parse((PACKAGE / file).read_text()).body
    node = next(node for node in nodes if getattr(node, "name", None) == name)
    return ast.get_docstring(node), node


def is_default(method):
    """Return True if a method has the default settings, around whatever it goes around."""
    compressor = method.compressor
    if isinstance(method, (Local, Momentum)):
        name = "local_steps" if isinstance(method, Local) else "MomentumExchange"
        return any(
            method == default_of(each) for each in (name, "sparse_loco", "diloco") if each in IDS
        )
    if isinstance(compressor, (Balanced, Robust)):
        return unlike(compressor, type(compressor)(compressor.inner)) == set()
    return compressor == type(compressor)()


def test_every_public_method_has_an_entry():
    missing = set(gc.__all__) - {"__version__"} - NO_METHODS.keys() - BY_NAME.keys()
    assert not missing, (
        f"{sorted(missing)}: add a row to docs.methods.METHODS, with measured=Measured(file, key) "
        "of a training with its default settings in docs/measured; or, if nothing can be measured "
        "of it, its name and the reason to NO_METHODS here"
    )
    assert not NO_METHODS.keys() & BY_NAME.keys()
    assert NO_METHODS.keys() <= set(gc.__all__)


@pytest.mark.parametrize("name", IDS)
def test_the_default_is_what_was_measured(name):
    measured = BY_NAME[name].measured
    if measured is None:  # then docstring and page say so, see below
        return
    rows = [
        row for row in rows_of(measured.file) if measured.key in (row.get("key"), row.get("method"))
    ]
    assert rows, f"docs/measured/{measured.file} has no row {measured.key!r}"
    for row in rows:
        method = recorded(row)
        if method is not None:
            assert unlike(default_of(name), method) == set(measured.unlike), (
                f"by default it is {default_of(name)}, and {measured.file} measured {method}: make "
                "that the default, or name what differs in unlike= and on the page"
            )


@pytest.mark.parametrize("row", methods.METHODS, ids=lambda row: row.code)
def test_a_row_with_other_settings_says_why(row):
    default = default_of(name_of(row))
    differs = unlike(default, row.settings) - {"inner"}
    assert bool(differs) == bool(row.chosen), f"{row.settings}, and by default {default}"


def pages_of(row):
    return (methods.PAGE.parent / row.page.partition("#")[0]).resolve()


@pytest.mark.parametrize("name", IDS)
def test_docstring_and_page_name_the_default(name):
    row, default = BY_NAME[name], default_of(name)
    page = pages_of(row).read_text()
    texts = {"page": (page, "**Default:**")}
    if hasattr(gc, name):
        texts["docstring"] = (inspect.getdoc(getattr(gc, name)) or "", "Default:")
    for where, (text, sign) in texts.items():
        paragraphs = documented(text, sign)
        naming = [
            paragraph
            for paragraph in paragraphs
            if any(unlike(default, method) <= {"inner"} for _, method in methods_in(paragraph))
        ]
        assert naming, (
            f"the {where} of {name} names no default: begin a paragraph by {sign} and the code of "
            f"{default}, and say where it was measured, or that it was not measured"
        )
        if row.measured is None:
            assert any("not measured" in paragraph for paragraph in naming), where
    for setting in row.measured.unlike if row.measured else ():
        assert setting == "inner" or setting in page, f"the page does not speak of {setting}"


@pytest.mark.parametrize("file, name", EVERYWHERE)
def test_entry_points_have_the_same_defaults(file, name):
    text, node = docstring(file, name)
    if isinstance(node, ast.ClassDef):
        node = next(each for each in node.body if getattr(each, "name", "") == "__init__")
    arguments = node.args
    values = dict(zip([each.arg for each in arguments.args][::-1], arguments.defaults[::-1]))
    values |= {
        each.arg: value for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults) if value
    }
    momenta = name == "MomentumExchange"
    expected = Momentum() if momenta else Local()
    for setting, value in expected.settings.items():
        if setting in values or file != "torch/trainers.py":  # which passes others on
            assert ast.unparse(values[setting]) in (str(value), "AVERAGING"), setting
    assert ast.unparse(values["compression"]) == ("None" if momenta else "EIGHTH")
    (paragraph,) = documented(text, "Default:")
    first = "warmup_steps" if momenta else "every"
    assert f"`{first}={expected.settings[first]}`" in paragraph
    assert ("not measured" in paragraph) == momenta


def without_tables_of_results(text):
    """Return the lines of a page that recommend: those of no table with measured numbers."""
    lines, results = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            results = False
        elif re.search(r"behind|fewer bytes|at 0\.3", line.partition("\n")[0]) and "`" not in line:
            results = True
        if not results:
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("page", ["docs/which.md", "README.md", "docs/index.md"])
def test_what_pages_recommend_was_measured(page):
    text = (ROOT / page).read_text()
    for code, method in methods_in(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        assert is_default(method) or any(not unlike(method, one) for one in trained()), (
            f"{page}: {code} is not the default, and no training has it"
        )


def test_what_is_recommended_is_the_default():
    text = without_tables_of_results((ROOT / "docs/which.md").read_text())
    for code, method in methods_in(text):
        assert is_default(method), f"docs/which.md: {code} is not the default"


def test_commands_take_the_defaults():
    """By the short names of `bench`, `advise` and `compare`."""
    others = {
        "variance-coded": "for slow links",
        "sparse-gd-coded": "for slow links",
        "chunked-topk-denser": "for local steps",
        "hybrid": "by the gradients' scale",
        "strom": "by the gradients' scale",
        "lgc-server": "another pattern",
    }
    for key, compressor in options.usual(scale=0.5).items():
        assert (compressor == type(compressor)()) == (key not in others), key
    assert others.keys() <= options.usual().keys()


def test_a_default_that_moves_is_noticed(monkeypatch):
    """So that none of the checks above passes whatever the default is."""
    qsgd = gc.QSGDCompressor
    monkeypatch.setattr(gc, "QSGDCompressor", lambda bits=8: qsgd(bits=bits))
    for check in (
        test_the_default_is_what_was_measured,
        test_docstring_and_page_name_the_default,
    ):
        with pytest.raises(AssertionError):
            check("QSGDCompressor")


def test_a_method_without_an_entry_is_noticed(monkeypatch):
    monkeypatch.setattr(gc, "__all__", [*gc.__all__, "NewCompressor"])
    with pytest.raises(AssertionError, match=r"add a row to docs\.methods\.METHODS"):
        test_every_public_method_has_an_entry()
