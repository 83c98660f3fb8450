"""The sentence that says why a lane won."""

from __future__ import annotations

from farandole.report.history import History, Point
from farandole.report.lane import Lane
from farandole.report.reasons import reason
from farandole.report.standing import Results
from farandole.report.target import Target

TARGET = Target.parse("accuracy=0.9")


def lane(sync: str, seconds: float, waited: float, sent: int, samples: int, n: int = 2) -> Lane:
    end = Point(seconds, samples, 1, waited, sent, {"accuracy": 0.95})
    return Lane(sync, n, "ok", History(points=(end,), last=end, finished=True))


def test_less_waiting_for_more_samples() -> None:
    lanes = (lane("allreduce", 20, 12, 2_000_000, 100), lane("local", 9, 1, 250_000, 130))
    assert reason(Results(lanes, TARGET)) == (
        "Why: up to the target it waited 1.0 s instead of 12.0 s and sent 250 kB instead of 2 MB, "
        "against allreduce, although it needed 1.3 times the samples."
    )


def test_a_serial_lane_explains_nothing() -> None:
    lanes = (lane("serial", 20, 0, 0, 100, n=1), lane("local", 9, 1, 250_000, 100))
    assert reason(Results(lanes, TARGET)) == ""


def test_nothing_is_said_where_nothing_differs() -> None:
    lanes = (lane("a", 20, 5, 100, 100), lane("b", 19, 5, 100, 100))
    assert reason(Results(lanes, TARGET)) == ""
