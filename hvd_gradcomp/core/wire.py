"""One uint8 buffer for a bucket: a header, then the parts one after another.

The header is eight little-endian 32-bit words:

    0  "G", "C", format version, algorithm      (one byte each; `registry` has the last)
    1  digest of the layout and of the compressor's hyper-parameters
    2  step, modulo 2**32
    3  rung: how much room the body has
    4  elements sent
    5  elements that should have been sent: more than were sent when the room was too small
    6  1 if the gradient of this rank is not finite; its body is then empty of meaning
    7  checksum of words 0 to 6 and of the body

The checksum is the sum of all 32-bit words, each times an odd weight that grows with its place,
modulo 2**32. Any change within one word is found, and so is a swap of two unequal words unless
their difference times that of their weights is a multiple of 2**32. It is written in the verbs of
`ops`, so a GPU computes it where the payload lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hvd_gradcomp.ops import NonFiniteGradientError, Ops, Tensor
from hvd_gradcomp.ops.interface.header import Field, Weighing

_PLAIN = Weighing()
MAGIC = (ord("G"), ord("C"))
VERSION = 1
HEADER_BYTES = 32
ITEMSIZE = {"bytes": 1, "uint8": 1, "int8": 1, "float16": 2, "float32": 4, "uint32": 4, "int64": 8}


DAMAGED = (
    "rank {ranks} sent a damaged payload: the checksum does not match. If it happens again, "
    "suspect memory or the network of that host"
)
_FOREIGN = "rank {ranks} sent something that is no hvd_gradcomp payload"
_OTHER_VERSION = (
    "rank {ranks} sent another wire format version; install the same hvd_gradcomp on all ranks"
)
_OTHER_ALGORITHM = "rank {ranks} uses another algorithm; pass the same compression= on all ranks"
_OTHER_MODEL = (
    "rank {ranks} has another model or other hyper-parameters; build the same model and compressor "
    "on all ranks"
)
OTHER_STEP = "rank {ranks} is at another step; load the same checkpoint on all ranks"
IS_NOT_FINITE = "has a NaN or an infinity in its gradient"
NOT_FINITE = (
    f"rank {{ranks}} {IS_NOT_FINITE}; nothing was exchanged. Look for a "
    "learning rate that is too high, a division by zero, or half precision that overflows"
)
ANY_NOT_FINITE = NOT_FINITE.replace(
    f"rank {{ranks}} {IS_NOT_FINITE};", f"a rank {IS_NOT_FINITE}, or the sum of all overflows;"
)
_OTHER_SIZE = "rank {ranks} uses another payload size; load the same checkpoint on all ranks"
_FIELDS = {  # of a header, by what is wrong where they are not as expected
    DAMAGED: None,
    _FOREIGN: Field(0, 0, 16),
    _OTHER_VERSION: Field(0, 16, 8),
    _OTHER_ALGORITHM: Field(0, 24, 8),
    _OTHER_MODEL: Field(1),
    OTHER_STEP: Field(2),
    _OTHER_SIZE: Field(3),
}


class Part(NamedTuple):
    """A named piece of the body: its dtype on the wire and how many items it holds.

    "uint8" is small integers, which the verbs hold as int64; "bytes" is what is packed already.
    """

    dtype: str
    count: Any  # int, or a scalar tensor in a graph


class Header(NamedTuple):
    """What a rank says about its payload; `rung`, `sent` and `wanted` are scalars, or [world]."""

    algorithm: int
    digest: int
    step: Any
    rung: Any
    sent: Any
    wanted: Any
    finite: Any = True
    intact: Any = None  # bool [world] where a bad payload cannot raise at once, see `Ops.require`
    needed: Any = None  # the largest `wanted` of all, on the host, where it is known
    weights: Any = None  # float32 [world], what each payload counts for, where it is known


def body_bytes(parts: Mapping[str, Part]) -> Any:
    """The length of the body: every part is padded to whole 32-bit words."""
    return sum(_padded(part) for part in parts.values())


def starts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Where each part of the body begins, in bytes."""
    places, end = {}, 0
    for name, part in parts.items():
        places[name] = end
        end = end + _padded(part)
    return places


