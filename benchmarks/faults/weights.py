"""Whether a job has ended with the right weights: those of the same job when nothing goes wrong.

Where several workers write in any order the weights differ from run to run; there they must be
finite, and all there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from faults.prepare import checkpoints_of

_TOLERANCE = 1e-5

Weights = dict[str, list[float]]


def weights_in(folder: Path) -> Weights | None:
    """Of the newest checkpoint, or of the file that the elastic script writes at its end."""
    result = folder / "result"
    if result.exists():
        found: Weights = json.loads(result.read_text())
        return found
    checkpoints = checkpoints_of(folder)
    if not checkpoints.is_dir():
        return None
    numbered = sorted(path for path in checkpoints.iterdir() if path.name.isdigit())
    if not numbered:
        return None
    return {
        name: [float(value) for value in array.ravel()]
        for file in sorted(numbered[-1].glob("model-*.safetensors"))
        for name, array in load_file(file).items()
    }


def wrong(found: Weights | None, expected: Weights | None, exact: bool) -> str | None:
    """What is wrong with them, in words; None: nothing."""
    if not found or not expected:
        return "no weights were saved" if expected else None
    if found.keys() != expected.keys():
        return f"the weights are {sorted(found)}, not {sorted(expected)}"
    for name, values in found.items():
        if not np.isfinite(values).all():
            return f"{name} is not finite"
        if exact and not np.allclose(values, expected[name], atol=_TOLERANCE):
            away = float(np.abs(np.subtract(values, expected[name])).max())
            return f"{name} is {away:.2g} away from that of an undisturbed job"
    return None


class Baselines:
    """What undisturbed jobs have left, by setting: their weights and their checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, setting: str, job: Path) -> None:
        target = self._folder / setting
        half = target.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        if (job / "runs").is_dir():
            shutil.copytree(job / "runs", half / "runs")
        if (job / "result").exists():
            shutil.copy(job / "result", half)
        shutil.rmtree(target, ignore_errors=True)
        half.rename(target)

    def has(self, setting: str) -> bool:
        return (self._folder / setting).is_dir()

    def weights(self, setting: str) -> Weights | None:
        return weights_in(self._folder / setting)

    def copy_runs(self, setting: str, job: Path) -> None:
        shutil.copytree(self._folder / setting / "runs", job / "runs")
