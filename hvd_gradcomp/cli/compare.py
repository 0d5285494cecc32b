"""`hvd-gradcomp compare`."""

from __future__ import annotations

import click


@click.command("compare")
def command() -> None:
    """To come."""
    raise click.ClickException("not built yet")
