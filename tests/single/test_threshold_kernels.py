"""Each kernel against the plain ops, to the bit: state, payloads and results of whole exchanges."""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_gradcomp import HybridCompressor, StromCompressor, VarianceCompressor
from hvd_gradcomp.algorithms.threshold.variance import Ambiguity
from hvd_gradcomp.codecs.quantizers import PowerOfTwo, Sign
from hvd_gradcomp.codecs.sparse import Payloads, Residual
from hvd_gradcomp.codecs.threshold import ThresholdCompressor
from hvd_gradcomp.core.collectives import Allgather
from hvd_gradcomp.method.wire import HEADER_BYTES
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError, building
from hvd_gradcomp.ops.kernel_params import CapacityLevel, Rule
from hvd_gradcomp.ops.torch import blocks, kernels
from hvd_gradcomp.testing import World
from tests.kernels import NATIVE, TorchOps, assert_alike, layout_of, reference_ops, threads, torch
from tests.methods import WORDS

pytestmark = NATIVE
ONE_EACH = [VarianceCompressor(alpha=0.5), HybridCompressor(tau=0.5), StromCompressor(tau=0.7)]
INT32 = [replace(compressor, index_coding="int32") for compressor in ONE_EACH]


def gradients(generator, layout, world, scale, share):
    """Noise whose scale differs by layer; `share` of it is large, the rest rarely sent."""
    flats = []
    for _ in range(world.size):
        layers = [2.0**i * torch.randn(n, generator=generator) for i, n in enumerate(layout.sizes)]
        kept = [(torch.rand(n, generator=generator) < share).float() for n in layout.sizes]
        flats.append(world.flat([scale * x * (k + 1e-3) for x, k in zip(layers, kept)]))
    return flats


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "steps"])
@pytest.mark.parametrize("compressor", WORDS, ids=repr)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 255, 256, 700, 5000]), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    ranks=st.integers(1, 5),
    scale=st.sampled_from([1e-30, 0.3, 3.0, 1e14]),
    share=st.sampled_from([0.0, 0.002, 0.1, 1.0]),
    count=st.integers(1, 4),
)
@settings(deadline=None, max_examples=20)
def test_kernels_match_reference_ops(compressor, moments, sizes, seed, ranks, scale, share, count):
    """Six steps, in which the capacity goes up to the dense level and windows rotate."""
    layout = layout_of(*sizes)
    fused, reference = (World(compressor, o, layout, ranks) for o in (TorchOps(), reference_ops()))
    with threads(count):
        for step in range(6):
            generator = torch.Generator().manual_seed(1000 * seed + step)
            flats = gradients(generator, layout, fused, scale, share)
            extra = {}
            if compressor.uses_moments and moments:
                extra["moment"] = [g * g / 2 for g in flats]
            ours, theirs = fused.step(flats, **extra), reference.step(flats, **extra)
            assert all(map(torch.equal, ours, theirs))
            assert_alike(fused, reference)


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
def test_threads_cut_a_large_bucket_alike(compressor):
    """Borders of pieces lie within layers, and the densities go from few elements to all."""
    layout = layout_of(40_000, 100, 70_001)
    ends = []
    for count in (1, 3):
        world = World(compressor, TorchOps(), layout, 2)
        totals = []
        with threads(count):
            for step, share in enumerate([0.001, 0.001, 0.3, 1.0, 1.0, 0.01]):
                generator = torch.Generator().manual_seed(step)
                totals += world.step(gradients(generator, layout, world, 1.0, share))
        ends.append((world, totals))
    (one, totals), (other, same) = ends
    assert all(map(torch.equal, totals, same))
    assert_alike(one, other)


