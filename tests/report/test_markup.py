from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.report.figure import Markup, join, number, tag

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"))


def test_plain_text_is_escaped_and_markup_passes():
    assert tag("p", "a < b & c", tag("b", "d")) == "<p>a &lt; b &amp; c<b>d</b></p>"


def test_attributes_are_named_as_in_markup_and_none_leaves_one_out():
    assert tag("path", class_="a", stroke_width=1.5, id=None) == '<path class="a" stroke-width="1.5"/>'


def test_elements_that_may_have_content_are_always_closed():
    assert tag("div") == "<div></div>"
    assert tag("rect", tag("title", "x")) == "<rect><title>x</title></rect>"


@pytest.mark.slow
@given(TEXT, TEXT)
def test_any_text_comes_back_as_it_was(content, attribute):
    element = ElementTree.fromstring(tag("p", content, title=attribute))
    assert (element.text or "") == content
    assert element.get("title") == attribute


def test_joining_escapes_what_is_not_markup():
    assert join(["<", Markup("<br/>")], " ") == "&lt; <br/>"


def test_numbers_are_short():
    assert [number(value) for value in (3.0, 3.456, 0.1 + 0.2, -0.001, 12)] == ["3", "3.46", "0.3", "0", "12"]
