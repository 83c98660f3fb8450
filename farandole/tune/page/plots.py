"""The plots of the page, as SVG whose colours are those of the page, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.report import units
from farandole.tune.page.axes import Axis
from farandole.tune.page.facts import Row

WIDTH, HEIGHT = 760.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 20.0, 16.0, 30.0


@dataclass(frozen=True)
class Mark:
    """A trial in a plot. `shade` goes from 0, the worst, to 1, the best."""

    x: float
    y: float
    kind: str
    shade: float
    title: str


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Progress:
    """The metric by the number of the trial, and the best so far."""

    marks: list[Mark]
    steps: str  # of the best so far, as points of a line
    ticks: list[Tick]
    last: int


@dataclass(frozen=True)
class Line:
    """One trial across all axes. Where it has no such choice, the line has a gap."""

    pieces: list[str]
    shade: float
    title: str


@dataclass(frozen=True)
class Column:
    x: float
    name: str
    ticks: list[Tick]


def progress(
    rows: Sequence[Row], best: Sequence[tuple[int, float]], higher_is_better: bool
) -> Progress:
    known = [row for row in rows if row.value is not None]
    axis = Axis.of_values("", [row.value for row in known if row.value is not None])
    last = max((row.number for row in rows), default=0)

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number + 0.5) / (last + 1)

    marks = []
    for row in rows:
        y = HEIGHT - BOTTOM if row.value is None else _y(axis.place(row.value))
        shade = _shade(axis, row, higher_is_better)
        marks.append(Mark(x(row.number), y, row.state.replace(" ", "-"), shade, title_of(row)))
    steps: list[tuple[float, float]] = []
    for number, value in best:
        if steps:
            steps.append((x(number), steps[-1][1]))
        steps.append((x(number), _y(axis.place(value))))
    if steps:
        steps.append((WIDTH - RIGHT, steps[-1][1]))
    ticks = [Tick(_y(place), text) for place, text in axis.ticks()]
    return Progress(marks, _points(steps), ticks, last)


def parallel(
    rows: Sequence[Row],
    spaces: Mapping[str, Mapping[str, object]],
    metric: str,
    higher_is_better: bool,
) -> tuple[list[Column], list[Line]]:
    """An axis for each choice, and the last for the metric; a line for each trial with a value."""
    known = [row for row in rows if row.value is not None]
    results = Axis.of_values(metric, [row.value for row in known if row.value is not None])
    axes = [*(Axis.of_choice(name, space) for name, space in spaces.items()), results]
    gap = (WIDTH - 2 * LEFT) / max(1, len(axes) - 1)
    columns = [
        Column(LEFT + gap * i, axis.name, [Tick(_y(p), text) for p, text in axis.ticks()])
        for i, axis in enumerate(axes)
    ]
    lines = []
    for row in sorted(known, key=lambda row: _shade(results, row, higher_is_better)):
        values = {**row.params, metric: row.value}
        pieces: list[list[tuple[float, float]]] = [[]]
        for column, axis in zip(columns, axes, strict=True):
            if axis.name in values:
                pieces[-1].append((column.x, _y(axis.place(values[axis.name]))))
            elif pieces[-1]:
                pieces.append([])
        texts = [_points(piece) for piece in pieces if len(piece) > 1]
        lines.append(Line(texts, _shade(results, row, higher_is_better), title_of(row)))
    return columns, lines


def title_of(row: Row) -> str:
    chosen = ", ".join(f"{name} {text}" for name, text in row.texts.items())
    return f"trial {row.number}, {row.state}: {units.number(row.value)} ({chosen})"


def _shade(axis: Axis, row: Row, higher_is_better: bool) -> float:
    if row.value is None:
        return 0.0
    place = axis.place(row.value)
    return round(place if higher_is_better else 1 - place, 3)


def _y(place: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - place)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