def _padded(part: Part) -> Any:
    return (part.count * ITEMSIZE[part.dtype] + 3) // 4 * 4


def pack_body(ops: Ops, parts: Mapping[str, Part], payload: Mapping[str, Tensor]) -> Tensor:
    """The payload's parts as one uint8 vector of `body_bytes(parts)`."""
    pieces = packed(ops, parts, payload)
    return ops.concat(pieces) if len(pieces) > 1 else pieces[0]


def packed(ops: Ops, parts: Mapping[str, Part], payload: Mapping[str, Tensor]) -> list[Tensor]:
    """The same, not yet one."""
    pieces = []
    for name, part in parts.items():
        data = payload[name]
        if part.dtype != "bytes":
            data = ops.to_bytes(data, part.dtype)
        pieces.append(data)
        padding = _padded(part) - part.count * ITEMSIZE[part.dtype]
        if not (isinstance(padding, int) and padding == 0):
            pieces.append(ops.zeros((padding,), "uint8"))
    return pieces


def unpack_body(ops: Ops, parts: Mapping[str, Part], body: Tensor) -> dict[str, Tensor]:
    """The parts of every rank's body: body is [world, bytes], each part [world, count]."""
    return {name: unpack_part(ops, parts, body, name) for name in parts}


def unpack_part(ops: Ops, parts: Mapping[str, Part], body: Tensor, name: str) -> Tensor:
    """One of them."""
    part, start = parts[name], starts(parts)[name]
    piece = body[:, start : start + part.count * ITEMSIZE[part.dtype]]
    return piece if part.dtype == "bytes" else ops.from_bytes(piece, part.dtype)


def seal(ops: Ops, header: Header, *body: Tensor) -> Tensor:
    """Header and body as the buffer that travels; uint8 [HEADER_BYTES + body].

    The body may be in pieces, each of whole words.
    """
    tag = MAGIC[0] | MAGIC[1] << 8 | VERSION << 16 | header.algorithm << 24
    values = tag, header.digest, header.step, header.rung, header.sent, header.wanted
    return ops.frame(values, header.finite, body)


def unpack(
    ops: Ops, expected: Header, buffers: Tensor, weighing: Weighing = _PLAIN
) -> tuple[Header, Tensor]:
    """Every rank's header and body, checked; buffers is uint8 [world, bytes].

    Args:
        ops: the verbs.
        expected: what this rank would say.
        buffers: of all.
        weighing: how payloads will be added up, if they are.

    Returns:
        The headers with `sent` and `wanted` as int64 [world], and the bodies [world, bytes].
        Where `intact` is given, what other ranks sent must be left out of the sum.

    Raises:
        PayloadError: naming the ranks whose payload is damaged, or made by another version,
            algorithm, model or at another step. All ranks see the same buffers, so all raise.
        NonFiniteGradientError: naming the ranks that say so of theirs.
    """
    poisoned = NOT_FINITE, NonFiniteGradientError
    given = *_expecting(expected, buffers), tuple(_FIELDS), poisoned, weighing
    words, intact, needed, weights = ops.admit(*given)
    said = {"intact": intact, "needed": needed, "weights": weights}
    header = expected._replace(sent=words[:, 4], wanted=words[:, 5], **said)
    return header, bodies_of(buffers)


def examined(ops: Ops, expected: Header, buffers: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each buffer is what was expected, and finite; bool [world] both. Raises nothing."""
    words, held = ops.examine(*_expecting(expected, buffers))
    intact = held[0]
    for fact in held[1:]:
        intact = intact & fact
    return intact, words[:, 6] == 0


def bodies_of(buffers: Tensor) -> Tensor:
    """What follows the headers; [world, bytes]."""
    return buffers[:, HEADER_BYTES:]


def _expecting(
    expected: Header, buffers: Tensor
) -> tuple[Tensor, int, list[Field], tuple[Any, ...]]:
    """What `Ops.examine` takes."""
    numbers = (
        MAGIC[0] | MAGIC[1] << 8,
        VERSION,
        expected.algorithm,
        expected.digest,
        expected.step,
        expected.rung,
    )
    fields = [field for field in _FIELDS.values() if field is not None]
    return buffers, HEADER_BYTES // 4 - 1, fields, numbers
