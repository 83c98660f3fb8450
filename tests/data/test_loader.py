"""`run.loader` in the in-process world: who gets which samples, from every kind of source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from farandole.comm import Exchange, Group, InProcess
from farandole.data import BatchInfo, Loader, LoaderOptions
from farandole.data.device import to_device
from farandole.errors import UserError
from farandole.testing import run_world
from farandole.train import Run

Batches = list[list[int]]


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return range(self.count)[index]


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.count))


@pytest.fixture
def run_alone() -> Callable[..., Loader]:
    """Makes a loader of one rank, in this thread: processes cannot be forked from a world's."""

    def make(source: Any, *, batch_size: int, seed: int = 0, **options: Any) -> Loader:
        limit = timedelta(seconds=150)
        group = Group(InProcess(Exchange(1, limit), 0))
        ours = LoaderOptions(batch_size, shuffle=options.pop("shuffle", None), seed=seed)
        return Loader(source, ours, group=group, device=torch.device("cpu"), **options)

    return make


def drawn(
    folder: Path, size: int, make: Callable[[Run], Loader], epochs: int = 1
) -> list[list[Batches]]:
    """[rank][epoch][step] -> samples, each on the first rank that reads it."""

    def body(run: Run) -> list[Batches]:
        loader = make(run)
        return [[first_read(run, loader, batch) for batch in loader] for _ in range(epochs)]

    return run_world(size, body, folder=folder)


def first_read(run: Run, loader: Loader, batch: torch.Tensor) -> list[int]:
    """The batch, or nothing if ranks before this one have read it too."""
    info = loader.last_batch
    assert info is not None
    readers = 1 if info.readers == run.size else info.samples
    return batch.tolist() if run.rank < readers else []


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def globally(by_rank: list[list[Batches]], epoch: int = 0) -> Batches:
    """The global batches: the ranks' shares of each step, put together again."""
    steps = zip(*(ranks[epoch] for ranks in by_rank), strict=True)
    return [[sample for share in step for sample in share] for step in steps]


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(4, 60),
    batch=st.integers(4, 20),
    size=st.integers(2, 4),
    shuffle=st.booleans(),
)
def test_global_batches_are_the_same_on_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch: int, size: int, shuffle: bool
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    data = Numbers(count)

    def make(run: Run) -> Loader:
        return run.loader(data, global_batch_size=batch, shuffle=shuffle)

    alone, together = drawn(folder, 1, make, epochs=2), drawn(folder, size, make, epochs=2)
    for epoch in range(2):
        assert globally(together, epoch) == globally(alone, epoch)
    if shuffle and count > 20:
        assert globally(together, 0) != globally(together, 1)


def test_batch_size_is_per_rank(tmp_path: Path) -> None:
    by_rank = drawn(tmp_path, 3, lambda run: run.loader(Numbers(16), 2, shuffle=False))
    assert by_rank == [
        [[[0, 1], [6, 7], [12]]],
        [[[2, 3], [8, 9], [13]]],
        [[[4, 5], [10, 11], [14, 15]]],
    ]


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize(
    ("batch", "trained", "evaluated"),
    [
        # All ranks read both samples, as many as in other steps.
        (6, [([12, 13], 2 / 3)] * 3, [[[6], [11]], [[7, 8], [12]], [[9, 10], [13]]]),
        # Each reads one, because otherwise it never has two in training.
        (4, [([12], 0.5), ([13], 1.0), ([12], 0.5)], [[[8], [11]], [[9], [12]], [[10], [13]]]),
        # In evaluation, the batch before has none to lend: the tail joins it.
        (
            3,
            [([12], 0.5), ([13], 1.0), ([12], 0.5)],
            [[[6], [9]], [[7], [10, 11]], [[8], [12, 13]]],
        ),
    ],
)
def test_a_tail_with_fewer_samples_than_ranks(
    tmp_path: Path, kind: type, batch: int, trained: Any, evaluated: Any
) -> None:
    """Training shares its samples in parts; evaluation sees each on one rank."""
    data = kind(14)
    data.set_epoch = lambda epoch: None  # a stream's samples are the same in both passes
    options = {} if kind is Stream else {"shuffle": False}

    def body(run: Run) -> tuple[Any, Any]:
        loader = run.loader(data, global_batch_size=batch, **options)
        with torch.no_grad():
            seen = [batch.tolist() for batch in loader]
        last = [(batch.tolist(), loader.last_batch.own_samples) for batch in loader][-1]
        return last, seen[-2:]

    ends = run_world(3, body, folder=tmp_path)
    assert [last for last, _ in ends] == trained
    assert [seen for _, seen in ends] == evaluated


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(4, 60),
    batch=st.integers(4, 20),
    size=st.integers(2, 4),
    stream=st.booleans(),
)
def test_evaluation_sees_every_sample_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch: int, size: int, stream: bool
) -> None:
    folder = tmp_path_factory.mktemp("ranks")

    def body(run: Run) -> Batches:
        with torch.no_grad():
            source = Stream(count) if stream else Numbers(count)
            loader = run.loader(source, global_batch_size=batch)
            seen = [drawn.tolist() for drawn in loader]
            assert stream or len(loader) == len(seen)
        assert all(seen)
        return seen

    by_rank = run_world(size, body, folder=folder)
    assert len({len(batches) for batches in by_rank}) == 1
    assert sorted(flat(chain.from_iterable(by_rank))) == list(range(count))


