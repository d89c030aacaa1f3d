"""The API over a real socket: jobs, idempotency, roles by tenant, refusals as problems, and what is never shown."""

import json

import pytest

from farpipe.service.launcher import Key, Seen
from farpipe.service.problems import MEDIA
from services import Threaded, job_toml, until


@pytest.fixture
def service(tmp_path):
    made = Threaded(tmp_path)
    yield made
    made.close()


@pytest.fixture
def ask(service):
    return service.operator()


def detail(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == MEDIA
    problem = answer.json()
    assert problem["status"] == status
    return problem["detail"]


def metrics(*steps):
    lines = [{"step": step, "attempt": 0, "step_s": 0.5, "loss": 3.0 - step} for step in steps]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_a_job_is_taken_started_watched_and_ends(service, ask):
    taken = ask.submit("j")
    assert (taken.status_code, taken.json()["tenant"]) == (201, "operators")
    key = Key("j", 1)
    until(lambda: key in service.launcher.started)
    service.launcher.files[key, "run/metrics.jsonl"] = metrics(0, 1)
    service.launcher.files[key, "log"] = b"begun\x1b[2J\n"
    until(lambda: ask("GET", "jobs/j").json()["phase"] == "running")
    assert ask("GET", "jobs/j").json()["num_done"] >= 2.0
    assert ask("GET", "jobs/j/steps").json() == [{"step": k, "step_s": 0.5, "loss": 3.0 - k} for k in (0, 1)]
    assert ask("GET", "jobs/j/logs").json() == {"attempt": 1, "after": 0, "next": 10, "text": "begun\\x1b[2J\n"}
    assert ask("GET", "jobs/j/logs", after=6).json()["text"] == "[2J\n"
    assert ask("GET", "jobs/j/why").json()["why"] == "it is running on 2 at lugano"
    (zurich, lugano) = ask("GET", "sites").json()
    assert (lugano["num_used"], lugano["jobs"], zurich["num_free"]) == (2, ["j"], 8)
    service.launcher.files[key, "run/metrics.jsonl"] = metrics(0, 1, 2, 3)
    service.launcher.seen[key] = Seen("ended", 0)
    ended = until(lambda: (found := ask("GET", "jobs/j").json())["phase"] == "ended" and found)
    assert (ended["result"], ended["num_done"], ended["devices"]) == ("finish", 4.0, {})
    (attempt,) = ask("GET", "jobs/j/attempts").json()
    assert (attempt["place"], attempt["result"], attempt["num_steps"]) == ("2 at lugano", "finish", 4)
    assert [one["name"] for one in ask("GET", "jobs").json()["jobs"]] == ["j"]
    assert [entry["who"].split(" ", 1)[1] for entry in ask("GET", "log").json() if entry["who"]] == ["submits j"]


def test_a_name_is_the_key_and_free_again_after_the_end(service, ask):
    assert [ask.submit("j").status_code for _ in range(3)] == [201, 200, 200]
    assert "another job of that name" in detail(ask.submit("j", job_toml(5)), 409)
    assert "another job of that name" in detail(service.asking("submitter", "other").submit("j"), 409)
    until(lambda: service.launcher.started)
    service.launcher.files[Key("j", 1), "run/metrics.jsonl"] = metrics(0)
    assert ask("POST", "jobs/j/cancel").json()["phase"] in ("stopping", "ended")
    until(lambda: ask("GET", "jobs/j").json()["phase"] == "ended")
    assert ask("POST", "jobs/j/cancel").json()["result"] == "cancel"
    assert (ask.submit("j").status_code, ask.submit("j").json()["result"]) == (200, "cancel")
    again = ask.submit("j", job_toml(5))
    assert (again.status_code, again.json()["phase"]) == (201, "starting")
    assert until(lambda: Key("j", 2) in service.launcher.started)


def test_a_job_that_waits_says_why_and_names_no_other_tenant_s(service, ask):
    mine = service.asking("submitter", "a")
    for name in ("x1", "x2"):
        ask.submit(name, min_devices=8)
    mine.submit("y", min_devices=8)
    why = mine("GET", "jobs/y/why").json()["why"]
    assert "another tenant's job" in why
    assert "x1" not in why
    assert "x1" in ask("GET", "jobs/y/why").json()["why"]


def test_sites_are_drained_lost_and_back_and_links_change(service, ask):
    ask.submit("j")
    until(lambda: service.launcher.started)
    assert ask("POST", "sites/lugano/drain").json()[1]["state"] == "draining"
    until(lambda: Key("j", 2) in service.launcher.started)
    assert ask("GET", "sites").json()[0]["jobs"] == ["j"]
    assert ask("POST", "sites/lugano/undrain").json()[1]["state"] == "up"
    assert ask("POST", "sites/zurich/lost").json()[0]["state"] == "lost"
    assert ask("POST", "sites/zurich/back").json()[0]["state"] == "up"
    assert ask("PUT", "links/zurich>lugano", {"bytes_per_s": 5e8}).json()[0]["bytes_per_s"] == 5e8
    assert "no site 'bern'" in detail(ask("POST", "sites/bern/drain"), 404)
    assert "no link" in detail(ask("PUT", "links/bern", {"bytes_per_s": 1.0}), 404)


def test_what_if_plays_on_with_a_copy_and_names_no_other_tenant_s(service, ask):
    for name in ("x1", "x2", "x3"):
        ask.submit(name, min_devices=8)
    service.asking("submitter", "a").submit("y", min_devices=8)
    assert ask("GET", "what-if").json()["lost zurich"] == "the site zurich lost"
    viewer = service.asking("viewer", "a")
    assert "first x3" not in viewer("GET", "what-if").json()
    (mine,) = viewer("POST", "what-if", {"change": "first y"}).json()
    assert mine["name"] == "y"
    assert mine["changed_end_s"] < mine["end_s"]
    lost = {one["name"]: one for one in ask("POST", "what-if", {"change": "lost zurich"}).json()}
    assert lost["y"]["changed_end_s"] > lost["y"]["end_s"]
    assert [one["state"] for one in ask("GET", "sites").json()] == ["up", "up"], "nothing is changed"
    assert "not among" in detail(viewer("POST", "what-if", {"change": "first x3"}), 404)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"name": "../j", "job": job_toml()}, 422, "body.name"),
        ({"name": "j", "job": "x ="}, 422, "job.toml"),
        ({"name": "j", "job": job_toml().replace('name = "small"', 'hugging_face = "/etc"')}, 422, "names a file"),
        ({"name": "j", "job": job_toml(), "command": "rm"}, 422, "body.command"),
        ({"name": "j", "job": job_toml(), "environment": {"A": "1"}}, 422, "body.environment"),
        ({"name": "j", "job": job_toml(), "min_devices": 64}, 422, "is more than"),
        ({"name": "j", "job": job_toml(), "min_devices": "8"}, 422, "body.min_devices"),
        ({"name": "j", "job": job_toml(), "min_devices": 4, "max_devices": 2}, 422, "more than max_devices 2"),
        ({"name": "j", "job": job_toml(), "deadline_s": 1.0}, 422, "deadline_s 1 is before"),
        ({"name": "j", "job": "#" * 300_000}, 422, "body.job"),
        ({"name": "j", "job": "#" * 600_000}, 413, "the body has more than"),
    ],
)
def test_a_wrong_submission_is_refused_with_its_place_and_leaves_nothing(service, ask, body, status, says):
    assert says in detail(ask("POST", "jobs", body), status)
    assert ask("GET", "jobs").json() == {"jobs": []}
    assert not service.launcher.started


