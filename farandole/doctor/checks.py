"""What works on this machine: the checks behind `farandole doctor`.

A check is given what it judges and returns a `Finding`, so it can be tried with any machine's
numbers; the command reads the real ones. Nothing here imports torch at the top: that it is
missing must be a finding, not a traceback.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REQUIRED = (
    "numpy",
    "safetensors",
    "rich",
    "click",
    "psutil",
    "matplotlib",
    "tensorboard",
    "pyzmq",
    "cryptography",
    "PyYAML",
    "Jinja2",
)
_GIB = 2**30
_HEADERS = Path(sysconfig.get_paths()["include"]) / "Python.h"

Status = Literal["ok", "warning", "missing", "broken"]
"""`missing` is something optional, `broken` something that Farandole cannot work without."""


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    value: str
    hint: str = ""  # the command, or the change, that makes it ok


def is_broken(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "broken" for finding in findings)


# Python and its packages


def check_python(version: Sequence[int]) -> Finding:
    text = ".".join(map(str, version))
    if tuple(version) < (3, 11):
        return Finding("Python", "broken", text, "install Python 3.11 or later")
    return Finding("Python", "ok", text)


def check_torch(version: str | None, problem: str = "") -> Finding:
    """`problem` is why it cannot be imported."""
    if version is None:
        return Finding("torch", "broken", "not installed", "pip install 'torch>=2.10'")
    if problem:
        again = f"pip install --force-reinstall torch=={version}"
        return Finding("torch", "broken", f"{version}, but import torch fails: {problem}", again)
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < (2, 10):
        return Finding("torch", "broken", version, "pip install --upgrade 'torch>=2.10'")
    return Finding("torch", "ok", version)


def check_package(name: str, version: str | None, *, required: bool = True) -> Finding:
    if version is not None:
        return Finding(name, "ok", version)
    status: Status = "broken" if required else "missing"
    return Finding(name, status, "not installed", f"pip install {name}")


def check_backends(gloo: bool, nccl: bool, mpi: bool, gpus: int) -> tuple[Finding, ...]:
    """c10d's own backends. Under mpirun Farandole talks through gloo or NCCL as well."""
    cuda_build = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
    source_build = "build torch from source with an MPI installed; mpirun itself works without"
    return (
        _present("backend gloo", gloo, "broken", "pip install --force-reinstall torch"),
        _present("backend NCCL", nccl, "warning" if gpus else "missing", cuda_build),
        _present("backend MPI", mpi, "missing", source_build),
    )


def _present(name: str, there: bool, otherwise: Status, hint: str) -> Finding:
    return Finding(name, "ok", "available") if there else Finding(name, otherwise, "absent", hint)


# The machine


def check_cpus(count: int, allowed: int) -> Finding:
    if allowed < count:
        hint = "start outside of taskset, or ask the batch system for more CPUs"
        return Finding("CPUs", "warning", f"{allowed} of {count} may be used", hint)
    return Finding("CPUs", "ok", str(count))


def check_memory(total_bytes: int, available_bytes: int) -> Finding:
    value = f"{_gib(available_bytes)} free of {_gib(total_bytes)}"
    if available_bytes < _GIB:
        return Finding("memory", "warning", value, "end other programs, or start fewer workers")
    return Finding("memory", "ok", value)


def check_gpus(gpus: Sequence[tuple[str, int]], device_files: int) -> Finding:
    """`gpus` are what torch sees: names and bytes; `device_files` what the driver shows."""
    if gpus:
        value = ", ".join(f"{name} ({_gib(size)})" for name, size in gpus)
        return Finding("GPUs", "ok", f"{len(gpus)}: {value}")
    if device_files:
        hint = "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)"
        return Finding("GPUs", "warning", f"{device_files} present, none usable by torch", hint)
    return Finding("GPUs", "missing", "none", "not needed: workers then run on CPUs")


def check_mps(program: str | None, driver: str | None, gpus: int) -> Finding:
    """What `farandole run --per-gpu` starts. `program` is where it is."""
    if program is not None:
        version = "" if driver is None else f", driver {driver}"
        return Finding("MPS", "ok", f"{program}{version}")
    if not gpus:
        return Finding("MPS", "missing", "not found", "not needed without a GPU")
    hint = "apt install nvidia-compute-utils-<driver>; docker run -e NVIDIA_DRIVER_CAPABILITIES=all"
    return Finding("MPS", "missing", "not found: --per-gpu cannot be used", hint)


