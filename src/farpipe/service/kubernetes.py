"""Kubernetes at a site: a JobSet for the site's share of an attempt, queued by Kueue where it has a queue."""

import shlex
from contextlib import suppress
from typing import Any, Final

from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import write_text
from farpipe.engine.launch.manifests import CLAIM, IMAGE, jobset, label_of
from farpipe.service.rest import Rest
from farpipe.service.share import Share, State

LABEL: Final = "farpipe.io/fleet"
KEPT_S: Final = 86400
"""Time for which Kubernetes keeps a JobSet that has ended."""


class Kubernetes(Rest):
    """[sites.kubernetes]: an API server with JobSet. A share is a JobSet whose name is the attempt's."""

    namespace: str = "default"
    queue: str | None = None
    """Kueue's local queue; None: without Kueue."""
    image: str = IMAGE
    claim: str = CLAIM
    """Volume claim with the attempts' directories, at the same path as here."""

    def start(self, shares: list[Share], num_devices: int) -> None:
        """Create the JobSet, unless there is one of its name."""
        first = shares[0]
        words = shlex.join(["exec", "python", "-m", "farpipe.service.ranks", str(first.folder), first.site])
        script, mount = f'{words} "$JOB_COMPLETION_INDEX"', first.folder.parents[1]
        gpus, image = num_devices if self.with_gpus else 0, self.image
        made = jobset(_name(first), script, len(shares), mount, num_gpus=gpus, image=image, claim=self.claim)
        queued = {} if self.queue is None else {"kueue.x-k8s.io/queue-name": self.queue}
        made["metadata"] |= {"labels": {LABEL: "attempt", **queued}, "annotations": {LABEL: first.label}}
        made["spec"] |= {"suspend": self.queue is not None, "ttlSecondsAfterFinished": KEPT_S}
        self.ask("POST", self._path(), made, known=(409,))
        write_text(first.path("job"), _name(first) + "\n")

    def states(self, shares: list[Share]) -> list[tuple[State, str]]:
        """What Kubernetes says of the JobSets; an error where it says nothing."""
        found = self.ask("GET", self._path(), labelSelector=LABEL)["items"] if shares else []
        by_name = {one["metadata"]["name"]: one for one in found}
        return [self._state(share, by_name.get(_name(share))) for share in shares]

    def kill(self, share: Share, *, only_waiting: bool) -> None:
        """Delete the JobSet, with its pods, if it waits, or whatever it does."""
        found = self.ask("GET", self._path(_name(share)), known=(404,))
        if found is not None and (not only_waiting or _state(found)[0] == "queued"):
            self.ask("DELETE", self._path(_name(share)), {"propagationPolicy": "Foreground"}, known=(404,))

    def _path(self, name: str = "") -> str:
        return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.namespace}/jobsets{'/' * bool(name)}{name}"

    def _state(self, share: Share, found: dict[str, Any] | None) -> tuple[State, str]:
        if found is None:
            name = _name(share)
            return ("over", f"Kubernetes: JobSet {name} is gone") if share.path("job").exists() else ("absent", "")
        state, why = _state(found)
        return state, f"{why}\n{self._last_words(share)}".strip() if state == "over" else why

    def _last_words(self, share: Share) -> str:
        """How the pods are, and the end of the log of one that has failed."""
        pods, words = f"/api/v1/namespaces/{self.namespace}/pods", list[str]()
        with suppress(RunError, InputError):
            for pod in self.ask("GET", pods, labelSelector=f"jobset.sigs.k8s.io/jobset-name={_name(share)}")["items"]:
                name, status = pod["metadata"]["name"], pod.get("status", {})
                words.append(f"pod {name}: {status.get('phase')} {status.get('message', '')}".strip())
                if status.get("phase") == "Failed":
                    return f"{words[-1]}\n{self.ask('GET', f'{pods}/{name}/log', tailLines='20')[-500:]}"
        return "\n".join(words)


def _state(found: dict[str, Any]) -> tuple[State, str]:
    status = found.get("status", {})
    true = {one["type"]: one.get("message", "") for one in status.get("conditions", ()) if one["status"] == "True"}
    for end in ("Failed", "Completed"):
        if end in true:
            return "over", f"Kubernetes: {end}: {true[end]}"
    is_ready = any(job.get("ready") for job in status.get("replicatedJobsStatus", ()))
    return ("alive", "") if is_ready else ("queued", f"Kubernetes: {true.get('Suspended', 'waits for its pods')}")


def _name(share: Share) -> str:
    """Of the JobSet, in letters that Kubernetes takes."""
    return f"farpipe-{label_of(share.folder.parent.name)[:24]}-{share.digest}"
