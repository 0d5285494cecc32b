"""What lies in a file or comes from another rank is data: read whole, checked, never run."""

from __future__ import annotations

import math
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch

from hvd_gradcomp.runtime import typed_json
from hvd_gradcomp.runtime.typed_json import MessageError
from hvd_gradcomp.torch.drop_in.checkpoint import make_rollback
from hvd_gradcomp.torch.interop import safetensors_file


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Pair(NamedTuple):
    name: str
    norms: tuple[float, ...]


KINDS = [
    (None, Optional[str]),
    ("a", Optional[str]),
    ({"a": 1, "b": -(2**63)}, dict[str, int]),
    ([("a", True), ("b", False)], list[tuple[str, bool]]),
    (Pair("x", (1.5, -0.0, math.inf, 5e-324)), Pair),
    ([[], [[1]]], list[list[list[int]]]),
    ({"anything": [1, None, {"x": 1.0}]}, Any),
]


@pytest.mark.parametrize(("item", "kind"), KINDS, ids=str)
def test_messages_come_back(item, kind):
    assert typed_json.loads(typed_json.dumps(item), kind) == item


WRONG = [
    (True, int),
    (1, bool),
    (1.0, int),
    ("1", int),
    (None, str),
    ([1], dict[str, int]),
    ([1, 2, 3], tuple[int, int]),
    (["x", 1.0], Pair),
    ({"a": {"b": 1}}, dict[str, dict[str, str]]),
    ([1, "x"], list[int]),
]


@pytest.mark.parametrize(("item", "kind"), WRONG, ids=str)
def test_messages_of_another_kind_are_refused(item, kind):
    with pytest.raises(MessageError, match="which was not asked for"):
        typed_json.loads(typed_json.dumps(item), kind)


def test_what_another_rank_says_is_not_run(tmp_path):
    bad = pickle.dumps(Hostile(tmp_path / "ran"))
    with pytest.raises(MessageError, match=r"what rank 5 has said cannot be read: no JSON"):
        typed_json.gather("x", str, lambda encoded: [encoded, bad], [4, 5])
    with pytest.raises(MessageError):
        typed_json.loads(b"[" * 100_000, Any)
    assert not (tmp_path / "ran").exists()


def nest():
    base = torch.arange(12.0).reshape(3, 4)
    state = OrderedDict(a=base, b=base, part=base[1:], turned=base.t())
    state._metadata = OrderedDict({"": {"version": 2}})
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)
    return {
        "state": state,
        7: {"step": torch.tensor(3.0), "none": None, "empty": torch.zeros(0, 3)},
        "tensors": [torch.ones(2, 1).to(dtype) for dtype in dtypes],
        "numbers": (1, -0.0, math.inf, 2**70, True, "\x00ü"),
        "counter": Counter([3, 3, 5]),
        "odd": [torch.float32, torch.device("cpu"), b"\xff", {1, 2}, torch.Size([2, 3])],
        "none of complex": torch.zeros(0, dtype=torch.complex128),
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        same = list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
        return same and getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b and str(a) == str(b)


def test_a_nest_comes_back():
    before = nest()
    after = safetensors_file.unpacked(safetensors_file.packed(before))
    assert equal(before, after)
    assert [type(x) for x in after.values()] == [type(x) for x in before.values()]
    after["state"]["a"].zero_()  # what was read can be written to
    size = len(safetensors_file.packed({"a": torch.zeros(10_000), "b": torch.zeros(10_000)}))
    shared = torch.zeros(10_000)
    assert len(safetensors_file.packed({"a": shared, "b": shared})) < 0.6 * size


def test_no_file_runs_anything(tmp_path):
    hostile = Hostile(tmp_path / "ran")
    with pytest.raises(TypeError, match="which no checkpoint can hold"):
        safetensors_file.packed({"epoch": [hostile]})
    for bad in (pickle.dumps(hostile), b"", b"\xff" * 64):
        with pytest.raises(Exception):  # noqa: B017 - the library's own; `checkpoint` names the file
            safetensors_file.unpacked(bad)
    data = safetensors_file.packed({"x": torch.float32})
    with pytest.raises((AttributeError, ValueError)):
        safetensors_file.unpacked(data.replace(b"float32", b"save   "))
    assert not (tmp_path / "ran").exists()


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    for _ in range(2):
        model(torch.randn(4, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        scheduler.step()
    for state in optimizer.state.values():  # wider than the parameter: `load_state_dict` would cast
        state["exp_avg"] = state["exp_avg"].double() + 1e-9
    return model, optimizer, scheduler


def test_the_way_back_is_to_the_bit():
    model, optimizer, scheduler = objects = trained()
    undos = [make_rollback(item) for item in objects]
    before = safetensors_file.unpacked(
        safetensors_file.packed([item.state_dict() for item in objects])
    )
    groups, attributes = optimizer.param_groups, set(vars(scheduler))
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(torch.optim.Adam(other.parameters(), lr=3.0).state_dict())
    wrong = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(other.parameters(), 1.0), 9)
    scheduler.load_state_dict(wrong.state_dict())
    assert not equal(before, [item.state_dict() for item in objects])
    for undo in undos:
        undo()
    assert equal(before, [item.state_dict() for item in objects])
    assert optimizer.param_groups is groups and set(vars(scheduler)) == attributes
