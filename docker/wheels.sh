#!/usr/bin/env bash
# Wheels with the C library inside, which need no compiler where they are installed; into dist/.
#
#   docker/wheels.sh PYTHON [ARCHITECTURE...]    x86_64 and aarch64 if none is given
#
# Another architecture than this machine's takes a cross compiler, Debian's gcc-aarch64-linux-gnu. A
# wheel runs with any Python 3 on any Linux with glibc 2.17 or newer: that its library asks for
# nothing else is checked, but for libgomp, which PyTorch brings along. Where there is none, the
# library is left out. pip builds in an environment without TensorFlow, whose operations would fit
# one release of it: `hvd-gradcomp build` makes them where it is.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
[ $# -gt 0 ] || set -- x86_64 aarch64
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p dist

for architecture in "$@"; do
    compiler=gcc
    [ "$architecture" = "$(uname -m)" ] || compiler=$architecture-linux-gnu-gcc
    command -v "$compiler" >/dev/null || {
        echo "wheels: left out $architecture: there is no $compiler (apt-get install gcc-${architecture/_/-}-linux-gnu)" >&2
        continue
    }
    # In a copy of what is committed: a build leaves files in its tree.
    git archive --prefix="$architecture/" HEAD | tar -x -C "$scratch"
    CC=$compiler LDSHARED="$compiler -shared" "$python" -m pip --disable-pip-version-check wheel -q \
        --no-deps --constraint docker/constraints.txt --wheel-dir "$scratch/dist" \
        --config-settings="--build-option=--plat-name=manylinux2014_$architecture" \
        "$scratch/$architecture"
    wheel=$(ls "$scratch"/dist/*"_$architecture.whl")
    "$python" -m zipfile -e "$wheel" "$scratch/unpacked-$architecture"
    library=$(find "$scratch/unpacked-$architecture" -name '*.so')
    [ "$(basename "$library")" = _native.so ] || {
        echo "wheels: $architecture: not the C library alone: '$library'" >&2
        exit 1
    }
    newest=$(readelf --version-info "$library" | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -1)
    others=$(readelf --dynamic "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]$/\1/p' |
        grep -vE '^(libc\.so\.6|libgomp\.so\.1|ld-linux.*)$' || true)
    if [ "${newest#GLIBC_2.}" -gt 17 ] || [ -n "$others" ]; then
        echo "wheels: $architecture: not for every Linux: $newest $others" >&2
        exit 1
    fi
    cp "$wheel" dist/
    echo "wheels: dist/$(basename "$wheel")"
done
