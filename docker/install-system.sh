#!/usr/bin/env bash
# Installs the system packages that are missing, with apt-get. Where it may not (not root) or cannot
# (no apt-get, a Python of one's own) it names what to install and exits with 2. With nothing missing
# it is done at once and prints nothing.
#
#   docker/install-system.sh [--python-only | --compiler | --hosts | --data] [PYTHON]
#
# PYTHON          default: python3
# --python-only   what a virtual environment needs; without it also what building and running
#                 Horovod needs: a compiler, CMake, Open MPI with headers, an ssh client
# --compiler      what a virtual environment and this package's C library need
# --hosts         also what `make hosts` needs: an ssh server, ip and tc
# --data          only what `make papers` trains on: images and a text
set -euo pipefail

python_only= compiler=yes hosts= data=
case ${1:-} in
    --python-only) python_only=yes compiler=; shift ;;
    --compiler) python_only=yes; shift ;;
    --hosts) hosts=yes; shift ;;
    --data) data=yes compiler=; shift ;;
esac
python=${1:-python3}

fail() {
    printf '%s\n' "$@" >&2
    exit 2
}

missing=()

# need PACKAGE COMMAND...: the package, unless all its commands are there
need() {
    local package=$1 command
    shift
    for command in "$@"; do
        command -v "$command" >/dev/null || { missing+=("$package"); return; }
    done
}

# Of the Python: venv, and the headers when something is to be built.
lacks() {
    "$python" - "$python_only" <<'PY'
import os, sys, sysconfig
try:
    import ensurepip, venv
except ImportError:
    print("venv")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not sys.argv[1] and not os.path.exists(header):
    print("dev")
PY
}

if [ "$data" ]; then
    need bible-kjv bible
    [ -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] ||
        missing+=(dataset-fashion-mnist)
elif ! command -v "$python" >/dev/null; then
    [ "$python" = python3 ] || fail "no such Python: $python"
    missing+=(python3 python3-venv)
    [ "$python_only" ] || missing+=(python3-dev)
else
    "$python" -c '' 2>/dev/null || fail "this Python does not start: $python"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
        fail "Python 3.9 or newer is needed; this is $("$python" --version 2>&1)." \
             "Name another one: make PYTHON=python3.11 ..."
    binary=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    parts=$(lacks)
    for part in $parts; do
        case $binary in
            /usr/bin/python3.*) missing+=("${binary##*/}-$part") ;;
            *) fail "$binary lacks its '$part' part (ensurepip or Python.h)." \
                    "Name a complete Python 3.9 or newer: make PYTHON=/usr/bin/python3 ..." ;;
        esac
    done
fi

[ ! "$compiler" ] || need build-essential make g++
if [ ! "$python_only$data" ]; then
    need cmake cmake
    need openmpi-bin mpirun
    need libopenmpi-dev mpicxx ompi_info
    [ "${missing[*]-}" ] || mpicxx --showme:compile >/dev/null 2>&1 ||
        fail "mpicxx is not Open MPI's; Horovod is built with libopenmpi-dev and openmpi-bin here."
    need openssh-client ssh
fi

if [ "$hosts" ]; then
    PATH=$PATH:/usr/sbin:/sbin
    need openssh-server sshd
    need iproute2 ip tc ss
fi

[ "${#missing[@]}" -gt 0 ] || exit 0

command -v apt-get >/dev/null ||
    fail "Missing here, by the names of Debian's packages: ${missing[*]}" \
         "Install what provides them on this system, then try again."

install="apt-get install --yes --no-install-recommends ${missing[*]}"
[ "$(id -u)" -eq 0 ] || fail "Missing here. As root: apt-get update && $install"

echo "system packages: ${missing[*]} (a minute or two)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
$install -qq -o Dpkg::Use-Pty=0 >/dev/null
