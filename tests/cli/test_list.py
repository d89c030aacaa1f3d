"""Output that needs no job: the catalogue, help by its short name, completion."""

import json

import pytest


@pytest.mark.parametrize("kind", ["models", "devices", "links"])
def test_the_catalogue_is_listed_with_its_sources(farpipe, kind):
    facts = json.loads(farpipe("list", kind, "--json").stdout)
    shown = farpipe("list", kind).stdout
    assert len(facts) > 3
    assert all(fact["name"] in shown and fact["source"] for fact in facts)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("schedules", "1f1b"),
        ("policies", "farpipe"),
        ("networks", "nsfnet"),
        ("assignments", "ksp-ff"),
        ("recipes", "two_sites"),
    ],
)
def test_names_are_listed_with_what_they_do(farpipe, kind, name):
    facts = json.loads(farpipe("list", kind, "--json").stdout)
    assert name in [fact["name"] for fact in facts]
    assert all(fact["about"] for fact in facts)


def test_an_unknown_table_is_refused(farpipe):
    done = farpipe("list", "planets")
    assert done.returncode == 2
    assert "models" in done.stderr


@pytest.mark.parametrize("command", [(), ("plan",), ("list",), ("optical", "blocking")], ids=" ".join)
def test_the_short_name_of_help_is_known_everywhere(farpipe, command):
    short, long = farpipe(*command, "-h"), farpipe(*command, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert short.stdout.startswith("Usage: farpipe")


def test_the_shell_completes_commands(farpipe, monkeypatch):
    for name, value in {"_FARPIPE_COMPLETE": "complete_bash", "COMP_WORDS": "farpipe pl", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert farpipe().stdout.split() == ["plan"]
