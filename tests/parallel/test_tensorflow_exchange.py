"""TensorFlow over real Horovod: faults, process sets, sparse gradients, saving."""

from __future__ import annotations

import pytest

from tests.parallel.launch import launch, says

pytestmark = pytest.mark.parallel


DISCARDED = {
    "twice": "takes back the last exchange, once",
    "no rollback": "make the tape without rollback=False, or the optimizer with rollback=True",
    "keras": "make the tape without rollback=False, or the optimizer with rollback=True",
    "alone": "a rank is at another step",
    "jacobian": "a distributed tape exchanges gradients",
}


def test_exchange(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    first, second = launch("tensorflow_exchange", 2, "gloo", tmp_path)
    assert first["equal"] == second["equal"]
    assert first["own"] != second["own"]
    equal = first["equal"]
    for name in ("damaged payload, eager", "damaged payload, graph"):
        assert "a rank sent a damaged payload" in equal[name][0]
        assert "fine by rank:] [1 0]" in equal[name][0]
    assert equal["translated"] == []
    ours, stock, *_ = equal["sparse gradients"]
    assert ours == stock
    # Strom in Elias-Fano's code, whose check is 11 nodes; with plain indices; DGC; QSGD.
    limits = (140, 130, 165, 255)
    assert all(nodes <= limit for nodes, limit in zip(equal["nodes"], limits)), equal["nodes"]
    for each in (first, second):
        says(each["errors"], DISCARDED)


def test_another_frontend_of_horovod_imported_later(tmp_path):
    folder = tmp_path / "late"
    folder.mkdir()
    first, second = launch("tensorflow_exchange", 2, "gloo", folder)
    assert first == second


def test_ranks_without_batches_join(tmp_path):
    """One of them still has a reducer that the other has not."""
    folder = tmp_path / "joined"
    folder.mkdir()
    first, second = launch("tensorflow_exchange", 2, "gloo", folder)
    assert first == second
