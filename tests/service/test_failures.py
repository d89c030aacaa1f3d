"""A service in trouble: no database, a full disk, another instance that takes over, clocks, planted secrets."""

import subprocess
import sys
import time

import pytest
import sqlalchemy as sa

from farpipe.fleet.events import JobSubmitted
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.state import first_state
from farpipe.service.launcher import Key, Seen
from farpipe.service.reconcile import LeaseOverError, Reconciler
from farpipe.service.store import Store
from farpipe.service.views import Submission
from farpipe.testing.policies import SimpleQuotes
from services import CLUSTER, Attempts, Threaded, job_toml, until


@pytest.fixture
def made():
    found = []
    yield found
    for one in found:
        one.close()


def test_a_database_that_is_away_is_a_503_and_the_service_goes_on_by_itself(tmp_path, made, postgres):
    service = Threaded(tmp_path, postgres.new_database())
    made.append(service)
    ask = service.operator()
    assert ask.submit("before").status_code == 201
    postgres.stop()
    try:
        until(lambda: ask.submit("while").status_code == 503)
        assert "database" in ask("GET", "jobs").json()["detail"]
        assert until(lambda: ask.http.get("/ready").status_code == 503)
        assert ask.http.get("/health").status_code == 200
    finally:
        postgres.start()
    until(lambda: ask.submit("after").status_code in (200, 201))
    assert {one["name"] for one in ask("GET", "jobs").json()["jobs"]} >= {"before", "after"}


def test_a_lost_connection_is_no_loss(tmp_path, made, postgres):
    """The server ends every session of the service, in the middle of what it does."""
    url = postgres.new_database()
    service = Threaded(tmp_path, url)
    made.append(service)
    ask, admin = service.operator(), sa.create_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    name = url.rpartition("/")[2].partition("?")[0]
    for number in range(5):
        with admin.connect() as db:
            kill = "select pg_terminate_backend(pid) from pg_stat_activity where datname = :name"
            db.execute(sa.text(kill), {"name": name})
        until(lambda number=number: ask.submit(f"j{number}").status_code in (200, 201))
    admin.dispose()
    found = until(lambda: (answer := ask("GET", "jobs")).is_success and answer.json()["jobs"])
    assert sorted(one["name"] for one in found) == [f"j{number}" for number in range(5)]


def test_a_full_disk_refuses_and_what_was_answered_is_there(tmp_path, made):
    """SQLite's own limit of pages stands for the disk's end: the same error at the same place."""
    service = Threaded(tmp_path)
    made.append(service)
    ask = service.operator()
    assert ask.submit("first").status_code == 201
    pages = []

    def limit(connection, _):
        if pages:
            connection.execute(f"pragma max_page_count={pages[0]}")

    sa.event.listen(service.store._engine, "connect", limit)
    with service.store._engine.connect() as db:
        pages.append(db.exec_driver_sql("pragma page_count").scalar_one())
    service.store._engine.dispose()
    answered = ["first"]
    for number in range(60):
        answer = ask.submit(f"j{number}")
        if answer.status_code == 503:
            break
        answered.append(f"j{number}")
    else:
        pytest.fail("the disk never got full")
    pages.clear()
    service.store._engine.dispose()
    until(lambda: ask.submit("last").status_code in (200, 201))
    assert {one["name"] for one in ask("GET", "jobs").json()["jobs"]} >= {*answered, "last"}


def test_a_second_instance_follows_names_the_leader_and_takes_over(tmp_path, made, database):
    launcher = Attempts()
    one = Threaded(tmp_path, database, launcher, "http://one")
    two = Threaded(tmp_path, database, launcher, "http://two")
    made += [two]
    first, second = one.operator(), two.operator()
    assert first.submit("j").status_code == 201
    until(lambda: second("GET", "jobs/j").status_code == 200)
    refused = second.submit("k")
    assert (refused.status_code, refused.json()["leader"]) == (503, "http://one")
    until(lambda: Key("j", 1) in launcher.started)
    one.close()
    assert until(lambda: second.submit("k").status_code == 201)
    until(lambda: Key("k", 1) in launcher.started)
    assert sorted(launcher.started) == [Key("j", 1), Key("k", 1)]


