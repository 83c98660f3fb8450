"""Finds every process of a job on this host, down to the children of its workers, and kills it.

All of them carry the job's identity among their variables, whoever started them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import psutil

from farandole.environment import JOB

IDENTITY = JOB
"""The variable that says to which job a process belongs."""


def kill_leftovers(
    identity: str, worker: int | None = None, worker_variable: str = "RANK"
) -> list[psutil.Process]:
    """Kills what is left of a job, or of one worker, such as its data-loading children.

    `worker` is the number that the worker has in `worker_variable`.
    """
    wanted = {IDENTITY: {identity}}
    if worker is not None:
        wanted[worker_variable] = {str(worker)}
    return kill_having(wanted)


def kill_having(wanted: Mapping[str, Collection[str]]) -> list[psutil.Process]:
    """Kills the processes that have each of these variables, with one of its values."""
    left = [process for process in psutil.process_iter() if _has(process, wanted)]
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            continue
    return left


def _has(process: psutil.Process, wanted: Mapping[str, Collection[str]]) -> bool:
    try:
        variables = process.environ()
    except (psutil.Error, OSError):
        return False
    return all(variables.get(name) in values for name, values in wanted.items())
