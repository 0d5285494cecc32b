"""`--device cuda` runs what concerns a device there; without it those tests run on the CPU.

Where Horovod is not installed (`make test-older`), a stand-in lets the frontends be imported: what
runs in one process is tested, and a header says so.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from hypothesis import settings

# A machine that does something else for a moment fails no law.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all of Horovod, as far as importing asks."""

    def find_spec(self, fullname, path, target=None):
        del path, target
        if fullname.partition(".")[0] != "horovod":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__all__ = []


class Module(ModuleType):
    """Of a module that is not there; a function too, since their names look alike."""

    __version__ = "0.28.1"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if not name[0].isupper():
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, type(name, (Exception,), {}))
        return self.__dict__[name]

    def __call__(self, *args, **kwargs):
        known = {"is_initialized": False, "size": 1, "rank": 0}
        return known.get(self.__name__.rpartition(".")[2], MagicMock())


os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # graphs are ready a sixth sooner
STANDS_IN = importlib.util.find_spec("horovod") is None
if STANDS_IN:
    sys.meta_path.insert(0, StandIn())


def pytest_report_header():
    return "horovod: not installed, a stand-in; what needs ranks is left out" if STANDS_IN else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Have the garbage collector pass over what was imported, half a million objects.

    Graphs of TensorFlow are many objects, too: otherwise each collection that they start walks
    through the frameworks again, a seventh of all time in `tests/single`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_addoption(parser):
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where plain ops and codecs run"
    )


@pytest.fixture
def device(request):
    return request.config.getoption("--device")


@pytest.fixture
def torch_ops(device):
    from hvd_gradcomp.ops.torch import TorchOps

    return TorchOps(device)


@pytest.fixture(params=["float64", "bfloat16", "another device"])
def other_default(request):
    """What users of PyTorch set once for all that they make themselves."""
    import torch

    dtype = torch.get_default_dtype()
    if request.param == "another device":
        torch.set_default_device("meta")  # as "cuda" to tensors on the host, and with any build
    else:
        torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.fixture
def one_process(tmp_path):
    """`torch.distributed` over gloo, of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def horovod_ends():
    """Horovod for PyTorch ends behind a module whose commands may start it in this process.

    Else others find it running; its process sets may be those of the library for TensorFlow.
    """
    if STANDS_IN:
        yield
        return
    import horovod.torch as horovod

    if horovod.mpi_built():  # as in `one_rank`
        importlib.import_module("mpi4py.MPI")
    yield
    if horovod.is_initialized():
        horovod.shutdown()


@pytest.fixture(scope="module")
def one_rank():
    """Horovod of one rank, for the tests of a module.

    MPI starts once in a process: what is started here Horovod does not end, so another module can
    start Horovod anew.
    """
    if STANDS_IN:
        pytest.skip("needs Horovod")
    import horovod.tensorflow as horovod

    if horovod.mpi_built():
        importlib.import_module("mpi4py.MPI")
    horovod.init()
    yield
    horovod.shutdown()
