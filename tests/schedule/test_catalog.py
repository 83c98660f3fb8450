"""Algorithms by name, and what may be relied on about the data they return."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import farandole.schedule
from farandole.errors import UserError
from farandole.schedule import ALGORITHMS, Move, Round, Schedule, Transfer, build, check, ring
from farandole.topology import Topology


def test_the_names() -> None:
    assert list(ALGORITHMS) == [
        "naive",
        "parameter_server",
        "ring",
        "halving_doubling",
        "double_tree",
        "two_level",
        "torus",
    ]
    with pytest.raises(TypeError):
        ALGORITHMS["mine"] = ALGORITHMS["ring"]  # type: ignore[index]


def test_everything_exported_is_there() -> None:
    assert sorted(farandole.schedule.__all__) == sorted(set(farandole.schedule.__all__))
    assert all(hasattr(farandole.schedule, name) for name in farandole.schedule.__all__)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no all-reduce algorithm 'rign'\. Did you mean 'ring'\?"):
        build("rign", 4)
    with pytest.raises(UserError, match="Known: double_tree, halving_doubling, naive"):
        build("", 4)


def test_ranks_and_topology_must_agree() -> None:
    with pytest.raises(UserError, match="two_level: 4 ranks, but the topology holds 3"):
        build("two_level", 4, Topology.single(3))
    with pytest.raises(UserError, match="ring: 0 ranks"):
        build("ring", 0)


def test_two_level_without_a_topology_is_a_ring_in_one_host() -> None:
    assert build("two_level", 5).draw().splitlines()[1:] == ring(5).draw().splitlines()[1:]


def test_the_room_does_not_import_torch() -> None:
    code = "import sys, farandole.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0


def test_the_view_of_a_rank() -> None:
    first, *_, last = ring(3).for_rank(0)
    assert first.sends == (Move(peer=1, first=2, stop=3, op="add"),)
    assert first.receives == (Move(peer=2, first=1, stop=2, op="add"),)
    assert last.sends == (Move(peer=1, first=2, stop=3, op="copy"),)


def test_a_round_is_a_sequence_of_transfers_and_cannot_be_changed() -> None:
    transfers = [Transfer(0, 1, 0, 2, "add"), Transfer(1, 2, 3, 4, "copy")]
    packed = Round.from_transfers(transfers)
    assert list(packed) == transfers
    assert len(packed) == 2
    assert [str(transfer) for transfer in packed] == ["0→1 +0-1", "1→2 =3"]
    assert list(Round.merged([packed, Round.from_transfers([]), packed])) == transfers * 2
    with pytest.raises(ValueError, match="read-only"):
        packed.src[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        ring(4).rounds[0].first[0] = 7


def test_single_numbers_hold_for_all_transfers_of_a_round() -> None:
    packed = Round.of(np.array([1, 2]), 0, 3, 4, "add")
    assert list(packed) == [Transfer(1, 0, 3, 4, "add"), Transfer(2, 0, 3, 4, "add")]
    one = np.array([1], dtype=np.int32)
    two = np.array([1, 2], dtype=np.int32)
    with pytest.raises(UserError, match=r"lengths \[1, 2, 1, 1, 1\]"):
        Round(one, two, one, one, one.astype(np.bool_))


def test_a_round_in_which_nothing_happens_is_allowed() -> None:
    pause = Round.from_transfers([])
    check(Schedule("slow ring", 3, 3, (pause, *ring(3).rounds, pause)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_view_of_one_among_many_ranks(name: str) -> None:
    """The size of the largest published jobs; whatever a rank sends, its peer expects."""
    hosts_of_eight = Topology.from_names([f"host{rank // 8}" for rank in range(512)])
    schedule = build(name, 512, hosts_of_eight)
    mine = schedule.for_rank(100)
    peers = {move.peer for turn in mine for move in turn.sends}
    for peer in list(peers)[:2]:
        theirs = schedule.for_rank(peer)
        for own, other in zip(mine, theirs, strict=True):
            sent = [move[1:] for move in own.sends if move.peer == peer]
            expected = [move[1:] for move in other.receives if move.peer == 100]
            assert sent == expected
