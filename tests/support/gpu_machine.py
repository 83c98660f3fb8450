"""A machine with GPUs, as far as its programs tell: stand-ins for NVIDIA's."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parents[1] / "launch" / "gpu" / "programs"


def gpu(index: int, **more: Any) -> dict[str, Any]:
    """What `nvidia-smi` says of a GPU."""
    return {
        "index": index,
        "uuid": f"GPU-{index}000-aaaa",
        "name": "NVIDIA H200",
        "compute_mode": "Default",
        "mig.mode.current": "Disabled",
        "utilization.gpu": 37,
        "memory.used": 2048,
        "memory.total": 143771,
        **more,
    }


@dataclass
class GpuMachine:
    """`variables` are those of a process that finds these GPUs, and only these programs of
    NVIDIA's."""

    folder: Path
    variables: dict[str, str]

    def has(self, *gpus: dict[str, Any], processes: tuple[dict[str, Any], ...] = ()) -> None:
        found = {"gpus": gpus, "processes": processes}
        (self.folder / "gpus.json").write_text(json.dumps(found))

    def lacks(self, program: str) -> None:
        (self.folder / program).unlink()


def make_machine(folder: Path) -> GpuMachine:
    """With two GPUs, and MPS. Its programs are in `folder`."""
    folder.mkdir()
    for program in PROGRAMS.iterdir():
        # The interpreter is in the first line: so the process has the name of the program.
        place = folder / program.name
        place.write_text(f"#!{sys.executable} -IS\n{program.read_text()}")
        place.chmod(0o755)
    for name in ("env", "sleep", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    variables = {"PATH": str(folder), "STAND_IN_GPUS": str(folder / "gpus.json")}
    found = GpuMachine(folder, variables)
    found.has(gpu(0), gpu(1))
    return found
