"""A gradient that is not finite on one rank, over real Horovod: no rank keeps anything of it."""

from __future__ import annotations

import os

import pytest

from tests.methods import CHUNKED, EVERY, LEARNED, ONE_OF_EACH
from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel
# "all" runs 500 steps of every setting, which takes a quarter of an hour.
SETTINGS = os.environ.get("HVD_GRADCOMP_NONFINITE", "one of each")


def test_overflows_with_a_scaler_leave_no_trace_on_pytorch(tmp_path):
    everything = SETTINGS == "all"
    steps = "500" if everything else "30"
    deadline = 3000 if everything else 400
    results = launch("torch_nonfinite", 2, "gloo", tmp_path, steps, SETTINGS, deadline=deadline)
    methods = EVERY + LEARNED if everything else [*ONE_OF_EACH, CHUNKED]
    assert set(results[0]["pairs"]) == {repr(c) for c in methods}
    for name in results[0]["pairs"]:
        for result in results:
            (disturbed, low), (calm, high) = result["pairs"][name]
            assert disturbed == calm, name
            assert low < high, "scales differed, and nothing else did"
    raised = "NonFiniteGradientError: rank 1 has a NaN or an infinity in its gradient"
    for result in results:
        message, parameters, _, finite, skipped = result["policies"]["raise"]
        assert message.startswith(raised) and parameters and finite and skipped == 0
        # (what is raised, parameters as before, state as before, parameters finite, skipped)
        assert result["policies"]["skip"] == ["nothing was raised", True, True, True, 1]
        assert result["policies"]["propagate"] == ["nothing was raised", False, True, False, 1]
        assert result["closure"] == [True, True]
        says(result["errors"], MESSAGES)


MESSAGES = {
    "unscaled": "nothing was raised",
    "of_another": "pass scaler=False",
    "no_policy": "nonfinite must be one of 'skip', 'raise', 'propagate', None, got 'ignore'",
}


def test_overflows_with_loss_scaling_leave_no_trace_on_tensorflow(tmp_path):
    results = launch("tensorflow_nonfinite", 2, "gloo", tmp_path, SETTINGS, deadline=1000)
    for result in results:
        for kind in ("inside", "outside", "not scaled", "tape"):
            assert result[kind] == results[0][kind], "replicas are equal"
            for name, (unchanged, changed, skipped, _) in result[kind].items():
                assert unchanged and changed and skipped == 2, (kind, name)
        # `compile` has wrapped a loss scaler around the optimizer.
        kinds, steps, skipped, scale, finite, _ = result["fit"]
        assert kinds == ["LossScaleOptimizer", "SGD"] and finite
        assert (steps, skipped, scale) == (14, 2, 2.0**15 / 4)
        assert result["fit"] == results[0]["fit"]
        says(result["errors"], KERAS_MESSAGES)


KERAS_MESSAGES = {
    "built_in_its_first_step": "nothing was raised",
    "accumulated": "needs the loss scaler inside",
    "no_policy": "nonfinite must be one of 'skip', 'raise', 'propagate', None, got 'ignore'",
}
