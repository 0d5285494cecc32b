"""`hvd-gradcomp advise`."""

from __future__ import annotations

import click


@click.command("advise")
def command() -> None:
    """To come."""
    raise click.ClickException("not built yet")
