"""Which module may import what; runs without any framework, by reading the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_gradcomp

ROOT = Path(hvd_gradcomp.__file__).parent
MODULES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))

PYTORCH = ("ops/torch/", "tuning/")
HOROVOD = "tuning/over_horovod.py"  # besides the frontends
KERNELS = ("ops/triton/",)
TENSORFLOW = ("tensorflow/", "ops/tensorflow/")

# From the bottom up: a room imports only from itself and from those below it.
FLOORS = (
    "core",
    "ops",
    "method",
    "codecs",
    "algorithms",
    "monitoring",
    "runtime",
    "checkpoint",
    "planning",
    "",  # the public names, and `testing`
    "torch",
    "tensorflow",
    "tuning",
    "cli",
)
# The rooms of a frontend, likewise; "" is its public names.
ROOMS = {
    "torch": (
        "interop",
        "moments",
        "comm",
        "reduce",
        "local",
        "monitoring",
        "hooks",
        "membership",
        "drop_in",
        "",
    ),
    "tensorflow": ("interop", "comm", "reduce", "local", "", "keras"),
}
LARGEST = 20  # files in a folder
TOP = {"__init__.py", "__main__.py", "testing.py"}


def named(node: ast.AST) -> set[str]:
    """Modules that an import names, and what may be modules."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def imported(module: str, types: bool = False) -> set[str]:
    """Modules imported when this one is, not inside functions; for types alone only if asked."""
    names: set[str] = set()

    def visit(body):
        for node in body:
            names.update(named(node))
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                visit([*node.body * types, *node.orelse])
            elif isinstance(node, (ast.If, ast.Try)):
                visit(node.body)

    visit(ast.parse((ROOT / module).read_text()).body)
    return names


def roots(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(module)}


def targets(module: str, types: bool = False) -> set[str]:
    """Modules of the package that this one imports; what is imported for types alone if asked."""
    return within(module, imported(module, types))


def within(module: str, names: set[str]) -> set[str]:
    """Those of the package, without this one."""
    modules = set()
    for name in names:
        path = name.split(".")[1:]
        if name.partition(".")[0] == "hvd_gradcomp":
            modules |= {"/".join(path) + ".py", "/".join([*path, "__init__.py"])} & set(MODULES)
    return modules - {module}


def everywhere(module: str) -> set[str]:
    """The same, with what is imported inside functions."""
    nodes = ast.walk(ast.parse((ROOT / module).read_text()))
    return within(module, set().union(*(named(node) for node in nodes)))


def test_the_top_has_the_public_names_alone():
    assert {m for m in MODULES if "/" not in m} == TOP
    assert {m.partition("/")[0] for m in MODULES if "/" in m} == set(FLOORS) - {""}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="needs sys.stdlib_module_names")
@pytest.mark.parametrize("module", MODULES)
def test_only_frontends_import_frameworks(module):
    foreign = roots(module) - set(sys.stdlib_module_names) - {"hvd_gradcomp", ""}
    allowed: set[str] = set()
    if module == "planning/description.py":
        allowed = {"tabulate"}
    elif module.startswith(PYTORCH) and module != HOROVOD:
        allowed = {"torch"}
    elif module.startswith(KERNELS):
        allowed = {"torch", "triton"}
    elif module.startswith("ops/tensorflow/") or module in TENSORFLOW:
        allowed = {"tensorflow"}
    elif module.startswith("cli/"):
        allowed = {"click", "rich", "tabulate"}
    elif module.startswith("torch/") or module == HOROVOD:
        allowed = {"torch", "horovod"}
        if module == "torch/comm/broadcast_objects.py":
            allowed.add("cloudpickle")  # by which Horovod broadcasts objects
        if module == "torch/interop/safetensors_file.py":
            allowed.add("safetensors")
    elif module.startswith("tensorflow/"):
        allowed = {"tensorflow", "horovod", "keras"}
        if module == "tensorflow/checkpoint.py":
            allowed |= {"numpy", "safetensors"}  # arrays, and the files they are in
    assert foreign <= allowed


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__main__.py"])
def test_imports_point_down(module):
    """For types too."""
    parts = split(module)
    for target in targets(module, types=True):
        of_target = split(target)
        assert FLOORS.index(of_target[0]) <= FLOORS.index(parts[0]), f"{module} imports {target}"
        rooms = ROOMS.get(parts[0])
        if rooms and of_target[0] == parts[0]:
            assert rooms.index(of_target[1]) <= rooms.index(parts[1]), f"{module} imports {target}"


def split(module: str) -> tuple[str, str]:
    """Folder of a module, and the folder in it; "" for none."""
    folders = [*module.split("/")[:-1], "", ""]
    return folders[0], folders[1]


def test_no_folder_has_too_many_files():
    folders = [m.rpartition("/")[0] for m in MODULES if not m.endswith("__init__.py")]
    assert not {folder for folder in folders if folders.count(folder) > LARGEST}


def test_no_circles():
    """Of modules, for types and in functions too; a package and its parts Python takes apart."""
    modules = {m: everywhere(m) for m in MODULES if not m.endswith("__init__.py")}
    while modules:
        free = {m for m, below in modules.items() if not below & set(modules)}
        assert free, f"these import each other: {sorted(modules)}"
        modules = {m: below for m, below in modules.items() if m not in free}


def test_the_package_imports_without_any_framework():
    code = (
        "import sys, hvd_gradcomp, hvd_gradcomp.testing, hvd_gradcomp.runtime.config_check;"
        "heavy = {'torch', 'tensorflow', 'keras', 'horovod', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TREES = {
    ".".join(["hvd_gradcomp", *Path(m).with_suffix("").parts]).removesuffix(".__init__"): ast.parse(
        (ROOT / m).read_text()
    )
    for m in MODULES
}


# Private names of frameworks and of Python that the package uses.
FOREIGN = {"_replace", "_asdict", "_fields", "_make", "_C", "_indices", "_values", "_version"}


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in FOREIGN


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines or stores, attributes included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_accesses(tree: ast.Module, of_others: set[str]) -> set[str]:
    """Private names of other modules that a module uses."""
    uses = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            by_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not by_itself and node.attr in of_others:
                uses.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvd_gradcomp"):
            names = [alias.name for alias in node.names if is_private(alias.name)]
            uses |= {name for name in names if f"{node.module}.{name}" not in TREES}
    return uses


def test_nobody_touches_the_private_names_of_another_module():
    """But for what the optimizer mixin and Horovod's own class keep in one object."""
    allowed = {"distributed._parameter_names", "distributed._exchange_by"}  # the first: Horovod's
    names = {module: defined(tree) for module, tree in TREES.items()}
    everyone = set().union(*names.values())
    uses = {m: private_accesses(tree, everyone - names[m]) - allowed for m, tree in TREES.items()}
    assert not {module: some for module, some in uses.items() if some}
