"""Wire format: one uint8 buffer for a bucket, a header and then the parts one after another.

The header is eight little-endian 32-bit words:

    0  "G", format version (a byte each), number of the method (two bytes; see `registry`)
    1  digest of the layout and of the compressor's hyper-parameters
    2  step, modulo 2**32
    3  capacity level of the body
    4  elements sent
    5  elements that should have been sent: more than were sent if the capacity was too small
    6  1 if this rank's gradient is not finite; its body is then meaningless
    7  checksum of words 0 to 6 and of the body

The checksum is the sum of all 32-bit words, each times an odd weight that grows with its place,
modulo 2**32. It detects any change within one word, and a swap of two unequal words unless their
difference times that of their weights is a multiple of 2**32. It is computed with the operations
of `ops`, so a GPU does that where the payload lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.ops import NonFiniteGradientError, Ops, Tensor
from hvd_gradcomp.ops.interface.header import Field, ReductionSpec

_PLAIN = ReductionSpec()
MAGIC = ord("G")
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
_FIELDS = {  # of a header, by the error message if they are not as expected
    DAMAGED: None,
    _FOREIGN: Field(0, 0, 8),
    _OTHER_VERSION: Field(0, 8, 8),
    _OTHER_ALGORITHM: Field(0, 16, 16),
    _OTHER_MODEL: Field(1),
    OTHER_STEP: Field(2),
    _OTHER_SIZE: Field(3),
}


class Part(NamedTuple):
    """Named piece of the body: its dtype on the wire and how many items it holds.

    "uint8" is small integers, which are int64 in memory; "bytes" is already packed.
    """

    dtype: str
    count: Any  # int, or a scalar tensor in a graph


class Header(NamedTuple):
    """Header of a rank's payload; `level`, `sent` and `wanted` are scalars, or [world]."""

    algorithm: int
    digest: int
    step: Any
    level: Any
    sent: Any
    wanted: Any
    finite: Any = True
    intact: Any = None  # bool [world] if a bad payload cannot raise at once, see `Ops.require`
    needed: Any = None  # the largest `wanted` of all ranks, on the host, if known
    weights: Any = None  # float32 [world], the weight of each payload, if known


def body_bytes(parts: Mapping[str, Part]) -> Any:
    """Return the length of the body: every part is padded to whole 32-bit words."""
    return sum(_padded(part) for part in parts.values())


def packed_bytes(parts: Mapping[str, Part]) -> int:
    """Return the bytes of a payload with these parts, header included."""
    return HEADER_BYTES + int(body_bytes(parts))


def starts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the offset of each part in the body, in bytes."""
    places, end = {}, 0
    for name, part in parts.items():
        places[name] = end
        end = end + _padded(part)
    return places


def _padded(part: Part) -> Any:
    return (part.count * ITEMSIZE[part.dtype] + 3) // 4 * 4


def pack_body(ops: Ops, parts: Mapping[str, Part], payload: Mapping[str, Tensor]) -> Tensor:
    """Pack the payload's parts into one uint8 vector of `body_bytes(parts)`."""
    pieces = pack_pieces(ops, parts, payload)
    return ops.concat(pieces) if len(pieces) > 1 else pieces[0]


