"""Compressors as plain data, and back."""

from __future__ import annotations

import json

import pytest

from hvd_gradcomp import (
    DGCCompressor,
    GradiVeQCompressor,
    LGCCompressor,
    QSGDCompressor,
    StromCompressor,
    VarianceCompressor,
    after,
    partition,
    role,
    smaller,
)
from hvd_gradcomp.algorithms.combined.wrappers import MomentumAfter, corrected
from hvd_gradcomp.planning.configuration import as_config, from_config
from tests.methods import EVERY, LEARNED, OUTSIDE

RULES = partition(
    [
        (role("bias", "norm"), None),
        (smaller(100), QSGDCompressor(bits=8)),
        ("head.*", after(3, None, DGCCompressor(density=0.1))),
        ("*", StromCompressor()),
    ]
)
NESTED = [
    RULES,
    corrected(RULES, 0.9, True),
    MomentumAfter(VarianceCompressor(), 0.9),
    after(4, None, after(2, StromCompressor(), DGCCompressor(warmup_steps=4, warmup=[0.5, 0.1]))),
    GradiVeQCompressor(loss_threshold=0.1, sampling=StromCompressor(), other=QSGDCompressor()),
    LGCCompressor(first_layer=("conv*", "stem"), last_layer="head"),
]


@pytest.mark.parametrize("compressor", EVERY + LEARNED + OUTSIDE + NESTED, ids=repr)
def test_there_and_back(compressor):
    config = json.loads(json.dumps(as_config(compressor)))
    again = from_config(config)
    assert again == compressor and repr(again) == repr(compressor)
    assert hash(again) == hash(compressor)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"class": "NewCompressor", "tau": 1.0}, "there is no compressor 'NewCompressor' here"),
        ({"class": "Path", "args": ["x"]}, "there is no compressor 'Path' here"),
        ({"tau": 1.0}, "there is no compressor None here"),
        ({"class": "StromCompresor"}, "'StromCompresor' here; did you mean 'StromCompressor'?"),
        ({"class": "StromCompressor", "sigma": 1.0}, "StromCompressor has no parameter 'sigma'"),
        ({"class": "StromCompressor", "taw": 1.0}, "no parameter 'taw'; did you mean 'tau'?"),
        ({"class": "after", "steps": 1}, "there is no compressor 'after' here"),
        ({"class": "Smaller"}, "Smaller of this version cannot be made from"),
        ({"class": "StromCompressor", "tau": -1.0}, "StromCompressor: tau must be a number in"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_data_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        from_config(config)


def test_what_is_no_data_is_refused():
    with pytest.raises(TypeError, match="cannot be saved as text"):
        as_config(print)
