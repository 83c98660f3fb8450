"""`fd.cray`: the vocabulary of Cray's deep-learning plugin, for PyTorch and Keras.

    import farandole.cray as mc                     # 1. import
    mc.init(teams=1)                                # 2. initialise, with teams
    mc.broadcast(model)                             # 3. rank 0's parameters
    mc.gradients(model)                             # 4. between backward and step
    mc.finalize()                                   # 5. finalise; prints the statistics

docs/cray.md has the five edits side by side, and what differs from the plugin.
"""

from __future__ import annotations

from farandole.cray.plugin import (
    average,
    barrier,
    broadcast,
    check_buffers_match,
    config_team,
    finalize,
    get_nranks,
    get_rank,
    gradients,
    init,
    statistics,
)

__all__ = [
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "finalize",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "statistics",
]
