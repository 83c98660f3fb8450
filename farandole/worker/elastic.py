"""A worker's side of an elastic job: its rank in the next generation, and changes of hosts.

    worker 3                          the launcher's store                       launcher
    asks/3 = "4 state" ─────────▶     (it was in generation 4)   ◀─────   looks some 10 × a second
    waits for answer/3/4              answer/3/4 = its rank      ◀─────   when all have asked
    change/5?     ──────────────▶     change/5 = "added"         ◀─────   when hosts came or went
    committed/5   ──────────────▶     generation 5 got somewhere

Rank 0 of a generation must have the state of the training, so a worker says whether it has. One
that was interrupted in the middle of a step says that too ("broken"), and at which step: its next
generation has no new workers, because these join between two steps.

A worker waits for its rank as long as the launcher lives, because new ones wait for the others'
next commit, which may be an hour away. That the launcher lives is seen from `pulse`, which it
counts up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any, Final, Literal

import torch.distributed as dist
from torch.distributed import Store

from farandole.environment import ELASTIC_GENERATION, ELASTIC_STATE, ELASTIC_WORKER, JOB, STORE
from farandole.errors import JoinError
from farandole.worker.environment import RankAssignment
from farandole.worker.store.address import launcher_store
from farandole.worker.store.client import Prefixed, StoreClient

LEAVE: Final = "leave"
PREFIX: Final = "elastic"
WITH_STATE: Final = "state"
WITHOUT_STATE: Final = "new"
BROKEN: Final = "broken"  # with the state, in the middle of a step

Change = Literal["added", "removed"]
_STORE_TIMEOUT = timedelta(seconds=60)


class LauncherLostError(JoinError):
    """There is nobody to ask for a rank any more; other failures to join are worth another try."""


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether an elastic launcher has started this process."""
    return ELASTIC_WORKER in environ


def generation(environ: Mapping[str, str]) -> int:
    """The generation that this process is part of; -1 before the first."""
    return int(environ.get(ELASTIC_GENERATION, -1))


def next_assignment(
    environ: MutableMapping[str, str], after: int, timeout: timedelta
) -> RankAssignment:
    """This worker's rank in the first generation later than `after` that it is part of.

    Writes it to `environ` too, for whoever reads RANK there. Ends the process, with 0, if there is
    no rank for it any more. Raises `LauncherLostError` when the launcher gives no sign of life
    within `timeout`.
    """
    kind = WITH_STATE if ELASTIC_STATE in environ else WITHOUT_STATE
    found = ask_launcher(environ, max(after, generation(environ)), kind, timeout)
    return assignment_of(environ, found)


def ask_launcher(
    environ: Mapping[str, str], after: int, kind: str, timeout: timedelta, step: int = 0
) -> dict[str, Any]:
    """The launcher's answer; see `next_assignment`."""
    worker = environ[ELASTIC_WORKER]
    try:
        store = elastic_store(environ, timeout)
        answer = _ask(store, worker, f"{after} {kind} {step}", timeout)
    except (RuntimeError, dist.DistError) as error:
        raise LauncherLostError(
            f"worker {worker} waits for its rank after generation {after}, and the launcher at "
            f"{launcher_store(environ)} has given no sign of life for "
            f"{timeout.total_seconds():g} s. See the launcher's own output."
        ) from error
    if answer == LEAVE:
        raise SystemExit(0)
    found: dict[str, Any] = json.loads(answer)
    return found


def assignment_of(environ: MutableMapping[str, str], found: Mapping[str, Any]) -> RankAssignment:
    """The rank in an answer. Writes it to `environ` too."""
    environ.update(
        {
            ELASTIC_GENERATION: str(found["generation"]),
            "RANK": str(found["rank"]),
            "WORLD_SIZE": str(found["size"]),
            "LOCAL_RANK": str(found["local_rank"]),
            "LOCAL_WORLD_SIZE": str(found["local_size"]),
            "TORCHELASTIC_RESTART_COUNT": str(found["generation"]),
        }
    )
    return RankAssignment(
        launcher="farandole",
        rank=found["rank"],
        size=found["size"],
        local_rank=found["local_rank"],
        local_size=found["local_size"],
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        agent_store=True,
        store=launcher_store(environ),
        job=f"{environ.get(JOB, '')}-{found['generation']}",
        attempt=found["generation"],
    )


