#!/usr/bin/env bash
# What a container of the images does, as an ordinary user.
#
#   cluster.sh worker                 serves ssh on port 2222 to those that share its key
#   cluster.sh driver COMMAND...      waits for the workers, then runs the command with
#                                     HVD_GRADCOMP_HOSTS=ADDRESS:1,ADDRESS:1,... for horovodrun -H
#   cluster.sh COMMAND...             runs the command
#
# WORKERS    the name that all workers' addresses are found by; default: worker
#
# The key is made when the cluster starts, by the first container that gets to it, in
# ~/cluster-key, a volume that all share. It is host key and user key in one: who has it is in.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

readonly port=2222 key=$HOME/cluster-key/id_ed25519

configure_ssh() {
    [ -w "$HOME/cluster-key" ] || {
        echo "$HOME/cluster-key has to be a volume that user $(id -un) may write to" >&2
        exit 2
    }
    exec 9>"$HOME/cluster-key/.lock"
    flock 9
    [ -e "$key" ] || ssh-keygen -q -t ed25519 -N '' -C hvd_gradcomp -f "$key"
    exec 9>&-
    cp "$key.pub" ~/.ssh/authorized_keys
    echo "* $(cut -d ' ' -f 1-2 "$key.pub")" >~/.ssh/known_hosts
    printf '%s\n' "Port $port" "IdentityFile $key" 'StrictHostKeyChecking yes' 'BatchMode yes' \
        'ConnectTimeout 10' 'LogLevel ERROR' >~/.ssh/config
    # sshd gives a session no environment of the container's.
    printf '%s\n' "Port $port" "HostKey $key" 'PidFile none' 'UsePAM no' \
        'PasswordAuthentication no' 'KbdInteractiveAuthentication no' "SetEnv PATH=$PATH" \
        >~/.ssh/sshd_config
}

reachable() { # ADDRESS...
    local address
    [ $# -gt 0 ] || return
    for address in "$@"; do
        ssh "$address" true || return
    done
}

case $1 in
    worker)
        configure_ssh
        exec /usr/sbin/sshd -D -e -f ~/.ssh/sshd_config
        ;;
    driver)
        shift
        configure_ssh
        name=${WORKERS:-worker}
        deadline=$((SECONDS + 60))
        until
            mapfile -t addresses < <(getent ahostsv4 "$name" | cut -d ' ' -f 1 | sort -u)
            reachable "${addresses[@]}"
        do
            [ "$SECONDS" -lt "$deadline" ] || {
                echo "no answer by ssh on port $port from '$name': ${addresses[*]:-no address}" >&2
                exit 1
            }
            sleep 1
        done
        HVD_GRADCOMP_HOSTS=$(printf '%s:1\n' "${addresses[@]}" | paste -sd ,)
        export HVD_GRADCOMP_HOSTS
        echo "workers: $HVD_GRADCOMP_HOSTS"
        exec "$@"
        ;;
    *)
        exec "$@"
        ;;
esac
