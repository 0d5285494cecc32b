"""What `make compat` does around Horovod's tests; the tests themselves it runs, not we."""

from __future__ import annotations

import pytest

from tests.compat import source
from tests.compat.__main__ import MISSING, REFUSED, Pair, compare, judge
from tests.compat.job import Result, merge


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        ("import horovod.torch as hvd", "import hvd_gradcomp.torch as hvd"),
        ("    import horovod.keras as hvd", "    import hvd_gradcomp.tensorflow.keras as hvd"),
        ("from horovod.tensorflow import rank", "from hvd_gradcomp.tensorflow import rank"),
        ("import horovod.tensorflow.keras as hvd", "import hvd_gradcomp.tensorflow.keras as hvd"),
        ("from horovod.torch.mpi_ops import synchronize", None),
        ("import horovod", None),
        ("# import horovod.torch as hvd", None),
    ],
)
def test_import_lines_alone_are_exchanged(stock, ours):
    assert source.exchange(f"x = 1\n{stock}\n") == f"x = 1\n{ours or stock}\n"


def test_without_a_source_it_says_what_to_give(tmp_path):
    with pytest.raises(source.SourceError, match="COMPAT_SOURCE="):
        source.obtain(None, tmp_path)
    with pytest.raises(source.SourceError, match="has neither the tag"):
        source.obtain(str(tmp_path), tmp_path)
    with pytest.raises(source.SourceError, match="COMPAT_SOURCE="):
        source.obtain(None, tmp_path)  # nothing is kept of what failed


def ended(test, outcome):
    return {"ended": test, "outcome": outcome, "message": ""}


def test_the_worst_rank_counts():
    ranks = [
        [{"began": "a"}, ended("a", "passed"), {"began": "b"}],
        [{"began": "a"}, ended("a", "failed"), {"began": "b"}, ended("b", "passed")],
    ]
    assert {test: one.outcome for test, one in merge(ranks, ["", ""]).items()} == {
        "a": "failed",
        "b": "dies",
    }
    assert merge(ranks, ["Timeout (0:01:00)!", ""])["b"].outcome == "hangs"


class Side:
    """Runs of which it is said beforehand what they come to."""

    def __init__(self, **tests):
        self.tests = {name: iter(outcomes) for name, outcomes in tests.items()}

    def __call__(self, side, only=None, skip=()):
        names = self.tests if only is None else only
        if side == "stock":
            return {name: Result("passed") for name in names}
        return {name: Result(next(self.tests[name])) for name in names if name not in skip}


def test_what_passes_with_stock_alone_is_repeated(capsys):
    stock = {name: Result("passed") for name in ("good", "bad", "shaky")}
    stock["stuck"] = Result("hangs")
    run = Side(good=["passed"], bad=["failed"] * 3, shaky=["failed", "passed"], new=["passed"])
    pairs, wavering = compare(run, stock, part=False)
    assert {test: pair.kind for test, pair in pairs.items()} == {
        "good": "both",
        "bad": "stock alone",
        "shaky": "both",
        "stuck": "neither",
        "new": "ours alone",
    }
    assert wavering == ["shaky"]
    assert judge({"file": {"gloo": pairs}}, wavering) == 1
    assert "passes with stock alone, and is not listed: bad" in capsys.readouterr().out


def test_what_is_listed_and_passes_fails(capsys):
    listed = next(iter(REFUSED))
    refused = Pair(Result("passed"), Result("failed", "refused"))
    assert judge({"file": {"gloo": {listed: refused}}}, []) == 0
    passes = Pair(Result("passed"), Result("passed"))
    assert judge({"file": {"gloo": {listed: passes}}}, []) == 1
    assert f"is listed as refused: {listed}" in capsys.readouterr().out
    assert Pair(Result("passed"), MISSING).kind == "stock alone"
