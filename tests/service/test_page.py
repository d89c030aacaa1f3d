"""The page over a real socket: views, login, forms that other pages can't send, and everything escaped."""

import json
import re

import httpx
import pytest

from farpipe.service.launcher import Key, Seen
from farpipe.service.page.session import COOKIE
from services import Threaded, job_toml, until

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def service(tmp_path):
    made = Threaded(tmp_path)
    yield made
    made.close()


@pytest.fixture
def ask(service):
    return service.operator()


class Visit:
    """A browser without scripts: cookies, redirects, and the key of the last form."""

    def __init__(self, service, asking):
        self.http = httpx.Client(base_url=service.url, follow_redirects=True, trust_env=False, timeout=30)
        service.clients.append(self)
        token = asking.http.headers["authorization"].removeprefix("Bearer ")
        self.key = ""
        self.first = self.post("/login", token=token)

    def get(self, path, status=200):
        answer = self.http.get(path)
        assert answer.status_code == status, answer.text
        if found := re.search(r'name="form_key" value="(\w+)"', answer.text):
            self.key = found[1]
        return answer.text

    def post(self, path, headers=None, **fields):
        return self.http.post(path, data={"form_key": self.key, **fields}, headers=headers)


def run(service, ask, name, losses=(3.0, 2.5), num_steps=4):
    """A job that has done some steps."""
    ask.submit(name, job_toml(num_steps), min_devices=8)
    key = Key(name, 1)
    until(lambda: key in service.launcher.started)
    lines = [{"step": k, "attempt": 0, "step_s": 0.5, "loss": loss} for k, loss in enumerate(losses)]
    service.launcher.files[key, "run/metrics.jsonl"] = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    service.launcher.files[key, "log"] = f"begun {EVIL}\x1b[2J\n".encode()
    until(lambda: ask("GET", f"jobs/{name}").json()["num_done"] >= len(losses))
    return key


def test_who_has_not_logged_in_sees_a_login_and_nothing_else(service):
    http = httpx.Client(base_url=service.url, trust_env=False)
    for path in ("/", "/jobs/j", "/sites", "/changes"):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path
    assert http.post("/act", data={"what": "drain", "name": "zurich"}).status_code == 303
    wrong = http.post("/login", data={"token": "nonsense"})
    assert (wrong.status_code, COOKIE in wrong.headers.get("set-cookie", "")) == (401, False)
    http.close()


def test_the_cookie_is_no_token_and_no_script_reads_it(service, ask):
    token = ask.http.headers["authorization"].removeprefix("Bearer ")
    answer = httpx.post(f"{service.url}/login", data={"token": token}, trust_env=False)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert token not in cookie


def test_a_removed_token_ends_its_sessions_and_so_does_logging_out(service, ask):
    made = ask("POST", "tokens", {"role": "viewer", "tenant": "t", "days": 1}).json()
    visit = Visit(service, service.asking_with(made["token"]))
    other = Visit(service, ask)
    assert "<h1>Jobs</h1>" in visit.get("/")
    assert ask("DELETE", f"tokens/{made['id']}").status_code == 204
    assert "<h1>Log in</h1>" in visit.get("/")
    other.get("/")
    assert "<h1>Log in</h1>" in other.post("/logout").text
    assert "<h1>Log in</h1>" in other.get("/sites")


def test_jobs_show_progress_and_why_one_waits(service, ask):
    for name in ("j1", "j2"):
        run(service, ask, name)
    ask.submit("waits", min_devices=8)
    text = Visit(service, ask).get("/")
    assert '<a href="/jobs/waits">waits</a>' in text
    assert re.search(r"so it would now with[^<]* which would end at \d{4}-\d\d-\d\d [\d:]+ UTC", text)
    assert re.search(r"[234] of 4", text)
    assert "<li>" not in text


def test_a_job_shows_attempts_reasons_steps_and_log_with_everything_escaped(service, ask):
    key = run(service, ask, "j")
    service.launcher.seen[key] = Seen("ended", 7, f"rank 1 {EVIL}")
    until(lambda: ask("GET", "jobs/j/attempts").json()[0]["ended_s"])
    visit = Visit(service, ask)
    text = visit.get("/jobs/j")
    assert EVIL not in text
    assert "begun &lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in text
    assert "8 at lugano" in text
    assert text.count('class="figure"') == 2
    assert "exit code 7: rank 1 &lt;script&gt;" in text
    assert "j has failed once: exit code 7: rank 1 &lt;script&gt;" in visit.get("/")
    assert "alert(1)" not in visit.get("/jobs/none", 404)


def test_a_tenant_sees_its_own_jobs_alone(service, ask):
    run(service, ask, "theirs")
    visit = Visit(service, service.asking("submitter", "mine"))
    assert all("theirs" not in visit.get(path) for path in ("/", "/sites"))
    assert "there is no job" in visit.get("/jobs/theirs", 404)


