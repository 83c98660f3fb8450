"""Whether a worker saves once more when it is told to stop: the launcher then says how long it has.

It is a file beside the one in which the worker would say why it failed, as in `joined`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from farandole.system.job_processes import IDENTITY

_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_SUFFIX = ".saves"


def any_saves(folder: Path) -> bool:
    """In the launcher: whether any worker whose files are in `folder` does so."""
    return any(folder.glob(f"*{_SUFFIX}"))


def record_saving(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker that does."""
    target = environ.get(_FILE_VARIABLE)
    if target and IDENTITY in environ:
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            Path(target).with_suffix(_SUFFIX).touch()
