"""Workers that have no line to each other, only to parameter servers.

Every worker calls `fit` with the same data. In each pass it computes its share of the pieces and
puts their statistics on the servers. Then all meet at the registrar, and read what the others have
put. Who has died by then is not waited for: the others compute its pieces, and meet again.

    worker 0   ├ pieces 0, 1 ┤put┤         ├ piece 2 ┤put┤      ├ get all
    worker 1   ├ piece 2 … killed
    worker 2   ├ pieces 3, 4 ┤put┤         │             │      ├ get all
                                 └─ meet ──┘             └─ meet┘

Nothing is pickled: statistics travel as their bytes, and every worker has the sum itself.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from farandole.errors import UserError
from farandole.learn.pools.base import Placed, Pool, one_blas_thread, sum_branch
from farandole.learn.pools.digests import digest
from farandole.learn.sources.source import Source
from farandole.learn.sums.sum import Statistics, Sum
from farandole.learn.sums.tree import join, pieces
from farandole.serialization.objects import dump, load
from farandole.server import Store, Tasks

_PIECES_PER_WORKER = 2
_LEAST_NUMBERS = 1 << 10
_AHEAD = 16  # requests under way at a time

Given = dict[int, Any]


class ParameterServers(Pool):
    """All workers that are connected to the servers with a rank. The store stays open."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @contextmanager
    def place(self, source: Source) -> Iterator[Placed]:
        rank = self._store.rank
        if rank is None:
            raise UserError(
                "nobody waits for a store without a rank. Connect each worker as "
                "farandole.server.connect(address, key_file, rank=0, workers=4), with a rank of "
                "its own."
            )
        own = uuid.uuid4().hex
        shape = [source.rows, source.columns, source.chunk_rows]
        for number in itertools.count():
            given = _meet(self._store, f"learn {number}", [own, shape])
            if given[rank][0] == own:
                break  # else this was the meeting of an earlier fit
        if any(theirs != shape for _, theirs in given.values()):
            shapes = {each: theirs[:2] for each, (_, theirs) in sorted(given.items())}
            raise UserError(
                f"the workers have different data. Rows and columns, by rank: {shapes}. Each "
                "worker passes all rows, and reads only those that it sums over."
            )
        name = "learn " + digest([theirs for _, (theirs, _) in sorted(given.items())])
        yield _Placed(source, self._store, name, rank, sorted(given))


class _Placed(Placed):
    """`ranks`: of the workers that live, `rank` among them."""

    def __init__(
        self, source: Source, store: Store, name: str, rank: int, ranks: list[int]
    ) -> None:
        super().__init__(source)
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._pieces = pieces(source.chunks, _PIECES_PER_WORKER * len(ranks))
        self._tables: set[str] = set()

    def _statistics(self, job: Sum, state: Any) -> Statistics:
        begun = digest([type(job).__name__, state])
        sizes: dict[int, int] = {}  # in bytes, of the pieces that are on the servers
        for attempt in itertools.count():
            missing = [piece for piece in range(len(self._pieces)) if piece not in sizes]
            if not missing:
                break
            failure: str | None = None
            own: list[tuple[int, int]] = []
            try:
                own = self._compute(job, state, self._share(missing))
            except Exception as error:
                failure = f"{error}"
                raise
            finally:
                # The others must not wait for the pieces of a worker that has failed.
                meeting = f"{self._name}/{self.passes}/{attempt}"
                given = _meet(self._store, meeting, [failure, begun, own])
            self._check(given)
            self.counts.losses += len(set(self._ranks) - set(given))
            self._ranks = sorted(given)
            sizes |= {piece: size for _, _, theirs in given.values() for piece, size in theirs}
        found = self._get(sizes)
        return join(dict(zip(self._pieces, found, strict=True)), self.source.chunks, job.merge)

    def _share(self, missing: list[int]) -> list[int]:
        """Neighbours, and in every pass the same ones: a worker may still have them in memory."""
        place, count = self._ranks.index(self._rank), len(self._ranks)
        return missing[len(missing) * place // count : len(missing) * (place + 1) // count]

    def _compute(self, job: Sum, state: Any, share: list[int]) -> list[tuple[int, int]]:
        """Puts the statistics of these pieces on the servers. The pieces, and their bytes."""
        done = []
        tasks = Tasks(_AHEAD)
        for piece in share:
            with one_blas_thread():
                part = sum_branch(self.source, job, state, self._pieces[piece])
            data = dump({name: _tensor(value) for name, value in part.items()})
            size = len(data)
            data.extend(bytes(-size % 8))
            numbers = torch.frombuffer(data, dtype=torch.int64)
            table = self._table(piece, len(numbers))
            # A worker that was stopped, and given up, may wake in a later pass: what it puts then
            # is older than what is there, and changes nothing.
            tasks.submit(partial(self._store.start_put, table, numbers, stamp=self.passes))
            done.append((piece, size))
        tasks.wait_all()  # before anybody hears of them
        self.counts.pieces += len(done)
        self.counts.bytes_out += sum(size for _, size in done)
        return done

    def _get(self, sizes: dict[int, int]) -> list[Statistics]:
        tasks = Tasks(_AHEAD)
        asked = []
        for piece in range(len(self._pieces)):
            count = -(-sizes[piece] // 8)
            table = self._table(piece, count)
            asked.append(tasks.submit(partial(self._store.start_get, table, stop=count)))
        found: list[Statistics] = []
        for piece, task in enumerate(asked):
            numbers: torch.Tensor = tasks.wait(task)
            data = numbers.contiguous().view(-1).numpy().tobytes()[: sizes[piece]]
            self.counts.bytes_in += len(data)
            found.append({name: tensor.numpy() for name, tensor in load(data).items()})
        return found

    def _table(self, piece: int, count: int) -> str:
        """For at least `count` numbers.

        A piece has two, for passes in turn: a worker may still read the statistics of one pass
        while another puts those of the next, and nobody begins the one after that before all have
        met.
        """
        length = max(_LEAST_NUMBERS, 1 << (count - 1).bit_length())
        name = f"{self._name} {self.passes % 2} {piece} {length}"
        if name not in self._tables:
            self._store.create(name, length, dtype="int64")
            self._tables.add(name)
        return name

    def _check(self, given: Given) -> None:
        begun = given[self._rank][1]
        for rank, (failure, theirs, _) in sorted(given.items()):
            if failure is not None:
                raise ValueError(f"worker {rank}: {failure}")
            if theirs != begun:
                raise UserError(
                    f"worker {rank} begins pass {self.passes} over {self.source.name} with another "
                    f"state or another sum than worker {self._rank}. All workers fit the same "
                    "estimators in the same order, with the same random_state."
                )


def _meet(store: Store, name: str, value: Any) -> Given:
    given = store.meet(name, json.dumps(value).encode())
    return {rank: json.loads(bytes(payload)) for rank, payload in given.items()}


def _tensor(value: Any) -> torch.Tensor:
    # Not `ascontiguousarray`, which makes a vector of a number.
    return torch.from_numpy(np.asarray(value, order="C"))
