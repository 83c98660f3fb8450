"""Speaks to an MPS control daemon, by NVIDIA's own program, which is both daemon and client."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from farandole.errors import UserError

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where a daemon listens that was not told where, and where CUDA looks for it."""
PROGRAM = "nvidia-cuda-mps-control"
_QUESTION = "get_default_active_thread_percentage"  # starts no server, and changes nothing


def control_program() -> str:
    """Its path. Raises `UserError` where it is not installed."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise UserError(
            f"there is no {PROGRAM} on the PATH, and without MPS workers that share a GPU take "
            "turns. It comes with NVIDIA's driver (Debian, Ubuntu: nvidia-compute-utils); in a "
            "container set NVIDIA_DRIVER_CAPABILITIES=compute,utility. Or use one worker a GPU: "
            "--per-gpu 1."
        )
    return path


def ask(command: str, pipes: Path, seconds: float) -> str | None:
    """The daemon's answer; None: none came in time, or there is no daemon."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [control_program()],
            input=f"{command}\n",
            env={**os.environ, PIPE_DIRECTORY: str(pipes)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def answers(pipes: Path, seconds: float) -> bool:
    """Whether a daemon that lives listens in this folder. Its answer is a number."""
    # `Path.is_dir` raises for a folder that may not be looked at, or whose name is too long.
    answer = ask(_QUESTION, pipes, seconds) if os.path.isdir(pipes) else None  # noqa: PTH112
    return answer is not None and any(letter.isdigit() for letter in answer)
