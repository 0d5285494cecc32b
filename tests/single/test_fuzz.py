"""Payloads that a sender has made up, of every method; `make fuzz` draws more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_gradcomp import BF16Compressor
from tests.fuzz import payloads

CORPUS = sorted(Path(payloads.__file__).with_name("corpus").iterdir())
# Ones; infinities; the largest number; small numbers one after another.
BODIES = [b"\xff" * 2000, b"\x00\x00\x80\x7f" * 500, b"\xff\xff\x7f\x7f" * 500, bytes(range(200))]


@pytest.mark.parametrize("method", range(len(payloads.METHODS)))
def test_every_method_decodes_it_or_refuses_it(method):
    ended = {
        payloads.attack(bytes([method, place + payloads.ROUNDS, how]) + body)
        for place in range(2)
        for how in (1, 3)
        for body in BODIES
    }
    assert ended <= {"decoded", "refused", "not finite"}


def test_what_was_found_before():
    for path in CORPUS:
        payloads.attack(path.read_bytes())


def test_a_forged_payload_has_the_right_checksum():
    """Else nothing beyond the checksum would be tried."""
    bf16 = next(i for i, one in enumerate(payloads.METHODS) if isinstance(one, BF16Compressor))
    honest = bytes([bf16, payloads.ROUNDS, 0])
    assert payloads.attack(honest) == "decoded"
    assert payloads.attack(honest + b"\x05\x00\x00\x41" * 3) == "decoded"
    assert payloads.attack(honest[:2] + b"\x01" + b"\xff" * 2000) == "refused"  # NaN
