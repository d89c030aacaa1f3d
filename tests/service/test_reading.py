"""What is shown of an attempt's files."""

import json

from farpipe.engine.figures.metrics import METRICS_NAME
from farpipe.service.folder import LOG_NAME, RUN_NAME, read_in
from farpipe.service.reading import log_part, steps_of


def test_steps_and_the_end_of_a_log_are_those_of_a_long_run(tmp_path):
    """A launcher reads a mebibyte at a time: the first had been all."""
    (tmp_path / RUN_NAME).mkdir()
    lines = [json.dumps({"step": step, "attempt": 0, "loss": 1.0, "padding": "x" * 1000}) for step in range(3000)]
    (tmp_path / RUN_NAME / METRICS_NAME).write_text("\n".join(lines) + "\n")
    (tmp_path / LOG_NAME).write_text("begun\n" + "x" * 3 * 2**20 + "\nthe end")

    class Disk:
        def read(self, key, file, offset):
            return read_in(tmp_path, file, offset)

    steps = steps_of(Disk(), "job", 1)
    assert steps[-1].step == 2999
    assert 250 < len(steps) <= 500
    end = log_part(Disk(), "job", 1, None)
    assert end.text.endswith("the end")
    assert end.next == (tmp_path / LOG_NAME).stat().st_size