def test_a_loader_has_as_many_steps_as_on_one_worker(tmp_path: Path) -> None:
    """Also where an evaluation asks before it turns gradients off."""

    def body(run: Run) -> list[int]:
        loader = run.loader(Numbers(37), global_batch_size=8)
        with torch.no_grad():
            evaluation = len(loader), len(list(loader))
        assert len(loader.batch_sampler) == len(list(loader.batch_sampler)) == len(loader)
        return [len(loader), len(list(loader)), *evaluation]

    for size in (1, 3, 4):
        assert run_world(size, body, folder=tmp_path) == [[5, 5, 5, 5]] * size


def test_the_same_source_gives_the_same_loader_and_its_next_epoch(tmp_path: Path) -> None:
    data = Numbers(20)

    def body(run: Run) -> tuple[bool, Batches, Batches]:
        first = [batch.tolist() for batch in run.loader(data, 5)]
        second = [batch.tolist() for batch in run.loader(data, 5)]
        return run.loader(data, 5) is run.loader(data, 5), first, second

    same, first, second = run_world(1, body, folder=tmp_path)[0]
    assert same
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(20))


def test_loaders_of_dataloaders_made_on_the_way_are_never_mixed_up(tmp_path: Path) -> None:
    """An object made in the loop may get the address, and so the id, of one that is gone."""

    def body(run: Run) -> list[int]:
        seen = []
        for count in range(10, 30):
            loader = run.loader(DataLoader(Numbers(count), batch_size=100))
            seen += [len(batch) for batch in loader]
        return seen

    assert run_world(1, body, folder=tmp_path) == [list(range(10, 30))]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dataloader_keeps_its_settings(tmp_path: Path, shuffle: bool) -> None:
    given_loader = DataLoader(
        Numbers(21), batch_size=4, shuffle=shuffle, drop_last=True, collate_fn=torch.tensor
    )
    by_rank = drawn(tmp_path, 2, lambda run: run.loader(given_loader), epochs=2)
    assert [len(batch) for batch in globally(by_rank)] == [8, 8]
    in_order = list(range(16))
    used = flat(globally(by_rank))
    assert (used == in_order) is not shuffle
    assert len(set(used)) == 16


def test_what_the_caller_says_wins_over_the_dataloader(tmp_path: Path) -> None:
    given_loader = DataLoader(Numbers(12), batch_size=4, shuffle=True)
    by_rank = drawn(
        tmp_path, 2, lambda run: run.loader(given_loader, global_batch_size=6, shuffle=False)
    )
    assert globally(by_rank) == [list(range(6)), list(range(6, 12))]
    ordered = DataLoader(Numbers(50), batch_size=50)
    by_rank = drawn(tmp_path, 2, lambda run: run.loader(ordered, shuffle=True))
    assert flat(globally(by_rank)) != list(range(50))


