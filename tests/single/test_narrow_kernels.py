"""C kernels of narrow numbers give the bits of the plain ops, on both frameworks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_gradcomp.core.row_groups import RowGroup, RowGroups
from hvd_gradcomp.ops.interface.quantization import Quantization
from hvd_gradcomp.ops.torch import TorchOps
from tests.kernels import NATIVE, threads

SIZES = (1, 31, 32, 33, 4095, 4096, 4097, 100_003)
KEYED = {"nearest": False, "stochastic": True}


def groups_of(size: int, length: int = 96) -> RowGroups:
    """Blocks of a length, with a gap before them if there is room, and a shorter one behind."""
    start = 5 if size > 200 else 0
    whole, rest = divmod(size - start, length)
    runs = [RowGroup(start, whole, length)] if whole else []
    if rest:
        runs.append(RowGroup(start + whole * length, 1, rest))
    return RowGroups(tuple(runs))


def noise(size: int, seed: int = 1) -> torch.Tensor:
    """Numbers of all magnitudes, ties between codes, zeros of both signs; padded to words."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(-(-size // 32) * 32, generator=generator)
    x *= 10.0 ** (6 * torch.rand(x.shape, generator=generator) - 3)
    x[::7] = torch.round(x[::7] * 4) / 4
    bits = x[3::11].view(torch.int32)
    halfway = bits & -0x10000 | 0x8000  # between two of bfloat16
    bits.copy_(torch.where(x[3::11] == 0, bits, halfway))  # TensorFlow flushes denormal numbers
    x[1::13], x[2::17] = 0.0, -0.0
    x[size:] = 0.0
    return x


def plain(name: str):
    """The plain op, which runs on the same tensors."""
    return getattr(Quantization, name)


def frameworks():
    parameters = [pytest.param("torch", marks=NATIVE)]
    parameters.append(pytest.param("tensorflow"))
    return parameters


class Both:
    """Ops of a framework that take torch's tensors, and give them back."""

    def __init__(self, name: str) -> None:
        if name == "torch":
            self.ops, self.of, self.back = TorchOps(), lambda x: x.clone(), lambda x: x
        else:
            tf = pytest.importorskip("tensorflow")
            from hvd_gradcomp.ops.tensorflow import TensorFlowOps

            self.ops = TensorFlowOps()
            self.of = lambda x: tf.constant(x.numpy().copy())
            self.back = lambda x: torch.from_numpy(np.array(x))
        if self.ops.native is None:
            pytest.skip("without the C library")

    def __call__(self, op: str, *arguments):
        result = getattr(self.ops, op)(*map(self.convert, arguments))
        return tuple(map(self.back, result)) if isinstance(result, tuple) else self.back(result)

    def convert(self, x):
        if isinstance(x, list):
            return [self.convert(each) for each in x]
        return self.of(x) if isinstance(x, torch.Tensor) else x


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """To the bit, NaNs and the signs of zeros too."""
    return ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounding", KEYED)
def test_bfloat16(framework, count, size, rounding):
    both, ops, groups = Both(framework), TorchOps(static=True), groups_of(size)
    key = torch.tensor([4_294_967_000, 12345]) if KEYED[rounding] else None
    weights = torch.tensor([0.5, -0.25])
    with threads(count):
        rows = []
        for seed in (1, 2):
            x = noise(size, seed)
            rows.append(both("encode_floats", groups, x, None, 16, key))
            assert same(rows[-1], plain("encode_floats")(ops, groups, x, None, 16, key))
        packed = torch.stack(rows)
        for base in (None, noise(size, 3)):
            out = torch.empty_like(x).fill_(7.0)
            ours = both("add_floats", groups, base, out, packed, None, 16, weights)
            theirs = plain("add_floats")(ops, groups, base, out, packed, None, 16, weights)
            assert same(ours, theirs)


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [*SIZES, 700_001])
def test_codes_and_what_they_are_coded_by(framework, count, size):
    """In one pass; of groups that end beyond what stays in a cache, too."""
    both, ops, x = Both(framework), TorchOps(static=True), noise(size)
    key = torch.tensor([4_294_967_000, 12345])
    with threads(count):
        for length in (96, 100_000):
            groups = groups_of(size, length)
            for arguments in ((8, None), (8, key), (4, key)):
                ours = both("encode_peaks", groups, x, *arguments)
                assert all(map(same, ours, ops.encode_peaks(groups, x, *arguments)))
            for powers in (False, True):
                ours = both("encode_e4m3", groups, x, powers)
                assert all(map(same, ours, ops.encode_e4m3(groups, x, powers)))
        for rounding in (None, key):
            ours = both("encode_bfloat16", x, rounding)
            assert all(map(same, ours, ops.encode_bfloat16(x, rounding)))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ranks", [2, 9])
