"""`farandole doctor`: each check with machines made up for it, and the command on this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from farandole.cli import commands
from farandole.comm.calibration import Unmeasured
from farandole.doctor import checks, show, two_workers
from farandole.doctor import examine as doctor
from farandole.doctor.checks import Finding
from farandole.schedule import ALGORITHMS, Link

Cli = Callable[..., subprocess.CompletedProcess[str]]
GIB = 2**30
NOTHING: Callable[[str], None] = lambda name: None  # noqa: E731


# This machine


def test_this_machine(
    farandole_cli: Cli,
    readme_command: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = farandole_cli(*readme_command("doctor"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"] is True
    assert found["torch"]["value"] == torch.__version__
    assert found["backend gloo"]["status"] == "ok"
    assert found["all-reduce, 2 workers"]["status"] == "ok"
    assert "4 MiB over shm in " in found["all-reduce, 2 workers"]["value"]
    assert found["link, shared memory"]["value"].endswith("; auto: native at any size")
    assert " µs a message, " in found["link, gloo"]["value"]
    measured = found["link, gloo"]["status"] == "ok"  # not on a machine that is too busy
    assert ("auto for 8 such ranks: " in found["link, gloo"]["value"]) is measured
    assert all(found[name]["status"] == "ok" for name in checks.REQUIRED)
    for finding in found.values():
        assert bool(finding["hint"]) == (finding["status"] != "ok"), finding
    # The same findings as the README's command itself shows them.
    code, output = run_doctor(monkeypatch, *(Finding(**finding) for finding in report["findings"]))
    assert code == 0
    assert all(finding["value"] in output for finding in found.values())


def test_an_all_reduce_that_fails_is_broken(sandbox: Any) -> None:
    once = "from farandole.doctor.two_workers import check_all_reduce; print(check_all_reduce())"
    script = sandbox.script("once.py", once)
    done = sandbox.fork(script, GLOO_SOCKET_IFNAME="no-such-interface")
    found = done.stdout.splitlines()[-1]
    assert "status='broken'" in found, done.stderr
    assert "no-such-interface" in found
    (logs,) = sandbox.temporary.glob("farandole-*")
    assert f"{logs}'" in found, "the logs, and nothing else, are left to read"


# One check at a time


def statuses(*findings: Finding) -> list[str]:
    for finding in findings:
        assert bool(finding.hint) == (finding.status != "ok"), finding
    return [finding.status for finding in findings]


def test_python() -> None:
    assert statuses(checks.check_python((3, 10, 9)), checks.check_python((3, 11, 0))) == [
        "broken",
        "ok",
    ]


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, "broken"),
        ("2.9.1", "broken"),
        ("2.10.0", "ok"),
        ("2.11.0+cu130", "ok"),
        ("3.0.0a0+git1", "ok"),
    ],
)
def test_torch(version: str | None, status: str) -> None:
    assert statuses(checks.check_torch(version)) == [status]


def test_the_version_of_torch_is_the_one_it_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's metadata may leave out what it was built for."""
    monkeypatch.setattr(doctor, "_installed", lambda name: "2.11.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert checks.check_torch(*doctor._torch()) == Finding("torch", "ok", "2.11.0+cu130")


def test_a_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "2.11.0")
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = checks.check_torch(*doctor._torch())
    assert statuses(finding) == ["broken"]
    assert finding.value.startswith("2.11.0, but import torch fails: ")
    monkeypatch.setattr(doctor, "_installed", lambda name: None)
    assert checks.check_torch(*doctor._torch()).value == "not installed"


GIGABIT = Link(200e-6, 8e-9)
HIDDEN = Unmeasured(200e-6, 2**24, 190e-6)


def test_a_link_that_was_measured() -> None:
    finding = two_workers.check_link("gloo", GIGABIT)
    assert statuses(finding) == ["ok"]
    assert finding.value.startswith("200 µs a message, 0.1 GB/s; auto for 8 such ranks: ")
    assert two_workers.check_link("shm", GIGABIT).value == (
        "200 µs a message, 0.1 GB/s; auto: native at any size"
    )


