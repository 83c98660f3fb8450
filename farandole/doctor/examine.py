"""Reads the machine. What the readings mean is decided in `checks`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import farandole
from farandole.doctor import checks, two_workers
from farandole.doctor.checks import Finding
from farandole.launch.gpu.mps_control import PROGRAM as MPS_PROGRAM


def examine() -> tuple[Finding, ...]:
    """Every check. Stops after the packages when one that is required is absent."""
    packages = (
        checks.check_python(sys.version_info[:3]),
        Finding("farandole", "ok", farandole.__version__),
        checks.check_torch(*_torch()),
        *(checks.check_package(name, _installed(name)) for name in checks.REQUIRED),
    )
    if checks.is_broken(packages):
        return packages
    return (*packages, *_examine_machine(), *_examine_programs(), *two_workers.check_all_reduce())


def _examine_machine() -> tuple[Finding, ...]:
    import psutil
    import torch.distributed as dist

    from farandole.comm.gpu_sharing import nccl_version
    from farandole.system.cores import usable_cores

    gpus = _gpus()
    count = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    rdma = Path("/sys/class/infiniband")
    return (
        *checks.check_backends(
            dist.is_gloo_available(), dist.is_nccl_available(), dist.is_mpi_available(), len(gpus)
        ),
        checks.check_cpus(count, usable_cores()),
        checks.check_memory(memory.total, memory.available),
        checks.check_gpus(gpus, len(list(Path("/dev").glob("nvidia[0-9]*")))),
        checks.check_mps(shutil.which(MPS_PROGRAM), _driver_version(), len(gpus)),
        checks.check_ranks_a_gpu(nccl_version(), len(gpus)),
        checks.check_shared_memory(shared.total if shared else None, shared.free if shared else 0),
        *checks.check_limits(
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            resource.getrlimit(resource.RLIMIT_NPROC)[0],
            rdma=rdma.is_dir() and any(rdma.iterdir()),
        ),
        checks.check_loopback([name for _, name in socket.if_nameindex()], _can_bind),
        checks.check_temporary_folder(Path(tempfile.gettempdir())),
    )


def _examine_programs() -> tuple[Finding, ...]:
    import torch

    return (
        checks.check_program("MPI (mpirun)", _says_version("mpirun"), "apt install openmpi-bin"),
        checks.check_package("mpi4py", _installed("mpi4py"), required=False),
        checks.check_program("Slurm (srun)", _says_version("srun"), "apt install slurm-client"),
        checks.check_emulation(shutil.which, os.getuid()),
        checks.check_compiler(gpu=torch.cuda.device_count() > 0),
    )


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[str | None, str]:
    """Its own word on its version, and why it has none.

    `2.11.0+cu130` says what it was built for, too; the package's metadata may say 2.11.0 only.
    """
    version = _installed("torch")
    if version is None:
        return None, ""
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that it needs is not there
        return version, str(error)
    return str(torch.__version__), ""


def _says_version(program: str) -> str | None:
    """The first line of `program --version`; None when there is no such program."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        command = [path, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} (does not say its version: {type(error).__name__})"
    return next(iter((said.stdout or said.stderr).splitlines()), path)


def _gpus() -> list[tuple[str, int]]:
    import torch

    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError:
        return []  # a driver that does not fit: `check_gpus` sees its files
    return [(gpu.name, gpu.total_memory) for gpu in found]


def _driver_version() -> str | None:
    """Of NVIDIA's kernel module; None: it is not loaded."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return None


def _can_bind() -> bool:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return False
    return True
