"""Where Horovod's tests and examples come from, and how this package is put in their place.

What is changed is a list of substitutions, most of them for both sides: today's frameworks refuse
what those of 2023 took. Beyond that our side differs in its import lines alone.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

VERSION = "0.28.1"
FOLDERS = ("test", "examples")

# What is imported as a whole. A part of one (`horovod.torch.mpi_ops`, `horovod.tensorflow.util`),
# the runner, and a plain `import horovod` stay stock's: we have nothing in their place.
OURS = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tensorflow.keras": "tensorflow.keras",
    "keras": "tensorflow.keras",  # one Keras today, in both of Horovod's modules
}
IMPORT = re.compile(
    r"^(\s*(?:import|from) )horovod\.(torch|tensorflow\.keras|tensorflow|keras)"
    r"(?= (?:as|import)\b)",
    re.MULTILINE,
)

# On both sides: what today's frameworks no longer have, and has nothing to do with Horovod.
TODAY = (
    (r",\s*experimental_run_tf_function=False", ""),  # Keras 3: compile knows no such argument
    (r"(?<=\()lr=(?=[\d.]+\))", "learning_rate="),  # an optimizer's argument
    (r"\boptimizer\.lr\b", "optimizer.learning_rate"),
    (r"\b(opt|optimizer)\.variables\(\)", r"\1.variables"),  # a property
    (r"\bThresholdedReLU\(", "ReLU(threshold="),
    (r"\bkeras\.losses\.mean_squared_error\b", "'mean_squared_error'"),
    (r"(?<=\{epoch\})\.h5'", ".keras'"),  # a whole model as HDF5 is refused or warned of
    (r"\bsize_average=False", "reduction='sum'"),  # PyTorch
    # New in PyTorch, and for matrices alone. Tests go through all optimizers that there are.
    (
        r"subclass != torch\.optim\.SparseAdam",
        "subclass.__name__ not in ('SparseAdam', 'Muon')",
    ),
)
DATA = {".py", ".yaml", ".sh", ".txt"}


class SourceError(Exception):
    """There is no copy of Horovod's tests; says what to give."""


def obtain(source: str | None, cache: Path) -> Path:
    """A folder with `test` and `examples` of the release.

    Args:
        source: a git repository of Horovod's with the release's tag, bare or not, or a folder that
            has both; None for what was given the last time.
        cache: where they are kept, beside Horovod's wheel.
    """
    kept = cache / f"horovod-{VERSION}-tests"
    if source is None:
        if not kept.is_dir():
            raise SourceError(
                f"Horovod's distribution on PyPI holds no tests: name a git checkout of Horovod's "
                f"that has the tag v{VERSION}, once: make compat COMPAT_SOURCE=/path/to/horovod "
                f"(git clone --branch v{VERSION} --depth 1 of {home_page()} makes one)"
            )
        return kept
    folder = Path(source)
    tag = subprocess.run(
        ["git", "-C", source, "archive", f"v{VERSION}", *FOLDERS], capture_output=True, check=False
    )
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    if tag.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(tag.stdout)) as archive:
            archive.extractall(kept)
    elif all((folder / name).is_dir() for name in FOLDERS):
        for name in FOLDERS:
            shutil.copytree(folder / name, kept / name)
    else:
        kept.rmdir()
        raise SourceError(
            f"{source} has neither the tag v{VERSION} ({tag.stderr.decode().strip()}) nor the "
            f"folders {' and '.join(FOLDERS)}: give a git checkout of Horovod's"
        )
    return kept


def home_page() -> str:
    """As Horovod's own metadata has it."""
    try:
        return importlib.metadata.metadata("horovod")["Home-page"]
    except importlib.metadata.PackageNotFoundError:
        return "its repository"


def exchange(text: str) -> str:
    """The text with this package where it imported Horovod."""
    return IMPORT.sub(lambda match: f"{match[1]}hvd_gradcomp.{OURS[match[2]]}", text)


def replace(text: str, substitutions: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in substitutions:
        text = re.sub(pattern, replacement, text)
    return text


def copy(
    source: Path, target: Path, *, ours: bool, shorter: Sequence[tuple[str, str]] = ()
) -> None:
    """Copies tests and examples, changed for one side."""
    for path in source.rglob("*"):
        if path.suffix not in DATA or not path.is_file():
            continue
        text = replace(path.read_text(), (*TODAY, *shorter))
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(exchange(text) if ours else text)
        place.chmod(path.stat().st_mode)
    (target / "test" / "pytest.ini").write_text("[pytest]\n")


def differs(path: Path) -> bool:
    """Whether a file imports what this package stands in for."""
    return IMPORT.search(path.read_text()) is not None
