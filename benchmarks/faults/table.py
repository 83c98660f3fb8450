"""Every drill as data: which setting, in which phase, who is struck, by what, and the promise.

Not the full product: every strategy and layout meets a death, a stop and a launcher's end, every
phase meets every role, and every signal meets both ranks and launchers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from faults.settings import SETTINGS

QUICK, AFTER_TIMEOUT = 10.0, 25.0  # seconds; the script's own timeout is 5
KILLED_BY = {"SIGKILL": 137, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGUSR1": 138}
WHOLE = ("allreduce", "codec", "c10d", "local", "lagged", "daso", "hogwild")
CUT = ("stages", "gems", "tiles")
SERVED = ("server", "async", "downpour")


@dataclass(frozen=True)
class Promise:
    """How a drill must end. Nothing may be left but what `may_leave` matches."""

    codes: tuple[int, ...]
    names: tuple[str, ...] = ()  # patterns, each of which the output must match
    seconds: float = QUICK  # from the fault to the job's end
    right: bool = False  # the job, or the one after it, ends with the weights of an undisturbed one
    may_leave: tuple[str, ...] = ()
    growth_mib: float | None = None  # no process of the job may grow by more


@dataclass(frozen=True)
class Drill:
    """One fault in one job."""

    setting: str
    phase: str
    role: str
    action: str
    promise: Promise
    options: tuple[str, ...] = ()  # further words for the launcher
    again: bool = False  # afterwards the same command must go on from what was saved

    @property
    def name(self) -> str:
        words = (self.setting, self.phase, self.role, self.action, *self.options)
        return "/".join(word.replace(" ", "_") for word in words if word)

    @property
    def holds(self) -> str:
        """Which ranks wait in the phase until it has happened."""
        if self.role.startswith(("rank ", "member ")):
            return self.role.split()[1]
        if self.role.startswith("loader"):
            return "1"
        return "0" if self.phase in ("saving", "evaluation") else "all"


_LOGS = ("tmp/farandole-logs-",)
"""Of a job that failed: they stay for a week, and that job's own output says where."""


def drills() -> list[Drill]:
    """The whole table, in the order in which it is run."""
    rows = [
        *_undisturbed(),
        *_killed_ranks(),
        *_stopped_ranks(),
        *_signalled_ranks(),
        *_launchers(),
        *_served(),
        *_races(),
        *_elastic(),
        *_files(),
        *_strangers(),
        *_bad_data(),
        *_surroundings(),
        *_children(),
    ]
    names = [row.name for row in rows]
    assert len(names) == len(set(names)), "a drill is twice in the table"
    return rows


def selection() -> list[Drill]:
    """A few that together meet most of the promises, for the tests."""
    wanted = {
        "allreduce/training/rank_1/SIGKILL",
        "allreduce/finished/rank_1/SIGSTOP",
        "allreduce/set-up/launcher/SIGKILL",
        "allreduce/training/launcher/SIGUSR1",
        "allreduce/between_epochs/another_job/the_same_folder",
        "allreduce/the_newest_checkpoint/a_flipped_bit/--fallback",
        "allreduce/rank_1's_data/NaN",
        "async/training/a_server/SIGKILL",
    }
    found = [row for row in drills() if row.name in wanted]
    assert len(found) == len(wanted), "a drill of the selection is not in the table"
    return found


def _undisturbed() -> Iterator[Drill]:
    for setting in SETTINGS:
        saves = setting not in ("race", "emulate")  # under a name that a drill knows
        yield Drill(setting, "", "nobody", "nothing", Promise((0,), seconds=120.0, right=saves))


def _left(phase: str) -> tuple[str, ...]:
    """Half a checkpoint stays where a save was cut off; the next job that saves removes it."""
    return (r"checkpoints/\..*tmp",) if phase == "saving" else ()


def _killed(setting: str, phase: str, role: str, again: bool = False) -> Drill:
    named = (rf"{role} was killed by SIGKILL",)
    promise = Promise((137,), named, right=again, may_leave=_left(phase))
    return Drill(setting, phase, role, "SIGKILL", promise, again=again)


