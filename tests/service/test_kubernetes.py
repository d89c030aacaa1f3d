"""Requests to Kubernetes, against the answers of a real API server (1.20, with JobSet's definition) that lie beside.

With FARPIPE_TEST_KUBERNETES=URL, KUBERNETES_TOKEN and SSL_CERT_FILE they are asked for anew and written down again. No
controller ran there: the test itself says what JobSet's would say. The node n1 has to have a kubelet that gives logs.
"""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.service.door import Door
from farpipe.service.kubernetes import Kubernetes
from farpipe.service.share import Share

RECORD = Path(__file__).with_name("kubernetes.json")
REAL = os.environ.get("FARPIPE_TEST_KUBERNETES")
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
PODS = "/api/v1/namespaces/default/pods"


class Answers(BaseHTTPRequestHandler):
    """Answers of the API server, each to the request that got it; or, with a real one, what it says now."""

    root, exchanges, wrong = "", [], []

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode().replace(self.root, "/runs")
        asked = [self.command, self.path, json.loads(body or "null"), "authorization" in self.headers]
        if REAL:
            self.exchanges.append([asked, *self.forwarded(body)])
        known = self.exchanges[-1 if REAL else 0]
        if known[0] == asked:
            code, kind, text = known[1:] if REAL else self.exchanges.pop(0)[1:]
        else:
            self.wrong.append((asked, known[0]))
            code, kind, text = 599, "text/plain", "another request was expected"
        self.send_response(code)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def forwarded(self, body):
        token = self.headers.get("authorization", "").replace("Bearer good", f"Bearer {os.environ['KUBERNETES_TOKEN']}")
        headers = {"authorization": token, "content-type": self.headers.get("content-type", "application/json")}
        answer = httpx.request(self.command, REAL + self.path, content=body, headers=headers, trust_env=True)
        return answer.status_code, answer.headers["content-type"], answer.text

    def log_message(self, *given):
        pass


for method in ("GET", "POST", "PATCH", "DELETE"):
    setattr(Answers, f"do_{method}", Answers.answer)


@pytest.fixture
def server(tmp_path, request, monkeypatch):
    monkeypatch.setattr(Share, "digest", "0123456789")
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    Answers.root, Answers.wrong = str(tmp_path), []
    Answers.exchanges = [] if REAL else known[request.node.name]
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
    if REAL:
        RECORD.write_text(json.dumps(known | {request.node.name: Answers.exchanges}, indent=1) + "\n")
    assert (Answers.wrong, [] if REAL else Answers.exchanges) == ([], [])


def condition(kind, message, value="True"):
    time = "2026-11-30T12:00:00Z"
    return {"type": kind, "status": value, "reason": kind, "message": message, "lastTransitionTime": time}


def test_a_jobset_from_its_creation_to_its_end_is_known_by_its_name(server, tmp_path):
    (tmp_path / "token").write_text("good\n")
    made = Kubernetes(address=server, token_file=str(tmp_path / "token"), queue="fleet", image="farpipe/farpipe:1")
    shares = [Share(tmp_path / "Job_1/1", "zurich", number) for number in range(2)]
    shares[0].folder.mkdir(parents=True)

    def admin(method, path, body, kind="application/merge-patch+json"):
        headers = {"authorization": "Bearer good", "content-type": kind}
        answer = httpx.request(method, server + path, content=json.dumps(body), headers=headers, trust_env=False)
        assert answer.is_success, answer.text
        return answer.json()

    def state():
        return made.states([shares[0]])[0]

    assert made.states([]) == []
    assert state() == ("absent", "")
    made.start(shares, 4)
    shares[0].path("job").unlink()
    made.start(shares, 4)  # its answer was lost: the second one is AlreadyExists
    name = shares[0].path("job").read_text().strip()
    assert state() == ("queued", "Kubernetes: waits for its pods")

    def says(*conditions, ready=0):
        job = {"name": "stages", "ready": ready, "active": 1, "succeeded": 0, "failed": 0, "suspended": 0}
        status = {"conditions": conditions, "replicatedJobsStatus": [job], "restarts": 0}
        admin("PATCH", f"{JOBSETS}/{name}/status", {"status": status})

    says(condition("Suspended", "jobset is suspended"))
    assert state() == ("queued", "Kubernetes: jobset is suspended")
    says(condition("Suspended", "jobset is resumed", "False"), ready=1)
    assert state() == ("alive", "")
    made.kill(shares[0], only_waiting=True)
    assert state() == ("alive", ""), "only what waits is ended"
    pod = {"name": f"{name}-stages-0-1-x", "labels": {"jobset.sigs.k8s.io/jobset-name": name}}
    container = {"name": "farpipe", "image": "farpipe/farpipe:1"}
    spec = {"nodeName": "n1", "containers": [container], "restartPolicy": "Never"}
    admin("POST", PODS, {"metadata": pod, "spec": spec}, "application/json")
    admin("PATCH", f"{PODS}/{pod['name']}/status", {"status": {"phase": "Failed", "message": "Error"}})
    says(condition("Failed", "jobset failed due to one or more job failures"))
    found, why = state()
    assert (found, why.splitlines()[0]) == ("over", "Kubernetes: Failed: jobset failed due to one or more job failures")
    assert f"pod {pod['name']}: Failed Error" in why
    assert "No module named farpipe" in why
    made.kill(shares[0], only_waiting=False)
    assert "deletionTimestamp" in admin("PATCH", f"{JOBSETS}/{name}", {"metadata": {"finalizers": None}})["metadata"]
    assert state() == ("over", f"Kubernetes: JobSet {name} is gone")
    made.kill(shares[0], only_waiting=False)
    admin("DELETE", f"{PODS}/{pod['name']}?gracePeriodSeconds=0", None, "application/json")


def test_a_token_that_is_not_known_makes_a_site_silent_and_a_wrong_namespace_fails_the_attempt(server, tmp_path):
    (tmp_path / "bad").write_text("nonsense")
    (tmp_path / "token").write_text("good\n")
    share = Share(tmp_path / "Job_1/1", "zurich")
    stranger = Kubernetes(address=server, token_file=str(tmp_path / "bad"))
    with pytest.raises(RunError, match="401 "):
        stranger.start([share], 1)
    (seen,) = Door(site="zurich", root=tmp_path, kubernetes=stranger).answer(
        {"do": "look", "keys": ["Job_1/1"], "num_machines": [1]}
    )
    assert (seen["state"], "Unauthorized" in seen["why"]) == ("unknown", True)
    nowhere = Kubernetes(address=server, token_file=str(tmp_path / "token"), namespace="nowhere")
    with pytest.raises(InputError, match='namespaces \\\\"nowhere\\\\" not found'):
        nowhere.start([share], 1)


def test_a_token_is_sent_to_nobody_in_the_clear(tmp_path):
    (tmp_path / "token").write_text("good\n")
    with pytest.raises(InputError, match="expected https://"):
        Kubernetes(address="http://10.0.0.1:6443", token_file=str(tmp_path / "token")).ask("GET", "/version")
