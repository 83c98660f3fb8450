"""What a server says to each message, one by one, where the order of events is the point."""

from __future__ import annotations

from dataclasses import replace

import torch

from farandole.server.node.node import Node
from farandole.server.node.range import Range
from farandole.server.node.state import REGISTRAR, Peer
from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import (
    Ack,
    Command,
    Data,
    Done,
    Forward,
    Got,
    Kind,
    Message,
    Moved,
    Problem,
    Read,
    Refused,
    Snapshot,
)
from farandole.server.protocol.views import Chain, Reshape, Reshaped, View
from farandole.server.rules import parse_question, parse_rule
from farandole.server.tables import Table

TABLE = Table("t", 4, 1, "float64", "add", 4, 1)
ROUNDS = Table("r", 4, 1, "float64", "add", 4, 1, rounds=True)
CLIENT = b"client"


class Server:
    """Node 1, head of the only range."""

    def __init__(self, *replicas: int, members: tuple[int, ...] = ()) -> None:
        self.node = Node(1, parse_rule, parse_question)
        self.view = View(1, dict.fromkeys((1, *replicas), ""), (Chain(1, (1, *replicas)),), members)
        self.node.take_view(self.view)
        self.said()

    def said(self) -> list[tuple[Peer, Message | Reshaped]]:
        return [(to, message) for to, message, _ in self.node.take_outbox()]

    def hears(self, sender: Peer, message: Message | Reshape) -> list[tuple[Peer, object]]:
        self.node.receive(sender, message)
        return self.said()


def create(number: int = 1, table: Table = TABLE, sender: int = 9) -> Command:
    return Command(Kind.CREATE, 0, sender, number, ticket=number, text=table.to_json())


def push(number: int, value: float = 1.0, sender: int = 9, **more: object) -> Command:
    return Command(
        Kind.PUSH,
        0,
        sender,
        number,
        ticket=number,
        values=torch.full((4,), value, dtype=torch.float64),
        stop=4,
        **{"table": TABLE.id, **more},
    )


def test_a_snapshot_holds_nothing_that_the_chain_has_not():
    """Else the new head would know a command that it has no log of, and a replica not."""
    server = Server(2)
    ((to, forward),) = server.hears(CLIENT, create())
    assert (to, forward.index) == (2, 1)
    assert server.hears(REGISTRAR, Reshape(0, 1, (3, 2))) == []
    server.node.reconnected(3)
    assert server.said() == []
    answered = server.hears(2, Done(0, 1, 1))
    assert [(to, type(message)) for to, message in answered] == [(CLIENT, Ack), (3, Snapshot)]


def test_a_snapshot_that_may_be_lost_is_sent_again():
    server = Server()
    server.hears(CLIENT, create())
    ((_, first),) = server.hears(REGISTRAR, Reshape(0, 1, (3, 1)))
    server.node.reconnected(3)
    ((to, again),) = server.said()
    assert (to, again.text) == (3, first.text)
    assert server.hears(3, Got(0, 1)) == [(REGISTRAR, Reshaped(0, 1))]


def test_an_answer_to_a_snapshot_that_may_be_lost_is_sent_again():
    """Else the head would wait for it for ever: its own connection has lost nothing."""
    node = Node(3, parse_rule, parse_question)
    where = {1: "a", 3: "c"}
    node.take_view(View(1, where, (Chain(1, (1,)),)))
    text, tensors = Range(0, parse_rule).state()
    node.receive(1, Snapshot(0, 1, text, tensors))
    assert [tuple(said)[:2] for said in node.take_outbox()] == [(1, Got(0, 1))]
    node.reconnected(2)
    assert list(node.take_outbox()) == []
    node.reconnected(1)
    assert [tuple(said)[:2] for said in node.take_outbox()] == [(1, Got(0, 1))]
    node.take_view(View(2, where, (Chain(2, (3, 1)),)))  # it has been heard
    list(node.take_outbox())
    node.reconnected(1)
    assert list(node.take_outbox()) == []


def test_while_a_range_moves_commands_wait_and_then_are_told_where_to():
    server = Server()
    server.hears(CLIENT, create())
    server.hears(REGISTRAR, Reshape(0, 1, (3,)))
    assert server.hears(CLIENT, push(2)) == []
    server.node.take_view(View(2, {1: "", 3: ""}, (Chain(2, (3,)),)))
    assert server.said() == [(CLIENT, Moved(2, 0, 2))]
    assert server.node.copies == {}


def test_a_move_that_comes_to_nothing_loses_nothing():
    server = Server()
    server.hears(CLIENT, create())
    server.hears(REGISTRAR, Reshape(0, 1, (3,)))
    server.hears(CLIENT, push(2))
    server.node.take_view(View(2, {1: ""}, (Chain(2, (1,)),)))  # the newcomer has died
    assert server.said() == [(CLIENT, Ack(2))]


