"""C kernels of words whose indices travel by Elias-Fano's code give the bits of the plain ops."""

from __future__ import annotations

import pytest
import torch

from hvd_gradcomp.codecs.elias_fano import EliasFano
from hvd_gradcomp.ops.interface.bitpack import BitPacking
from hvd_gradcomp.ops.torch import TorchOps
from tests.kernels import NATIVE, threads
from tests.single.test_narrow_kernels import Both, frameworks, same

COUNTS = (1, 31, 32, 33, 500, 4097)


def words_of(count: int, size: int, bits: int, used: float = 0.8) -> torch.Tensor:
    """Ascending indices with random codes, and sinks behind them; bytes."""
    generator = torch.Generator().manual_seed(count)
    real = min(round(used * count), size - 1)
    index = torch.randint(size - 1, (2 * real,), generator=generator).unique()[:real]
    real = len(index)
    index = torch.cat((index, torch.full((count - real,), size - 1)))
    codes = torch.randint(1 << bits, (count,), generator=generator)
    return TorchOps().to_bytes(codes * (1 << 32 - bits) + index, "uint32")


def plain(name: str, ops: TorchOps, *arguments):
    return getattr(BitPacking, name)(ops, *arguments)


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("bits", [0, 1, 4, 31])
@pytest.mark.parametrize("count", COUNTS)
def test_there_and_back(framework, count, bits):
    both, ops = Both(framework), TorchOps(static=True)
    sizes = (2,) if bits == 31 else (2 * count + 2, 40 * count, 1 << 27)
    for size in sizes:
        code = EliasFano.of(1, count, size - 1)
        form = count, code.low, code.width, code.universe, bits
        for side in (0, 8):
            front = torch.arange(side).to(torch.uint8)
            body = torch.cat((front, words_of(count, size, bits)))
            coded = both("encode_words", body, side, *form)
            assert same(coded, plain("encode_words", ops, body, side, *form))
            bodies = torch.stack([coded, coded])
            back, sound = both("decode_words", bodies, side, *form)
            assert all(map(same, (back[0], back[1]), (body, body)))
            assert sound.tolist() == [True, True]


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("count", COUNTS)
def test_damaged_bodies_give_the_same_words(framework, count, bits):
    """Bits that nobody set: too many, too few, none; indices stay in range, or are found out."""
    both, ops, size = Both(framework), TorchOps(static=True), 20 * count
    code = EliasFano.of(1, count, size - 1)
    form = count, code.low, code.width, code.universe, bits
    coded = both("encode_words", words_of(count, size, bits), 0, *form)
    generator = torch.Generator().manual_seed(count)
    noise = torch.randint(256, coded.shape, generator=generator).to(torch.uint8)
    rows = [coded ^ (noise & (noise >> 3)), noise, noise & 0, noise | 255, coded.clone()]
    rows[-1][len(coded) // 2] ^= 16
    bodies = torch.stack(rows)
    with threads(2):
        ours = both("decode_words", bodies, 0, *form)
    theirs = plain("decode_words", ops, bodies, 0, *form)
    assert all(map(same, ours, theirs))
    index = ops.from_bytes(ours[0], "uint32") % (1 << 32 - bits)
    assert int(index.max()) < size


@NATIVE
def test_what_does_not_fit_is_refused():
    ops = TorchOps()
    body = torch.zeros(64, dtype=torch.uint8)
    for ints in ((0, 16, 40, 20), (0, 16, -1, 20), (2, 16, 2, 20), (0, 17, 2, 20), (0, 16, 2, -1)):
        with pytest.raises(ValueError, match="encode_words"):
            out = torch.zeros(256, dtype=torch.uint8)
            ops.native("encode_words", (body,), (out,), (*ints, 4))
    with pytest.raises(ValueError, match="decode_words"):
        out = torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, dtype=torch.bool)
        ops.native("decode_words", (body[None],), out, (0, 16, 2, 20, 4, 1 << 30))
    with pytest.raises(Exception, match="outside"):  # an index beyond what the code has bits for
        beyond = torch.full((64,), 255, dtype=torch.uint8)
        ops.encode_words(beyond, 0, 16, 2, 20, 15, 4)
