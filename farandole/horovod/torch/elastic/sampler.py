"""Shares a dataset out among workers whose number changes in the middle of an epoch.

Who has seen what is written down, so that after a change what is left, and only that, is shared out
among those who are there then. Each sample of an epoch is seen once; where what is left cannot be
divided evenly, some are seen twice, so that all workers take the same number of steps.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from farandole.horovod.torch.mpi_ops import rank, size


class ElasticSampler(Sampler[int]):
    """For a `DataLoader`. Put it into the state, and record each batch before the commit:

        sampler = hvd.elastic.ElasticSampler(dataset)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler)
        …
            sampler.record_batch(batch_idx, batch_size)
            state.commit()

    Call `set_epoch` at the end of each epoch, so that a half-finished one is not begun again.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self._news: set[int] = set()  # of those, what the other workers have not been told
        self.indices: list[int] = []  # this worker's, in the order of the last iteration
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, in which nothing has been seen."""
        self.epoch = epoch
        self.processed_indices = set()
        self._news = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The samples of a batch have been seen; batches count from the last `iter`."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """These samples have been seen."""
        self._news.update(indices)
        self.processed_indices |= self._news

    def take_news(self) -> list[int]:
        """What this worker has recorded since it was last asked."""
        news, self._news = sorted(self._news), set()
        return news

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self._news = set()
        self.reset()

    def reset(self) -> None:
        """Shares out what has not been seen among the workers of now, from the next `iter` on."""
        self.num_replicas = size()
        self.rank = rank()
        self.remaining_indices = [
            index for index in range(len(self.dataset)) if index not in self.processed_indices
        ]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = list(self.remaining_indices)
        if self.shuffle:  # alike on all workers, whatever else they draw
            random.Random(self.seed + self.epoch).shuffle(order)
        padded = list(itertools.islice(itertools.cycle(order), self.total_size))
        self.indices = padded[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
