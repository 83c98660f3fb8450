"""A training whose workers come and go, look by look: see tests/support/rehearsal.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farandole.launch.policies.elastic.restarts import Restarts
from farandole.worker.elastic import HostChanges
from tests.support.rehearsal import TrainingRehearsal

Make = Callable[..., TrainingRehearsal]


@pytest.fixture
def rehearse() -> Iterator[Make]:
    made: list[TrainingRehearsal] = []

    def make(
        workers: int = 3, hosts: dict[str, int] | None = None, **options: Any
    ) -> TrainingRehearsal:
        settings = {"workers": workers, "max_workers": workers, **options}
        made.append(TrainingRehearsal(hosts or {"localhost": workers}, **settings))
        made[-1].look()
        first = made[-1].hear(made[-1].say("new", *range(workers)))
        assert first["members"] == list(range(workers))
        assert not first["admits"]
        return made[-1]

    yield make
    for rehearsal in made:
        rehearsal.close()


def test_survivors_do_not_wait_for_the_replacement(rehearse: Make) -> None:
    play = rehearse(restarts=1)
    play.end(0)
    play.look()
    assert set(play.workers()) == {1, 2, 3}
    second = play.hear(play.say("broken", 1, 2))
    assert second["members"] == [1, 2]
    assert not second["admits"]
    promised = play.hear(play.say("new", 3))
    assert promised["is_promise"]
    assert promised["rank"] == 2
    assert not play.is_announced(1)
    ready = play.say("new", 3)
    play.look()
    assert play.is_announced(1)
    third = play.hear(ready | play.say("state", 1, 2))
    assert third["members"] == [1, 2, 3]
    assert third["admits"]


def test_a_newcomer_waits_while_a_step_is_finished(rehearse: Make) -> None:
    """One was told to let it in, the other lost a peer: first they finish the step."""
    play = rehearse(4, restarts=2)
    play.end(3)
    play.hear(play.say("broken", 0, 1, 2))
    play.hear(play.say("new", 4))
    ready = play.say("new", 4)
    play.end(2)
    between, broken = play.say("state", 0), play.say("broken", 1)
    again = play.hear(between | broken)
    assert again["members"] == [0, 1]
    assert not again["admits"]
    assert not ready[4].done()
    assert play.hear(ready | play.say("state", 0, 1))["members"] == [0, 1, 4]


def test_fewer_than_min_wait_for_replacements_that_are_ready(rehearse: Make) -> None:
    play = rehearse(3, min_workers=2, restarts=1)
    play.end(1)
    play.end(2)
    play.look()
    broken = play.say("broken", 0)
    play.look()
    assert not broken[0].done()
    play.hear(play.say("new", 3))
    play.look()
    assert not broken[0].done()  # it is not ready yet
    ready = play.say("new", 3)
    assert play.hear(broken)["members"] == [0]
    assert play.hear(ready | play.say("state", 0))["members"] == [0, 3]


def test_too_few_and_no_restart(rehearse: Make, capfd: pytest.CaptureFixture[str]) -> None:
    play = rehearse(2, min_workers=2)
    play.end(1)
    play.look_until(lambda: play.policy.failure)
    assert play.policy.outcome(None).exit_code == 137
    assert "1 worker is left, --min is 2, and all 0 restarts" in capfd.readouterr().err


def test_nobody_is_left(rehearse: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """All are started again, and those that were about to join are of no use."""
    play = rehearse(2, restarts=4)
    play.end(0)
    play.look()
    assert set(play.workers()) == {1, 2}
    play.end(1)
    play.look_until(lambda: set(play.workers()) == {3, 4})
    first = play.hear(play.say("new", 3, 4))
    assert first["members"] == [3, 4]
    assert (first["life"], first["admits"]) == (1, False)
    assert "all are started again, and go on from the last checkpoint" in capfd.readouterr().err


def test_the_same_exception_twice_ends_the_job(
    rehearse: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse(3, restarts=5, command=RAISES)
    (play.pool.directory.folder / "0").touch()
    play.look_until(lambda: 0 not in play.workers())
    play.hear(play.say("broken", 1, 2, step=7))
    (play.pool.directory.folder / "1").touch()
    play.look_until(lambda: 1 not in play.workers())
    play.say("broken", 2, step=8)
    play.look_until(lambda: play.policy.failure)
    assert play.policy.outcome(None).failure is not None
    assert "failed in the same way without progress" in capfd.readouterr().err


RAISES = (
    'd=$(dirname "$TORCHELASTIC_ERROR_FILE"); '
    'until [ -e "$d/$FARANDOLE_ELASTIC_WORKER" ]; do sleep 0.05; done; '
    "echo 'Traceback (most recent call last):' >&2; echo 'ValueError: bad sample' >&2; exit 1"
)


def test_a_straggler_is_named_or_replaced(
    rehearse: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse(2)
    HostChanges(play.environment(0)).tell_straggler(0, 1)
    play.look()
    assert set(play.workers()) == {0, 1}
    assert "--replace-stragglers replaces it" in capfd.readouterr().err
    play = rehearse(2, restarts=1, replace_stragglers=True)
    HostChanges(play.environment(0)).tell_straggler(0, 1)
    play.look_until(lambda: set(play.workers()) == {0, 2})
    assert "three times slower than the median for a minute, and was ended" in (
        capfd.readouterr().err
    )


def test_restarts_wait_longer_and_longer() -> None:
    restarts = Restarts(3)
    restarts.note_failure(100.0)
    assert restarts.take(2, 100.0) == 2
    restarts.note_failure(100.1)
    assert restarts.take(1, 100.5) == 0
    assert restarts.take(1, 100.7) == 1
    assert restarts.take(1, 500.0) == 0
    assert restarts.left == 0


def test_a_removed_host_loses_its_workers_between_two_steps(
    rehearse: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """With it rank 0. New slots take no restart."""
    play = rehearse(2, max_workers=3, hosts={"a": 1, "b": 1})
    play.discovery.hosts = {"b": 1, "c": 2}
    play.look()
    assert set(play.workers()) == {0, 1, 2, 3}
    assert play.is_announced(0)
    asked = play.say("state", 0, 1)
    play.look_until(lambda: asked[0].done())
    with pytest.raises(SystemExit):
        asked[0].result()
    assert play.hear({1: asked[1]})["members"] == [1]
    play.end(0)
    play.look()
    assert set(play.workers()) == {1, 2, 3}
    play.hear(play.say("new", 2))
    play.hear(play.say("new", 3))
    ready = play.say("new", 2, 3)
    assert play.hear(ready | play.say("state", 1))["members"] == [1, 2, 3]
    assert "rank 0 is on host b: what the run logs" in capfd.readouterr().err


def test_a_host_on_which_workers_keep_failing_is_left_out(
    rehearse: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse(2, restarts=9, hosts={"a": 1, "b": 1})
    play.end(1)
    play.look_until(lambda: 2 in play.workers())
    play.end(2)
    play.look_until(lambda: 3 in play.workers())
    play.end(3)
    play.look()
    assert set(play.workers()) == {0}
    assert "b is left out for 60 s: workers keep failing there" in capfd.readouterr().err


def test_workers_beyond_the_first_ones_come_later_and_take_no_restart(rehearse: Make) -> None:
    play = rehearse(2, {"localhost": 4}, max_workers=4)
    play.look_until(lambda: set(play.workers()) == {0, 1, 2, 3})
    assert [play.hear(play.say("new", worker))["is_promise"] for worker in (2, 3)] == [True, True]
    ready = play.say("new", 2, 3)
    play.look()
    assert play.is_announced(0)
    assert play.hear(ready | play.say("state", 0, 1))["members"] == [0, 1, 2, 3]
