"""Tasks keep their dependencies and their bound, whatever ends in whichever order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server import Cluster, connect
from farandole.server.client.tasks import Tasks


class Fake:
    """Something under way that ends when the test says so."""

    def __init__(self, number: int, ended: set[int]) -> None:
        self.number, self.ended = number, ended

    def done(self) -> bool:
        return self.number in self.ended

    def wait(self) -> int:
        self.ended.add(self.number)
        return 10 * self.number


@settings(max_examples=150, deadline=None)
@given(data=st.data(), delay=st.one_of(st.none(), st.integers(0, 4)), count=st.integers(1, 15))
def test_dependencies_and_bound(data, delay, count):
    tasks, ended, started, needs = Tasks(delay), set(), [], {}

    def starter(number):
        def start():
            assert needs[number] <= ended, "a dependency has not ended"
            if delay is not None:
                before = set(range(number - delay))
                assert before <= ended, "too far ahead"
            started.append(number)
            return Fake(number, ended)

        return start

    for number in range(count):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        needs[number] = data.draw(st.sets(earlier, max_size=3)) if number else set()
        assert tasks.submit(starter(number), after=needs[number]) == number
        for other in data.draw(st.sets(st.sampled_from(started))) if started else ():
            ended.add(other)
    chosen = data.draw(st.integers(0, count - 1))
    assert tasks.wait(chosen) == 10 * chosen
    assert chosen in ended
    tasks.wait_all()
    assert sorted(started) == list(range(count))
    assert tasks.unfinished == []


def test_without_a_bound_nothing_waits_for_what_it_does_not_name():
    tasks, ended = Tasks(), set()
    for number in range(5):
        tasks.submit(lambda number=number: Fake(number, ended))
    assert not ended
    assert tasks.wait(4) == 40
    assert ended >= {4}


def test_one_after_the_other():
    tasks, ended, started = Tasks(delay=0), set(), []
    for number in range(3):
        tasks.submit(lambda number=number: started.append(number) or Fake(number, ended))
    assert started == [0]
    ended.add(0)
    assert not tasks.done(1)
    assert started == [0, 1]


def test_bad_input():
    with pytest.raises(UserError, match="delay of -1"):
        Tasks(-1)
    with pytest.raises(UserError, match=r"after \[3\]"):
        Tasks().submit(lambda: None, after=[3])
    with pytest.raises(UserError, match="no task 0"):
        Tasks().wait(0)


def test_at_a_store():
    with Cluster(in_threads=True) as cluster, connect(cluster.address, cluster.key_file) as store:
        store.create("w", 100)
        tasks = Tasks(delay=2)
        pushes = [tasks.submit(lambda: store.start_push("w", torch.ones(100))) for _ in range(10)]
        fresh = tasks.submit(lambda: store.start_get("w"), after=pushes)
        assert tasks.wait(fresh).view(-1).tolist() == [10.0] * 100
