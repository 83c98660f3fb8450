"""The energy that this host has used since a moment, where the machine counts it.

Two counters are known: RAPL, of the CPU packages and their memory (`/sys/class/powercap`), and
NVML, of NVIDIA GPUs. Both count what the whole package or GPU uses, whoever uses it. Where there is
neither, nothing is estimated: `EnergyMeter.begin` says why there is no meter.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_SAMPLE_SECONDS = 30.0
"""RAPL's counters begin again at 0 after some 2^18 J, which a package at 400 W uses in 11 minutes.
Between two readings that may happen once at most, or it is not seen."""


class _Zone:
    """One counter of RAPL, in joules since it was opened."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._before = int(self._file.read_text())
        self._total = 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._total += (now - self._before) % (self._range + 1)
        self._before = now
        return self._total / 1e6


class EnergyMeter:
    """Joules since it began. A thread reads counters that begin again at 0 now and then."""

    def __init__(self, readers: Sequence[Callable[[], float]], source: str) -> None:
        self.source = source
        self._readers = list(readers)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._sample, name="energy", daemon=True).start()

    @classmethod
    def begin(
        cls, gpus: Sequence[str] = (), root: Path = POWERCAP
    ) -> tuple[EnergyMeter | None, str]:
        """The meter, and what it counts; or None, and why. `gpus`: UUIDs, as NVML has them."""
        zones, no_zones = _zones(root)
        devices, no_devices = _nvml(gpus) if gpus else ([], "")
        if gpus and not devices:
            # What the CPUs use is the smaller part of a run on GPUs: half a figure misleads.
            return None, no_devices
        if not zones and not devices:
            return None, no_zones
        counted = [f"{len(zones)} zones of RAPL"] if zones else [f"no CPUs ({no_zones})"]
        counted += [f"{len(devices)} GPU(s) by NVML"] if devices else []
        return cls([*(zone.joules for zone in zones), *devices], ", ".join(counted)), ""

    def joules(self) -> float | None:
        """None from the moment on when a counter can no longer be read."""
        with self._lock:
            if self._ended.is_set():
                return None
            try:
                return sum(read() for read in self._readers)
            except Exception:  # NVML raises classes of its own
                self._ended.set()
                return None

    def close(self) -> None:
        self._ended.set()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self.joules()


def _zones(root: Path) -> tuple[list[_Zone], str]:
    """Packages, and memory beside them. Cores are part of a package, `psys` has all of them."""
    found: list[_Zone] = []
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's processors have the same name
        try:
            name = (folder / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                found.append(_Zone(folder))
        except PermissionError as error:
            return [], f"{error.filename} may be read by root alone"
        except (OSError, ValueError) as error:  # without one of them the sum would be too small
            return [], f"{folder} cannot be read: {error}"
    return found, "" if found else f"this machine has no RAPL counters in {root}"


def _nvml(gpus: Sequence[str]) -> tuple[list[Callable[[], float]], str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package of that name says that it is old
            import pynvml
    except ImportError:
        return [], "pynvml is not installed: pip install 'farandole[energy]'"
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
        begins = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles]
    except pynvml.NVMLError as error:
        return [], f"NVML does not count energy here: {error}"

    def reader(handle: object, begin_mj: int) -> Callable[[], float]:
        return lambda: (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - begin_mj) / 1e3

    return [reader(*pair) for pair in zip(handles, begins, strict=True)], ""
