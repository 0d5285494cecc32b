"""`hvd-gradcomp doctor`."""

from __future__ import annotations

import click


@click.command("doctor")
def command() -> None:
    """To come."""
    raise click.ClickException("not built yet")
