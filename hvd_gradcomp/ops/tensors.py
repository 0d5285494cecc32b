"""Type of the arguments and results of ops: a tensor of the framework in use."""

from __future__ import annotations

from typing import Any

Tensor = Any