def test_shuffle_contradicts_a_sampler_of_one_s_own(tmp_path: Path) -> None:
    given_loader = DataLoader(Numbers(12), 4, sampler=SubsetRandomSampler([1, 2, 3, 4]))
    with pytest.raises(UserError, match=r"shuffle=True.*SubsetRandomSampler"):
        drawn(tmp_path, 1, lambda run: run.loader(given_loader, shuffle=True))


def test_a_weighted_sampler_is_drawn_once_by_rank_0(tmp_path: Path) -> None:
    """Its generator differs between ranks here, as it would after a seed of the rank's own."""

    def body(run: Run) -> list[Batches]:
        sampler = WeightedRandomSampler(
            [0.0] * 10 + [1.0] * 10, 37, generator=torch.Generator().manual_seed(run.rank)
        )
        loader = run.loader(DataLoader(Numbers(20), batch_size=4, sampler=sampler))
        return [[first_read(run, loader, batch) for batch in loader] for _ in range(2)]

    by_rank = run_world(3, body, folder=tmp_path)
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 37, generator=generator)
    for epoch in range(2):
        assert flat(globally(by_rank, epoch)) == list(sampler)
    assert [len(batch) for batch in globally(by_rank)] == [12, 12, 12, 1]


def test_a_sampler_can_be_given_with_the_dataset(tmp_path: Path) -> None:
    sampler = SubsetRandomSampler([5, 1, 4], generator=torch.Generator().manual_seed(0))
    by_rank = drawn(tmp_path, 1, lambda run: run.loader(Numbers(9), 2, sampler=sampler))
    assert sorted(flat(globally(by_rank))) == [1, 4, 5]
    assert [len(batch) for batch in globally(by_rank)] == [2, 1]


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(30), num_samples=7),
        RandomSampler(range(30), replacement=True, num_samples=7),
        SequentialSampler(range(7)),
        SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6]),
    ],
)
def test_a_sampler_s_own_length_counts(tmp_path: Path, sampler: Sampler[int]) -> None:
    given_loader = DataLoader(Numbers(30), batch_size=2, sampler=sampler)
    by_rank = drawn(tmp_path, 2, lambda run: run.loader(given_loader))
    assert sum(len(batch) for batch in globally(by_rank)) == 7


class ByEpoch(Sampler[int]):
    """Draws 4 samples and says `length`; the first of them is the epoch."""

    def __init__(self, length: int = 4) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, 7, 8, 9])

    def __len__(self) -> int:
        return self.length


def test_a_sampler_is_told_the_epoch(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(10), batch_size=4, sampler=ByEpoch())
    by_rank = drawn(tmp_path, 1, lambda run: run.loader(loader), epochs=3)
    assert by_rank == [[[[0, 7, 8, 9]], [[1, 7, 8, 9]], [[2, 7, 8, 9]]]]


