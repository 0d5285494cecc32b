"""Errors say what is wrong, then what to do, then which compressor it is, and that briefly."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hvd_gradcomp import (
    DGCCompressor,
    EGCCompressor,
    GradiVeQCompressor,
    LGCCompressor,
    NoneCompressor,
    StromCompressor,
    after,
    partition,
    role,
)
from hvd_gradcomp.algorithms.combined.wrappers import take_over
from hvd_gradcomp.checkpoint.schema import CheckpointError, check_exchange
from hvd_gradcomp.checkpoint.schema import describe as describe_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.runtime.config_check import MismatchError, agree, describe
from hvd_gradcomp.torch.moments import tracker
from tests.methods import EVERY, LEARNED

LGC = LGCCompressor(alpha=0.01, momentum=0.9)
TWO = partition([(role("bias"), DGCCompressor(momentum=0.5)), ("*", EGCCompressor(momentum=0.9))])
LAYOUT = Layout(("a",), ((4,),))


def checked(compressor):
    check_exchange(describe_exchange(DGCCompressor(density=0.1), [], 0), compressor, [])


CASES = {
    "adam": (lambda c: take_over(c, "Adam", None), LGC),
    "another": (lambda c: take_over(c, "SGD", (0.5, False)), LGC),
    "momenta": (lambda c: c.correction, TWO),
    "nothing to take": (lambda c: assign(c, [("w", (4, 4), "float32")]), DGCCompressor()),
    "inside stock Horovod": (lambda c: c.compress(torch.ones(3)), StromCompressor(tau=1.0)),
    "no basis": (lambda c: c.compress(torch.ones(3)), GradiVeQCompressor(ratio=4)),
    "checkpoint": (checked, LGC),
}


@pytest.mark.parametrize("name", CASES)
def test_the_compressor_comes_last(name):
    case, compressor = CASES[name]
    with pytest.raises((ValueError, TypeError, CheckpointError)) as raised:
        case(compressor)
    message = str(raised.value)
    assert message.endswith(str(compressor))
    assert type(compressor).__name__ not in message.removesuffix(str(compressor))
    assert "=None" not in message


def test_a_difference_between_ranks_is_brief():
    both = [
        describe([], one, [LAYOUT], "", framework="", horovod="")
        for one in (LGC, LGCCompressor(alpha=0.02, momentum=0.9))
    ]
    with pytest.raises(MismatchError, match=r"compression: LGCCompressor\(alpha=0.01, momentum="):
        agree(both)


@pytest.mark.parametrize("compressor", [*EVERY, *LEARNED, TWO], ids=str)
def test_what_is_left_out_is_as_by_default(compressor):
    names = {type(c).__name__: type(c) for c in (*EVERY, *LEARNED, NoneCompressor())}
    names |= {"after": after, "partition": partition, "role": role}
    again = eval(str(compressor), names)
    assert again == compressor
    assert len(str(compressor)) <= len(repr(compressor))


@pytest.mark.parametrize("version", ["2.0.0", "2.3.1+cu121"])
def test_moments_are_refused_where_indexing_is_not_seen(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    with pytest.raises(RuntimeError, match=re.escape(f"needs PyTorch 2.4, this is {version}: ")):
        tracker.track_moments(nn.Linear(2, 2))


def test_a_graph_for_sessions_is_refused():
    """Nothing would initialize what a reducer keeps there."""
    tf = pytest.importorskip("tensorflow")
    reducers = pytest.importorskip("hvd_gradcomp.tensorflow.reduce.registry")
    options = pytest.importorskip("hvd_gradcomp.tensorflow.reduce.options").ExchangeOptions()
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match=r"^gradients .*tf\.function"):
        reducers.reducer_for([tf.constant(1.0)], NoneCompressor(), options)
