"""Agreement of all processes of a run on what they have to have in common before its first step."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from farpipe import __version__
from farpipe.errors import InputError
from farpipe.runtime.peers import Peers
from farpipe.runtime.run_spec import RunSpec
from farpipe.runtime.versions import versions_of
from farpipe.runtime.work import Work

_AGREEMENTS: Final = (
    ("farpipe", "versions of farpipe", "install the same one on every site"),
    ("torch", "versions of torch", "install the same one on every site"),
    ("transformers", "versions of transformers", "install the same one on every site"),
    ("run", "run.json files", "copy the run directory of one site to the others"),
    ("data", "training texts", "copy data.source to every site (for stdlib: the same version of Python)"),
)
"""Key of what has to agree, its words, and the hint where it does not."""


def agree(run: RunSpec, work: Work, peers: Peers) -> str:
    """Compare what all ranks are about to run; all of them see the same differences and stop.

    The digest of the batches, in hexadecimal; empty for a rehearsal.
    """
    mine: dict[str, Any] = {
        "farpipe": __version__,
        **versions_of(run),
        "run": hashlib.sha256(run.to_json().encode()).hexdigest(),
        "data": work.data_digest.hex(),
        "boundaries": dict(work.boundaries),
    }
    answers = peers.exchange("start", json.dumps(mine).encode(), waiting_for="what the others are going to run")
    found = [json.loads(answer) for answer in answers]
    for key, what, hint in _AGREEMENTS:
        first = next((rank for rank, answer in enumerate(found) if answer[key]), 0)
        other = next((r for r, answer in enumerate(found) if answer[key] and answer[key] != found[first][key]), None)
        if other is not None:
            raise InputError(f"ranks {first} and {other} have different {what}; {hint}")
    _expect_equal_boundaries(run, [answer["boundaries"] for answer in found])
    return next((str(answer["data"]) for answer in found if answer["data"]), "")


def _expect_equal_boundaries(run: RunSpec, boundaries: Sequence[Mapping[str, str]]) -> None:
    """InputError where neighbouring stages of a replica disagree on what goes from one to the other.

    `boundaries`: what `Work.boundaries` has, by process.
    """
    for process, mine in enumerate(boundaries):
        _, replica, twin = run.places.of(process)
        for stage in map(int, mine):
            if stage + 1 == run.problem.num_stages:
                continue
            other = run.places.process(run.problem.stages[stage + 1].rank, replica, twin)
            given, taken = mine[str(stage)], boundaries[other].get(str(stage + 1))
            if given != taken:
                raise InputError(
                    f"rank {process} gives {given} after stage {stage}, but rank {other} takes {taken}; install the "
                    "same farpipe and copy the same model to every site"
                )
