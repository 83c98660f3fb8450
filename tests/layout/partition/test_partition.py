"""The cut that is found is the best there is: compared with trying all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole import UserError
from farandole.layout.partition.cost import BlockProfile
from farandole.layout.partition.network import Component, Network
from farandole.layout.partition.search import cut_by_hand, find_cut
from farandole.layout.partition.text import describe, suggestion, unevenness

small = st.integers(0, 20)
profiles_of_blocks = st.lists(
    st.builds(
        lambda f, b, out, saved, weights, shared: BlockProfile(
            "block", f, b, out, saved + shared, weights, shared
        ),
        *[small] * 6,
    ),
    min_size=1,
    max_size=6,
)
ranks_in_all = st.integers(1, 5)
speeds = st.sampled_from([0.5, 1.0, 4.0])


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield first, *rest


def all_cuts(blocks: int, ranks: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for stages in range(1, min(blocks, ranks) + 1):
        for balance in compositions(blocks, stages):
            for replicas in compositions(ranks, stages):
                yield balance, replicas


class Plain:
    """The definition, written out for hosts of some ranks, stage by stage and gap by gap."""

    def __init__(self, profiles: Sequence[BlockProfile], host: int, inside: float, between: float):
        self.profiles, self.host, self.inside, self.between = profiles, host, inside, between

    def seconds(self, balance: Sequence[int], replicas: Sequence[int]) -> float:
        worst, block, rank = 0.0, 0, 0
        for index, (count, own) in enumerate(zip(balance, replicas, strict=True)):
            blocks = self.profiles[block : block + count]
            hosts = [each // self.host for each in range(rank, rank + own)]
            local = max(hosts.count(host) for host in hosts)
            weights = sum(each.parameter_bytes for each in blocks)
            sync = ring(local) * weights / self.inside + ring(len(set(hosts))) * weights / (
                self.between
            )
            compute = sum(each.forward_seconds + each.backward_seconds for each in blocks)
            worst = max(worst, compute / own, sync)
            if index + 1 < len(balance):
                after = range(rank + own, rank + own + replicas[index + 1])
                one_host = len({*hosts, *(each // self.host for each in after)}) == 1
                speed = self.inside if one_host else self.between
                worst = max(worst, 2 * blocks[-1].output_bytes / speed)
            block, rank = block + count, rank + own
        return worst

    def memory(self, balance: Sequence[int], replicas: Sequence[int]) -> int:
        worst, block, left = 0, 0, sum(replicas)
        for count, own in zip(balance, replicas, strict=True):
            blocks = self.profiles[block : block + count]
            flight = math.ceil(left / own)
            saved = sum(each.saved_bytes for each in blocks)
            saved -= sum(each.shared_bytes for each in blocks[1:])
            weights = sum(each.parameter_bytes for each in blocks)
            worst = max(worst, weights * (flight + 2) + saved * flight)
            block, left = block + count, left - own
        return worst


def ring(members: int) -> float:
    return 2 * (members - 1) / members


@settings(max_examples=60)
@given(profiles_of_blocks, ranks_in_all, speeds, st.floats(0, 1.5))
def test_equals_trying_all_cuts_with_and_without_a_memory_limit(
    profiles: list[BlockProfile], ranks: int, speed: float, tightness: float
) -> None:
    plain = Plain(profiles, 1, math.inf, speed)
    known = {
        cut: (plain.seconds(*cut), plain.memory(*cut)) for cut in all_cuts(len(profiles), ranks)
    }
    network = Network(speed)
    best = find_cut(profiles, ranks, network)
    assert best.bottleneck_seconds == pytest.approx(min(each for each, _ in known.values()))
    seconds, memory = known[best.balance, best.replicas]
    assert best.bottleneck_seconds == pytest.approx(seconds)
    assert max(stage.memory_bytes for stage in best.stages) == memory

    limit = tightness * memory
    fitting = [each for each, needed in known.values() if needed <= limit]
    if fitting:
        within = find_cut(profiles, ranks, network, memory_bytes=limit)
        assert within.bottleneck_seconds == pytest.approx(min(fitting))
        assert max(stage.memory_bytes for stage in within.stages) <= limit
    else:
        excess = (min(needed for _, needed in known.values()) - limit) / 2**20
        with pytest.raises(UserError, match=re.escape(f" {excess:.3g} MiB too much")):
            find_cut(profiles, ranks, network, memory_bytes=limit)


@settings(max_examples=60)
@given(profiles_of_blocks, ranks_in_all, st.integers(1, 3), speeds)
def test_equals_trying_all_cuts_of_two_levels(
    profiles: list[BlockProfile], ranks: int, host: int, between: float
) -> None:
    plain = Plain(profiles, host, 8.0, between)
    network = Network(between, within=Component(host, Network(8.0)))
    best = find_cut(profiles, ranks, network)
    seconds = {cut: plain.seconds(*cut) for cut in all_cuts(len(profiles), ranks)}
    assert best.bottleneck_seconds == pytest.approx(min(seconds.values()))
    for (balance, replicas), expected in seconds.items():
        by_hand = cut_by_hand(profiles, balance, network, replicas=replicas)
        assert by_hand.bottleneck_seconds == pytest.approx(expected)


@settings(max_examples=40)
@given(profiles_of_blocks, st.data())
def test_equals_trying_all_cuts_with_given_ranks(
    profiles: list[BlockProfile], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(profiles)))
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    network = Network(2.0)
    plain = Plain(profiles, 1, math.inf, 2.0)
    ways = list(compositions(len(profiles), stages))
    found = find_cut(profiles, sum(replicas), network, replicas=replicas)
    assert found.replicas == tuple(replicas)
    expected = min(plain.seconds(balance, replicas) for balance in ways)
    assert found.bottleneck_seconds == pytest.approx(expected)
    single = find_cut(profiles, stages, network, stages=stages)
    assert single.replicas == (1,) * stages
    expected = min(plain.seconds(balance, (1,) * stages) for balance in ways)
    assert single.bottleneck_seconds == pytest.approx(expected)


def blocks(
    *seconds: float, output: int = 0, saved: int = 0, weights: int = 0
) -> list[BlockProfile]:
    return [
        BlockProfile(f"layer{index}", each / 3, 2 * each / 3, output, saved, weights)
        for index, each in enumerate(seconds)
    ]


def test_messages_and_rare_averaging_count() -> None:
    slow = Network(math.inf, seconds_per_message=0.5)
    assert cut_by_hand(blocks(1, 1), (1, 1), slow).stages[0].boundary_seconds == 1.0
    assert cut_by_hand(blocks(1), (1,), slow, replicas=(3,)).stages[0].sync_seconds == 2 * 2 * 0.5
    heavy = blocks(1, weights=12)
    for batches, expected in ((1, 12.0), (4, 3.0)):
        cut = cut_by_hand(heavy, (1,), Network(1.0), replicas=(2,), batches_per_sync=batches)
        assert cut.bottleneck_seconds == expected


def test_the_caller_says_what_a_rank_holds() -> None:
    asked = []

    def in_flight(ranks_from_here: int, own: int) -> int:
        asked.append((ranks_from_here, own))
        return 7

    cut = cut_by_hand(
        blocks(1, 1, saved=10, weights=100),
        (1, 1),
        Network(1.0),
        replicas=(2, 1),
        in_flight=in_flight,
        weight_copies=lambda ranks_from_here, own: 3,
    )
    assert asked == [(3, 2), (1, 1)]
    assert [stage.memory_bytes for stage in cut.stages] == [370, 370]


def test_heavy_layers_with_little_weight_are_replicated_and_the_others_are_not() -> None:
    # PipeDream's answer for VGG: convolutions on many ranks, the linear layers on one.
    convolution = BlockProfile("conv", 0.1, 0.2, 10**6, 0, 10**6)
    linear = BlockProfile("linear", 0.05, 0.1, 10**4, 0, 4 * 10**8)
    cut = find_cut([*[convolution] * 4, linear, linear], 4, Network(125e6))
    assert (cut.balance, cut.replicas) == ((4, 2), (3, 1))


def test_the_table() -> None:
    profiles = blocks(0.003, 0.006, 0.003, output=2048, weights=2**20)
    text = describe(cut_by_hand(profiles, (2, 1), Network(1e9), replicas=(2, 1)), profiles)
    lines = text.splitlines()
    assert lines[1].split() == ["0", "layer0", "…", "layer1", "2", "9.00", "2.0", "2.00"]
    assert lines[2].split() == ["1", "layer2", "1", "3.00", "–", "1.00"]
    assert lines[3] == "Predicted bottleneck: stage 0, 4.50 ms a micro-batch, computing."
    assert "averaging its weights" in describe(
        cut_by_hand(profiles, (3,), Network(1e6), replicas=(2,)), profiles
    )


def test_a_bad_balance_gets_a_better_one() -> None:
    profiles = blocks(0.001, 0.001, 0.002, 0.004)
    assert suggestion(profiles, (3, 1)) is None
    assert suggestion(profiles, (1, 3)) == (
        "balance=3+1 would be 1.75× as fast: its slowest stage takes 4.00 ms, not 7.00 ms."
    )
    nearly = blocks(1.0, 0.09, 1.0)
    assert suggestion(nearly, (2, 1)) is None
    # With three ranks for the second stage it should have more.
    assert suggestion(profiles, (2, 2), replicas=(1, 3)) is None
    assert "balance=2+2 " in str(suggestion(profiles, (3, 1), replicas=(1, 3)))
    # With a slow network the small output matters more than the even load.
    narrow = [profiles[0]._replace(output_bytes=10), *blocks(0.001, 0.002, output=10**6)]
    assert "balance=1+2 " in str(suggestion(narrow, (2, 1), Network(1e6)))


def test_an_uneven_cut_is_warned_of() -> None:
    profiles = blocks(0.001, 0.009, 0.001)
    cut = cut_by_hand(profiles, (2, 1), Network(math.inf))
    whole = [{}, {"layer1.inner": "its code depends on the values of a tensor"}, {}]
    said = unevenness(cut, profiles, whole, measured=True)
    assert said == (
        "warning: an uneven cut. Stage 0 has 1.8 times the mean of all stages (10 ms), so the "
        "others wait for it. Its largest block is layer1. layer1.inner stays whole, for its "
        "forward cannot be recorded: its code depends on the values of a tensor."
    )
    guessed = str(unevenness(cut, profiles, [{}] * 3, measured=False))
    assert "times the mean of all stages of the parameters" in guessed
    assert "pass run.trainer(…, sample=x)" in guessed
    even = blocks(0.003, 0.002, 0.002)
    assert unevenness(cut_by_hand(even, (2, 1), Network(1e9)), even, [{}] * 3, True) is None
    # Ranks that take turns share the load.
    turns = cut_by_hand(profiles, (2, 1), Network(math.inf), replicas=(10, 1))
    assert unevenness(turns, profiles, whole, measured=True) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_cut(blocks(1, 1), 3, Network(1.0), stages=3), "3 stages, .* only 2 blocks"),
        (lambda: find_cut([], 1, Network(1.0)), "0 blocks over 1 ranks"),
        (lambda: find_cut(blocks(1), 0, Network(1.0)), "1 blocks over 0 ranks"),
        (
            lambda: find_cut(blocks(1, 1), 4, Network(1.0), replicas=(2, 1)),
            r"replicas=2\+1 takes 3 ranks, but there are 4",
        ),
        (
            lambda: cut_by_hand(blocks(1, 1), (1, 2), Network(1.0)),
            r"balance=1\+2 has 3 blocks .* has 2 blocks",
        ),
        (lambda: Network(0), "above 0"),
        (lambda: Network(1, within=Component(0, Network(1))), "component of 0 ranks"),
        (
            lambda: find_cut(
                blocks(1, 1, 1, saved=2**20, weights=2**21),
                2,
                Network(1.0),
                stages=2,
                memory_bytes=2**20,
            ),
            r"No cut fits 1 MiB a rank. .* balance=1\+2, needs 14 MiB .* stage 1 "
            r"\(blocks layer1 … layer2\): 13 MiB too much. Try more stages, recompute",
        ),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()  # type: ignore[operator]