def _killed_ranks() -> Iterator[Drill]:
    rank_1 = {
        "allreduce": ("set-up", "first step", "training", "collective", "finished"),
        "codec": ("training", "between epochs"),
        "c10d": ("set-up", "training", "finished"),
        "local": ("collective", "finished"),
        "lagged": ("first step", "between epochs"),
        "daso": ("training",),
        "hogwild": ("training", "collective"),
        "stages": ("set-up", "training"),
        "gems": ("training",),
        "tiles": ("first step",),
    }
    rank_0 = {
        "allreduce": ("saving", "evaluation"),
        "codec": ("saving",),
        "c10d": ("evaluation",),
        "local": ("training",),
        "daso": ("saving",),
        "hogwild": ("evaluation",),
        "stages": ("saving",),
        "tiles": ("training",),
    }
    for role, table in (("rank 1", rank_1), ("rank 0", rank_0)):
        for setting, phases in table.items():
            for phase in phases:
                # With one saved epoch behind it, the next job must go on exactly.
                again = phase == "between epochs" or (setting, phase) == ("allreduce", "saving")
                yield _killed(setting, phase, role, again)


def _stopped_ranks() -> Iterator[Drill]:
    where = [
        ("allreduce", "set-up", "rank 1"),
        ("allreduce", "training", "rank 1"),
        ("allreduce", "saving", "rank 0"),
        ("allreduce", "evaluation", "rank 0"),
        ("codec", "collective", "rank 1"),
        ("c10d", "training", "rank 1"),
        ("local", "between epochs", "rank 1"),
        ("lagged", "collective", "rank 0"),
        ("daso", "training", "rank 1"),
        ("hogwild", "collective", "rank 1"),
        ("stages", "training", "rank 1"),
        ("gems", "training", "rank 0"),
        ("tiles", "training", "rank 1"),
        ("allreduce", "finished", "rank 1"),
    ]
    for setting, phase, role in where:
        promise = Promise((1, 137), (role,), AFTER_TIMEOUT, may_leave=_left(phase))
        yield Drill(setting, phase, role, "SIGSTOP", promise)
    for setting in ("allreduce", "stages"):
        promise = Promise((0,), right=True)
        yield Drill(setting, "training", "rank 1", "SIGSTOP, SIGCONT", promise)


def _signalled_ranks() -> Iterator[Drill]:
    where = [
        ("allreduce", "training", "rank 1", "SIGTERM"),
        ("allreduce", "set-up", "rank 1", "SIGTERM"),
        ("c10d", "collective", "rank 1", "SIGTERM"),
        ("stages", "training", "rank 0", "SIGTERM"),
        ("allreduce", "training", "rank 1", "SIGINT"),
        ("local", "collective", "rank 0", "SIGINT"),
        ("allreduce", "training", "rank 1", "SIGHUP"),
        ("tiles", "training", "rank 1", "SIGHUP"),
    ]
    for setting, phase, role, number in where:
        yield Drill(setting, phase, role, number, Promise((KILLED_BY[number],), (role,)))


