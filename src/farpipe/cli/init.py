"""``farpipe init``: a first job.toml from a few words, and the verdict on it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from farpipe.cli.options import with_groups
from farpipe.cli.output import console, expect_new, progress_bar
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import write_text

EXAMPLES: Final = {
    "model": "llama-3-8b",
    "sites": "zurich=8xh100,lugano=8xh100",
    "link": "20ms,100G",
}
QUESTIONS: Final = {
    "model": "Model (a preset of `farpipe list models`, or a folder with config.json)",
    "sites": "Sites and devices",
    "link": "Link between sites: latency one way, bandwidth",
}


@dataclass(frozen=True)
class FewWords:
    """A job in a few words."""

    model: Annotated[
        str | None, typer.Option(help="A preset, or a folder with a Hugging Face config.json: llama-3-8b.")
    ] = None
    sites: Annotated[
        str | None, typer.Option(metavar="SITES", help="Sites and their devices: zurich=8xh100,lugano=8xh100.")
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(metavar="LINK", help="Link between sites, 20ms,100G, or of one pair, a:b=20ms,100G; repeatable."),
    ] = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is given."""
        return not (self.model or self.sites or self.link)

    def job_text(self) -> str:
        """The job.toml; UsageError names the option that is missing."""
        from farpipe.core.spec.first import first_job

        for name, word in {"model": self.model, "sites": self.sites}.items():
            if not word:
                raise UsageError(f"--{name} is missing; for example --{name} {EXAMPLES[name]}")
        try:
            return first_job(self.model or "", [self.sites or ""], self.link or ())
        except InputError as error:
            raise InputError(f"--{error}") from None

    def asked(self) -> "FewWords":
        """The same with what is missing asked for on the terminal."""
        words = {"model": self.model, "sites": self.sites}
        for name in words:
            words[name] = words[name] or typer.prompt(QUESTIONS[name], default=EXAMPLES[name], err=True)
        needs_link = "," in (words["sites"] or "") and not self.link
        link = [typer.prompt(QUESTIONS["link"], default=EXAMPLES["link"], err=True)] if needs_link else self.link
        return FewWords(words["model"], words["sites"], link)


@with_groups
def init(
    words: FewWords,
    recipe: Annotated[
        str | None,
        typer.Option(help="Begin with a recipe of `farpipe list recipes` instead: a job, or a folder of samples."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the job; default: job.toml. Or a recipe's folder.")
    ] = None,
) -> None:
    """Write a commented job.toml from a few words, and print the verdict on it.

    On a terminal it asks for what is missing. Lines of the file marked "assumed" are a guess. No file is overwritten.
    """
    if recipe is not None:
        _from_recipe(recipe, output, words)
        return
    output = output or Path("job.toml")
    expect_new(output)
    text = (words.asked() if sys.stdin.isatty() else words).job_text()
    write_text(output, text)
    typer.echo(f"job written to {output}\n\n{text}")
    _show_verdict(output)


def _from_recipe(recipe: str, output: Path | None, words: FewWords) -> None:
    """Write the files of a recipe; the verdict on its job, or the first command on its folder."""
    from farpipe.cli.recipes import NEXT, copy_recipe

    if not words.is_empty:
        raise UsageError(
            "--recipe has a model, sites and links: change them in its job, or with `--set` of other commands"
        )
    files = copy_recipe(recipe, output)
    typer.echo(f"written: {', '.join(map(str, files))}")
    if recipe in NEXT:
        typer.echo(f"\nNext: {NEXT[recipe].format(files[0].parent)}")
    else:
        typer.echo()
        _show_verdict(files[0])


def _show_verdict(output: Path) -> None:
    from farpipe.cli.compiling import compilation_announced
    from farpipe.cli.planned import errors_of
    from farpipe.core.spec import load_job
    from farpipe.planning import find
    from farpipe.planning.explain import explained
    from farpipe.report.shown import verdict_lines

    with compilation_announced(), progress_bar("planning", "layout") as advance, errors_of(output):
        best = find(load_job(output), progress=advance)[0]
    console().print(*verdict_lines(explained(best)), sep="\n")
    typer.echo(f"\nNext: farpipe plan {output}")
