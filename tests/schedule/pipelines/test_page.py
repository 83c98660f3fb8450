"""The page about pipelines and the tables in the code: what they show is what is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from farandole.schedule.pipelines import (
    SCHEMES,
    STREAMS,
    Costs,
    Pipeline,
    build,
    gems,
    interleaved,
    orders,
    pipedream,
    simulate,
    stream,
    streams,
    text,
    two_versions,
    zero_bubble,
)

PAGE = (Path(__file__).parents[3] / "docs" / "pipeline_schedules.md").read_text()


def test_the_code_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "docs/pipeline_schedules.md", "exec"), {})
    promised = [comment for comment in re.findall(r"  # (.*)", block) if "returns" not in comment]
    assert capsys.readouterr().out.splitlines() == promised


def test_the_drawings_are_those_of_the_schedules() -> None:
    drawn = {
        build("interleaved", 4, 2): 1.0,
        build("zero-bubble", 3, 4): 2.0,
        build("layer", 3, 2, pairs=1): 2.0,
        stream("pipedream", 3, 1).unroll(5): 2.0,
    }
    for pipeline, backward in drawn.items():
        costs = Costs.even(pipeline.stages, 1.0, backward)
        lines = simulate(pipeline, costs).draw().splitlines()[:-1]
        assert "```text\n{}\n```".format("\n".join(lines)) in PAGE, pipeline.name


def test_every_scheme_is_described() -> None:
    for name in (*SCHEMES, *STREAMS):
        assert f"\n| `{name}`" in PAGE
        assert f"\n**`{name}`**" in PAGE


TABLES: list[tuple[Any, Pipeline]] = [
    (orders.layer, build("layer", 3, 2)),
    (orders.gpipe, build("gpipe", 3, 4)),
    (orders.one_forward_one_backward, build("1f1b", 3, 4)),
    (interleaved, build("interleaved", 4, 2)),
    (zero_bubble, build("zero-bubble", 3, 4)),
    (gems, build("layer", 3, 2, pairs=1)),
    (pipedream, stream("pipedream", 3, 1).unroll(9)),
    (two_versions, stream("2bw", 2, 2).unroll(4)),
    (streams, stream("pipedream", 3, 1).unroll(4)),
    (text, build("1f1b", 3, 4)),
]


@pytest.mark.parametrize(
    ("where", "pipeline"), TABLES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_tables_in_the_code_are_those_of_the_schedules(where: Any, pipeline: Pipeline) -> None:
    rows = re.findall(r"^ *rank (\d)  (.*)$", where.__doc__, re.MULTILINE)
    assert len(rows) == pipeline.ranks
    many = text.holds_many(pipeline)
    for rank, row in rows:
        shown = re.findall(r"[FBIWfb]\d(?:\.\d)?|[U|]", row.split("depth")[0])
        built = [text.label(action, many) for action in pipeline.actions[int(rank)]]
        # A table may leave out the update, which is in all of them, and the end of a stream.
        updates = "U" in row or "|" in row
        expected = [name for name in built if updates or name != "U"][: len(shown)]
        assert [name.replace("|", "U") for name in shown] == expected
        assert len(shown) == len(expected) >= 4
