"""Energy counters: RAPL's files as the kernel has them, NVML as its package offers it."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from farandole.system.energy import EnergyMeter


class Sysfs:
    """The kernel's powercap tree: zones inside zones, and a flat list of links to all of them."""

    def __init__(self, root: Path) -> None:
        self._devices = root / "devices/virtual/powercap"
        self.powercap = root / "class/powercap"
        self.powercap.mkdir(parents=True)

    def zone(self, path: str, name: str, microjoules: int, most: int = 999_999) -> Path:
        folder = self._devices / path
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "enabled").write_text("1\n")
        (folder / "max_energy_range_uj").write_text(f"{most}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        for linked in (folder, folder.parent):
            link = self.powercap / linked.name
            if linked != self._devices and not link.exists():
                link.symlink_to(linked)
        return folder / "energy_uj"


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def test_packages_and_their_memory_are_counted_once_and_over_the_wrap(sysfs: Sysfs) -> None:
    package = sysfs.zone("intel-rapl/intel-rapl:0", "package-0", 900_000)
    parts = [
        sysfs.zone("intel-rapl/intel-rapl:0/intel-rapl:0:0", "core", 0),
        sysfs.zone("intel-rapl/intel-rapl:0/intel-rapl:0:1", "uncore", 0),
    ]
    memory = sysfs.zone("intel-rapl/intel-rapl:0/intel-rapl:0:2", "dram", 0)
    second = sysfs.zone("intel-rapl/intel-rapl:1", "package-1-die-0", 5, most=262_143_328_850)
    platform = sysfs.zone("intel-rapl/intel-rapl:2", "psys", 0)
    again = sysfs.zone("intel-rapl-mmio/intel-rapl-mmio:0", "package-0", 0)
    meter, missing = EnergyMeter.begin(root=sysfs.powercap)
    assert meter is not None
    assert not missing
    assert meter.source == "3 zones of RAPL"
    assert meter.joules() == 0.0
    for file in (*parts, platform, again):
        file.write_text("700000\n")
    package.write_text("100000\n")  # 100 000 to the end of its range, 1 over it, 100 000 more
    memory.write_text("50000\n")
    assert meter.joules() == pytest.approx(0.25)
    second.write_text("2000005\n")
    assert meter.joules() == pytest.approx(2.25)
    package.write_text("0\n")  # once more
    assert meter.joules() == pytest.approx(2.25 + 0.9)
    package.unlink()
    assert meter.joules() is None, "not what it was before"
    meter.close()


@contextlib.contextmanager
def an_ordinary_user() -> Iterator[None]:
    """As the tests may run as root, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_counters_of_root_are_named_as_the_reason() -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        sysfs = Sysfs(Path(made))
        sysfs.zone("intel-rapl/intel-rapl:0", "package-0", 0).chmod(0o400 if is_root() else 0)
        with an_ordinary_user():
            found = EnergyMeter.begin(root=sysfs.powercap)
        file = sysfs.powercap / "intel-rapl:0/energy_uj"
        assert found == (None, f"{file} may be read by root alone")


def is_root() -> bool:
    return os.geteuid() == 0


def test_a_counter_that_cannot_be_read_leaves_no_half_figure(sysfs: Sysfs) -> None:
    sysfs.zone("intel-rapl/intel-rapl:0", "package-0", 0)
    file = sysfs.zone("intel-rapl/intel-rapl:1", "package-1", 0)
    file.unlink()
    file.mkdir()  # an OSError that is no PermissionError, as of a driver without data
    meter, missing = EnergyMeter.begin(root=sysfs.powercap)
    assert meter is None
    assert missing.startswith(f"{sysfs.powercap / 'intel-rapl:1'} cannot be read: ")


def test_without_counters_there_is_no_meter_and_a_reason(tmp_path: Path) -> None:
    assert EnergyMeter.begin(root=tmp_path) == (
        None,
        f"this machine has no RAPL counters in {tmp_path}",
    )


class NvmlError(Exception):
    pass


def nvmlInit() -> None:  # noqa: N802
    pass


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:  # noqa: N802
    return uuid


def nvml(monkeypatch: pytest.MonkeyPatch, millijoules: dict[str, int]) -> None:
    module = ModuleType("pynvml")

    def total(handle: str) -> int:
        if handle not in millijoules:
            raise NvmlError("Not Supported")
        return millijoules[handle]

    module.NVMLError = NvmlError  # type: ignore[attr-defined]
    for function in (nvmlInit, nvmlDeviceGetHandleByUUID):
        setattr(module, function.__name__, function)
    module.nvmlDeviceGetTotalEnergyConsumption = total  # type: ignore[attr-defined]
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
    sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs.zone("intel-rapl/intel-rapl:0", "package-0", 0)
    nvml(monkeypatch, {"GPU-a": 1})
    meter, missing = EnergyMeter.begin(["GPU-a", "GPU-b"], root=sysfs.powercap)
    assert meter is None
    assert missing == "NVML does not count energy here: Not Supported"


@pytest.mark.needs("pynvml")
def test_the_package_has_what_is_asked_of_it() -> None:
    """The functions of nvidia-ml-py that the stand-in above has, and its one class of errors."""
    import pynvml

    for function in (nvmlInit, nvmlDeviceGetHandleByUUID):
        real = getattr(pynvml, function.__name__)
        assert list(inspect.signature(real).parameters) == list(
            inspect.signature(function).parameters
        )
    assert list(inspect.signature(pynvml.nvmlDeviceGetTotalEnergyConsumption).parameters) == [
        "handle"
    ]
    assert issubclass(pynvml.NVMLError, Exception)
    meter, missing = EnergyMeter.begin(["GPU-00000000-0000-0000-0000-000000000000"])
    assert meter is None, "no machine has a GPU of this name"
    assert missing.startswith("NVML does not count energy here: ")
