"""Hosts and the ranks on them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import UserError
from farandole.topology import Host, Topology

names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(names)
@settings(max_examples=100, deadline=None)
def test_every_rank_finds_its_host(names: list[str]) -> None:
    topology = Topology.from_names(names)
    assert topology.size == len(names)
    assert [host.name for host in topology.hosts] == list(dict.fromkeys(names))
    for rank, name in enumerate(names):
        host = topology.host(rank)
        assert host.name == name
        assert topology.hosts[topology.host_index(rank)] is host
        assert host.ranks[topology.local_rank(rank)] == rank
        assert topology.local_rank(rank) == names[:rank].count(name)
        assert topology.local_size(rank) == names.count(name)


@given(names)
@settings(max_examples=50, deadline=None)
def test_the_text_names_every_rank_once(names: list[str]) -> None:
    read: dict[str, list[int]] = {}
    for part in str(Topology.from_names(names)).split(", "):
        name, spans = part.split(": ")
        for span in spans.split(","):
            first, _, last = span.partition("-")
            read.setdefault(name, []).extend(range(int(first), int(last or first) + 1))
    assert read == {name: [r for r, n in enumerate(names) if n == name] for name in names}


def test_the_text() -> None:
    assert str(Topology.from_names(["a", "a", "a", "b", "a"])) == "a: 0-2,4, b: 3"


def test_one_host() -> None:
    assert Topology.single(2) == Topology((Host("localhost", (0, 1)),))


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        ((), "[]"),
        ((Host("a", ()),), "[]"),
        ((Host("a", (1,)),), "[1]"),
        ((Host("a", (0, 2)),), "[0, 2]"),
        ((Host("a", (0,)), Host("b", (0, 1))), "[0, 0, 1]"),
    ],
)
def test_ranks_must_be_complete_and_sit_once(hosts: tuple[Host, ...], ranks: str) -> None:
    with pytest.raises(UserError) as error:
        Topology(hosts)
    assert f"ranks {ranks};" in str(error.value)


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(rank: int) -> None:
    with pytest.raises(UserError, match=f"no rank {rank} among 2 ranks"):
        Topology.single(2).host(rank)
