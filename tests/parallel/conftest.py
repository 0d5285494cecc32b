"""Order of the tests: the longest first, so that at the end no worker waits for one of them."""

from __future__ import annotations

import pytest

# A minute and more each; those of `make sweep` are not here.
LONGEST = (
    "test_tensorflow.py::test_like_stock_horovod_and_bad_input",
    "test_tensorflow_exchange.py::test_exchange",
    "test_dropin.py::test_keras_as_horovod_s_own_examples_use_it",
    "test_docs.py::test_following[checkpoints]",
    "test_doctor.py::test_a_sound_installation_passes",
)


def place(item: pytest.Item) -> int:
    """Return a test's place among the longest; all others come behind them, as they were."""
    name = item.nodeid.rpartition("/")[2]
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)
