"""What `make papers` says without training: its list, its errors, and the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.papers import __main__ as papers
from benchmarks.papers import data, page, phases_page, sizes
from benchmarks.papers.counting import Ledger, count
from benchmarks.papers.parts import Measured, Scale
from benchmarks.papers.phases import CASES as PHASES
from benchmarks.papers.phases import Phases
from benchmarks.papers.registry import PARTS
from benchmarks.papers.sizes import CASES, Sizes, measure
from benchmarks.papers.sizes_page import PRINTED, compare, section
from hvd_gradcomp import LGCCompressor
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import plan
from hvd_gradcomp.testing import World
from tests.fashion import write

ROOT = Path(__file__).resolve().parents[2]


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["papers", *words])
    return papers.main()


def result(score, ratio):
    """Of one seed, as `training.run` has it."""
    return {
        "score": score,
        "element_ratio": ratio,
        "ratio": ratio / 2,
        "late_ratio": ratio,
        "by_rank": [ratio, ratio],
        "behind": 3.5,
        "lost": None,
        "cpu_s": 60.0,
        "cpu_ms": [50.0],
        "parameters": 1000,
        "curve": [[10, 0.5]],
        "looks": [[10, 0.5, score]],
        "seen": None,
    }


def test_list_has_claims_settings_and_minutes(monkeypatch, capsys):
    assert call(monkeypatch, "--list") == 0
    text = capsys.readouterr().out
    for part in PARTS.values():
        assert f"{part.name}: {part.title}" in text and part.settings in text
        assert all(f"row: {row.key}, {row.ranks} ranks" in text for row in part.rows)
    assert text.count("minutes a seed") == len(PARTS)
    assert text.count("  claim: ") > 20


def test_a_part_has_rows_with_names_of_their_own_and_a_base():
    for part in PARTS.values():
        keys = [row.key for row in part.rows]
        assert len({*keys}) == len(keys)
        assert {row.base for row in part.rows} <= {*keys}
        assert {row.ranks for row in part.rows} <= {2, 4, 8}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "vgg"], "no part is called vgg; there are variance"),
        (["--rows", "sgd/nine"], "no sgd/nine among the rows"),
        (["--ranks", "two"], "--ranks must be whole numbers with commas, got two"),
        (["--seeds", "0"], "at least 1"),
        (["--images", "64"], "between 640 and 50000, got 64"),
    ],
)
def test_arguments_that_make_no_sense(monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit):
        call(monkeypatch, *words)
    assert message in capsys.readouterr().err


def test_rows_of_two_lengths_are_not_mixed(monkeypatch, capsys, tmp_path):
    part = PARTS["variance"]
    Measured(part, tmp_path).add(part.rows[0], Scale(images=640), 1, result(80.0, 1))
    with pytest.raises(SystemExit):
        call(monkeypatch, "--folder", str(tmp_path), "--parts", "variance")
    assert "has rows of 640 images" in capsys.readouterr().err


def test_what_is_there_is_not_run_again(monkeypatch, tmp_path):
    part = PARTS["variance"]
    Measured(part, tmp_path).add(part.row("sgd/none"), Scale(), 1, result(80.0, 1))
    started = []
    monkeypatch.setattr(papers, "start", lambda part, runs, ranks, options: started.append(runs))
    words = ["--folder", str(tmp_path), "--parts", "variance", "--rows", "sgd/none,sgd/strom-0.1"]
    monkeypatch.setattr(papers.data, "install", lambda folder: None)
    assert call(monkeypatch, *words, "--seeds", "2") == 0
    assert started == [[("sgd/strom-0.1", 1), ("sgd/none", 2), ("sgd/strom-0.1", 2)]]
    call(monkeypatch, *words, "--again")
    assert started[1] == [("sgd/none", 1), ("sgd/strom-0.1", 1)]


def test_the_page_is_made_of_what_was_measured(monkeypatch, capsys, tmp_path):
    part = PARTS["variance"]
    measured = Measured(part, tmp_path)
    for seed, score in ((1, 80.0), (2, 82.0), (3, 79.0)):
        measured.add(part.row("sgd/none"), Scale(), seed, result(score, 1.0))
        measured.add(part.row("sgd/variance-1"), Scale(), seed, result(score - 5, 30.0))
    assert call(monkeypatch, "--show", "--folder", str(tmp_path)) == 0
    text = (tmp_path / "papers.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    row = lines["momentum SGD, `VarianceCompressor(alpha=1)`"]
    assert "| 90.3 %, 52.4x | 75.00 % (74.00 to 77.00) | -5.00 | 30.0x | 15.0x | 3.5 |" in row
    claim = lines["Variance, alpha 1, momentum SGD: accuracy beside none"]
    assert claim.endswith("| -1.4 points | -5.0 points | **does not hold** |")
    claim = lines["Variance, alpha 1, momentum SGD: elements for one that is sent"]
    assert claim.endswith("| 52.4x | 30.0x | holds |")
    claim = lines["Variance, alpha 2, momentum SGD: elements for one that is sent"]
    assert claim.endswith("| 384x | not run | not run |")
    assert lines["Adam, `StromCompressor(tau=0.1)`"].count("not run") == 1
    assert "2 of 26 rows were run, with 3 seeds" in text
    summary = text.partition("Each of the four papers")[0]
    assert "Of 2 claims 1 hold here" in summary and "1 of 2 hold: accuracy holds" in summary
    assert (tmp_path / "variance.png").stat().st_size > 10_000
    assert not (tmp_path / "egc.png").exists()


def test_rows_whose_settings_have_changed_are_not_shown(tmp_path):
    part = PARTS["variance"]
    measured = Measured(part, tmp_path)
    measured.add(part.rows[0], Scale(), 1, result(80.0, 1.0))
    measured.content["rows"][0]["settings"]["rate"] = 7.0
    assert measured[part.rows[0].key] == []


def test_the_page_of_the_site_is_that_of_its_measurements():
    every = [Measured(part, ROOT / papers.FOLDER) for part in PARTS.values()]
    assert page.text(every, Path("measured/papers")) == (ROOT / papers.PAGE).read_text(), (
        "run python -m benchmarks.papers --show"
    )


def test_the_page_of_long_trainings_is_that_of_its_measurements():
    every = [Measured(part, ROOT / papers.LONG_FOLDER) for part in PARTS.values()]
    every = [measured for measured in every if measured.scale]
    text = page.text(every, Path("measured/papers-long"), page.length_of(every))
    assert text == (ROOT / papers.LONG_PAGE).read_text(), (
        "run python -m benchmarks.papers --long --show"
    )


@pytest.mark.parametrize(
    ("accuracy", "ratio", "verdicts"),
    [
        (78.5, 27.0, ["holds", "holds"]),
        (77.5, 11.0, ["in its direction", "in its direction"]),
        (77.0, 10.0, ["**does not hold**", "**does not hold**"]),
    ],
)
def test_a_claim_holds_in_its_direction(tmp_path, accuracy, ratio, verdicts):
    """The paper: 1.4 points behind none, at 52.4 elements for one that is sent."""
    measured = Measured(PARTS["variance"], tmp_path)
    measured.add(measured.part.row("sgd/none"), Scale(), 1, result(80.0, 1.0))
    measured.add(measured.part.row("sgd/variance-1"), Scale(), 1, result(accuracy, ratio))
    claims = {claim.text: claim for claim in measured.part.claims(measured)}
    name = "Variance, alpha 1, momentum SGD: "
    both = ("accuracy beside none", "elements for one that is sent")
    assert [page.verdict(claims[name + what]) for what in both] == verdicts


def test_data_of_a_folder(tmp_path):
    write(tmp_path, train=50, test=20)
    data.install(tmp_path)
    x, y = data.images(tmp_path, "train", 10, 30)
    assert x.shape == (20, 1, 28, 28) and y.shape == (20,)
    whole, labels = data.images(tmp_path, "train", 0, 50)
    assert x.equal(whole[10:30]) and y.equal(labels[10:30])
    with pytest.raises(data.DataError, match="fewer than 51 images"):
        data.images(tmp_path, "train", 0, 51)
    text = bytes(data.text(tmp_path).tolist()).decode()
    assert text.startswith("In the beginning") and "Ge1" not in text
    (tmp_path / "bible.txt").unlink()
    with pytest.raises(data.DataError, match=r"lacks bible.txt. Put the files there"):
        data.install(tmp_path)


def test_steps_of_phases():
    row = PARTS["lgc"].row("ring-2")
    assert row.lengths(Scale()) == [80, 120]
    assert row.lengths(Scale(images=640, epochs=1)) == [2, 3]


def test_a_row_may_have_another_length():
    part = PARTS["transformer"]
    steps = {row.at(Scale()).steps for row in part.rows}
    assert steps == {300, 1200}
    assert all(f"{row.at(Scale()).steps:,} steps" in row.title for row in part.rows)
    assert part.row("qsgd-1200").settings["length"] == 3
    assert "length" not in PARTS["variance"].rows[0].settings  # or older rows would not count


def test_a_part_without_a_paper_has_no_column_for_one(tmp_path):
    measured = Measured(PARTS["transformer"], tmp_path)
    measured.add(measured.part.row("none-300"), Scale(), 1, result(2.2, 1.0))
    measured.add(measured.part.row("qsgd-300"), Scale(), 1, result(2.2181, 1.0))
    text = page.text([measured], Path("measured"))
    assert "| method | ranks | here | beside none |" in text
    assert "| `QSGDCompressor(bits=4)`, 300 steps | 2 | 2.218 | +0.018 | 1.0x |" in text
    assert "| claim | advice | here | |" in text


# -- bytes at the papers' sizes ------------------------------------------------------------------

SHAPES = [("first", (8, 3, 3, 3)), ("body", (64, 512)), ("last", (10, 512))]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("pattern", ["ring_allreduce", "parameter_server"])
def test_pieces_of_a_step_are_those_of_the_method(pattern, ranks):
    lgc = LGCCompressor(pattern, alpha=0.01, full_steps=1, train_steps=2, momentum=0)
    pieces = count(lgc, SHAPES, ranks, steps=4).pieces
    assert pieces["layers sent whole"] == [4 * 8 * 3 * 3 * 3] * ranks
    assert pieces["last layer's values"] == [4 * 51] * ranks
    selected = 328  # 1 % of the body
    code = 4 * 4 * -(-selected // 16)
    if pattern == "ring_allreduce":
        assert pieces["code"] == [code] * ranks
        assert sorted(size > 0 for size in pieces["signs"]) == [False] * (ranks - 1) + [True]
    else:
        assert pieces["code"] == [0, code, *[0] * (ranks - 2)]
        assert pieces["innovation's values"] == [4 * 33] * ranks
        assert pieces[sizes.ANSWER][0] > 0 == sum(pieces[sizes.ANSWER][1:])


@pytest.mark.parametrize("pattern", ["ring_allreduce", "parameter_server"])
def test_tensors_without_data_send_as_many_bytes_as_others(pattern):
    lgc = LGCCompressor(pattern, alpha=0.01, full_steps=1, train_steps=2, momentum=0)
    steps = count(lgc, SHAPES, 2, steps=4).steps
    totals = [[0, 0] for _ in steps]
    for method, layout in plan(lgc, [(*layer, "float32") for layer in SHAPES], 1 << 20, ranks=2):
        world = World(method, TorchOps(), layout, 2)
        ledgers = [Ledger(), Ledger()]
        for runner, ledger in zip(world._runners, ledgers):
            runner.traffic = ledger
        for number, total in enumerate(totals):
            if number == 3 and method.whole_model:  # two steps teach an autoencoder nothing
                world.states = [
                    method.rehearsed(world.ops, layout, state, number) for state in world.states
                ]
            before = [ledger.bytes_sent for ledger in ledgers]
            world.step([torch.randn(layout.size) for _ in range(2)])
            sent = [ledger.bytes_sent - start for ledger, start in zip(ledgers, before)]
            total[:] = map(sum, zip(total, sent))
    assert totals == steps


def test_each_case_is_counted_and_named_by_its_paper():
    counted = Sizes(ROOT / papers.FOLDER)
    assert {case.key for case in CASES} == {*PRINTED}
    for case in CASES:
        row = counted[case.key]
        assert row is not None, f'run make papers ARGS="--parts bytes --rows {case.key}"'
        assert [sum(rank) for rank in zip(*row["pieces"].values())] == row["steps"][-1]
        assert len(row["steps"][-1]) == case.ranks
        part, key = PRINTED[case.key].small
        assert not key or PARTS[part].row(key)
    for key in ("ring-2", "server-2", "scalecom-8-percent", "egc-4", "variance-cifar-sgd-latest"):
        case = next(case for case in CASES if case.key == key)
        result = measure(case)
        assert {name: counted[key][name] for name in result} == result, "count it --again"
    expected = {"ResNet-50": 25_557_032, "ResNet-101, 10 classes": 42_520_650}
    for one in compare(counted):
        assert one.row["parameters"] == expected.get(one.case.network, one.row["parameters"])


def test_a_difference_has_a_reason():
    """A ratio beyond the factor, in which we send more, has bytes and a sentence on the page."""
    for one in compare(Sizes(ROOT / papers.FOLDER)):
        if one.pairs and one.differs:
            assert one.printed.why, one.case.key


def test_counts_whose_settings_have_changed_are_not_shown(tmp_path):
    counted = Sizes(tmp_path)
    assert section([], counted) == ""
    case = CASES[0]
    row = {"parameters": 100, "vectors": 0, "steps": [[4, 4]], "pieces": {"code": [4, 4]}}
    counted.add(case, row)
    assert Sizes(tmp_path).of_workers(case.key) == (100.0,)
    text = section([], Sizes(tmp_path))
    assert f"1 of {len(CASES)} rows were counted" in text and "| 100x | 100x |" in text
    old = counted.path.read_text().replace('"ranks": 2', '"ranks": 3')
    counted.path.write_text(old)
    assert Sizes(tmp_path)[case.key] is None


def test_bytes_are_counted_once(monkeypatch, capsys, tmp_path):
    row = {"parameters": 100, "vectors": 0, "steps": [[4, 4]], "pieces": {"code": [4, 4]}}
    calls = []
    part = papers.UNTRAINED["bytes"]._replace(measure=lambda case: calls.append(case.key) or row)
    monkeypatch.setitem(papers.UNTRAINED, "bytes", part)
    monkeypatch.setattr(papers.data, "install", lambda folder: None)
    words = ["--folder", str(tmp_path), "--parts", "bytes", "--rows", "ring-2,dgc-8"]
    assert call(monkeypatch, *words, "--ranks", "2") == 0
    assert call(monkeypatch, *words) == 0
    assert calls == ["ring-2", "dgc-8"]
    assert "## Bytes at the papers' sizes" in (tmp_path / "papers.md").read_text()
    assert call(monkeypatch, "--list", "--folder", str(tmp_path), "--parts", "bytes") == 0
    assert f"{len(CASES)} rows, 2 of them measured" in capsys.readouterr().out


def timed(case, dense, *phases):
    steps = [5.0] * case.steps
    for phase, seconds in zip(case.phases, phases):
        steps[phase.first : phase.last] = [seconds] * (phase.last - phase.first)
    return {"rate": "14826kbit", "dense": [dense] * 5, "steps": steps}


def test_times_by_phase_decide_the_claims(tmp_path):
    """The step in which the bases are made counts once in a cycle of 500."""
    phases = Phases(tmp_path)
    claim = phases_page.aggregation(phases)
    assert (claim.holds, claim.ours, phases_page.section(phases)) == (None, "not run", "")
    cases = {case.key: case for case in PHASES}
    phases.add(cases["gradiveq"], timed(cases["gradiveq"], 1.8, 0.4, 5.0, 0.2))
    mean = (99 * 0.4 + 5.0 + 400 * 0.2) / 500
    claim = phases_page.aggregation(phases)
    assert claim.ours.startswith(f"{1.8 / mean:.2f} times less") and claim.holds
    for pattern, top_k in (("ring", 0.9), ("server", 1.7)):
        case = cases[f"lgc-{pattern}"]
        phases.add(case, timed(case, 8.0, 8.0, 8 * top_k, 0.8))
    claim = phases_page.iterations(phases)
    assert "ring 1.00, 0.90, 0.10; server 1.00, 1.70, 0.10" in claim.ours and claim.holds is False
    assert "3 of 4 rows were timed" in phases_page.section(phases)


def test_every_case_was_timed():
    phases = Phases(ROOT / papers.FOLDER)
    for case in PHASES:
        row = phases[case.key]
        assert row is not None, f'run make papers ARGS="--parts phases --rows {case.key}"'
        assert len(row["steps"]) == case.steps
