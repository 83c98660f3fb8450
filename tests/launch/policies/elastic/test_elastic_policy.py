"""An elastic job's decisions, look by look: the processes only sleep, and the test speaks for them.

What they say to the launcher, and hear from it, goes through a real store.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.environment import ELASTIC_WORKER
from farandole.errors import LaunchError
from farandole.launch.policies.elastic import late_workers
from farandole.launch.policies.elastic.rendezvous_server import RendezvousServer
from farandole.launch.watches import exit_watch
from farandole.worker.elastic import (
    LauncherLostError,
    generation,
    next_assignment,
    note_state,
)
from farandole.worker.store.job_store import JobStore
from tests.support.rehearsal import Rehearsal


@pytest.fixture
def rehearse() -> Iterator[Callable[..., Rehearsal]]:
    made: list[Rehearsal] = []

    def make(*arguments: object, **options: object) -> Rehearsal:
        made.append(Rehearsal(*arguments, **options))  # type: ignore[arg-type]
        made[-1].look()
        return made[-1]

    yield make
    for rehearsal in made:
        rehearsal.close()


def test_a_killed_worker_is_replaced_and_a_survivor_becomes_rank_0(
    rehearse: Callable[..., Rehearsal], capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse({"localhost": 2, "127.0.0.1": 1})
    assert play.ranks(0, 1, 2) == {0: (0, 0), 1: (1, 1), 2: (2, 0)}
    assert play.environments[2] | {"RANK": "2", "WORLD_SIZE": "3"} == play.environments[2]
    play.end(0)
    play.look()
    assert set(play.workers()) == {1, 2, 3}
    asked = play.ask(1, 2)
    play.look()
    assert not play.told(asked)  # the new one is waited for
    assert play.answers(asked | play.ask(3)) == {1: (0, 0), 3: (1, 1), 2: (2, 0)}
    assert generation(play.environments[3]) == 1
    assert capfd.readouterr().err.splitlines() == [
        "farandole: worker 0 on localhost (rank 0) was killed by SIGKILL; another takes its place",
        "farandole: generation 1: 3 workers on localhost:2, 127.0.0.1:1; rank 0 is worker 1",
    ]


def test_an_added_host_is_announced_when_its_workers_are_ready(
    rehearse: Callable[..., Rehearsal],
) -> None:
    play = rehearse({"a": 1}, max_workers=2)
    play.ranks(0)
    play.discovery.hosts = {"a": 1, "b": 2}
    play.look()
    assert set(play.workers()) == {0, 1}  # not more than two
    assert play.changed(0) is None
    newcomer = play.ask(1)
    play.look()
    assert play.changed(0) == "added"
    assert not play.told(newcomer)
    assert play.answers(newcomer | play.ask(0)) == {0: (0, 0), 1: (1, 0)}
    assert play.changed(0) is None


def test_the_workers_of_a_removed_host_leave_with_0(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 1, "b": 2})
    play.ranks(0, 1, 2)
    play.discovery.hosts = {"b": 1}  # and one slot less there
    play.look()
    assert play.changed(0) == play.changed(1) == "removed"
    asked = play.ask(0, 1, 2)
    assert play.answers({1: asked[1]}) == {1: (0, 0)}
    assert play.leaves(asked[0])
    assert play.leaves(asked[2])
    play.end(2, signal.SIGTERM)  # one that is to leave may end as it likes
    assert play.policy.failure is None
    assert set(play.workers()) == {0, 1}


def test_a_host_that_cannot_reach_the_launcher(
    rehearse: Callable[..., Rehearsal], capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse({"a": 1})
    play.ranks(0)
    play.discovery.hosts = {"a": 1, "far": 2}
    play.look()
    assert set(play.workers()) == {0}
    assert "farandole: far: not used, because the job began on this" in capfd.readouterr().err


def test_it_begins_with_as_many_as_are_wanted_and_goes_on_with_fewer(
    rehearse: Callable[..., Rehearsal],
) -> None:
    play = rehearse({"a": 2}, workers=3, min_workers=2)
    assert not play.workers()
    play.discovery.hosts = {"a": 2, "b": 1}
    play.look()
    play.ranks(0, 1, 2)
    play.discovery.hosts = {"a": 2}
    play.look()
    asked = play.ask(0, 1, 2)
    assert len(play.answers({0: asked[0], 1: asked[1]})) == 2


def test_too_few_hosts(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 2}, min_workers=2, start_timeout_seconds=1.5)
    play.ranks(0, 1)
    play.discovery.hosts = {"a": 1}
    play.discovery.error = LaunchError("the script failed")
    with pytest.raises(
        LaunchError,
        match=r"2 workers are needed, and in 1.5 s there were slots for 1 \(hosts: a:1\); the last "
        r"question for hosts failed \(the script failed\)\. Check",
    ):
        play.look_until(lambda: False)


def test_hosts_that_come_in_time_are_taken(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 2}, min_workers=2)
    play.ranks(0, 1)
    play.discovery.hosts = {"a": 1}
    play.look()
    asked = play.ask(0, 1)
    play.look()
    assert not asked[0].done()
    play.discovery.hosts = {"a": 1, "c": 1}
    play.look()
    assert play.answers({0: asked[0]} | play.ask(2)) == {0: (0, 0), 2: (1, 0)}


def test_the_state_does_not_go_with_the_hosts(rehearse: Callable[..., Rehearsal]) -> None:
    """Where all hosts are replaced at once nobody is let go, and nobody new begins from nothing."""
    play = rehearse({"a": 1}, start_timeout_seconds=1.5)
    play.ranks(0)
    play.discovery.hosts = {"b": 1}
    with pytest.raises(LaunchError, match="all hosts of generation 0 were removed at once"):
        play.look_until(lambda: False)
    assert set(play.workers()) == {0}


def test_the_limit_of_resets(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 1}, reset_limit=1)
    play.ranks(0)
    play.ranks(0)
    with pytest.raises(LaunchError, match=r"change for the 2\. time, and the limit is 1\."):
        play.ranks(0)


def test_when_nobody_has_the_state_the_job_has_failed(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 2})
    play.ranks(0, 1)
    play.end(0)
    play.look()
    assert set(play.workers()) == {1, 2}
    play.ask(2)
    play.end(1)
    assert play.policy.failure is not None
    assert play.policy.failure.killed_by == "SIGKILL"
    assert play.policy.is_finished()


def test_a_script_that_cannot_work_is_not_started_for_ever(
    rehearse: Callable[..., Rehearsal], capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse({"a": 1}, "echo no such thing >&2; exit 3")
    play.look_until(lambda: play.policy.is_finished())
    assert play.policy.failure is not None
    assert (play.policy.failure.exit_code, play.policy.failure.error) == (3, "no such thing")
    failed = "on a (before it had a rank) failed: no such thing; "
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[")]
    assert said == [
        f"farandole: worker 0 {failed}another takes its place",
        f"farandole: worker 1 {failed}another takes its place",
        f"farandole: worker 2 {failed}a is left out: 3 times that without a commit in between",
        "farandole: without a there are too few slots to go on",
    ]


def test_a_bad_host_is_left_out_and_the_others_go_on(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 1, "b": 1})
    play.ranks(0, 1)
    for new in (2, 3, 4):
        play.changed(0)  # commits do not help those that fail before they have a rank
        play.end(new - 1)
        play.look()
        if new < 4:
            assert set(play.workers()) == {0, new}
    assert set(play.workers()) == {0}
    assert play.ranks(0) == {0: (0, 0)}


def test_commits_forgive(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 2})
    play.ranks(0, 1)
    for new in range(2, 6):
        play.changed(0)
        play.end(new - 1)
        play.look()
        assert play.ranks(0, new) == {0: (0, 0), new: (1, 1)}


def test_without_commits_failing_in_generation_after_generation_is_not_forgiven(
    rehearse: Callable[..., Rehearsal],
) -> None:
    play = rehearse({"a": 2})
    play.ranks(0, 1)
    for new in (2, 3):
        play.end(new - 1)
        play.look()
        play.ranks(0, new)
    play.end(3)
    play.look()
    assert play.policy.failure is not None


def test_rank_0s_end_is_the_end(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 4}, "trap 'exit 0' USR1; sleep 600 & wait")
    play.ranks(0, 1, 2, 3)
    play.discovery.hosts = {"a": 4, "b": 1}
    play.look()
    assert set(play.workers()) == {0, 1, 2, 3, 4}
    play.end(1, signal.SIGUSR1)
    play.look()
    assert set(play.workers()) == {0, 2, 3, 4}  # nobody for 1: the others are about to end
    play.end(0, signal.SIGUSR1)
    play.look_until(lambda: 4 not in play.workers())  # it has nothing to do any more
    assert play.leaves(play.ask(2)[2])  # its last collective broke
    play.end(3)
    play.end(2)
    assert play.policy.failure is None
    assert play.policy.lost == [3]
    assert play.policy.is_finished()


def test_another_rank_may_end_before_the_last_reset(rehearse: Callable[..., Rehearsal]) -> None:
    """Rank 0's last collective breaks: it goes back to its commit, with a new worker beside it."""
    play = rehearse({"a": 2}, "trap 'exit 0' USR1; sleep 600 & wait", min_workers=2)
    play.ranks(0, 1)
    play.end(1, signal.SIGUSR1)
    asked = play.ask(0)
    play.look()
    assert set(play.workers()) == {0, 2}
    assert play.answers(asked | play.ask(2)) == {0: (0, 0), 2: (1, 1)}


