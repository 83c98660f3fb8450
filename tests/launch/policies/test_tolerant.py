"""A tolerant job: a worker that dies is missed, started again or not, and the others go on."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.errors import LaunchError, UserError
from farandole.launch.launcher import Job, Outcome, launch_tolerant
from farandole.launch.policies import tolerant as policy
from farandole.launch.watches import exit_watch

if TYPE_CHECKING:
    from conftest import Sandbox

FACTS = Path(__file__).parents[1] / "scripts" / "facts.py"

# What the workers below have in common: their number, and a way to wait for each other.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

import psutil

rank = int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def say(name):
    Path(f"{name}.half").write_text(str(os.getpid()))
    Path(f"{name}.half").rename(name)

def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)

def wait_for_end_of(name):
    wait_for(name)
    pid = int(Path(name).read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
"""

Supervised = Callable[..., tuple[Outcome, list[tuple[str, int]]]]


@pytest.fixture
def supervised(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    """Runs a tolerant job of this process; its outcome, and what the callbacks were told.

    Each call of a callback leaves a file, such as `lost-1`, for workers to wait for.
    """
    monkeypatch.chdir(sandbox.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(sandbox.temporary))
    told: list[tuple[str, int]] = []

    def tell(what: str) -> Callable[[int], None]:
        def callback(rank: int) -> None:
            told.append((what, rank))
            (sandbox.folder / f"{what}-{rank}").touch()

        return callback

    def run(workers: int, text: str, **more: Any) -> tuple[Outcome, list[tuple[str, int]]]:
        check = more.pop("check", lambda: None)
        script = sandbox.script("worker.py", PRELUDE + text)
        job = Job(workers, [str(script)], sandbox.environment, tolerant=True, **more)
        try:
            outcome = launch_tolerant(
                job, on_lost=tell("lost"), on_restart=tell("restart"), check=check
            )
        finally:
            assert sandbox.processes() == []
        return outcome, told

    return run


def ours(text: str) -> list[str]:
    """What the launcher itself has said."""
    return [line for line in text.splitlines() if line.startswith("farandole: ")]


def test_the_others_go_on_without_those_that_die(
    supervised: Supervised, sandbox: Sandbox, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome, told = supervised(
        4,
        """
if rank == 1:
    sleeper = subprocess.Popen(["sleep", "600"])
    Path("sleeper.half").write_text(str(sleeper.pid))
    Path("sleeper.half").rename("sleeper")
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 2:
    raise ValueError("no luck")
wait_for("lost-1", "lost-2")
wait_for_end_of("sleeper")  # what it has started does not outlive it
print("to the end")
""",
    )
    assert outcome == Outcome(lost=(1, 2), logs=outcome.logs, joined=False)
    assert outcome.exit_code == 0
    assert sorted(told) == [("lost", 1), ("lost", 2)]
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] to the end", "[3] to the end"]
    assert sorted(ours(shown.err)) == [
        "farandole: rank 1 was killed by SIGKILL; the others go on",
        "farandole: rank 2 failed: ValueError: no luck; the others go on",
    ]
    assert "[2] ValueError: no luck" in shown.err.splitlines()
    assert outcome.logs is not None
    assert outcome.logs.parent == sandbox.temporary
    assert "ValueError: no luck" in (outcome.logs / "rank-2.err").read_text()


def test_rank_0_goes_on_alone(supervised: Supervised, capfd: pytest.CaptureFixture[str]) -> None:
    outcome, _ = supervised(2, 'sys.exit(3) if rank else wait_for("lost-1")')
    assert (outcome.lost, outcome.exit_code) == ((1,), 0)
    assert capfd.readouterr().err == "farandole: rank 1 failed: exit code 3; the other goes on\n"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ('raise ValueError("enough")', 1),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_without_rank_0_there_is_no_job(
    supervised: Supervised, capfd: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    """Also where others have ended before it, and more restarts are allowed."""
    outcome, told = supervised(
        3,
        f"""
if rank == 1:
    sys.exit()
if rank == 2:
    say("waits")
    time.sleep(600)
wait_for("waits")
{how}
""",
        restarts=2,
    )
    assert outcome.failure is not None
    assert outcome.failure.rank == 0
    assert (outcome.failed, outcome.lost, outcome.stopped_by) == ((0,), (), None)
    assert outcome.exit_code == code
    assert outcome.logs is not None
    assert outcome.logs.is_dir()
    assert not told
    shown = capfd.readouterr().err
    assert ours(shown) == []
    if code == 1:
        assert outcome.failure.error.rstrip().endswith("ValueError: enough")
        assert "[0] ValueError: enough" in shown


def test_who_was_lost_before_rank_0_failed_is_known(supervised: Supervised) -> None:
    outcome, told = supervised(2, 'sys.exit(3) if rank else (wait_for("lost-1"), sys.exit(4))')
    assert (outcome.failed, outcome.lost, outcome.exit_code) == ((0,), (1,), 4)
    assert told == [("lost", 1)]


def test_workers_are_started_again_as_often_as_allowed(
    supervised: Supervised, sandbox: Sandbox, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome, told = supervised(
        3,
        """
if rank == 0:
    wait_for("came-back")
    wait_for_end_of("last-try")
if rank == 1:
    print("attempt", attempt, end="", flush=True)
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    say("came-back")
if rank == 2:
    if attempt == 2:
        say("last-try")
    raise ValueError(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
""",
        restarts=2,
    )
    assert (outcome.lost, outcome.exit_code) == ((2,), 0)
    assert [what for what, rank in told if rank == 1] == ["lost", "restart"]
    assert [what for what, rank in told if rank == 2] == ["lost", "restart"] * 2 + ["lost"]
    shown = capfd.readouterr()
    # The first life's line had no end; the second's is a line of its own.
    assert shown.out.splitlines() == ["[1] attempt 0", "[1] attempt 1"]
    said = ours(shown.err)
    assert "farandole: rank 1 was killed by SIGKILL; it is started again (1 of 2)" in said
    again = [line for line in said if "rank 2" in line]
    assert again[:2] == [
        f"farandole: rank 2 failed: ValueError: attempt {lives} of 2; it is started again "
        f"({lives + 1} of 2)"
        for lives in (0, 1)
    ]
    assert again[2].startswith("farandole: rank 2 failed: ValueError: attempt 2 of 2")
    assert "started again" not in again[2]


def test_what_came_back_and_ended_well_leaves_no_trace(
    supervised: Supervised, sandbox: Sandbox
) -> None:
    outcome, _ = supervised(
        2, 'sys.exit(rank and not attempt) if rank else wait_for("restart-1")', restarts=1
    )
    assert outcome == Outcome(joined=False)
    assert list(sandbox.temporary.iterdir()) == []


def test_nobody_is_started_again_for_a_rank_0_that_is_done(supervised: Supervised) -> None:
    outcome, told = supervised(
        2,
        """
if rank == 0:
    say("first")
else:
    wait_for("first")
    while psutil.pid_exists(int(Path("first").read_text())):  # until the launcher has noticed
        time.sleep(0.01)
    sys.exit(3)
""",
        restarts=5,
    )
    assert (outcome.lost, outcome.exit_code) == ((1,), 0)
    assert told == [("lost", 1)]


def test_what_is_to_be_said_is_said_and_what_is_raised_ends_the_job(
    supervised: Supervised, sandbox: Sandbox, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter([None, ["server 1 has ended", "server 2 has taken over"], []])

    def check() -> list[str] | None:
        for answer in answers:
            return answer
        raise LaunchError("all is lost")

    with pytest.raises(LaunchError, match="all is lost"):
        supervised(2, "time.sleep(600)", check=check)
    assert capfd.readouterr().err.splitlines() == [
        "farandole: server 1 has ended",
        "farandole: server 2 has taken over",
    ]
    assert list(sandbox.temporary.iterdir()) == []


def test_one_that_is_stopped_is_ended_and_missed(
    supervised: Supervised, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first while the others work, the second when they are done."""
    monkeypatch.setattr(policy, "_STOPPED_SECONDS", 1.0)
    monkeypatch.setattr(exit_watch, "_STOPPED_SECONDS", 1.0)
    outcome, told = supervised(
        3,
        """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
wait_for("lost-1")
if rank == 2:
    say("two")
    wait_for_end_of("zero")
    os.kill(os.getpid(), signal.SIGSTOP)
wait_for("two")
say("zero")
""",
    )
    assert (outcome.lost, outcome.exit_code) == ((1, 2), 0)
    assert told == [("lost", 1), ("lost", 2)]
    first, second = ours(capfd.readouterr().err)
    during = r"farandole: rank 1 was stopped \(SIGSTOP\) for \d+ s, and was ended; the others go on"
    assert re.fullmatch(during, first)
    at_the_end = (
        r"farandole: rank 2 was stopped \(SIGSTOP\) for \d+ s after rank 0 was done, and was.*"
    )
    assert re.fullmatch(at_the_end, second)


def test_the_workers_variables_are_those_of_any_job(sandbox: Sandbox) -> None:
    """Only the numbers that every job has of its own differ."""
    script = sandbox.script("variables.py", "import json, os\nprint(json.dumps(dict(os.environ)))")
    own = re.compile(
        r"MASTER_PORT|FARANDOLE_(JOB|LAUNCHER|STORE)|TORCHELASTIC_(RUN_ID|ERROR_FILE|SIGNALS_TO_HANDLE)"
    )
    found = []
    for tolerant in (True, False):
        start = f"""
from farandole.launch.launcher import Job, launch

launch(Job(2, [{str(script)!r}], {{"FARANDOLE_NAME": "try"}}, tolerant={tolerant}))
"""
        done = sandbox.fork(sandbox.script("start.py", start))
        lines = sorted(done.stdout.splitlines())
        assert [line[:4] for line in lines] == ["[0] ", "[1] "], done.stderr
        ranks = [json.loads(line[4:]) for line in lines]
        for variables in ranks:
            assert variables["TORCHELASTIC_RUN_ID"] == variables["FARANDOLE_JOB"]
            assert int(variables["MASTER_PORT"])
            assert int(variables["FARANDOLE_LAUNCHER"])
        found.append([{k: v for k, v in each.items() if not own.fullmatch(k)} for each in ranks])
    assert found[0] == found[1]
    assert found[0][1]["RANK"] == "1"
    assert found[0][1]["FARANDOLE_NAME"] == "try"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"restarts": 2}, r"restarts=2: only in a tolerant job"),
        ({"restarts": -1, "tolerant": True}, r"restarts=-1: a worker is started again 0 times"),
        ({"workers": 0, "tolerant": True}, "0 workers cannot run anything"),
    ],
)
def test_jobs_that_cannot_be(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Job(**{"workers": 2, "command": ["x.py"], **more})


def test_signals_are_put_back(supervised: Supervised) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    supervised(1, "")
    assert [signal.getsignal(number) for number in numbers] == before
