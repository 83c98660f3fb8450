"""The name of a run, the same on all ranks, and the folder that is made for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farandole.comm import Group
from farandole.train.claim import Claim, claim
from farandole.train.elastic.training import ElasticTraining
from farandole.train.settings import check_name, default_name


@dataclass(frozen=True)
class RunName:
    """`claim`: on rank 0, of a folder that nobody named."""

    name: str
    claim: Claim | None

    def release(self) -> None:
        """Removes the folder that was made for the run, if nothing was written to it."""
        if self.claim is not None:
            self.claim.release()


def agree_on_name(
    group: Group,
    place: Path,
    chosen: str | None,
    script: str | None,
    elastic: ElasticTraining | None,
) -> RunName:
    """*Together.* The `chosen` name; else the one before a restart, or one of the `script`'s."""
    claimed: Claim | None = None
    if chosen is None and elastic is not None:
        chosen = elastic.name_before()
    if chosen is None:
        chosen = default_name(script or "run")
        if group.rank == 0:
            claimed = claim(place, chosen)
            chosen = claimed.name
    agreed: str = group.broadcast_json(check_name(chosen))
    if elastic is not None and group.rank == 0:
        elastic.keep_name(agreed)  # where all workers are lost, others go on in this folder
    return RunName(agreed, claimed)