def test_a_script_without_hvd_just_ends(rehearse: Callable[..., Rehearsal]) -> None:
    play = rehearse({"a": 2}, "exit 0")
    play.look_until(lambda: play.policy.is_finished())
    assert play.policy.failure is None
    assert play.policy.started == 2


def test_one_that_all_wait_for_is_ended(
    rehearse: Callable[..., Rehearsal], capfd: pytest.CaptureFixture[str]
) -> None:
    play = rehearse({"a": 2}, start_timeout_seconds=1.5)
    play.ranks(0, 1)
    play.ask(0)
    play.look_until(lambda: 1 not in play.workers())
    assert capfd.readouterr().err.startswith(
        "farandole: worker 1 on a (rank 1) did not ask for its new rank within 1.5 s, and was "
        "ended; "
    )


def test_one_that_is_stuck_is_ended_when_collectives_have_broken(
    rehearse: Callable[..., Rehearsal],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before the time that new workers have, and sooner when it is stopped."""
    monkeypatch.setattr(late_workers, "_STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(late_workers, "_NAMED_SECONDS", 0.5)
    play = rehearse({"a": 3}, answer_seconds=2.0)
    play.ranks(0, 1, 2)
    os.kill(play.workers()[1], signal.SIGSTOP)
    play.look()
    assert set(play.workers()) == {0, 1, 2}  # nobody waits for it yet
    running = play.workers()[2]
    asked = play.ask(0)
    play.look_until(lambda: set(play.workers()) == {0, 3, 4})
    assert play.answers(asked | play.ask(3, 4)) == {0: (0, 0), 3: (1, 1), 4: (2, 2)}
    place = "another takes its place"
    said = [line.removeprefix("farandole: ") for line in capfd.readouterr().err.splitlines()]
    assert sorted(said) == sorted(
        [
            "generation 1: 3 workers on a:3; rank 0 is worker 0",
            "worker 1 on a (rank 1) was stopped (SIGSTOP), and did not ask for its new rank, "
            f"and was ended; {place}",
            f"waiting for worker 2 (process {running} on a, running) to ask for its new rank; "
            "it is ended after 2 s",
            "worker 2 on a (rank 2) did not ask for its new rank within 2 s, and was ended; "
            f"{place}",
        ]
    )


def test_one_that_runs_on_when_rank_0_is_done_is_ended(
    rehearse: Callable[..., Rehearsal],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exit_watch, "_STOPPED_SECONDS", 0.5)
    play = rehearse({"a": 2}, "trap 'exit 0' USR1; sleep 600 & wait")
    play.ranks(0, 1)
    os.kill(play.workers()[1], signal.SIGSTOP)
    play.end(0, signal.SIGUSR1)
    play.look_until(lambda: play.policy.is_finished())
    assert play.policy.failure is None
    assert play.policy.lost == [1]
    assert "worker 1 on a (rank 1) was stopped (SIGSTOP) for" in capfd.readouterr().err


def test_one_that_never_got_the_state_does_not_become_rank_0(
    rehearse: Callable[..., Rehearsal],
) -> None:
    """Worker 3 takes 0's place and is rank 1, when 1, which is to send it the state, dies too."""
    play = rehearse({"a": 2, "b": 1})
    play.ranks(0, 1, 2)
    for worker in (1, 2):
        note_state(play.environments[worker])
    play.end(0)
    play.look()
    assert play.ranks(1, 2, 3) == {1: (0, 0), 3: (1, 1), 2: (2, 0)}
    play.end(1)
    play.look()
    asked = play.ask(3) | play.ask(2, 4)
    assert play.answers(asked) == {2: (0, 0), 3: (1, 0), 4: (2, 1)}
    play.end(2)
    play.look()
    play.ask(3, 4)
    play.look()
    assert play.policy.failure is not None  # else they would begin from nothing
    assert play.policy.is_finished()


def test_a_launcher_without_a_pulse(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    rendezvous = RendezvousServer(store)
    rendezvous.expect(5)
    environ = {ELASTIC_WORKER: "5", **store.here().variables()}
    with pytest.raises(
        LauncherLostError, match=r"worker 5 waits for its rank after generation -1, and the"
    ):
        next_assignment(environ, -1, timedelta(seconds=0.1))
    store.close()
