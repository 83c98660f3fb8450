"""A loader that gives each rank its share of every global batch, and can resume mid-epoch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from farandole.comm import Group
from farandole.data.bad_samples import SkippingBatch, SkippingCollate
from farandole.data.chunks.batches import NamingCollate
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.chunks.lanes import Readers
from farandole.data.dealing import BatchInfo, Dealings
from farandole.data.device import DeviceCopies
from farandole.data.loading_processes import LoadingProcesses, ProcessLostError
from farandole.data.mirror import DataLoaderMirror
from farandole.data.mixture import MixedDataset
from farandole.data.options import LoaderOptions, resolve
from farandole.data.order import from_sampler, mixed, sampler_length, shuffled
from farandole.data.position import Position
from farandole.data.process_start import ProcessStart
from farandole.data.samplers import RankBatches
from farandole.data.shares import Shares
from farandole.data.speed_shares import SpeedShares
from farandole.data.streams.check import check_stream
from farandole.data.streams.share import StreamShare
from farandole.errors import UserError


class Loader(DataLoaderMirror):
    """Iterating once is one epoch; the order of epoch e depends only on the seed and e.

    The state is the epoch and how many of its samples all ranks together have used, so a run that
    was saved in the middle of an epoch goes on with the samples it has not seen, even on another
    number of ranks. The order that a sampler of the user's own drew is part of the state.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        options: LoaderOptions,
        *,
        group: Group,
        device: torch.device,
        position: Position | None = None,
        on_batch: Callable[[BatchInfo], None] = lambda info: None,
        on_begin: Callable[[bool], None] = lambda fresh: None,
        on_end: Callable[[bool], None] = lambda finished: None,
        on_pause: Callable[[bool], None] = lambda within: None,
        on_shares: Callable[[Sequence[int], Sequence[float]], None] = lambda quotas, speeds: None,
        on_skip: Callable[[Sequence[str]], None] = lambda reasons: None,
        **torch_options: Any,
    ) -> None:
        self.position = position or Position()
        self._group = group
        self._device = device
        self._on_batch = on_batch
        self._on_begin = on_begin  # (whether the epoch begins, or goes on after a resume)
        self._on_end = on_end  # (whether it was read to its end, or broken off)
        self._on_pause = on_pause  # (whether the epoch is under way, or about to begin)
        self._on_skip = on_skip  # (why samples are missing in the batch that comes)
        self.finish: Callable[[Any], Any] = lambda batch: batch  # applied to every batch last
        self.dealings = Dealings()
        self.trains = False  # the pass under way
        self._steps_before = 0
        self.last_batch: BatchInfo | None = None
        """What is known of the batch that was handed out last; None before the first."""
        self._resolved = resolve(source, options, torch_options)
        self.options = self._resolved.options
        self.skips = getattr(self._resolved.dataset, "on_error", "raise") == "skip"
        """Whether samples that cannot be decoded are left out."""
        self._speeds: SpeedShares | None = None
        if self.options.shares == "speed" and group.size > 1:
            self._speeds = SpeedShares(self.position, self.options, group, device, on_shares)
        self._seeder = torch.Generator()
        self.process_start = ProcessStart(self._resolved.torch_options.get("worker_init_fn"))
        self._processes = LoadingProcesses(group.rank)
        self._copies = DeviceCopies(device)
        self._batches: RankBatches | StreamShare
        self._make_inner: Callable[[], DataLoader[Any]]
        if isinstance(self._resolved.dataset, IterableDataset):
            self._share_stream(self._resolved.dataset)
        else:
            self._share_indices()
        self._inner = self._make_inner()

    def _torch_options(self) -> dict[str, Any]:
        """For the DataLoader that this rank loads with: the script's, and what we need of it."""
        options = dict(self._resolved.torch_options)
        if self._device.type == "cuda":
            options.setdefault("pin_memory", True)
        if options.get("num_workers"):
            options["worker_init_fn"] = self.process_start
        # A DataLoader draws a seed for its processes at every start. From torch's own generator,
        # that would shift the random numbers of a run that resumes in the middle of an epoch.
        if options.get("generator") is None:
            options["generator"] = self._seeder
        if self.skips:
            options["collate_fn"] = SkippingCollate(options.get("collate_fn") or default_collate)
        if isinstance(self._resolved.dataset, ChunkedDataset):
            options["collate_fn"] = NamingCollate(options.get("collate_fn") or default_collate)
        return options

    def _share_stream(self, stream: IterableDataset[Any]) -> None:
        """Every rank reads its part of a dataset that comes in an order of its own."""
        if self.options.shuffle:
            raise UserError("an iterable dataset comes in its own order: leave out shuffle=True.")
        if self.options.shares == "speed":
            raise UserError(
                "shares='speed' deals what is left of an epoch anew, and an iterable dataset "
                "cannot be entered in the middle. Pass a dataset with a length."
            )
        torch_options = self._torch_options()
        self._batches = StreamShare(stream, self.options, self._group, torch_options)
        self._make_inner = partial(self._batches.loader, torch_options)

    def _share_indices(self) -> None:
        """Every rank reads the samples whose indices are dealt to it."""
        source, sampler = self._resolved.dataset, self._resolved.sampler
        count = len(cast(Sized, source)) if sampler is None else sampler_length(sampler)
        self._batches = RankBatches(
            count,
            self._group,
            self._order,
            self.options,
            self._plan if isinstance(source, ChunkedDataset) and sampler is None else None,
            self._quotas,
        )
        self._make_inner = partial(
            DataLoader, source, batch_sampler=self._batches, **self._torch_options()
        )

    @property
    def is_training(self) -> bool:
        """Whether a pass that is read now trains, and is no evaluation."""
        return self.options.is_training

    @property
    def shares(self) -> Shares | None:
        """The exact cut; None for a stream, whose length nobody knows."""
        return self._batches.shares if isinstance(self._batches, RankBatches) else None

    def __len__(self) -> int:
        if self.shares is None:
            raise TypeError("this loader reads an iterable dataset, which has no length")
        return self.shares.steps

    def __iter__(self) -> Iterator[Any]:
        position = self.position
        if position.reader not in (None, self):
            raise UserError(
                "two loaders over the same dataset are read at once, and the second was made to "
                "follow the first. Call run.loader for both before either is read."
            )
        # A run can be stopped before the first batch of an epoch. Not where an epoch goes on after
        # a resume: the run would save what it has just loaded.
        if position.resume_at == 0:
            self._on_pause(False)
        done, position.resume_at = position.resume_at, 0
        position.done_samples = done
        if done == 0:
            position.returned, position.readers = [], None
        self._seeder.manual_seed(mixed(self.options.seed, self.epoch, self._group.rank))
        self._on_begin(done == 0)
        finished = False
        self.trains = self.is_training
        position.reader = self
        try:
            yield from self._rest()
            finished = True
        finally:
            # A loop that the script breaks out of has ended its epoch too: the next one begins
            # with another order, as with a DataLoader.
            position.end_epoch(whole=finished)
            self.dealings.end_epoch()
            self._on_end(finished)

    def _rest(self) -> Iterator[Any]:
        """What is left of the epoch, dealt anew whenever other ranks share it, and when a process
        that loaded some of it has died: then to the same ranks."""
        speeds = self._speeds if self.trains else None
        if speeds is not None and speeds.measure.has_measured:
            speeds.agree()
        while True:
            self._begin_dealing()
            if speeds is not None:
                speeds.measure.begin_dealing()
            try:
                yield from self._dealt(speeds)
            except ProcessLostError:
                self._inner = self._make_inner()
                continue
            except Exception:
                self._inner = self._make_inner()  # for a script that goes on
                raise
            if not self.dealings.is_over:
                return

    def _dealt(self, speeds: SpeedShares | None) -> Iterator[Any]:
        batches = self._copies.moved(self._processes.batches(self._inner))
        for index, batch in enumerate(batches):
            info, batch = self._described(index, batch)
            self.last_batch = info
            self._on_batch(info)
            yield self.finish(batch)
            if speeds is not None:
                speeds.measure.end_step(info.own_samples, info.readers)
            is_last = info.steps is not None and info.step + 1 >= info.steps
            if not is_last or self.dealings.is_over:  # else the epoch is over
                self._on_pause(True)
            if speeds is not None:
                if not is_last:
                    self._share_anew(speeds)
                speeds.measure.begin_step()
            if self.dealings.is_over:
                return

    def _begin_dealing(self) -> None:
        position = self.position
        if isinstance(self._batches, StreamShare):
            # A shuffle must be the same on all ranks, and after a process was lost.
            self._seeder.manual_seed(mixed(self.options.seed, self.epoch))
            self._batches.begin(self.epoch, position.done_samples)
        else:
            self._batches.begin(self.epoch, position.returned, position.done_samples)
            if self._batches.dealing is None:
                self.dealings.end_epoch()
            else:
                self.dealings.begin(self._batches.dealing)
        # For display and progress only. After a resume on other numbers `done` need not be a whole
        # number of steps; which samples come next depends on the position alone.
        done = position.done_samples - len(position.returned)
        self._steps_before = done // self.options.global_batch(len(self._group.readers))

    def _described(self, index: int, batch: Any) -> tuple[BatchInfo, Any]:
        """Counts a batch that was read, and says what is known of it."""
        # Counted before the batch is handed out: a script that saves within its step has used this
        # batch, and must not get it again. What worker processes have loaded ahead does not count;
        # it is loaded again after a resume.
        step = self._steps_before + index
        if isinstance(self._batches, StreamShare):
            batch, samples, part, first = batch
            if first is not None:
                check_stream(self._group, self.position, first)
            self.position.use(samples)
            weight = part.samples * self._group.size / samples
            return BatchInfo(step, None, samples, weight, part.readers, part.samples), batch
        group = self._group
        dealing, number = self.dealings.current, self.dealings.hand_out()
        rank = dealing.members.index(group.members[group.rank])
        self.position.use(dealing.length(number))
        samples, weight, readers, own = dealing.describe(number, rank, group.members)
        steps = self._steps_before + dealing.shares.steps
        skipped = 0
        if isinstance(batch, SkippingBatch):
            batch, reasons = batch
            skipped = len(reasons)
            own -= skipped / readers
            if reasons:
                self._on_skip(reasons)
        return BatchInfo(step, steps, samples, weight, readers, own, skipped), batch

    def deal_anew(self, members: Collection[int]) -> None:
        """*Together.* The `members` share the rest of the epoch from the next batch on. What others
        had read and not contributed to a step goes back, and is read next."""
        returned, self.position.done_samples = self.dealings.end_here(members)
        self.position.returned = list(returned)

    def _quotas(self, size: int) -> tuple[int, ...]:
        return () if self._speeds is None else self._speeds.quotas(size)

    def _share_anew(self, speeds: SpeedShares) -> None:
        """*Together.* Between two steps: deals the rest by the ranks' speeds, if that is due."""
        # Chunks belong to ranks as long as an epoch lasts: its next one is dealt by speed.
        is_due = speeds.measure.is_due and not isinstance(self._resolved.dataset, ChunkedDataset)
        if is_due and speeds.agree():
            self.deal_anew(self._group.members)

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun and not ended, and who reads what of it is known."""
        return self.position.reader is self and self.dealings.has_begun

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or will be next."""
        return self.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.position.epoch = epoch

    @property
    def done_samples(self) -> int:
        """Of this epoch, handed out to all ranks together."""
        return self.position.done_samples

    def state_dict(self) -> dict[str, Any]:
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load_state_dict(state)

    def _order(self, epoch: int, count: int) -> Sequence[int]:
        sampler = self._resolved.sampler
        dataset = self._resolved.dataset
        if sampler is None and isinstance(dataset, (ChunkedDataset, MixedDataset)):
            return self._own_order(dataset, epoch)
        if sampler is None:
            shuffle = self.options.shuffle is not False
            return shuffled(count, self.options.seed, epoch) if shuffle else range(count)
        if not self.position.drawn:  # else a resumed epoch goes on in the order it began with
            self.position.drawn = from_sampler(sampler, self._group, epoch)
        drawn = self.position.drawn
        if len(drawn) != count:
            raise UserError(
                f"the sampler {type(sampler).__name__} gave {len(drawn)} samples and "
                f"its length is {count}. They must be the same."
            )
        return drawn

    def _plan(self, batches: Callable[[], Iterator[list[int]]]) -> Iterator[list[int]]:
        """What each process that reads chunks is told of the next ones."""
        dataset = cast(ChunkedDataset, self._resolved.dataset)
        return dataset.planned(batches, max(1, self._inner.num_workers))

    def _own_order(self, dataset: ChunkedDataset | MixedDataset, epoch: int) -> Sequence[int]:
        """One that depends on who reads. An epoch that goes on with other ranks keeps the order
        that it began with."""
        position, options = self.position, self.options
        if position.readers is None:
            ranks = len(self._group.readers)
            position.readers = Readers(
                ranks,
                options.global_batch(ranks),
                max(1, self._inner.num_workers),
                options.drop_last,
                not options.is_training,
                self._quotas(ranks),
            )
        seed = None if options.shuffle is False else options.seed
        order = dataset.order(position.readers, seed, epoch)
        return array("q", order.tobytes())  # indices that are Python's own numbers
