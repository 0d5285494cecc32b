"""Where what a command finds goes: the screen, and the file of `--json`; needs no other package."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click


def counted(number: int, noun: str) -> str:
    """How many of what there are.

    >>> counted(1, "host"), counted(1200, "rank")
    ('1 host', '1,200 ranks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def status(what: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal, where rich is installed; nothing elsewhere."""
    try:
        from rich.console import Console
    except ImportError:  # the doctor has to work without
        return nullcontext()
    return Console(stderr=True).status(what) if sys.stderr.isatty() else nullcontext()


def with_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, which means the same in all commands."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        callback=in_folder,
        help="Write all that was found here, as JSON; - prints it, in place of the table.",
    )(command)


def in_folder(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Sees, before anything is measured, that it can be written."""
    del ctx, parameter
    if path is not None and not is_screen(path) and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}: make it, or write elsewhere")
    return path


def is_screen(path: Path | None) -> bool:
    """Whether `--json` asks for the screen."""
    return path is not None and str(path) == "-"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in a plain error that a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error}") from error


def report(path: Path | None, content: Any, text: str | None = None) -> None:
    """What a command has found: text on the screen, JSON in the file of `--json`, or in its place.

    Args:
        path: of `--json`; - is the screen.
        content: for JSON.
        text: for the screen; nothing is printed without.
    """
    printed = is_screen(path)
    if text is not None and not printed:
        click.echo(text)
    if path is None:
        return
    written = json.dumps(_known(content), indent=1, allow_nan=False)
    if printed:
        click.echo(written)
        return
    with writing(path):
        path.write_text(f"{written}\n", encoding="utf-8")


def _known(content: Any) -> Any:
    """With null for what is infinite or no number, which JSON does not have."""
    if isinstance(content, dict):
        return {key: _known(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_known(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