@pytest.mark.parametrize("compressor", ONE_EACH, ids=repr)
@pytest.mark.parametrize("what", ["index", "nan"])
def test_an_exchange_that_fails_commits_nothing(compressor, what):
    """The memory holds the gradient of the step that failed, and a later step sends it."""
    layout, fails = layout_of(600), []

    def tamper(rank, request):
        if rank == 1 and fails and isinstance(request, Allgather):
            damaged = request.tensor.clone()
            damaged[HEADER_BYTES + 4] += 1
            return request._replace(tensor=damaged)
        return request

    ends = []
    for ops in (TorchOps(), reference_ops()):
        world = World(compressor, ops, layout, 2, tamper=tamper)
        generator = torch.Generator().manual_seed(1)
        steps = [gradients(generator, layout, world, 2.0, 1.0) for _ in range(4)]
        world.step(steps[0])
        if what == "nan":
            steps[1][0][5] = float("nan")
        fails[:] = [True] * (what == "index")
        with pytest.raises((PayloadError, NonFiniteGradientError)):
            world.step(steps[1])
        fails.clear()
        totals = [world.step(g) for g in steps[2:]]
        ends.append((world, totals))
    (fused, totals), (reference, others) = ends
    for ours, theirs in zip(totals, others):
        assert all(map(torch.equal, ours, theirs))
    assert_alike(fused, reference)


@pytest.mark.parametrize("compressor", INT32, ids=repr)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_index_is_trusted(compressor, data):
    """Bodies that nobody wrote: the sum of the plain ops, or an error, whatever the bytes."""
    layout, capacity = layout_of(300, 200), 20
    ops, reference = TorchOps(), reference_ops()
    schedule = compressor.capacity_schedule(layout)
    level = schedule.next_level(ops, schedule.init(ops))[0]
    dense = data.draw(st.booleans())
    level = level._replace(capacity=capacity, dense=dense)
    size = compressor.payload_bytes(layout, level) - HEADER_BYTES
    near = data.draw(st.booleans())  # most random indices lie beyond the bucket
    payloads = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=3))
    bodies = torch.tensor([list(body) for body in payloads], dtype=torch.uint8)
    if near and not dense:
        side = size - 4 * capacity
        words = bodies[:, side:].view(-1, capacity, 4)
        words[:, :, 1] %= 3
        words[:, :, 2] = 0
        words[:, :, 3] &= (
            0x80 if isinstance(compressor.rule.tau, float) and not compressor.rule.powers else 0xF0
        )
    weights = torch.full((len(payloads),), 0.5)

    def total(ops):
        out = torch.full((layout.size,), 7.0)
        try:
            return compressor.decode_sum(ops, layout, Payloads(level, bodies, weights), out)
        except (PayloadError, IndexError, RuntimeError) as error:
            return type(error)

    ours, theirs = total(ops), total(reference)
    if isinstance(theirs, torch.Tensor):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()
    else:
        assert ours is PayloadError


@pytest.mark.parametrize("dense", [False, True], ids=["words", "places"])
@pytest.mark.parametrize("compressor", INT32, ids=repr)
def test_bodies_of_another_level_are_an_error(compressor, dense):
    """C would read beyond their end."""
    layout, ops = layout_of(300, 200), TorchOps()
    schedule = compressor.capacity_schedule(layout)
    level = schedule.next_level(ops, schedule.init(ops))[0]._replace(capacity=20, dense=dense)
    size = compressor.body_bytes(layout, level)
    weights, out = torch.full((2,), 0.5), torch.zeros(layout.size)
    for bodies in torch.zeros(2, size - 4, dtype=torch.uint8), torch.zeros(1, 0, dtype=torch.uint8):
        with pytest.raises(PayloadError, match=f"where {size} are due"):
            compressor.decode_sum(ops, layout, Payloads(level, bodies, weights), out)


