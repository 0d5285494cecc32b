"""Hosts of a command line, as horovodrun takes them: `node1:2,node2:2`."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from typing import NamedTuple

import click


class Host(NamedTuple):
    """Host of a command line.

    Attributes:
        name: destination for ssh: preceded by `USER@` if that was written.
        ranks: number of ranks that it may have; None if that was left out.
    """

    name: str
    ranks: int | None


def parse(text: str, *, counted: bool = True) -> list[Host]:
    """Parse a list of hosts.

    Args:
        text: hosts, with commas between them.
        counted: whether the hosts are for horovodrun: each must have a number of ranks, and none
            may have a user, as in `me@node1`. Otherwise empty items are skipped.

    Raises:
        click.BadParameter: a host is written in another way.
    """
    user = "" if counted else r"(?:[\w.-]+@)?"
    form = "NAME:RANKS, such as node1:2,node2:2" if counted else "[USER@]NAME, such as node1,node2"
    hosts = []
    items = text.split(",")
    for item in items if counted else filter(str.strip, items):
        parts = re.fullmatch(rf"({user}[\w.-]+)(?::(\d+))?", item.strip(), re.ASCII)
        if parts is None or (counted and not int(parts[2] or 0)):
            raise click.BadParameter(
                f"{item!r} is no host; write each as {form}", param_hint="'--hosts'"
            )
        hosts.append(Host(parts[1], int(parts[2]) if parts[2] else None))
    return hosts


def check_names(hosts: list[Host]) -> None:
    """Require that each host's name has an address, or that ssh's configuration leads to it.

    Raises:
        click.BadParameter: a name has no address.
    """
    for name in dict.fromkeys(host.name for host in hosts):
        error = _unresolved(name)
        if error is not None and not configured(name):
            raise click.BadParameter(
                f"host {name!r} has no address here ({error.strerror}); check its name, or enter "
                f"it in /etc/hosts. `hvd-gradcomp doctor --hosts {name}` looks further",
                param_hint="'--hosts'",
            )


def configured(name: str) -> bool:
    """Return True if ssh's configuration leads to a host: by an address, or by another host.

    A name that goes through a ProxyJump or ProxyCommand need have an address only there. Connects
    nowhere.
    """
    if shutil.which("ssh") is None:
        return False
    done = subprocess.run(
        ["ssh", "-G", "--", name], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if re.search(r"^proxy(?:jump|command) (?!none$)", done.stdout, re.MULTILINE):
        return True
    hostname = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return hostname is not None and _unresolved(hostname[1]) is None


def _unresolved(name: str) -> OSError | None:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return error
    except UnicodeError:  # a label that is too long for a name
        return OSError(0, "no valid name")
    return None
