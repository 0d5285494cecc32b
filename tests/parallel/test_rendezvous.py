"""Horovod as `hvd-gradcomp build-horovod` installs it: ranks may stop it, and start it again."""

from __future__ import annotations

from http.client import HTTPConnection

import pytest

pytest.importorskip("horovod")

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

RANKS = range(3)


def test_no_address_of_an_earlier_start_is_left():
    """Holds whichever scope all ranks have connected in first."""
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{len(RANKS)}"), len(RANKS)))

    def ask(method: str, scope: str, rank: int) -> int:
        connection = HTTPConnection("localhost", port)
        connection.request(method, f"/{scope}/{rank}", body=b"address" if method == "PUT" else None)
        return connection.getresponse().status

    for scope in ("global", "local_localhost"):
        for rank in RANKS:
            ask("PUT", scope, rank)
    for rank in RANKS[:2]:
        ask("DELETE", "local_localhost", rank)
    for rank in RANKS:
        ask("DELETE", "global", rank)
    assert {ask("GET", "global", rank) for rank in RANKS} == {404}
    assert {ask("GET", "local_localhost", rank) for rank in RANKS} == {200}
    ask("DELETE", "local_localhost", RANKS[2])
    assert {ask("GET", "local_localhost", rank) for rank in RANKS} == {404}
    server.stop()
