"""`trainers.compress` on one rank: what it refuses, and when."""

from __future__ import annotations

import pytest
from torch import nn

from hvd_gradcomp import QSGDCompressor
from hvd_gradcomp.torch import trainers


def test_another_loop_is_told_what_to_do():
    with pytest.raises(TypeError, match=r"got Linear. For a loop of your own .* call ddp.compress"):
        trainers.compress(nn.Linear(1, 1), QSGDCompressor())


def test_a_model_that_is_not_wrapped():
    training = trainers.CompressedTraining(QSGDCompressor(), {})
    with pytest.raises(RuntimeError, match="the training has not begun"):
        _ = training.state
    with pytest.raises(TypeError, match=r"its type is Linear. Start several ranks, with torchrun"):
        training.begin(nn.Linear(1, 1))
    assert not training.begun
