"""Line at the beginning of an exchange, and counts, as a user sees them without Horovod."""

from __future__ import annotations

import pytest

from tests.parallel.test_ddp import processes

pytestmark = pytest.mark.parallel


def test_four_ranks(tmp_path):
    processes(tmp_path, 4, "announced", "counted", worker="seen_at_work")
