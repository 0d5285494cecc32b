#!/usr/bin/env bash
# From nothing to a result without Horovod, timed: a fresh environment with PyTorch, the wheel of
# `make wheels`, and a program and the demo on two ranks of DistributedDataParallel.
#
#   docker/torch-alone.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
timed() {
    local what=$1 begin=$EPOCHREALTIME
    shift
    "$@"
    awk -v a="$begin" -v b="$EPOCHREALTIME" -v what="$what" \
        'BEGIN { printf "torch-alone: %s: %.1f s\n", what, b - a }'
}
wheel=$(ls dist/hvd_gradcomp-*"_$(uname -m).whl")
program=$PWD/examples/pytorch/without_horovod.py
pip="$folder/venv/bin/python -m pip --disable-pip-version-check install -qq --progress-bar off"
grep '^torch' docker/frameworks.txt >"$folder/torch.txt"
timed "an environment" "$1" -m venv "$folder/venv"
timed "PyTorch, and scikit-learn for its digits" \
    $pip --constraint docker/constraints.txt --requirement "$folder/torch.txt" scikit-learn
timed "the wheel" $pip "$wheel"
cd "$folder"
timed "the program, on two ranks" \
    env -u PYTHONPATH OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node 2 "$program"
timed "hvd-gradcomp demo" env -u PYTHONPATH venv/bin/hvd-gradcomp demo
env -u PYTHONPATH venv/bin/python -c '
import torch
from time import process_time as now
begin = now()
import hvd_gradcomp.torch.ddp
took = now() - begin
from hvd_gradcomp.ops import native
assert native.library(), "no C library"
print(f"torch-alone: import of hvd_gradcomp.torch.ddp: {took:.2f} s of CPU beyond that of PyTorch")
'