def test_what_follows_an_early_push_waits_with_it():
    """Its sender saw the round end at a head that has died; the others' pushes are on their way."""
    server = Server(members=(8, 9))
    server.hears(CLIENT, create(table=ROUNDS))
    early = push(2, table=ROUNDS.id, clock=1)
    assert server.hears(CLIENT, early) == []
    assert server.hears(CLIENT, Command(Kind.TICK, 0, 9, 3, ticket=3, clock=1)) == []
    again = push(2, table=ROUNDS.id, clock=1)  # after some silence
    assert server.hears(CLIENT, again) == []
    # Their pushes of round 0; the one who is early has had its own at the head that died.
    late = View(2, {1: ""}, (Chain(1, (1,)),), members=(8,))
    server.node.take_view(late)
    answers = server.hears(b"other", push(1, sender=8, table=ROUNDS.id))
    assert sorted(message.ticket for to, message in answers if to == CLIENT) == [2, 2, 3]
    assert all(isinstance(message, Ack) for _, message in answers)


def test_only_memory_of_the_table_itself_is_lent():
    server = Server()
    server.hears(CLIENT, create())
    server.hears(CLIENT, push(2))
    server.node.receive(CLIENT, Read(0, 9, 2, table=TABLE.id, stop=4))
    server.node.receive(CLIENT, Read(0, 9, 2, table=TABLE.id, rows=torch.tensor([1, 3])))
    run, rows = list(server.node.take_outbox())
    assert isinstance(run.lender, TableShard)
    assert rows.lender is None  # it got a copy


def test_a_refusal_is_said_when_all_replicas_know_of_it():
    server = Server(2)
    server.hears(CLIENT, create())
    server.hears(2, Done(0, 1, 1))
    ((to, forward),) = server.hears(CLIENT, push(2, float("nan")))
    assert (to, forward.command.kind) == (2, Kind.VOID)
    ((to, refused),) = server.hears(2, Done(0, 1, 2))
    assert (to, refused.ticket) == (CLIENT, 2)
    assert "NaN" in refused.problem.text


def test_asking_again_for_what_was_refused_is_refused_again():
    server = Server()
    server.hears(CLIENT, create())
    first = server.hears(CLIENT, push(2, float("nan")))
    assert isinstance(first[0][1], Refused)
    assert server.hears(CLIENT, push(2, float("nan"))) == first
    assert server.hears(CLIENT, push(3)) == [(CLIENT, Ack(3))]
    assert server.hears(CLIENT, push(3)) == [(CLIENT, Ack(3))]


def test_what_is_not_for_clients_to_say_is_refused_or_ignored():
    server = Server(2)
    for number, kind in enumerate((Kind.MEMBERS, Kind.VOID), start=1):
        server.hears(CLIENT, Command(kind, 0, 9, number, ticket=number, text="[1]"))
        ((to, refused),) = server.hears(2, Done(0, 1, number))
        assert (to, refused.ticket) == (CLIENT, number)
        assert "not for clients" in refused.problem.text
    held = server.node.copies[0]
    assert not held.range.clocks.members
    for message in (
        Forward(0, 1, 3, create()),
        Done(0, 1, 9),
        Got(0, 1),
        Snapshot(0, 5, "nonsense", ()),
    ):
        assert server.hears(CLIENT, message) == []
    assert (held.range.version, held.done) == (2, 2)


def test_a_range_that_does_not_exist_is_refused():
    server = Server()
    for range_ in (-1, 1, 10**9):
        ((_, refused),) = server.hears(CLIENT, Read(range_, 9, ticket=4))
        assert refused == Refused(4, Problem(f"there is no range {range_}."))


def test_a_worker_that_was_given_up_is_told_so():
    server = Server(members=(9,))
    server.hears(CLIENT, create())
    server.node.take_view(View(2, {1: ""}, (Chain(1, (1,)),), gone=(9,)))
    ((_, refused),) = server.hears(CLIENT, push(2))
    assert "given up" in refused.problem.text


def test_a_question_that_fails_is_refused_and_nothing_else_happens():
    server = Server()
    server.hears(CLIENT, create())
    server.hears(CLIENT, push(2, 2.0))
    read = Read(0, 9, 2, ticket=5, table=TABLE.id, stop=4)
    for text in ("summ", "os.system"):
        ((_, refused),) = server.hears(CLIENT, replace(read, text=text))
        assert isinstance(refused, Refused)
        assert text in refused.problem.text
    ((_, data),) = server.hears(CLIENT, replace(read, text="sum"))
    assert isinstance(data, Data)
    assert data.values.tolist() == [8.0]


def test_a_snapshot_for_a_move_that_was_given_up_is_not_kept():
    other = Node(2, parse_rule, parse_question)
    other.take_view(View(5, {1: "a", 2: "b"}, (Chain(4, (1,)),)))
    text, tensors = Range(0, parse_rule).state()
    other.receive(1, Snapshot(0, 3, text, tensors))
    assert other.copies == {}
    other.receive(1, Snapshot(0, 4, text, tensors))
    assert list(other.copies) == [0]


def test_a_snapshot_may_overtake_the_views():
    """It comes from another server than they do."""
    node = Node(1, parse_rule, parse_question)
    where = {1: "a", 2: "b", 3: "c"}
    node.take_view(View(1, where, (Chain(1, (1, 3)),)))
    text, tensors = Range(0, parse_rule).state()
    node.receive(2, Snapshot(0, 2, text, tensors))  # of the next epoch, in which 2 is the head
    node.take_view(View(2, where, (Chain(1, (1, 3)),), members=(7,)))
    node.take_view(View(3, where, (Chain(2, (2, 3)),)))
    assert list(node.copies) == [0]
    node.take_view(View(4, where, (Chain(3, (2, 1)),)))
    assert node.copies[0].chain == Chain(3, (2, 1))
