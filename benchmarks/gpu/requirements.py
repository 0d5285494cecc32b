"""Packages that the parts import: they are looked for, so that all that lack are named at once."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

ALWAYS = ("torch", "click", "rich", "safetensors", "tabulate")
TESTS = ("pytest", "hypothesis")
NEEDS: dict[str, tuple[str, ...]] = {  # parts in the order of their worth
    "kernels": (*TESTS, "triton"),
    "fsdp": (),
    "local": (),
    "training": ("torchvision",),
    "exchange": (),
    "steps": (),
    "reads": TESTS,
    "horovod": (*TESTS, "horovod"),
}


def needed(part: str, device: str) -> tuple[str, ...]:
    """Return the packages that a part needs beside `ALWAYS`; on a CPU it trains no ResNet-50."""
    return () if part == "training" and device == "cpu" else NEEDS[part]


def missing(packages: Iterable[str]) -> list[str]:
    """Return those that are not installed."""
    return [package for package in dict.fromkeys(packages) if find_spec(package) is None]
