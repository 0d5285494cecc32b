"""Golden bytes: what is on the wire stays what it is, on both frameworks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hvd_gradcomp.ops.torch import TorchOps
from tests.golden.bytes_of import path_of, run
from tests.methods import EVERY, ONE_OF_EACH, TODAY


@pytest.mark.parametrize("compressor", EVERY + TODAY, ids=repr)
def test_torch(compressor, torch_ops):
    sent = run(
        compressor,
        torch_ops,
        lambda x: torch.tensor(x, device=torch_ops.device),
        lambda x: x.cpu().numpy().tobytes(),
    )
    assert sent == json.loads(path_of(compressor).read_text())


@pytest.mark.parametrize(
    ("compressor", "static"),
    [(c, static) for c in EVERY for static in (True, False)] + [(c, False) for c in TODAY],
    ids=repr,
)
def test_tensorflow(compressor, static):
    tf = pytest.importorskip("tensorflow")
    from hvd_gradcomp.ops.tensorflow import TensorFlowOps

    sent = run(
        compressor,
        TensorFlowOps(static),
        lambda x: tf.constant(np.asarray(x, np.float32)),
        lambda x: x.numpy().tobytes(),
    )
    assert sent == json.loads(path_of(compressor).read_text())


@pytest.mark.parametrize("compressor", EVERY + TODAY, ids=repr)
def test_static_shapes(compressor):
    sent = run(compressor, TorchOps(static=True), torch.tensor, lambda x: x.numpy().tobytes())
    assert sent == json.loads(path_of(compressor).read_text())


def tensor_on_host(x):
    return torch.tensor(x, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("compressor", ONE_OF_EACH, ids=repr)
def test_defaults_of_pytorch_do_not_matter(compressor, static, other_default):
    ops = TorchOps(static=static)
    sent = run(compressor, ops, tensor_on_host, lambda x: x.numpy().tobytes())
    assert sent == json.loads(path_of(compressor).read_text())
