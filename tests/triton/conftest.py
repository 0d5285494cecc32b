"""Kernels run in Triton's interpreter, on a CPU, or on a GPU with `--device cuda`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def pytest_addoption(parser):
    parser.addoption("--compiled", default=None, help="where to write what the compiler made")


@pytest.fixture(scope="session")
def device(request):
    return request.config.getoption("--device")


def pytest_collection_modifyitems(config, items):
    """What runs kernels needs the interpreter or a GPU."""
    runs = config.getoption("--device") == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if HERE in item.path.parents and not runs and "device" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 or --device cuda"))
