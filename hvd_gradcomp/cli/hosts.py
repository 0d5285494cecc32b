"""Hosts of a command line, as horovodrun takes them: `node1:2,node2:2`."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from typing import NamedTuple

import click


class Host(NamedTuple):
    """Host, and the number of ranks that it may have; None if that was left out."""

    name: str
    ranks: int | None


def parse(text: str, *, counted: bool = True) -> list[Host]:
    """Parse a list of hosts.

    Args:
        text: hosts, with commas between them.
        counted: whether each must have a number of ranks.

    Raises:
        click.BadParameter: a host is written in another way.
    """
    hosts = []
    for item in text.split(","):
        parts = re.fullmatch(r"([\w.-]+)(?::(\d+))?", item.strip(), re.ASCII)
        if parts is None or (counted and not int(parts[2] or 0)):
            form = "NAME:RANKS, such as node1:2,node2:2" if counted else "NAME, such as node1,node2"
            raise click.BadParameter(
                f"{item!r} is no host; write each as {form}", param_hint="'--hosts'"
            )
        hosts.append(Host(parts[1], int(parts[2]) if parts[2] else None))
    return hosts


def check_names(hosts: list[Host]) -> None:
    """Require that each host's name has an address, or is one that ssh's configuration explains.

    Raises:
        click.BadParameter: a name has no address.
    """
    for name in dict.fromkeys(host.name for host in hosts):
        error = _unresolved(name)
        if error is not None and _unresolved(_alias(name)) is not None:
            raise click.BadParameter(
                f"host {name!r} has no address here ({error.strerror}); check its name, or enter "
                f"it in /etc/hosts. `hvd-gradcomp doctor --hosts {name}` looks further",
                param_hint="'--hosts'",
            )


def _unresolved(name: str) -> OSError | None:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return error
    except UnicodeError:  # a label that is too long for a name
        return OSError(0, "no valid name")
    return None


def _alias(name: str) -> str:
    """Return the host name that ssh's configuration has for a name; connects nowhere."""
    if shutil.which("ssh") is None:
        return name
    asked = subprocess.run(
        ["ssh", "-G", "--", name], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    hostname = re.search(r"^hostname (\S+)$", asked.stdout, re.MULTILINE)
    return hostname[1] if hostname else name
