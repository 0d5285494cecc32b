"""Missing dependencies and the commands that install them, for import errors and `doctor`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence

HOROVOD = "0.28.1"
KERAS_BACKEND = "KERAS_BACKEND"
# Lines of the import error, where Horovod is not installed, and where another module does instead.
_UNBUILDABLE = (f"# pip cannot build Horovod {HOROVOD} unchanged for today's frameworks",)
_INSTEAD = ("Without Horovod use hvd_gradcomp.torch.ddp, .fsdp or .trainers.",)


def require_horovod(framework: str) -> None:
    """Import `horovod.torch` or `horovod.tensorflow`, which a frontend builds on.

    Raises:
        ImportError: it cannot be imported; the message says what helps.
    """
    try:
        module = importlib.import_module(f"horovod.{framework}")
        if not hasattr(module, "init"):  # the import only prints that
            raise ImportError(f"Extension horovod.{framework} has not been built")
    except ImportError as error:
        first: BaseException = error  # TensorFlow reports only that Keras cannot be imported
        while isinstance(first.__context__, ImportError):
            first = first.__context__
        message = str(first)
        lines = [
            f"hvd_gradcomp.{framework} needs Horovod {HOROVOD}: {message}. What helps:",
            cure(message),
            *(_UNBUILDABLE if "No module named 'horovod'" in message else ()),
            *(_INSTEAD if framework == "torch" else ()),
            "`hvd-gradcomp doctor` looks at all that is needed",
        ]
        raise ImportError("\n".join(lines), name=error.name) from error


def require_keras_backend(backend: str) -> None:
    """Require that Keras computes with TensorFlow.

    Raises:
        ImportError: it computes with another backend.
    """
    if backend != "tensorflow":
        raise ImportError(
            f"hvd_gradcomp.tensorflow.keras needs Keras on TensorFlow, this is Keras on {backend}: "
            f"{cure_of_keras(backend)}"
        )


def cure(message: str, before: Sequence[str] = (), alone: bool = False) -> str:
    """Return what fixes an import error of Horovod; `before`, `alone` as in `build`."""
    module = re.search(r"No module named '(\w+)", message)
    if module and module[1] == os.environ.get(KERAS_BACKEND):
        return cure_of_keras(module[1])
    if module and module[1] not in ("horovod", "hvd_gradcomp"):
        package = {"yaml": "pyyaml"}.get(module[1], module[1])
        return f"{sys.executable} -m pip install {package}"
    if "libmpi" in message:
        return "apt-get install openmpi-bin  # as root"
    return build(before, alone)


def cure_of_keras(backend: str) -> str:
    """Return what fixes a Keras that computes with another backend than TensorFlow."""
    other = ". On PyTorch use hvd_gradcomp.torch in a loop of your own" * (backend == "torch")
    return f"export {KERAS_BACKEND}=tensorflow, or take it out of ~/.keras/keras.json{other}"


def build(before: Sequence[str] = (), alone: bool = False) -> str:
    """Return the command that installs a compatible Horovod.

    Args:
        before: packages to install first.
        alone: whether PyTorch is the only framework installed.
    """
    command = f"{sys.executable} -m hvd_gradcomp build-horovod"
    if alone:
        command = f"HOROVOD_WITHOUT_TENSORFLOW=1 {command}  # for PyTorch alone"
    if before:
        return f"{sys.executable} -m pip install {' '.join(before)}\n{command}"
    return command
