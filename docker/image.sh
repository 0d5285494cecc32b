#!/usr/bin/env bash
# The steps that the Dockerfiles share; each is a layer.
#
#   docker/image.sh frameworks | horovod | package      into /opt/venv, in the stage that builds
#   docker/image.sh system                              what the last stage needs to run it
set -euo pipefail

python=/opt/venv/bin/python
export PATH=/opt/venv/bin:$PATH PIP_CONSTRAINT=$PWD/docker/constraints.txt PIP_NO_CACHE_DIR=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore

case ${1:-} in
    frameworks)
        python3 -m venv /opt/venv
        requirements=docker/frameworks.txt
        if [ "${HOROVOD_GPU_OPERATIONS:-}" ]; then
            # PyPI's wheels have CUDA. To == another index's 2.13.0+cpu would be a 2.13.0.
            requirements=/tmp/frameworks.txt
            sed -e 's/^torch==/torch===/' -e 's/^tensorflow-cpu/tensorflow/' \
                docker/frameworks.txt docker/gpu.txt >$requirements
        fi
        $python -m pip install -qq --requirement $requirements
        ;;
    horovod)
        hvd_gradcomp/cli/build-horovod.sh $python
        ;;
    package)
        $python -m pip install -qq --no-build-isolation ".[examples,tensorboard]"
        ;;
    system)
        export DEBIAN_FRONTEND=noninteractive
        compiler=() # what launches a kernel is made when it is first launched, by Triton
        [ -z "${HOROVOD_GPU_OPERATIONS:-}" ] || compiler=(gcc libc6-dev python3-dev)
        apt-get update -qq
        apt-get install --yes --no-install-recommends -qq \
            python3 libgomp1 openmpi-bin openssh-server openssh-client tini "${compiler[@]}" >/dev/null
        rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
        useradd --create-home --shell /bin/bash horovod
        # Volumes take over owner and rights of the folder they are mounted on.
        install -d -o horovod -g horovod -m 700 /home/horovod/.ssh /home/horovod/cluster-key
        ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
