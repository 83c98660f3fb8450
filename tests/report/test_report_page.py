"""The report as files: what is in it, what must never be in it, and what a failure leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from farandole.errors import FarandoleError
from farandole.files import write_whole
from farandole.report.lane import Lane
from farandole.report.page import page, write_report
from farandole.report.plots import curves as plots
from farandole.report.plots import palette, render
from farandole.report.sections import MOST_RAW_ROWS, raw_numbers, warnings
from farandole.report.standing import Results
from farandole.report.target import Target

MakeLane = Callable[..., Lane]
TARGET = Target.parse("accuracy=0.9")
HOSTILE = (
    '</code></title><script src="https://x.example/a.js"></script>$\\frac{$ & _<b>"\'é漢\x00\x07'
)
VOID = {"meta", "path", "use", "rect", "img", "br", "link", "input"}


class Reader(HTMLParser):
    """Collects elements and text, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data


@pytest.fixture(scope="module")
def lanes(make_lane: MakeLane) -> list[Lane]:
    return [
        make_lane("serial", [0.1, 0.5, 0.92], seconds=3.0, workers=1),
        make_lane("allreduce", [0.1, 0.91, 0.95]),
        make_lane("daso", [0.2, 0.4], outcome="failed", problem="rank 1: out of <memory>"),
    ]


@pytest.fixture(scope="module")
def html(lanes: list[Lane]) -> str:
    return page(Results(tuple(lanes), TARGET))


