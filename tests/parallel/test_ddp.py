"""DistributedDataParallel over real processes, where Horovod cannot be imported."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from tests.methods import ONE_OF_EACH
from tests.parallel.launch import ROOT, environment, launch, python

pytestmark = pytest.mark.parallel
# Where importing Horovod is an error.
WORKER = (
    "import runpy, sys; sys.modules['horovod'] = None;"
    "runpy.run_module('tests.parallel.workers.{}', run_name='__main__', alter_sys=True)"
)
ALWAYS = ["every_method", "some_ranks"]
ON_TWO = [
    "dense_is_what_ddp_does",
    "options_of_ddp",
    "unused_for_a_step",
    "passes_thrown_away",
    "momentum_is_taken_over",
    "state_goes_on",
    "other_ranks_go_on",
    "what_differs",
    "what_is_no_state",
    "sparse_gradients",
    "settled_by_ddp",
    "waits_as_long",
    "fewer_batches",
    "copies",
    "given_to_the_hook",
    "tools_of_a_user",
    "distributed_checkpoint",
    "not_finite",
    "one_fails",
    "left_alone",
    "discarded",
    "local_steps",
    "compiled",
    "local_steps_of_ddp",
    "two_exchanges",
    "sharded_models",
    "different_seeds",
    "complex_parameters",
    "in_inference_mode",
    "later_rounds_during_backward",
    "released_buckets",
    "scaled",
    "made_and_dropped",
    "one_ends",
]

LOCAL = ["as_a_plain_module", "every_method", "resumed", "refused", "compiled"]
LOCAL_ON_HOSTS = ["as_a_plain_module", "every_method", "in_hosts", "levels_of_hosts"]
ON_HOSTS = [
    "every_method",
    "dense_is_what_ddp_does",
    "counted",
    "moments_and_momentum",
    "state_goes_on",
    "not_finite",
    "steps_left_out",
    "replicas_that_differ",
    "hosts_as_they_have_to_be",
    "one_fails",
]


def processes(folder, ranks, *parts, worker="ddp_training"):
    """Runs parts of the worker, and fails where a rank does, or is waited for."""
    folder.mkdir(exist_ok=True)
    variables = environment()
    running = [
        subprocess.Popen(
            [
                *(*python("torch", variables), "-c", WORKER.format(worker)),
                *(str(folder), str(rank), str(ranks), *parts),
            ],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = []
    try:
        for process in running:
            printed.append(process.communicate(timeout=550)[0])
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "\n".join(printed)
    for rank in range(ranks):
        assert json.loads((folder / f"{rank}.json").read_text()) == list(parts)


def test_two_ranks(tmp_path):
    processes(tmp_path, 2, *ALWAYS, *ON_TWO)


def test_three_ranks(tmp_path):
    """Of which one has no batches, one has some, and one has most."""
    processes(tmp_path, 3, "fewer_batches", "made_and_dropped")


def test_four_ranks(tmp_path):
    processes(tmp_path, 4, *ALWAYS)


def test_two_hosts_of_two_ranks(tmp_path):
    processes(tmp_path, 4, *ON_HOSTS, worker="ddp_hierarchy")


@pytest.mark.parametrize(("ranks", "parts"), [(2, LOCAL), (4, LOCAL_ON_HOSTS)])
def test_local_steps(ranks, parts, tmp_path):
    processes(tmp_path, ranks, *parts, worker="ddp_local_steps")


def test_parameters_are_those_that_horovod_gives_to_the_bit(tmp_path):
    launch("torch_compared", 2, "gloo", tmp_path)
    processes(tmp_path / "ddp", 2, "compared")
    for place, compression in enumerate(ONE_OF_EACH):
        for rank in range(2):
            over = torch.load(tmp_path / f"horovod-{place}-{rank}.pt")
            without = torch.load(tmp_path / "ddp" / f"ddp-{place}-{rank}.pt")
            assert torch.equal(over, without), compression


WITHOUT_DESTROYING = """
import sys, torch, torch.distributed as dist
from hvd_gradcomp.torch.comm.c10d import ProcessGroup, Work

dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
groups = [ProcessGroup() for _ in range(8)]
sys.setswitchinterval(1000)  # gloo's threads get the GIL only where the main one gives it away
for group in 5 * groups:
    Work.of(dist.all_gather, torch.ones(300), group).wait()
"""


def test_a_program_that_destroys_no_process_group_ends_well(tmp_path):
    """Several jobs in turn, since one of two aborted when gloo's threads outlived the program."""
    variables = environment()
    start = python("torch", variables)
    for job in range(5):
        command = [*start, "-c", WITHOUT_DESTROYING, str(tmp_path / f"met{job}")]
        running = [
            subprocess.Popen([*command, rank], env=variables, stderr=subprocess.PIPE, text=True)
            for rank in "01"
        ]
        printed = [process.communicate(timeout=120)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0], "\n".join(printed)