def lost_key(generation: int) -> str:
    """What the launcher writes when a worker of `generation` has ended: it need not be awaited."""
    return f"lost/{generation}"


class Losses:
    """Hears from the launcher, in a thread, that workers are lost."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = launcher_store(environ)
        assert address is not None
        # Not through a `Prefixed`: a thread that is in C++ code when the interpreter ends aborts
        # the process.
        self._store = StoreClient(address, _STORE_TIMEOUT)

    def wait(self, generation: int, seconds: float) -> bool:
        """Whether a worker of `generation` is lost. Waits up to `seconds` for it.

        Raises `LauncherLostError`.
        """
        try:
            self._store.wait([f"{PREFIX}/{lost_key(generation)}"], timedelta(seconds=seconds))
        except dist.DistNetworkError as error:
            raise LauncherLostError(f"the launcher's store has closed: {error}") from error
        except dist.DistError:
            return False
        return True


def straggler_key(generation: int) -> str:
    """What rank 0 of `generation` writes: the number of a worker that holds up the others."""
    return f"straggler/{generation}"


def note_state(environ: MutableMapping[str, str]) -> None:
    """From now on this process has the state, and others may get it from here."""
    environ[ELASTIC_STATE] = "1"


class HostChanges:
    """Asks the launcher, from a running worker, whether hosts have come or gone."""

    def __init__(self, environ: Mapping[str, str], timeout: timedelta = _STORE_TIMEOUT) -> None:
        """Raises `JoinError` where no launcher answers."""
        try:
            self._store = elastic_store(environ, timeout)
        except (RuntimeError, dist.DistError) as error:
            raise JoinError(
                f"worker {environ[ELASTIC_WORKER]} asks for changed hosts, and no launcher answers "
                f"at {launcher_store(environ)}."
            ) from error
        self._committed = -1

    def since(self, generation: int) -> Change | None:
        """What is to change for those of `generation`; None: nothing, they can go on.

        "removed" means that nobody new will come. Also tells the launcher that this generation has
        reached a commit. Takes one question to the store when nothing has changed.
        """
        if self._committed != generation:
            # Once a generation. The launcher counts a generation that has committed as progress,
            # and forgets the failures of hosts before it.
            self._store.set(f"committed/{generation}", "1")
            self._committed = generation
        if not self._store.check([f"change/{generation}"]):
            return None
        return "removed" if self._store.get(f"change/{generation}") == b"removed" else "added"

    def tell_straggler(self, generation: int, worker: int) -> None:
        """`worker` is much slower than the others of `generation`, and has been for long."""
        self._store.set(straggler_key(generation), str(worker))


def hosts_changed(environ: Mapping[str, str], since: int) -> Change | None:
    """The same, once. Who asks often keeps a `HostChanges`."""
    return HostChanges(environ).since(since)


def elastic_store(environ: Mapping[str, str], timeout: timedelta) -> Store:
    """The part of the launcher's store that an elastic job's rendezvous has for itself."""
    address = launcher_store(environ)
    if address is None:
        raise JoinError(f"{STORE} says nowhere where the launcher of this elastic job is.")
    return Prefixed(PREFIX, StoreClient(address, timeout))


def _ask(store: Store, worker: str, question: str, timeout: timedelta) -> str:
    """Raises what the store raises: when the launcher is gone, or its pulse stands still."""
    store.set(f"asks/{worker}", question)
    # The generation is part of the key, so an answer to an earlier question cannot be taken for
    # this one.
    key = f"answer/{worker}/{question.split()[0]}"
    while not store.check([key]):
        # Read before the wait: a launcher that dies during the wait leaves the same number behind.
        # One that is only slow has counted on, and the worker waits again.
        pulse = store.get("pulse")
        try:
            store.wait([key], timeout)
        except (RuntimeError, dist.DistError):
            if store.get("pulse") == pulse:
                raise
    return store.get(key).decode()
