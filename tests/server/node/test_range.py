"""A range as a state machine: commands count once, rounds end when they should, and a copy made at
any moment behaves as the original."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from farandole.server.node.clocks import RESTING
from farandole.server.node.range import Range
from farandole.server.protocol.messages import Command, Kind, Read
from farandole.server.rules import parse_rule
from farandole.server.tables import Table

PLAIN = Table("plain", 4, 1, "float64", "sgd:momentum=0.5", 4, 1)
ROUNDS = Table("rounds", 4, 1, "float64", "adam", 4, 1, rounds=True)


def table_of(**changes: object) -> Table:
    return Table(**{**vars(ROUNDS), **changes})


class Talk:
    """Numbers the commands of some senders."""

    def __init__(self, *tables: Table, members: list[int] | None = None) -> None:
        self.range = Range(0, parse_rule)
        self._numbers: dict[int, int] = {}
        for table in tables:
            self.say(Command(Kind.CREATE, 0, 1, text=table.to_json()))
        if members is not None:
            self.members(members)

    def say(self, command: Command) -> None:
        number = 0
        if command.sender:
            number = self._numbers[command.sender] = self._numbers.get(command.sender, 0) + 1
        numbered = dataclasses.replace(command, number=number)
        assert self.range.problem_with(numbered) is None
        self.range.apply(numbered)

    def members(self, members: list[int]) -> None:
        self.say(Command(Kind.MEMBERS, 0, text=json.dumps(members)))

    def push(self, sender: int, value: float, clock: int = 0, table: Table = ROUNDS) -> None:
        values = torch.full((4,), value, dtype=torch.float64)
        self.say(
            Command(
                Kind.PUSH, 0, sender, table=table.id, stop=4, values=values, rate=1.0, clock=clock
            )
        )

    def first(self, table: Table = ROUNDS) -> float:
        return float(self.range.shards[table.id].read(Read(0, stop=4))[0, 0])


def adding(**changes: object) -> Table:
    return table_of(rule="add", **changes)


def test_a_round_takes_the_mean_of_all_members():
    table = adding()
    talk = Talk(table, members=[1, 2, 3])
    talk.push(1, 6, table=table)
    talk.push(3, 3, table=table)
    assert (talk.first(table), talk.range.round_of(table.id)) == (0, 0)
    talk.push(2, 0, table=table)
    assert (talk.first(table), talk.range.round_of(table.id)) == (3, 1)
    for sender in (1, 2, 3):
        talk.push(sender, 1, clock=1, table=table)
    assert (talk.first(table), talk.range.round_of(table.id)) == (4, 2)


def test_one_who_pushes_twice_in_a_round_counts_once():
    table = adding()
    talk = Talk(table, members=[1, 2])
    talk.push(1, 6, table=table)
    talk.push(1, 100, table=table)
    talk.push(2, 2, table=table)
    assert talk.first(table) == 4
    assert talk.range.shards[table.id].late == 1


def test_a_round_with_backups_takes_the_first_and_counts_the_late():
    table = adding(backups=1)
    talk = Talk(table, members=[1, 2, 3])
    talk.push(1, 6, table=table)
    talk.push(2, 2, table=table)
    assert (talk.first(table), talk.range.round_of(table.id)) == (4, 1)
    talk.push(3, 100, table=table)  # for the round that is over
    shard = talk.range.shards[table.id]
    assert (talk.first(table), shard.round, shard.late) == (4, 1, 1)
    talk.push(3, 1, clock=1, table=table)
    talk.push(2, 3, clock=1, table=table)
    assert (talk.first(table), shard.round, shard.late) == (6, 2, 1)


def test_more_backups_than_members_wait_for_one():
    table = adding(backups=5)
    talk = Talk(table, members=[1, 2])
    talk.push(2, 8, table=table)
    assert talk.first(table) == 8


def test_a_member_who_leaves_ends_the_round_that_waited_for_it():
    table = adding()
    talk = Talk(table, members=[1, 2, 3])
    talk.push(1, 6, table=table)
    talk.push(2, 2, table=table)
    talk.members([1, 2])
    assert (talk.first(table), talk.range.round_of(table.id)) == (4, 1)


def test_what_one_gave_before_it_left_counts():
    table = adding()
    talk = Talk(table, members=[1, 2])
    talk.push(1, 6, table=table)
    talk.members([2])
    assert talk.range.round_of(table.id) == 0  # the one who is left has given nothing
    talk.push(2, 2, table=table)
    assert talk.first(table) == 4


def test_a_push_for_a_round_that_has_not_begun_is_early():
    talk = Talk(ROUNDS, PLAIN, members=[1, 2])
    assert talk.range.is_early(Command(Kind.PUSH, 0, 1, table=ROUNDS.id, clock=1))
    assert not talk.range.is_early(Command(Kind.PUSH, 0, 1, table=ROUNDS.id, clock=0))
    assert not talk.range.is_early(Command(Kind.PUSH, 0, 1, table=PLAIN.id, clock=1))
    assert not talk.range.is_early(Command(Kind.PUT, 0, 1, table=ROUNDS.id, clock=1))


def test_a_command_that_came_is_known_and_a_gap_is_too():
    talk = Talk(PLAIN)
    talk.push(7, 1, table=PLAIN)
    talk.push(7, 1, table=PLAIN)
    assert talk.range.has_had(Command(Kind.TICK, 0, 7, 2))
    assert not talk.range.has_had(Command(Kind.TICK, 0, 7, 3))
    assert not talk.range.has_missed_before(Command(Kind.TICK, 0, 7, 3))
    assert talk.range.has_missed_before(Command(Kind.TICK, 0, 7, 4))
    assert not talk.range.has_had(Command(Kind.TICK, 0, 8, 1))


def test_a_read_waits_for_its_sender_the_slowest_and_the_round():
    talk = Talk(PLAIN, ROUNDS, members=[1, 2])
    talk.say(Command(Kind.TICK, 0, 1, clock=0))
    assert not talk.range.is_far_enough(Read(0, 2, number=1))
    talk.say(Command(Kind.TICK, 0, 2, clock=0))
    assert talk.range.is_far_enough(Read(0, 2, number=1, needs=1))
    assert not talk.range.is_far_enough(Read(0, 2, number=1, needs=2))
    assert not talk.range.is_far_enough(Read(0, table=ROUNDS.id, needs=1, rounds=True))
    talk.push(1, 1)
    talk.push(2, 1)
    assert talk.range.is_far_enough(Read(0, table=ROUNDS.id, needs=1, rounds=True))


def test_newcomers_hold_nobody_up_until_they_say_where_they_begin():
    talk = Talk(members=[1, 2])
    for clock in range(3):
        talk.say(Command(Kind.TICK, 0, 1, clock=clock))
    talk.say(Command(Kind.TICK, 0, 2, clock=1))
    talk.members([1, 2, 3])
    assert talk.range.clocks.slowest == 2
    assert talk.range.clocks.active == {1, 2}
    talk.say(Command(Kind.TICK, 0, 3, clock=0))
    assert talk.range.clocks.slowest == 1  # now the newcomer is
    talk.members([1, 2])
    assert talk.range.clocks.slowest == 2


def test_one_that_rests_is_not_waited_for_and_one_that_wakes_is():
    table = adding()
    talk = Talk(table, members=[1, 2])
    talk.say(Command(Kind.TICK, 0, 1, clock=RESTING - 1))
    talk.push(2, 4, table=table)
    assert (talk.first(table), talk.range.round_of(table.id)) == (4, 1)
    talk.say(Command(Kind.TICK, 0, 1, clock=0))
    talk.push(2, 2, clock=1, table=table)
    assert talk.range.round_of(table.id) == 1
    talk.push(1, 4, clock=1, table=table)
    assert (talk.first(table), talk.range.round_of(table.id)) == (7, 2)


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 10**9), cut=st.integers(0, 40))
def test_a_copy_made_at_any_moment_goes_on_as_the_original(seed, cut):
    """In the middle of a round, with momentum, clocks and what has been had."""
    choose = random.Random(seed)
    backed = table_of(name="backed", rule="sgd:momentum=0.9", backups=1)
    talk = Talk(PLAIN, ROUNDS, backed, members=[1, 2, 3])

    def one_step() -> None:
        sender = choose.randrange(1, 4)
        table = choose.choice([PLAIN, ROUNDS, backed])
        if choose.random() < 0.1:
            talk.members(choose.sample([1, 2, 3], choose.randrange(1, 4)))
        elif choose.random() < 0.3:
            talk.say(Command(Kind.TICK, 0, sender, clock=choose.randrange(5)))
        else:
            clock = max(0, talk.range.round_of(table.id) - choose.randrange(2))
            talk.push(sender, choose.uniform(-1, 1), clock, table)

    for _ in range(cut):
        one_step()
    original, kept = talk.range, choose.getstate()
    numbers = dict(talk._numbers)
    text, tensors = original.state()
    copy = Range.from_state(0, text, tensors, parse_rule)
    assert copy.state()[0] == text
    for _ in range(30):
        one_step()
    choose.setstate(kept)
    talk.range, talk._numbers = copy, numbers
    for _ in range(30):
        one_step()
    assert copy.state()[0] == original.state()[0]
    assert len(copy.state()[1]) == len(original.state()[1])
    for ours, theirs in zip(copy.state()[1], original.state()[1], strict=True):
        assert torch.equal(ours, theirs)


def test_a_table_that_is_not_there_is_refused_with_those_that_are():
    talk = Talk(PLAIN)
    for message in (Read(0, table=5), Command(Kind.PUSH, 0, 1, 9, table=5)):
        problem = talk.range.problem_with(message)
        assert problem is not None
        assert "no such table" in problem.text
        assert "'plain'" in problem.text


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"rows": 5}, "rows=4, not 5"),
        ({"rule": "add"}, "rule='adam', not 'add'"),
        ({"backups": 1}, "backups=0, not 1"),
        ({"rounds": False}, "rounds=True, not False"),
    ],
)
def test_another_table_of_the_same_name_is_refused_with_what_differs(changes, difference):
    talk = Talk(ROUNDS)
    text = table_of(**changes).to_json()
    problem = talk.range.problem_with(Command(Kind.CREATE, 0, 1, 2, text=text))
    assert problem is not None
    assert difference in problem.text
    same = Command(Kind.CREATE, 0, 1, 2, text=ROUNDS.to_json())
    assert talk.range.problem_with(same) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dtype": "int64", "rounds": False, "rule": "sgd"}, "int64.*'sgd' makes fractions"),
        ({"dtype": "int32", "rule": "add"}, "int32.*rounds take the mean"),
        ({"rule": "adan"}, "adam"),
    ],
)
def test_tables_whose_rule_would_fail_later_are_refused_at_once(changes, complaint):
    text = table_of(**changes).to_json()
    problem = Range(0, parse_rule).problem_with(Command(Kind.CREATE, 0, 1, 1, text=text))
    assert problem is not None
    assert re.search(complaint, problem.text), problem


def test_whole_numbers_may_be_added_up():
    table = table_of(dtype="int64", rule="add", rounds=False)
    talk = Talk(table)
    values = torch.full((4,), 3)
    talk.say(Command(Kind.PUSH, 0, 1, table=table.id, stop=4, values=values))
    assert talk.first(table) == 3
