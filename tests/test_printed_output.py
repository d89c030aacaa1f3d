"""Pages are followed in a clean folder: their commands end as the page says, and print what it shows.

A comment before a block says what is particular about it; readers of the page don't see it:

    <!-- not run: REASON -->          commands that need two machines, a GPU, a file of the reader's, or hours
    <!-- file: NAME -->               the text of a file that the reader saves under this name
    <!-- given: NAME from PAGE -->    a file of another page, that this page's commands read

Where an answer has changed on purpose, write the pages anew and read what has changed:

    python tests/test_printed_output.py [PAGE ...]
"""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from chosen import chosen
from forked import PLACE, WITH_FORKS

ROOT = Path(__file__).parent.parent
OTHERS = "docs/reference/benchmarks/"
"""Pages whose commands are not run here: they make a table in minutes to hours."""
DOCS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *(page for page in DOCS if not page.startswith(OTHERS))]
TOKEN = re.compile(r"^<!-- (not run|file|given): (.*?) -->$|^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
USAGES = "docs/reference/commands.md"
FINE_TUNING = "docs/how-to/use-hugging-face-models.md"
"""Page that tests/engine/site/test_fine_tuning.py follows, and looks at its run."""
RUN, SHOWN = {"console", "bash", "python"}, {"toml", "json", "text"}
PROGRAMS = "farpipe|python3?|torchrun|make|pip|sudo|ssh|scp|rsync|srun|sacct|kubectl"
COMMAND = re.compile(rf"^ *(?:\$ |(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) [a-z-](?!.*\[OPTIONS\]))", re.MULTILINE)
FARPIPE = "farpipe (--version|plan|explain|diff|compare|simulate|pareto|validate|prepare|check|import|export)"
COMPUTED = re.compile(rf"({FARPIPE}|sed|printf|echo|head|ls|cp)\b")
"""Commands that print the same every time; a page's output is compared up to its first other one, which measures."""
OTHER_MACHINES = {
    "ssh": 'mkdir -p "machines/$1" && cd "machines/$1" && shift && eval "$*"',
    "scp": 'cp "$1" "$2" "machines/${3%%:*}/${3#*:}"',
}
"""Programs that take a folder for another machine, its home."""
REST = "..."
"""Line that stands for all further lines."""


def is_computed(command):
    return bool(COMPUTED.match(command)) and "--profile" not in command and "--learned-from" not in command


class Reader:
    """Someone who follows a page in a folder: saves its files and types its commands."""

    def __init__(self, folder, *, whole=True):
        """`whole`: also what comes after the commands whose output is always the same."""
        self.folder, self.whole, self.status, self.is_open = folder, whole, 0, True
        self.count, self.failure, self.mark = 0, "", ("", "")
        programs = folder / "bin"
        programs.mkdir()
        start = WITH_FORKS if PLACE in os.environ else ""
        for name, line in (OTHER_MACHINES | {"farpipe": f'exec "{sys.executable}" {start} -m farpipe "$@"'}).items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        (folder / "recipes").symlink_to(ROOT / "recipes")
        path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
        sources = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": sources, "COLUMNS": "140"}

    def follow(self, token):
        """A comment or a block of a page, with what its commands print now."""
        mark, argument, kind, body = token.groups()
        if mark == "given":
            self.save(*argument.split(" from "))
        elif mark:
            self.mark = (mark, argument)
        else:
            (mark, argument), self.mark = self.mark, ("", "")
            if mark == "file":
                (self.folder / argument).write_text(body, encoding="utf-8")
            elif kind in RUN and mark != "not run":
                return f"```{kind}\n{self.run(kind, body)}```"
        return token[0]

    def save(self, name, page):
        """A file that another page tells its readers to save."""
        tokens = [*TOKEN.finditer((ROOT / page).read_text(encoding="utf-8"))]
        (text,) = [block[4] for comment, block in pairwise(tokens) if comment[2] == name]
        (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, kind, body):
        """A block with what its commands print now."""
        if kind != "console":
            self.is_open = False
            self.type([sys.executable, "-c", body] if kind == "python" else ["bash", "-euc", body], body, 0)
            return body
        first, *calls = re.split(r"^\$ ", body, flags=re.MULTILINE)
        return first + "".join(f"$ {self.repeat(*pair)}" for pair in zip(calls, [*calls[1:], ""], strict=True))

    def repeat(self, call, following):
        """A command and what it prints now, as far as the page shows it; `following`: the next command."""
        command, shown = re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*\n)(.*)", call, re.DOTALL).groups()
        self.is_open = self.is_open and is_computed(command)
        said = re.search(r"#.*\bexit (\d+)", command) or re.match(r"echo \$\?\n(\d+)", following)
        printed = self.type(["bash", "-c", f"(exit {self.status}); {command}"], command, int(said[1]) if said else 0)
        return command + (as_shown(printed, shown) if self.is_open else shown)

    def type(self, words, text, expected):
        """What a command prints: its output, and its error without what it says of its progress."""
        if self.failure or not (self.is_open or self.whole):
            return ""
        run = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        self.count, self.status = self.count + 1, run.returncode
        if run.returncode != expected:
            self.failure = (
                f"{text}\nended with {run.returncode}, not {expected}:\n{run.stdout[-2000:]}{run.stderr[-4000:]}"
            )
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


