"""EGC's learning-rate correction: the rule, torch's scheduler and Keras's callback."""

from __future__ import annotations

import io
import math

import keras
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp.algorithms.combined.schedule import EGCCorrection
from hvd_gradcomp.torch import EGCScheduler
from tests.single.older import skip_without_keras_3

skip_without_keras_3()
from hvd_gradcomp.tensorflow.keras.callbacks import EGCLearningRate  # noqa: E402

LOSSES = st.lists(
    st.one_of(st.floats(0, 4), st.sampled_from([1.0, 2.0, math.nan, math.inf, -math.inf])),
    max_size=40,
)
RULES = st.fixed_dictionaries(
    {
        "patience": st.integers(1, 5),
        "t": st.floats(0.01, 2.0),
        "min_lr": st.sampled_from([0.0, 1e-3, 0.2]),
    }
)
FALLS_TWICE = [3.0, 2.0, 2.5, 2.0, 1.0, math.nan, 1.5, 1.0, 0.5, 0.6]


def plain(losses, rate, patience, t, min_lr):
    """The text of the paper, looking back over all epochs each time; the rate after each."""
    rates, last = [], 0  # the epoch of the last correction
    for epoch in range(1, len(losses) + 1):
        seen = [x if math.isfinite(x) else math.inf for x in losses[:epoch]]
        lower = [e for e in range(1, epoch + 1) if seen[e - 1] < min([*seen[: e - 1], math.inf])]
        if epoch - max([last, *lower]) >= patience:
            last = epoch
            if rate > min_lr:
                rate = max(rate / (1 + t * epoch), min_lr)
        rates.append(rate)
    return rates


def sgd(*rates, tensors=False):
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2))], "lr": torch.tensor(r) if tensors else r}
        for r in rates
    ]
    return torch.optim.SGD(groups)


def of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@given(LOSSES, RULES, st.sampled_from([0.5, 0.01]))
@settings(deadline=None)
def test_the_rule_is_the_text(losses, rule, rate):
    optimizer = sgd(rate)
    scheduler = EGCScheduler(optimizer, **rule)
    for loss, expected in zip(losses, plain(losses, rate, **rule)):
        scheduler.step(loss)
        assert of(optimizer) == scheduler.get_last_lr() == [expected]
    assert scheduler.last_epoch == len(losses)


def test_by_hand():
    """Epochs 3 and 4 have nothing below 2.0, epochs 6 and 7 nothing below 1.0, epoch 8 alone."""
    optimizer = sgd(1.0, 0.1)
    scheduler = EGCScheduler(optimizer, patience=2, t=0.5, min_lr=[0.0, 0.05])
    seen = []
    for loss in FALLS_TWICE:
        scheduler.step(torch.tensor(loss))
        seen.append(of(optimizer))
    first, second = 1 / 3, 1 / 3 / 4.5  # epochs 4 and 7
    assert [a for a, _ in seen] == [1.0] * 3 + [first] * 3 + [second] * 4
    assert [b for _, b in seen] == [0.1] * 3 + [0.05] * 7


@given(LOSSES, RULES, st.integers(0, 40))
@settings(deadline=None, max_examples=50)
def test_resumes_exactly(losses, rule, cut):
    optimizer = sgd(0.5, 0.3)
    scheduler = EGCScheduler(optimizer, **rule)
    for loss in losses[:cut]:
        scheduler.step(loss)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = sgd(9.0, 9.0)
    again = EGCScheduler(resumed)
    resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["scheduler"])
    assert again.get_last_lr() == scheduler.get_last_lr()
    for loss in losses[cut:]:
        scheduler.step(loss)
        again.step(loss)
        assert of(resumed) == of(optimizer)
    assert again.state_dict() == scheduler.state_dict()


def test_rates_that_are_tensors_stay_the_same_tensors():
    optimizer = sgd(0.5, tensors=True)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = EGCScheduler(optimizer, patience=1, t=1.0)
    scheduler.step(math.nan)
    assert optimizer.param_groups[0]["lr"] is rate
    assert scheduler.get_last_lr() == [0.25]


