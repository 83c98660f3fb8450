"""Who reads what when workers come and go: every sample is in exactly one step of its epoch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from farandole.data.dealing import Dealing, Dealings, rest_of
from farandole.data.shares import Shares


class Loaders:
    """What all survivors do alike, with the samples that each of them contributes."""

    def __init__(self, count: int, batch: int, members: tuple[int, ...]) -> None:
        self.count, self.batch, self.members = count, batch, members
        self.dealings = Dealings()
        self.returned: list[int] = []
        self.start = 0
        self.under_way: list[dict[int, list[int]]] = []  # of each batch, what each worker reads
        self.used: Counter[int] = Counter()

    def deal(self) -> bool:
        whole = Shares(self.count, len(self.members), self.batch * len(self.members))
        rest = rest_of(whole, self.returned, self.start)
        if rest is not None:
            self.dealings.begin(Dealing(rest, self.members, tuple(self.returned), self.start))
        return rest is not None

    def hand_out(self) -> int:
        dealing, number = self.dealings.current, self.dealings.hand_out()
        self.under_way.append(
            {worker: dealing.share(number, rank) for rank, worker in enumerate(dealing.members)}
        )
        self.returned, self.start = dealing.left(number + 1)
        return number

    def require_a_mean(self, number: int) -> None:
        """The weights make the average of the survivors' means the mean over their samples."""
        dealing, read = self.dealings.current, self.under_way[-1]
        told = {
            worker: dealing.describe(number, rank, self.members)
            for rank, worker in enumerate(dealing.members)
            if worker in self.members
        }
        samples = set().union(*(read[worker] for worker in told))
        counts = dict.fromkeys(samples, 0.0)
        for worker, described in told.items():
            assert described.samples == len(samples)
            for sample in read[worker]:
                counts[sample] += described.weight / len(read[worker]) / len(told)
        assert all(abs(count * len(samples) - 1) < 1e-12 for count in counts.values()), counts

    def lose(self, workers: set[int]) -> None:
        self.members = tuple(worker for worker in self.members if worker not in workers)
        self.returned, self.start = self.dealings.end_here(self.members)

    def contribute(self) -> None:
        for read in self.under_way:
            alive = [places for worker, places in read.items() if worker in self.members]
            self.used.update(set().union(*alive))
        self.under_way.clear()
        self.dealings.contribute()

    def admit(self, workers: tuple[int, ...]) -> None:
        self.members += workers
        self.returned, self.start = self.dealings.end_here(self.members)


EVENTS = st.lists(st.tuples(st.sampled_from(["lose", "step", "admit", "wait"]), st.integers(0, 7)))


@given(st.integers(8, 60), st.integers(1, 4), st.integers(1, 6), EVENTS)
def test_every_sample_once(
    count: int, batch: int, workers: int, events: list[tuple[str, int]]
) -> None:
    """Losses in the middle of a step, or of several batches that are added up; newcomers between
    steps. Events come before a batch is part of a step."""
    job = Loaders(count, batch, tuple(range(workers)))
    left, newest = iter(events), workers
    assert job.deal()
    while True:
        number = job.hand_out()
        event, which = next(left, ("step", 0))
        if event == "lose" and len(job.members) > 1:
            job.lose({job.members[which % len(job.members)]})
        elif event == "wait" and not job.dealings.is_over and job.start < count:
            continue  # the next batch belongs to the same step
        job.require_a_mean(number)
        job.contribute()
        if event == "lose" and which % 3 == 0 and len(job.members) > 1:
            job.lose({job.members[0]})  # one more, before the next batch
        if event in ("admit", "lose") and which % 2 and len(job.members) < 8:
            job.admit((newest,))
            newest += 1
        is_last = number + 1 - job.dealings.current.first == job.dealings.current.shares.steps
        if (job.dealings.is_over or is_last) and not job.deal():
            break
    assert job.used == Counter(range(count))


def test_what_goes_back() -> None:
    """Worker 1 of 3 is lost with its part of the second batch: that is read next."""
    dealings = Dealings()
    dealings.begin(Dealing(Shares(20, 3, 6), (0, 1, 2)))
    dealings.hand_out()
    dealings.contribute()
    dealings.hand_out()
    assert dealings.lost_samples((0, 1, 2), (0, 2)) == 2
    assert dealings.rescaling(0, (0, 1, 2), (0, 2)) == {1.0}
    assert dealings.end_here((0, 2)) == ([8, 9], 12)
    assert dealings.is_over


def test_uneven_parts_are_weighed_anew() -> None:
    """7 samples over 3 workers: 2, 2 and 3. Without the last one both others count the same."""
    dealings = Dealings()
    dealings.begin(Dealing(Shares(14, 3, 7), (4, 5, 6)))
    dealings.hand_out()
    (factor,) = dealings.rescaling(4, (4, 5, 6), (4, 5))
    assert factor == 1.0 / (2 * 3 / 7)
    assert dealings.end_here((4, 5)) == ([4, 5, 6], 7)


def test_a_second_loss_returns_nothing_twice() -> None:
    """Two batches are added up; a worker is lost in each, after the rest was dealt anew."""
    dealings = Dealings()
    dealings.begin(Dealing(Shares(30, 3, 6), (0, 1, 2)))
    dealings.hand_out()
    returned, start = dealings.end_here((0, 2))
    assert (returned, start) == ([2, 3], 6)
    rest = Shares(30, 2, 4).after(start - len(returned))
    assert rest is not None
    dealings.begin(Dealing(rest, (0, 2), tuple(returned), start))
    dealings.hand_out()  # 2 3 for worker 0, 6 7 for worker 2
    assert dealings.end_here((0,)) == ([4, 5, 6, 7], 8)