def followed(text, folder, *, whole=True):
    """The page with what its commands print now, how many of them were typed, and which one failed and how."""
    reader = Reader(folder, whole=whole)
    return TOKEN.sub(reader.follow, text), reader.count, reader.failure


@cache
def read(page):
    """A page as it was and as it is now, and its failure."""
    text = (ROOT / page).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        now, _, failure = followed(text, Path(folder))
    return text, now, failure


def blocks(page):
    """(mark, its argument, kind, body) of every block."""
    mark = ("", "")
    for token in TOKEN.finditer((ROOT / page).read_text(encoding="utf-8")):
        if token[1] and token[1] != "given":
            mark = (token[1], token[2])
        elif not token[1]:
            yield (*mark, token[3], token[4])
            mark = ("", "")


WITH_COMMANDS = [
    page for page in PAGES if page != FINE_TUNING and any(kind in RUN and not mark for mark, _, kind, _ in blocks(page))
]
FIRST = ("README.md", "docs/concepts.md", "docs/how-to/begin-with-what-you-have.md")
OF_EACH_PAGE = chosen(WITH_COMMANDS, *(WITH_COMMANDS.index(page) for page in FIRST))


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine: the tutorial trains
@pytest.mark.parametrize("page", OF_EACH_PAGE)
def test_commands_of_a_page_end_as_it_says(page):
    assert not read(page)[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine: the tutorial trains
@pytest.mark.parametrize("page", OF_EACH_PAGE)
def test_a_page_shows_what_its_commands_print(page):
    text, now, failure = read(page)
    assert failure or now.split("\n") == text.split("\n")


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_or_says_why_not(page):
    for mark, argument, kind, body in blocks(page):
        assert kind in RUN | SHOWN, f"{page}: of which language is this block?\n{body}"
        assert mark != "not run" or (len(argument.split()) > 2 and kind in RUN), f"{page}: not run, and why?\n{body}"
        assert all((ROOT / path).exists() for path in re.findall(r"(?:tests|benchmarks)/[\w./]*\w", argument)), argument
        assert kind in RUN or mark or not COMMAND.search(body), f"{page}: a command; say ```console or ```bash:\n{body}"
    text = (ROOT / page).read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for mark, name, *_ in blocks(page) if mark == "file"), f"{page}: names of its files"
    lines = [line for line in TOKEN.sub("", text).splitlines() if line.startswith("    ") and COMMAND.match(line)]
    assert page == USAGES or not lines, f"{page}: commands in indented blocks; put them between ```bash and ```"


@pytest.mark.parametrize(
    ("block", "failure"),
    [
        ("```console\n$ false\n```\n", "false\n\nended with 1, not 0:\n"),
        ("```console\n$ false # exit 1\n$ ls no\n$ echo $?\n2\n```\n", ""),
        ("```bash\nfalse\ntrue\n```\n", "false\ntrue\n\nended with 1, not 0:\n"),
        ("<!-- not run: needs a mountain -->\n```bash\nfalse\n```\n", ""),
        ("<!-- file: a.txt -->\n```text\nhello\n```\n```console\n$ grep hello a.txt\n```\n", ""),
    ],
)
def test_a_command_that_ends_otherwise_than_the_page_says_is_seen(block, failure, tmp_path):
    now, _, found = followed(block, tmp_path)
    assert (now, found) == (block, failure)


def test_a_changed_answer_is_seen(tmp_path):
    page = "```console\n$ echo five\nfour\n$ true\nno\n```\n"
    assert followed(page, tmp_path) == (page.replace("four", "five"), 2, "")


if __name__ == "__main__":
    for name in sys.argv[1:] or WITH_COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            place = ROOT / name
            now, _, failure = followed(place.read_text(encoding="utf-8"), Path(folder), whole=False)
            place.write_text(now, encoding="utf-8")
            if failure:
                sys.exit(f"{name}: {failure}")
