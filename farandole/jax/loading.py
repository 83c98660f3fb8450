"""`fd.jax.loader`: this rank's share of arrays, as JAX's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.data import TensorDataset

from farandole.comm.buffers import from_buffer, to_array
from farandole.data import Loader
from farandole.errors import UserError
from farandole.train.current_run import current


class ArrayLoader:
    """Iterating once is one epoch. See `Run.loader`."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self._inner:
            yield tuple(jnp.array(to_array(part)) for part in batch)


def loader(*arrays: Any, batch_size: int | None = None, **options: Any) -> ArrayLoader:
    """*Together.* Batches of this rank's share of `arrays`, row by row, shuffled in each epoch.

    Make it once, before the loop over epochs. The options are those of `run.loader`; to evaluate,
    pass `training=False`. Every row counts once per epoch; strategies and `average_gradients` know
    by how much smaller a last batch is.
    """
    if not arrays:
        raise UserError("fd.jax.loader needs arrays: fd.jax.loader(x, y, batch_size=32).")
    tensors = [from_buffer(np.asarray(array)) for array in arrays]
    lengths = [len(tensor) if tensor.dim() else None for tensor in tensors]
    if len(set(lengths)) != 1 or None in lengths:
        raise UserError(f"fd.jax.loader: the arrays have {lengths} rows, and need as many each.")
    dataset: TensorDataset = TensorDataset(*tensors)
    with torch.enable_grad():
        return ArrayLoader(current().loader(dataset, batch_size, **options))
