"""Saves once more when a signal asks the job to stop, and leaves: `run.save_when_stopped()`.

    SIGTERM     a scheduler or the launcher ends the job: save, leave with 143. The launcher waits
                for `--grace` seconds. A second SIGTERM, two seconds or more later, ends at once.
    SIGUSR1     a scheduler warns that it will end the job (Slurm's --signal=USR1@60): save, leave
                with 138, by which a batch script knows that it may queue the job again.

A thread receives signals and other ranks' requests. The main thread saves between two steps, at the
place that all ranks have agreed on (`agreement`). If a rank never comes there, the thread ends the
process shortly before the grace period does. The last checkpoint that was committed then stays the
newest.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.train.stopping.agreement import (
    AloneAgreement,
    MeetingAgreement,
    StopAgreement,
    StoreAgreement,
)
from farandole.train.stopping.optimizer_steps import OptimizerSteps
from farandole.train.stopping.signals import StopSignals
from farandole.worker.environment import detect
from farandole.worker.grace import APART_SECONDS
from farandole.worker.rendezvous import find_store
from farandole.worker.signals import exit_code_of

_POLL_SECONDS = 0.25
_LOST_SECONDS = 5.0

Save = Callable[[], Path | str]


class Preemption:
    """Made by `Run.save_when_stopped`, on all ranks together.

    `save` saves with all ranks, `newest` names the newest checkpoint there is, and `say` tells
    the user something, on rank 0.
    """

    def __init__(
        self,
        group: Group,
        save: Save,
        *,
        newest: Callable[[], Path | str | None],
        say: Callable[[str], None],
        optimizers: Iterable[Optimizer],
        grace_seconds: float,
        agreement: StopAgreement | None = None,
    ) -> None:
        self._group = group
        self._save = save
        self._newest = newest
        self._say = say
        self._grace_seconds = grace_seconds
        self._agreement = agreement or agreement_of(group)
        self._steps = OptimizerSteps(optimizers)
        self._place = 0
        self._got: int | None = None  # the signal that this rank has got first
        # The signal that any rank has got, once all can know of it. Written by the thread, read by
        # the main thread: only ever from None to a number, so no lock is needed.
        self._requested: int | None = None
        self._terminated: float | None = None  # when SIGTERM came, here or elsewhere
        self._first_here: float | None = None  # when it came here
        self._is_leaving = False
        self._doing = "has not come to the end of its step"
        self._over = threading.Event()
        self._signals = StopSignals()
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()

    # In the main thread

    def between_steps(self, *, within_pass: bool = True) -> None:
        """Called by all ranks together, in the same places. Saves and leaves where they agree to.

        Within a pass over the data, gradients may be accumulating; they are in no checkpoint, so
        the ranks go on to the end of an optimizer's step.
        """
        self._place += 1
        can_save = self._steps.are_done() or not within_pass
        if self._requested is None and not self._agreement.always_asks:
            return
        # A worker that joined late has counted other places than the rest, and cannot agree on one.
        if self._requested is not None and self._group.transport.joined_late:
            self._leave(self._requested, "a worker that was started again leaves without a save")
        try:
            number = self._agreement.stops_at(self._place)
        except (RuntimeError, dist.DistError):  # the store is gone, and with it the launcher
            return
        # Gathered in the agreed place and in every one after it, by all ranks, until all can save.
        if number is None or not all(self._group.gather_json(can_save)):
            return
        name = signal.Signals(number).name
        self._doing = "has not ended its save"
        self._say(f"{name}: saving once more …{self._time_left()}")
        saved = self._save()
        self._leave(number, f"{name}: saved {saved}; leaving with {exit_code_of(name)}")

    def close(self) -> None:
        """The run ends; signals do again what they did before."""
        self._over.set()
        self._signals.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _POLL_SECONDS)

    def _leave(self, number: int, message: str) -> None:
        self._is_leaving, self._doing = True, "has saved, and has not ended"
        self._say(message)
        raise SystemExit(exit_code_of(signal.Signals(number).name))

    def _time_left(self) -> str:
        if self._terminated is None:
            return ""
        left = self._terminated + self._grace_seconds - time.monotonic()
        return f" ({max(left, 0):.0f} s are left)"

    # In the thread

    def _listen(self) -> None:
        while not self._over.is_set():
            for number in self._signals.wait(_POLL_SECONDS):
                self._receive(number)
            with suppress(RuntimeError, dist.DistError):  # the store is gone
                self._ask_others()
            if self._terminated is not None and time.monotonic() > self._deadline:
                self._give_up(f"rank {self._group.rank} {self._doing} {self._waited:.0f} s after")

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM:
            # One that comes after the save is the launcher's, which has seen another rank leave.
            again = self._first_here is not None and now - self._first_here > APART_SECONDS
            if again and not self._is_leaving:
                self._give_up(f"rank {self._group.rank} {self._doing}; a second")
            self._first_here = self._first_here or now
            self._terminated = self._terminated or now
        self._got = self._got or int(number)

    def _ask_others(self) -> None:
        if self._requested is not None:
            return
        if self._got is not None:
            self._agreement.request(self._got)
        requested = self._agreement.requested()
        if requested == signal.SIGTERM and self._terminated is None:
            self._terminated = time.monotonic()
        self._requested = requested  # last: the main thread acts on it, and reads the time

    @property
    def _waited(self) -> float:
        return 0.0 if self._terminated is None else time.monotonic() - self._terminated

    @property
    def _deadline(self) -> float:
        """A little before the launcher's, so that this process can still say what it kept."""
        assert self._terminated is not None
        return self._terminated + self._grace_seconds - min(2.0, self._grace_seconds / 10)

    def _give_up(self, message: str) -> None:
        """Ends the process, also where its main thread is stuck. Never returns."""
        last = self._newest()
        kept = f"the newest checkpoint is {last}" if last else "there is no checkpoint"
        line = f"farandole: {message} SIGTERM: ending without it; {kept}\n"
        with suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))
        os._exit(exit_code_of("SIGTERM"))


def agreement_of(group: Group) -> StopAgreement:
    """How these ranks agree: by the job's store where there is one."""
    if group.size == 1:
        return AloneAgreement()
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return StoreAgreement(store, group.rank, group.size)
    assignment = detect(os.environ)
    launchers = assignment.store is not None or assignment.agent_store
    if launchers and assignment.size == group.size:  # under parameter servers
        store = find_store(assignment, group.timeout)
        return StoreAgreement(store, group.rank, group.size, _LOST_SECONDS)
    return MeetingAgreement(group)
