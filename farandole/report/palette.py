"""Colours and marks for the lanes: told apart without colour vision, on paper and in the dark.

The six colours were searched for so that every two of them stay apart (a distance of 25 in CIELAB)
in normal vision and in simulated protanopia, deuteranopia and tritanopia, and so that each stands
out from the page. Every lane also has its own mark. After six lanes the colours repeat with dashed
lines. The plots are drawn in the light colours; in the page each becomes a CSS variable, which
takes the second colour on a dark screen.
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
)
SHADES = (INK, MUTED, LINE, *LANES)

MARKS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", ":", "-.")


def shade(index: int) -> Shade:
    return LANES[index % len(LANES)]


def mark(index: int) -> str:
    return MARKS[index % len(MARKS)]


def dash(index: int) -> str:
    return DASHES[index // len(LANES) % len(DASHES)]
