"""`--device cuda` runs what concerns a device there; without it those tests run on the CPU."""

from __future__ import annotations

import pytest


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
