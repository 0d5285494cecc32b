"""What a verb takes and gives: a tensor of the framework that runs."""

from __future__ import annotations

from typing import Any

Tensor = Any
