#!/usr/bin/env bash
# Installs an old PyTorch from PyPI without 1.6 GB of CUDA libraries, for tests on a CPU.
#
#   docker/torch-without-cuda.sh PYTHON VERSION
#
# Wheels of torch 2.0 on PyPI do not load without the CUDA libraries they are linked to. The small
# ones are installed; for the large ones empty stand-ins are compiled, whose functions nothing calls
# where there is no GPU. Only for an environment in which tests run and that is thrown away. Where
# pip finds a wheel for CPUs only (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) there is nothing to stand in
# for.
set -euo pipefail

python=$1 version=$2
install="$python -m pip --disable-pip-version-check install -qq --progress-bar off --no-deps"
$install "torch==$version"
lib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch/lib
[ -e "$lib/libtorch_cuda.so" ] || exit 0

$install nvidia-cuda-runtime-cu11==11.7.99 nvidia-cuda-cupti-cu11==11.7.101 nvidia-nvtx-cu11==11.7.91
large='^(cublas|cudnn|cufft|curand|cusolver|cusparse|nccl)'
functions=$(nm --dynamic --undefined-only --format=posix "$lib"/lib{torch,c10,caffe2}*.so 2>/dev/null |
    sed 's/[@ ].*//' | grep -E "$large" | sort -u)
libraries=$(readelf --dynamic "$lib"/lib{torch,c10}*.so | sed -n 's/.*(NEEDED).*\[lib\(.*\)\]$/\1/p' |
    grep -E "$large" | sort -u)
for name in $libraries; do
    # All functions are in each library: the loader takes the first it finds.
    printf 'int %s(void) { return 0; }\n' $functions |
        cc -shared -fPIC -x c - -Wl,-soname,"lib$name" -o "$lib/lib$name"
done
"$python" -c 'import torch; assert not torch.cuda.is_available()'
