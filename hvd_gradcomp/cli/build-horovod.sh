#!/usr/bin/env bash
# Builds Horovod 0.28.1 from its sdist for the frameworks installed in one Python
# environment, and installs the wheel there. The wheel is cached, so that a second
# environment with the same versions costs seconds.
#
#   hvd-gradcomp build-horovod [PYTHON]       the Python that this package is installed for
#   .../build-horovod.sh [PYTHON]             python3
#
# HVD_GRADCOMP_CACHE        where wheels are kept (default: ~/.cache/hvd_gradcomp)
# HOROVOD_GPU_OPERATIONS    NCCL for a GPU build, which needs nvcc and NCCL's headers
# HOROVOD_WITHOUT_TENSORFLOW    1 for PyTorch alone, as a GPU build has to be
# MAKEFLAGS                 defaults to one job a core
#
# Why a script at all: the last release predates today's frameworks. Three changes to
# its build files are enough, and its Python and C++ sources stay as they are:
#   1. C++17 at the top, and 2. for torch, whose headers ask for it;
#   3. no XLA ops for TensorFlow, whose wheel no longer ships the headers.
# And two settings: headers that Horovod uses and that GCC 13's own no longer bring along, and
# CMake 4's leave for the old version that gloo asks for.
set -euo pipefail

readonly version=0.28.1
python=$(command -v "${1:-python3}") || { echo "no such Python: ${1:-python3}" >&2; exit 2; }
cache=${HVD_GRADCOMP_CACHE:-$HOME/.cache/hvd_gradcomp}

for tool in cmake make g++ mpicxx mpirun; do
    command -v "$tool" >/dev/null || {
        echo "building Horovod needs '$tool'; on Debian:" \
             "apt-get install build-essential cmake libopenmpi-dev openmpi-bin" >&2
        exit 2
    }
done
if [ "${HOROVOD_GPU_OPERATIONS:-}" ]; then
    PATH=$PATH:${HOROVOD_CUDA_HOME:-/usr/local/cuda}/bin
    command -v nvcc >/dev/null || {
        echo "HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS needs 'nvcc': install the CUDA" \
             "toolkit of PyTorch's version, or name where it is: HOROVOD_CUDA_HOME=..." >&2
        exit 2
    }
    [ "${HOROVOD_WITHOUT_TENSORFLOW:-}" ] || {
        echo "Horovod $version has no GPU operations for today's TensorFlow;" \
             "for PyTorch alone: HOROVOD_WITHOUT_TENSORFLOW=1" >&2
        exit 2
    }
fi

key=$("$python" - <<'PY'
import importlib.metadata as metadata, os, platform, re, subprocess, sys

def installed(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    sys.exit(f"install {names[0]} into {sys.prefix} first: Horovod is built against it")

mpi = re.search(r"\d[\d.]*", subprocess.check_output(["mpirun", "--version"], text=True)).group()
libc = "-".join(platform.libc_ver())
without = os.environ.get("HOROVOD_WITHOUT_TENSORFLOW")
device = os.environ.get("HOROVOD_GPU_OPERATIONS", "").lower() or "cpu"
if device != "cpu":
    nvcc = subprocess.check_output(["nvcc", "--version"], text=True)
    device += re.search(r"release ([\d.]+)", nvcc).group(1)
print("-".join([
    f"py{platform.python_version()}",
    f"torch{installed('torch')}",
    "tf0" if without else f"tf{installed('tensorflow-cpu', 'tensorflow')}",
    f"mpi{mpi}", libc, platform.machine(), device,
]))
PY
)
store=$cache/horovod-$version-$key
mkdir -p "$store"

# One build at a time for one key: a second caller waits and then finds the wheel.
exec 9>"$store/.lock"
flock 9

if ! compgen -G "$store/horovod-*.whl" >/dev/null; then
    echo "building Horovod $version for $key (about 8 minutes on two cores)"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip install --quiet "setuptools<81" wheel packaging cloudpickle psutil pyyaml cffi
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
        --dest "$work" "horovod==$version"
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    source=$work/horovod-$version
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' \
        "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
    sed -i '/xla_mpi_ops\.cc/d' "$source/horovod/tensorflow/CMakeLists.txt"
    log=$store/build.log
    [ "${HOROVOD_WITHOUT_TENSORFLOW:-}" ] || export HOROVOD_WITH_TENSORFLOW=1
    export CMAKE_POLICY_VERSION_MINIMUM=3.5
    for header in cstdint string stdexcept functional algorithm; do
        export CXXFLAGS="${CXXFLAGS:-} -include $header"
    done
    if ! HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
         HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 MAKEFLAGS="${MAKEFLAGS:--j$(env -u OMP_NUM_THREADS nproc)}" \
         "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work/wheels" \
         "$source" >"$log" 2>&1; then
        grep -nE 'error:|Error|FAILED' "$log" | head -n 20 >&2 || true
        tail -n 40 "$log" >&2
        echo "Horovod's build failed; the whole log: $log" >&2
        exit 1
    fi
    mv "$work"/wheels/horovod-*.whl "$store/"
fi

"$python" -m pip install --quiet --no-deps --force-reinstall "$store"/horovod-*.whl
"$python" -m pip install --quiet cloudpickle psutil pyyaml packaging cffi
echo "Horovod $version installed from $store"
