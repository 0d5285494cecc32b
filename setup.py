"""Packaging of hvd_gradcomp; `pip install .` needs no framework, the extras bring them."""

import importlib.util
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

here = Path(__file__).parent
spec = importlib.util.spec_from_file_location("building", here / "hvd_gradcomp/ops/building.py")
building = importlib.util.module_from_spec(spec)
spec.loader.exec_module(building)
package = (here / "hvd_gradcomp" / "__init__.py").read_text(encoding="utf-8")
version = re.search(r'^__version__ = "([^"]+)"$', package, re.MULTILINE).group(1)
readme = here / "README.md"

# Horovod is in no extra. Its last release builds against today's frameworks only with the changes
# of docker/build-horovod.sh: listed here, pip would build it unchanged, for minutes, and fail.
extras = {
    "torch": ["torch>=2.0"],
    # Two wheels of one framework, which overwrite each other's files: take one extra, not both.
    # From 2.13 on, which brings Keras 2, tapes alone work.
    "tensorflow": ["tensorflow>=2.16", "keras>=3"],
    "tensorflow-cpu": ["tensorflow-cpu>=2.16", "keras>=3"],
    # Without frameworks, so that `make check` needs none either.
    "test": [
        "hypothesis",
        "mpi4py>=4",
        "mypy",
        "pytest>=8.2",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "types-tabulate",
    ],
    "compat": ["mock", "parameterized"],  # as Horovod's own tests do
    "examples": ["matplotlib", "scikit-learn"],
    "docs": ["furo", "myst-parser", "sphinx"],  # and what examples need, for the figures
    "tensorboard": ["tensorboardX"],
}

# Called through ctypes, so it is no Python module; without a compiler everything works, slower.
native = Extension(
    "hvd_gradcomp.ops._native",
    [f"hvd_gradcomp/ops/{name}" for name in building.NATIVE],
    depends=[f"hvd_gradcomp/ops/{name}" for name in building.HEADERS],
    extra_compile_args=[*building.FLAGS, *building.THREADS],
    extra_link_args=list(building.THREADS),
    optional=True,
)


class Build(build_ext):
    """Also the operations for TensorFlow, where it can be imported; isolated builds see none."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            self.warn("no OpenMP: one thread compresses")
            ext.extra_compile_args, ext.extra_link_args = list(building.FLAGS), []
            super().build_extension(ext)

    def run(self):
        super().run()
        if importlib.util.find_spec("tensorflow") is None:
            return
        folder = here if self.inplace else Path(self.build_lib)
        try:
            building.build_operations(folder / "hvd_gradcomp/ops")
        except building.BuildError as error:
            self.warn(f"no operations for TensorFlow, `hvd-gradcomp build` builds them: {error}")


setup(
    name="hvd_gradcomp",
    version=version,
    description="Gradient compression for Horovod: PyTorch, TensorFlow 2 and Keras 3",
    long_description=readme.read_text(encoding="utf-8") if readme.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.9",
    packages=find_packages(include=["hvd_gradcomp", "hvd_gradcomp.*"]),
    # The sources too: `hvd-gradcomp build` compiles them where they lie.
    package_data={"hvd_gradcomp": ["py.typed", "ops/*.c", "ops/*.h", "ops/*.cc"]},
    ext_modules=[native],
    cmdclass={"build_ext": Build},
    install_requires=["click>=8.1", "rich", "safetensors", "tabulate"],
    entry_points={"console_scripts": ["hvd-gradcomp = hvd_gradcomp.cli:main"]},
    extras_require=extras,
    keywords="horovod distributed deep-learning gradient compression pytorch tensorflow keras",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