def pack_pieces(ops: Ops, parts: Mapping[str, Part], payload: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the same as pieces, before they are concatenated."""
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


def pack_rows(
    ops: Ops, parts: Mapping[str, Part], payload: Mapping[str, Tensor], rows: int
) -> list[list[Tensor]]:
    """Return the pieces of several bodies, see `pack_pieces`; a row of each part for each."""
    bodies: list[list[Tensor]] = [[] for _ in range(rows)]
    for name, part in parts.items():
        data = payload[name]
        piece = data if part.dtype == "bytes" else ops.to_bytes(data, part.dtype)
        padding = _padded(part) - part.count * ITEMSIZE[part.dtype]
        for row, body in enumerate(bodies):
            body.append(piece[row])
            if not (isinstance(padding, int) and padding == 0):
                body.append(ops.zeros((padding,), "uint8"))
    return bodies


def unpack_body(ops: Ops, parts: Mapping[str, Part], body: Tensor) -> dict[str, Tensor]:
    """Return the parts of every rank's body: body is [world, bytes], each part [world, count]."""
    return {name: _piece(ops, body, parts[name], start) for name, start in starts(parts).items()}


def unpack_part(ops: Ops, parts: Mapping[str, Part], body: Tensor, name: str) -> Tensor:
    """Return one part of every rank's body, as in `unpack_body`."""
    return _piece(ops, body, parts[name], starts(parts)[name])


def _piece(ops: Ops, body: Tensor, part: Part, start: Any) -> Tensor:
    piece = body[:, start : start + part.count * ITEMSIZE[part.dtype]]
    return piece if part.dtype == "bytes" else ops.from_bytes(piece, part.dtype)


def pack(ops: Ops, header: Header, *body: Tensor) -> Tensor:
    """Pack header and body into the buffer that travels; uint8 [HEADER_BYTES + body].

    The body may be in pieces, each of whole words.
    """
    return ops.frame(_words(header), header.finite, body)


def pack_all(ops: Ops, header: Header, bodies: Sequence[Sequence[Tensor]]) -> Tensor:
    """Pack several bodies of one length behind the same header; uint8 [bodies, bytes].

    Each is in as many pieces.
    """
    return ops.frames(_words(header), header.finite, bodies)


def _words(header: Header) -> tuple[Any, ...]:
    tag = MAGIC | VERSION << 8 | header.algorithm << 16
    return tag, header.digest, header.step, header.level, header.sent, header.wanted


def unpack(
    ops: Ops, expected: Header, buffers: Tensor, spec: ReductionSpec = _PLAIN
) -> tuple[Header, Tensor]:
    """Check every rank's header and body, and return them; buffers is uint8 [world, bytes].

    Args:
        ops: the tensor operations.
        expected: this rank's own header.
        buffers: of all ranks.
        spec: how payloads will be summed, if they are.

    Returns:
        The headers with `sent` and `wanted` as int64 [world], and the bodies [world, bytes].
        If `intact` is given, payloads for which it is False must be left out of the sum.

    Raises:
        PayloadError: naming the ranks whose payload is damaged, or made by another version,
            algorithm, model or at another step. All ranks see the same buffers, so all raise.
        NonFiniteGradientError: naming the ranks whose header reports that.
    """
    poisoned = NOT_FINITE, NonFiniteGradientError
    arguments = *_expecting(expected, buffers), tuple(_FIELDS), poisoned, spec
    words, intact, needed, weights = ops.validate_headers(*arguments)
    checks = {"intact": intact, "needed": needed, "weights": weights}
    header = expected._replace(sent=words[4], wanted=words[5], **checks)
    return header, bodies_of(buffers)


def examine(ops: Ops, expected: Header, buffers: Tensor) -> tuple[Tensor, Tensor]:
    """Return if each buffer is as expected, and if it is finite; bool [world] both. Never raise."""
    words, matches = ops.examine(*_expecting(expected, buffers))
    intact = matches[0]
    for match in matches[1:]:
        intact = intact & match
    return intact, words[6] == 0


def bodies_of(buffers: Tensor) -> Tensor:
    """Return the bytes after the headers; [world, bytes]."""
    return buffers[:, HEADER_BYTES:]


def _expecting(
    expected: Header, buffers: Tensor
) -> tuple[Tensor, int, list[Field], tuple[Any, ...]]:
    """Return the arguments of `Ops.examine`."""
    numbers = (
        MAGIC,
        VERSION,
        expected.algorithm,
        expected.digest,
        expected.step,
        expected.level,
    )
    fields = [field for field in _FIELDS.values() if field is not None]
    return buffers, HEADER_BYTES // 4 - 1, fields, numbers