def test_groups_that_are_added():
    optimizer = sgd(0.5)
    one, each = EGCScheduler(optimizer, 1, 1.0), EGCScheduler(optimizer, 1, 1.0, [0.0])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.4})
    one.step(math.inf)
    assert of(optimizer) == [0.25, 0.2]
    with pytest.raises(ValueError, match="min_lr must be a number or 2 of them"):
        each.step(1.0)


BAD = [
    ({"patience": 0}, r"patience must be a whole number in \[1, inf\], got 0"),
    ({"patience": 1.5}, "patience must be a whole number .* got 1.5"),
    ({"t": 0}, r"t must be a number in \(0, inf\), got 0"),
    ({"t": math.nan}, "t must be a number .* got nan"),
    ({"min_lr": -1e-3}, r"min_lr must be a number in \[0, inf\), got -0.001"),
    ({"min_lr": [0.1, "no"]}, r"min_lr\[1\] must be a number .* got 'no'"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=str)
def test_bad_input_is_named(bad, message):
    for make in (EGCCorrection, lambda **o: EGCScheduler(sgd(0.1, 0.1), **o), EGCLearningRate):
        with pytest.raises(ValueError, match=message):
            make(**bad)


def test_more_bad_input():
    with pytest.raises(ValueError, match=r"min_lr must be a number or 1 of them.*\[0.1, 0.2\]"):
        EGCScheduler(sgd(0.1), min_lr=[0.1, 0.2])
    with pytest.raises(TypeError, match="list is not an Optimizer"):
        EGCScheduler([])
    with pytest.raises(TypeError, match="val_loss"):
        EGCScheduler(sgd(0.1)).step()


def keras_model(rate):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True)
    return model


class Scripted(keras.callbacks.Callback):
    """Puts given losses into the logs, and keeps the rate of each epoch."""

    def __init__(self, losses):
        super().__init__()
        self.losses, self.rates = losses, []

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = self.losses[epoch]

    def on_epoch_begin(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def fit(model, *callbacks, **options):
    x = np.ones((2, 1), "float32")
    return model.fit(x, x, verbose=0, callbacks=list(callbacks), **options)


@pytest.mark.parametrize("cut", [10, 5])
def test_keras_equals_torch(cut):
    """Also where `fit` stops and goes on. Keras holds its rate in float32."""
    rule = {"patience": 2, "t": 0.5, "min_lr": 0.1}
    model, script, callback = keras_model(1.0), Scripted(FALLS_TWICE), EGCLearningRate(**rule)
    fit(model, script, callback, epochs=cut)
    if cut < 10:
        fit(model, script, callback, initial_epoch=cut, epochs=10)
    optimizer = sgd(1.0)
    scheduler = EGCScheduler(optimizer, **rule)
    expected = of(optimizer)
    for loss in FALLS_TWICE:
        scheduler.step(loss)
        expected += of(optimizer)
    got = [*script.rates, float(model.optimizer.learning_rate)]
    assert got == pytest.approx(expected, rel=1e-6)
    assert len(set(got)) == 3


def test_keras_epochs_count_on():
    """With `initial_epoch` from there; over single-epoch fits, all of them."""
    losses = [1.0] * 5
    model = keras_model(1.0)
    callback = EGCLearningRate(patience=1, t=1.0)
    fit(model, Scripted(losses), callback, initial_epoch=3, epochs=5)
    assert float(model.optimizer.learning_rate) == pytest.approx(1 / 6)
    model, callback = keras_model(1.0), EGCLearningRate(patience=1, t=1.0)
    for _ in range(3):
        fit(model, Scripted(losses), callback, epochs=1)
    assert float(model.optimizer.learning_rate) == pytest.approx(1 / 3 / 4)


def test_keras_says_what_is_missing():
    with pytest.raises(ValueError, match=r"no 'val_loss' at the end of epoch 1, only \['loss'\]"):
        fit(keras_model(1.0), EGCLearningRate())
    model = keras_model(keras.optimizers.schedules.CosineDecay(0.1, 10))
    with pytest.raises(TypeError, match="not settable"):
        fit(model, EGCLearningRate(monitor="loss"))
