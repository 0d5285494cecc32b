"""Build of the C code: `_native` for all, and a library of custom ops for TensorFlow.

Packaging runs this file before the package can be imported, and `hvd-gradcomp build` runs it
later; so it imports only the standard library. A library of custom ops fits one version of
TensorFlow and one version of its source; its file name has both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "_native.so"  # loaded by ctypes, so it fits any Python
NATIVE = (
    "c/bins.c",
    "c/bitpack.c",
    "c/calls.c",
    "c/checks.c",
    "c/chunks.c",
    "c/elementwise.c",
    "c/elias_fano.c",
    "c/factors.c",
    "c/floats.c",
    "c/groups.c",
    "c/indexing.c",
    "c/levels.c",
    "c/powers.c",
    "c/signs.c",
    "c/threshold.c",
    "c/tiles.c",
    "c/topk.c",
    "c/transpose.c",
    "c/votes.c",
)
HEADERS = (
    "c/calls.h",
    "c/groups.h",
    "c/kernels.h",
    "c/planes.h",
    "c/rows.h",
    "c/simd.h",
    "c/threads.h",
)
OPERATIONS = "c/tensorflow.cc"
# No fused multiply-add: results equal those of the frameworks to the bit.
# Hidden: functions have the names of system functions.
FLAGS = (
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
THREADS = ("-fopenmp",)  # without OpenMP in the compiler, one thread does it all
_C, _CPP = ("CC", "gcc", "cc"), ("CXX", "g++", "c++")  # environment variable, then default names
_IMPORT, _COMPILE = 180, 900  # timeouts in seconds, for a busy machine
_LINES = 12  # shown of a compiler's output
_ASK = """
import json
import tensorflow as tf
flags = tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()
print("@", json.dumps([tf.__version__, *flags]))
"""


class BuildError(Exception):
    """Failure to build a library, with the reason."""


def operations(version: str) -> str:
    """Return the file name of the custom ops for a TensorFlow and the present source."""
    digest = zlib.crc32(
        b"".join((HERE / name).read_bytes() for name in (*NATIVE, *HEADERS, OPERATIONS))
    )
    return f"_tensorflow-{version}-{digest:08x}.so"


def others(version: str) -> list[str]:
    """Return the other versions of TensorFlow that custom ops are built for."""
    built = {
        path.stem.split("-", 1)[1].rpartition("-")[0] for path in HERE.glob("_tensorflow-*.so")
    }
    return sorted(built - {version})


def compiles() -> bool:
    """Return True if a C and a C++ compiler are found."""
    try:
        return bool(_compiler(*_C) and _compiler(*_CPP))
    except BuildError:
        return False


def build_native(anew: bool = False) -> Path:
    """Compile the C library, unless it exists and is newer than its source.

    Args:
        anew: compile it in any case.

    Returns:
        The file.

    Raises:
        BuildError: it cannot be built.
    """
    target = HERE / LIBRARY
    sources = [HERE / name for name in NATIVE]
    newest = max((HERE / name).stat().st_mtime for name in (*NATIVE, *HEADERS))
    if target.exists() and not anew and target.stat().st_mtime >= newest:
        return target
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, target.name)
        command: list[str | Path] = [
            _compiler(*_C),
            *FLAGS,
            "-shared",
            "-fPIC",
            *sources,
            "-o",
            made,
        ]
        try:
            _run([*command, *THREADS])
        except BuildError:
            _run(command)
        _place(made, target)
    return target


def build_operations(folder: Path | None = None, anew: bool = False) -> Path:
    """Compile the custom ops for the installed TensorFlow, unless they exist.

    Args:
        folder: output folder; that of this file if not given.
        anew: compile them even if they exist.

    Returns:
        The file.

    Raises:
        BuildError: they cannot be built.
    """
    version, compiling, linking = _tensorflow()
    folder = folder or HERE
    target = folder / operations(version)
    if target.exists() and not anew:
        return target
    c, cpp = _compiler(*_C), _compiler(*_CPP)
    with tempfile.TemporaryDirectory() as scratch:
        custom, made = Path(scratch, "operations.o"), Path(scratch, target.name)
        native = [Path(scratch, Path(name).stem + ".o") for name in NATIVE]
        plain = ["-O2", "-DNDEBUG", "-fPIC", "-w"]
        with ThreadPoolExecutor(2) as pool:  # the first takes as long as all others
            first = pool.submit(
                _run, [cpp, *compiling, *plain, "-c", HERE / OPERATIONS, "-o", custom]
            )
            compilations = [
                pool.submit(_run, [c, *FLAGS, "-fPIC", "-c", HERE / name, "-o", result])
                for name, result in zip(NATIVE, native)
            ]
            for compiled in (*compilations, first):
                compiled.result()
        _run([cpp, "-shared", custom, *native, *linking, "-o", made])
        _place(made, target)
    for old in folder.glob(f"_tensorflow-{version}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _tensorflow() -> tuple[str, list[str], list[str]]:
    """Return TensorFlow's version and flags, from a subprocess: an import may crash or hang."""
    answer = _run([sys.executable, "-c", _ASK], _IMPORT)
    line = next(line for line in answer.splitlines() if line.startswith("@ "))
    version, compiling, linking = json.loads(line[2:])
    return version, compiling, linking


def _compiler(variable: str, *names: str) -> str:
    chosen = os.environ.get(variable) or next((name for name in names if shutil.which(name)), "")
    if not chosen:
        raise BuildError(f"there is no compiler: none of {', '.join(names)} is on the PATH")
    return chosen


def _run(command: Sequence[str | Path], limit: float = _COMPILE) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-_LINES:])
        raise BuildError(f"{command[0]} fails with {done.returncode}:\n{last}")
    return done.stdout


def _place(made: Path, target: Path) -> None:
    """Install atomically: processes may have an older version loaded, or load it now."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        shutil.copy(made, part)
        part.replace(target)
    except OSError as error:
        raise BuildError(f"{target} cannot be written: {error}") from error
