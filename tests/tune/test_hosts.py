"""Which trials of a study run on which hosts."""

from __future__ import annotations

import pytest

from farandole.errors import UserError

pytestmark = pytest.mark.needs("optuna")


@pytest.mark.parametrize(
    ("slots", "workers", "parts"),
    [
        ({"a": 4, "b": 2}, 2, [({"a": 2}, 0), ({"a": 2}, 2), ({"b": 2}, 0)]),
        ({"a": 3, "b": 1}, 2, [({"a": 2}, 0)]),  # all trials are alike: none is on two hosts
        ({"a": 4, "b": 4}, 6, [({"a": 4, "b": 2}, 0)]),
        ({"a": 1, "b": 1, "c": 1, "d": 2}, 3, [({"a": 1, "b": 1, "c": 1}, 0)]),
    ],
)
def test_as_many_as_there_is_room_for(
    slots: dict[str, int], workers: int, parts: list[tuple[dict[str, int], int]]
) -> None:
    from farandole.tune.hosts import pack

    assert [(part.workers, part.first) for part in pack(slots, workers)] == parts


def test_a_trial_that_fits_nowhere() -> None:
    from farandole.tune.hosts import pack

    with pytest.raises(UserError, match=r"-n 7: .* room for 6 .a:4, b:2."):
        pack({"a": 4, "b": 2}, 7)
