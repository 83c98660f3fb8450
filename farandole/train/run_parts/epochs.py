"""`run.epochs`: where the loop over epochs begins and ends, and what is done between two."""

from __future__ import annotations

from collections.abc import Iterator

from farandole.train.checkpoint.run_saving import RunSaving
from farandole.train.passes import Passes
from farandole.train.session import Session


def run_epochs(
    name: str, count: int, session: Session, passes: Passes, saving: RunSaving
) -> Iterator[int]:
    """*Together.* The epochs that are left of `count`, after a resume from what was saved."""
    progress, automatic, elastic = session.progress, passes.automatic, passes.elastic
    saving.resume_by_itself()
    if elastic is not None:
        elastic.join_running()
    if progress.resumed and progress.epoch >= count:
        session.print(f"{name}: all {count} epochs are done already")
    progress.total_epochs = count
    end = min(count, session.settings.until_epoch or count)
    while (epoch := session.group.transport.begin_epoch(min(progress.epoch, end))) < end:
        progress.begin_epoch(epoch)
        if automatic is not None:
            automatic.begin_epoch()
        if elastic is not None:
            elastic.begin_epoch(epoch)
        yield epoch
        progress.end_epoch()
        if automatic is not None:
            automatic.end_of_epoch(last=epoch + 1 >= end)
