"""Does what the pages say, page by page, and builds the site without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs import follow
from tests.parallel.forkserver import EXECUTABLES, interpreter, python
from tests.parallel.launch import HOROVODRUN, environment

pytestmark = pytest.mark.parallel
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if not {"_build", "generated"} & {*page.parts} and follow.script([page])[1]
)


# What these two run is run by other tests as well: `compare`, and the recipes of `test_clients`.
LONG = {"choosing", "libraries"}
# What a user follows first, by horovodrun and by torchrun, is started as usual, and so is Ray; the
# programs of other pages are children of a server that has imported PyTorch.
AS_USUAL = {"first-run", "without-horovod", "ray"}
NEEDS = {"trainers": ("transformers", "accelerate", "lightning"), "ray": ("ray",)}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.stem, marks=[pytest.mark.sweep] if p.stem in LONG else [])
        for p in PAGES
    ],
)
def test_following(page, tmp_path, monkeypatch):
    paths = [str(ROOT)]
    for package in NEEDS.get(page.stem, ()):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        paths.append(str(Path(spec.origin).parents[1]))
    # As they are installed beside this Python, but for what `tests.parallel.horovodrun` leaves out.
    variables = {**environment(), **({"FORKSERVER": "0"} if page.stem in AS_USUAL else {})}
    imports = "horovod.torch" if "horovodrun" in page.read_text() else "torch"
    imports = "trainers" if page.stem == "trainers" else imports
    variables = interpreter(tmp_path / "bin", imports, variables)
    interpreted = [variables.get(EXECUTABLES[0], sys.executable), "-m"]
    commands = {
        "horovodrun": [*python("horovodrun", variables), "-m", HOROVODRUN[-1]],
        "hvd-gradcomp": [*interpreted, "hvd_gradcomp"],
        "torchrun": [*interpreted, "torch.distributed.run"],
    }
    for name, words in commands.items():
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o755)
    for name in {*EXECUTABLES} & {*variables}:
        monkeypatch.setenv(name, variables[name])
    folders = (script.parent, Path(sys.executable).parent, os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    deadline = 500 if page.stem == "ray" else 300  # Ray takes minutes to start
    problems = follow.follow([page], tmp_path, deadline=deadline)
    assert not problems, "\n\n".join(problems)


def formulas_not_drawn(html):
    """Finds dollars beside code, as of a formula that a line's first `+` or `-` has cut in two."""
    text = re.sub(r"<(pre|code|script|style|title)\b.*?</\1>", "", html, flags=re.DOTALL)
    return re.findall(r"[^\n]{,40}\$[^\n]{,40}", re.sub(r"<[^>]*>", "", text))


def test_a_formula_that_is_not_drawn_is_noticed():
    html = "<p>then $r = r</p>\n<ul><li>g$.</li></ul>"
    assert formulas_not_drawn(html) == ["then $r = r", "g$."]
    assert not formulas_not_drawn("<p>a<code>$HOME</code></p><pre><span>$</span> ls</pre>")


def test_site(tmp_path):
    """No warning, no network while it is built where that can be had, no asset from elsewhere."""
    pytest.importorskip("sphinx")
    pytest.importorskip("sphinx_copybutton")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)]
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode == 0:
        build = [*alone, *build]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"([^\"]+)\"", page.read_text()
        )
        away = [url for url in loaded if re.match(r"(?:https?:)?//", url)]
        assert not away, f"{page.name}: {away}"
        if "_modules" not in page.parts:
            raw = formulas_not_drawn(page.read_text())
            assert not raw, f"{page.name} shows the source of a formula: {raw}"
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style.name
