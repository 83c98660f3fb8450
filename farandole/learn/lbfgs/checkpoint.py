"""A fit that was interrupted goes on from its last iteration, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from farandole.errors import CheckpointError, UserError
from farandole.learn.lbfgs.history import AT, G
from farandole.learn.lbfgs.minimise import Minimiser
from farandole.learn.lbfgs.vectors import Vectors
from farandole.serialization.files import read_value, write_value


class FitCheckpoint:
    """One file. `task` says what is minimised: a file of another task is refused."""

    def __init__(self, path: Path, task: dict[str, Any]) -> None:
        self._path = path
        self._task = task

    def save(self, minimiser: Minimiser, vectors: Vectors, losses: list[float]) -> None:
        """Writes the whole file or nothing. Raises `CheckpointError`."""
        places = [AT, G, *minimiser.history.used]
        content = {
            "task": self._task,
            "iteration": minimiser.iteration,
            "evaluations": minimiser.evaluations,
            "loss": minimiser.loss,
            "losses": np.array(losses),
            "history": minimiser.history.state(),
            "vectors": {str(place): np.array(vectors.get(place)) for place in places},
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_value(self._path, content)
        except OSError as error:
            raise CheckpointError(f"could not write {self._path}: {error}.") from error

    def load(self, minimiser: Minimiser, vectors: Vectors) -> list[float] | None:
        """The losses so far; None if there is no file. Raises `CheckpointError` for one that is
        damaged, and `UserError` for one of another task."""
        if not self._path.exists():
            return None
        try:
            content = read_value(self._path)
            task = content["task"]
        except Exception as error:  # whatever safetensors or a wrong tree raise
            raise CheckpointError(
                f"{self._path} is damaged, or no checkpoint of LBFGS: {error}. Remove it to begin "
                "again."
            ) from error
        if task != self._task:
            known = {**task, **self._task}
            other = [
                f"{key}={task.get(key)!r}, not {self._task.get(key)!r}"
                for key in known
                if task.get(key) != self._task.get(key)
            ]
            raise UserError(
                f"{self._path} is a checkpoint of something else: it has {'; '.join(other)}. Give "
                "another checkpoint=, or remove the file."
            )
        for place, values in content["vectors"].items():
            vectors.put(int(place), values)
        history = content["history"]
        minimiser.history.load_state(history["order"], [tuple(p) for p in history["products"]])
        minimiser.iteration = content["iteration"]
        minimiser.evaluations = content["evaluations"]
        minimiser.loss = content["loss"]
        return [float(loss) for loss in content["losses"]]
