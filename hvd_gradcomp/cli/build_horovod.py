"""Command `hvd-gradcomp build-horovod`: builds Horovod for this Python's frameworks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click

SCRIPT = Path(__file__).with_name("build-horovod.sh")


@click.command("build-horovod", short_help="Build Horovod for what is installed.")
@click.argument("python", default=sys.executable)
def command(python: str) -> None:
    """Build Horovod 0.28.1 for the frameworks that are installed, and install it.

    As it was released it does not build against today's PyTorch and TensorFlow. This takes about 8
    minutes on two cores, a compiler, CMake and Open MPI with its headers, and says what is missing.
    The wheel is kept for the next time. PYTHON is of the environment that it is for: this one, if
    not given.

    \b
      HVD_GRADCOMP_CACHE            where wheels are kept: ~/.cache/hvd_gradcomp
      HOROVOD_GPU_OPERATIONS=NCCL   for GPUs, with the nvcc and the NCCL of NVIDIA's packages from
                                    PyPI, or the system's; needs no GPU
      HOROVOD_CUDA_HOME             with the nvcc in here
      HOROVOD_WITHOUT_TENSORFLOW=1  for PyTorch alone

    \b
      hvd-gradcomp build-horovod
      pip install 'cuda-toolkit[cccl,nvcc]'    # of the version that PyTorch has brought along
      HOROVOD_GPU_OPERATIONS=NCCL hvd-gradcomp build-horovod
    """
    if not _is_python(python):
        raise click.BadParameter(f"{python} is no Python that runs", param_hint="PYTHON")
    bash = shutil.which("bash")
    if bash is None:
        raise click.ClickException("there is no bash on the PATH, which runs the build: install it")
    sys.exit(subprocess.run([bash, str(SCRIPT), python]).returncode)


def _is_python(program: str) -> bool:
    try:
        done = subprocess.run([program, "-c", "print(2 + 2)"], capture_output=True)
    except OSError:
        return False
    return done.stdout.strip() == b"4"