def test_write_report_writes_three_files_and_nothing_else(
    lanes: list[Lane], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "race"
    path = write_report(folder, lanes, TARGET, {"machine": "two cores"})
    assert path == folder / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == [
        "report.html",
        "report.png",
        "summary.json",
    ]
    assert len(json.loads((folder / "summary.json").read_text())["lanes"]) == 3
    text = Reader(path.read_text("utf-8")).text
    assert "allreduce reached accuracy ≥ 0.9 first, in 2.0 s; 4.5× sooner than serial." in text
    assert "daso failed after 2.0 s: rank 1: out of <memory>" in text
    assert "two cores" in text
    assert "farandole run daso" in text
    assert_png((folder / "report.png").read_bytes(), at_least=(1200, 700))


def assert_png(content: bytes, at_least: tuple[int, int]) -> None:
    """Reads the file by its chunks: signature, checksums, size, and all its rows of pixels."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels, size, kinds = 8, b"", (0, 0), []
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", content[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        kinds.append(kind)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        if kind == b"IDAT":
            pixels += body
        at += 12 + length
    assert kinds[-1] == b"IEND"
    assert at_least[0] <= size[0] <= 4000
    assert at_least[1] <= size[1] <= 4000
    rows = zlib.decompress(pixels)
    assert len(rows) == size[1] * (1 + 4 * size[0])
    assert len(set(rows[1::4])) > 3, "something is drawn"


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    assert not re.search(r"https?:|//|@import|url\((?!#)", re.sub(r"sha256-[^ ]+", "", html))
    for tag, attributes in Reader(html).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:"))
    assert "default-src 'none'" in unescape(html)
    (policy,) = re.findall(r"script-src &#39;sha256-([^ ]+)&#39;;", html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = hashlib.sha256(script.encode()).digest()
    assert policy == base64.b64encode(digest).decode(), "the browser would not run it"
    assert "prefers-color-scheme: dark" in html


def test_ids_are_distinct_and_every_reference_finds_its_own(html: str) -> None:
    elements = Reader(html).elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert references
    assert references <= set(ids)


def test_hostile_text_is_shown_and_not_obeyed(
    html: str, make_lane: MakeLane, tmp_path: Path
) -> None:
    tame = html
    wild = make_lane(HOSTILE, [0.1, 0.95], metric=HOSTILE, damage=(HOSTILE,))
    dead = make_lane(HOSTILE, [0.1], metric=HOSTILE, problem=HOSTILE, outcome="failed")
    path = write_report(tmp_path, [wild, dead], Target(HOSTILE, 0.9, True), {HOSTILE: HOSTILE})
    html = path.read_text("utf-8")
    known = {tag for tag, _ in Reader(tame).elements}
    assert {tag for tag, _ in Reader(html).elements} <= known, "markup came in with the text"
    assert html.count("<script") == tame.count("<script") == 2
    assert HOSTILE in unescape(html)
    (data,) = re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert not set("<>&") & set(data)
    assert json.loads(data)["lanes"][1]["problem"] == HOSTILE


def test_not_finite_and_enormous_values_survive(make_lane: MakeLane, tmp_path: Path) -> None:
    values = [0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.95]
    path = write_report(tmp_path, [make_lane("wild", values)], TARGET, {})
    text = Reader(path.read_text("utf-8")).text
    for shown in ("nan", "inf", "-inf", "1e+308", "0.95"):
        assert shown in text
    assert "5 values of accuracy could not be drawn" in text


any_number = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.lists(any_number, max_size=4), max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
)
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a figure takes too long to shrink
)
def test_any_numbers_can_be_drawn(
    make_lane: MakeLane, runs: list[list[float]], value: float
) -> None:
    lanes = tuple(make_lane(str(at), values) for at, values in enumerate(runs))
    results = Results(lanes, Target("accuracy", value, True))
    ElementTree.fromstring(render.svg(lambda: plots.curve(results, "accuracy", "time"), "x"))


def test_races_with_little_to_show_still_have_a_page(make_lane: MakeLane, tmp_path: Path) -> None:
    dead = make_lane("dead", outcome="failed")
    write_report(tmp_path, [], None, {})
    write_report(tmp_path, [dead], TARGET, {})
    html = write_report(tmp_path, [dead, make_lane("lone", [0.5])], None, {}).read_text("utf-8")
    assert "<h1><code>lone</code> had the best accuracy" in html


def test_a_metric_nobody_logged_is_told_in_the_page(make_lane: MakeLane) -> None:
    html = page(Results((make_lane(values=[0.5]),), Target.parse("acuracy=0.9")), [warnings])
    assert "never logged 'acuracy'" in Reader(html).text


def test_each_lane_is_a_curve_with_the_target_and_where_it_was_reached(lanes: list[Lane]) -> None:
    results = Results(tuple(lanes), TARGET)
    figure = plots.curve(results, "accuracy", "samples")
    (axes,) = figure.axes
    drawn = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(drawn["lane 0"].get_xdata()) == [100, 200, 300]
    assert list(drawn["lane 1"].get_ydata()) == [0.1, 0.91, 0.95]
    assert len({line.get_color() for name, line in drawn.items() if "lane" in name}) == 3
    stars = [line for line in axes.get_lines() if line.get_label() == "reached"]
    assert [(s.get_xdata()[0], s.get_ydata()[0]) for s in stars] == [(300, 0.92), (200, 0.91)]
    assert [drawn["failed"].get_xdata()[0], drawn["failed"].get_ydata()[0]] == [200, 0.4]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "serial",
        "allreduce",
        "daso",
        "target reached",
        "failed",
    ]


def test_names_that_matplotlib_would_drop_or_typeset_are_drawn(make_lane: MakeLane) -> None:
    results = Results((make_lane("_hidden", [0.1, 0.2]), make_lane("$x_1$", [0.1, 0.3])))
    svg = render.svg(lambda: plots.overview(results), "names")
    text = [element.text for element in ElementTree.fromstring(svg).iter("text")]
    assert text.count("_hidden") == 2, "in the legend and beside its bar"
    assert text.count("$x_1$") == 2


def test_a_loss_over_decades_gets_a_logarithmic_axis(make_lane: MakeLane) -> None:
    steep, mild = ([1.0, 1e-4], [1.0, 0.5])
    for values, scale in ((steep, "log"), (mild, "linear"), ([1.0, -1e-4], "linear")):
        results = Results((make_lane("a", values, metric="loss"),))
        assert plots.curve(results, "loss", "time").axes[0].get_yscale() == scale


def test_every_other_metric_has_its_panel(make_lane: MakeLane) -> None:
    lanes = (make_lane("a", [4, 2], metric="period"), make_lane("b", [0.1, 0.5]))
    html = page(Results(lanes, TARGET))
    for metric in ("period", "accuracy"):
        assert f'aria-label="{metric} against time"' in html
        assert f'aria-label="{metric} against samples"' in html


def test_long_runs_are_thinned_in_the_numbers_but_keep_their_last(make_lane: MakeLane) -> None:
    lane = make_lane("long", [0.1] * 1999 + [0.98765])
    html = page(Results((lane,)), [raw_numbers])
    assert "Every 10th of 2000 logs" in html
    assert html.count("<tr>") <= MOST_RAW_ROWS + 2
    assert "0.98765" in html


def test_a_page_is_the_sections_it_is_given(lanes: list[Lane]) -> None:
    html = page(Results(tuple(lanes)), [lambda r: f"<p>{len(r.lanes)} lanes</p>", lambda r: ""])
    assert "<body>\n<p>3 lanes</p>\n</body>" in html


def test_colours_in_the_page_follow_the_theme(html: str) -> None:
    body = html[html.index("<body>") :]
    assert "var(--lane-0)" in body
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"(href=|url\()\"?#\w+", "", body)), (
        "a colour that does not turn with the theme"
    )
    for shade in palette.SHADES:
        assert html.count(f"--{shade.name}: ") == 3, "light, dark and paper"


def test_the_users_matplotlib_settings_neither_matter_nor_change(lanes: list[Lane]) -> None:
    import matplotlib

    results = Results(tuple(lanes), TARGET)
    usual = render.svg(lambda: plots.overview(results), "x")
    with matplotlib.rc_context({"legend.fontsize": 25.0, "xtick.labelsize": 25.0}):
        before = dict(matplotlib.rcParams)
        assert render.svg(lambda: plots.overview(results), "x") == usual
        assert dict(matplotlib.rcParams) == before


def test_a_failure_half_way_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FarandoleError, match=r"could not write .*report\.html: No space left"):
        write_whole(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_section_that_breaks_leaves_the_old_report(
    lanes: list[Lane], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict.fromkeys(("report.html", "report.png", "summary.json"), b"old")
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)

    def broken(results: Results) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(plots, "bytes_over_time", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        write_report(tmp_path, lanes[:1], TARGET, {})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_named(lanes: list[Lane], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FarandoleError, match=r"could not make .*file/race"):
        write_report(tmp_path / "file" / "race", lanes, None, {})


def test_reading_and_ranking_import_no_plotting() -> None:
    code = (
        "import sys; from farandole.report import history, lane, notice, standing, summary; "
        "print({'matplotlib', 'rich'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"


def test_the_example_in_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Path(__file__).parents[2] / "docs" / "report.md"
    (code,) = re.findall(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    counters = '"time":2,"samples":9,"steps":1,"waited_seconds":0,"bytes_sent":0'
    for name in ("serial", "allreduce"):
        folder = tmp_path / "runs" / f"digits-{name}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(
            f'{{"event":"start","sync":"{name}","size":1}}\n'
            f'{{"event":"log",{counters},"metrics":{{"accuracy":0.96}}}}\n'
        )
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(document), "exec"), {})
    assert "the big one" in Path("runs/report/report.html").read_text("utf-8")
