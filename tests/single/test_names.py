"""Names say what a thing is; runs without any framework, by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("hvd_gradcomp", "benchmarks", "docs", "examples", "tests")

# Participles, pronouns and the like, which fit every value of a function equally well.
RIDDLES = {
    "asked",
    "found",
    "given",
    "heard",
    "held",
    "mine",
    "most",
    "own",
    "room",
    "said",
    "there",
    "told",
    "way",
}


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of all that is defined.

    That is functions, classes, arguments, variables of any kind, attributes that are set, and the
    names that imports give.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def riddles(source: str) -> list[str]:
    """List the names to replace, with their lines; underscores around them do not help."""
    return [
        f"{line}: {name}"
        for line, name in bindings(ast.parse(source))
        if name.strip("_") in RIDDLES
    ]


def files() -> list[str]:
    paths = [path.relative_to(ROOT) for tree in TREES for path in ROOT.joinpath(tree).rglob("*.py")]
    return sorted(path.as_posix() for path in paths)


def test_all_kinds_of_names_are_seen():
    source = """
import this as told
def way(given, *most, key=0, **own): pass
class Room:
    held: int = 0
    def __init__(self): self._found = [mine for mine in ()]
with open(path) as said: there, other = 1, 2
lambda heard: (asked := 1)
"""
    names = [name.strip("_") for _, name in bindings(ast.parse(source))]
    assert {name.lower() for name in names} >= RIDDLES
    assert riddles("class Found:\n    room: int") == ["2: room"], "a class is a noun"


@pytest.mark.parametrize("file", files())
def test_names_say_what_a_thing_is(file):
    assert not riddles((ROOT / file).read_text()), "call it what it is, see CONTRIBUTING's Habits"
