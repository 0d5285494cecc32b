#!/usr/bin/env bash
# Payloads that a sender has made up, drawn by libFuzzer, against the C library under
# AddressSanitizer; see tests/fuzz/payloads.py. Goes on from tests/fuzz/corpus, and ends with the
# first finding, whose input it prints.
#
#   tests/fuzz.sh PYTHON [arguments of libFuzzer]
#   KEEP=1 tests/fuzz.sh ...    to add to the corpus what reached something new
set -euo pipefail
cd "$(dirname "$0")/.."
python=$("$1" -c 'import sys; print(sys.executable)')
shift
command -v clang >/dev/null || {
    echo "fuzz: clang is missing; on Debian: apt-get install clang" >&2
    exit 1
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r examples benchmarks hvd_gradcomp tests pyproject.toml "$folder"
cp -r tests/fuzz/corpus "$folder/seeds"
mkdir "$folder/found"
"$python" -m pip install --quiet --target "$folder/tools" atheris==3.0.0
cd "$folder"
rm -f hvd_gradcomp/ops/*.so
printf '#!/bin/sh\nexec clang -fsanitize=address,fuzzer-no-link -g "$@"\n' >cc
chmod +x cc
export PYTHONPATH=$folder:$folder/tools
CC=$folder/cc "$python" -c 'from hvd_gradcomp.ops import building; building.build_native()'

LD_PRELOAD="$(g++ -print-file-name=libstdc++.so)"
LD_PRELOAD="$("$python" -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so $LD_PRELOAD"
export LD_PRELOAD ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=64
"$python" -m tests.fuzz found seeds -max_len=2048 -timeout=60 -rss_limit_mb=6144 "$@"
echo "fuzz: $(find found -type f | wc -l) inputs beyond the corpus reached something new"
if [ -n "${KEEP:-}" ]; then # the fewest that reach as much
    mkdir kept
    "$python" -m tests.fuzz kept seeds found -merge=1 >/dev/null 2>&1
    cp kept/* "$OLDPWD/tests/fuzz/corpus"
fi
