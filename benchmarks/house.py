"""Measures the structure of the package at any commit: types, classes, private accesses, imports.

    python -m benchmarks.house febe006 0d648ff HEAD

Counts of the Python files in `hvd_gradcomp`: private names that another module uses, classes with
all bases that the package defines, classes with a single subclass, `Any`, docstrings that begin
with a question word, modules that import each other (for types too), and the files of the
frontend that one gradient crosses, traced while it does. A "-" says that a commit has no such
frontend.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = "hvd_gradcomp"


def archive(commit: str) -> tarfile.TarFile:
    """Open the package at a commit as an archive."""
    command = ["git", "archive", commit, PACKAGE]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    return tarfile.open(fileobj=io.BytesIO(data))


def sources(commit: str) -> dict[str, str]:
    """Return the package's files at a commit, by module."""
    found = {}
    with archive(commit) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                name = member.name.removesuffix(".py").removesuffix("/__init__")
                found[name.replace("/", ".")] = file.read().decode()
    return found


def classes(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """Yield (lines, methods, name) of each class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(one, ast.FunctionDef) for one in node.body)
            yield (node.end_lineno or 0) - node.lineno + 1, methods, node.name


def heads(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module outside of its functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield from heads(node)


def imports(module: str, nodes: Iterator[ast.AST], modules: dict[str, str]) -> set[str]:
    """Return the modules of the package that this one names; not the packages that it is in."""
    named = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= {part if part in modules else node.module for part in parts}
    return {one for one in named if one in modules and not f"{module}.".startswith(f"{one}.")}


def in_circles(graph: dict[str, set[str]]) -> int:
    """Count the modules that lead back to themselves."""

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


_Class = tuple[str, str]  # its module, and its name


def classes_and_bases(
    trees: dict[str, ast.Module],
) -> dict[_Class, tuple[ast.ClassDef, list[_Class]]]:
    """Return each class of the package, with those of its bases that are in the package."""
    named: dict[str, dict[str, _Class]] = {}
    nodes: dict[_Class, ast.ClassDef] = {}
    for module, tree in trees.items():
        named[module] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named[module][node.name] = module, node.name
                nodes[module, node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    here = alias.asname or alias.name
                    named[module].setdefault(here, (node.module, alias.name))
                    named[module].setdefault(f"{here}.", (whole, ""))
    found = {}
    for key, node in nodes.items():
        bases = []
        for base in node.bases:
            text = ast.unparse(base).partition("[")[0]
            package, _, name = text.rpartition(".")
            target = named[key[0]].get(f"{package}.", ("", ""))[0] if package else None
            bases.append((target, name) if target else named[key[0]].get(text, ("", "")))
        found[key] = node, [base for base in bases if base in nodes]
    return found


def with_bases(trees: dict[str, ast.Module]) -> list[tuple[int, int, str, int]]:
    """Return (lines, methods, name, bases) of each class with all bases that the package defines.

    Methods of bases count there, overridden or not.
    """
    known = classes_and_bases(trees)

    def chain(key: _Class, seen: set[_Class]) -> Iterator[ast.ClassDef]:
        seen.add(key)
        yield known[key][0]
        for base in known[key][1]:
            if base not in seen:
                yield from chain(base, seen)

    sizes = []
    for key in known:
        line = list(chain(key, set()))
        lines = sum((each.end_lineno or 0) - each.lineno + 1 for each in line)
        methods = sum(isinstance(m, ast.FunctionDef) for each in line for m in each.body)
        sizes.append((lines, methods, ".".join(key), len(line) - 1))
    return sizes


def only_heirs(trees: dict[str, ast.Module]) -> list[str]:
    """Return the classes with exactly one subclass in the package."""
    known = classes_and_bases(trees)
    heirs = [base for _, bases in known.values() for base in bases]
    return sorted(".".join(key) for key in known if heirs.count(key) == 1)


# Of NamedTuple, and of PyTorch where it has no public name for the same.
_OF_OTHERS = {"_replace", "_asdict", "_fields", "_make", "_C", "_indices", "_values", "_version"}


def private_accesses(trees: dict[str, ast.Module], strictly: bool = False) -> list[str]:
    """Return the uses of private names that another module of the package defines.

    Args:
        trees: the modules.
        strictly: count private names of other objects than `self` wherever they are defined.
    """
    own: dict[str, set[str]] = {}
    for module, tree in trees.items():
        own[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own[module].add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own[module].add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own[module].add(node.id)
    everyone = set().union(*own.values())
    found = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                known = everyone if strictly else everyone - own[module]
                if not mine and node.attr in known:
                    found.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                names = [alias.name for alias in node.names if _is_private(alias.name)]
                found += [
                    f"{module}:{node.lineno}: {name}"
                    for name in names
                    if f"{node.module}.{name}" not in trees
                ]
    return found


def _is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in _OF_OTHERS


def riddles(trees: dict[str, ast.Module]) -> int:
    """Count the docstrings that begin with a question word or "Of"."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    nodes = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kinds))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return sum(bool(re.match(r"(What|Whether|Of|How|Where|Which)\b", text)) for text in texts)


_CROSSED = """
import sys, torch
files = set()
def seen(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and "/hvd_gradcomp/" in name:
        files.add(name.rpartition("/hvd_gradcomp/")[2])
model = torch.nn.Linear(3, 2, bias=False)
x = torch.ones(1, 3)
if sys.argv[1] == "horovod":
    import hvd_gradcomp.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
        compression=hvd.StromCompressor(0.1))
else:
    import torch.distributed as dist
    from hvd_gradcomp.torch import ddp
    from hvd_gradcomp import StromCompressor
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = torch.nn.parallel.DistributedDataParallel(model)
    ddp.compress(model, StromCompressor(0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = model(x).sum()
    if step == 2:
        import threading
        threading.setprofile_all_threads(seen) if sys.version_info >= (3, 12) else None
        sys.setprofile(seen)
    loss.backward()
    sys.setprofile(None)
    optimizer.step()
    optimizer.zero_grad()
print(len([f for f in files if f.startswith(("torch/", "engine/", "runtime/"))]), *sorted(files))
"""


def crossed(commit: str, host: str) -> str:
    """Count the files of the frontend and its runtime that one gradient crosses in one backward.

    Traced on one rank, for a model of one layer, in the third step.

    Args:
        commit: whose package runs.
        host: "horovod" or "ddp".

    Returns:
        The number; "-" if the commit has no such frontend.

    Raises:
        RuntimeError: the backward fails, although there is one.
    """
    with tempfile.TemporaryDirectory() as folder, archive(commit) as tar:
        tar.extractall(folder, filter="data")
        if host == "ddp" and not [*Path(folder, PACKAGE, "torch").glob("ddp*")]:
            return "-"
        done = subprocess.run(
            [sys.executable, "-c", _CROSSED, host],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": folder},
            cwd=folder,
        )
    if done.returncode:
        raise RuntimeError(f"{commit}, {host}: {done.stderr[-2000:]}")
    return done.stdout.partition(" ")[0]


def counts(commit: str) -> dict[str, object]:
    """Return the table's column of a commit."""
    files = sources(commit)
    trees = {module: ast.parse(text) for module, text in files.items()}
    text = "\n".join(files.values())
    every = [one for tree in trees.values() for one in classes(tree)]

    def circles(nodes: Callable[[ast.AST], Iterator[ast.AST]]) -> int:
        return in_circles({m: imports(m, nodes(tree), files) for m, tree in trees.items()})

    names = [node for tree in trees.values() for node in ast.walk(tree) if _is_any(node)]
    lines, _, longest = max(every)
    whole = with_bases(trees)
    above = [size for size in whole if not size[2].startswith(f"{PACKAGE}.ops.")]

    def described(size: tuple[int, int, str, int]) -> str:
        lines, methods, name, bases = size
        return f"{lines}, {methods} ({name.rpartition('.')[2]}, {bases} bases)"

    return {
        "lines": f"{text.count(chr(10)):,}",
        "files": len(files),
        "private accesses across modules": len(private_accesses(trees)),
        "private names of others than self": len(private_accesses(trees, strictly=True)),
        "self: Any": len(re.findall(r"\bself: Any\b", text)),
        "optimizer: Any": len(re.findall(r"\boptimizer: Any\b", text)),
        "state: Any": len(re.findall(r"\bstate: Any\b", text)),
        "Any": len(names),
        "type: ignore": len(re.findall(r"# type: ignore", text)),
        "object.__setattr__": text.count("object.__setattr__"),
        "largest class, lines": f"{lines} ({longest})",
        "with its bases, lines and methods": described(max(whole)),
        "the same, without operations": described(max(above)),
        "classes with one subclass": len(only_heirs(trees)),
        "docstrings that begin with What, Of, ...": riddles(trees),
        "files that a gradient crosses, Horovod": crossed(commit, "horovod"),
        "the same, by the DDP hook": crossed(commit, "ddp"),
        "modules in circles": circles(heads),
        "the same, imports inside functions counted": circles(ast.walk),
    }


def _is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "Any"


def main() -> None:
    from tabulate import tabulate

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    commits = parser.parse_args().commits
    tables = [counts(commit) for commit in commits]
    rows = [(what, *(table[what] for table in tables)) for what in tables[0]]
    print(tabulate(rows, ("", *commits), "github", disable_numparse=True))


if __name__ == "__main__":
    main()
