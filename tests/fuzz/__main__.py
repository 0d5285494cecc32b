"""Fuzzing of payloads, guided by the coverage of Python and, where clang built it, of C.

    tests/fuzz.sh .venv/bin/python -max_total_time=600

Arguments are libFuzzer's.
"""

from __future__ import annotations

import sys

import atheris
import torch

with atheris.instrument_imports(include=["hvd_gradcomp.codecs", "hvd_gradcomp.core"]):
    from tests.fuzz import payloads


def one(data: bytes) -> None:
    payloads.attack(data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