class ByRule(ThresholdCompressor, registered=False):
    """Does in plain ops what a rule says, whichever; v is only there where the rule has it."""

    def __init__(self, rule, index_coding):
        self.rule, self.index_coding = rule, index_coding
        self.quantizer = PowerOfTwo() if rule.powers else Sign(rule.tau)

    algorithm, quantizer = 255, None

    def __repr__(self):
        return f"{self.rule}, {self.index_coding}"

    def init_memory(self, ops, layout):
        kind = Ambiguity if self.rule.ambiguity else Residual
        return kind(*(ops.zeros((layout.size,)) for _ in kind._fields))

    def select_mask(self, ops, memory, gradient, moment):
        rule = self.rule
        if not rule.ambiguity:
            r = ops.accumulate(memory.r, gradient)
            return ops.greater(ops.abs(r), rule.tau), Residual(r)
        r, v = memory.plus(ops, gradient, moment)
        wanted = ops.square_exceeds(r, v, rule.alpha)
        if rule.large:
            wanted = wanted & ops.greater(ops.abs(r), rule.tau)
        return wanted, Ambiguity(r, v if rule.corrects else ops.scale(v, rule.zeta))

    def commit(self, ops, memory, sent, value):
        rule, index = self.rule, sent.index
        residual = ops.gather(memory.r, index)
        kept = residual - value if rule.subtracts else 0.0
        settled = memory._replace(r=ops.put(memory.r, index, kept))
        if rule.corrects:
            v = ops.gather(memory.v, index) - ops.times(ops.abs(residual), 2 * rule.tau)
            v = ops.put(memory.v, index, ops.maximum(v + rule.tau * rule.tau, 0.0))
            return settled._replace(v=ops.scale(v, rule.zeta))
        if rule.ambiguity:
            return settled._replace(v=ops.put(memory.v, index, 0.0))
        return settled


RULES = [
    Rule(ambiguity, large, powers, subtracts, corrects, 0.5, 0.5, 0.9)
    for ambiguity, large, powers, subtracts, corrects in product([False, True], repeat=5)
    if (ambiguity or large) and (not corrects or (ambiguity and not powers))
]


@pytest.mark.parametrize("index_coding", ["int32", "elias_fano"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule_there_may_be(rule, index_coding):
    """Those that no method has yet too; as words, in Elias-Fano's code, and on the dense level."""
    layout, compressor = layout_of(700, 3), ByRule(rule, index_coding)
    fused, reference = (World(compressor, o, layout, 2) for o in (TorchOps(), reference_ops()))
    sizes = set()
    for step, share in enumerate([0.01, 0.1, 1.0, 1.0, 0.1, 0.01]):
        generator = torch.Generator().manual_seed(step)
        flats = gradients(generator, layout, fused, 2.0, share)
        assert all(map(torch.equal, fused.step(flats), reference.step(flats)))
        assert_alike(fused, reference)
        sizes.add(fused.traffic[0][0].tensor.numel())
    assert len(sizes) > 1
    if index_coding == "int32":  # Elias-Fano's code is shorter than the dense level here
        assert compressor.payload_bytes(layout, CapacityLevel(0, 0, True)) in sizes


def test_a_rule_is_not_inherited_by_another_gate():
    class Other(StromCompressor):
        def select_mask(self, ops, memory, gradient, moment):
            wanted, memory = super().select_mask(ops, memory, gradient, moment)
            return wanted, memory

    assert StromCompressor().rule is not None
    assert Other().rule is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_what_c_and_python_hand_each_other_has_one_shape(tmp_path):
    fields = "data", "dtype", "rank", "rows", "length", "stride", "like"
    numbers = [f"offsetof(buffer, {field}) / 8" for field in fields]
    numbers += ["sizeof(buffer) / 8", "UINT8", "INT64", "FLOAT", "BOOL", "NO_MEMORY", "BEYOND"]
    source = tmp_path / "shapes.c"
    lines = "".join(f'printf("%d\\n", (int)({number}));' for number in numbers)
    heads = '#include <stddef.h>\n#include <stdio.h>\n#include "calls.h"\n'
    source.write_text(f"{heads}int main(void) {{\n{lines}\nreturn 0;\n}}\n")
    program = tmp_path / "shapes"
    subprocess.run(["gcc", f"-I{building.HERE}/c", source, "-o", program], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    dtypes = [torch.uint8, torch.int64, torch.float32, torch.bool]
    errors = [kernels._NO_MEMORY, kernels._BEYOND]
    expected = [*range(8), *(kernels._DTYPES[dtype] for dtype in dtypes), *errors]
    assert output.split() == [str(number) for number in expected]


@pytest.mark.parametrize("native", [True, False], ids=["with C", "without"])
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 9, 15, 16, 17, 64, 65]), min_size=2, max_size=4),
    data=st.data(),
    count=st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_axes_change_their_order(native, shape, data, count):
    """Every order; the opposite one, which filters and depth of a layer have, goes its own way."""
    ops = TorchOps()
    ops.native = ops.native if native else None
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape).permute(order)
    with threads(count):
        laid = ops.reshape(x, (-1,))
        assembled = ops.assemble(torch.empty(laid.shape), [x])
    assert torch.equal(laid, x.contiguous().view(-1)) and torch.equal(assembled, laid)


