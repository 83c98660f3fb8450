"""What earlier jobs of this user have left in the temporary folder.

The logs of failed jobs are kept for a week. What a killed launcher left goes at once, with the
processes of its job, if its watchdog was killed too. A job that lives keeps its folder, however
quiet it is, and another user's are left alone.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from farandole.system.job_processes import kill_leftovers
from farandole.system.owned_folders import PREFIX, is_abandoned, is_owned, job_of, own_folders

LOGS = "logs"
_KEEP_SECONDS = 7 * 86400.0


def remove_old_folders(temporary: Path | None = None) -> list[Path]:
    """Removes what nobody needs any more, and returns what was removed."""
    removed = []
    for path in own_folders(temporary):
        with contextlib.suppress(OSError):  # another job removes it too
            abandoned = is_abandoned(path)
            if abandoned and (job := job_of(path)):
                kill_leftovers(job)
            if abandoned or _are_old_logs(path):
                shutil.rmtree(path)
                removed.append(path)
    return removed


def _are_old_logs(path: Path) -> bool:
    """Logs that were kept, and in which nothing was written for a week."""
    if not path.name.startswith(f"{PREFIX}{LOGS}-") or is_owned(path):
        return False
    times = [inside.lstat().st_mtime for inside in path.iterdir()]
    return time.time() - max(path.lstat().st_mtime, *times, 0.0) > _KEEP_SECONDS
