"""`fd.keras.shard`: a rank's share of what `fit` reads, as many steps on all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from farandole.errors import UserError
from farandole.train.current_run import current


def shard(*data: Any) -> Any:
    """This rank's share of arrays, of a `tf.data.Dataset` or of a `keras.utils.PyDataset`.

    Arrays, alone or in lists and dicts: every `size`-th row. A dataset: every `size`-th element; so
    shard before `batch`. A PyDataset: every `size`-th batch. All ranks get as many: up to size − 1
    rows, elements or batches at the end are left out. Several arrays return a tuple.

    Raises `UserError` for a source without a length, whose ranks could take different numbers of
    steps, and for generators and DataLoaders.
    """
    if len(data) == 1:
        return _share(data[0])
    counts = {_rows(leaf) for one in data for leaf in keras.tree.flatten(one) if leaf is not None}
    if len(counts) > 1:
        raise UserError(f"fd.keras.shard: the arrays have {sorted(counts)} rows, and need as many.")
    return tuple(_share(one) for one in data)


def _share(data: Any) -> Any:
    if isinstance(data, keras.utils.PyDataset):
        return _BatchShare(data)
    if hasattr(data, "cardinality") and hasattr(data, "shard"):
        return _dataset_share(data)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else _own_rows(leaf), data)


def _dataset_share(dataset: Any) -> Any:
    run = current()
    count = int(dataset.cardinality())
    if count == -2:  # tf.data.UNKNOWN_CARDINALITY
        raise UserError(
            "fd.keras.shard: the length of the dataset is not known, so ranks could take different "
            "numbers of steps. Say it: dataset.apply(tf.data.experimental.assert_cardinality(n))."
        )
    if count >= 0:  # else it never ends
        _require_enough(count, "elements")
        dataset = dataset.take(count // run.size * run.size)
    return dataset.shard(run.size, run.rank)


def _own_rows(array: Any) -> Any:
    run = current()
    count = _rows(array)
    _require_enough(count, "rows")
    return array[run.rank : count // run.size * run.size : run.size]


def _rows(array: Any) -> int:
    if not hasattr(array, "shape") or not hasattr(array, "__getitem__"):
        raise UserError(
            f"fd.keras.shard takes arrays, a tf.data.Dataset or a PyDataset, and not "
            f"{type(array).__name__}. Give each rank's own data to fit, as many steps on each."
        )
    if not np.ndim(array):
        raise UserError("fd.keras.shard: an array without rows cannot be shared.")
    return int(array.shape[0])


def _require_enough(count: int, what: str) -> None:
    size = current().size
    if count < size:
        raise UserError(f"fd.keras.shard: {count} {what} cannot be shared by {size} ranks.")


class _BatchShare(keras.utils.PyDataset):
    """Every `size`-th batch of another one, from the rank's own on."""

    def __init__(self, inner: Any) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        run = current()
        self._inner, self._rank, self._size = inner, run.rank, run.size
        if inner.num_batches is None:
            raise UserError("fd.keras.shard: a PyDataset without a length cannot be shared.")
        _require_enough(inner.num_batches, "batches")

    @property
    def num_batches(self) -> int:
        return int(self._inner.num_batches) // self._size

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._inner[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()
