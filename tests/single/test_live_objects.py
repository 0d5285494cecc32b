"""Searches for live objects, beside threads that build tuples."""

from __future__ import annotations

import sys
import threading

import pytest

from hvd_gradcomp.runtime.live_objects import live_callables, live_instances


class Model:
    def __call__(self):
        pass


class Smaller(Model):
    pass


@pytest.mark.parametrize("search", [live_callables, live_instances])
def test_a_search_leaves_tuples_alone_that_another_thread_builds(search):
    """CPython raises a SystemError in that thread if the tuple is referred to from elsewhere."""
    errors, stop, interval = [], threading.Event(), sys.getswitchinterval()

    def build():
        try:
            while not stop.is_set():
                tuple(x * 2 for x in range(300))
        except SystemError as error:
            errors.append(error)

    models = [Model(), Smaller(), Model]
    threads = [threading.Thread(target=build) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(30):
            live = {id(x) for x in search(Model)}
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not errors
    assert live == {id(x) for x in models[:2]}
