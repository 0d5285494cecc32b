"""What is written in C; all else about the package is in pyproject.toml."""

import importlib.util
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

here = Path(__file__).parent
spec = importlib.util.spec_from_file_location("building", here / "hvd_gradcomp/ops/building.py")
building = importlib.util.module_from_spec(spec)
spec.loader.exec_module(building)

HOW = ("setup.py", "hvd_gradcomp/ops/building.py")  # flags, and the list of files

# Called through ctypes, so it is no Python module; without a compiler everything works, slower.
native = Extension(
    "hvd_gradcomp.ops._native",
    [f"hvd_gradcomp/ops/{name}" for name in building.NATIVE],
    depends=[*(f"hvd_gradcomp/ops/{name}" for name in building.HEADERS), *HOW],
    extra_compile_args=[*building.FLAGS, *building.THREADS],
    extra_link_args=list(building.THREADS),
    optional=True,
)


def tensorflows():
    """Yield the installed version, without an import of TensorFlow, which takes seconds."""
    for name in ("tensorflow", "tensorflow-cpu"):
        with suppress(PackageNotFoundError):
            yield version(name)


class Build(build_ext):
    """Also the operations for TensorFlow, where it can be imported; isolated builds see none."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1], building.LIBRARY))

    def build_extension(self, ext):
        built = here / "hvd_gradcomp/ops" / building.LIBRARY
        if self.editable_mode and built.exists():  # installed once more: compiled if it is older
            made = Path(self.get_ext_fullpath(ext.name))
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, made)
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
        folder = (here if self.inplace else Path(self.build_lib)) / "hvd_gradcomp/ops"
        if any((folder / building.operations(known)).exists() for known in tensorflows()):
            return
        try:
            building.build_operations(folder)
        except building.BuildError as error:
            self.warn(f"no operations for TensorFlow, `hvd-gradcomp build` builds them: {error}")


class Wheel(bdist_wheel):
    """For any Python 3, since none of the libraries asks which one loads it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[-1]


setup(ext_modules=[native], cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
