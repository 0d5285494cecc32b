"""Versions that several files name: of the package, of what it supports, and of what CI tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hvd_gradcomp
from hvd_gradcomp.cli import doctor
from hvd_gradcomp.core.installation import HOROVOD
from hvd_gradcomp.ops.torch import base

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "docs" / "support.md"
TYPES = {"article", "conference-paper"}


def text(name):
    return (ROOT / name).read_text()


def releases():
    """The changelog's versions and their dates, the newest first."""
    return re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", text("CHANGELOG.md"), re.M)


def pins(name):
    """What a requirements file installs on CI's Python: versions by package."""
    lines = re.findall(r"^([\w-]+)==([\w.]+)(?: ; python_version (.+))?$", text(name), re.M)
    return {
        package: version
        for package, version, marker in lines
        if not marker or re.fullmatch(r'(>= "3\.1[01]"|== "3\.11")', marker)
    }


def supported():
    """The table of the page: the other cells by the first one."""
    rows = re.findall(r"^\|(.+)\|$", SUPPORT.read_text(), re.M)
    split = ([cell.strip() for cell in row.split("|")] for row in rows)
    return {first: cells for first, *cells in split}


def test_the_version_is_the_same_everywhere():
    version = hvd_gradcomp.__version__
    assert releases()[0][0] == version
    assert re.findall(r"^version: (.+)$", text("CITATION.cff"), re.M) == [version]
    assert f"\nVersion {version} is " in SUPPORT.read_text()
    shown = re.findall(r"^ok +hvd_gradcomp +([\d.]+),", text("docs/cli.md"), re.M)
    assert shown and {*shown} == {version}


def test_the_changelog_and_the_citation_have_one_date():
    assert re.findall(r'^date-released: "(.+)"$', text("CITATION.cff"), re.M) == [releases()[0][1]]
    newest = re.search(r"^## (.+)$", text("CHANGELOG.md"), re.M)
    assert newest and newest[1] == "[Unreleased]"


def test_the_changelog_can_be_read_in_two_minutes():
    """A version's part is for users; history is in the commits."""
    headings = r"^### (Added|Changed|Deprecated|Fixed|Removed|Security)$"
    for part in re.split(r"^## ", text("CHANGELOG.md"), flags=re.M)[1:]:
        assert len(part.splitlines()) <= 70, part.splitlines()[0]
        assert len(re.findall(r"^### ", part, re.M)) == len(re.findall(headings, part, re.M))


def test_the_citation_is_a_valid_file():
    """By the parts of CFF 1.2.0's schema that it uses."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load(text("CITATION.cff"))
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert isinstance(cited["version"], str) and isinstance(cited["date-released"], str)
    assert f'license = "{cited["license"]}"' in text("pyproject.toml")
    assert [author["name"] for author in cited["authors"]] == ["The hvd_gradcomp authors"]
    assert len(cited["references"]) == 4
    for paper in cited["references"]:
        assert paper["type"] in TYPES and paper["title"] and isinstance(paper["year"], int)
        assert paper["authors"] and all(
            {*author} == {"given-names", "family-names"} for author in paper["authors"]
        )
        assert paper["url"] in text("README.md")


def test_tested_versions_are_those_that_are_installed():
    tested = {first: cells[1].partition(",")[0] for first, cells in supported().items()}
    installed = pins("docker/frameworks.txt")
    for first in ("PyTorch", "PyTorch, for FSDP2", "PyTorch, for `track_moments`"):
        assert tested[first] == installed["torch"]
    for first in ("TensorFlow", "TensorFlow, for tapes alone"):
        assert tested[first] == installed["tensorflow-cpu"]
    assert tested["Keras"] == installed["keras"]
    assert tested["NumPy"] == installed["numpy"]
    assert tested["Horovod"] == HOROVOD
    assert tested["Triton, for kernels on a GPU"] == pins("docker/triton.txt")["triton"]
    workflow = text(".github/workflows/ci.yml")
    assert {*re.findall(r'python-version: "([\d.]+)"', workflow)} == {tested["Python"]}
    system = tested["system"].lower()
    for runner in {*re.findall(r"runs-on: (\w+)-([\d.]+)", workflow)}:
        assert " ".join(runner) in system
    assert "debian 12" in system and "debian:bookworm" in text("docker/cpu.Dockerfile")


def test_the_oldest_that_are_tested_are_those_of_make_test_older():
    besides = {first: cells[2] for first, cells in supported().items()}
    (torch,) = re.findall(r"torch-without-cuda\.sh \S+ ([\d.]+)$", text("Makefile"), re.M)
    tensorflow = pins("docker/older.txt")["tensorflow-cpu"]
    assert besides["PyTorch"].startswith(f"{torch}, in one process (`make test-older`)")
    tapes = besides["TensorFlow, for tapes alone"]
    assert tapes.startswith(f"{tensorflow}, in one process (`make test-older`)")


def test_supported_versions_are_those_that_the_package_takes():
    oldest = {first: cells[0].removesuffix(" and newer") for first, cells in supported().items()}
    project = text("pyproject.toml")
    (python,) = re.findall(r'^requires-python = ">=(.+)"$', project, re.M)
    assert oldest["Python"] == python
    for first, package in (("PyTorch", "torch"), ("TensorFlow", "tensorflow"), ("Keras", "keras")):
        assert f'"{package}>={oldest[first]}"' in project
    torch, tensorflow = (".".join(map(str, f.oldest)) for f in doctor._FRAMEWORKS)
    assert (oldest["PyTorch"], oldest["TensorFlow, for tapes alone"]) == (torch, tensorflow)
    assert oldest["Horovod"] == f"{HOROVOD}, or none"
    units = text("hvd_gradcomp/torch/hooks/fsdp_units.py")
    assert f"of PyTorch {oldest['PyTorch, for FSDP2']} or newer" in units
    tracker = text("hvd_gradcomp/torch/moments/tracker.py")
    assert f"track_moments needs PyTorch {oldest['PyTorch, for `track_moments`']}," in tracker
    assert oldest["Triton, for kernels on a GPU"] == ".".join(map(str, base.TRITON))


def test_libraries_that_train_are_those_of_the_tests():
    named = {"PEFT": "peft", "Ray": "ray"}
    versions = {**pins("docker/clients.txt"), **pins("docker/ray.txt")}
    part = SUPPORT.read_text().partition("**Libraries that train**")[2].partition("\n- ")[0]
    shown = re.findall(r"(\w+)\s([\d.]+\d)", part)
    assert len(shown) == 8
    for name, version in shown:
        assert versions[named.get(name, name.lower())] == version, name
