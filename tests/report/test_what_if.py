"""Dials of a page: answers are the planner's, the browser redraws them, axe-core finds no violation."""

import json
import re
import threading
from html import escape, unescape
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import pytest

from farpipe.cli.explore_server import server_of
from farpipe.core.spec import load_job
from farpipe.planning import find
from farpipe.planning.explain import explained
from farpipe.planning.explain.what_if import answer_at, dials_of, grid_of, turned_to
from farpipe.report.page import render
from farpipe.report.shown import plan_report, planned_view
from farpipe.report.what_if import what_if_data
from report.test_page_in_browser import BROWSER, FRAME, REPORTS, browse

RECIPE = Path(__file__).parents[2] / "recipes" / "two_sites.toml"


@pytest.fixture(scope="module")
def job():
    return load_job(RECIPE, {"training.global_batch": 64})


@pytest.fixture(scope="module")
def best(job):
    return find(job)[0]


@pytest.fixture(scope="module")
def page(job, best):
    """The page of a plan with the answers at all settings."""
    dials = dials_of(job)
    data = what_if_data(dials, grid_of(best, dials))
    return render(plan_report(explained(best), [planned_view(best.plan)], costs=best.costs, what_if=data))


def test_dials_contain_the_job_itself(job):
    latency, bandwidth = dials_of(job)
    assert latency.texts[latency.at] == "20.0 ms"
    assert bandwidth.texts[bandwidth.at] == "100 Gbit/s"
    own = [dial.at for dial in dials_of(job, every_site=True)]
    assert turned_to(job, dials_of(job, every_site=True), own) == job


def test_an_answer_is_that_of_the_changed_job(job):
    dials = dials_of(job)
    changed = load_job(RECIPE, {"training.global_batch": 64, "cluster.links.latency": "200 ms"})
    far = answer_at(job, dials, [len(dials[0].values) - 1, dials[1].at], is_searched=True)
    assert far.uses[0].step_s == pytest.approx(find(changed)[0].plan.prediction.step_s, rel=1e-9)


def test_a_farther_site_makes_the_step_longer_until_one_site_alone_is_as_fast(job):
    dials = dials_of(job)
    steps = [answer_at(job, dials, [at, dials[1].at]).uses[0].step_s for at in range(len(dials[0].values))]
    assert steps[0] < steps[-2] < steps[-1]
    cut_off = [answer_at(job, dials, [at, 0]).uses[0] for at in range(len(dials[0].values))]
    assert len({use.name for use in cut_off[-3:]}) == 1
    assert " > " not in cut_off[-1].name


def test_a_site_without_devices_is_left_out_and_none_at_all_is_an_obstacle(job):
    dials = dials_of(job, every_site=True)
    at = [dial.at for dial in dials]
    assert {use.name for use in answer_at(job, dials, [*at[:3], 0]).uses} == {"zurich"}
    assert "no device" in answer_at(job, dials, [*at[:2], 0, 0]).obstacle


@pytest.fixture
def ask(job):
    """`ask(path, host)`: status and text of what the server of `explore` answers."""
    with server_of(job) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def asked(path, host=None):
            connection = HTTPConnection("127.0.0.1", server.server_port, timeout=120)
            connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

        yield asked
        server.shutdown()
        thread.join(60)


def test_explore_answers_at_once_and_with_a_search(ask, job):
    at = ",".join(str(dial.at) for dial in dials_of(job, every_site=True))
    status, text = ask("/")
    assert (status, "dial-3" in text) == (200, True)
    quick, searched = (json.loads(ask(f"/answer?at={at}&search={n}")[1])["uses"][0] for n in (0, 1))
    assert searched[2] == pytest.approx(find(job)[0].plan.prediction.step_s, rel=1e-5)
    assert searched[2] <= quick[2] <= 1.1 * searched[2]


def test_explore_refuses_what_is_not_its_own(ask):
    assert ask("/answer?at=0,0,0,99")[0] == ask("/answer?at=0,x,0,0")[0] == ask("/etc/passwd")[0] == 404
    assert ask("/", host="evil.example:80")[0] == 421


in_browser = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
TURN = """
<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, seen = () => [
    page.getElementById("what-if-answer").textContent, page.querySelectorAll("#what-if-timeline rect").length];
  const before = seen(), dial = page.getElementById("dial-1");
  dial.value = 0;
  dial.dispatchEvent(new Event("input"));
  document.body.dataset.found = JSON.stringify([before, seen()]);
});
</script>
"""


@pytest.mark.slow
@in_browser
def test_the_browser_redraws_the_answer(page, tmp_path):
    file = tmp_path / "frame.html"
    file.write_text(f"<!doctype html><body>{FRAME % (escape(page), 900)}{TURN}", encoding="utf-8")
    done = browse(tmp_path, file, "--dump-dom")
    (before, boxes), (after, _) = json.loads(unescape(re.search(r'data-found="([^"]*)"', done.stdout)[1]))
    assert "a step" in before
    assert boxes > 20
    assert "beside the job's own" in after
    assert "CONSOLE" not in done.stderr


AXE = find_spec("axe_playwright_python")
RUN_AXE = """<script>axe.run().then(found => {
  document.body.dataset.found = JSON.stringify(found.violations.map(
    one => [one.id, one.nodes.slice(0, 3).map(node => node.html.slice(0, 200) + " " + node.any.map(n => n.message))]));
});</script></body>"""


@pytest.mark.slow
@in_browser
@pytest.mark.skipif(AXE is None, reason="axe-playwright-python, which ships axe-core, is not installed")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", [1, 0], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "2 ranks"])
def test_axe_finds_no_violation(page, tmp_path, name, scheme, width):
    (axe,) = (path for where in AXE.submodule_search_locations for path in Path(where).rglob("axe.min.js"))
    text = page if name == "plan" else render(REPORTS[name])
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # axe is a script of ours
    file = tmp_path / "axe.html"
    script = f"<script>{axe.read_text(encoding='utf-8')}</script>{RUN_AXE}"
    file.write_text(text.replace("</body>", script), encoding="utf-8")
    options = (f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},2000")
    dom = browse(tmp_path, file, "--dump-dom", "--virtual-time-budget=20000", *options).stdout
    found = re.findall(r'<body[^>]* data-found="([^"]*)"', dom)
    assert found, "axe did not end"
    assert json.loads(unescape(found[-1])) == []
