"""The lanes' colours stay apart for every kind of eye, and stand out from the page."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from farandole.report.page import style_sheet
from farandole.report.plots.palette import DASHES, LANES, SET, dash, mark, shade

Colour = tuple[float, float, float]
Matrix = tuple[Colour, Colour, Colour]

# Complete colour deficiencies on linear RGB, after Machado, Oliveira and Fernandes (2009).
EYES: dict[str, Matrix] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ: Matrix = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))


def linear(text: str) -> Colour:
    channels = (int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return r, g, b


def through(matrix: Matrix, colour: Colour) -> Colour:
    r, g, b = (
        sum(k * min(max(c, 0), 1) for k, c in zip(row, colour, strict=True)) for row in matrix
    )
    return r, g, b


def lab(colour: Colour) -> Colour:
    """CIELAB, with the screen's white as white (the rows of XYZ sum to one)."""
    x, y, z = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in through(XYZ, colour))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(through(XYZ, linear(text))[1] for text in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_any_two_lanes_are_apart(eye: str, theme: str) -> None:
    """All twelve for most eyes; for every eye the six that have the same kind of line."""
    seen = [lab(through(EYES[eye], linear(getattr(lane, theme)))) for lane in LANES]
    for (at, one), (place, other) in combinations(enumerate(seen), 2):
        if eye == "normal" or dash(at) == dash(place):
            assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 25


def test_twelve_lanes_have_twelve_colours_and_marks() -> None:
    assert len({shade(at).light for at in range(12)}) == 12
    assert len({shade(at).dark for at in range(12)}) == 12
    assert len({mark(at) for at in range(12)}) == 12


def test_lanes_stand_out_from_the_page() -> None:
    light, dark, _paper = re.findall(r"--ground: (#\w{6})", style_sheet())
    for lane in LANES:
        assert contrast(lane.light, light) >= 3
        assert contrast(lane.dark, dark) >= 3


def test_lanes_that_share_a_colour_differ_in_their_line() -> None:
    looks = [(shade(at), mark(at), dash(at)) for at in range(SET * len(DASHES))]
    assert len(set(looks)) == len(looks)