def test_an_instance_whose_line_is_taken_writes_nothing_and_begins_again(tmp_path, made):
    service = Threaded(tmp_path)
    made.append(service)
    ask = service.operator()
    assert ask.submit("j").status_code == 201
    other = Store(f"sqlite:///{tmp_path}/fleet.sqlite")
    with other._write() as db:
        line = db.execute(sa.text("select line from log order by number")).scalars().first()
        number = db.execute(sa.text("select max(number) from log")).scalar_one() + 1
        row = {"number": number, "line": line.replace('"jobs": {"j"', '"jobs": {"j"'), "time_s": 0.0, "who": "another"}
        db.execute(sa.text("insert into log (number, time_s, who, line) values (:number, :time_s, :who, :line)"), row)
    other.close()
    assert ask.submit("k").status_code == 503
    assert until(lambda: ask.submit("k").status_code == 201)
    assert [one["name"] for one in ask("GET", "jobs").json()["jobs"]] == ["j", "k"]


def test_a_clock_that_jumps_changes_no_order(tmp_path, made, monkeypatch):
    service = Threaded(tmp_path)
    made.append(service)
    ask = service.operator()
    assert ask.submit("a").status_code == 201
    real = time.time
    for number, ahead_s in enumerate((1e6, -1e6)):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: real() + ahead_s)
        assert ask.submit(f"b{number}").status_code == 201
    times = [entry["time_s"] for entry in ask("GET", "log").json()]
    assert times == sorted(times)
    assert times[-1] - times[0] < 600.0


def test_answers_come_after_the_disk(tmp_path, made, monkeypatch):
    """A write that fails is no answer: the seeded bug, an answer before the commit, would give 201."""
    service = Threaded(tmp_path)
    made.append(service)
    ask = service.operator()

    def broken(change, state):
        raise sa.exc.OperationalError("insert", {}, Exception("disk I/O error"))

    monkeypatch.setattr(service.store, "write", broken)
    assert ask.submit("j").status_code == 503
    monkeypatch.undo()
    until(lambda: ask("GET", "jobs").is_success)
    assert ask("GET", "jobs").json() == {"jobs": []}
    assert not service.launcher.started


def test_planted_secrets_appear_nowhere(tmp_path, made, caplog):
    """Tokens, good and bad ones, and what an attacker would like to see in a log."""
    caplog.set_level("DEBUG")
    service = Threaded(tmp_path)
    made.append(service)
    ask = service.operator()
    secret = ask.http.headers["authorization"].split()[1]
    bad = service.asking_with("planted-secret-1")
    answers = [bad("GET", "jobs"), ask.submit("j", 'x = "planted-secret-2'), ask.submit("j"), ask("GET", "log")]
    answers += [ask("GET", "tokens"), ask.http.get("/metrics"), ask("POST", "jobs", {"planted-secret-3": 1, "name": 5})]
    shown = "".join(answer.text for answer in answers) + caplog.text
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("fleet.sqlite*")).decode(errors="replace")
    for word in (secret, "planted-secret-1"):
        assert word not in shown + stored
    assert "planted-secret" not in caplog.text + stored


def test_what_somebody_sends_begins_no_line_of_the_log():
    code = "import logging; from farpipe.service.serve import OneLine; h = logging.StreamHandler(); "
    code += "h.setFormatter(OneLine('%(message)s')); logging.getLogger().addHandler(h); "
    code += r"logging.warning('refused: %s', 'x\nINFO operator did it\x1b[2J')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said == "refused: x\n    INFO operator did it\\x1b[2J\n"


def test_an_instance_that_slept_over_its_lease_starts_and_stops_nothing(tmp_path):
    launcher = Attempts()
    loop = Reconciler(launcher, tmp_path, CLUSTER, {"j": job_toml()}, may_act=lambda: False)
    state = first_state(CLUSTER, POLICIES["fcfs"], SimpleQuotes(), StopCosts())
    submitted, _ = state.handle(JobSubmitted(0.0, Submission(name="j", job=job_toml()).to_job("t", 0.0)))
    launcher.seen[Key("old", 1)] = Seen("alive")
    (tmp_path / "old" / "1").mkdir(parents=True)
    for one in (state, submitted):
        with pytest.raises(LeaseOverError):
            loop.step(one, 1.0)
        (tmp_path / "old" / "1").rmdir() if one is state else None
    assert (launcher.started, launcher.told) == ([], [])