def test_a_link_that_was_not_measured_says_so_and_nothing_is_chosen_from_it() -> None:
    finding = two_workers.check_link("gloo", HIDDEN)
    assert statuses(finding) == ["warning"]
    assert "200 µs a message, bandwidth not measured: 16,777,216 bytes took 0.19" in finding.value
    assert "auto takes it for a usual link: 200 µs, 1.0 GB/s" in finding.value
    assert not [name for name in ALGORITHMS if f"{name} at" in finding.value]
    shared = two_workers.check_link("shm", HIDDEN)
    assert statuses(shared) == ["ok"], "nothing depends on it"
    assert "bandwidth not measured" in shared.value


def test_a_package_that_is_not_there_says_how_to_get_it() -> None:
    required = checks.check_package("rich", None)
    optional = checks.check_package("mpi4py", None, required=False)
    assert statuses(required, optional) == ["broken", "missing"]
    assert required.hint == "pip install rich"


def test_the_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {text for text in project["dependencies"] if not text.startswith("torch")}
    assert set(checks.REQUIRED) == declared


def test_backends() -> None:
    assert statuses(*checks.check_backends(True, True, True, gpus=1)) == ["ok"] * 3
    assert statuses(*checks.check_backends(False, False, False, gpus=0)) == [
        "broken",
        "missing",
        "missing",
    ]
    _, nccl, _ = checks.check_backends(True, False, False, gpus=2)
    assert nccl.status == "warning", "GPUs without NCCL deserve more than a shrug"


