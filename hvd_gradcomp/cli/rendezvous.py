"""Command `hvd-gradcomp rendezvous`: the place where ranks of `ddp.Elastic` meet."""

from __future__ import annotations

import os
import signal
import socket

import click


@click.command("rendezvous", short_help="Run the place where ranks that come and go meet.")
@click.option(
    "--host", default="0.0.0.0", show_default=True, help="Address to listen on; :: for IPv6 too."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=29400,
    show_default=True,
    help="Port; 0 for any that is free.",
)
def command(host: str, port: int) -> None:
    """Run the place where ranks that come and go meet (`ddp.Elastic`), until it is ended.

    On a machine that stays, before the ranks start. It knows who takes part, and takes no part
    itself: no tensor goes through it. Whoever reaches the port can join: let none but the hosts of
    the training do so.
    """
    from hvd_gradcomp.torch.membership import rendezvous

    try:
        store = rendezvous.serve(host, port)
    except OSError as error:
        named = isinstance(error, socket.gaierror) or not error.errno
        reason = error.strerror if named else os.strerror(error.errno or 0)
        raise click.ClickException(
            f"cannot listen on {host}, port {port}: {reason}. Give an address of this machine as "
            "--host, and a free port as --port"
        ) from error
    click.echo(f"ranks meet at port {store.port}")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
