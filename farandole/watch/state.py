"""What a browser is sent: the sections of the page, the numbers of its charts, and an identity.

The identity is a digest of the content. A browser that connects again says which state it has, also
to a server that was started anew, and is sent another one only if there is one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from markupsafe import Markup

from farandole.report.interactive.charts import charts, memory, policy
from farandole.report.interactive.data import page_data
from farandole.report.page import results_of, style_sheet
from farandole.report.sections import (
    Section,
    how_it_was_run,
    race_table,
    repeats,
    sentence,
    title,
    warnings,
)
from farandole.report.standing import Goal, Results
from farandole.report.summary import plain
from farandole.report.templating import fill
from farandole.watch import study
from farandole.watch.source import Watched, over

BEFORE: dict[str, Section] = {
    "title": title,
    "warnings": warnings,
    "repeats": repeats,
    "table": race_table,
}
AFTER: dict[str, Section] = {"memory": memory, "run": how_it_was_run}
POLICY = policy(live=True)


@dataclass(frozen=True)
class State:
    """One moment. `event` is what is sent, as text."""

    id: str
    event: bytes


def state_of(watched: Watched) -> State:
    results = _results(watched)
    content = {
        "title": _title(watched, results),
        "sections": {**_filled(BEFORE, watched, results), **_filled(AFTER, watched, results)},
        "data": page_data(results),
    }
    digest = hashlib.sha256(_json(content)).hexdigest()[:32]
    count = len(watched.lanes)
    when = f"{datetime.now():%H:%M:%S}, {over(watched.lanes)} of {count} runs over"
    body = _json({**content, "when": when})
    return State(digest, b"id: %b\nevent: state\ndata: %b\n\n" % (digest.encode(), body))


def live_page(watched: Watched, events: str) -> bytes:
    """The page at its opening. `events`: the address from which it is told of changes."""
    results = _results(watched)
    parts = [fill("live.html", events=events), *_placed(BEFORE, watched, results)]
    parts += [Markup(charts(results, live=True)), *_placed(AFTER, watched, results)]
    made = fill(
        "page.html",
        title=_title(watched, results),
        policy=POLICY,
        style=style_sheet(),
        sections=parts,
    )
    return made.encode("utf-8", "replace")


def _placed(sections: dict[str, Section], watched: Watched, results: Results) -> list[Markup]:
    """Each in an element of its own, so that it can be replaced."""
    return [
        fill("live_section.html", name=name, section=Markup(text))
        for name, text in _filled(sections, watched, results).items()
    ]


def _filled(sections: dict[str, Section], watched: Watched, results: Results) -> dict[str, str]:
    """A study has its own title and table: its trials are no strategies, and may be many."""
    own: dict[str, str] = {}
    if watched.study is not None:
        own = {
            "title": study.title(watched.study),
            "table": study.trials(watched.study),
            "memory": "",
            "run": study.how_it_was_run(watched.study),
        }
    return {
        name: own[name] if name in own else str(section(results))
        for name, section in sections.items()
    }


def _title(watched: Watched, results: Results) -> str:
    return plain(sentence(results) if watched.study is None else study.sentence(watched.study))


def _results(watched: Watched) -> Results:
    results = results_of(watched.lanes, watched.target, watched.facts)
    if watched.study is None:
        return results
    return replace(results, judged_by=Goal(watched.study.metric, watched.study.higher_is_better))


def _json(value: Any) -> bytes:
    """On one line, as an event must be; what is no text is replaced."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
