"""Leaving `torch.inference_mode()`, in which a library may evaluate and exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference() -> Iterator[None]:
    """Run outside of `torch.inference_mode()`; decorates what makes state when a user calls it.

    A tensor that is made in that mode can never be written to outside of it, as the next step does.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False):
        yield
