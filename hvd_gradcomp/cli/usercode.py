"""Static check of user code for uses of stock Horovod that do not work."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import hvd_gradcomp

_KERAS = ("horovod.tensorflow.keras", "horovod.keras", "horovod.tensorflow")
_OPTIMIZER = "DistributedOptimizer"


class Fault(NamedTuple):
    """Fault in user code: its location, a description, and a remedy."""

    path: Path
    line: int
    what: str
    remedy: str


def sources(paths: Iterable[str]) -> list[Path]:
    """List the Python files of paths and folders, without hidden and installed ones."""
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        below = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in below:
            parts = file.relative_to(path).parts
            if "site-packages" not in parts and not any(part.startswith(".") for part in parts):
                files[file] = None
    return list(files)


def faults(path: Path, *, keras3: bool) -> Iterator[Fault]:
    """Yield the faults of one file; each name is assumed to be bound once.

    Args:
        path: a Python file.
        keras3: True if it runs with Keras 3.

    Raises:
        SyntaxError, ValueError, OSError: the file is not Python, or cannot be read.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    names = _imported(tree)
    values = _assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            module, _, last = _full(node, names).rpartition(".")
            if keras3 and last == _OPTIMIZER and module in _KERAS:
                frontend = "tensorflow.keras" if "keras" in module else "tensorflow"
                what = f"{module}.{_OPTIMIZER} reduces nothing under Keras 3, and raises no error"
                yield Fault(path, node.lineno, what, f"import hvd_gradcomp.{frontend} as hvd")
        elif isinstance(node, ast.Call):
            package, _, rest = _full(node.func, names).partition(".")
            if package != "horovod":
                continue
            module = rest.rpartition(".")[0]
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(value, ast.Name):
                    value = values.get(value.id, value)
                name = _compressor(value, names)
                if name:
                    what = f"{name} cannot work inside stock horovod.{module}: it raises an error"
                    frontend = "tensorflow.keras" if module == "keras" else module
                    yield Fault(path, node.lineno, what, f"import hvd_gradcomp.{frontend} as hvd")


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the full names of all imports in a file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds only a, `import a.b as c` binds c to a.b.
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = _OPTIMIZER if alias.name == "*" else alias.name
                names[alias.asname or name] = f"{node.module}.{name}"
    return names


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _full(node: ast.expr, names: dict[str, str]) -> str:
    """Resolve `hvd.init` to `horovod.torch.init`; empty if it is not imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        root = _full(node.value, names)
        return f"{root}.{node.attr}" if root else ""
    return ""


def _compressor(value: ast.expr, names: dict[str, str]) -> str:
    """Return the called class of this package if stock Horovod cannot use it; else empty."""
    if not isinstance(value, ast.Call):
        return ""
    package, _, name = _full(value.func, names).rpartition(".")
    kind = getattr(hvd_gradcomp, name, None)
    refuses = getattr(kind, "compress", None) is hvd_gradcomp.Compressor.compress
    return name if package.partition(".")[0] == hvd_gradcomp.__name__ and refuses else ""