def _launchers() -> Iterator[Drill]:
    killed = [
        ("allreduce", "set-up"),
        ("allreduce", "training"),
        ("allreduce", "finished"),
        ("codec", "first step"),
        ("c10d", "collective"),
        ("local", "saving"),
        ("hogwild", "training"),
        ("stages", "training"),
        ("tiles", "set-up"),
        ("server", "set-up"),
        ("async", "training"),
    ]
    for setting, phase in killed:
        yield Drill(setting, phase, "launcher", "SIGKILL", Promise((137,), may_leave=_left(phase)))
    told = [
        ("allreduce", "set-up", "SIGTERM"),
        ("codec", "collective", "SIGTERM"),
        ("stages", "training", "SIGTERM"),
        ("async", "training", "SIGTERM"),
        ("allreduce", "training", "SIGINT"),
        ("gems", "first step", "SIGINT"),
        ("downpour", "training", "SIGINT"),
        ("allreduce", "training", "SIGHUP"),
        ("hogwild", "finished", "SIGHUP"),
    ]
    for setting, phase, number in told:
        promise = Promise((KILLED_BY[number],), (rf"stopped by {number}",))
        yield Drill(setting, phase, "launcher", number, promise)
    for setting in ("allreduce", "local"):  # preempted: saves, leaves, and goes on later
        for number in ("SIGTERM", "SIGUSR1"):
            promise = Promise((KILLED_BY[number],), (number,), right=True)
            yield Drill(setting, "training", "launcher", number, promise, again=True)
    promise = Promise((0,), right=True)
    yield Drill("allreduce", "training", "launcher", "SIGSTOP, SIGCONT", promise)


def _served() -> Iterator[Drill]:
    goes_on = Promise((0,), ("rank 1 was killed by SIGKILL",), right=True)
    for setting, phase in zip(SERVED, ("training", "first step", "between epochs"), strict=True):
        yield Drill(setting, phase, "rank 1", "SIGKILL", goes_on)
    yield Drill("async", "training", "rank 1", "SIGKILL", goes_on, ("--restarts", "1"))
    for setting, phase in (("server", "training"), ("async", "saving")):
        yield _killed(setting, phase, "rank 0")
    # The drills' timeout is shorter than the 20 s after which servers give up a silent worker.
    for setting in ("server", "async"):
        promise = Promise((1,), ("rank 1",), AFTER_TIMEOUT)
        yield Drill(setting, "training", "rank 1", "SIGSTOP", promise)
    given_up = Promise((0,), ("rank 1",), 50.0, right=True)
    yield Drill("async", "finished", "rank 1", "SIGSTOP", given_up)
    replaced = Promise((0,), ("server",), right=True)
    for setting, phase in (("async", "training"), ("downpour", "collective")):
        yield Drill(setting, phase, "a server", "SIGKILL", replaced)
    yield Drill("async", "training", "a server", "SIGSTOP", Promise((0,), ("server",), 50.0, True))
    lost = Promise((1,), ("server",))
    yield Drill("server", "training", "a server", "SIGKILL", lost)


def _races() -> Iterator[Drill]:
    for number in ("SIGINT", "SIGTERM", "SIGHUP"):
        yield Drill("race", "training", "launcher", number, Promise((KILLED_BY[number],)))
    for phase in ("set-up", "training"):
        yield Drill("race", phase, "launcher", "SIGKILL", Promise((137,)))
    told = Promise((1,), ("failed|killed",), 30.0)
    yield Drill("race", "training", "a lane's launcher", "SIGKILL", told)
    told = Promise((1,), ("rank 1|failed",), 30.0, may_leave=_LOGS)
    yield Drill("race", "training", "rank 1", "SIGKILL", told)
    yield Drill("race", "training", "the fork server", "SIGKILL", Promise((0,), (), 30.0))


def _elastic() -> Iterator[Drill]:
    again = Promise((0,), ("worker 1 .*was killed by SIGKILL",), 25.0, right=True)
    yield Drill("elastic", "training", "member 1", "SIGKILL", again)
    first = Promise((0,), ("worker 0 .*was killed by SIGKILL",), 25.0, right=True)
    yield Drill("elastic", "training", "member 0", "SIGKILL", first)
    yield Drill(
        "elastic", "training", "member 1", "SIGTERM", Promise((0,), ("worker 1",), 25.0, True)
    )
    stuck = Promise((0,), ("worker 1|rank 1",), 45.0, right=True)
    yield Drill("elastic", "training", "member 1", "SIGSTOP", stuck)
    yield Drill("elastic", "training", "launcher", "SIGKILL", Promise((137,)))
    for number in ("SIGINT", "SIGTERM"):
        yield Drill("elastic", "training", "launcher", number, Promise((KILLED_BY[number],)))