def test_a_sampler_that_draws_another_number_than_it_says_is_refused(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(10), batch_size=4, sampler=ByEpoch(length=6))
    with pytest.raises(UserError, match="ByEpoch gave 4 samples and its length is 6"):
        drawn(tmp_path, 2, lambda run: run.loader(loader))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def _sources() -> dict[str, tuple[Any, dict[str, Any], str]]:
    data = Numbers(12)
    shared = DistributedSampler(data, num_replicas=2, rank=0)
    batches = BatchSampler(SequentialSampler(data), 3, drop_last=False)
    return {
        "distributed sampler": (
            DataLoader(data, 4, sampler=shared), {}, "already shares.*Pass the dataset",
        ),
        "batch sampler": (DataLoader(data, batch_sampler=batches), {}, "batch_sampler"),
        "no batches": (DataLoader(data, batch_size=None), {}, "batch_size=None"),
        "sampler without length": (DataLoader(data, 4, sampler=Endless()), {}, "Endless.*__len__"),
        "batch 0": (data, {"batch_size": 0}, "a batch of 0 samples"),
        "batch -4": (data, {"batch_size": -4}, "a batch of -4 samples"),
        "global batch 0": (data, {"global_batch_size": 0}, "a batch of 0 samples"),
        "both": (
            data, {"batch_size": 4, "global_batch_size": 8},
            "either.*batch_size=4 and global_batch_size=8",
        ),
        "neither": (data, {}, "either batch_size.*or global_batch_size"),
        "small global batch": (data, {"global_batch_size": 1}, "global batch of 1.*2 workers"),
        "few samples": (Numbers(1), {"batch_size": 4}, "1 samples cannot be shared by 2 workers"),
        "no samples": (Numbers(0), {"batch_size": 4}, "the dataset is empty"),
        "batch sampler, directly": (
            data, {"batch_size": 3, "batch_sampler": batches}, "batch_sampler",
        ),
        "sampler, no batch": (data, {"sampler": Endless()}, "either batch_size.*or global_batch"),
        "sampler beside a DataLoader": (
            DataLoader(data, 4), {"sampler": SequentialSampler(data)}, "sampler=… goes to",
        ),
        "stream, shuffled": (Stream(9), {"batch_size": 4, "shuffle": True}, "its own order"),
        "stream, small batch": (Stream(9), {"global_batch_size": 1}, "global batch of 1.*2 work"),
        "stream, few samples": (Stream(1), {"batch_size": 4}, "a stream of 1 samples.*2 workers"),
        "stream, no samples": (Stream(0), {"batch_size": 4}, "a stream of 0 samples"),
        "stream, many readers": (
            Stream(9), {"batch_size": 4, "num_workers": 2}, "at most one .*num_workers=2",
        ),
        "stream, lasting reader": (
            Stream(9), {"batch_size": 4, "num_workers": 1, "persistent_workers": True},
            "persistent_workers",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", _sources())
def test_sources_that_cannot_be_shared(tmp_path: Path, case: str) -> None:
    source, options, message = _sources()[case]
    with pytest.raises(UserError, match=message):
        drawn(tmp_path, 2, lambda run: run.loader(source, **options))


def test_a_stream_is_shared_exactly_and_told_the_epoch(tmp_path: Path) -> None:
    by_rank = drawn(tmp_path, 3, lambda run: run.loader(Stream(19), batch_size=3), epochs=2)
    assert globally(by_rank) == [list(range(9)), list(range(9, 18)), [18]]
    assert globally(by_rank, 1) == [list(range(1000, 1009)), list(range(1009, 1018)), [1018]]


def test_a_stream_has_no_length(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        loader = run.loader(Stream(19), batch_size=3)
        assert loader.shares is None
        with pytest.raises(TypeError, match="has no length"):
            len(loader)
        assert len(run.loader(Numbers(19), batch_size=3)) == 7

    run_world(1, body, folder=tmp_path)


def test_the_run_counts_samples_of_all_ranks_but_not_evaluation(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[int, int]:
        for _ in run.loader(Numbers(17), 4):
            pass
        for _ in run.loader(Stream(5), 1):
            pass
        with torch.no_grad():
            for _ in run.loader(Numbers(100), 4):
                pass
        return run.samples, run.steps

    assert run_world(2, body, folder=tmp_path) == [(22, 6)] * 2


def test_breaking_out_ends_the_epoch(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[list[int], Batches]:
        loader = run.loader(Numbers(12), 4)
        for _ in loader:
            break
        state = loader.state_dict()
        return [state["epoch"], state["done_samples"]], [batch.tolist() for batch in loader]

    def second_epoch(run: Run) -> Batches:
        loader = run.loader(Numbers(12), 4)
        loader.load_state_dict({"epoch": 1, "done_samples": 0})
        return [batch.tolist() for batch in loader]

    state, batches = run_world(1, body, folder=tmp_path)[0]
    assert state == [1, 0]
    assert batches == run_world(1, second_epoch, folder=tmp_path)[0]


def test_a_dropped_tail_is_announced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drawn(tmp_path, 2, lambda run: run.loader(Numbers(19), 4, drop_last=True))
    assert "drop_last leaves out 3 samples" in capfd.readouterr().out
    dropping = DataLoader(Numbers(19), batch_size=5, drop_last=True)
    drawn(tmp_path, 2, lambda run: run.loader(dropping))
    assert "drop_last leaves out 9 samples" in capfd.readouterr().out


class WorkerSeeds(Dataset[int]):
    """Sample i is a random number drawn by the process that loads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        return int(torch.randint(2**31, ()))


def test_loading_processes(run_alone: Callable[..., Loader]) -> None:
    """Two of them, forked from a process that has no other threads."""
    loader = run_alone(Numbers(11), batch_size=4, num_workers=2, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert loader.epoch == 1
    stream = run_alone(Stream(11), batch_size=4, num_workers=1)
    for epoch in (0, 1):
        numbers = range(1000 * epoch, 1000 * epoch + 11)
        assert [n for batch in stream for n in batch.tolist()] == list(numbers)


def test_loading_processes_draw_by_seed_and_epoch(run_alone: Callable[..., Loader]) -> None:
    def draws(seed: int, epochs: int) -> list[list[int]]:
        loader = run_alone(WorkerSeeds(), seed=seed, batch_size=4, num_workers=1)
        return [[n for batch in loader for n in batch.tolist()] for _ in range(epochs)]

    first, second = draws(seed=5, epochs=2)
    assert first != second
    torch.manual_seed(12345)  # of no importance
    assert draws(seed=5, epochs=1) == [first]
    assert draws(seed=6, epochs=1) != [first]


def test_starting_an_epoch_draws_nothing_from_torch_s_generator(
    run_alone: Callable[..., Loader],
) -> None:
    """Else dropout after resuming in the middle of an epoch would not be what it was."""
    loader = run_alone(Numbers(8), batch_size=4)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_batch_is_announced_with_its_place_and_weight(tmp_path: Path) -> None:
    def body(run: Run) -> list[BatchInfo]:
        infos: list[BatchInfo] = []
        options = LoaderOptions(global_batch_size=4)
        cpu = torch.device("cpu")
        list(Loader(Numbers(11), options, group=run.group, device=cpu, on_batch=infos.append))
        return infos

    last = [BatchInfo(2, 3, 3, 2 * 1 / 3, 1, 1.0), BatchInfo(2, 3, 3, 2 * 2 / 3, 1, 2.0)]
    for rank, infos in enumerate(run_world(2, body, folder=tmp_path)):
        assert infos == [BatchInfo(step, 3, 4, 1.0, 1, 2.0) for step in range(2)] + [last[rank]]


class Graph:
    """Neither a tensor nor a container, but it knows how to move."""

    place = "cpu"

    def to(self, device: torch.device) -> Graph:
        moved = Graph()
        moved.place = device.type
        return moved


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


def test_batches_move_to_the_device_whatever_their_shape() -> None:
    meta = torch.device("meta")  # as good as any, and always there
    x = torch.zeros(2)
    nested = {"a": [x, (x, "text")], "b": Pair(x, "kept"), "c": 3, "d": Graph(), "e": None}
    moved = to_device(nested, meta)
    assert moved["a"][0].device == moved["a"][1][0].device == moved["b"].left.device == meta
    assert isinstance(moved["b"], Pair)
    assert (moved["a"][1][1], moved["b"].right, moved["c"], moved["e"]) == ("text", "kept", 3, None)
    assert moved["d"].place == "meta"
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert isinstance(to_device(packed, meta), PackedSequence)
    assert to_device(nested, torch.device("cpu")) is nested


def test_a_tensor_dataset_gives_tuples(tmp_path: Path) -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    seen: Counter[int] = Counter()

    def body(run: Run) -> None:
        for features, labels in run.loader(TensorDataset(x, y), batch_size=2):
            assert torch.equal(features, x[labels])
            seen.update(labels.tolist())

    run_world(2, body, folder=tmp_path)
    assert seen == Counter(range(6))


@pytest.mark.parametrize("training", [True, False])
def test_a_script_may_say_whether_a_pass_trains(training: bool, tmp_path: Path) -> None:
    """It is then not taken from whether gradients are enabled."""

    def body(run: Run) -> tuple[int, int]:
        loader = run.loader(range(7), global_batch_size=6, shuffle=False, training=training)
        with torch.set_grad_enabled(not training):
            seen = sum(len(batch) for batch in loader)
        return seen, run.steps

    found = run_world(3, body, folder=tmp_path)
    # Training shares the last sample among all ranks, and counts; evaluation does neither.
    assert [seen for seen, _ in found] == ([3, 3, 3] if training else [2, 2, 3])
    assert {steps for _, steps in found} == ({2} if training else {0})
