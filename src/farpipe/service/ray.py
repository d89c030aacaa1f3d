"""Ray at a site: a job per machine of the site's share of an attempt, by the REST API of Ray's jobs."""

import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

from pydantic import Field

from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import write_text
from farpipe.service.rest import Rest
from farpipe.service.share import Share, State

STATES: Final[dict[str, State]] = {"PENDING": "queued", "RUNNING": "alive"}
"""All others are ends."""


class Ray(Rest):
    """[sites.ray]: where Ray's dashboard is, and where its jobs run. A machine is a job, whose id is the attempt's."""

    labels: Mapping[str, str] = Field(default_factory=dict)
    """Labels of the nodes that are the site's; none: any of the cluster."""
    python: str = sys.executable
    """Python that has farpipe, on Ray's nodes."""

    def start(self, shares: list[Share], num_devices: int) -> None:
        """Submit the jobs, the first machine's last: where it is known, all are."""
        for share in reversed(shares):
            argv = [self.python, "-m", "farpipe.service.ranks", str(share.folder), share.site, str(share.number)]
            job = {
                "submission_id": _id(share),
                "entrypoint": f"exec {shlex.join(argv)}",
                "metadata": {"farpipe": _id(shares[0])},
                "entrypoint_label_selector": dict(self.labels),
                f"entrypoint_num_{'gpus' if self.with_gpus else 'cpus'}": num_devices,
            }
            try:
                self.ask("POST", "/api/jobs/", job)
            except (InputError, RunError) as error:  # Ray's code for it is 400 or 500, by its version
                if "already exists" not in str(error):
                    raise
        write_text(shares[0].path("job"), _id(shares[0]) + "\n")

    def states(self, shares: list[Share]) -> list[tuple[State, str]]:
        """What Ray says of the jobs; an error where it says nothing."""
        jobs = self._jobs() if shares else []
        return [self._state(share, jobs) for share in shares]

    def kill(self, share: Share, *, only_waiting: bool) -> None:
        """Stop the jobs if they wait, or whatever they do."""
        for job in self._jobs():
            waits = job["status"] == "PENDING" or not only_waiting
            if job["metadata"]["farpipe"] == _id(share) and job["status"] in STATES and waits:
                self.ask("POST", f"/api/jobs/{quote(job['submission_id'])}/stop", known=(404,))

    def _jobs(self) -> list[dict[str, Any]]:
        """farpipe's jobs."""
        return [job for job in self.ask("GET", "/api/jobs/") if "farpipe" in (job.get("metadata") or {})]

    def _state(self, share: Share, jobs: list[dict[str, Any]]) -> tuple[State, str]:
        name = _id(share)
        found = next((job for job in jobs if job["submission_id"] == name), None)
        if found is None:
            return ("over", f"Ray: job {name} is gone") if share.path("job").exists() else ("absent", "")
        if found["status"] == "PENDING" and share.stop_path.exists():
            return "absent", ""  # Ray stops it only once a node has it, and then its ranks leave by themselves
        if found["status"] in STATES:
            return STATES[found["status"]], f"Ray: {found['status']}"
        why = f"Ray: job {name} {found['status']}: {found['message']}"
        with suppress(RunError, InputError):
            why += "\n" + self.ask("GET", f"/api/jobs/{quote(name)}/logs")["logs"][-500:]
        return "over", why.strip()


def _id(share: Share) -> str:
    """Of a machine's job."""
    return f"{share.label}.{share.digest}"
