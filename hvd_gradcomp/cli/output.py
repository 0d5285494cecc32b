"""Output of commands: the screen, and the file of `--json`. Needs no package but click."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click


def counted(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "host"), counted(1200, "rank")
    ('1 host', '1,200 ranks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a rough time.

    >>> [duration(x) for x in (0.3, 8.4, 47.0, 100.0, 1000.0, 9000.0)]
    ['1 s', '8 s', '50 s', '2 min', '17 min', '2.5 h']
    """
    if seconds < 10:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90:
        return f"{round(seconds, -1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def short(item: Any) -> str:
    """Return the `repr` of a user's object in one line; a long one cut.

    >>> short([1, 2]), short("x" * 100)[-6:]
    ('[1, 2]', 'xxx...')
    """
    text = " ".join(repr(item).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def status(what: str) -> AbstractContextManager[Any]:
    """Return a spinner on a terminal if rich is installed; otherwise a no-op."""
    try:
        from rich.console import Console
    except ImportError:  # `doctor` must work without rich
        return nullcontext()
    return Console(stderr=True).status(what) if sys.stderr.isatty() else nullcontext()


def with_json(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, which means the same in all commands."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        callback=in_folder,
        help="Write all results to this file, as JSON; - prints them instead of the table.",
    )(command)


def in_folder(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check, before any measurement, that the file can be written."""
    if path is None or is_screen(path):
        return path
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}: make it, or write elsewhere")
    try:
        if path.is_file():
            path.open("a").close()
        elif not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        elif not os.access(path, os.W_OK):  # opening a pipe would wait for its reader, and end it
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise click.BadParameter(
            f"{path} cannot be written ({error.strerror}): write elsewhere"
        ) from error
    return path


def is_screen(path: Path | None) -> bool:
    """Return True if `--json` asks for the screen."""
    return path is not None and str(path) == "-"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while writing a file into a plain error message."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error}") from error


def report(path: Path | None, content: Any, text: str | None = None) -> None:
    """Print a command's result as text; write it as JSON for `--json`, or print that instead.

    Args:
        path: of `--json`; - is the screen.
        content: for JSON.
        text: for the screen; None prints nothing.
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
    """Replace infinities and NaNs, which JSON does not have, by None."""
    if isinstance(content, dict):
        return {key: _known(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_known(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
