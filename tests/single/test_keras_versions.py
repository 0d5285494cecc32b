"""Keras 2 comes with TensorFlow before 2.16: tapes work there, and the rest says what to do."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import hvd_gradcomp.tensorflow as hvd

FRONTEND = "hvd_gradcomp.tensorflow.keras"


@pytest.fixture
def keras_2(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(FRONTEND)]:
        monkeypatch.delitem(sys.modules, module)
    old = ModuleType("keras")
    old.__version__ = "2.13.1"
    monkeypatch.setitem(sys.modules, "keras", old)


def test_tapes_do_not_ask_for_keras_3(keras_2, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("hvd_gradcomp.tensorflow")]:
        monkeypatch.delitem(sys.modules, module)
    import hvd_gradcomp.tensorflow as fresh

    assert fresh is not hvd
    assert callable(fresh.DistributedGradientTape)
    assert not any(name.startswith(FRONTEND) for name in sys.modules)


def test_the_optimizer_says_which_keras_it_needs(keras_2):
    with pytest.raises(ImportError, match=r"needs Keras 3, this is Keras 2\.13\.1: install"):
        print(hvd.DistributedOptimizer)


def test_what_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        print(hvd.nothing)
