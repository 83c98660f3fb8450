"""Sharing an iterable dataset, whose length nobody knows in advance.

Every rank walks the same stream, cuts it into global batches and keeps its share of each. One
batch is held back, so that a tail too short for all ranks can join the batch before it: the same
exact cut as `Shares`, found on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_collate

from farandole.comm import Group
from farandole.data.shares import share_slice, warn_of_rest
from farandole.errors import UserError


def global_batches(
    stream: Iterable[Any], global_batch: int, size: int, drop_last: bool = False, done: int = 0
) -> Iterator[list[Any]]:
    """Cuts a stream, from sample `done` on, as `Shares` cuts a dataset of known length.

    Raises `UserError` when the whole stream is empty, has fewer samples than there are workers,
    or would be dropped.
    """
    items = iter(stream)
    for _ in islice(items, done):
        pass  # used before the run was stopped
    held: list[Any] = []
    dropped = 0
    while piece := list(islice(items, global_batch)):
        if drop_last and len(piece) < global_batch:
            dropped = len(piece)
            break
        if held and len(piece) < size:
            held += piece
            break
        if held:
            yield held
        held = piece
    if len(held) >= size:
        yield held
    elif done:
        warn_of_rest(len(held), size)
    elif dropped:
        raise UserError(
            f"drop_last would drop all {dropped} samples of the stream: a global batch is "
            f"{global_batch}. Use a smaller batch or drop_last=False."
        )
    else:
        raise UserError(
            f"a stream of {len(held)} samples cannot be shared by {size} workers: each needs at "
            "least one."
        )


class StreamShare(IterableDataset[Any]):
    """One rank's share of a stream: yields (collated batch, samples of all ranks, weight)."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        global_batch: int,
        group: Group,
        drop_last: bool,
        torch_options: dict[str, Any],
    ) -> None:
        workers = torch_options.get("num_workers", 0)
        if workers > 1:
            raise UserError(
                f"an iterable dataset can be read by at most one loading process per rank, not "
                f"num_workers={workers}: several would each read the whole stream."
            )
        if torch_options.get("persistent_workers"):
            raise UserError(
                "an iterable dataset is read anew in every epoch, from where the run stands; a "
                "process that persists would not know. Leave out persistent_workers=True."
            )
        if global_batch < group.size:
            raise UserError(
                f"a global batch of {global_batch} cannot be shared by {group.size} workers."
            )
        self._stream = stream
        self._global_batch = global_batch
        self._drop_last = drop_last
        self._rank, self._size = group.rank, group.size
        self.collate_fn: Callable[[list[Any]], Any] = (
            torch_options.get("collate_fn") or default_collate
        )
        self._done = 0

    def begin(self, epoch: int, done: int) -> None:
        self._done = done
        set_epoch = getattr(self._stream, "set_epoch", None)  # as many streaming datasets have
        if set_epoch is not None:
            set_epoch(epoch)

    def loader(self, torch_options: dict[str, Any]) -> DataLoader[Any]:
        others = {k: v for k, v in torch_options.items() if k != "collate_fn"}
        return DataLoader(self, batch_size=None, **others)

    def __iter__(self) -> Iterator[tuple[Any, int, float]]:
        for batch in global_batches(
            self._stream, self._global_batch, self._size, self._drop_last, self._done
        ):
            mine = batch[share_slice(len(batch), self._size, self._rank)]
            yield self.collate_fn(mine), len(batch), len(mine) * self._size / len(batch)