def test_what_no_fleet_could_run_has_the_exit_code_of_infeasible(ask):
    assert ask.submit("j", min_devices=64).json()["exit_code"] == 4


def test_a_tenant_has_a_limit_of_waiting_jobs(service, ask, monkeypatch):
    monkeypatch.setattr("farpipe.service.api.MOST_WAITING", 2)
    assert [ask.submit(f"j{k}").status_code for k in range(2)] == [201, 201]
    assert "has 2 jobs" in detail(ask.submit("k"), 429)
    assert service.asking("submitter", "b").submit("k").status_code == 201


NEEDS = {
    ("POST", "/v1/jobs"): "submitter",
    ("GET", "/v1/jobs"): "viewer",
    ("GET", "/v1/jobs/{name}"): "viewer",
    ("GET", "/v1/jobs/{name}/why"): "viewer",
    ("GET", "/v1/jobs/{name}/attempts"): "viewer",
    ("GET", "/v1/jobs/{name}/steps"): "viewer",
    ("GET", "/v1/jobs/{name}/logs"): "viewer",
    ("POST", "/v1/jobs/{name}/cancel"): "submitter",
    ("GET", "/v1/what-if"): "viewer",
    ("POST", "/v1/what-if"): "viewer",
    ("GET", "/v1/sites"): "viewer",
    ("POST", "/v1/sites/{site}/drain"): "operator",
    ("POST", "/v1/sites/{site}/undrain"): "operator",
    ("POST", "/v1/sites/{site}/lost"): "operator",
    ("POST", "/v1/sites/{site}/back"): "operator",
    ("GET", "/v1/links"): "viewer",
    ("PUT", "/v1/links/{link}"): "operator",
    ("GET", "/v1/log"): "operator",
    ("GET", "/v1/tokens"): "operator",
    ("POST", "/v1/tokens"): "operator",
    ("DELETE", "/v1/tokens/{token_id}"): "operator",
    ("GET", "/metrics"): "viewer",
}
"""The table of roles and routes."""
ROLES = ("none", "ended", "viewer", "submitter", "operator")
BODIES = {
    "/v1/what-if": {"change": "lost zurich"},
    "/v1/jobs": {"name": "new", "job": job_toml()},
    "/v1/tokens": {"role": "viewer", "tenant": "t"},
}
PLACES = {"name": "j", "site": "zurich", "link": "zurich>lugano", "token_id": "none"}