def test_actions_need_their_roles_and_the_session_s_form(service, ask):
    run(service, ask, "j")
    viewer, operator = (Visit(service, who) for who in (service.asking("viewer", "operators"), ask))
    viewer.get("/jobs/j")
    assert viewer.post("/act", what="cancel", name="j").status_code == 403
    assert viewer.post("/act", what="drain", name="zurich").status_code == 403
    operator.get("/sites")
    assert operator.http.post("/act", data={"what": "drain", "name": "zurich"}).status_code == 403
    other = {"origin": "http://127.0.0.1:1"}
    assert operator.post("/act", other, what="drain", name="zurich").status_code == 403
    assert all(one["state"] == "up" for one in ask("GET", "sites").json())
    assert "draining" in operator.post("/act", what="drain", name="zurich").text
    assert "Site zurich is draining." in operator.get("/")
    assert "no site" in operator.post("/act", what="drain", name="bern").text
    assert operator.post("/act", what="cancel", name="j").status_code == 200
    until(lambda: ask("GET", "jobs/j").json()["phase"] == "ended")


def test_every_page_bans_what_is_not_its_own(service, ask):
    visit = Visit(service, ask)
    run(service, ask, "j")
    for path in ("/", "/jobs/j", "/sites", "/submit", "/what-if", "/what-if?change=lost zurich", "/accounts"):
        policy = visit.http.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r'<[^>]* (style|on\w+)="', visit.get(path))


def test_the_stream_says_when_something_has_changed(service, ask):
    visit = Visit(service, ask)
    with visit.http.stream("GET", "/changes") as answer:
        lines = answer.iter_lines()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert next(line for line in lines if line.startswith("event")) == "event: changed"
        ask.submit("new")
        assert next(line for line in lines if line.startswith("event")) == "event: changed"


def test_a_job_is_submitted_by_a_form_and_what_is_wrong_is_said_beside_it(service, ask):
    visit = Visit(service, service.asking("submitter", "t"))
    visit.get("/submit")
    wrong = visit.post("/submit", name="j", job=f"x = {EVIL}")
    assert (wrong.status_code, EVIL in wrong.text, "&lt;script&gt;" in wrong.text) == (422, False, True)
    for fields, says in (({"min_devices": "x"}, "min_devices"), ({"max_devices": "64", "min_devices": "64"}, "64")):
        answer = visit.post("/submit", name="j", job=job_toml(), **fields)
        assert answer.status_code == 422
        assert says in answer.text
    assert "<h1>j</h1>" in visit.post("/submit", name="j", job=job_toml(), min_devices="8").text
    assert ask("GET", "jobs/j").json()["tenant"] == "t"
    viewer = Visit(service, service.asking("viewer", "t"))
    assert "needs the role submitter" in viewer.get("/submit")
    assert viewer.post("/submit", name="k", job=job_toml()).status_code == 403


def test_what_if_plays_a_copy_and_changes_nothing(service, ask):
    for name, num_steps in (("a", 2000), ("b", 4000)):
        run(service, ask, name, num_steps=num_steps)
    for name, tenant in (("secret", "others"), ("mine", "t")):
        service.asking("submitter", tenant).submit(name, job_toml(3000), min_devices=8)
    before = ask("GET", "sites").json()
    visit, tenant = (Visit(service, who) for who in (ask, service.asking("viewer", "t")))
    text = visit.get("/what-if")
    for words in (
        "the site zurich lost",
        "twice the devices at lugano",
        "zurich&gt;lugano at half",
        "mine first in",
    ):
        assert words in text, words
    shown = visit.get("/what-if?change=first mine")
    assert re.search(r">mine</a>.*earlier</td></tr>", shown)
    assert re.search(r">secret</a>.*later</td></tr>", shown)
    assert "later" in visit.get("/what-if?change=drained lugano")
    assert "not: its checkpoint is at lugano, which is lost" in visit.get("/what-if?change=lost lugano")
    assert "earlier" in visit.get("/what-if?change=more lugano")
    assert "secret" not in tenant.get("/what-if?change=drained lugano")
    tenant.get("/what-if?change=first secret", 404)
    assert ask("GET", "sites").json() == before
    assert ask("GET", "jobs/mine").json()["phase"] == "queued"


def test_accounts_devices_and_who_did_what(service, ask):
    run(service, ask, "j")
    ask("POST", "sites/zurich/drain")
    visit, tenant = (Visit(service, who) for who in (ask, service.asking("viewer", "t")))
    text = visit.get("/accounts")
    assert re.search(r"<td>lugano</td><td class=\"number\">0\.0\d+</td>", text)
    assert "8 at lugano</td>" in text
    assert re.search(r"\w{8}: drain zurich", text)
    assert "submits j" in text
    other = tenant.get("/accounts")
    assert ("8 at lugano" in other, "drain" in other) == (False, False)


def test_an_attempt_s_report_is_shown_where_its_run_is(service, ask):
    run(service, ask, "j")
    visit = Visit(service, ask)
    visit.get("/jobs/j/report?attempt=1", 404)
    made = []
    service.server.config.app.state.report = lambda path: made.append(path) or "<!doctype html><title>run</title>"
    (service.root / "runs" / "j" / "1" / "run").mkdir(parents=True)
    assert 'href="/jobs/j/report?attempt=1"' in visit.get("/jobs/j")
    assert "<title>run" in visit.get("/jobs/j/report?attempt=1")
    assert made == [service.root / "runs" / "j" / "1" / "run"]
    visit.get("/jobs/j/report?attempt=2", 404)
    Visit(service, service.asking("viewer", "t")).get("/jobs/j/report?attempt=1", 404)
