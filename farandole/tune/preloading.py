"""What the script imports beside torch, to be imported once for all trials.

Only libraries that are known to start no threads and to open nothing when they are imported: trials
are forked from the process that has them. Others are imported in each trial, as in any process.
"""

from __future__ import annotations

import ast
from pathlib import Path

_SAFE = {"numpy", "scipy", "sklearn", "pandas", "PIL", "matplotlib"}
_FOR_METRICS = "torch.utils.tensorboard"  # what the first `run.log` imports


def modules_of(script: Path) -> list[str]:
    """The modules, by their whole names. A script that cannot be read or parsed has none."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return [_FOR_METRICS]
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    found = [name for name in names if name.partition(".")[0] in _SAFE]
    return [_FOR_METRICS, *dict.fromkeys(found)]
