#!/usr/bin/env bash
# Runs a command in a fresh container: a clean Debian of minimal packages, root, a copy of this
# checkout (what git knows and new files) as working directory, the network of this machine. From
# outside come only pip's configuration and the cache of Horovod's wheels. Nothing stays.
#
#   docker/fresh.sh COMMAND [ARGUMENT...]
#
#   docker/fresh.sh sh -c 'apt-get update -q && apt-get install -qy make && make demo'
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
# shellcheck source=docker/engine.sh
. "$(dirname "$0")/engine.sh"

name=hvd-gradcomp-fresh-$$
tidy() {
    $engine rm --force --volumes "$name" >/dev/null 2>&1 || true
    rm -rf "$scratch"
}

cd "$root"
git ls-files -z --cached --others --exclude-standard |
    tar --create --null --files-from - --ignore-failed-read --file "$scratch/checkout.tar"

fresh() { # OPTION...
    $engine run "$@" --name "$name" --network host "${mounts[@]}" \
        --volume "$wheels:/root/.cache/hvd_gradcomp" \
        --volume "$scratch/checkout.tar:/mnt/checkout.tar:ro" \
        --env LANG=C.UTF-8 --env DEBIAN_FRONTEND=noninteractive "$base" sh -c '
            mkdir /root/hvd_gradcomp && cd /root/hvd_gradcomp
            tar --extract --no-same-owner --file /mnt/checkout.tar && exec "$@"' sh "${command[@]}"
}

command=("$@")
if [ -t 0 ]; then
    fresh --interactive --tty
else
    # In the background, since bash heeds no signal while it waits for what is in the foreground.
    fresh &
    wait $!
fi
