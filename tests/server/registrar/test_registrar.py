"""The registrar's books: who holds what, what moves, and what is lost."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.server.protocol.views import Reshape, Reshaped, View
from farandole.server.registrar.registrar import Registrar
from farandole.server.registrar.ring import place

RANGES = 12


def begun(servers: int, replicas: int) -> Registrar:
    registrar = Registrar(servers, replicas, RANGES)
    for number in range(servers):
        assert not registrar.has_begun
        registrar.add_server(f"address {number}")
    assert registrar.has_begun
    return registrar


def carry_out(registrar: Registrar) -> int:
    """Does what it orders, as the heads would, until it orders nothing more; counts that."""
    moves = 0
    while registrar.orders:
        head, order = registrar.orders.pop(0)
        assert registrar.view.chains[order.range].head == head
        registrar.take_reshaped(head, Reshaped(order.range, order.epoch))
        moves += 1
    return moves


@pytest.mark.parametrize(
    ("servers", "replicas", "complaint"),
    [
        (0, 0, "0 parameter servers hold nothing"),
        (2, 2, "2 replicas beside each range's own server need 3 servers, and there are 2"),
        (1, -1, "-1 replicas"),
    ],
)
def test_what_cannot_be_is_refused(servers, replicas, complaint):
    with pytest.raises(UserError, match=complaint):
        Registrar(servers, replicas)


def test_it_begins_when_all_servers_are_there_with_the_chains_of_the_ring():
    registrar = begun(3, 1)
    assert [chain.servers for chain in registrar.view.chains] == place([1, 2, 3], RANGES, 1)
    assert {chain.epoch for chain in registrar.view.chains} == {1}
    assert registrar.is_settled
    assert registrar.orders == []


def test_one_that_dies_before_the_beginning_is_only_missed():
    registrar = Registrar(2, 0, RANGES)
    registrar.add_server("a")
    registrar.lose_server(1)
    registrar.add_server("b")
    assert not registrar.has_begun
    registrar.add_server("c")
    assert registrar.has_begun
    assert {chain.head for chain in registrar.view.chains} == {2, 3}


@settings(max_examples=60)
@given(
    servers=st.integers(2, 5),
    data=st.data(),
    events=st.lists(st.sampled_from(["come", "go", "work"]), max_size=12),
)
def test_whoever_comes_and_goes_it_settles_where_the_ring_wants(servers, data, events):
    replicas = data.draw(st.integers(1, servers - 1))
    registrar = begun(servers, replicas)
    for event in events:
        alive = list(registrar.view.addresses)
        if event == "come":
            assert registrar.add_server("new") not in alive
        elif event == "go" and len(alive) > 1:
            # One whose ranges all have another replica.
            chains = registrar.view.chains
            spare = [n for n in alive if all(set(chain.servers) - {n} for chain in chains)]
            if spare:
                registrar.lose_server(data.draw(st.sampled_from(spare)))
        elif registrar.orders:
            head, order = registrar.orders.pop(0)
            registrar.take_reshaped(head, Reshaped(order.range, order.epoch))
        for chain in registrar.view.chains:
            assert set(chain.servers) <= registrar.view.addresses.keys()
    _finish(registrar)
    assert registrar.is_settled == (len(registrar.view.addresses) > replicas)
    wanted = place(list(registrar.view.addresses), RANGES, replicas)
    assert [chain.servers for chain in registrar.view.chains] == wanted


def _finish(registrar: Registrar) -> None:
    """Orders of earlier epochs, and for servers that are dead, come to nothing by themselves."""
    orders: deque[tuple[int, Reshape]] = deque()
    while True:
        orders += registrar.orders
        registrar.orders = []
        if not orders:
            return
        head, order = orders.popleft()
        registrar.take_reshaped(head, Reshaped(order.range, order.epoch))


def test_a_few_ranges_move_at_a_time():
    registrar = begun(3, 0)
    registrar.add_server("one more")
    assert not registrar.is_settled
    assert len(registrar.orders) == 2
    head, order = registrar.orders.pop(0)
    registrar.take_reshaped(head, Reshaped(order.range, order.epoch))
    assert len(registrar.orders) == 2  # the one that is left, and the next
    carry_out(registrar)
    assert registrar.is_settled


def test_only_the_head_in_this_epoch_can_report_a_move():
    registrar = begun(2, 1)
    registrar.add_server("one more")
    head, order = registrar.orders[0]
    before = registrar.view
    other = next(server for server in registrar.view.addresses if server != head)
    registrar.take_reshaped(other, Reshaped(order.range, order.epoch))
    registrar.take_reshaped(head, Reshaped(order.range, order.epoch + 1))
    registrar.take_reshaped(head, Reshaped(RANGES - 1, 7))
    assert registrar.view == before
    registrar.take_reshaped(head, Reshaped(order.range, order.epoch))
    assert registrar.view.chains[order.range].servers == order.servers
    assert registrar.view.chains[order.range].epoch == order.epoch + 1


def test_ranges_without_a_replica_are_lost_with_their_server_and_stay_so():
    registrar = begun(2, 0)
    held = [n for n, chain in enumerate(registrar.view.chains) if chain.servers == (1,)]
    assert held
    registrar.lose_server(1)
    registrar.lose_server(1)
    assert registrar.lost == held
    assert not registrar.is_settled
    registrar.add_server("too late")
    carry_out(registrar)
    assert all(registrar.view.chains[number].head is None for number in held)
    assert not registrar.is_settled


def test_with_a_replica_the_successor_takes_over_at_once():
    registrar = begun(3, 1)
    before = registrar.view.chains
    registrar.lose_server(2)
    for old, new in zip(before, registrar.view.chains, strict=True):
        assert new.servers == tuple(server for server in old.servers if server != 2)
        assert new.epoch == old.epoch + (2 in old.servers)
    assert registrar.lost == []


def confirm_all(registrar: Registrar) -> dict[int, dict[int, int]]:
    """What servers say that have taken in the newest view."""
    chains = list(enumerate(registrar.view.chains))
    return {
        server: {range_: chain.epoch for range_, chain in chains if server in chain.servers}
        for server in registrar.view.addresses
    }


def test_copies_that_nobody_confirms_are_missing():
    registrar = Registrar(3, 1, RANGES)
    assert registrar.missing_copies({}) == 2 * RANGES
    registrar = begun(3, 1)
    assert registrar.missing_copies({}) == 2 * RANGES
    confirmed = confirm_all(registrar)
    assert registrar.missing_copies(confirmed) == 0
    of_another_epoch = dict.fromkeys(confirmed[2], 7)
    assert registrar.missing_copies({**confirmed, 2: of_another_epoch}) == len(confirmed[2])


def test_it_is_not_settled_with_fewer_servers_than_copies():
    registrar = begun(3, 1)
    registrar.lose_server(1)
    assert not registrar.is_settled
    carry_out(registrar)
    assert registrar.is_settled  # two servers, two copies
    assert registrar.missing_copies(confirm_all(registrar)) == 0
    registrar.lose_server(2)
    carry_out(registrar)
    assert not registrar.is_settled
    assert registrar.missing_copies(confirm_all(registrar)) == RANGES
    registrar.add_server("in their place")
    assert not registrar.is_settled
    carry_out(registrar)
    assert registrar.is_settled


def test_the_advice_after_a_loss_has_the_numbers_of_this_cluster():
    registrar = begun(3, 1)
    registrar.lose_server(1)
    carry_out(registrar)
    for number in (2, 3):
        assert registrar.view.lost_because == ""
        registrar.lose_server(number)
    because = registrar.view.lost_because
    assert f"{RANGES} of {RANGES} ranges of parameters are lost" in because
    assert "3 servers came and 0 are alive" in because
    assert "Each range had 2 copies (--replicas 1), and 2 servers died before" in because
    assert "give --replicas 2 and --servers 3 or more" in because
    alone = begun(1, 0)
    alone.lose_server(1)
    assert "1 server(s) came, 0 are alive" in alone.view.lost_because
    assert "With --servers 2 and --replicas 1" in alone.view.lost_because


def test_workers_count_and_guests_do_not():
    registrar = begun(1, 0)
    first, guest, second = registrar.add_worker(), registrar.add_guest(), registrar.add_worker()
    assert len({first, guest, second}) == 3
    assert registrar.view.members == (first, second)
    number = registrar.view.number
    registrar.remove_worker(guest, lost=True)
    assert registrar.view.number == number
    registrar.remove_worker(first, lost=True)
    registrar.remove_worker(second, lost=False)
    assert registrar.view.members == ()
    assert registrar.view.gone == (first,)


def test_a_view_can_be_written_and_read():
    registrar = begun(3, 1)
    registrar.remove_worker(registrar.add_worker(), lost=True)
    registrar.add_worker()
    assert View.from_json(registrar.view.to_json()) == registrar.view
