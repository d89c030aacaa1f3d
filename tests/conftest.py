"""For all tests."""

import gc
import signal

import pytest
from hypothesis import settings

from farpipe.engine.processes import Guarded
from forked import PLACE, Forks, Server, start_new

# Background jobs of a shell are started with SIGINT ignored, those of nohup with SIGHUP, and pass that on to the
# processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A small text to train on; a test that changes it makes one of its own."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


@pytest.fixture(scope="session", autouse=True)
def _forks(request):
    """Programs that slow tests start are forks of a server, see forked.py; those that these start are not,
    but for with_forks.py."""
    if not any(item.get_closest_marker("slow") for item in request.session.items):
        yield
        return
    server = Server()
    forks = Forks(server.place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guarded, "start", classmethod(forks.start))
        patch.setenv(PLACE, server.place)
        yield
    forks.close()
    server.close()


@pytest.fixture
def new_processes(_forks):
    """Programs that are started here are new processes, as they are for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guarded, "start", classmethod(start_new))
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--examples", type=float, default=1.0, help="share of the random examples of property tests to try"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage is collected from the first test on, and not among tests and modules: they stay, and are millions."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Property tests try a share of their examples, at least five (over a profile, a test's own number would win)."""
    share = config.getoption("--examples")
    for test in {item.function for item in items if getattr(item.function, "is_hypothesis_test", False)}:
        own = getattr(test, "_hypothesis_internal_use_settings", settings())
        few = min(own.max_examples, max(5, round(share * own.max_examples)))
        test._hypothesis_internal_use_settings = settings(own, max_examples=few)
