"""All-reduces timed side by side, in the same processes, taking turns.

    repeat 0:  auto   ring   gloo   mpi
    repeat 1:  ring   gloo   mpi    auto        so that each side goes first in its turn
    …

Before each turn the memory is filled with known numbers and the ranks meet; after it the sums are
checked. Neither is timed. The slowest rank's time counts. Ranks leave a barrier one after the
other, which for a short message is longer than the message takes; so a turn of short ones is
several in a row, the first of which only brings the ranks into step and is not timed.

The alternatives always run on ordinary memory: on shared memory, MPI was 15 to 30 % slower.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field

import torch

from farandole.bench.comm.pattern import Pattern
from farandole.bench.comm.plan import BenchPlan
from farandole.bench.comm.rows import Row, Timing
from farandole.bench.comm.sides import Ours, Side, listening
from farandole.bench.comm.sizes import format_size
from farandole.comm import Group

_TURN_BYTES = 8 * 2**20
_MOST_IN_A_TURN = 20


def measure(group: Group, plan: BenchPlan, rivals: Sequence[Side]) -> Iterator[tuple[Row, ...]]:
    """*Together.* The rows of one size after the other; all ranks get the same."""
    ours = [Ours(group, algorithm) for algorithm in plan.algorithms]
    for size in plan.sizes:
        yield _measure_size(group, plan, size, ours, rivals)


def _measure_size(
    group: Group, plan: BenchPlan, size: int, ours: Sequence[Side], rivals: Sequence[Side]
) -> tuple[Row, ...]:
    plain = _memory(plan, size)
    registered = plan.memory_used == "registered"
    mine = _memory(plan, size) if registered else plain
    with group.register(mine) if registered else nullcontext():
        lanes = [_Lane(group, side, list(mine), plan.timeout_seconds) for side in ours]
        lanes += [_Lane(group, side, list(plain), plan.timeout_seconds) for side in rivals]
        for lane in lanes:
            lane.try_out()
        for repeat in range(plan.repeats):
            for turn in range(len(lanes)):
                lanes[(repeat + turn) % len(lanes)].take_turn()
        everyone = group.gather_json([asdict(lane.seen) for lane in lanes])
    timings, correct = [], []
    for at in range(len(lanes)):
        found = [theirs[at] for theirs in everyone]
        timings.append(Timing.of([one["seconds"] for one in found]))
        same_bits = len({one["bits"] for one in found}) == 1
        correct.append(same_bits and all(one["right"] for one in found))
    names = [rival.name for rival in rivals]
    return tuple(
        Row(
            ranks=group.size,
            bytes=size,
            algorithm=side.name,
            chosen=everyone[0][at]["algorithm"],
            transport=everyone[0][at]["transport"],
            time=timings[at],
            correct=correct[at],
            against=dict(zip(names, timings[len(ours) :], strict=True)),
            against_correct=dict(zip(names, correct[len(ours) :], strict=True)),
        )
        for at, side in enumerate(ours)
    )


def calls_in_a_turn(size: int) -> int:
    """How many all-reduces of `size` bytes are timed together."""
    return max(1, min(_MOST_IN_A_TURN, _TURN_BYTES // size))


def _memory(plan: BenchPlan, size: int) -> torch.Tensor:
    """A row for each call of a turn, and one more for the untimed one where there is one."""
    calls = calls_in_a_turn(size)
    rows = calls + 1 if calls > 1 else 1
    return torch.zeros(rows, size // plan.item_bytes, dtype=plan.torch_dtype, device=plan.device)


@dataclass
class _Seen:
    """What one rank saw of one side at one size."""

    right: bool = True
    bits: str = ""  # of a sum that had to be rounded, in short
    algorithm: str = ""
    transport: str = ""
    seconds: list[float] = field(default_factory=list)


class _Lane:
    """One side at one size, on this rank."""

    def __init__(
        self, group: Group, side: Side, buffers: Sequence[torch.Tensor], timeout_seconds: float
    ) -> None:
        self.seen = _Seen()
        self._group = group
        self._buffers = buffers
        self._calls = [side.bind(buffer) for buffer in buffers]
        kind = buffers[0].dtype, buffers[0].device
        self._exact = Pattern(group.rank, group.size, *kind)
        self._thirds = Pattern(group.rank, group.size, *kind, thirds=True)
        self._what = f"an all-reduce of {format_size(buffers[0].nbytes)} by {side.name}"
        # One more, so that a side with a timeout of its own is first to say what is wrong.
        self._limit_seconds = timeout_seconds * (len(buffers) + 1)

    def try_out(self) -> None:
        """The first time, untimed: how is it done, and do all ranks round alike?"""
        buffer = self._buffers[0]
        self._thirds.fill(buffer)
        self._group.barrier()
        with listening(self._group) as heard, self._limit():
            self._calls[0]()
        self.seen.right = self._thirds.is_sum(buffer)
        raw = buffer.view(torch.uint8).cpu().numpy().data
        self.seen.bits = hashlib.blake2b(raw, digest_size=16).hexdigest()
        self.seen.algorithm, self.seen.transport = heard.algorithm, heard.transport

    def take_turn(self) -> None:
        for buffer in self._buffers:
            self._exact.fill(buffer)
        calls = self._calls
        self._group.barrier()
        with self._limit():
            if len(calls) > 1:
                calls[0]()
                calls = calls[1:]
            self._finish()
            begin = time.perf_counter()
            for call in calls:
                call()
            self._finish()
            taken = time.perf_counter() - begin
        self.seen.seconds.append(taken / len(calls))
        self.seen.right &= all(self._exact.is_sum(buffer) for buffer in self._buffers)

    def _finish(self) -> None:
        """A GPU works off what it was given: it is done when that is."""
        if self._buffers[0].is_cuda:
            torch.cuda.synchronize()

    @contextmanager
    def _limit(self) -> Iterator[None]:
        """Ends this process when the inside takes too long: MPI by itself would wait for ever.

        There is no other way out of a call that does not return. The launcher stops the others.
        """

        def give_up() -> None:
            rank = f"rank {self._group.rank} of {self._group.size}"
            limit = f"{self._limit_seconds:g} s"
            sys.stderr.write(f"farandole: {self._what} did not end on {rank} within {limit}\n")
            sys.stderr.flush()
            os._exit(1)

        timer = threading.Timer(self._limit_seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
