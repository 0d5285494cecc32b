"""The command line: `hvd-gradcomp`, or `python -m hvd_gradcomp`.

Each command has a file of its name here, imported when the command is called: `doctor` has to work
where nothing else does.
"""

from __future__ import annotations

import importlib

import click

from hvd_gradcomp import __version__

COMMANDS = ("doctor", "build", "build-horovod", "bench", "advise", "compare")


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hvd_gradcomp.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hvd-gradcomp")
def main() -> None:
    """Gradient compression for Horovod: does it run here, and is it worth it?"""
