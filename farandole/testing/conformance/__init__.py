"""What every group must do, whatever carries its bytes: one suite for all transports.

A check is a function of a group that every rank calls. It makes the inputs of all ranks for itself,
computes alone what should come out, and compares. So it needs nothing but the group: run it in
threads, in forked processes, under mpirun, or over a transport of your own:

    for failure in run_checks(group):
        print(failure)
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from farandole.comm import Group
from farandole.errors import CommError
from farandole.testing.conformance import agreement, background, movement, reductions, subgroups

Check = Callable[[Group], None]

CHECKS: tuple[Check, ...] = (
    *reductions.CHECKS,
    *movement.CHECKS,
    *background.CHECKS,
    *subgroups.CHECKS,
    *agreement.CHECKS,
)

__all__ = ["CHECKS", "Check", "run_checks"]


def run_checks(group: Group, checks: Sequence[Check] = CHECKS) -> list[str]:
    """Runs `checks` on all ranks; returns what failed, and on which rank.

    Stops at the first check that fails: after it the ranks may not be in step any more.
    """
    for check in checks:
        trouble = ""
        try:
            check(group)
        except Exception:
            trouble = traceback.format_exc()
        failures = [
            f"{check.__name__} on rank {rank} of {group.size}:\n{told}"
            for rank, told in _gather(group, trouble).items()
            if told
        ]
        if failures:
            return failures
    return []


def _gather(group: Group, trouble: str) -> dict[int, str]:
    """Every rank's trouble, or this one's, when the group cannot even tell any more."""
    try:
        return dict(enumerate(group.gather_json(trouble)))
    except CommError as error:
        return {group.rank: trouble or str(error)}
