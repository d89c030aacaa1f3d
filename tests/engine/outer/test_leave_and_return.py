"""Sites that leave in every phase of a step, and return: the same bits as without."""

import shutil
import threading
import time

import pytest

from elastic_runs import MODEL, GoneError, SiteThreads, elastic_run
from farpipe.core.errors import RunError
from farpipe.engine.checkpoint.folders import site_folder

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.fixture
def sites(tmp_path):
    """Make SiteThreads of a run."""
    made = []

    def make(run, name="run", **options):
        made.append(SiteThreads(run, tmp_path / name, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Figures and weights of runs without a loss, by their arguments."""
    known = {}

    def find(**options):
        key = tuple(sorted(options.items()))
        if key not in known:
            one = SiteThreads(elastic_run(num_steps=STEPS, **options), tmp_path_factory.mktemp("calm") / "run")
            for site in one.sites:
                one.start(site)
            one.join()
            assert not one.errors
            known[key] = figures(one, one.sites[0]), one.digest(one.sites[0])
            assert all((figures(one, site), one.digest(site)) == known[key] for site in one.sites)
            one.close()
        return known[key]

    return find


def figures(threads, site):
    return {step: (line["loss"], line["grad_norm"]) for step, line in threads.lines(site).items()}


def events(threads, site, kind):
    found = [event for line in threads.lines(site).values() for event in line.get("site_events", ())]
    return [event for event in found if event["kind"] == kind]


def dies(phase, at_step):
    """A hook that ends a site in this phase of this step."""

    def hook(trainer, step):
        if trainer.phase == phase and step == at_step:
            if (world := trainer.membership.world) is not None and world.transport is not None:
                world.transport.abort("it is gone")
            raise GoneError

    return hook


PHASES = ["begin", "before the sum", "in the sum", "after the sum", "after the step"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["zurich", "lugano"])
def test_the_other_site_completes_the_step_and_goes_on_with_the_same_bits(phase, victim, sites, undisturbed):
    threads = sites(elastic_run(num_steps=STEPS))
    survivor = next(site for site in threads.sites if site != victim)
    threads.start(victim, dies(phase, 5)).start(survivor)
    threads.join()
    assert isinstance(threads.errors.pop(victim), GoneError)
    assert not threads.errors
    calm, digest = undisturbed()
    assert figures(threads, survivor) == calm
    assert threads.digest(survivor) == digest
    assert events(threads, survivor, "lost")
    assert threads.lines(survivor)[STEPS - 1]["sites"] == [survivor]


def waits_for(event, at_step):
    """A hook that keeps a site at a step until `event`, but not longer than a minute."""

    def hook(trainer, step):
        if trainer.phase == "begin" and step >= at_step and not event.is_set():
            time.sleep(0.05)

    return hook


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_site_that_returns_enters_and_ends_with_the_same_bits(num_ranks, sites, undisturbed):
    steps = 60
    threads = sites(elastic_run(num_steps=steps, num_ranks=num_ranks))
    slow = waits_for(threading.Event(), 6)
    threads.start("lugano", dies("in the sum", 5)).start("zurich", slow)
    threads.join("lugano")
    threads.errors.clear()
    threads.start("lugano")
    threads.join()
    assert not threads.errors
    assert events(threads, "zurich", "helps")
    assert any(event.get("sent_bytes", 0) > 0 for event in events(threads, "zurich", "entered"))
    assert threads.lines("lugano")[steps - 1]["sites"] == ["zurich", "lugano"]
    assert threads.digest("lugano") == threads.digest("zurich")
    both = figures(threads, "zurich")
    assert sorted(both) == [*range(steps)]
    assert figures(threads, "lugano").items() <= both.items()


def test_of_three_sites_two_go_on_and_divide_the_shares_of_the_third(sites, undisturbed):
    names = ("zurich", "lugano", "geneva")
    threads = sites(elastic_run(num_steps=60, sites=names))
    slow = waits_for(threading.Event(), 6)
    threads.start("zurich", slow).start("geneva", slow).start("lugano", dies("in the sum", 5))
    threads.join()
    assert isinstance(threads.errors.pop("lugano"), GoneError)
    assert not threads.errors
    assert threads.digest("zurich") == threads.digest("geneva")
    last = threads.lines("zurich")[59]
    assert last["sites"] == ["zurich", "geneva"]
    assert events(threads, "zurich", "entered")[-1]["step"] < 30
    (message,) = last["outer_messages"]
    assert message["from"] == ["geneva"]
    assert message["slack_s"] < 0, "a gradient is needed at once"


def test_sites_that_were_cut_off_compute_the_same_steps_and_meet_again(sites, undisturbed):
    threads = sites(elastic_run(num_steps=60))
    lock, cut = threading.Lock(), threading.Event()

    def hook(trainer, step):
        time.sleep(0.03 if trainer.phase == "begin" and step > 5 else 0.0)
        if trainer.phase == "in the sum" and step == 6 and trainer.membership.own == 0 and not cut.is_set():
            with lock:
                cut.set()
                trainer.membership.world.transport.abort("cut")

    for site in threads.sites:
        threads.start(site, hook)
    threads.join()
    assert not threads.errors
    for site in threads.sites:
        assert events(threads, site, "lost")  # on a busy machine perhaps more than one
        assert len(events(threads, site, "entered")) >= 2
        assert threads.lines(site)[59]["sites"] == ["zurich", "lugano"]
    assert figures(threads, "zurich") == figures(threads, "lugano")
    assert threads.digest("zurich") == threads.digest("lugano")


def test_a_site_with_another_secret_is_refused(sites):
    threads = sites(elastic_run(num_steps=4), start_s=3.0, tokens=[b"secret", b"other"])
    for site in threads.sites:
        threads.start(site)
    threads.join()
    for site in threads.sites:
        assert threads.lines(site)[3]["sites"] == [site]


def test_a_site_far_behind_ends_so_that_its_agent_starts_it_again(sites):
    threads = sites(elastic_run(num_steps=80))
    cut = threading.Event()

    def hook(trainer, step):
        time.sleep(0.03 if trainer.phase == "begin" else 0.0)
        if trainer.phase == "in the sum" and step == 6:
            trainer.membership.world.transport.abort("cut")
            if trainer.membership.own == 1 and not cut.is_set():
                cut.set()
                time.sleep(2.0)

    for site in threads.sites:
        threads.start(site, hook)
    threads.join("lugano")
    assert isinstance(threads.errors.pop("lugano"), RunError)
    threads.start("lugano")
    threads.join()
    assert not threads.errors
    assert threads.lines("lugano")[79]["sites"] == ["zurich", "lugano"]
    assert threads.digest("zurich") == threads.digest("lugano")


def test_a_resumed_run_goes_on_from_the_site_furthest_on_even_where_a_disk_is_lost(sites, undisturbed):
    short = sites(elastic_run(num_steps=6))
    for site in short.sites:
        short.start(site)
    short.join()
    assert not short.errors
    shutil.rmtree(site_folder(short.run_dir, "zurich"))
    (site_folder(short.run_dir, "lugano") / "summary.json").unlink()
    again = sites(elastic_run(num_steps=STEPS))
    for site in again.sites:
        again.start(site, lambda trainer, step: time.sleep(0.2 if trainer.phase == "begin" else 0.0))
    again.join()
    assert not again.errors
    calm, digest = undisturbed()
    assert figures(again, "lugano") == calm
    assert min(again.lines("zurich")) > 6
    assert {again.digest(site) for site in again.sites} == {digest}
    assert events(again, "lugano", "helps")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_weights_and_masters_return_too(precision, sites):
    model = MODEL.model_copy(update={"tied_embeddings": True})
    threads = sites(elastic_run(num_steps=50, num_ranks=2, model=model, precision=precision))
    slow = waits_for(threading.Event(), 6)
    threads.start("lugano", dies("in the sum", 5)).start("zurich", slow)
    threads.join("lugano")
    threads.errors.clear()
    threads.start("lugano")
    threads.join()
    assert not threads.errors
    assert threads.lines("lugano")[49]["sites"] == ["zurich", "lugano"]
    assert threads.digest("lugano") == threads.digest("zurich")
    assert figures(threads, "lugano").items() <= figures(threads, "zurich").items()