def check_ranks_a_gpu(nccl: tuple[int, ...] | None, gpus: int) -> Finding:
    """Whether workers that share a GPU can use NCCL. `nccl` is the version that is loaded."""
    from farandole.comm.gpu_sharing import FIRST_VERSION

    name = "several ranks a GPU"
    if not gpus:
        return Finding(name, "missing", "no GPU", "not needed: workers then run on CPUs")
    if nccl is None:
        hint = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Finding(name, "warning", "NCCL is not loaded", hint)
    version = ".".join(map(str, nccl))
    if nccl[:2] < FIRST_VERSION:
        hint = "pip install 'nvidia-nccl-cu13>=2.30' elsewhere, and LD_PRELOAD its libnccl.so.2"
        return Finding(name, "missing", f"NCCL {version} wants a GPU for each rank", hint)
    return Finding(name, "ok", f"NCCL {version}")


def check_shared_memory(total_bytes: int | None, free_bytes: int) -> Finding:
    hint = "docker run --shm-size=8g …, or: mount -o remount,size=8G /dev/shm"
    if total_bytes is None:
        return Finding("shared memory", "warning", "no /dev/shm", hint)
    value = f"{_gib(free_bytes)} free of {_gib(total_bytes)} in /dev/shm"
    status: Status = "warning" if free_bytes < _GIB else "ok"
    return Finding("shared memory", status, value, hint if status == "warning" else "")


def check_limits(
    open_files: int, locked_bytes: int, processes: int, *, rdma: bool
) -> tuple[Finding, ...]:
    """Soft limits of this process; below 0 is unlimited. Locked memory matters to RDMA alone."""

    def limit(name: str, value: int, least: int, command: str) -> Finding:
        text = "unlimited" if value < 0 else f"{value:,}"
        if 0 <= value < least:
            return Finding(name, "warning", text, command)
        return Finding(name, "ok", text)

    return (
        limit("limit: open files", open_files, 1024, "ulimit -n 65536"),
        limit("limit: locked bytes", locked_bytes, _GIB if rdma else 0, "ulimit -l unlimited"),
        limit("limit: processes", processes, 1024, "ulimit -u 65536"),
    )


def check_loopback(interfaces: Sequence[str], can_bind: Callable[[], bool]) -> Finding:
    name = next((found for found in interfaces if found in ("lo", "lo0")), None)
    if name is None or not can_bind():
        return Finding("loopback", "broken", "no 127.0.0.1", "ip link set lo up")
    return Finding("loopback", "ok", f"{name}, 127.0.0.1")


def check_temporary_folder(folder: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"farandole")
            file.flush()
    except OSError as error:
        hint = "export TMPDIR=… (a folder that you can write to)"
        return Finding("temporary folder", "broken", f"{folder}: {error.strerror}", hint)
    free = shutil.disk_usage(folder).free
    return Finding("temporary folder", "ok", f"{folder}, {_gib(free)} free")


# Programs


def check_program(name: str, version: str | None, hint: str) -> Finding:
    if version is None:
        return Finding(name, "missing", "not found", hint)
    return Finding(name, "ok", version)


def check_emulation(which: Callable[[str], str | None], user_id: int) -> Finding:
    """What it takes to put network namespaces with a bandwidth cap between workers."""
    name = "network emulation"
    absent = [tool for tool in ("ip", "tc") if which(tool) is None]
    if absent:
        return Finding(name, "missing", f"no {' and no '.join(absent)}", "apt install iproute2")
    if user_id != 0:
        return Finding(name, "missing", "ip and tc are here, but need root", "run it with sudo")
    return Finding(name, "ok", "ip, tc, root")


def check_compiler(
    *,
    gpu: bool,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    headers: Path = _HEADERS,
) -> Finding:
    """What torch.compile calls: on CPUs $CXX or g++; on GPUs Triton, with $CC, clang or gcc."""
    name = "compiler"
    if gpu:
        candidates = [environ["CC"]] if environ.get("CC") else ["clang", "gcc"]
        hint = "apt install gcc"
    else:
        candidates = [environ.get("CXX") or "g++"]
        hint = "apt install g++"
    found = next((path for path in map(which, candidates) if path), None)
    if found is None:
        return Finding(name, "missing", f"no {' and no '.join(candidates)}", hint)
    if not headers.exists():
        return Finding(name, "missing", f"{found}, but no {headers}", "apt install python3-dev")
    if gpu and importlib.util.find_spec("triton") is None:
        return Finding(name, "missing", f"{found}, but no Triton", "pip install triton")
    return Finding(name, "ok", found)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