def test_the_table_has_every_route(service):
    schema = service.operator().http.get("/openapi.json").json()
    routes = {(method.upper(), path) for path, found in schema["paths"].items() for method in found}
    assert routes == {*NEEDS, ("GET", "/health"), ("GET", "/ready")}


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_role_by_route_by_tenant(service, ask, tenant):
    """The job is of tenant a: to b it is not there, but for an operator."""
    assert service.asking("submitter", "a").submit("j", min_devices=8).status_code == 201
    until(lambda: service.launcher.started)
    for role in ROLES:
        asking = service.asking(
            "viewer" if role in ("none", "ended") else role, tenant, days=-1 if role == "ended" else 1
        )
        if role == "none":
            asking.http.headers["authorization"] = "Bearer nonsense"
        for (method, path), needs in NEEDS.items():
            url = path.format(**PLACES)
            body = {"bytes_per_s": 1e9} if path.startswith("/v1/links/") else BODIES.get(path)
            answer = asking.http.request(method, url, json=body if method in ("POST", "PUT") else None)
            if role in ("none", "ended"):
                expected = {401}
            elif ROLES.index(role) < ROLES.index(needs):
                expected = {403}
            elif method == "DELETE" or ("{name}" in path and tenant == "b" and role != "operator"):
                expected = {404}
            else:
                expected = {200, 201, 409}
            assert answer.status_code in expected, (role, tenant, method, path, answer.text)


def test_a_revoked_token_is_unknown_and_hashes_alone_are_stored(service, ask):
    made = ask("POST", "tokens", {"role": "viewer", "tenant": "t", "days": 1}).json()
    viewer = service.asking_with(made["token"])
    assert viewer("GET", "jobs").status_code == 200
    assert made["token"] not in ask("GET", "tokens").text
    assert ask("DELETE", f"tokens/{made['id']}").status_code == 204
    assert "known and has not ended" in detail(viewer("GET", "jobs"), 401)
    assert made["token"].encode() not in b"".join(path.read_bytes() for path in service.root.glob("fleet.sqlite*"))


def test_errors_that_no_route_makes_are_problems_too(service, ask):
    detail(ask("GET", "nowhere"), 404)
    wrong = ask("DELETE", "jobs")
    detail(wrong, 405)
    assert wrong.headers["allow"]
    broken = ask.http.post("/v1/jobs", content=b"{", headers={"content-type": "application/json"})
    assert "body" in detail(broken, 400)
    assert ask("GET", "jobs").headers["x-content-type-options"] == "nosniff"


def test_a_bug_is_a_500_that_shows_nothing(service, ask, monkeypatch, caplog):
    monkeypatch.setattr("farpipe.service.api.site_views", lambda *given: 1 / 0)
    assert detail(ask("GET", "sites"), 500) == "a bug in farpipe; the service's log has it"


def test_metrics_have_jobs_and_devices(service, ask):
    ask.submit("j")
    text = ask.http.get("/metrics").text
    assert 'farpipe_devices{site="zurich",use="free"} 8.0' in text
    assert "farpipe_leads 1.0" in text
    assert ask.http.get("/health").json()["leader"] == "one"


def test_a_launcher_that_talks_nonsense_is_silence_and_the_service_goes_on(service, ask):
    service.launcher.look, look = (lambda keys: 1 / 0), service.launcher.look
    assert ask.submit("j").status_code == 201
    assert "ZeroDivisionError" in until(lambda: ask.http.get("/ready").json()["silence"])
    service.launcher.look = look
    assert until(lambda: service.launcher.started)
    assert until(lambda: not ask.http.get("/ready").json()["silence"])
