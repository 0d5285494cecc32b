"""The digest check: what it sees, what it says, and what Horovod's failures are explained by."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp import GradiVeQCompressor, StromCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.config_check import MismatchError, agree, describe
from hvd_gradcomp.runtime.errors import explain, explain_errors

OPS = TorchOps()
WEIGHTS = verify.weights(OPS)


def digest(x: torch.Tensor) -> int:
    return int(verify.digest(OPS, x.contiguous().view(torch.uint8), WEIGHTS))


@pytest.mark.parametrize("size", [1, 3, 1000, (1 << 18) + 5, (1 << 19) + 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_every_change_of_bits_shows(size, dtype):
    x = torch.zeros(size, dtype=dtype)
    seen = {digest(x)}
    for place in {0, size // 2, size - 1}:
        for value in (-0.0, 1.0, torch.nan):
            other = x.clone()
            other[place] = value
            seen.add(digest(other))
    assert len(seen) == 1 + 3 * len({0, size // 2, size - 1})
    if size > 3:
        signs = x.clone()
        signs[1:3] = -0.0  # an even number of them escapes a checksum modulo 2**32
        assert digest(signs) not in seen
    assert digest(x.clone()) == digest(x)


def test_the_same_from_tensorflow():
    tf = pytest.importorskip("tensorflow")
    from hvd_gradcomp.ops.tensorflow import TensorFlowOps

    ops = TensorFlowOps()
    x = torch.randn((1 << 18) + 5)
    data = tf.reshape(tf.bitcast(tf.constant(x.numpy()), tf.uint8), (-1,))
    assert int(verify.digest(ops, data, verify.weights(ops))) == digest(x)


def test_only_replicated_state_is_compared():
    layout = Layout(("a", "b"), ((16,), (8, 4, 3, 3)))
    strom = StromCompressor(0.5)
    named_ = verify.replicated(2, strom, layout, strom.init(OPS, layout))
    assert all(name.startswith("state capacity.") for name, _ in named_)
    assert named_[0][0].endswith("of bucket 2 (a, b)")
    gradiveq = GradiVeQCompressor(ratio=4)
    names = [n for n, _ in verify.replicated(0, gradiveq, layout, gradiveq.start(OPS, layout, 2))]
    assert any("basis" in n for n in names)


def test_the_first_difference_and_the_fewest_ranks_are_named():
    verify.compare(["w", "v"], [[1, 2], [1, 2]], [0, 1], 3)
    with pytest.raises(verify.DivergedError) as caught:
        verify.compare(["u", "w", "v"], [[1, 2, 3], [1, 7, 3], [1, 2, 4]], [4, 5, 6], 9)
    message = str(caught.value)
    assert "after 9 steps w on rank 5 is not what it is on ranks 4, 6; 2 of 3 tensors" in message
    with pytest.raises(verify.DivergedError, match="w on rank 1 is not what it is on rank 0"):
        verify.compare(["w"], [[1], [2]], [0, 1], 1)


def test_failures_are_explained_and_keep_their_kind():
    assert "hvd.join()" in explain("it", "Allgather is not supported with Join at this time.")
    assert "another rank has stopped" in explain("it", "Connection closed by peer")
    failed = pytest.raises(KeyError, match="the exchange failed: another rank")
    with failed as caught, explain_errors(KeyError, "the exchange"):
        raise KeyError("shut down")
    assert isinstance(caught.value.__cause__, KeyError)


def test_other_versions_are_named():
    descriptions = [
        describe([], StromCompressor(), [], "", framework=f"torch 2.{rank}", horovod="0.28.1")
        for rank in range(2)
    ]
    with pytest.raises(MismatchError, match=r"torch 2.0 on rank 2, torch 2.1 on rank 3") as caught:
        agree(descriptions, [2, 3])
    assert "Install the same versions" in str(caught.value)
