"""A run's metrics: what scripts log and what strategies decide, written on rank 0."""

from __future__ import annotations

import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping

import torch

import farandole
from farandole.comm.transports.base import TYPICAL_LINK
from farandole.environment import STARTED
from farandole.report.memory import MemoryLog
from farandole.report.metrics import MetricsLog
from farandole.system.energy import EnergyMeter
from farandole.train.choosing.choice import Value
from farandole.train.distributed_models import Note
from farandole.train.numbers import plain, short
from farandole.train.session import Session
from farandole.train.settings import unwritable


class RunMetrics:
    """Opens its file with the first line, so that a run that logs nothing leaves no folder."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._log: MetricsLog | None = None
        started = os.environ.get(STARTED)
        self._startup_seconds = time.monotonic() - float(started) if started else None
        self.on_log: Callable[[Mapping[str, float | str]], None] = _do_nothing
        self._for_checkpoint: dict[str, float] = {}  # logged since the last one
        self.notes: list[tuple[dict[str, float], Note]] = []
        """What strategies have decided, with the counters of that moment, and is not written."""
        self.gpu_peaks: list[int] = []  # bytes, by rank; empty without GPUs
        self._written_peaks: list[int] = []
        self._memory = MemoryLog(self._device_bytes)
        self._has_logged = False
        self._energy: EnergyMeter | None = None
        self._energy_facts: dict[str, str] = {}
        if session.rank == 0:
            self._begin_energy()

    @property
    def has_begun(self) -> bool:
        return self._log is not None

    def collect_notes(self) -> None:
        """Takes what strategies have decided; it is written with the next log."""
        notes = list(self._session.models.take_notes())
        if notes and self._session.rank == 0:
            counters = self._counters()
            self.notes += [(counters, note) for note in notes]

    def add_note(self, note: Note) -> None:
        """A decision that is no strategy's. It is written with the next log."""
        if self._session.rank == 0:
            self.notes.append((self._session.counters(), note))

    def log(self, **metrics: float | torch.Tensor | str) -> None:
        """Rank 0 writes and prints; the others' calls do nothing."""
        session = self._session
        session.group.meter.activity.step()
        self._has_logged = True
        if session.rank != 0:
            self._note_memory()
            return
        logged = {name: plain(name, value) for name, value in metrics.items()}
        if isinstance(logged.get("loss"), (int, float)):
            session.models.hear(float(logged["loss"]))
        self._for_checkpoint |= {
            name: value
            for name, value in logged.items()
            if not isinstance(value, str) and math.isfinite(value)
        }
        self.on_log(logged)
        counters = self._counters()
        try:
            log = self._open()
            self._write_notes(log)
            log.log(counters, logged)
            self._note_memory()
        except OSError as error:
            raise unwritable(session.folder, error) from error
        shown = "  ".join(f"{name} {short(value)}" for name, value in logged.items())
        waited = counters["waited_seconds"] / max(counters["time"], 1e-9)
        session.print(f"{shown}  ·  {counters['time']:.1f} s, {waited:.0%} waiting")

    def choose(self, name: str, value: Value) -> None:
        """Keeps what `run.choose` has decided. It is in the first record, or, later, in its own."""
        self._session.choices[name] = value
        if self._log is not None:
            self._log.choose({name: value})

    def take_for_checkpoint(self) -> dict[str, float]:
        """What was logged since the last checkpoint. It belongs to this one."""
        taken, self._for_checkpoint = self._for_checkpoint, {}
        return taken

    def close(self) -> None:
        if self._has_logged:
            self._note_memory(now=True)
        if self._log is None:
            self._end_energy()
            return
        try:
            self._write_notes(self._log)
            self._log.close(self._counters())
        except OSError as error:  # must not hide the error that ended the script
            folder = self._session.folder
            warnings.warn(f"the end of {folder} is not written: {error}", stacklevel=3)
        finally:
            self._end_energy()

    def _counters(self) -> dict[str, float]:
        counters = self._session.counters()
        joules = None if self._energy is None else self._energy.joules()
        return counters if joules is None else {**counters, "energy_joules": joules}

    def _note_memory(self, *, now: bool = False) -> None:
        """Ranks that are threads of one process share its memory: nothing is said of them."""
        session = self._session
        if session.size == 1 or session.group.transport.name != "in-process":
            self._memory.note(session.folder, session.rank, now=now)

    def _device_bytes(self) -> int | None:
        device = self._session.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def _begin_energy(self) -> None:
        """Counts from now on what the host of rank 0 uses."""
        self._energy, missing = EnergyMeter.begin(used_gpus(self._session))
        if self._energy is None:
            self._energy_facts = {"no_energy": missing}
            return
        hosts = len(self._session.topology.hosts)
        pretended = self._session.settings.pretend_hosts is not None
        where = "" if hosts == 1 or pretended else f", on rank 0's host alone, of {hosts}"
        self._energy_facts = {"energy": self._energy.source + where}

    def _end_energy(self) -> None:
        if self._energy is not None:
            self._energy.close()

    def _write_notes(self, log: MetricsLog) -> None:
        self.collect_notes()
        for counters, note in self.notes:
            log.note(counters, note)
        self.notes.clear()
        if self.gpu_peaks != self._written_peaks:
            log.gpu_memory(self.gpu_peaks)
            self._written_peaks = self.gpu_peaks

    def _open(self) -> MetricsLog:
        if self._log is None:
            session = self._session
            if not self._energy_facts:  # another worker was rank 0 before
                self._begin_energy()
            start = {
                "name": session.folder.name,
                "sync": str(session.strategy),
                **({} if session.layout is None else {"layout": str(session.layout)}),
                "size": session.size,
                "hosts": len(session.topology.hosts),
                **self._link(),
                **self._energy_facts,
                "device": str(session.device),
                "script": session.settings.script,
                "startup_seconds": self._startup_seconds,
                "seed": session.seed,
                "versions": versions(),
                **({"choices": dict(session.choices)} if session.choices else {}),
            }
            goes_on = session.progress.resumed or session.is_successor
            self._log = MetricsLog(session.folder, start, resumed=goes_on)
        return self._log

    def _link(self) -> dict[str, object]:
        """What was measured between the hosts; nothing where nothing was, or they are pretended.
        Links that are simulated are said to be."""
        session = self._session
        link = session.group.transport.link
        simulated = session.settings.simulated_link
        if simulated is not None and len(session.topology.hosts) > 1:
            return {"simulated_link": str(simulated)}
        pretended = session.settings.pretend_hosts is not None
        if len(session.topology.hosts) == 1 or pretended or link == TYPICAL_LINK:
            return {}
        age_seconds = session.group.transport.link_age_seconds
        return {
            "link": {
                "message_seconds": link.seconds_per_message,
                "bytes_per_second": 1 / link.seconds_per_byte,
                **({} if age_seconds is None else {"age_seconds": age_seconds}),
            }
        }


def used_gpus(session: Session) -> list[str]:
    """UUIDs of the GPUs of the ranks on this host, as far as this rank can see them."""
    if session.device.type != "cuda":
        return []
    pretended = session.settings.pretend_hosts is not None
    here = session.size if pretended else len(session.topology.host(session.rank).ranks)
    count = min(here, torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


def _do_nothing(logged: Mapping[str, float | str]) -> None: ...


def versions() -> dict[str, str]:
    return {
        "farandole": farandole.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
