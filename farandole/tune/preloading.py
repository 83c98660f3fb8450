"""Torch, and what the script imports beside it, imported once for all trials.

Only libraries that are known to start no threads and to open nothing when they are imported: trials
are forked from the process that has them. Others are imported in each trial, as in any process.
"""

from __future__ import annotations

import ast
from pathlib import Path

from farandole.launch.nested_runs import WarmProcesses
from farandole.launch.placement.placement import place
from farandole.tune.options import TuneOptions
from farandole.tune.slots import slots_here

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


def begin_preloading(options: TuneOptions) -> WarmProcesses:
    """Before this process imports torch itself: both take seconds, and need not wait for each
    other. Nothing is begun where hosts are described: what runs here is then found out later."""
    warm = WarmProcesses()
    if place(options.where, None) is None:
        # Only torch could count GPUs; with any, nothing is forked.
        slots = slots_here(options.workers, options.parallel, gpus=0)
        warm.begin({slots.workers_here}, modules=modules_of(Path(options.command[0])))
    return warm
