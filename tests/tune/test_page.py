"""The axes of the page of a study."""

from __future__ import annotations

import pytest

from farandole.tune.page.axes import Axis

pytestmark = pytest.mark.needs("optuna")


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.1, 0.96], ["0.2", "0.4", "0.6", "0.8", "1"]),
        ([-3.0, 4000.0], ["0", "1000", "2000", "3000", "4000"]),
        ([1e-9, 2e-9], ["1e-09", "1.5e-09", "2e-09"]),
        ([5.0], ["4.8", "4.9", "5", "5.1", "5.2"]),
        ([float("nan")], ["-0.04", "-0.02", "0", "0.02", "0.04"]),
    ],
)
def test_values_have_round_ticks_inside_their_axis(values: list[float], texts: list[str]) -> None:
    ticks = Axis.of_values("loss", values).ticks()
    assert [text for _, text in ticks] == texts
    places = [place for place, _ in ticks]
    assert places == sorted(places)
    assert 0 <= places[0] < places[-1] <= 1


def test_bounds_that_were_chosen_are_shown() -> None:
    axis = Axis.of_choice("lr", {"low": 0.001, "high": 0.1, "log": True})
    assert [text for _, text in axis.ticks()] == ["0.001", "0.01", "0.1"]
