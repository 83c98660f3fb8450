"""The ranks of a Farandole run: each sums over its part of the chunks, and all get the result.

Every rank calls `fit` with the same data, of which it reads only its own chunks. The branches of
all ranks are gathered and merged in the one order, so that every rank has the same bits, and the
same as a single process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from farandole.comm import Group
from farandole.comm.transports.messages import name_ranks
from farandole.errors import UserError
from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.pools.digests import digest
from farandole.learn.pools.workers import LostPoolError
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import Branch, branches, join
from farandole.serialization.objects import dump, load


class Ranks(Pool):
    """All of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        shapes = self._group.gather_json([source.rows, source.columns, source.chunk_rows])
        if any(shape != shapes[0] for shape in shapes):
            raise UserError(
                f"the ranks have different data: rank 0 has {shapes[0][:2]} rows and columns, and "
                f"all ranks have {[shape[:2] for shape in shapes]}. Each rank passes all rows, "
                "and reads only those that it sums over."
            )
        yield _OnRanks(source, self._group)


class _OnRanks(Placed):
    def __init__(self, source: Source, group: Group) -> None:
        super().__init__(source)
        self._group = group
        self._branches = self._branches_of(group.rank)

    def _branches_of(self, rank: int) -> list[Branch]:
        total, size = self.source.chunks, self._group.size
        return branches(total * rank // size, total * (rank + 1) // size, total)

    def _statistics(self, job: Sum, state: Any) -> Statistics:
        failure: str | None = None
        found: list[Statistics] = []
        try:
            with one_blas_thread():
                found = [sum_branch(self.source, job, state, branch) for branch in self._branches]
        except Exception as error:
            failure = f"{error}"
            raise
        finally:
            # The others must not wait for the statistics of a rank that has failed.
            told = self._group.gather_json([failure, digest(state)])
        for rank, (text, theirs) in enumerate(told):
            if text is not None:
                raise ValueError(f"rank {rank}: {text}")
            if theirs != told[0][1]:
                raise UserError(
                    f"rank {rank} begins pass {self.passes} over {self.source.name} with another "
                    "state than rank 0. Give all ranks the same random_state, and models with the "
                    "same parameters."
                )
        gathered = self._gather(dict(zip(self._branches, found, strict=True)))
        self._require_all(gathered)
        return join(gathered, self.source.chunks, job.merge)

    def _require_all(self, found: dict[Branch, Statistics]) -> None:
        """In a run with parameter servers, another's answer stands in for that of a dead rank."""
        size = self._group.size
        lost = [r for r in range(size) if any(b not in found for b in self._branches_of(r))]
        if lost:
            chunks = [f"{first} to {end - 1}" for r in lost for first, end in self._branches_of(r)]
            raise LostPoolError(
                f"in pass {self.passes} over {self.source.name}, {name_ranks(lost)} of the run was "
                f"lost, and with it chunks {', '.join(chunks)}. Start the run again, or fit with "
                "processes (pool=NUMBER), which are replaced when they are lost."
            )

    def _gather(self, parts: dict[Branch, Statistics]) -> dict[Branch, Statistics]:
        """Those of all ranks. Ranks may have different numbers of branches."""
        plain = [[list(branch), _tensors(part)] for branch, part in parts.items()]
        data = torch.frombuffer(dump(plain), dtype=torch.uint8)
        gathered = self._group.all_gather(data)
        self.counts.bytes_in += sum(map(len, gathered)) - len(data)
        self.counts.bytes_out += len(data)
        found: dict[Branch, Statistics] = {}
        for each in gathered:
            for (first, end), part in load(each.numpy().tobytes()):
                found[first, end] = {name: tensor.numpy() for name, tensor in part.items()}
        return found


def _tensors(part: Statistics) -> dict[str, torch.Tensor]:
    # Not `ascontiguousarray`, which makes a vector of a number.
    return {name: torch.from_numpy(np.asarray(value, order="C")) for name, value in part.items()}
