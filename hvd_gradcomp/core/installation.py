"""What is missing, and what to type to get it: one text for errors of imports and `doctor`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence

HOROVOD = "0.28.1"
KERAS_BACKEND = "KERAS_BACKEND"


def require_horovod(framework: str) -> None:
    """Imports `horovod.torch` or `horovod.tensorflow`, which a frontend is made of.

    Raises:
        ImportError: it cannot be imported; with what helps.
    """
    try:
        found = importlib.import_module(f"horovod.{framework}")
        if not hasattr(found, "init"):  # its import only prints that
            raise ImportError(f"Extension horovod.{framework} has not been built")
    except ImportError as error:
        first: BaseException = error  # TensorFlow says of Keras only that it cannot be imported
        while isinstance(first.__context__, ImportError):
            first = first.__context__
        said = str(first)
        raise ImportError(
            f"hvd_gradcomp.{framework} needs Horovod {HOROVOD}: {said}. What helps:\n"
            f"{cure(said)}\n`hvd-gradcomp doctor` looks at all that is needed",
            name=error.name,
        ) from error


def require_keras_backend(backend: str) -> None:
    """Requires that Keras computes with TensorFlow.

    Raises:
        ImportError: it computes with something else.
    """
    if backend != "tensorflow":
        raise ImportError(
            f"hvd_gradcomp.tensorflow.keras needs Keras on TensorFlow, this is Keras on {backend}: "
            f"{cure_of_keras(backend)}"
        )


def cure(said: str, before: Sequence[str] = (), alone: bool = False) -> str:
    """What helps against an error of an import of Horovod; `before`, `alone` as in `build`."""
    module = re.search(r"No module named '(\w+)", said)
    if module and module[1] == os.environ.get(KERAS_BACKEND):
        return cure_of_keras(module[1])
    if module and module[1] not in ("horovod", "hvd_gradcomp"):
        package = {"yaml": "pyyaml"}.get(module[1], module[1])
        return f"{sys.executable} -m pip install {package}"
    if "libmpi" in said:
        return "apt-get install openmpi-bin  # as root"
    return build(before, alone)


def cure_of_keras(backend: str) -> str:
    """What helps where Keras computes with something else than TensorFlow."""
    other = ". On PyTorch use hvd_gradcomp.torch in a loop of your own" * (backend == "torch")
    return f"export {KERAS_BACKEND}=tensorflow, or take it out of ~/.keras/keras.json{other}"


def build(before: Sequence[str] = (), alone: bool = False) -> str:
    """How to get a Horovod that fits.

    Args:
        before: packages that have to be there first.
        alone: whether PyTorch is the only framework that is there.
    """
    command = f"{sys.executable} -m hvd_gradcomp build-horovod"
    if alone:
        command = f"HOROVOD_WITHOUT_TENSORFLOW=1 {command}  # for PyTorch alone"
    if before:
        return f"{sys.executable} -m pip install {' '.join(before)}\n{command}"
    return command
