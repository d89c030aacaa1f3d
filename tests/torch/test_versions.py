"""Versions of torch and torchtitan that were not run with this package."""

import re
import warnings

import pytest

from farpipe.core.errors import InputError
from farpipe.torch.versions import TESTED, expect_tested


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.14.1+cu130"])
def test_nothing_is_said_of_versions_that_were_run(found):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_tested("torch", found)


@pytest.mark.parametrize(
    ("package", "found", "words"),
    [
        ("torch", "2.12.1", "was run with torch 2.13 to 2.14, not with 2.12.1"),
        ("torch", "3.0.0a0+git12", "not with 3.0.0a0"),
        ("torchtitan", "0.4.0", "was run with torchtitan 0.3, not with 0.4.0"),
    ],
)
def test_other_versions_are_named_in_a_warning(package, found, words):
    with pytest.warns(UserWarning, match=words):
        expect_tested(package, found)


def test_a_torchtitan_whose_pipelines_were_made_otherwise_is_refused():
    with pytest.raises(InputError, match=r"needs torchtitan 0\.3, found 0\.2\.2: pip install torchtitan==0\.3"):
        expect_tested("torchtitan", "0.2.2")


def test_the_versions_that_were_run_are_in_the_how_to(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "how-to" / "use-under-pytorch.md").read_text()
    for package, tested in TESTED.items():
        for version in (tested.first, tested.last):
            assert re.search(rf"\| {package} \|[^\n]*\b{re.escape(version)}\b", text), (package, version)
