"""Where layout, sync and data meet: the run, and its checkpoints."""

from farandole.train.current_run import current
from farandole.train.run import Run
from farandole.train.start import init

__all__ = ["Run", "current", "init"]
