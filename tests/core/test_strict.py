"""Strict reading and whole writing of files."""

import math
import os
from typing import Annotated

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from farpipe.core import strict
from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import (
    expect_format,
    finite,
    key_path,
    nearest,
    parse_json,
    parse_toml,
    read_text,
    toml_line,
    validate,
    write_text,
)


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    radius: Annotated[float, BeforeValidator(finite)]
    spokes: Annotated[int, Field(strict=True)] = 0


class Cart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    named: dict[str, Wheel] = Field(default_factory=dict)
    pulled_by: str = Field(default="horse", alias="by")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("bandwith", "; did you mean 'bandwidth'?"),
        ("BANDWIDTH", "; did you mean 'bandwidth'?"),
        ("llama-3-8B", "; did you mean 'Llama-3-8b'?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_the_nearest_word_ignores_case_and_is_silent_when_nothing_is_near(word, hint):
    words = ["latency", "bandwidth", "Llama-3-8b"]
    assert nearest(word, words) == hint
    assert nearest(word, iter(words)) == hint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"wheels": [{"radius": 1}, {"radious": 2}]}, "wheels[1].radious: unknown key; did you mean 'radius'?"),
        ({"wheels": [{"radius": 1, "x": 2}]}, "wheels[0].x: unknown key; known here: radius, spokes"),
        ({"wheels": [], "spare": {"radious": 1}}, "spare.radious: unknown key; did you mean 'radius'?"),
        ({"wheels": [], "named": {"left": {"radious": 1}}}, "named.left.radious: unknown key; did you mean 'radius'?"),
        ({"wheels": [], "pulled_by": "ox"}, "pulled_by: unknown key; known here: by, named, spare, wheels"),
        ({"wheels": [{}]}, "wheels[0].radius: missing"),
        ({"wheels": [{"radius": -1}]}, "wheels[0].radius: must be at least 0, found -1"),
        ({"wheels": [{"radius": "1"}]}, "wheels[0].radius: expected a number, found '1'"),
        ({"wheels": [{"radius": 1, "spokes": 2.5}]}, "wheels[0].spokes: input should be a valid integer, found 2.5"),
        (
            {"wheels": [{"radius": 1, "spokes": "x" * 99}]},
            "wheels[0].spokes: input should be a valid integer, found 'xxx",
        ),
        (
            {"wheels": [{"radius": 1, "spokes": [1, 2]}]},
            "wheels[0].spokes: input should be a valid integer, found a list",
        ),
        ({"wheels": [3]}, "wheels[0]: expected a table, found 3"),
        ({"wheels": [], "named": 5}, "named: expected a table, found 5"),
        ({"wheels": [], "by": None}, "by: input should be a valid string, found nothing"),
        ([], "expected a table, found a list of 0"),
    ],
)
def test_an_error_names_source_place_value_and_remedy(data, message):
    with pytest.raises(InputError) as error:
        validate(Cart, data, "cart.json")
    assert str(error.value).startswith(f"cart.json: {message}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 150


def test_a_misspelt_key_is_told_before_the_right_one_that_is_missing():
    with pytest.raises(InputError, match=r"wheels\[0\].radiuss: unknown key; did you mean 'radius'"):
        validate(Cart, {"wheels": [{"radiuss": 1}]}, "cart.json")


def test_a_prefix_stands_before_the_key_path():
    with pytest.raises(InputError, match=r"^plan.json: carts\[2\].wheels: missing$"):
        validate(Cart, {}, "plan.json", prefix="carts[2]")


def test_key_paths_are_written_as_in_python():
    assert key_path(("links", 0, "latency")) == "links[0].latency"
    assert key_path(()) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: "),
        ("{", "not JSON: .* at line 1, column 2"),
        ('{"a": NaN}', "NaN is not a number in JSON"),
        ("-Infinity", "-Infinity is not a number"),
        ('{"a": 1, "b": {"a": 2, "a": 3}}', "key 'a' is given twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
def test_bad_json_is_told_with_its_place(text, message):
    with pytest.raises(InputError, match=f"^file: {message}"):
        parse_json(text, "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = !", "not TOML: .* line 1, column 5"),
        ("a = 1\na = 2", "not TOML: "),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "9" * 5000, "Exceeds the limit"),
    ],
)
def test_bad_toml_is_told_with_its_place(text, message):
    with pytest.raises(InputError, match=f"^file: {message}"):
        parse_toml(text, "file")


@given(st.text())
def test_any_text_is_read_or_refused(text):
    for parse in (parse_json, parse_toml):
        try:
            parse(text, "file")
        except InputError as error:
            assert str(error).startswith("file: ")


