"""Command `hvd-gradcomp build`: compiles the C code for the installed frameworks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import click

from hvd_gradcomp.cli import output
from hvd_gradcomp.ops import building


@click.command("build", short_help="Compile what makes compression fast on a CPU.")
@click.option("--anew", is_flag=True, help="Build also what is there.")
def command(anew: bool) -> None:
    """Compile what makes compression fast on a CPU, with this machine's compiler.

    That is a C library, and the operations in which TensorFlow calls it: a minute. Both are built
    while the package is installed if that sees a compiler and TensorFlow, which pip hides from it
    unless told --no-build-isolation. The operations fit one version of TensorFlow: after another
    was installed, call this again.

    \b
      hvd-gradcomp build           what is missing
      hvd-gradcomp build --anew    all of it

    Everything works without, slower. The exit code is 1 if something cannot be built.
    """
    built = [_built("the C library", lambda: building.build_native(anew=anew))]
    if importlib.util.find_spec("tensorflow") is None:
        click.echo("TensorFlow is not installed: it needs no operations")
    else:
        built.append(
            _built("the operations for TensorFlow", lambda: building.build_operations(anew=anew))
        )
    sys.exit(0 if all(built) else 1)


def _built(what: str, build: Callable[[], Path]) -> bool:
    try:
        with output.status(what):
            path = build()
        click.echo(f"{what}: {path}")
    except building.BuildError as error:
        click.echo(f"{what} cannot be built: {error}", err=True)
        return False
    return True
