"""A timeline as text: one line for each rank, time to the right.

    rank 0  F0 F1 F2             B0--- F3 B1---    B2---    B3---|
    rank 1     F0 F1       B0--- F2 B1--- F3 B2---    B3---|
    rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---|

A name is followed by dashes as long as the action takes. An update that takes no time is a bar.
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.schedule.pipelines.actions import Action, Pipeline, one_each
from farandole.schedule.pipelines.player import Span


def draw(pipeline: Pipeline, spans: Sequence[Span], width: int) -> str:
    """Where the time is too long for `width`, names are shortened to their letter; where even
    letters do not fit, only the beginning is drawn."""
    heads = _heads(pipeline)
    many = holds_many(pipeline)
    room = max(10, width - len(heads[0]))
    shown = _beginning(spans, room)
    names = [label(span.action, many) for span in shown]
    unit, characters = _scale(shown, names, room)
    rows = [[" "] * room for _ in range(pipeline.ranks)]
    for span, name in zip(shown, names, strict=True):
        begin, stop = (round(at / unit * characters) for at in (span.begin, span.end))
        _write(rows[span.rank], begin, stop, name)
    end = "" if len(shown) == len(spans) else " …"
    lines = [head + "".join(row).rstrip() + end for head, row in zip(heads, rows, strict=True)]
    return "\n".join([*lines, _legend(pipeline, many)])


def label(action: Action, many_stages: bool) -> str:
    """`F3`; `F3.1` on stage 1, where a rank has several; `f3` in the second direction."""
    name = f"{action}.{action.stage}" if many_stages and action.kind != "U" else str(action)
    return name.lower() if action.direction else name


def holds_many(pipeline: Pipeline) -> bool:
    """Whether a rank holds several stages of one direction, so that a name must say which."""
    return any(
        len({rank for ranks in homes for rank in ranks}) < pipeline.stages
        for homes in pipeline.homes
    )


def _heads(pipeline: Pipeline) -> list[str]:
    """What stands before each line: the rank, and its stages unless they are plain to see."""
    plain = pipeline.homes == (one_each(pipeline.stages),)
    heads = [f"rank {rank}" for rank in range(pipeline.ranks)]
    if not plain:
        held = ["+".join(map(str, pipeline.held(rank))) for rank in range(pipeline.ranks)]
        heads = [f"{head:<7} stage {stages}" for head, stages in zip(heads, held, strict=True)]
    longest = max(map(len, heads))
    return [f"{head:<{longest}}  " for head in heads]


def _beginning(spans: Sequence[Span], room: int) -> Sequence[Span]:
    """All, or those that end so early that the shortest of all still has a character."""
    lasting = [span.end - span.begin for span in spans if span.end > span.begin]
    if not lasting or max(span.end for span in spans) / min(lasting) < room:
        return spans
    last = max(min(lasting) * (room - 3), min(span.end for span in spans if span.end > span.begin))
    return [span for span in spans if span.end <= last]


def _scale(spans: Sequence[Span], names: Sequence[str], room: int) -> tuple[float, float]:
    """The seconds of the shortest action, and its characters: room for its name and a blank, if
    all of it then fits."""
    lasting = [span.end - span.begin for span in spans if span.end > span.begin]
    if not lasting:
        return 1.0, 0.0
    end = max(span.end for span in spans)
    shortest = max(min(lasting), end / 1e6)  # what is shorter cannot be seen
    characters = min(float(max(map(len, names)) + 1), (room - 1) / (end / shortest))
    # Whole characters, or what lasts equally long would be drawn in different lengths.
    return shortest, int(characters) if characters >= 1 else characters


def _write(row: list[str], begin: int, stop: int, name: str) -> None:
    """The name, with dashes up to `stop`, and a blank after it where there is room for one."""
    if stop <= begin:
        if name == "U":
            _bar(row, begin)
        return
    length = max(1, stop - begin - 1)
    text = name if len(name) <= length else name[0]
    row[begin : begin + length] = text.ljust(length, "-")


def _bar(row: list[str], at: int) -> None:
    """In the blank after the action before, if there is one."""
    for column in (at - 1, at):
        if column >= 0 and row[column] == " ":
            row[column] = "|"
            return


def _legend(pipeline: Pipeline, many_stages: bool) -> str:
    kinds = {action.kind for actions in pipeline.actions for action in actions}
    words = {
        "F": "F forward",
        "B": "B backward",
        "I": "I backward of the input",
        "W": "W of the weights",
        "U": "U or | update",
    }
    parts = [word for kind, word in words.items() if kind in kinds]
    if many_stages:
        parts.append("F3.1 micro-batch 3 on stage 1")
    if len(pipeline.homes) > 1:
        parts.append("small letters: the second direction")
    return ", ".join(parts)
