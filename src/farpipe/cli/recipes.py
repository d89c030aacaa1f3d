"""Recipes that come with farpipe: jobs, and folders with a script, its log or a fleet."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Final

from farpipe.core.errors import UsageError
from farpipe.core.strict import nearest, read_text, write_text

FOLDER: Final = Path(str(files("farpipe") / "recipes"))
ABOUT: Final = {
    "megatron": "a script of Megatron-LM with its log, ping.txt and iperf.json",
    "two_nodes": "scripts of Hugging Face and DeepSpeed with their logs, for two nodes that are slower than one",
    "fleet": "regions of a fleet, and the jobs that come to them",
    "rollouts": "a training that publishes its weights, and a script that generates with them at another site",
}
"""Recipes that are folders."""
NEXT: Final = {
    "megatron": "farpipe import {0}/train.sh --site h100 -o job.toml",
    "two_nodes": "farpipe import {0}/ddp.sh {0}/config.json --site a100-80gb -o job.toml",
    "rollouts": "farpipe train {0}/job.toml --device cpu",
    "fleet": "farpipe fleet compare {0}/six_regions.toml --jobs {0}/jobs.csv --policy fcfs,farpipe",
}
"""The first command on such a folder."""


def recipes() -> dict[str, str]:
    """Every recipe, and what it is."""
    jobs = {path.stem: _about(read_text(path)) for path in sorted(FOLDER.glob("*.toml"))}
    return jobs | ABOUT


def _about(text: str) -> str:
    """The first sentence of the comment at the top of a file."""
    comment = " ".join(line.removeprefix("#").strip() for line in text.partition("\n#\n")[0].splitlines())
    return re.split(r"[.:](?:\s|$)", comment)[0]


def copy_recipe(name: str, output: Path | None) -> list[Path]:
    """Write a recipe's files, and return where they are: a job (default job.toml) first, or a folder's files.

    Paths in their text follow. UsageError for an unknown `name`, InputError where a file is already there.
    """
    from farpipe.cli.output import expect_new

    if name not in (known := recipes()):
        raise UsageError(f"--recipe: there is no {name!r}{nearest(name, known) or '; known: ' + ', '.join(known)}")
    if name in ABOUT:
        place = output or Path(name)
        expect_new(place)
        place.mkdir()
        pairs = [(source, place / source.name) for source in sorted((FOLDER / name).iterdir())]
        moved = {f"recipes/{name}": str(place)}
    else:
        place = output or Path("job.toml")
        data = [path for path in sorted(FOLDER.glob(f"{name}.*")) if path.suffix != ".toml"]
        pairs = [(FOLDER / f"{name}.toml", place), *((path, place.parent / path.name) for path in data)]
        moved = {f"recipes/{source.name}": str(target) for source, target in pairs}
        for _, target in pairs:
            expect_new(target)
    for source, target in pairs:
        text = read_text(source)
        for before, after in moved.items():
            text = text.replace(before, after)
        write_text(target, text)
    return [target for _, target in pairs]
