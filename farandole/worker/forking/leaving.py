"""The end of a forked process without its last act: to take all modules apart.

That writes to almost every page that is shared with the fork server, so that each is copied first:
much of the time of a short process. All that a script can register for its end is done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from farandole.worker.forking import forked


def run_and_leave(command: Sequence[str]) -> NoReturn:
    """What the interpreter does with this command, and then the end of this process."""
    code = 0
    try:
        forked.run(command)
    except SystemExit as end:
        code = _exit_code(end)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1
