"""Takes this machine's pip configuration along into containers.

    python3 docker/pip-config.py FOLDER

Writes FOLDER/pip.conf and prints the mounts that it needs, `SOURCE:TARGET:ro`, one a line: itself,
and what of this machine's disk it names (certificates, folders of wheels, an index in files).
"""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Writes the configuration and prints the mounts."""
    # Without pip there is none to take along.
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    mounts = [f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]

    def moved(word: str) -> str:
        scheme = "file://" if word.startswith("file:///") else ""
        path = Path(word[len(scheme) :])
        if not path.is_absolute() or not path.exists():
            return word
        # A path of its own there: Debian's ca-certificates could not be installed over a mount.
        # An index in files refers to them by ../../, so the folder around it goes along.
        shared = path.parent if scheme else path
        target = Path(f"/mnt/pip/{len(mounts)}")
        mounts.append(f"{shared}:{target}:ro")
        return scheme + str(target / path.relative_to(shared))

    settings = configparser.RawConfigParser()
    # pip's order: what comes from the environment wins, and is listed first.
    for line in reversed(listed.splitlines()):
        name, value = line.split("=", 1)
        section, key = name.rsplit(".", 1)
        section = "global" if section == ":env:" else section
        if not settings.has_section(section):
            settings.add_section(section)
        words = str(ast.literal_eval(value)).split()
        settings.set(section, key, " ".join(moved(word) for word in words))
    with (folder / "pip.conf").open("w") as stream:
        settings.write(stream)
    print("\n".join(mounts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
