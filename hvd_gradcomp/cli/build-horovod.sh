#!/usr/bin/env bash
# Builds Horovod 0.28.1 from its sdist for the frameworks installed in one Python
# environment, and installs the wheel there. The wheel is cached, so that a second
# environment with the same versions costs seconds.
#
#   hvd-gradcomp build-horovod [PYTHON]       the Python that this package is installed for
#   .../build-horovod.sh [PYTHON]             python3
#
# HVD_GRADCOMP_CACHE        where wheels are kept (default: ~/.cache/hvd_gradcomp)
# HOROVOD_GPU_OPERATIONS    NCCL for a build with CUDA. nvcc and NCCL are those of NVIDIA's packages
#                           in the environment, where they are there, and else the system's;
# HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME      or those in these folders
# HOROVOD_WITHOUT_TENSORFLOW    1 for PyTorch alone
# MAKEFLAGS                 defaults to one job a core
#
# Why a script at all: the last release predates today's frameworks. Three changes to
# its build files are enough; with CUDA it is four, and one to a C++ source:
#   1. C++17 at the top, and 2. for torch, whose headers ask for it;
#   3. no XLA ops for TensorFlow, whose wheel no longer ships the headers;
#   4. with CUDA, a function that Horovod calls and TensorFlow no longer has: what it returned, a
#      device's stream, is a field today. And Horovod's LOG comes after TensorFlow's, not before;
#   5. and the runtime of CUDA that Horovod is compiled for, where TensorFlow's would be linked.
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
toolkit='' nccl='' # folders of NVIDIA's packages, if the build is with CUDA and takes them
if [ "${HOROVOD_GPU_OPERATIONS:-}" ]; then
    nvidia=$("$python" - <<'PY'
from importlib.util import find_spec
found = find_spec("nvidia")
print(list(found.submodule_search_locations)[0] if found else "")
PY
)
    nvcc=$(compgen -G "$nvidia/cu*/bin/nvcc" | sort -V | tail -n 1 || true)
    if [ "${HOROVOD_CUDA_HOME:-}" ]; then
        PATH=$HOROVOD_CUDA_HOME/bin:$PATH
    elif [ "$nvcc" ]; then
        toolkit=${nvcc%/bin/nvcc}
        PATH=$toolkit/bin:$PATH
    else
        PATH=$PATH:/usr/local/cuda/bin
    fi
    lacking=()
    command -v nvcc >/dev/null || lacking+=(nvidia-cuda-nvcc)
    while [ "$toolkit" ] && read -r file package; do
        [ -e "$toolkit/$file" ] || lacking+=("$package")
    done <<'FILES'
nvvm/bin/cicc nvidia-nvvm
include/crt/host_config.h nvidia-cuda-crt
include/cccl/nv/target nvidia-cuda-cccl
lib/libcudart_static.a nvidia-cuda-runtime
FILES
    if [ "${#lacking[@]}" -gt 0 ]; then
        echo "HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS needs 'nvcc' and what it uses. Here" \
             "is no ${lacking[*]}; for the CUDA that PyTorch's wheel from PyPI has:" >&2
        echo "$python -m pip install torch 'cuda-toolkit[cccl,nvcc]'" >&2
        echo "Or name the folder of a whole toolkit: HOROVOD_CUDA_HOME=..." >&2
        exit 2
    fi
    if [ ! "${HOROVOD_NCCL_HOME:-}" ] && [ -e "$nvidia/nccl/include/nccl.h" ]; then
        nccl=$nvidia/nccl
    fi
fi

