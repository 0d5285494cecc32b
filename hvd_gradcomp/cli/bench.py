"""`hvd-gradcomp bench`."""

from __future__ import annotations

import click


@click.command("bench")
def command() -> None:
    """To come."""
    raise click.ClickException("not built yet")
