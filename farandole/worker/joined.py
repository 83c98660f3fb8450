"""Whether a worker has taken part in its job: one that never does runs the whole script alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from farandole.system.job_processes import IDENTITY

_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


_SUFFIX = ".joined"  # of a file beside the one in which a worker would say why it failed


def any_joined(folder: Path) -> bool:
    """In the launcher: whether any worker whose files are in `folder` takes part."""
    return any(folder.glob(f"*{_SUFFIX}"))


def record_joined(environ: Mapping[str, str] = os.environ) -> None:
    """In a worker that calls `fd.init` or `hvd.init`."""
    target = environ.get(_FILE_VARIABLE)
    if target and IDENTITY in environ:
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            Path(target).with_suffix(_SUFFIX).touch()
