"""Readings as scalars and as a line, where they are written, and what they cost who."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, fields

import pytest
import torch

from hvd_gradcomp import JSONLines, SparseGDCompressor, StromCompressor, TensorBoard, after
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.capacity import CapacitySchedule
from hvd_gradcomp.monitoring import reports
from hvd_gradcomp.monitoring.reports import StatsWriter, Writer, scalars, summary
from hvd_gradcomp.monitoring.stats import TOTAL, CompressionStats, combined
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
from tests.methods import EVERY, learned_by

EARLY = CompressionStats(
    steps=100,
    elements=1000,
    elements_sent=50,
    bytes_dense=4000,
    bytes_sent=400,
    bytes_received=800,
    layers={"fc.weight": 40, "fc.bias": 10},
    sizes={"fc.weight": 8, "fc.bias": 2},
    skipped=1,
    level_changes=3,
    residual_norm=1.0,
    gradient_norm=1.0,
)
LATE = CompressionStats(
    steps=200,
    elements=2000,
    elements_sent=150,
    bytes_dense=8000,
    bytes_sent=600,
    bytes_received=1200,
    layers={"fc.weight": 120, "fc.bias": 30},
    losses={"basis": 0.125},
    sizes={"fc.weight": 8, "fc.bias": 2},
    skipped=3,
    level_changes=4,
    residual_norm=3.0,
    gradient_norm=2.0,
)
SPAN = {
    "compression/steps": 100,
    "compression/bytes_dense": 4000,
    "compression/bytes_sent": 200,
    "compression/bytes_received": 400,
    "compression/ratio": 20.0,
    "compression/element_ratio": 10.0,
    "compression/skipped": 2,
    "compression/level_changes": 1,
    "compression/residual_norm": 3.0,
    "compression/gradient_norm": 2.0,
    "compression/residual_ratio": 1.5,
    "compression/loss/basis": 0.125,
    "compression/density/fc.weight": 0.1,
    "compression/density/fc.bias": 0.1,
}


class Readings:
    """Hands out readings one after another, and counts them."""

    def __init__(self, *readings):
        self.left = list(readings)

    def __call__(self):
        return self.left.pop(0)


def test_a_span_is_the_difference_of_two_readings():
    assert scalars(LATE - EARLY) == SPAN


def test_what_is_not_known_has_no_scalar():
    nothing = scalars(CompressionStats())
    assert "compression/ratio" not in nothing and "compression/residual_norm" not in nothing
    assert json.loads(json.dumps(nothing, allow_nan=False)) == nothing


def test_the_line_of_an_epoch():
    stats = CompressionStats(
        steps=1200,
        elements=475_000_000,
        elements_sent=1_900_000,
        bytes_dense=1_900_000_000,
        bytes_sent=42_100_000,
        losses={"basis": 0.1234},
        skipped=2,
        level_changes=1,
        residual_norm=6.2,
        gradient_norm=2.0,
    )
    assert summary(stats) == (
        "1,200 steps, 42.1 MB sent of 1.9 GB (45x), 0.4 % of elements, residual 3.1 x gradient, "
        "2 skipped, 1 level change, basis loss 0.12"
    )
    assert summary(CompressionStats()) == "0 steps"


@pytest.mark.parametrize(
    ("rank", "all_ranks", "name"), [(0, False, "run.jsonl"), (3, True, "run.3.jsonl")]
)
def test_json_lines_are_written_on(rank, all_ranks, name, tmp_path):
    writer = JSONLines(tmp_path / "new" / "run.jsonl", all_ranks)
    for step in (100, 200):  # two runs
        writer.open(rank)
        writer.write(step, SPAN)
        (*_, last) = (tmp_path / "new" / name).read_text().splitlines()  # before it is closed
        writer.close()
        record = json.loads(last)
        assert record.pop("time") > 1e9
        assert record == {"step": step, "rank": rank, **SPAN}
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]
    assert len((tmp_path / "new" / name).read_text().splitlines()) == 2


def test_tensorboard_reads_its_events(tmp_path):
    import tensorflow as tf

    writer = TensorBoard(tmp_path)
    writer.open(0)
    writer.write(200, SPAN)
    writer.close()
    (path,) = (tmp_path / "rank0").iterdir()
    events = {
        value.tag: (event.step, value.simple_value)
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert events == {tag: (200, pytest.approx(value)) for tag, value in SPAN.items()}


def test_a_missing_package_is_an_error_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(reports, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        TensorBoard("logs")


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_a_span_has_whole_steps(every):
    with pytest.raises(ValueError, match="every must be a whole number"):
        StatsWriter(CompressionStats, rank=0, first=True, writers=[], every=every)


def test_it_reads_only_what_it_writes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hvd_gradcomp")
    alone, everywhere = JSONLines(tmp_path / "a"), JSONLines(tmp_path / "b", all_ranks=True)
    reading = Readings(CompressionStats(), EARLY, EARLY, LATE)
    first = StatsWriter(reading, rank=0, first=True, writers=[alone], every=3)
    for _ in range(5):
        first.step()
    first.epoch(7)
    first.step()
    first.close()
    assert not reading.left
    steps = [json.loads(line)["compression/steps"] for line in (tmp_path / "a").open()]
    assert steps == [100, 100]
    assert [record.getMessage() for record in caplog.records] == [f"epoch 7: {summary(EARLY)}"]

    other = StatsWriter(Readings(), rank=1, first=False, writers=[alone], every=1)
    other.step()
    other.epoch(1)
    assert not other.reads
    reading = Readings(CompressionStats(), EARLY)
    writer = StatsWriter(reading, rank=1, first=False, writers=[alone, everywhere], every=1)
    writer.step()
    writer.epoch(1)
    writer.close()
    assert json.loads((tmp_path / "b.1").read_text())["rank"] == 1
    assert len(caplog.records) == 1


def test_a_full_disk_does_not_stop_the_training(caplog):
    class Full(Writer):
        all_ranks = False
        open = close = lambda self, rank=None: None

        def write(self, step, values):
            raise OSError(28, "No space left on device")

    readings = Readings(CompressionStats(), EARLY, EARLY)
    writer = StatsWriter(readings, rank=0, first=True, writers=[Full()], every=1)
    writer.step()
    writer.step()
    writer.close()
    (record,) = caplog.records
    assert "is given up at step 100: [Errno 28]" in record.getMessage()


FULL = """
import logging, resource, signal, sys, time
from hvd_gradcomp import JSONLines, TensorBoard
from hvd_gradcomp.monitoring.reports import StatsWriter
from hvd_gradcomp.monitoring.stats import TOTAL, CompressionStats, combined

logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writers = [TensorBoard(sys.argv[1]), JSONLines(sys.argv[1] + "/stats")]
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
read = lambda: CompressionStats(steps=1, losses={str(i): 1.0 for i in range(30)})
for closes in (True, False):
    stats = StatsWriter(read, rank=0, first=True, writers=writers, every=1)
    for _ in range(300):
        stats.step()
        time.sleep(0.001)
    print("trained")
    if closes:
        stats.close()
"""


def test_a_full_disk_ends_no_writer_in_a_hang(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0 and lines.count("trained") == 2, ran
    lost = [line for line in lines if "is given up at step 1: [Errno 27]" in line]
    assert len(lost) == 4 and len(lines) == 6, ran
    assert not [line for line in ran.stderr.splitlines() if "nvfuser" not in line], "PyTorch 2.0's"


class Slow(Writer):
    """Whose disk stands still, as it is opened or as it is written to."""

    all_ranks = False

    def __init__(self, opens):
        self.opens, self.goes_on, self.steps = opens, threading.Event(), []

    def __repr__(self):
        return "Slow()"

    def open(self, rank):
        if not self.opens:
            self.goes_on.wait(60)

    def write(self, step, values):
        self.goes_on.wait(60)
        self.steps.append(step)

    def close(self):
        pass


@pytest.mark.parametrize("opens", [True, False])
def test_a_disk_that_stands_still_does_not_stop_the_training(opens, caplog, monkeypatch):
    monkeypatch.setattr(reports, "_TO_BEGIN", 0.2)
    monkeypatch.setattr(reports, "_TO_END", 2.0)
    slow, begin = Slow(opens), time.monotonic()
    counts = itertools.count()
    writer = StatsWriter(
        lambda: CompressionStats(steps=next(counts)), rank=0, first=True, writers=[slow], every=1
    )
    for _ in range(1000):
        writer.step()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and ("records are left out" if opens else "not opened") in messages[0]
    if opens:
        slow.goes_on.set()  # and it is written to again
        while len(slow.steps) < 10:
            time.sleep(0.01)
        writer.step()
    writer.close()
    assert time.monotonic() - begin < 10
    assert slow.steps == sorted(slow.steps) and (not opens or slow.steps[-1] == 1001)
    slow.goes_on.set()


def test_changes_of_the_level_are_counted():
    schedule, ops = CapacitySchedule.up_to(10_000), TorchOps()
    state = schedule.init(ops)
    levels = [int(state.level)]
    for need in [5000] + [100] * 40 + [3000] * 3:
        level, state = schedule.next_level(ops, state._replace(needed=torch.tensor(need)))
        levels.append(level.index)
    changes = sum(a != b for a, b in zip(levels, levels[1:]))
    assert int(state.changes) == changes >= 3


@pytest.mark.parametrize("compressor", [*EVERY, *learned_by("torch", 2)], ids=repr)
def test_every_method_says_what_it_keeps(compressor):
    layout = Layout(("a", "b"), ((30, 20, 3), (40, 9)), block=compressor.block)
    state = compressor.start(TorchOps(), layout, 2)
    report = compressor.report(layout, state, 1)
    assert report.level_changes == 0
    kept = report.residual
    assert kept is None or (kept.shape == (layout.size,) and not kept.any())


def test_what_is_kept_is_that_of_the_phase_at_work():
    compressor = after(2, StromCompressor(tau=1e6), SparseGDCompressor(0.01))
    layout = Layout(("a",), ((600,),))
    world = World(compressor, TorchOps(), layout, 1)
    for step in range(1, 5):
        world.step([torch.ones(layout.size)])
        report = compressor.report(layout, world.states[0], step)
        kept, (sent,) = report.residual, report.sent
        assert (sent == 0) == (step <= 2)
        # Strom keeps all; then its debt has gone over, and 6 elements a step are paid.
        assert float(kept[0:600].max()) == step and int((kept[:600] < step).sum()) == sent
    assert report.level_changes == 0


def test_time_that_steps_waited():
    """A span has the difference, a whole the sum of its parts; unknown if one of them is."""
    first = CompressionStats(steps=2, seconds_waited=0.5)
    span = CompressionStats(steps=12, seconds_waited=1.5) - first
    assert span.ms_waited == 100.0 and "waiting" in str(span)
    assert "100 ms waiting a step" in summary(span)
    assert scalars(span)["compression/ms_waited"] == 100.0
    assert combined([first, first], [], 4).seconds_waited == 1.0
    assert combined([first, CompressionStats()], [], 4).seconds_waited is None
    assert CompressionStats(steps=2) == first, "time is no part of what was exchanged"
    unknown = CompressionStats(steps=3)
    assert unknown.ms_waited is None and "compression/ms_waited" not in scalars(unknown)
    assert (CompressionStats(seconds_waited=1.0) - unknown).seconds_waited == 1.0


def test_a_span_is_that_of_every_total_however_it_is_annotated():
    @dataclass(frozen=True)
    class Wider(CompressionStats):
        retries: int | None = field(default=0, metadata=TOTAL)

    names = [f.name for f in fields(Wider) if f.default == 0]
    span = Wider(**dict.fromkeys(names, 3)) - Wider(**dict.fromkeys(names, 1))
    assert {name: getattr(span, name) for name in names} == dict.fromkeys(names, 2)
