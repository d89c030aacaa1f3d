"""The package as an index and a public forge show it: working links, versions of Python, the CI that is run."""

import re
import runpy
import tomllib
from importlib import metadata
from pathlib import Path

import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_description_has_no_link_that_only_works_in_the_repository(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    targets = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", given["long_description"])
    assert picture == f"{PROJECT['urls']['Homepage']}/raw/main/docs/pictures/compare.svg"


def test_the_versions_of_python_are_those_of_the_ci():
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert versions == re.findall(r'"(3\.\d+)"', workflow) == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert re.findall(r"- run: (.*)", workflow) == [".ci/run"]


def test_the_index_shows_where_the_project_is():
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Changelog", "Issues"}


def test_constraints_hold_for_the_oldest_python_too():
    oldest = Version(PROJECT["requires-python"].removeprefix(">="))
    environment = {"python_version": str(oldest), "python_full_version": f"{oldest}.0"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    tried = [pin for pin in pins if not pin.marker or pin.marker.evaluate(environment)]
    tried = [pin for pin in tried if version_of(pin.name) in pin.specifier]
    assert len(tried) > 50
    assert [str(pin) for pin in tried if f"{oldest}.0" not in SpecifierSet(needs(pin.name))] == []


def version_of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # on another platform
        return "0"


def needs(name):
    """The versions of Python that the installed release of a package asks for."""
    return metadata.metadata(name)["Requires-Python"] or ""