def _files() -> Iterator[Drill]:
    for action in ("full disk", "small files only"):
        words = "No space left on device|File too large"
        yield Drill("allreduce", "", "the run's folder", action, Promise((1,), (words,), 60.0))
    yield Drill(
        "stages", "", "the run's folder", "full disk", Promise((1,), ("No space left",), 60.0)
    )
    promise = Promise((1, 2), ("Read-only file system|Permission denied",), 60.0)
    yield Drill("allreduce", "", "the run's folder", "read-only", promise)
    damages = ("a flipped bit", "a torn file", "a torn manifest", "a missing file")
    refused = Promise((1,), ("CheckpointError", "last good one is .*000000"), 60.0)
    fallen = Promise((0,), ("000000",), 60.0, right=True)
    for action in damages:
        yield Drill("allreduce", "", "the newest checkpoint", action, refused)
    yield Drill("tiles", "", "the newest checkpoint", "a flipped bit", refused)
    for setting, action in (
        ("allreduce", damages[0]),
        ("allreduce", damages[1]),
        ("local", damages[2]),
    ):
        yield Drill(setting, "", "the newest checkpoint", action, fallen, ("--fallback",))
    escapes = Promise((1,), ("CheckpointError",), 60.0)
    yield Drill("allreduce", "", "the newest checkpoint", "resealed with ../", escapes)
    # The folder is locked from the first save on.
    second = Promise((0,), (), 60.0, right=True, may_leave=_LOGS)
    yield Drill("allreduce", "between epochs", "another job", "the same folder", second)


def _strangers() -> Iterator[Drill]:
    for setting in ("allreduce", "c10d", "async", "elastic"):
        for action in ("garbage", "a flood", "1.5 GB frames"):
            promise = Promise((0,), (), 30.0, right=True, growth_mib=256.0)
            yield Drill(setting, "training", "every port", action, promise)


def _bad_data() -> Iterator[Drill]:
    for setting in (*WHOLE, *CUT, *SERVED):
        if setting == "gems":  # as stages
            continue
        # Under servers that rank alone ends, and the others go on.
        codes = (0,) if setting in SERVED else (1,)
        role = "rank 0" if setting == "stages" else "rank 1"  # the first stage reads the inputs
        promise = Promise(codes, (role, "DivergedError"), 60.0, right=setting in SERVED)
        yield Drill(setting, "", f"{role}'s data", "NaN", promise)


def _surroundings() -> Iterator[Drill]:
    well = Promise((0,), (), 60.0, right=True)
    for action in ("a folder with spaces", "a folder in Cyrillic", "a long TMPDIR"):
        yield Drill("allreduce", "", "names", action, well)
    yield Drill("allreduce", "", "names", "in Cyrillic under LC_ALL=POSIX", well)
    yield Drill("async", "", "names", "a folder in Cyrillic", well)
    yield Drill("async", "", "names", "a long TMPDIR", well)
    # It goes well, or it is said. Without descriptors a folder stays; the next job removes it.
    enough = Promise((0, 1, 2), (), 60.0)
    yield Drill("allreduce", "", "limits", "16 open files", enough)
    words = ("[Tt]oo many open files|RLIMIT_NOFILE|ulimit -n",)
    few = Promise((1, 2), words, 60.0, may_leave=("tmp/farandole-servers-", *_LOGS))
    yield Drill("async", "", "limits", "16 open files", few)
    yield Drill("allreduce", "", "limits", "1 GiB of addresses", enough)


def _children() -> Iterator[Drill]:
    of_python = ("tmp/pymp-",)  # what multiprocessing leaves of a process that is killed
    died = Promise((1,), ("DataLoader worker", "rank 1"), AFTER_TIMEOUT, may_leave=of_python)
    yield Drill("allreduce", "training", "loader's process of rank 1", "SIGKILL", died)
    for number in ("SIGINT", "SIGKILL"):
        yield Drill("emulate", "training", "launcher", number, Promise((KILLED_BY[number],)))
