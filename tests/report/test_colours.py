"""Colours must carry their meaning for colour-blind eyes, in grey print, and in light and dark."""

import re
from itertools import combinations

import numpy as np
import pytest

from farpipe.report.figure import figures_css

CSS = figures_css()
LIGHT, DARK = re.findall(r"--paper: (#\w+); --ground: (#\w+); --ink: (#\w+); --muted: (#\w+)", CSS)[:2]
FILL = dict(re.findall(r"\.([FIWB]\d) \{ fill: (#\w+) \}", CSS))

# How people without one kind of cone see linear RGB (Machado, Oliveira, Fernandes, IEEE TVCG 15(6), 2009, severity 1).
SEEN = {
    "everyone": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour):
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    """WCAG 2 contrast ratio."""
    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    """CIE L*a*b* of linear RGB, D65."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.array([t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz / [0.9505, 1.0, 1.089]])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("pair", list(combinations("FIWB", 2)), ids="".join)
def test_kinds_of_actions_stay_apart_for_all_eyes(pair, eyes):
    one, other = (lab(np.array(SEEN[eyes]) @ linear(FILL[f"{kind}0"])) for kind in pair)
    assert np.linalg.norm(one - other) > 20


@pytest.mark.parametrize("pair", list(combinations("FIWB", 2)), ids="".join)
def test_kinds_of_actions_stay_apart_in_grey(pair):
    one, other = (lab(np.full(3, luminance(FILL[f"{kind}0"])))[0] for kind in pair)
    assert abs(one - other) > 8


@pytest.mark.parametrize("name", FILL)
def test_the_number_in_a_box_can_be_read(name):
    assert contrast(FILL[name], "#ffffff" if name == "F0" else "#14171c") >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read_in_light_and_dark(scheme):
    paper, ground, ink, muted = scheme
    for text in (ink, muted):
        assert contrast(text, paper) >= 4.5
        assert contrast(text, ground) >= 4.5


@pytest.mark.parametrize("kind", "FIWB")
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_actions_stand_out_from_the_bubble(kind, scheme):
    one, other = (lab(linear(colour)) for colour in (FILL[f"{kind}0"], scheme[1]))
    assert np.linalg.norm(one - other) > 20
