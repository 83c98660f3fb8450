"""Reading what runs logged, ranking them, and drawing the report of a race.

Only what is quick to import is imported here. The page needs matplotlib, which takes a second:
`from farandole.report.page import write_report`, where a race is over and nobody waits for it.
"""

from __future__ import annotations

from farandole.report.history import Counters, Follower, History, Note, Point, read_history
from farandole.report.lane import Lane, Outcome, outcome_of
from farandole.report.notice import TargetNotice
from farandole.report.standing import Results, Standing, rank, require_metric
from farandole.report.summary import headline, plain, table
from farandole.report.target import Target

__all__ = [
    "Counters",
    "Follower",
    "History",
    "Lane",
    "Note",
    "Outcome",
    "Point",
    "Results",
    "Standing",
    "Target",
    "TargetNotice",
    "headline",
    "outcome_of",
    "plain",
    "rank",
    "read_history",
    "require_metric",
    "table",
]
