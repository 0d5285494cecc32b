#!/usr/bin/env bash
# The C library and TensorFlow's operations under AddressSanitizer and UBSan: built in a copy of the
# tree, and given what the tests give them, damaged payloads and indices that nobody wrote included.
# What reads or writes where it may not ends the run.
#
#   tests/asan.sh PYTHON [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$("$1" -c 'import sys; print(sys.executable)')
shift

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r examples hvd_gradcomp tests pyproject.toml "$folder"
cd "$folder"
rm -f hvd_gradcomp/ops/*.so
wrapped() {
    printf '#!/bin/sh\nexec %s -g -fno-omit-frame-pointer "$@"\n' "$*" >"$1"
    chmod +x "$1"
}
wrapped gcc -fsanitize=address,undefined -fno-sanitize-recover=all
# TensorFlow's headers do not compile with UBSan; and told of ASan, they make other classes of theirs
# than TensorFlow has.
wrapped g++ -fsanitize=address -U__SANITIZE_ADDRESS__
echo "asan: building (two minutes)"
PYTHONPATH=$folder CC=$folder/gcc CXX=$folder/g++ "$python" -c '
from hvd_gradcomp.ops import building
print(building.build_native().name, building.build_operations().name)'

# In front of everything, Python too; libstdc++ because they look for its throw when they start.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
LD_PRELOAD="$LD_PRELOAD $(g++ -print-file-name=libstdc++.so)"
export LD_PRELOAD PYTHONPATH=$folder PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
"$python" -c '
from hvd_gradcomp.ops import native, tensorflow
assert native.library()._name.startswith("'"$folder"'")
assert tensorflow.library()'
# Captured by file descriptor, what they report would be lost.
"$python" -m pytest -q -p no:cacheprovider --capture=sys tests/single/test_threshold_kernels.py \
    tests/single/test_topk_kernels.py tests/single/test_operations.py \
    tests/single/test_quantized.py tests/single/test_layers_stored.py \
    tests/single/test_chunk_kernels.py tests/single/test_narrow_kernels.py \
    tests/single/test_index_coding.py tests/single/test_vote_kernels.py \
    tests/single/test_word_kernels.py tests/single/test_tile_kernels.py \
    tests/single/test_factor_kernels.py tests/single/test_power_kernels.py "$@"
