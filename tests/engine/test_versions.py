"""Versions of torch and transformers that a run meets."""

import pytest

from farpipe.core.errors import InputError
from farpipe.engine import agreement
from farpipe.engine.versions import TESTED, untested, versions_of
from trainings import make_run, train


def test_versions_that_nobody_has_tested_are_named():
    assert untested({name: f"{tested.last}.1" for name, tested in TESTED.items()}) == []
    assert untested({"torch": TESTED["torch"].last, "transformers": ""}) == []
    (warning,) = untested({"torch": "2.130.0", "transformers": TESTED["transformers"].last})
    assert warning.startswith("torch 2.130.0 was not tested")


def test_only_a_model_of_transformers_needs_it(text_file):
    found = versions_of(make_run(text_file))
    assert found["transformers"] == ""
    assert found["torch"]


def test_ranks_with_other_versions_of_torch_are_refused_at_start(text_file, tmp_path, monkeypatch):
    versions = iter([{"torch": "2.13.0", "transformers": ""}, {"torch": "2.14.0", "transformers": ""}])
    monkeypatch.setattr(agreement, "versions_of", lambda run: next(versions))
    with pytest.raises(InputError, match="ranks 0 and 1 have different versions of torch; install the same one"):
        train(make_run(text_file), tmp_path / "run")
