"""A thread that helps without getting in the way of the computation.

PyTorch gives every thread that computes a team of as many threads as the process may use. A second
team, for the copies and sums of a collective in the background, would fight with the first one for
the cores, and both spin while they wait: on 4 cores per rank a training step then takes twice as
long. So a helper computes alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start_helper(work: Callable[[], None], name: str) -> threading.Thread:
    """Runs `work` in a daemon thread of its own, which has no team."""
    ready = threading.Event()
    team = torch.get_num_threads()

    def run() -> None:
        torch.get_num_threads()  # the first question sets what was never set: not after this
        torch.set_num_threads(1)  # of this thread, and of those that start from here on
        ready.set()
        work()

    # `torch.set_num_threads` sets the number for the calling thread, and the default for threads
    # that begin later. The helper therefore sets 1 for itself first, and the caller then restores
    # the default.
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    ready.wait()
    torch.set_num_threads(team)  # so that those are as before; this thread never changed
    return thread
