"""`farandole doctor`: what works on this machine, and what to install.

Reads the machine and prints; what the readings mean is decided in `farandole.doctor.checks`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click

import farandole
from farandole.doctor import checks
from farandole.doctor.checks import Finding

_COLOURS = (("ok", "green"), ("warning", "yellow"), ("missing", "cyan"), ("broken", "red"))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check this machine, and say how to get what is absent.

    Looks at Python, torch and its backends, CPUs, GPUs, memory, limits, MPI, Slurm and the
    compiler; then two workers add numbers for real and measure what a message between them
    costs. Ends with 0 unless something that Farandole
    cannot work without is broken: what is optional may be missing.
    """
    findings = examine()
    if as_json:
        found = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"ok": not checks.is_broken(findings), "findings": found}, indent=2))
    else:
        # rich itself may be what is missing.
        if sys.stdout.isatty() and find_spec("rich") is not None:
            _print_table(findings)
        else:
            click.echo("\n".join(plain_lines(findings)))
        click.echo(f"\n{verdict(findings)}")
    sys.exit(1 if checks.is_broken(findings) else 0)


def plain_lines(findings: Sequence[Finding]) -> list[str]:
    """One line for each finding, in columns; what to do follows an arrow."""
    width = max(len(finding.name) for finding in findings)
    return [
        f"{finding.status:<8} {finding.name:<{width}}  {finding.value}"
        + (f"  → {finding.hint}" if finding.hint else "")
        for finding in findings
    ]


def verdict(findings: Sequence[Finding]) -> str:
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if broken:
        return f"Farandole cannot work here yet. Broken: {', '.join(broken)}."
    counts = {kind: sum(f.status == kind for f in findings) for kind in ("warning", "missing")}
    return (
        f"Everything that Farandole needs works. Warnings: {counts['warning']}; "
        f"optional and missing: {counts['missing']}."
    )


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = dict(_COLOURS)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        # Text, not markup: a value may hold square brackets.
        table.add_row(
            Text(finding.status, style=colours[finding.status]),
            *map(Text, (finding.name, finding.value, finding.hint)),
        )
    Console(width=max(shutil.get_terminal_size().columns, 60), highlight=False).print(table)


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
    return (*packages, *_examine_machine(), *_examine_programs(), *checks.check_all_reduce())


def _examine_machine() -> tuple[Finding, ...]:
    import psutil
    import torch.distributed as dist

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


def _can_bind() -> bool:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return False
    return True
