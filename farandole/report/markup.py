"""The pieces of HTML that the sections of the page share."""

from __future__ import annotations

from farandole.report.plots import palette


def figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def swatch(index: int) -> str:
    """A spot in the colour of the lane at `index`."""
    return f'<span class="swatch" style="background: var(--{palette.shade(index).name})"></span>'


def cell(tag: str, content: str, words: bool) -> str:
    return f'<{tag} class="words">{content}</{tag}>' if words else f"<{tag}>{content}</{tag}>"
