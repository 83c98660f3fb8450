"""Jobs that cannot go on without a lost worker: all start again, from the last checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farandole.environment import ATTEMPT, NAME
from farandole.errors import LaunchError
from farandole.launch.job import Job, LostResourceError, Outcome
from farandole.launch.policies.elastic import restarts
from farandole.launch.probes.problems import UnfitHostsError
from farandole.launch.restarting import launch_with_restarts
from farandole.topology import Topology
from farandole.worker.failure import Failure, Kind
from farandole.worker.run_report import RunReport

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"
PIPELINE = ["-n", "4", "--no-fork", "--layout", "stages=2,microbatches=2,balance=2+2"]
KILLED = Outcome(Failure(1, -9, "", 0), (1,))
RAISED = Outcome(Failure(1, 1, "Traceback …\nValueError: no luck\n", 0), (1,))
DONE = Outcome()


def weights(run: Path) -> dict[str, bytes]:
    """The files of the model and the optimizer in the newest checkpoint."""
    newest = max((run / "checkpoints").glob("[0-9]*"))
    return {path.name: path.read_bytes() for path in sorted(newest.glob("[mo]*.safetensors"))}


def logged_epochs(run: Path) -> list[int]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"]["epoch"] for line in lines if line["event"] == "log"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (PIPELINE, "spreads a model over several workers"),
        (["-n", "2", "--pretend-hosts", "2", "--sync", "daso"], "state that only they hold"),
    ],
    ids=["stages", "daso"],
)
def test_killed_workers_cost_the_steps_since_the_last_checkpoint(
    sandbox: Sandbox, words: list[str], why: str
) -> None:
    """Twice, in the middle of an epoch, also rank 0; the weights are those of a job in peace."""
    policy = ["--checkpoint", "every=4steps"]
    peace = sandbox.farandole("run", *words, *policy, "--name", "peace", SCRIPT)
    assert peace.returncode == 0, peace.stderr
    doomed = ["1:9:kill:0", "0:15:kill:1"]
    done = sandbox.farandole("run", *words, *policy, "--restarts", "3", SCRIPT, *doomed)
    assert done.returncode == 0, done.stderr
    assert why in done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "rank 0 was killed by SIGKILL" in done.stderr
    assert re.search(
        r"workers start again \(2 of 3 restarts\), .*from runs/restarted-", done.stderr
    )
    assert "from the beginning" not in done.stderr

    (run,) = (sandbox.folder / "runs").glob("restarted-*")
    assert weights(run) == weights(sandbox.folder / "runs" / "peace")
    assert sorted(set(logged_epochs(run))) == [0, 1, 2]  # in one log, those of lost steps twice


def test_without_checkpoints_it_says_that_it_begins_anew(sandbox: Sandbox) -> None:
    words = ["-n", "2", "--layout", "stages=2,microbatches=2,balance=2+2", "--restarts", "1"]
    done = sandbox.farandole("run", *words, SCRIPT, "1:8:kill:0")
    assert done.returncode == 0, done.stderr
    assert "only a script that saves and loads by itself has one" in done.stderr
    assert "from the beginning: it has neither saved nor loaded a checkpoint" in done.stderr
    (run,) = (sandbox.folder / "runs").glob("restarted-*")
    assert logged_epochs(run) == [0, 1, 2]


def test_the_same_exception_twice_ends_the_job(sandbox: Sandbox) -> None:
    words = ["-n", "2", "--sync", "local:every=5", "--restarts", "9"]
    policy = ["--checkpoint", "every=4steps"]
    done = sandbox.farandole("run", *words, *policy, SCRIPT, "1:3:raise:*")
    assert done.returncode == 1
    assert done.stderr.count("workers start again (") == 1
    assert "it has failed twice in the same way" in done.stderr
    assert "ValueError: sample 3 cannot be read" in done.stderr.split("not started again")[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_job_that_is_stopped_is_not_started_again(
    sandbox: Sandbox, number: signal.Signals, code: int
) -> None:
    words = ["-n", "2", "--sync", "local:every=5", "--restarts", "9"]
    job = sandbox.start_farandole("run", *words, SCRIPT, "1:3:hang:*")
    hangs = sandbox.folder / "hangs"
    sandbox.wait_until(lambda: hangs.exists() or job.poll() is not None, "it trains")
    os.kill(job.pid, number)
    _, said = job.communicate(timeout=100)
    assert job.returncode == code, said
    assert "start again (" not in said
    sandbox.wait_until_gone()


def test_a_script_that_asks_for_what_cannot_be_is_not_started_again(sandbox: Sandbox) -> None:
    words = ["-n", "2", "--sync", "local:every=5", "--restarts", "9"]
    done = sandbox.farandole("run", *words, SCRIPT, "1:3:refuse:*")
    assert done.returncode == 1
    assert "start again (" not in done.stderr
    assert "batch_size=-1 must be above 0" in done.stderr


SCHEDULED = """
import torch, farandole as fd
run = fd.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = run.distribute(model, optimizer)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for epoch in run.epochs(1):
    raise SystemExit(7)