@given(
    filters=st.sampled_from([1, 3, 16, 32]),
    deep=st.sampled_from([1, 2, 3, 8]),
    across=st.integers(1, 7),
    places=st.sampled_from([1, 2, 9, 25]),
    start=st.integers(0, 20),
    block=st.sampled_from([1, 100, 5000]),
    count=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_blocks_of_a_layer_are_multiplied_as_the_whole(
    filters, deep, across, places, start, block, count
):
    """The same but for rounding: coefficients, energy, and what they stand for where it belongs."""
    generator = torch.Generator().manual_seed(filters + deep + across)
    shape, order, length = (filters, deep * across, places, 1), (2, 3, 1, 0), filters * deep
    bucket = torch.randn(start + math.prod(shape) + 5, generator=generator)
    x = bucket[start : start + math.prod(shape)].view(shape).permute(order)
    basis, row = (torch.randn(n, length, generator=generator) for n in (4, 1))
    ops, plain = TorchOps(), TorchOps()
    plain.native = None
    with mock.patch.object(blocks, "_BLOCK", block), threads(count):
        ours = ops.project(x, basis.t(), row)
        pieces = [bucket[:start], ops.lift(ours[0], basis.t(), row, shape, order), bucket[-5:]]
        lifted = ops.assemble(bucket.clone(), pieces)
    theirs = plain.project(x, basis.t(), row)
    expected = plain.lift(theirs[0], basis.t(), row, shape, order).reshape(-1)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(lifted[start:-5], expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(lifted[:start], bucket[:start])
    assert torch.equal(lifted[-5:], bucket[-5:])


def test_defaults_of_pytorch_do_not_matter_to_blocks(other_default):
    """C writes to what is made for them; whole numbers are not rounded."""
    shape, order, host = (16, 2, 9, 1), (2, 3, 1, 0), {"dtype": torch.float32, "device": "cpu"}
    x = (torch.arange(288, device="cpu") % 7).to(torch.float32).view(shape).permute(order)
    basis, row = torch.eye(16, **host) * 2, torch.full((1, 16), 3.0, **host)
    ops = TorchOps()
    code, energy, beside = ops.project(x, basis, row)
    assert torch.equal(code, x.reshape(-1, 16) * 2)
    assert [float(energy), float(beside)] == [float((x * x).sum()), float(x.sum() * 3)]
    layer = ops.lift(code, basis, row, shape, order)
    back = ops.assemble(ops.zeros((288,)), [layer])
    assert torch.equal(back.view(shape).permute(order), x * 4 + 3)


@pytest.mark.parametrize("shape", [(256, 130, 9), (9, 512, 96), (1024, 1, 300)])
def test_axes_of_what_no_cache_holds_change_their_order(shape):
    x = torch.randn(shape).permute(2, 1, 0)
    for count in (1, 3):
        with threads(count):
            assert torch.equal(TorchOps().reshape(x, (-1,)), x.contiguous().view(-1))
