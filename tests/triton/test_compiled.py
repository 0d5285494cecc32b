"""Every kernel compiled for GPUs that are not here: no spills, no rounding that the ops lack."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.traffic import METHODS, RATIO, Step, launches_of
from hvd_gradcomp import DGCCompressor
from hvd_gradcomp.core.layout import Layout

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
ARCHITECTURES = (80, 90, 100)
LAYOUT = Layout(("a", "b", "c"), ((300, 512), (300,), (20_000,)))
# Ways of a method that nobody counts.
OTHERS = {"DGC, plain": DGCCompressor(1 / RATIO, 0.9, nesterov=True, index_coding="int32")}
_TYPES = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def variant(launch):
    """What a launch is compiled for: its kernel, types, constants, what is divisible by 16."""
    signature, constants, divisible = {}, {}, []
    names = launch.kernel.arg_names
    unspecial = launch.kernel.do_not_specialize or ()
    for place, (name, x) in enumerate(zip(names, launch.args)):
        if x is None or (isinstance(x, int) and x == 1 and name not in unspecial):
            signature[name], constants[name] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = _TYPES[x.dtype]
            if x.storage_offset() * x.element_size() % 16 == 0:
                divisible.append(place)
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(1 << 31) <= x < 1 << 31 else "i64"
            if x % 16 == 0 and name not in unspecial:
                divisible.append(place)
    for name, x in launch.constants.items():
        signature[name], constants[name] = "constexpr", x
    parts = (tuple(signature.items()), tuple(constants.items()), tuple(divisible), launch.warps)
    return launch.kernel, parts


def variants():
    """Of all methods: each kernel as it is launched, by name."""
    distinct = {}
    counted = {name: compressor for name, (compressor, *_) in METHODS.items()}
    for name, compressor in {**counted, **OTHERS}.items():
        for dense in (False, True):
            for launch in launches_of(compressor, LAYOUT, dense):
                kernel, parts = variant(launch)
                distinct.setdefault((kernel.__name__, parts), (kernel, parts, name))
    return list(distinct.values())


def compiled(kernel, parts, architecture):
    signature, constants, divisible, warps = parts
    source = ASTSource(
        kernel,
        dict(signature),
        {(kernel.arg_names.index(name),): x for name, x in constants},
        {(place,): [["tt.divisibility", 16]] for place in divisible},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def usage(binary, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where spilled ones go."""
    file = folder / f"{binary.metadata.hash}.cubin"
    file.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", output).groups()
    return int(registers), int(stack) + int(local)


def widths(ptx: str) -> dict[str, int]:
    """Bits that the widest load and the widest store of a thread move."""
    widest = {"load": 0, "store": 0}
    pattern = r"(ld|st)\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)"
    for what, vector, bits in re.findall(pattern, ptx):
        name = "load" if what == "ld" else "store"
        widest[name] = max(widest[name], int(vector or 1) * int(bits))
    return widest


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    """All variants for all architectures, two at a time."""
    folder = tmp_path_factory.mktemp("ptx")
    jobs = [(v, a) for v in variants() for a in ARCHITECTURES]

    def build(job):
        (kernel, parts, method), architecture = job
        binary = compiled(kernel, parts, architecture)
        return {
            "kernel": kernel.__name__,
            "method": method,
            "architecture": architecture,
            "ptx": binary.asm["ptx"],
            "ttir": binary.asm["ttir"],
            "cubin": len(binary.asm["cubin"]),
            "shared": binary.metadata.shared,
            "usage": usage(binary, folder),
        }

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, jobs))


@pytest.mark.parametrize("name", ["QSGD", "TernGrad", "1-bit"])
def test_the_smallest_bucket_compiles(name):
    """Rows of one word: Triton takes a stride of 1 for a constant."""
    compressor = METHODS[name][0]
    layout = Layout(("bias",), ((1,),), block=compressor.block)
    for launch in launches_of(compressor, layout, dense=False):
        assert compiled(*variant(launch), ARCHITECTURES[0])


def test_any_gpu_has_room_for_a_program(binaries):
    """48 KiB of shared memory, which a kernel gets without asking for more."""
    assert max(b["shared"] for b in binaries) <= 48 << 10


def test_nothing_spills(binaries):
    spilled = [(b["kernel"], b["architecture"]) for b in binaries if b["usage"][1]]
    assert not spilled
    assert all(b["cubin"] for b in binaries)


@pytest.mark.parametrize("inexact", [r"\bfma\.", r"\.ftz\b", r"div\.full", r"\.approx\b"])
def test_rounding_is_that_of_the_verbs(binaries, inexact):
    """No multiplication is fused with an addition; denormals stay; quotients are exact."""
    assert not {b["kernel"] for b in binaries if re.search(inexact, b["ptx"])}


def test_what_is_sent_is_read_before_it_is_cleared(binaries):
    """A thread clears other elements than it reads, and waits for those who do read them."""
    texts = [b["ttir"] for b in binaries if b["kernel"] == "pack"]
    assert texts
    for text in texts:
        read = max(m.end() for m in re.finditer(r"tt\.load .*x!tt\.ptr<f32>", text))
        cleared = [m.start() for m in re.finditer(r"tt\.store .*x!tt\.ptr<f32>", text[read:])][1:]
        assert cleared
        assert "barrier" in text[read : read + cleared[0]]


@pytest.mark.parametrize("name", METHODS)
def test_a_later_step_compiles_nothing(name):
    """Numbers that change from step to step are not what a kernel is compiled for."""
    step = Step(METHODS[name][0], LAYOUT, kernels=True)
    launched = []
    for number in (1, 2, 16, 17, 4_096, 999_999):
        step.take(number=number)
        launched.append([variant(launch) for launch in step.kernels])
    assert all(each == launched[0] for each in launched)


def test_walks_move_vectors(binaries):
    """Loads and stores of whole buckets are 128 bits wide."""
    walks = {"find_words", "check_finite", "commit_places", "collect", "list_candidates"}
    for b in binaries:
        if b["kernel"] in walks:
            assert widths(b["ptx"])["load"] == 128, b["kernel"]


def test_they_are_recorded(binaries, request):
    """`--compiled FILE` writes registers and widths of loads and stores."""
    file = request.config.getoption("--compiled")
    if file is None:
        pytest.skip("no --compiled FILE")
    rows: dict[str, dict] = {}
    for b in binaries:
        row = rows.setdefault(b["kernel"], {"registers": {}, "load": 0, "store": 0, "variants": 0})
        highest = row["registers"].setdefault(f"sm_{b['architecture']}", 0)
        row["registers"][f"sm_{b['architecture']}"] = max(highest, b["usage"][0])
        row["variants"] += b["architecture"] == ARCHITECTURES[0]
        for name, bits in widths(b["ptx"]).items():
            row[name] = max(row[name], bits)
    Path(file).write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
