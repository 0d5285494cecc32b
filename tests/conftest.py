"""`--device cuda` runs what concerns a device there; without it those tests run on the CPU.

Where Horovod is not installed (`make test-older`), a stand-in lets the frontends be imported: what
runs in one process is tested, and a header says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from unittest.mock import MagicMock

import pytest

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # graphs are ready a sixth sooner
STANDS_IN = importlib.util.find_spec("horovod") is None
if STANDS_IN:
    stand_in = MagicMock(__all__=[], __path__=[], __spec__=None)
    stand_in.is_initialized.return_value = False
    for name in ("", ".torch", ".torch.optimizer", ".tensorflow", ".tensorflow.keras"):
        sys.modules[f"horovod{name}"] = stand_in


def pytest_report_header():
    return "horovod: not installed, a stand-in; what needs ranks is left out" if STANDS_IN else None


def pytest_addoption(parser):
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where verbs and codecs run"
    )


@pytest.fixture
def device(request):
    return request.config.getoption("--device")


@pytest.fixture
def torch_ops(device):
    from hvd_gradcomp.ops.torch import TorchOps

    return TorchOps(device)