key=$("$python" - "$nccl" <<'PY'
import importlib.metadata as metadata, os, platform, re, subprocess, sys

def installed(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    alone = ", or set HOROVOD_WITHOUT_TENSORFLOW=1" if "tensorflow" in names else ""
    sys.exit(f"install {names[-1]} into {sys.prefix} first{alone}: Horovod is built against it")

mpi = re.search(r"\d[\d.]*", subprocess.check_output(["mpirun", "--version"], text=True)).group()
libc = "-".join(platform.libc_ver())
without = os.environ.get("HOROVOD_WITHOUT_TENSORFLOW")
device = os.environ.get("HOROVOD_GPU_OPERATIONS", "").lower() or "cpu"
if device != "cpu":
    nvcc = subprocess.check_output(["nvcc", "--version"], text=True)
    device += re.search(r"release ([\d.]+)", nvcc).group(1) + "-packages" * bool(sys.argv[1])
print("-".join([
    f"py{platform.python_version()}",
    f"torch{installed('torch')}",
    "tf0" if without else f"tf{installed('tensorflow-cpu', 'tensorflow')}",
    f"mpi{mpi}", libc, platform.machine(), device,
]))
PY
)
# The number counts changes of what is patched below: an older wheel is not taken.
store=$cache/horovod-$version-$key-2
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
    # Over gloo the list of ranks stays empty, so the stall check finds nobody missing.
    sed -i 's/global_ranks_\.reserve(size_)/global_ranks_.resize(size_)/' \
        "$source/horovod/common/gloo/gloo_controller.cc"
    if [ "${HOROVOD_GPU_OPERATIONS:-}" ]; then
        sed -i -f - "$source/horovod/tensorflow/mpi_ops.cc" <<'SED'
/^\/\/ Forward declaration of AsGpuStreamValue$/c\
#include "xla/stream_executor/stream.h"
/^GpuStreamHandle AsGpuStreamValue(Stream\* stream);$/c\
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {\
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\
}
/^#undef LOG$/a\
#include "../common/logging.h"
SED
        # nvcc's own runtime, all of it, before TensorFlow: that has functions of the same names,
        # which call the CUDA that it was built for.
        runtime='-Wl,--whole-archive cudart_static -Wl,--no-whole-archive'
        sed -i "s|^target_link_libraries(\${TF_TARGET_LIB} |&$runtime |" \
            "$source/horovod/tensorflow/CMakeLists.txt"
    fi
    if [ "$toolkit" ]; then
        # As CMake and PyTorch want it: lib64, and libraries whose names have no version. nvcc looks
        # for the rest beside itself, so it is a copy.
        cuda=$work/cuda
        mkdir -p "$cuda/lib64"
        cp -r "$toolkit/bin" "$cuda/"
        ln -s "$toolkit/include" "$toolkit/nvvm" "$cuda/"
        ln -s "$toolkit"/lib/libcuda*.a "$toolkit"/lib/libcudart.so.* "$cuda/lib64/"
        ln -s "$toolkit"/lib/libcudart.so.* "$cuda/lib64/libcudart.so"
        export HOROVOD_CUDA_HOME=$cuda CUDA_HOME=$cuda PATH=$cuda/bin:$PATH
    fi
    if [ "$nccl" ]; then
        mkdir -p "$work/nccl/lib"
        ln -s "$nccl/include" "$work/nccl/"
        ln -s "$nccl"/lib/libnccl.so.* "$work/nccl/lib/libnccl.so"
        export HOROVOD_NCCL_HOME=$work/nccl HOROVOD_NCCL_LINK=shared
        # Of whichever environment the wheel is installed in.
        export LDFLAGS="${LDFLAGS:-} -Wl,-rpath,\$ORIGIN/../../nvidia/nccl/lib"
    fi
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
# Ranks delete the addresses of a scope once all of them are connected in it. Horovod then forgets
# who is connected in other scopes too, whose addresses stay: after hvd.shutdown() and hvd.init()
# over gloo a rank may read another's old address, and is refused there, or waits in vain. This is
# Python, and mended where it is installed, so that wheels of earlier builds serve.
installed=$("$python" -c 'import importlib.util as u; print(u.find_spec("horovod").origin)')
sed -i 's/self\.server\.finished_list\.clear()/self.server.finished_list[scope].clear()/' \
    "$(dirname "$installed")/runner/http/http_server.py"
echo "Horovod $version installed from $store"
