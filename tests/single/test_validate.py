"""Arguments of Horovod's functions that ours do not have."""

from __future__ import annotations

import pytest

from hvd_gradcomp.core import validate


def exchange(unused=(), **horovod_only):
    validate.exchange(
        "DistributedOptimizer",
        initialized=True,
        horovod_only=horovod_only,
        op="Average",
        allowed=("Average", "Sum"),
        unused=unused,
    )


@pytest.mark.parametrize("arguments", [{"groups": [["w"]]}, {"num_groups": 2}, {"groups": 0}])
def test_groups_are_refused(arguments):
    with pytest.raises(ValueError, match="groups= and num_groups= bypass compression"):
        exchange(**arguments)


def test_defaults_of_horovod_are_no_request():
    exchange(groups=None, num_groups=0)
    exchange(unused=("device_dense",), device_dense="/gpu:0")


def test_an_unknown_argument_is_named_as_python_names_it():
    with pytest.raises(TypeError, match=r"DistributedOptimizer\(\) got an unexpected keyword arg"):
        exchange(compresion=None)
    with pytest.raises(TypeError, match="'device_dense'"):
        exchange(device_dense="/gpu:0")
