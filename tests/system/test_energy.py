"""Energy counters: RAPL's files as the kernel has them, NVML as its package offers it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from farandole.system.energy import EnergyMeter


def zone(root: Path, path: str, name: str, microjoules: int, most: int = 999_999) -> Path:
    folder = root / path
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_and_their_memory_are_counted_once_and_over_the_wrap(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    platform = zone(tmp_path, "intel-rapl:1", "psys", 0)
    again = zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    meter, missing = EnergyMeter.begin(root=tmp_path)
    assert meter is not None
    assert not missing
    assert meter.joules() == 0.0
    for file in (core, platform, again):
        file.write_text("700000\n")
    package.write_text("100000\n")  # 100 000 to the end of its range, 1 over it, 100 000 more
    memory.write_text("50000\n")
    assert meter.joules() == pytest.approx(0.25)
    package.unlink()
    assert meter.joules() is None, "not what it was before"
    meter.close()


def test_without_counters_there_is_no_meter_and_a_reason(tmp_path: Path) -> None:
    assert EnergyMeter.begin(root=tmp_path) == (
        None,
        f"this machine has no RAPL counters in {tmp_path}",
    )


class NvmlError(Exception):
    pass


def nvml(monkeypatch: pytest.MonkeyPatch, millijoules: dict[str, int]) -> None:
    module = ModuleType("pynvml")

    def total(handle: str) -> int:
        if handle not in millijoules:
            raise NvmlError("Not Supported")
        return millijoules[handle]

    for name, value in {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetTotalEnergyConsumption": total,
    }.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_gpus_count_and_say_that_the_cpus_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"GPU-a": 5000, "GPU-b": 7000}
    nvml(monkeypatch, counters)
    meter, _ = EnergyMeter.begin(["GPU-a", "GPU-b"], root=tmp_path)
    assert meter is not None
    assert "2 GPU(s) by NVML" in meter.source
    assert "no CPUs" in meter.source
    counters["GPU-b"] += 2500
    assert meter.joules() == 2.5
    meter.close()


def test_a_gpu_that_does_not_count_leaves_no_half_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    nvml(monkeypatch, {"GPU-a": 1})
    meter, missing = EnergyMeter.begin(["GPU-a", "GPU-b"], root=tmp_path)
    assert meter is None
    assert missing == "NVML does not count energy here: Not Supported"
