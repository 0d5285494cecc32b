#!/usr/bin/env bash
# Builds the images and runs them, with Docker or with podman (engine.sh).
#
#   docker/images.sh build             hvd-gradcomp:cpu from a clean base
#   docker/images.sh demo [EPOCHS]     compose.yaml: the demo on two workers, over ssh; 20 epochs a run
#   docker/images.sh test [ARG...]     tests/parallel in the image, on gloo; ARG to pytest
#   docker/images.sh gpu               hvd-gradcomp:gpu from the same base, and what Horovod has in it
#   docker/images.sh clean             removes images, and all that podman keeps
#
# PIP_EXTRA_INDEX_URL    for Docker: an index with PyTorch's CPU wheels. Podman takes along all of
#                        this machine's pip configuration.
set -euo pipefail
usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
case ${1:-} in
    build | demo | test | gpu) ;;
    clean)
        if [ ! -d "${HVD_GRADCOMP_CONTAINERS:-$HOME/.cache/hvd_gradcomp-containers}" ]; then
            docker info >/dev/null 2>&1 || exit 0 # no engine was ever used
        fi
        ;;
    *) usage ;;
esac
# shellcheck source=docker/engine.sh
. "$(dirname "$0")/engine.sh"
cd "$root"

build() { # DOCKERFILE TAG [OPTION...]
    local dockerfile=$1 tag=$2
    shift 2
    if [ "$engine" = docker ]; then
        set -- "$@" ${PIP_EXTRA_INDEX_URL:+--build-arg PIP_EXTRA_INDEX_URL}
    else
        # Health checks are in Docker's image format only. The cache of wheels is the machine's own.
        set -- --format docker --isolation chroot --network host "${mounts[@]}" \
            --volume "$wheels:/mnt/wheels" --build-arg HVD_GRADCOMP_CACHE=/mnt/wheels \
            --build-arg BASE_IMAGE="$base" "$@"
    fi
    $engine build --file "docker/$dockerfile" --tag "$tag" "$@" .
}

# The same file for both engines; podman has no compose of its own.
compose() {
    if [ "$engine" = docker ]; then
        docker compose --file docker/compose.yaml "$@"
    else
        local tools=$containers/compose
        [ -x "$tools/bin/podman-compose" ] || {
            docker/install-system.sh --python-only python3
            python3 -m venv --clear "$tools"
            "$tools/bin/python" -m pip install --quiet podman-compose==1.6.0
        }
        # podman leaves the rhythm of health checks to systemd and complains where there is none.
        local options=()
        [ -d /run/systemd/system ] || options=(--podman-run-args=--no-healthcheck)
        "$tools/bin/podman-compose" --file docker/compose.yaml "${options[@]}" "$@"
    fi
}

tidy() {
    trap '' HUP INT TERM # a second Ctrl-C must not leave half of it
    [ "${composed:-}" ] && compose down --volumes >"$scratch/down" 2>&1 || true
    rm -rf "$scratch"
}

what=$1
shift
case $what in
    build)
        build cpu.Dockerfile hvd-gradcomp:cpu
        ;;
    demo)
        export EPOCHS=${1:-20}
        composed=yes
        compose down --volumes >/dev/null 2>&1 || true
        # In the background, since bash heeds no signal while it waits for the foreground.
        compose up --no-build --exit-code-from driver &
        wait $!
        ;;
    test)
        $engine run --rm --volume "$root/tests:/home/horovod/tests:ro" \
            --volume "$root/docs:/home/horovod/docs:ro" \
            --volume "$root/pyproject.toml:/home/horovod/pyproject.toml:ro" \
            --volume "$root/docker/constraints.txt:/mnt/constraints.txt:ro" "${mounts[@]}" \
            --env PYTHONDONTWRITEBYTECODE=1 hvd-gradcomp:cpu sh -c '
                pip install -q --no-cache-dir --target tools -c /mnt/constraints.txt \
                    pytest pytest-timeout hypothesis mpi4py &&
                PYTHONPATH=tools exec python -m pytest -p no:cacheprovider tests/parallel "$@"' \
            sh -k "not mpi" "$@"
        ;;
    gpu)
        build gpu.Dockerfile hvd-gradcomp:gpu
        $engine run --rm hvd-gradcomp:gpu horovodrun --check-build
        ;;
    clean)
        if [ "$engine" = docker ]; then
            docker image rm --force hvd-gradcomp:cpu hvd-gradcomp:gpu
        else
            podman system reset --force
            rm -rf "$containers"
        fi
        ;;
esac
