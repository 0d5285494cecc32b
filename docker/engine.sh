# shellcheck shell=bash disable=SC2034
# For fresh.sh and images.sh, which source it: the container engine of this machine and a clean
# Debian. Docker where an engine runs. Otherwise podman, as root on Debian, with everything it
# makes under one folder and a base made by debootstrap: no daemon, no registry.
#
#   HVD_GRADCOMP_CONTAINERS   podman's folder (default: ~/.cache/hvd_gradcomp-containers)
#   HVD_GRADCOMP_CACHE        Horovod's wheels, shared with containers (~/.cache/hvd_gradcomp)
#
# Sets: engine, the command; base, the image's name; mounts, options that give a container this
# machine's pip configuration; wheels, the folder; scratch, removed at the end by `tidy`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=${HVD_GRADCOMP_CACHE:-$HOME/.cache/hvd_gradcomp}
containers=${HVD_GRADCOMP_CONTAINERS:-$HOME/.cache/hvd_gradcomp-containers}
mkdir -p "$wheels"
scratch=$(mktemp -d)
tidy() { rm -rf "$scratch"; }
trap tidy EXIT
trap 'exit 130' HUP INT TERM

# Docker mounts no folder while it builds and brings its own base, so only podman's part is long.
if docker info >/dev/null 2>&1; then
    engine=docker base=debian:bookworm-slim
else
    engine=podman base=localhost/hvd-gradcomp-base

    missing=()
    for package in podman runc netavark aardvark-dns iptables debootstrap; do
        dpkg --status "$package" >/dev/null 2>&1 || missing+=("$package")
    done
    if [ "$(id -u)" -ne 0 ]; then
        echo "No Docker engine answers (docker info), and podman is used here only as root." >&2
        echo "Start Docker, or become root${missing[*]:+ and apt-get install ${missing[*]}}." >&2
        exit 2
    elif [ "${#missing[@]}" -gt 0 ]; then
        install="apt-get install --yes --no-install-recommends ${missing[*]}"
        echo "container tools: $install"
        export DEBIAN_FRONTEND=noninteractive
        { apt-get update -qq && $install -qq -o Dpkg::Use-Pty=0 >/dev/null; } || {
            echo "That failed; it is needed where no Docker engine runs." >&2
            exit 2
        }
    fi

    # One at a time: another script may be making all this.
    mkdir -p "$containers"
    exec 8>"$containers/.lock"
    flock 8

    # A configuration of its own, so that other containers of this machine stay apart. The limits
    # are low enough to be set where the machine itself is a container.
    configure() { # DRIVER
        export CONTAINERS_CONF=$containers/containers.conf
        export CONTAINERS_STORAGE_CONF=$containers/storage-$1.conf
        printf '%s\n' '[containers]' 'default_ulimits = ["nofile=1024:1024", "nproc=2048:2048"]' \
            '[engine]' 'runtime = "runc"' 'cgroup_manager = "cgroupfs"' 'events_logger = "file"' \
            '[network]' 'network_backend = "netavark"' \
            "network_config_dir = \"$containers/networks\"" >"$CONTAINERS_CONF"
        printf '%s\n' '[storage]' "driver = \"$1\"" "graphroot = \"$containers/$1\"" \
            "runroot = \"$containers/run\"" >"$CONTAINERS_STORAGE_CONF"
        podman info >/dev/null 2>"$scratch/podman"
    }
    # vfs copies whole images, but works on any file system.
    configure overlay || configure vfs || { cat "$scratch/podman" >&2; exit 2; }
    if ! podman image exists "$base"; then
        echo "base: a clean Debian by debootstrap (two minutes)"
        debootstrap --variant=minbase bookworm "$scratch/base" >"$scratch/debootstrap.log" 2>&1 ||
            { tail -n 20 "$scratch/debootstrap.log" >&2; exit 1; }
        tar -C "$scratch/base" -c . | podman import --quiet - "$base" >/dev/null
        rm -rf "$scratch/base"
    fi
    flock --unlock 8
    exec 8>&-
fi

mounts=()
while read -r mount; do
    mounts+=(--volume "$mount")
done < <(python3 "$root/docker/pip-config.py" "$scratch")
