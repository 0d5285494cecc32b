"""Does what the pages say: every command, in order, as bash would run it.

    python -m docs.follow PAGE...                       what can be run here
    python -m docs.follow --setup PAGE...               the set-up too: in a fresh container
    python -m docs.follow --setup --script PAGE...      prints that as a script for bash

A page is MyST Markdown. What its fenced blocks are for is written on them, so that none is left out
by accident (`tests/single/test_docs.py` holds it):

    console                `$ ` begins a command, `> ` continues it, the lines below it are output
    python, :caption: F    a file; toml too
    diff, :caption: F      a change of a file that the page, or one before, has written
    python                 run by itself
    :class: R              not run here; R is one of REASONS

Output is compared loosely: each line has to appear, in order; numbers and spaces may differ.
A page with `follows: OTHER` in its front matter begins with the files that the other one ends with.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import NamedTuple

REASONS = {
    "setup": "prepares a bare machine; `make tutorial` runs it in a fresh container",
    "target": "a target of the Makefile with tests of its own, or one that runs tests",
    "hosts": "needs several hosts; `make hosts` has them as network namespaces",
    "engine": "needs a container engine; `make images` has one",
    "excerpt": "part of a program, which another block or example has whole",
}
LANGUAGES = {"console", "python", "diff", "text", "toml"}
MARK = "\x1e"
_GRACE = 30  # seconds between the request to end and the end
_FENCE = re.compile(r"^(?P<fence>`{3,})(?:\{code-block\} *)?(?P<language>[\w-]+)$")
_OPTION = re.compile(r"^:(?P<name>[\w-]+):(?: +(?P<value>.*))?$")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    options: dict[str, str]
    lines: list[str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return self.options.get("class")

    @property
    def file(self) -> str | None:
        return self.options.get("caption")

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class Command(NamedTuple):
    """A command of a console block, and the output that the page shows."""

    place: str
    text: str
    output: list[str]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that a reader would run or write; in order."""
    parsed, lines = [], page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        match, at = _FENCE.match(lines[at]), at + 1
        if match is None:
            if lines[at - 1].startswith("```"):  # another directive: skipped as a whole
                while lines[at] != "```":
                    at += 1
                at += 1
            continue
        start, options, body = at, {}, []
        while option := _OPTION.match(lines[at]):
            options[option["name"]] = option["value"] or ""
            at += 1
        while lines[at] != match["fence"]:
            body.append(lines[at])
            at += 1
        at += 1
        while body and not body[0]:
            del body[0]
        parsed.append(Block(page, start, match["language"], options, body))
    return parsed


def follows(page: Path) -> Path | None:
    """The page whose files this one goes on with."""
    match = re.match(r"---\n(?:.*\n)*?follows: (.+)\n(?:.*\n)*?---\n", page.read_text("utf-8"))
    return page.parent / match[1] if match else None


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    listed: list[Command] = []
    for number, line in enumerate(block.lines, block.line + 1):
        if line.startswith("$ "):
            listed.append(Command(f"{block.page}:{number}", line[2:], []))
        elif not listed:
            raise SyntaxError(f"{block.page}:{number}: output before the first command")
        elif line.startswith("> ") and not listed[-1].output:
            listed[-1] = listed[-1]._replace(text=f"{listed[-1].text}\n{line[2:]}")
        elif line.strip() not in ("", "..."):
            listed[-1].output.append(line)
    return listed


