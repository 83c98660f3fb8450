"""What a worker lets its launcher know by the presence of a file, without a message.

`joined`: the worker takes part in its job. One that never does runs the whole script alone, and the
launcher says so at the end. `saves`: the worker saves once more when it is told to stop, and the
launcher then says how long it has. `attempts`: the folder in which the worker counts the
failures of its run. A worker that is stopped because the user pressed Ctrl-C cannot write there any
more, so the launcher does, or on another host the agent there.

The files lie beside the one in which the worker would say why it failed. They outlive the worker:
the launcher reads them after its end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from farandole.system.job_processes import IDENTITY

_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_JOINED, _SAVES, _ATTEMPTS = ".joined", ".saves", ".attempts"  # in place of that file's suffix
INTERRUPTED = "attempts.interrupted"
"""In the folder of a run: its last attempt ended because the user wanted it to."""


def any_joined(folder: Path) -> bool:
    """In the launcher: whether any worker whose files are in `folder` takes part."""
    return any(folder.glob(f"*{_JOINED}"))


def any_saves(folder: Path) -> bool:
    """In the launcher: whether any worker whose files are in `folder` saves before it leaves."""
    return any(folder.glob(f"*{_SAVES}"))


def mark_interrupted(folder: Path) -> None:
    """In the launcher or an agent, when the user has stopped the job with files in `folder`."""
    for marker in folder.glob(f"*{_ATTEMPTS}"):
        with contextlib.suppress(OSError):
            Path(marker.read_text(), INTERRUPTED).touch()


def record_attempts(folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """In a worker that counts the failures of its run in `folder`."""
    _record(_ATTEMPTS, environ, str(folder.absolute()))


def record_joined(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker that calls `fd.init` or `hvd.init`."""
    _record(_JOINED, environ)


def record_saving(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker that saves when it is told to stop."""
    _record(_SAVES, environ)


def _record(suffix: str, environ: Mapping[str, str], content: str = "") -> None:
    target = environ.get(_FILE_VARIABLE)
    # TorchElastic sets the same variable. Only our launcher also sets an identity, and reads these.
    if target and IDENTITY in environ:
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            Path(target).with_suffix(suffix).write_text(content)
