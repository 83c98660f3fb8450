"""Colours and marks for the lanes: told apart without colour vision, on paper and in the dark.

There are twelve colours, in two sets of six. They were searched for so that in normal vision every
two of them stay apart (a distance of 25 in CIELAB), and in simulated protanopia, deuteranopia and
tritanopia every two of a set; and so that each stands out from the page. The first set is drawn
with solid lines, the second with dashed ones, and each of the twelve lanes has its own mark. After
twelve lanes the colours repeat with other lines. The plots are drawn in the light colours; in the
page each becomes a CSS variable, which takes the second colour on a dark screen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shade:
    """A colour's role in the page, as a CSS variable, and its value on light and on dark."""

    name: str
    light: str
    dark: str


INK = Shade("ink", "#1b1d21", "#e7e9ee")
MUTED = Shade("muted", "#5d636e", "#a0a7b4")
LINE = Shade("line", "#dcdfe5", "#353a44")
LANES = (
    Shade("lane-0", "#0321a6", "#7d7cf7"),
    Shade("lane-1", "#bd8200", "#de5022"),
    Shade("lane-2", "#006e57", "#71ff9b"),
    Shade("lane-3", "#734d90", "#9d778d"),
    Shade("lane-4", "#1291ff", "#daf9ff"),
    Shade("lane-5", "#714400", "#f4e426"),
    Shade("lane-6", "#609c4f", "#319a5e"),
    Shade("lane-7", "#eb53a8", "#f2aa55"),
    Shade("lane-8", "#2c07f6", "#9141f8"),
    Shade("lane-9", "#862130", "#94e4b9"),
    Shade("lane-10", "#d159fa", "#c0b5f6"),
    Shade("lane-11", "#7d038b", "#c40fbb"),
)
SET = 6  # colours that everybody can tell apart
SHADES = (INK, MUTED, LINE, *LANES)

MARKS = ("o", "s", "^", "D", "v", "P", "<", ">", "d", "X", "p", "H")
DASHES = ("-", "--", ":", "-.")


def shade(index: int) -> Shade:
    return LANES[index % len(LANES)]


def mark(index: int) -> str:
    return MARKS[index % len(MARKS)]


def dash(index: int) -> str:
    return DASHES[index // SET % len(DASHES)]