def patched(text: str, block: Block) -> str:
    """A file after a diff without line numbers; `@@` or an empty line parts its hunks."""
    for hunk in re.split(r"\n(?:@@.*)?\n", block.text.strip("\n")):
        lines = [line for line in hunk.splitlines() if not line.startswith("@@")]
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        if text.count(old) != 1:
            raise SyntaxError(f"{block.place}: found {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    return text


def script(pages: Iterable[Path], setup: bool = False) -> tuple[str, list[Command]]:
    """Return the script of some pages, and the commands that it marks in its output."""
    parts, files = ["exec 2>&1"], {}
    done: list[Command] = []

    def write(block: Block) -> None:
        assert block.file is not None
        files[block.file] = (
            block.text if block.language != "diff" else patched(files[block.file], block)
        )
        parts.append(_written(block.file, files[block.file]))

    def run(command: Command) -> None:
        parts.append(f"printf '\\036%d\\n' {len(done)}")
        shown = f"$ {command.text}".replace("\n", "\n> ")
        parts.append(f"printf '%s\\n' {shlex.quote(shown)}")
        parts.append(f"{{\n{command.text}\n}} </dev/null || exit")
        done.append(command)

    for page in pages:
        before = follows(page)
        for block in blocks(before) if before else []:
            if block.file and not block.reason:
                write(block)
        for block in blocks(page):
            if block.reason and not (setup and block.reason == "setup"):
                continue
            if block.file:
                write(block)
            elif block.language == "console":
                for command in commands(block):
                    run(command)
            elif block.language == "python":
                name = f".{page.stem}-{block.line}.py"
                parts.append(_written(name, block.text))
                run(Command(block.place, f"python {name}", []))
    parts.append(f"printf '\\036%d\\n' {len(done)}")
    return "\n".join(parts) + "\n", done


def _written(name: str, text: str) -> str:
    return f"cat > {shlex.quote(name)} <<'END OF FILE'\n{text}END OF FILE"


def loosely(line: str) -> str:
    """A line of output without what may differ."""
    return " ".join(_NUMBER.sub("#", line).split())


def check(transcript: str, done: list[Command]) -> list[str]:
    """List the differences from the pages; the transcript is what the script has printed."""
    parts = re.split(rf"{MARK}(\d+)\n", transcript)
    outputs = dict(zip(map(int, parts[1::2]), parts[2::2]))
    problems = []
    for number, command in enumerate(done):
        output = outputs.get(number)
        if output is None:
            problems.append(f"{command.place}: was never run: $ {command.text}")
            break
        if number + 1 not in outputs:
            problems.append(f"{command.place}: failed: $ {command.text}\n{output[-6000:]}")
            break
        rest = iter([loosely(line) for line in output.splitlines()])
        for line in command.output:
            if loosely(line) not in rest:
                problems.append(
                    f"{command.place}: $ {command.text}\nhas not printed, or not there:\n{line}\n"
                    f"It printed:\n{output[-6000:]}"
                )
                break
    return problems


def follow(
    pages: Iterable[Path], folder: Path, setup: bool = False, deadline: float = 600.0
) -> list[str]:
    """Runs pages in a folder; what went otherwise than they say."""
    text, done = script(pages, setup)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **os.environ}
    job = subprocess.Popen(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert job.stdout is not None
    transcript, killer = [], _after(deadline, job)
    for line in job.stdout:
        transcript.append(line.decode(errors="replace"))
        if not transcript[-1].startswith(MARK):
            sys.stdout.write(transcript[-1])
            sys.stdout.flush()
    job.wait()
    killer.cancel()
    return check("".join(transcript), done)


def _after(seconds: float, job: subprocess.Popen[bytes]) -> Timer:
    """A timer that ends what hangs, and all that it has started."""

    def end() -> None:
        # Its ranks are in sessions of their own: torchrun ends them where it is asked to.
        for number, pause in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, 0)):
            with suppress(ProcessLookupError):
                os.killpg(job.pid, number)
            time.sleep(pause)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--setup", action="store_true", help="prepare the machine too")
    parser.add_argument("--script", action="store_true", help="print what bash has to run")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="compare what the script has printed, in a file"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="where to run")
    options = parser.parse_args()
    text, done = script(options.pages, options.setup)
    if options.script:
        print(text, end="")
        return
    if options.check:
        problems = check(options.check.read_text(errors="replace"), done)
    else:
        problems = follow(options.pages, options.folder, options.setup)
    if problems:
        sys.exit("\n\n".join(problems))
    print(f"{len(done)} commands did what the pages say")


if __name__ == "__main__":
    main()
