"""Figures to bytes: PNG for a file, SVG to stand inside an HTML page."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from farandole.errors import UserError
from farandole.report.plots.palette import INK, LINE, MUTED, SHADES

SETTINGS = {
    "axes.edgecolor": MUTED.light,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 10.0,
    "grid.color": LINE.light,
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",  # text stays text: smaller, searchable, in the page's own face
    "text.color": INK.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
}


def png(draw: Callable[[], Figure]) -> bytes:
    with _own_settings():
        buffer = io.BytesIO()
        FigureCanvasAgg(draw()).figure.savefig(buffer, format="png", facecolor="white", dpi=150)
    return buffer.getvalue()


def svg(draw: Callable[[], Figure], title: str) -> str:
    """An `<svg>` element without any reference to the outside, coloured by the page's variables.

    `title` is what a screen reader says; it must differ between the figures of one page, because
    the names inside the drawing are derived from it.
    """
    with _own_settings():
        matplotlib.rcParams["svg.hashsalt"] = title
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(draw()).figure.savefig(buffer, format="svg", metadata=nothing)
    return _inlined(buffer.getvalue(), title)


def picture_kind(path: Path, what: str) -> str:
    """`.png` or `.svg`. Raises `UserError` for any other ending."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"{path}: {what} is drawn as .png or .svg; end the file's name so.")
    return path.suffix.lower()


def picture(path: Path, draw: Callable[[], Figure], name: str) -> bytes:
    """A file of its own, by the ending of `path`; `svg` makes a part of a page, in its colours."""
    if picture_kind(path, name) == ".png":
        return png(draw)
    buffer = io.BytesIO()
    with _own_settings():
        matplotlib.rcParams["svg.hashsalt"] = name
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(draw()).figure.savefig(
            buffer, format="svg", facecolor="white", metadata=nothing
        )
    return buffer.getvalue()


@contextmanager
def _own_settings() -> Iterator[None]:
    """Matplotlib as it ships, plus ours, whatever the user's matplotlibrc says; then as before."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A strategy or metric named in a script the font lacks is drawn as boxes, not refused.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def _inlined(document: str, title: str) -> str:
    root = ElementTree.fromstring(document)
    names = {name.removeprefix("#") for e in root.iter() for k, name in e.items() if "href" in k}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in list(element.keys()):
            value = element.attrib.pop(key)
            plain_key = key.rpartition("}")[2]
            if plain_key == "id" and value not in names and element.tag != "clipPath":
                continue  # `figure_1` in each figure: nothing refers to it, and ids must differ
            element.set(plain_key, _restyled(value) if plain_key == "style" else value)
    for parent in root.iter():
        for style in parent.findall("style"):
            parent.remove(style)  # it would apply to the whole page
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", title)
    return ElementTree.tostring(root, encoding="unicode")


def _restyled(style: str) -> str:
    """Colours by variable, so that the page can turn dark; fonts from the page."""
    kept = [part for part in style.split("; ") if not part.startswith("font-family")]
    style = "; ".join(kept)
    for shade in SHADES:
        style = style.replace(shade.light, f"var(--{shade.name})")
    return style
