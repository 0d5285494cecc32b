"""Calls in threads of their own: TensorFlow has no handle of a collective that is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class BackgroundCall:
    """Result of a function that runs in a thread of its own, which does not keep Python alive.

    Args:
        run: the function.
        title: of the thread.
    """

    def __init__(self, run: Callable[[], Any], title: str) -> None:
        self._run, self._result = run, None
        self._error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._target, daemon=True, name=title).start()

    def _target(self) -> None:
        try:
            self._result = self._run()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def ready(self) -> bool:
        """Return True if it has ended."""
        return self._done.is_set()

    def wait(self) -> Any:
        """Return the result; raise the function's error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result
