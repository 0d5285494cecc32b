"""Command line: `hvd-gradcomp`, or `python -m hvd_gradcomp`.

Each command has a module of its name here, imported when the command is called: `doctor` must work
even if nothing else does. `options`, `output`, `progress` and `style` are for several commands,
`advise_report` formats for `advise`, and `digits` is what `demo` trains; `launching`,
`without_horovod`, `selftest` and `hosts` are about ranks; `inspection` asks what is installed, and
`usercode` reads a user's code.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import click

import hvd_gradcomp
from hvd_gradcomp import __version__
from hvd_gradcomp.core.suggestions import did_you_mean

COMMANDS = ("demo", "doctor", "build", "build-horovod", "bench", "advise", "compare", "rendezvous")


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hvd_gradcomp.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the arguments; for an unknown one name the nearest."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            nearest = did_you_mean(args[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}{nearest}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; for an error in user code, print only that code's traceback."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            user_frames = _user_frames(error.__traceback__)
            if user_frames is None:
                raise
            traceback.print_exception(type(error), error, user_frames)
            ctx.exit(1)


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of user code; None if there is none."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    # Click may be installed in another environment or system-wide.
    folders += [str(Path(inspect.getfile(module)).parent) for module in (click, hvd_gradcomp)]
    ours = (*(f"{folder}{os.sep}" for folder in folders), "<frozen")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return frames


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hvd-gradcomp")
def main() -> None:
    """Check, build, measure and compare gradient compression for Horovod and torch.distributed."""
