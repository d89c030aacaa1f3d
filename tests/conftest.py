"""For all tests."""

import signal

import pytest

# Background jobs of a shell are started with SIGINT ignored, and pass that on to the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A small text to train on; a test that changes it makes one of its own."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path