def test_sums_of_few_ranks_and_of_many(framework, count, ranks):
    """Few are summed in one pass, past the caches if there is much; groups begin anywhere."""
    both, ops, size = Both(framework), TorchOps(static=True), 270_001
    weights = torch.linspace(-0.5, 1.0, ranks)
    rows = [noise(size, seed) for seed in range(ranks)]
    whole = RowGroups((RowGroup(32, size // 256 - 1, 256), RowGroup(size - 70, 1, 69)))
    with threads(count):
        for groups in (groups_of(size), whole):
            floats = torch.stack([ops.encode_floats(groups, x, None, 16, None) for x in rows])
            scales, levels = map(
                torch.stack, zip(*(ops.encode_peaks(groups, x, 8, None) for x in rows))
            )
            units, narrow = map(
                torch.stack, zip(*(ops.encode_e4m3(groups, x, False) for x in rows))
            )
            for base in (None, noise(size, 11)):
                out = torch.empty_like(rows[0]).fill_(7.0)
                for name, *arguments in (
                    ("add_floats", floats, None, 16, weights),
                    ("add_floats", narrow, units, 8, weights),
                    ("add_levels", levels, scales, 8, weights),
                ):
                    ours = both(name, groups, base, out, *arguments)
                    theirs = plain(name)(ops, groups, base, out, *arguments)
                    # Padding of the base keeps the sign of a zero.
                    assert torch.equal(ours, theirs), name
                    if base is None:
                        assert same(ours, theirs), name


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("lengths", [(4,), (3, 1), (0, 8, 4), (30, 400_002), (4, 5_000_000, 40)])
def test_frames(framework, count, lengths):
    both, ops = Both(framework), TorchOps(static=True)
    generator = torch.Generator().manual_seed(1)
    values = 7, (1 << 32) - 1

    def part(size, start):
        drawn = torch.randint(256, (size + start,), dtype=torch.uint8, generator=generator)
        return drawn[start:]

    bodies = [[part(n, place * (len(lengths) > 1)) for n in lengths] for place in range(3)]
    with threads(count):
        assert same(both("frames", values, True, bodies), ops.frames(values, True, bodies))
        assert same(both("frame", values, False, bodies[1]), ops.frame(values, False, bodies[1]))


@NATIVE
def test_a_frame_around_a_body_that_lies_behind_room_for_it():
    ops, x = TorchOps(), noise(100_003)
    groups = groups_of(x.shape[0])
    scale, codes = ops.encode_peaks(groups, x, 8, None)
    expected = TorchOps(static=True).frame((1, 2), True, [ops.to_bytes(scale, "float32"), codes])
    parts = [ops.to_bytes(scale, "float32"), codes]
    whole = ops.frame((1, 2), True, parts)
    assert same(whole, expected) and whole[-codes.shape[0] :].data_ptr() == codes.data_ptr()
    assert same(ops.frame((1, 2), True, parts), expected), "once more, elsewhere"
    assert whole.data_ptr() != ops.frame((1, 2), True, parts).data_ptr()


@NATIVE
def test_bfloat16_of_what_is_not_finite():
    ops = TorchOps()
    bits = torch.tensor([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 1, 0x8000])
    x = torch.cat((bits, bits - (1 << 31), torch.zeros(18, dtype=torch.int64)))
    x = x.to(torch.int32).view(torch.float32)
    for key in (None, torch.tensor([1, 2])):
        for seed in range(3):
            order = torch.randperm(32, generator=torch.Generator().manual_seed(seed))
            ours = ops.encode_floats(RowGroups(()), x[order], None, 16, key)
            assert same(ours, plain("encode_floats")(ops, RowGroups(()), x[order], None, 16, key))
    rows = ours.view(1, -1)
    arguments = RowGroups(()), None, torch.empty(32), rows, None, 16, torch.ones(1)
    ours, theirs = ops.add_floats(*arguments), plain("add_floats")(ops, *arguments)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("size", SIZES)
def test_ops_of_a_gpu_without_kernels(size, monkeypatch):
    """They take PyTorch's own narrow types, and give the bits of the plain ops."""
    ops, host, groups = TorchOps(static=True), TorchOps(static=True), groups_of(size)
    monkeypatch.setattr(ops, "on_host", False)
    monkeypatch.setattr(ops, "from_host", lambda numbers, dtype: torch.tensor(numbers, dtype=dtype))
    x, weights = noise(size), torch.ones(1)
    unit = host.group_maxima(groups, x) * (1.0 / 448.0)
    unit[1::5] = 0.0
    for units, bits, key in (
        (None, 16, None),
        (None, 16, torch.tensor([1, 2])),
        (unit, 8, None),
    ):
        codes = ops.encode_floats(groups, x, units, bits, key)
        assert same(codes, host.encode_floats(groups, x, units, bits, key))
        rows = None if units is None else units[None]
        arguments = groups, None, torch.empty_like(x), codes[None], rows, bits, weights
        assert torch.equal(ops.add_floats(*arguments), host.add_floats(*arguments))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_e4m3(framework, count, size):
    both, ops, groups = Both(framework), TorchOps(static=True), groups_of(size)
    weights = torch.tensor([0.5, -0.25])
    with threads(count):
        rows, units = [], []
        for seed in (1, 2):
            x = noise(size, seed)
            unit = plain("group_maxima")(ops, groups, x) * (1.0 / 448.0)
            unit[::3] = 2.0 ** torch.ceil(torch.log2(unit[::3]))
            unit[1::5] = 0.0
            rows.append(both("encode_floats", groups, x, unit, 8, None))
            units.append(unit)
            theirs = plain("encode_floats")(ops, groups, x, unit, 8, None)
            assert same(rows[-1], theirs)
        packed, unit = torch.stack(rows), torch.stack(units)
        for base in (None, noise(size, 3)):
            out = torch.empty_like(x).fill_(7.0)
            ours = both("add_floats", groups, base, out, packed, unit, 8, weights)
            theirs = plain("add_floats")(ops, groups, base, out, packed, unit, 8, weights)
            assert torch.equal(ours, theirs)


@NATIVE
def test_every_code_of_eight_bits():
    ops, groups = TorchOps(), RowGroups((RowGroup(0, 2, 128),))
    packed = torch.arange(256).to(torch.uint8).view(1, -1)
    arguments = groups, None, torch.empty(256), packed, torch.tensor([[3.0, 0.1]]), 8, torch.ones(1)
    assert same(ops.add_floats(*arguments), plain("add_floats")(ops, *arguments))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nearest_levels(framework, count, size, bits):
    both, ops, groups = Both(framework), TorchOps(static=True), groups_of(size)
    x = noise(size)
    scale = plain("group_maxima")(ops, groups, x)
    scale[1::5] = 0.0
    scale[2::5] *= 0.5  # some lie beyond
    with threads(count):
        ours = both("encode_levels", groups, x, scale, bits, None)
    assert same(ours, plain("encode_levels")(ops, groups, x, scale, bits, None))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 7, 96, 1 << 20])
def test_means(framework, count, size, length):
    both, ops, groups = Both(framework), TorchOps(static=True), groups_of(size, length)
    x = noise(size)
    with threads(count):
        ours = both("group_means", groups, x)
    assert same(ours, plain("group_means")(ops, groups, x))


@NATIVE
def test_nothing_is_read_or_written_beyond_what_is_there():
    ops, groups, x = TorchOps(), RowGroups((RowGroup(0, 2, 32),)), torch.ones(64)
    with pytest.raises(ValueError, match="encode_floats"):
        ops.encode_floats(groups, x, torch.ones(1), 8, None)
    with pytest.raises(ValueError, match="encode_floats"):
        ops.encode_floats(RowGroups((RowGroup(0, 3, 32),)), x, None, 16, None)
    for op, arguments in {"encode_peaks": (8, None), "encode_e4m3": (False,)}.items():
        with pytest.raises(ValueError, match=op):
            getattr(ops, op)(RowGroups((RowGroup(0, 3, 32),)), x, *arguments)
    with pytest.raises(ValueError, match="encode_bfloat16"):
        ops.encode_bfloat16(torch.ones(63), None)
    part = torch.zeros(8, dtype=torch.uint8)
    for wrong in ([[part], [part[:4]]], [[part], [part, part]], [[part[:3]], [part[:3]]]):
        with pytest.raises(ValueError, match="frame"):
            ops.frames((1,), True, wrong)
    short = torch.zeros((2, 124), dtype=torch.uint8)
    with pytest.raises(ValueError, match="a code for each"):
        ops.add_floats(groups, None, torch.empty(64), short, None, 16, torch.ones(2))
    codes = torch.zeros((2, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="a value for each"):
        ops.add_floats(groups, None, torch.empty(64), codes, torch.ones(2, 1), 8, torch.ones(2))


@pytest.mark.parametrize("framework", frameworks())
@pytest.mark.parametrize("size", [1, 33, 4097, 300_001])
def test_sums_of_bfloat16_that_are_checked(framework, size):
    both, ops, x = Both(framework), TorchOps(static=True), noise(size)
    for value in (0.0, float("inf"), float("nan"), 3e38):
        x[size - 1] = value
        codes = plain("encode_floats")(ops, RowGroups(()), x, None, 16, None)
        arguments = (
            None,
            torch.empty_like(x),
            torch.stack([codes, codes]),
            torch.tensor([1.0, 0.75]),
        )
        total, finite = both.ops.add_bfloat16(*map(both.convert, arguments))
        theirs = plain("add_floats")(ops, RowGroups(()), *arguments[:3], None, 16, arguments[3])
        assert same(*(torch.nan_to_num(y, nan=9.0) for y in (both.back(total), theirs)))
        assert finite is bool(torch.isfinite(theirs).all())
