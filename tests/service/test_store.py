"""The store on SQLite and on a real PostgreSQL: versions of the tables, the fence, the lease, snapshots, restoring."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.documents import state_data
from farpipe.fleet.events import JobCancelled, JobStarted, JobStopped, JobSubmitted, Tick
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.state import first_state
from farpipe.service import store as stores
from farpipe.service.decisions import change_of
from farpipe.service.store import DeposedError, Store
from farpipe.service.tables import TABLES
from farpipe.testing.policies import SimpleQuotes

CLUSTER = Cluster(sites=tuple(preset_site(name, "a100-80gb", 64) for name in "ab"))


def first():
    return first_state(CLUSTER, POLICIES["fcfs"], SimpleQuotes(), StopCosts(stop_s=30.0))


def job(name, time_s):
    return JobSubmitted(time_s, FleetJob(name, Kind("llama-3-8b", 512, 64), time_s, 100, 8, 8))


def row(name, time_s):
    return {"name": name, "tenant": "t", "submission": f"job {name}", "submitted_s": time_s}


@pytest.fixture
def store(database):
    made = Store(database)
    made.migrate()
    yield made
    made.close()


def write(store, state, *events, jobs=(), heard=()):
    after, commands = state.handle(*events)
    change = change_of(state, events, after, commands, jobs)
    change.heard = list(heard)
    store.write(change, after)
    return after


def test_the_versions_of_the_tables_lead_to_the_tables(store):
    with store._engine.connect() as db:
        assert compare_metadata(MigrationContext.configure(db), TABLES) == []


def test_two_instances_bring_the_tables_to_the_newest_version_at_once(database):
    made = [Store(database) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        [*threads.map(Store.migrate, made)]
    made[0].migrate()
    assert made[1].load(first()).now_s == 0.0
    for one in made:
        one.close()


def test_a_state_is_what_was_written_and_goes_on_over_snapshots(store, database, monkeypatch):
    monkeypatch.setattr(stores, "SNAPSHOT_EVERY", 5)
    state = first()
    for number in range(13):
        state = write(store, state, job(f"j{number}", float(number)), jobs=[row(f"j{number}", float(number))])
        if number % 3 == 2:
            state = write(store, state, JobStarted(number + 0.5, f"j{number}", 1))
            state = write(store, state, JobCancelled(number + 0.7, f"j{number - 1}"))
    again = Store(database)
    assert state_data(again.load(first())) == state_data(state)
    with again._engine.connect() as db:
        assert db.execute(sa.text("select count(*) from snapshot")).scalar_one() <= 2
    assert again.number == store.number == 21
    again.close()


def test_a_second_writer_is_deposed_by_the_log_s_number_and_nothing_of_it_stays(store, database):
    state, other = write(store, first(), job("a", 1.0), jobs=[row("a", 1.0)]), Store(database)
    stale = other.load(first())
    write(store, state, job("b", 2.0), jobs=[row("b", 2.0)])
    with pytest.raises(DeposedError, match="line 2"):
        write(other, stale, job("c", 2.0), jobs=[row("c", 2.0)])
    assert store.job("c") is None
    assert store.job("b")["submission"] == "job b"
    assert list(other.load(first()).jobs) == ["a", "b"]
    other.close()


def test_without_the_fence_a_second_writer_would_be_believed(store, database, monkeypatch):
    """The bug is seeded: each writer takes whatever number is free."""
    state, other = write(store, first(), job("a", 1.0)), Store(database)
    stale = other.load(first())
    write(store, state, job("b", 2.0))
    other.number += 1
    write(other, stale, job("c", 2.0))
    assert len(store.load(first()).jobs) == 3
    other.close()


def test_an_attempt_that_is_stopped_keeps_the_reason_that_the_stop_was_asked_for(store):
    state = write(store, first(), job("a", 1.0), jobs=[row("a", 1.0)])
    late_s = 1.0 + state.jobs["a"].placement.startup_s + state.world.stops.start_limit_s + 1
    state = write(store, state, Tick(late_s))
    assert [(one["ended_s"], one["why"][:29]) for one in store.attempts("a")] == [
        (None, "its start was not confirmed w")
    ]
    write(store, state, JobStopped(late_s + 5, "a", 1))
    (over,) = [one for one in store.attempts("a") if one["attempt"] == 1]
    assert (over["ended_s"], over["result"], over["why"][:13]) == (late_s + 5, "stopped", "its start was")


def test_a_follower_reads_what_the_leader_writes(store, database):
    follower = Store(database)
    seen, state = follower.load(first()), first()
    for number in range(3):
        state = write(store, state, job(f"j{number}", float(number)))
        seen = follower.follow(seen)
        assert state_data(seen) == state_data(state)
    assert follower.follow(seen) is seen
    follower.close()


def test_the_lease_is_one_s_until_it_ends_or_is_given_back(store, database, monkeypatch):
    other = Store(database)
    assert (store.leads("me"), other.leads("you"), store.leads("me")) == (True, False, True)
    assert other.leader() == "me"
    store.resign("me")
    assert (other.leader(), other.leads("you"), store.leads("me")) == ("", True, False)
    monkeypatch.setattr(stores, "LEASE_S", -1.0)
    assert other.leads("you")
    assert (store.leader(), store.leads("me")) == ("", True)
    other.close()


def test_of_many_that_ask_for_the_lease_at_once_one_gets_it(database):
    made = [Store(database) for _ in range(6)]
    made[0].migrate()
    with ThreadPoolExecutor(6) as threads:
        got = [*threads.map(lambda k: made[k].leads(f"n{k}"), range(6))]
    assert sum(got) == 1
    for one in made:
        one.close()


def test_jobs_and_attempts_are_written_with_the_decision(store):
    state = write(store, first(), job("a", 1.0), jobs=[row("a", 1.0)])
    assert store.submissions() == {"a": "job a"}
    heard = [{"job": "a", "attempt": 1, "offset": 70, "num_steps": 3, "num_stored": 2}]
    state = write(store, state, JobStarted(2.0, "a", 1), heard=heard)
    (attempt,) = store.heard()
    assert (attempt["place"], attempt["offset"], attempt["num_steps"], attempt["num_stored"]) == ("8 at a", 70, 3, 2)
    state = write(store, state, JobCancelled(3.0, "a"))
    assert store.submissions() == {"a": "job a"}, "it is stopping"
    from farpipe.fleet.events import JobStopped

    write(store, state, JobStopped(4.0, "a", 1))
    assert (store.submissions(), store.heard()) == ({}, [])
    (attempt,) = store.attempts("a")
    assert (attempt["ended_s"], attempt["result"]) == (4.0, "cancel")
    (ended,) = store.ended("t", 10)
    assert '"result":"cancel"' in ended["view"]
    assert store.ended("other", 10) == []


@pytest.mark.parametrize("url", ["nonsense", "oracle://x", "mysql://x"])
def test_a_url_of_no_database_is_refused(url):
    with pytest.raises(InputError, match="expected sqlite:///FILE or postgresql"):
        Store(url)
