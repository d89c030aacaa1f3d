"""Pages show what commands print: each page's own job is planned again, and must print the same.

Where an answer has changed on purpose, write the pages anew and read what has changed:

    python tests/test_printed_output.py
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOW_TO = ("check-the-cost-model", "plan-over-your-own-sites", "rehearse-without-a-gpu", "run-on-two-sites")
PAGES = ["README.md", "docs/tutorial/index.md", *(f"docs/how-to/{name}.md" for name in HOW_TO)]
FENCE = re.compile(r"^```(toml|text|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMPUTED = re.compile(r"(farpipe (--version|plan|compare|simulate|pareto|validate)\b|(sed|printf|echo) )")
"""Commands that print the same every time; a page is followed up to its first other one, which measures."""
REST = "..."
"""Line that stands for all further lines."""


def is_computed(command):
    return bool(COMPUTED.match(command)) and "--profile" not in command and "--learned-from" not in command


class Reader:
    """Someone who follows a page in a folder: saves its files and types its commands."""

    def __init__(self, folder):
        self.folder, self.status, self.count, self.is_open = folder, 0, 0, True
        program = folder / "bin" / "farpipe"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m farpipe "$@"\n')
        program.chmod(0o755)
        (folder / "recipes").symlink_to(ROOT / "recipes")
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"}

    def follow(self, fence):
        """A block of a page with what its commands print now."""
        kind, body = fence.groups()
        if kind != "console":
            self.save(kind, body)
            return fence[0]
        first, *calls = re.split(r"^\$ ", body, flags=re.MULTILINE)
        return f"```console\n{first}{''.join(map(self.repeat, calls))}```"

    def repeat(self, call):
        """A command and what it prints now, as far as the page shows it."""
        command, _, shown = call.partition("\n")
        self.is_open = self.is_open and is_computed(command)
        if not self.is_open:
            return f"$ {call}"
        self.count += 1
        return f"$ {command}\n{as_shown(self.type(command), shown)}"

    def save(self, kind, text):
        """The files that pages call job.toml, points.toml and points.csv."""
        if kind == "toml" and "points" in tomllib.loads(text).get("format", ""):
            (self.folder / "points.toml").write_text(text)
        elif kind == "toml" and "model" in tomllib.loads(text):
            (self.folder / "job.toml").write_text(text)
        elif text.startswith("group,"):
            (self.folder / "points.csv").write_text(text)

    def type(self, command):
        """What a command prints: its output, and its error without what it says of its progress."""
        line = f"(exit {self.status}); {command}"
        run = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        self.status = run.returncode
        at = re.search(r"^farpipe: ", run.stderr, re.MULTILINE)
        return run.stdout + (run.stderr[at.start() :] if at else "")


def as_shown(printed, shown):
    """`printed` up to where the page leaves the rest out; nothing where the page shows nothing."""
    if not shown.strip():
        return shown
    lines, wanted = printed.rstrip("\n").split("\n"), shown.rstrip("\n").split("\n")
    if wanted[-1] == REST:
        lines = [*lines[: len(wanted) - 1], REST]
    return "\n".join(line.rstrip() for line in lines) + shown[len(shown.rstrip("\n")) :]


def followed(text, folder):
    """The page with what its commands print now, and how many of them were typed."""
    reader = Reader(folder)
    return FENCE.sub(reader.follow, text), reader.count


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_commands_print(page, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    now, count = followed(text, tmp_path)
    assert count
    assert now.split("\n") == text.split("\n")


def test_a_changed_answer_is_seen(tmp_path):
    page = "```console\n$ echo five\nfour\n$ farpipe train job.toml\nno\n```\n"
    assert followed(page, tmp_path) == (page.replace("four", "five"), 1)


if __name__ == "__main__":
    for name in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            place = ROOT / name
            place.write_text(followed(place.read_text(encoding="utf-8"), Path(folder))[0], encoding="utf-8")
