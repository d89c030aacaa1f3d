"""The walk of docs/how-to/use-hugging-face-models.md, as it stands."""

import json

import pytest

from farpipe.planning import Plan
from test_printed_output import FINE_TUNING, ROOT, followed

pytestmark = pytest.mark.slow  # starts processes


def test_a_model_is_tuned_over_two_sites_loses_a_twin_and_comes_back_to_transformers(tmp_path):
    _, count, failure = followed((ROOT / FINE_TUNING).read_text(encoding="utf-8"), tmp_path)
    assert (count, failure) == (8, "")
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(12))
    assert {line["attempt"] for line in lines} == {0, 1}, "one process was lost"
    adapted = [json.loads(line) for line in (tmp_path / "runs" / "lora" / "metrics.jsonl").read_text().splitlines()]
    assert {line["attempt"] for line in adapted} == {0, 1}, "and one of the training of adapters"
    more = [json.loads(line) for line in (tmp_path / "runs" / "more" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in adapted + more] == list(range(16)), "which went on under another cut"
    planned = Plan.load(tmp_path / "plan.json").prediction.link_bytes
    assert all(line["link_bytes"] == planned for line in lines), (planned, lines[-1]["link_bytes"])
