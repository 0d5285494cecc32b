"""Moments of micro-batches have the expectation of what single samples would give."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launch

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_mean_is_that_of_single_samples(framework, tmp_path):
    """Within 3 % over 200 draws, with the batch size known; what is missing without it is named."""
    (result,) = launch(f"{framework}_passes", 1, "gloo", tmp_path)
    rare = result.pop("fewer", None)
    for what, share in result.items():
        if what.endswith("True") or what.startswith("tape"):  # a tape always knows it
            assert share == pytest.approx(1.0, abs=0.03), result
        else:  # `mu**2 / B` is left out, for which q = a*sum(c**2) + (1-a)*g**2 needs B
            assert 0.8 < share < 1.0, result
    if rare is not None:
        (used, seldom), (alone, both) = rare
        # c = 1, 2, 3, 4, so 4/3 * 30 - 1/3 * 100; and c = 3, 0, 0, 0.
        assert used == pytest.approx(40 - 100 / 3) and seldom == pytest.approx(12 - 3)
        assert alone == 1.0 and both == 9.0, "a step of one pass counts as one sample"
