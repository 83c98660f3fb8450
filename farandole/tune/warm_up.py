"""The process that trials are forked from, begun before this one imports torch itself.

Both imports take seconds, and need not wait for each other.
"""

from __future__ import annotations

from pathlib import Path

from farandole.launch.nested_runs import WarmProcesses
from farandole.launch.placement.placement import place
from farandole.tune.options import TuneOptions
from farandole.tune.preloading import modules_of
from farandole.tune.slots import slots_here


def begin_warm_up(options: TuneOptions) -> WarmProcesses:
    """With nothing begun yet where hosts are described: what runs here is then found out later."""
    warm = WarmProcesses()
    if place(options.where, None) is None:
        # Only torch could count GPUs; with any, nothing is forked.
        slots = slots_here(options.workers, options.parallel, gpus=0)
        warm.begin({slots.workers_here}, modules=modules_of(Path(options.command[0])))
    return warm
