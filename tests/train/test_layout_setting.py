"""The layout that the command line, or a variable, says to a script."""

from __future__ import annotations

import pytest

from farandole.environment import LAYOUT
from farandole.errors import UserError
from farandole.layout.layout import Layout
from farandole.train.settings import Settings, check_workers, read_layout, write_layout


def test_a_variable_says_it() -> None:
    said = Settings.from_environ({"FARANDOLE_LAYOUT": "stages=4,microbatches=8,recompute"})
    assert said == Settings(layout=Layout(stages=4, microbatches=8, recompute=True))


def test_whole_is_a_layout_and_nothing_said_is_none() -> None:
    """The first wins over the script's own layout, the second leaves it alone."""
    assert Settings.from_environ({LAYOUT: "whole"}).layout == Layout()
    assert Settings.from_environ({LAYOUT: ""}).layout is None
    assert Settings.from_environ({}).layout is None


def test_nonsense_is_named() -> None:
    with pytest.raises(UserError, match="no option 'stage'"):
        Settings.from_environ({LAYOUT: "stage=4"})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(microbatches=4),
        Layout(stages="auto"),
        Layout(stages=2, balance=(3, 4), replicas=(3, 1)),
        Layout(stages=2, cuts=("body.0", "head")),
        Layout(stages=4, schedule="gems", microbatches=8),
        Layout(stages=4, schedule="pipedream", stash=False, memory_gib=1.5),
    ],
)
def test_what_is_written_is_read_back(layout: Layout) -> None:
    assert read_layout(write_layout(layout)) == layout


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_any_number_of_workers_is_right_for_some(workers: int) -> None:
    for layout in (Layout(), Layout(microbatches=4), Layout(stages="auto")):
        check_workers(layout, workers)