def test_cpus_and_memory() -> None:
    pinned = checks.check_cpus(16, 4)
    assert statuses(checks.check_cpus(16, 16), pinned) == ["ok", "warning"]
    assert pinned.value == "4 of 16 may be used"
    low = checks.check_memory(8 * GIB, GIB // 2)
    assert statuses(checks.check_memory(8 * GIB, 4 * GIB), low) == ["ok", "warning"]
    assert low.value == "0.5 GiB free of 8.0 GiB"


def test_gpus() -> None:
    good = checks.check_gpus([("NVIDIA H200", 139 * GIB)] * 2, 2)
    driver_only = checks.check_gpus([], 2)
    assert statuses(good, driver_only, checks.check_gpus([], 0)) == ["ok", "warning", "missing"]
    assert good.value.startswith("2: NVIDIA H200 (139.0 GiB)")
    assert "nvidia-smi" in driver_only.hint


def test_workers_that_share_a_gpu() -> None:
    here = checks.check_mps("/usr/bin/nvidia-cuda-mps-control", "580.95", 1)
    absent, useless = checks.check_mps(None, "580.95", 1), checks.check_mps(None, None, 0)
    assert statuses(here, absent, useless) == ["ok", "missing", "missing"]
    assert here.value.endswith(", driver 580.95")
    assert "--per-gpu" in absent.value
    new, old = checks.check_ranks_a_gpu((2, 31, 2), 1), checks.check_ranks_a_gpu((2, 28, 9), 1)
    others = checks.check_ranks_a_gpu(None, 1), checks.check_ranks_a_gpu(None, 0)
    assert statuses(new, old, *others) == ["ok", "missing", "warning", "missing"]
    assert (new.value, old.value[:11]) == ("NCCL 2.31.2", "NCCL 2.28.9")


def test_shared_memory() -> None:
    docker = checks.check_shared_memory(64 * 2**20, 64 * 2**20)
    used_up = checks.check_shared_memory(8 * GIB, GIB // 2)
    plenty = checks.check_shared_memory(8 * GIB, 8 * GIB)
    absent = checks.check_shared_memory(None, 0)
    assert statuses(docker, used_up, plenty, absent) == ["warning", "warning", "ok", "warning"]
    assert "--shm-size" in docker.hint


def test_limits() -> None:
    low = checks.check_limits(256, 65536, 100, rdma=True)
    assert statuses(*low) == ["warning"] * 3
    assert [finding.hint for finding in low] == [
        "ulimit -n 65536",
        "ulimit -l unlimited",
        "ulimit -u 65536",
    ]
    assert statuses(*checks.check_limits(1024, 65536, 1024, rdma=False)) == ["ok"] * 3
    unlimited = checks.check_limits(-1, -1, -1, rdma=True)
    assert statuses(*unlimited) == ["ok"] * 3
    assert {finding.value for finding in unlimited} == {"unlimited"}


def test_loopback() -> None:
    fine = checks.check_loopback(["eth0", "lo"], lambda: True)
    down = checks.check_loopback(["lo"], lambda: False)
    absent = checks.check_loopback(["eth0"], lambda: True)
    assert statuses(fine, down, absent) == ["ok", "broken", "broken"]


def test_temporary_folder(tmp_path: Path) -> None:
    there = checks.check_temporary_folder(tmp_path)
    gone = checks.check_temporary_folder(tmp_path / "gone")
    assert statuses(there, gone) == ["ok", "broken"]
    assert "TMPDIR" in gone.hint
    assert list(tmp_path.iterdir()) == []


def test_programs() -> None:
    absent = checks.check_program("MPI (mpirun)", None, "apt install openmpi-bin")
    assert statuses(absent) == ["missing"]
    assert statuses(checks.check_program("MPI (mpirun)", "Open MPI 5", "apt …")) == ["ok"]


def test_emulation() -> None:
    def only_ip(name: str) -> str | None:
        return "/sbin/ip" if name == "ip" else None

    partly = checks.check_emulation(only_ip, 0)
    no_root = checks.check_emulation(str, 1000)
    assert statuses(checks.check_emulation(str, 0), partly, no_root) == ["ok", "missing", "missing"]
    assert (partly.value, partly.hint) == ("no tc", "apt install iproute2")
    assert "root" in no_root.value


def test_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path / "Python.h"
    no_headers = checks.check_compiler(gpu=False, environ={}, which=str, headers=headers)
    headers.touch()
    default = checks.check_compiler(gpu=False, environ={}, which=str, headers=headers)
    chosen = {"CXX": "icpx", "CC": "icx"}
    cpu = checks.check_compiler(gpu=False, environ=chosen, which=str, headers=headers)
    none = checks.check_compiler(gpu=True, environ={}, which=NOTHING, headers=headers)
    assert statuses(no_headers, default, cpu, none) == ["missing", "ok", "ok", "missing"]
    assert no_headers.hint == "apt install python3-dev"
    assert (default.value, cpu.value, none.value) == ("g++", "icpx", "no clang and no gcc")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    no_triton = checks.check_compiler(gpu=True, environ=chosen, which=str, headers=headers)
    assert (no_triton.status, no_triton.value) == ("missing", "icx, but no Triton")


# What is made of the findings

MIXED = (
    Finding("torch", "ok", "2.13.0"),
    Finding("Slurm (srun)", "missing", "not found", "apt install slurm-client"),
    Finding("memory", "warning", "low [very]", "end other programs"),
)
BROKEN = Finding("loopback", "broken", "no 127.0.0.1", "ip link set lo up")


def run_doctor(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    result = CliRunner().invoke(commands, ["doctor"])
    return result.exit_code, result.stdout


def test_what_is_optional_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run_doctor(monkeypatch, *MIXED)
    assert code == 0
    assert output.splitlines() == [
        "ok       torch         2.13.0",
        "missing  Slurm (srun)  not found  → apt install slurm-client",
        "warning  memory        low [very]  → end other programs",
        "",
        "Everything that Farandole needs works. Warnings: 1; optional and missing: 1.",
    ]


def test_what_is_required_is(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run_doctor(monkeypatch, *MIXED, BROKEN)
    assert code == 1
    assert output.endswith("Broken: loopback.\n")


def test_without_a_required_package_nothing_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "psutil" else real(name))
    monkeypatch.setattr(two_workers, "check_all_reduce", lambda: pytest.fail("it cannot run"))
    findings = doctor.examine()
    assert [finding.name for finding in findings if finding.status == "broken"] == ["psutil"]
    assert findings[-1].name == checks.REQUIRED[-1]


def test_the_table_holds_every_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    show.print_table((*MIXED, BROKEN))
    shown = capsys.readouterr().out
    for finding in (*MIXED, BROKEN):
        for word in (finding.status, finding.name, finding.value, finding.hint):
            assert word in shown
