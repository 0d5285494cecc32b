"""Memory beyond the model and its gradients: what is kept is named, and nothing that is useless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hvd_gradcomp as gc
from benchmarks import memory as benchmark
from hvd_gradcomp.algorithms.combined.local_steps import DILOCO, LocalSchedule
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.momentum_exchange import MomentumExchangeOptimizer
from hvd_gradcomp.torch.reduce.memory import count_bytes
from tests.single.test_local_steps import SIZE, Net, train
from tests.thread_ranks import run

DOCS = Path(__file__).parents[2] / "docs"
WARMUP, EVERY = 2, 3
KEPT_BETWEEN_ROUNDS = {"global", "state", "outer", "scratch"}


def test_shared_memory_counts_once():
    x = torch.zeros(10)
    counted = {x.untyped_storage().data_ptr()}
    assert count_bytes([x, x[:5], x.view(2, 5), torch.zeros(3)]) == 52
    assert count_bytes([x[2:], torch.zeros(3)], counted) == 12
    assert count_bytes([x, torch.zeros(0)], counted) == 0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "compressor",
    [None, gc.Int8Compressor(), gc.OneBitCompressor(), gc.ChunkedTopKCompressor(chunk=32, k=4)],
    ids=str,
)
def test_between_rounds_local_steps_keep_the_state_alone(compressor, delay):
    """Buckets, the state from before an exchange, and those of the warm-up are released."""

    def work(rank):
        net = Net()
        sgd = torch.optim.SGD(net.parameters(), 0.05)
        schedule = LocalSchedule(EVERY, WARMUP, delay=delay)
        optimizer = LocalStepsOptimizer(
            sgd, net.named_parameters(), rank.connect, schedule, DILOCO, compressor
        )
        train(rank, net, optimizer, WARMUP - 1)
        assert optimizer.stats().memory["buckets"] >= 4 * SIZE, "each step of it exchanges"
        train(rank, net, optimizer, 1 + EVERY, first=WARMUP)
        in_flight = optimizer.stats().memory.get("in flight", 0)
        assert in_flight == (4 * SIZE if delay else 0)
        train(rank, net, optimizer, delay, first=WARMUP + EVERY + 1)
        memory = optimizer.stats().memory
        assert memory.keys() <= KEPT_BETWEEN_ROUNDS
        assert memory["global"] >= 4 * SIZE and memory["outer"] >= 4 * SIZE
        states = [b.state for reducer in optimizer.all_reducers for b in reducer.buckets]
        tensors = [x for state in states for _, x in leaves(state)]
        assert memory.get("state", 0) == sum(x.nbytes for x in tensors)
        return net.flat()

    run(2, work)


def test_after_the_warm_up_of_momenta_one_bucket_is_kept():
    def work(rank):
        net = Net()
        adam = torch.optim.Adam(net.parameters(), 0.02)
        named = net.named_parameters()
        optimizer = MomentumExchangeOptimizer(
            adam, named, rank.connect, gc.OneBitCompressor(), WARMUP
        )
        train(rank, net, optimizer, WARMUP)
        assert "buckets" not in optimizer.stats().memory
        train(rank, net, optimizer, 1, first=WARMUP + 1)
        (bucket,) = optimizer.reducers[0].buckets
        assert optimizer.stats().memory["buckets"] == bucket.flat.nbytes

    run(2, work)


def test_what_the_ranks_average_dense_takes_no_memory_for_its_shapes():
    def work(rank):
        net = Net()
        buffers = [("mean", torch.zeros(1000)), ("half", torch.zeros(1000, dtype=torch.float16))]
        optimizer = LocalStepsOptimizer(
            torch.optim.SGD(net.parameters(), 0.05),
            net.named_parameters(),
            rank.connect,
            LocalSchedule(EVERY, WARMUP),
            DILOCO,
            None,
            named_buffers=buffers,
        )
        shapes = [p for reducer in optimizer.all_reducers[1:] for p in reducer.parameters]
        assert sum(p.numel() for p in shapes) == SIZE + 2000
        assert all(p.untyped_storage().nbytes() <= 4 for p in shapes)

    run(2, work)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_what_was_measured():
    """`python -m benchmarks.memory --show` prints it."""
    rows = json.loads(benchmark.MEASURED.read_text())
    assert benchmark.table(rows) in (DOCS / "limits.md").read_text()


def test_every_method_was_measured():
    rows = json.loads(benchmark.MEASURED.read_text())
    measured = {(row["host"], row["method"]) for row in rows}
    assert measured == {(case.host, case.method) for case in benchmark.cases() if case.method}


def test_all_that_was_kept_has_a_name():
    for row in json.loads(benchmark.MEASURED.read_text()):
        named = sum(row["memory"].values())
        assert row["memory"].keys() <= set(benchmark.PURPOSES)
        assert row["kept"] - named <= benchmark.EXACT, row


def test_what_is_kept_without_a_name_is_an_error():
    plain = {"host": "ddp.compress", "method": "", "elements": 100, "kept": 800, "peak": 0}
    method = {**plain, "method": "QSGDCompressor()", "kept": 1200, "payloads": 0}
    (row,) = benchmark.checked([plain, {**method, "memory": {"buckets": 400}}])
    assert row["memory"] == {"buckets": 4.0} and row["kept"] == 4.0
    with pytest.raises(AssertionError, match=r"QSGD.*4\.000 bytes.*'buckets': 3"):
        benchmark.checked([plain, {**method, "memory": {"buckets": 300}}])