def test_the_format_is_taken_off_or_refused():
    assert expect_format({"format": "x/1", "a": 1}, "x/1", "file") == {"a": 1}
    with pytest.raises(InputError, match="file: format: expected 'x/2', found 'x/1'"):
        expect_format({"format": "x/1"}, "x/2", "file")
    with pytest.raises(InputError, match="found nothing"):
        expect_format({}, "x/2", "file")
    with pytest.raises(InputError, match=r"expected an object with .* found a list of 1"):
        expect_format([1], "x/2", "file")


@pytest.mark.parametrize("value", [True, None, "1", [1], 1j])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(ValueError, match="expected a number, found"):
        finite(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="expected a finite number"):
        finite(value)


def test_bounds_of_numbers():
    assert finite(0) == 0.0
    assert finite(-2.5, minimum=-3) == -2.5
    assert isinstance(finite(3), float)
    with pytest.raises(ValueError, match="must be more than 0, found 0"):
        finite(0, exclusive=True)
    with pytest.raises(ValueError, match="too large for a number: a huge number"):
        finite(10**5000)
    with pytest.raises(ValueError, match="must be at least 0, found -1000") as error:
        finite(-(10**300))
    assert len(str(error.value)) < 100


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.text(min_size=1).filter(lambda text: text.strip() and not text.startswith("\ufeff")))
def test_what_is_written_is_read_again(tmp_path, text):
    write_text(tmp_path / "new" / "file", text)
    assert read_text(tmp_path / "new" / "file") == text


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_text(tmp_path / "file") == "a = 1"


def test_what_cannot_be_read_is_told_by_name(tmp_path, monkeypatch):
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes("Zürich".encode("latin-1"))
    (tmp_path / "packed").write_bytes(b"\x1f\x8b\x08")
    (tmp_path / "large").write_text("1234567890")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(strict, "MAX_FILE_BYTES", 9)
    messages = {
        "absent": "can't be read: No such file or directory",
        "empty": "the file is empty",
        "packed": r"not UTF-8 text \(byte 1\); unpack it \(gunzip\)",
        "latin": r"not UTF-8 text \(byte 1\); save the file as UTF-8",
        "large": "larger than 0 MiB",
        "pipe": "not a plain file",
        "x" * 300: "can't be read: File name too long",
        "large/file": "can't be read: Not a directory",
        ".": "can't be read: Is a directory",
    }
    for name, message in messages.items():
        with pytest.raises(InputError, match=message) as error:
            read_text(tmp_path / name)
        assert str(error.value).startswith(str(tmp_path))
    with pytest.raises(InputError, match="null byte"):
        read_text("a\0b")


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "old")
    for failure, told in ((OSError(28, "No space left on device"), RunError), (KeyboardInterrupt(), KeyboardInterrupt)):

        def fail(_, failure=failure):
            raise failure

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(told):
            write_text(path, "new")
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
        assert path.read_text() == "old"


def test_a_place_that_cannot_be_written_is_told_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=f"^{tmp_path}/file/below: can't be written: "):
        write_text(tmp_path / "file" / "below", "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=f"^{tmp_path}/folder: can't be written: Is a directory"):
        write_text(tmp_path / "folder", "text")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


JOB = """\
# a job
[model]
preset = "tiny"

[[cluster.sites]]
name = "a"
[cluster.sites.site_link]
latency = "1 us"

[[cluster.sites]]
name = "b"
num_devices = 2
[cluster.sites.site_link]
latency = "2 us"

[[cluster.links]]
between = [
    "a",  # here
    "b",
]
note = '''
[model]
name = "b"
'''
loss.share = 0.5
"site" = {inner = {deep = 1}}
"""


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("model", "preset"), 3),
        (("model", "absent"), 2),
        (("cluster", "sites", 0, "name"), 6),
        (("cluster", "sites", 1, "name"), 11),
        (("cluster", "sites", 1, "absent"), 10),
        (("cluster", "sites", 0, "site_link", "latency"), 8),
        (("cluster", "sites", 1, "site_link", "latency"), 14),
        (("cluster", "links", 0, "between", 1), 17),
        (("cluster", "links", 0, "note"), 21),
        (("cluster", "links", 0, "loss", "share"), 25),
        (("cluster", "links", 0, "site", "inner", "deep"), 26),
        (("training", "precision"), 0),
        ((), 0),
    ],
)
def test_the_line_of_a_key_in_a_toml_text_is_found(location, line):
    assert toml_line(JOB, location) == line


def test_an_error_in_a_toml_text_ends_with_its_line():
    text = "pulled_by = 1\n\n[[wheels]]\nradius = 1\n[[wheels]]\nradius = -1\n"
    with pytest.raises(InputError, match=r"cart: wheels\[1\].radius: must be at least 0, found -1 \(line 6\)$"):
        validate(Cart, parse_toml(text.replace("pulled_by = 1", 'by = "ox"'), "cart"), "cart", toml=text)


def test_a_word_that_begins_differently_has_to_be_closer():
    assert nearest("mi300x", ["3090", "h100-sxm"]) == ""
    assert nearest("atency", ["latency"]) == "; did you mean 'latency'?"
