"""Every sample of an epoch is used exactly once, whatever happens to the workers on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data import Loader, LoaderOptions
from farandole.data.chunks.dataset import ChunkedDataset
from farandole.data.chunks.source import ChunkSource
from farandole.data.mixture import MixedDataset

SCRIPT = Path(__file__).parent / "scripts" / "reads_shards.py"


class Shard(ChunkSource):
    def __init__(self, sizes: list[int], first: int) -> None:
        self.name = f"shard from {first}"
        self.sizes = sizes
        self._first = first

    def read(self, chunk: int) -> list[int]:
        begin = self._first + sum(self.sizes[:chunk])
        return list(range(begin, begin + self.sizes[chunk]))


def dataset_of(shards: list[list[int]], *, is_mixed: bool) -> Any:
    sources: list[ChunkSource] = []
    first = 0
    for sizes in shards:
        sources.append(Shard(sizes, first))
        first += sum(sizes)
    whole = ChunkedDataset(sources, window=2, ahead=0)
    return MixedDataset([whole], [len(whole)]) if is_mixed else whole


class World:
    """Ranks in one thread, which take their steps one after the other."""

    def __init__(self, dataset: Any, ranks: int, batch: int, state: Any = None) -> None:
        self.groups = [
            SimpleNamespace(
                rank=rank, size=ranks, members=tuple(range(ranks)), readers=tuple(range(ranks))
            )
            for rank in range(ranks)
        ]
        options = LoaderOptions(batch_size=batch, training=True)
        self.loaders = [
            Loader(dataset, options, group=group, device=torch.device("cpu"))  # type: ignore[arg-type]
            for group in self.groups
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)
        self.passes: list[Iterator[Any]] = [iter(loader) for loader in self.loaders]

    def step(self) -> list[list[tuple[int, Fraction]]] | None:
        """What each rank reads, and what it counts for; None at the end of the epoch."""
        read = []
        for loader, batches in zip(self.loaders, self.passes, strict=True):
            batch = next(batches, None)
            if batch is None:
                continue
            assert loader.last_batch is not None
            part = Fraction(1, loader.last_batch.readers)
            read.append([(int(number), part) for number in batch])
        assert len(read) in (0, len(self.loaders)), "all ranks take as many steps"
        return read or None

    def lose(self, lost: int) -> None:
        """A rank is killed before it has contributed to the step under way."""
        for parts in (self.groups, self.loaders, self.passes):
            del parts[lost]  # type: ignore[attr-defined]
        alive = tuple(member for at, member in enumerate(self.members) if at != lost)
        for loader in self.loaders:
            loader.deal_anew(alive)
        for rank, group in enumerate(self.groups):
            group.rank, group.size, group.members, group.readers = rank, len(alive), alive, alive

    @property
    def members(self) -> tuple[int, ...]:
        return self.groups[0].members  # type: ignore[no-any-return]

    def contribute(self) -> None:
        for loader in self.loaders:
            loader.dealings.contribute()


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=4)
    .filter(lambda shards: sum(map(sum, shards)) >= 4),
    is_mixed=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_whatever_is_killed_and_resumed(
    shards: list[list[int]], is_mixed: bool, data: st.DataObject
) -> None:
    dataset = dataset_of(shards, is_mixed=is_mixed)
    used: Counter[int] = Counter()
    state = None
    for _ in range(10):  # of several jobs, each with its own number of workers
        world = World(dataset, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), state)
        while True:
            read = world.step()
            if read is None:
                assert used == dict.fromkeys(range(len(dataset)), 1)
                return
            may_lose = len(read) > 1 and all(part == 1 for rank in read for _, part in rank)
            event = data.draw(st.sampled_from(["step", "step", "step", "kill", "stop"]))
            if event == "kill" and may_lose:
                lost = data.draw(st.integers(0, len(read) - 1))
                del read[lost]
                world.lose(lost)
            for rank in read:
                for number, part in rank:
                    used[number] += part  # type: ignore[assignment]
            world.contribute()
            if event == "stop":
                state = world.loaders[0].state_dict()
                break
    # So many stops in a row: the rest in one go.
    world = World(dataset, 1, 3, state)
    while (read := world.step()) is not None:
        for number, part in read[0]:
            used[number] += part  # type: ignore[assignment]
    assert used == dict.fromkeys(range(len(dataset)), 1)


def used_by(folder: Path, size: int) -> list[tuple[int, list[int]]]:
    return [
        tuple(json.loads(line))
        for path in folder.glob(f"used-{size}-*")
        for line in path.read_text().splitlines()
    ]


def test_processes_that_are_killed_and_resumed_by_fewer(sandbox: Any, tmp_path: Path) -> None:
    first = 0
    for shard, count in enumerate([31, 2, 0, 50]):
        lines = "".join(f'{{"n": {n}}}\n' for n in range(first, first + count))
        (tmp_path / f"{shard}.jsonl").write_text(lines)
        first += count
    words = ["run", "--name", "one", str(SCRIPT), str(tmp_path / "{0..3}.jsonl")]
    words[1:1] = ["-n", "3"]
    killed = sandbox.farandole(*words, "7")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    words[1:3] = ["-n", "2"]
    done = sandbox.farandole(*words)
    assert done.returncode == 0, done.stderr
    before = [n for step, numbers in used_by(tmp_path, 3) if step <= 5 for n in numbers]
    after = [n for _, numbers in used_by(tmp_path, 2) for n in numbers]
    assert len(before) == 45
    assert sorted(before + after) == list(range(83))
