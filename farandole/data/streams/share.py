"""Sharing an iterable dataset, whose length nobody knows in advance.

Every rank walks the same stream, cuts it into global batches and keeps its share of each: the same
exact cut as `Shares`, found on the way. Evaluation holds one batch back, which must lend samples to
a tail that is too short for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_collate

from farandole.comm import Group
from farandole.data.options import LoaderOptions
from farandole.data.shares import Part, can_lend, part_of, warn_of_rest
from farandole.data.streams.check import COMPARED_SAMPLES, Digests, digests
from farandole.errors import UserError


def global_batches(
    stream: Iterable[Any],
    global_batch: int,
    size: int,
    drop_last: bool = False,
    done: int = 0,
    *,
    evaluates: bool = False,
) -> Iterator[list[Any]]:
    """Cuts a stream, from sample `done` on, as `Shares` cuts a dataset of known length.

    Raises `UserError` when the whole stream is empty, has fewer samples than there are workers,
    or would be dropped.
    """
    items = iter(stream)
    # A stream cannot be entered in the middle. Every rank reads past what all ranks have used.
    for _ in islice(items, done):
        pass  # used before the run was stopped
    whole_batches = _whole_batches(items, global_batch, size, drop_last, is_rest=done > 0)
    return _lending(whole_batches, size) if evaluates and not drop_last else whole_batches


def _whole_batches(
    items: Iterator[Any], global_batch: int, size: int, drop_last: bool, *, is_rest: bool
) -> Iterator[list[Any]]:
    """All of `global_batch` samples but the last, which may be short."""
    is_first = not is_rest
    while True:
        batch = list(islice(items, global_batch))
        if is_first and len(batch) < size:
            raise UserError(
                f"a stream of {len(batch)} samples cannot be shared by {size} workers: each needs "
                "at least one."
            )
        dropped = drop_last and len(batch) < global_batch
        if is_first and dropped:
            raise UserError(
                f"drop_last would drop all {len(batch)} samples of the stream: a global batch is "
                f"{global_batch}. Use a smaller batch or drop_last=False."
            )
        if not batch or dropped:
            return
        yield batch
        is_first = False


def _lending(batches: Iterator[list[Any]], size: int) -> Iterator[list[Any]]:
    """So that there is a sample for every rank in every step."""
    # One batch behind the stream: the held batch may be yielded only when the next one is known to
    # have a sample for every rank.
    held: list[Any] = []
    for batch in batches:
        if held and len(batch) < size:
            lent = size - len(batch) if can_lend(len(held), len(batch), size) else 0
            if lent:
                yield held[:-lent]
                held = held[-lent:]
            held += batch
            break
        if held:
            yield held
        held = batch
    if len(held) >= size:
        yield held
    else:
        warn_of_rest(len(held), size)


class StreamBatch(NamedTuple):
    """One rank's share of a global batch."""

    batch: Any  # collated
    samples: int  # of all ranks
    part: Part
    digests: Digests | None  # of the stream's first samples, with the first batch


class StreamShare(IterableDataset[Any]):
    """One rank's share of a stream."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        options: LoaderOptions,
        group: Group,
        torch_options: dict[str, Any],
    ) -> None:
        global_batch = options.global_batch(group.size)
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
        self._options = options
        self._rank, self._size = group.rank, group.size
        self.collate_fn: Callable[[list[Any]], Any] = (
            torch_options.get("collate_fn") or default_collate
        )
        self._done = 0
        self._evaluates = False

    def begin(self, epoch: int, done: int) -> None:
        self._done = done
        self._evaluates = not self._options.is_training  # a loading process cannot tell
        set_epoch = getattr(self._stream, "set_epoch", None)  # as many streaming datasets have
        if set_epoch is not None:
            set_epoch(epoch)

    def loader(self, torch_options: dict[str, Any]) -> DataLoader[Any]:
        others = {k: v for k, v in torch_options.items() if k != "collate_fn"}
        return DataLoader(self, batch_size=None, **others)

    def __iter__(self) -> Iterator[StreamBatch]:
        items = iter(self._stream)
        first = list(islice(items, COMPARED_SAMPLES))
        told: Digests | None = digests(first)
        for batch in global_batches(
            chain(first, items),
            self._global_batch,
            self._size,
            self._options.drop_last,
            self._done,
            evaluates=self._evaluates,
        ):
            part = part_of(len(batch), self._size, self._rank, self._global_batch)
            yield StreamBatch(self.collate_fn(batch[part.where]), len(batch), part, told)
            told = None
