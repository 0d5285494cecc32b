"""The page on local steps is held to what `benchmarks.rounds` has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="needs PyTorch")
from benchmarks import rounds

ROOT = Path(rounds.__file__).parent.parent


def test_the_page_has_the_tables_of_the_measurement():
    page = (ROOT / rounds.PAGE).read_text()
    result = json.loads((ROOT / "docs/measured/rounds.json").read_text())
    assert rounds.with_tables(page, result) == page