"""


def test_a_script_that_could_not_go_on_is_refused_at_its_start(sandbox: Sandbox) -> None:
    words = ["--sync", "local:every=5", "--restarts", "9", "--checkpoint", "every=4steps"]
    script = sandbox.script("scheduled.py", SCHEDULED)
    done = sandbox.farandole("run", "-n", "2", *words, script)
    assert done.returncode == 1
    assert "with --restarts the script must go on from its checkpoints, and" in done.stderr
    assert "start again (" not in done.stderr


# Without processes


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_SECONDS", 0.001)


class Attempts:
    """Stands in for a launcher: each call ends as it is told, in turn."""

    def __init__(self, *ends: Outcome | Exception | Callable[[], Outcome]) -> None:
        self._ends = list(ends)
        self.jobs: list[Job] = []
        self.lost: list[frozenset[str]] = []

    def __call__(self, job: Job, lost: frozenset[str]) -> Outcome:
        self.jobs.append(job)
        self.lost.append(lost)
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end() if callable(end) else end


def run(most: int, launch: Attempts) -> Outcome:
    return launch_with_restarts(launch, Job(2, ["train.py"]), Topology.single(2), most)


def at(
    steps: int, checkpoint: int | None, *, resumes: bool = True, of: Outcome = KILLED
) -> Outcome:
    saved = None if checkpoint is None else f"runs/x/checkpoints/{checkpoint:06}"
    report = RunReport("x", steps, 1, saved, checkpoint or 0, 1, resumes)
    return Outcome(of.failure, of.failed, report=report)


@pytest.mark.usefixtures("no_pauses")
def test_the_next_attempt_has_the_name_that_the_first_has_found() -> None:
    launch = Attempts(at(7, 4), KILLED, DONE)
    assert run(5, launch) == DONE
    told = [(job.environment[ATTEMPT], job.environment.get(NAME)) for job in launch.jobs]
    assert told == [("0", None), ("1", "x"), ("2", "x")]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (at(19, 12), "from runs/x/checkpoints/000012 (step 12, epoch 1): 7 steps or a few more"),
        (at(19, 12, resumes=False), "unless the script loads runs/x/checkpoints/000012 itself"),
        (
            at(19, None),
            "from the beginning: it has neither saved nor loaded a checkpoint so far. `",
        ),
        (KILLED, "from the beginning: no worker had come through fd.init()"),
    ],
)
def test_it_says_what_it_goes_on_from(
    end: Outcome, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(1, Attempts(end, DONE))
    shown = capsys.readouterr().err
    assert "rank 1 was killed by SIGKILL" in shown
    assert "all 2 workers start again (1 of 1 restarts), " in shown
    assert said in shown


@pytest.mark.parametrize(
    "end",
    [
        Outcome(stopped_by="SIGINT"),
        Outcome(stopped_by="SIGUSR1"),  # told to save, and has left
        Outcome(KILLED.failure, (1,), received="SIGINT"),
        Outcome(Failure(1, -signal.SIGINT, "", 0), (1,)),
        Outcome(Failure(1, -signal.SIGUSR1, "", 0), (1,)),
        Outcome(Failure(1, 2, "usage: train.py [--epochs N]", 0), (1,)),
        Outcome(Failure(1, 1, "UserError: no", 0, is_user_error=True), (1,)),
    ],
)
def test_what_is_no_failure_is_not_started_again(end: Outcome) -> None:
    assert run(9, Attempts(end)) == end


@pytest.mark.usefixtures("no_pauses")
def test_restarts_are_used_up(capsys: pytest.CaptureFixture[str]) -> None:
    launch = Attempts(KILLED, KILLED, KILLED)
    assert run(2, launch) == KILLED
    assert len(launch.jobs) == 3
    assert "all 2 restarts are used up" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pauses")
def test_the_same_words_are_fatal_only_without_a_newer_checkpoint() -> None:
    further = [at(9, 4, of=RAISED), at(19, 12, of=RAISED), at(29, 20, of=RAISED), DONE]
    assert run(9, Attempts(*further)) == DONE
    launch = Attempts(at(9, 4, of=RAISED), at(9, 4, of=RAISED))
    assert run(9, launch).failure == RAISED.failure
    launch = Attempts(RAISED, RAISED)  # before fd.init
    assert run(9, launch) == RAISED
    # From the beginning each time: a checkpoint with a higher number is no progress.
    again = RunReport("x", 9, 0, "runs/x/checkpoints/000002", 4)
    launch = Attempts(at(9, 4, of=RAISED), Outcome(RAISED.failure, (1,), report=again))
    assert run(9, launch).failure == RAISED.failure


@pytest.mark.usefixtures("no_pauses")
def test_who_only_follows_a_lost_worker_says_nothing_of_the_script() -> None:
    followed = Outcome(Failure(0, 1, "CommError: lost", 0, Kind.FOLLOWED), (0,))
    assert run(9, Attempts(followed, followed, DONE)) == DONE


@pytest.mark.usefixtures("no_pauses")
def test_workers_that_cannot_be_started_are_tried_again_but_not_at_first() -> None:
    gone = LaunchError("host node2 does not answer.")
    with pytest.raises(LaunchError, match="node2"):
        run(9, Attempts(gone))
    launch = Attempts(KILLED, gone, DONE)
    assert run(9, launch) == DONE
    with pytest.raises(LaunchError, match="node2"):
        run(1, Attempts(KILLED, gone))


@pytest.mark.usefixtures("no_pauses")
def test_a_daemon_that_the_workers_had_and_lost_is_survived_at_first_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = LostResourceError("the MPS daemon has ended")
    early = LostResourceError("the MPS daemon has ended")
    lost.report = at(9, 4).report
    launch = Attempts(early, lost, lost, DONE)
    assert run(9, launch) == DONE
    shown = capsys.readouterr().err
    assert "(1 of 9 restarts), from the beginning: no worker had come through fd.init()" in shown
    assert "(2 of 9 restarts), from runs/x/checkpoints/000004" in shown
    assert "(3 of 9 restarts), from runs/x/checkpoints/000004" in shown
    assert "Start the job again" not in shown
    with pytest.raises(LostResourceError, match="Start the job again, or let --restarts do that"):
        run(1, Attempts(lost, lost))


@pytest.mark.usefixtures("no_pauses")
def test_hosts_that_stay_away_are_gone_on_without_if_enough_are_left() -> None:
    gone = UnfitHostsError("host node2 does not answer.", frozenset({"node2"}))
    too = UnfitHostsError("host node3 does not answer.", frozenset({"node3"}))
    launch = Attempts(KILLED, gone, too, KILLED, DONE)
    job = Job(6, ["train.py"])
    topology = Topology.from_names(["node1", "node1", "node2", "node2", "node3", "node3"])
    ended = launch_with_restarts(launch, job, topology, 9, lambda lost: 6 - 2 * len(lost))
    assert ended == DONE
    assert [job.workers for job in launch.jobs] == [6, 6, 4, 2, 6]  # then all are asked again
    assert launch.lost[3] == {"node2", "node3"}
    with pytest.raises(LaunchError, match="node3"):
        launch_with_restarts(
            Attempts(KILLED, gone, too),
            job,
            topology,
            1,
            lambda lost: 4 if len(lost) == 1 else None,
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_pause_before_the_next_start(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_SECONDS", 30.0)

    def before_pause(*_: object) -> None: ...

    kept = signal.signal(number, before_pause)

    def stop_in_pause(*_: object) -> None:
        if signal.getsignal(number) is before_pause:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            os.kill(os.getpid(), number)

    def fail_again() -> Outcome:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return KILLED

    before = signal.signal(signal.SIGALRM, stop_in_pause)
    try:
        ended = run(9, Attempts(KILLED, fail_again))
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.signal(number, kept)
    assert ended.stopped_by == number.name
