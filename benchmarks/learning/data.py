"""Data for all sides: files of float32, made once, that every process maps.

This file needs NumPy alone: sides with an environment of their own import it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CLUSTERS = 8
_CHUNK = 1 << 16


def make(folder: Path, rows: int, columns: int) -> None:
    """Rows around centres, a linear target with few coefficients, and labels of a noisy plane."""
    wanted = {"rows": rows, "columns": columns}
    about = folder / "about.json"
    if about.exists() and json.loads(about.read_text()) == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    about.unlink(missing_ok=True)
    random = np.random.default_rng(0)
    centres = random.normal(size=(CLUSTERS, columns)) * 3
    mixing = random.normal(size=(columns, columns)) / np.sqrt(columns)
    slope = np.where(random.random(columns) < 0.2, random.normal(size=columns), 0.0)
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (rows, columns))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (rows,))
    labels = np.lib.format.open_memmap(folder / "labels.npy", "w+", np.int64, (rows,))
    for first in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - first)
        part = centres[random.integers(0, CLUSTERS, count)]
        part = part + random.normal(size=(count, columns)) @ mixing
        target = part @ slope + random.normal(size=count)
        X[first : first + count] = part
        y[first : first + count] = target
        labels[first : first + count] = target + random.normal(size=count) > 0
    for array in (X, y, labels):
        array.flush()
    np.save(folder / "start.npy", np.asarray(X[:: max(1, rows // CLUSTERS)][:CLUSTERS]))
    about.write_text(json.dumps(wanted))
