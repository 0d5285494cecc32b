"""How large the rooms of the package are, and what its types leave open, at any commit.

    python -m benchmarks.house febe006 HEAD

Counts of the Python files in `hvd_gradcomp`: classes by lines and by methods, `# type: ignore`,
the name `Any`, `object.__setattr__`, and modules that import each other, for types too, at their
heads or only inside functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator

from tabulate import tabulate

PACKAGE = "hvd_gradcomp"


def sources(commit: str) -> dict[str, str]:
    """The package's files at a commit, by module."""
    command = ["git", "archive", commit, PACKAGE]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                name = member.name.removesuffix(".py").removesuffix("/__init__")
                found[name.replace("/", ".")] = file.read().decode()
    return found


def classes(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """(lines, methods, name) of each class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(one, ast.FunctionDef) for one in node.body)
            yield (node.end_lineno or 0) - node.lineno + 1, methods, node.name


def heads(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module outside of its functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield from heads(node)


def imports(module: str, nodes: Iterator[ast.AST], modules: dict[str, str]) -> set[str]:
    """Modules of the package that this one names; not the packages that it is in."""
    named = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= {part if part in modules else node.module for part in parts}
    return {one for one in named if one in modules and not f"{module}.".startswith(f"{one}.")}


def in_circles(graph: dict[str, set[str]]) -> int:
    """How many modules lead back to themselves."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            one = ahead.pop()
            if one not in found:
                found.add(one)
                ahead += graph[one]
        return found

    return sum(module in reached(module) for module in graph)


def counts(commit: str) -> dict[str, object]:
    """What the table says of a commit."""
    files = sources(commit)
    trees = {module: ast.parse(text) for module, text in files.items()}
    text = "\n".join(files.values())
    every = [one for tree in trees.values() for one in classes(tree)]

    def circles(nodes: Callable[[ast.AST], Iterator[ast.AST]]) -> int:
        return in_circles({m: imports(m, nodes(tree), files) for m, tree in trees.items()})

    names = [node for tree in trees.values() for node in ast.walk(tree) if _is_any(node)]
    lines, _, longest = max(every)
    methods, widest = max((methods, name) for _, methods, name in every)
    return {
        "lines": f"{text.count(chr(10)):,}",
        "files": len(files),
        "largest class, lines": f"{lines} ({longest})",
        "largest class, methods": f"{methods} ({widest})",
        "classes above 300 lines": sum(lines > 300 for lines, _, _ in every),
        "classes above 20 methods": sum(methods > 20 for _, methods, _ in every),
        "type: ignore": len(re.findall(r"# type: ignore", text)),
        "Any": len(names),
        "Any, in 1,000 lines": f"{1000 * len(names) / text.count(chr(10)):.1f}",
        "state: Any": len(re.findall(r"\bstate: Any\b", text)),
        "object.__setattr__": text.count("object.__setattr__"),
        "modules in circles": circles(heads),
        "the same, imports inside functions counted": circles(ast.walk),
    }


def _is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "Any"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    commits = parser.parse_args().commits
    tables = [counts(commit) for commit in commits]
    rows = [(what, *(table[what] for table in tables)) for what in tables[0]]
    print(tabulate(rows, ("", *commits), "github", disable_numparse=True))


if __name__ == "__main__":
    main()
