"""A job of farpipe, perhaps calibrated, with a second site like its own: `farpipe import JOB.toml --second-site N`."""

import re
from pathlib import Path
from typing import Final

from farpipe.core.errors import InputError
from farpipe.core.spec import Job, Pins, load_table, parse_job
from farpipe.core.spec.write import as_toml
from farpipe.core.strict import parse_toml, read_text
from farpipe.interop.measured_links import MeasuredLink
from farpipe.interop.settings import USUAL_LINK, link_lines

_NAME: Final = "second"
_OF_ONE_PLACE: Final = ("region", "prices")
"""Keys of a site that another one does not share."""
_LAYOUT: Final = re.compile(r"\s*\[layout\]")


def is_job(path: Path) -> bool:
    """True for a job.toml: a table of a model with the sites that it trains on."""
    return path.suffix == ".toml" and path.is_file() and {"model", "cluster"} <= load_table(path).keys()


def with_second_site(path: Path, job: Job, num_devices: int, link: MeasuredLink) -> tuple[str, list[str]]:
    """The file of `job` with `num_devices` more at a site like its own, over `link`, its degrees left to the planner
    and kept as comments; and what was assumed. InputError where the job has several sites."""
    if len(job.cluster.sites) > 1:
        names = ", ".join(site.name for site in job.cluster.sites)
        raise InputError(f"{path}: --second-site is for a job of one site, and it has {names}")
    text, site = read_text(path), job.cluster.sites[0]
    table = parse_toml(text, str(path))["cluster"]["sites"][0]
    name = _NAME if site.name != _NAME else "first"
    like = {key: value for key, value in table.items() if key not in _OF_ONE_PLACE}
    if num_devices % site.devices_per_machine:
        like.pop("devices_per_machine", None)
    figures = {**USUAL_LINK, **link.there}
    added = as_toml(("[[cluster.sites]]", like | {"name": name, "num_devices": num_devices}))
    added += "\n".join([*link_lines([site.name, name], figures, link.back), ""])
    notes = [f"link {key} of {figure} assumed" for key, (figure, origin) in figures.items() if origin == "assumed"]
    notes += [f"{key} of site {name!r}: not known, give it there" for key in _OF_ONE_PLACE if key in table]
    return _joined(text, job, added), [f"site {name!r}: devices like those of {site.name!r}", *notes, *link.notes]


def _joined(text: str, job: Job, added: str) -> str:
    """The file with tables behind it and its [layout] as comments; where that is written in another way, the job with
    every figure explicit."""
    explicit = job.model_copy(update={"layout": Pins(), "text": ""}).to_toml()
    for whole in (f"{_without_layout(text).rstrip()}\n\n{added}", f"{explicit}\n{added}"):
        try:
            if parse_job(whole).layout == Pins():
                return whole
        except InputError as error:
            wrong = error
    raise InputError(f"with a second site: {wrong}")


def _without_layout(text: str) -> str:
    lines, inside = list[str](), False
    for line in text.splitlines():
        inside = bool(_LAYOUT.match(line)) or (inside and not line.lstrip().startswith("["))
        lines.append(f"# {line}" if inside and line.strip() else line)
    return "\n".join(lines)
