"""The end of a script: what goes wrong in it must show in the exit code.

Python prints an error that is raised at exit, and exits with 0 all the same. A save in the
background that has failed would go unnoticed by the launcher, and by whoever queues the job.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from farandole.errors import FarandoleError

if TYPE_CHECKING:
    from farandole.train.run import Run


class Ending:
    """Closes a run at exit, and after that, if it failed, ends the process with 1."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._process = os.getpid()
        self._failed = False

    def close(self) -> None:
        try:
            self._run.close()
        except FarandoleError as error:
            # Where an uncaught exception goes: to standard error, and to the launcher.
            sys.excepthook(type(error), error, error.__traceback__)
            self._failed = True

    def leave(self) -> None:
        """Registered before all else of ours, and so called last."""
        if not self._failed or self._process != os.getpid():
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)
