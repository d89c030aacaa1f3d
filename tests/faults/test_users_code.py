"""Faults of a user's module: who failed, where and in which log; what it leaves behind ends with the run."""

import re
import time

import pytest

from chosen import chosen
from farpipe.core.errors import RunError, RunInterruptedError
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from rank_processes import wait_for_end_of_ranks
from small_models import LLAMA
from trainings import losses, make_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_processes")]

MODEL = LLAMA.model_copy(update={"module": "faults.users_module:build"})
END_S = 100.0
"""Room on a busy machine for a run of some seconds, and the ten that a process has for its end; it hangs for longer."""


@pytest.fixture
def users(text_file, tmp_path, monkeypatch):
    """`users(mode, **options)`: run a small training with a fault of that kind on rank 1."""
    monkeypatch.syspath_prepend("tests")
    monkeypatch.setenv("PYTHONPATH", "tests", prepend=":")

    def start(mode, **options):
        monkeypatch.setenv("FARPIPE_TEST_MODE", mode)
        fields = {"transport": TransportSettings(timeout_s=60, connect_timeout_s=60, outage_s=60)}
        spec = make_run(text_file, model=MODEL, num_steps=3, run_fields=fields | {"emulate_links": False})
        run(spec, tmp_path / "run", **options)
        return tmp_path / "run"

    return start


@pytest.mark.parametrize(
    ("mode", "kind", "words", "place"),
    [
        (
            "none",
            RunError,
            "AttributeError: 'NoneType' object has no attribute 'dtype'",
            r"users_module.py:\d+ in none",
        ),
        ("leaves", RunError, "SystemExit(0)", r"users_module.py:\d+ in leaves"),
        ("interrupts", RunInterruptedError, "KeyboardInterrupt()", r"users_module.py:\d+ in interrupts"),
        ("shorter", RunError, "ValueError: Expected input batch_size", r"stage.py:\d+ in "),
    ],
)
def test_an_error_of_a_module_names_rank_action_place_and_the_log_of_the_rank_that_failed(
    users, mode, kind, words, place
):
    with pytest.raises(kind) as caught:
        users(mode)
    text = str(caught.value)
    assert text.startswith("rank 1 failed: ")
    assert words in text
    assert re.search(place, text)
    assert re.search(r"(forward|backward) of microbatch \d on stage 1 \(1[FBI]\d\)", text)
    assert re.search(r"\(log: \S+rank-1\.log\)", text)


@pytest.mark.parametrize("mode", ["forks_and_raises", "forks_and_goes_on"])
def test_a_child_that_a_module_forks_is_no_rank(users, mode, tmp_path):
    run_dir = users(mode)
    assert len(losses(run_dir)) == 3
    assert "gave up" not in (run_dir / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    ("mode", "why"),
    chosen(
        [
            ("leaves_a_thread", r"thread 'uploads' .*threading\.py:\d+"),
            ("hangs_at_exit", ""),
            ("hangs_at_the_very_end", ""),
        ],
        0,
    ),
)
def test_a_process_whose_work_is_done_ends_whatever_it_has_left_behind(users, mode, why):
    start_s, said = time.monotonic(), []
    run_dir = users(mode, on_notice=said.append)
    assert time.monotonic() - start_s < END_S
    wait_for_end_of_ranks(run_dir)
    (text,) = said
    assert re.search(
        rf"rank 1: its work (is|was) done, but the process did not end (within \S+ s|by itself).*{why}", text
    )
