"""The fleet's page in a real Chromium: the keyboard, what is live, no violation of its ban, nothing that axe finds."""

import pytest

from browsing import AXE, BROWSER, Chromium
from farpipe.service.auth import TOKEN_NAME
from farpipe.service.launcher import Key, Seen
from service.test_page import EVIL, run
from services import Threaded, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser is installed"),
    pytest.mark.skipif(AXE is None, reason="axe-playwright-python, which ships axe-core, is not installed"),
]
LOSSES = [3.0 - 0.4 * k for k in range(4)]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A fleet with a job that has failed once and runs again, one that runs, and one that waits."""
    made = Threaded(tmp_path_factory.mktemp("fleet"))
    ask = made.operator()
    key = run(made, ask, "llama-8b", LOSSES[:2])
    made.launcher.seen[key] = Seen("ended", 7, f"rank 1 at lugano {EVIL}")
    until(lambda: Key("llama-8b", 2) in made.launcher.started)
    made.launcher.files[Key("llama-8b", 2), "run/metrics.jsonl"] = made.launcher.files[key, "run/metrics.jsonl"]
    run(made, ask, "ablation-3", LOSSES[:3])
    ask.submit("waits", min_devices=8)
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser(service, tmp_path_factory):
    """A browser in which somebody has logged in by the keyboard alone."""
    made = Chromium(tmp_path_factory.mktemp("browser"))
    try:
        made.go(f"{service.url}/login")
        made.call("Page.bringToFront")
        made.until("document.activeElement.id === 'token'")
        made.call("Input.insertText", text=(service.root / TOKEN_NAME).read_text().strip())
        made.key("Enter", "\r")
        made.until("document.querySelector('h1')?.textContent === 'Jobs'")
        yield made
    finally:
        made.close()


VIEWS = (
    *("/", "/jobs/llama-8b", "/jobs/waits", "/sites", "/submit"),
    *("/what-if", "/what-if?change=lost%20lugano", "/accounts"),
)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_too_wide(service, browser, width, scheme, tmp_path):
    browser.look(width, scheme)
    for path in VIEWS:
        browser.go(f"{service.url}{path}")
        assert browser.violations() == [], path
        assert browser.too_wide() == [], path
        browser.picture(tmp_path / f"{path.strip('/').replace('/', '-').partition('%')[0] or 'jobs'}.png")
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_what_has_changed_is_put_in_place_while_one_looks(service, browser):
    browser.go(f"{service.url}/")
    browser.until("document.getElementById('live').textContent === 'live'")
    browser.run("document.querySelector('#jobs a').focus(); window.here = 1")
    service.operator().submit("appears", min_devices=8)
    browser.until("document.getElementById('jobs').textContent.includes('appears')")
    assert browser.run("window.here") == 1, "the page was not loaded again"
    assert browser.run("document.activeElement.getAttribute('href')").startswith("/jobs/"), "the focus has stayed"


def test_a_job_is_cancelled_by_the_keyboard(service, browser):
    ask = service.operator()
    ask.submit("unwanted", min_devices=8)
    browser.go(f"{service.url}/jobs/unwanted")
    browser.run("document.querySelector('main > details summary').focus()")
    browser.key("Enter", "\r")
    browser.key("Tab")
    assert browser.run("document.activeElement.textContent") == "Cancel unwanted"
    browser.key("Enter", "\r")
    until(lambda: ask("GET", "jobs/unwanted").json()["result"] == "cancel")


def test_the_browser_complains_about_nothing_and_would_about_another_s_script(service, browser):
    browser.complaints.clear()
    browser.go(f"{service.url}/jobs/llama-8b")
    assert "<script>alert" in browser.run("document.querySelector('#attempts').textContent")
    assert browser.complaints == []
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.evil=1>'); 0")
    browser.until("performance.now() > 0")
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert not browser.run("window.evil")
    assert browser.complaints
