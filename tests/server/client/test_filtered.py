"""Filters and codecs at work between a store and its servers: less is sent, nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from farandole.comm.codecs import CODECS
from farandole.errors import DivergedError, UserError
from farandole.server import Cluster, Store, Table, connect
from farandole.server.client.filtered import Filtered
from farandole.server.filters import coded_bytes, encode, parse_codec
from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import Command, Kind, Problem
from farandole.server.rules import parse_rule

CODED = ["fp16", "bf16", "int8:block=64", "sign", "topk:ratio=0.1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(servers=2, in_threads=True) as cluster:
        yield cluster


@pytest.fixture(params=[True, False], ids=["shared", "sent"])
def store(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Store]:
    with connect(cluster.address, cluster.key_file, shared_memory=request.param) as store:
        yield store


@pytest.fixture(scope="module")
def fresh() -> Callable[[], str]:
    """Names of tables that nobody has used."""
    count = itertools.count()
    return lambda: f"table {next(count)}"


def random_push(seed: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A list of rows, some of them twice, and values."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(rows, (rows // 3,), generator=random)
    return chosen, torch.randn(len(chosen), width, generator=random)


@pytest.mark.parametrize("codec", ["", *CODED])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_what_was_pushed_and_flushed_is_there(
    store: Store, fresh: Callable[[], str], codec: str, sparse: bool
) -> None:
    """By lists and whole, through two filters and a codec."""
    rows, width, name = 90_000, 2, fresh()
    store.create(name, rows, width=width, sparse=sparse, codec=codec)
    filtered = Filtered(store, name, ["significant:threshold=0.5", "skip:probability=0.3"])
    offered = torch.zeros(rows, width, dtype=torch.float64)
    for seed in range(3):
        chosen, values = random_push(seed, rows, width)
        offered.index_add_(0, chosen, values.double())
        filtered.push(chosen, values, store.get(name, rows=chosen))
    whole = torch.randn(rows, width, generator=torch.Generator().manual_seed(9))
    offered += whole
    filtered.push(None, whole, store.get(name))
    assert not torch.allclose(store.get(name).double(), offered, atol=0.1), "some is held back"
    filtered.flush()
    rounding = 3e-2 if codec in ("fp16", "bf16") else 1e-5  # these have no feedback
    torch.testing.assert_close(store.get(name).double(), offered, rtol=rounding, atol=rounding)
    before = filtered.savings.rows_sent
    filtered.flush()
    assert filtered.savings.rows_sent == before, "and nothing is left"


@pytest.mark.parametrize("codec", ["", "int8"])
def test_savings_are_what_the_store_sends(
    store: Store, fresh: Callable[[], str], codec: str
) -> None:
    name = fresh()
    store.create(name, 100_000, sparse=True, codec=codec, rule="sgd")
    filtered = Filtered(store, name, ["kkt:l1=1/margin=0"])
    rows, values = torch.arange(0, 100_000, 2), torch.linspace(0, 2, 50_000)
    before = store.bytes_sent + store.saved_key_bytes
    filtered.push(rows, values, torch.zeros(50_000))
    savings = filtered.savings
    assert store.bytes_sent + store.saved_key_bytes - before == savings.bytes_sent
    assert (savings.rows_offered, savings.rows_sent) == (50_000, int((values >= 1).sum()))
    assert savings.bytes_offered == 50_000 * 12
    per_row = 9.2 if codec else 12.0
    assert savings.rows_sent * (per_row - 0.2) < savings.bytes_sent <= savings.rows_sent * per_row
    got = store.get(name, rows=rows)[:, 0]
    assert not bool(got[values < 1].any()), "were not pushed"
    bound = 0.01 if codec else 0
    torch.testing.assert_close(got[values >= 1], -values[values >= 1], rtol=0, atol=bound)


@pytest.mark.parametrize(("rule", "sent"), [("add", 1000 * 4), ("adagrad", 900 * 12)])
def test_a_table_goes_whole_if_that_is_less(
    store: Store, fresh: Callable[[], str], rule: str, sent: int
) -> None:
    """But not under a rule that does something with zeros."""
    name = fresh()
    store.create(name, 1000, rule=rule)
    filtered = Filtered(store, name, ["kkt:l1=1/margin=0"])
    values = torch.full((1000,), 2.0)
    values[:100] = 0.5
    filtered.push(None, values, torch.zeros(1000))
    assert filtered.savings.bytes_sent == sent
    assert filtered.savings.rows_sent == 900
    assert store.get(name)[:, 0].ne(0).tolist() == [False] * 100 + [True] * 900


def test_a_push_of_which_nothing_is_left(store: Store, fresh: Callable[[], str]) -> None:
    name = fresh()
    store.create(name, 1000)
    filtered = Filtered(store, name, ["kkt:l1=1"])
    filtered.push(None, torch.full((1000,), 0.5), torch.zeros(1000))
    assert filtered.savings.bytes_sent == 0
    filtered.start_push(None, torch.full((1000,), 0.5), torch.zeros(1000), ticks=True).wait()
    store.tick()
    assert not bool(store.get(name).any())


def test_a_second_filter_sees_the_weights_of_the_rows_that_are_left(
    store: Store, fresh: Callable[[], str]
) -> None:
    name = fresh()
    store.create(name, 10, rule="sgd")
    filtered = Filtered(store, name, ["kkt:l1=1", "significant:threshold=0.1"])
    rows = torch.tensor([1, 3, 5, 3])  # 3 twice, with the same weight
    weight = torch.tensor([0.0, 1.0, 100.0, 1.0])
    filtered.push(rows, torch.tensor([0.5, 1.0, 2.0, 1.0]), weight, rate=0.5)
    # Row 1 is held at 0, and 2 is little beside 100. 1 + 1 is much beside 1.
    assert store.get(name)[:, 0].nonzero().view(-1).tolist() == [3]
    filtered.flush(rate=0.25)
    assert store.get(name)[:, 0].tolist() == [0, 0, 0, -1, 0, -0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("codec", ["", "sign"])
def test_going_on_from_a_state(store: Store, fresh: Callable[[], str], codec: str) -> None:
    names, filters = (fresh(), fresh()), ["skip:probability=0.5"]
    for name in names:
        store.create(name, 3000, width=2, codec=codec)
    through = Filtered(store, names[0], filters)
    other = Filtered(store, names[1], filters)
    rows, values = random_push(0, 3000, 2)
    through.push(rows, values)
    other.push(*random_push(9, 3000, 2))  # which is to be forgotten
    store.put(names[1], store.get(names[0]))
    other.load_state_dict(through.state_dict())
    for filtered in (through, other):
        filtered.flush()
    assert torch.equal(store.get(names[0]), store.get(names[1]))


def test_a_state_of_other_filters(store: Store, fresh: Callable[[], str]) -> None:
    name = fresh()
    store.create(name, 10)
    state = Filtered(store, name, ["skip"]).state_dict()
    with pytest.raises(UserError, match=r"\['skip'\] cannot be taken over by \['significant'\]"):
        Filtered(store, name, ["significant"]).load_state_dict(state)


def test_workers_skip_different_rows(store: Store, fresh: Callable[[], str]) -> None:
    name = fresh()
    store.create(name, 100)

    def pushed(rank: int) -> torch.Tensor:
        store.put(name, torch.zeros(100))
        Filtered(store, name, ["skip"], rank=rank).push(None, torch.ones(100))
        return store.get(name)

    assert torch.equal(pushed(0), pushed(0))
    assert not torch.equal(pushed(0), pushed(1))


def test_filters_in_a_table_with_rounds(store: Store, fresh: Callable[[], str]) -> None:
    name = fresh()
    store.create(name, 10, rounds=True)
    with pytest.raises(UserError, match=r"has rounds.*skip would leave some out"):
        Filtered(store, name, ["skip"])


def test_values_that_do_not_fit(store: Store, fresh: Callable[[], str]) -> None:
    name = fresh()
    store.create(name, 10, width=3)
    with pytest.raises(UserError, match=r"2 rows × 3 are pushed, and \(2, 2\) was given"):
        Filtered(store, name).push(torch.tensor([1, 2]), torch.zeros(2, 2))


# Codecs in the store


@pytest.mark.parametrize("codec", CODED)
def test_only_pushes_are_coded(store: Store, fresh: Callable[[], str], codec: str) -> None:
    name, values = fresh(), torch.randn(50_000)
    store.create(name, 50_000, codec=codec)
    before = store.bytes_sent
    store.put(name, values)
    assert store.bytes_sent - before == values.nbytes
    assert torch.equal(store.get(name)[:, 0], values)
    before = store.bytes_sent
    store.push(name, values)
    pieces = [stop - start for _, start, stop, _ in store.table(name).pieces(0, 50_000)]
    coded = sum(coded_bytes(parse_codec(codec), count, torch.float32) for count in pieces)
    assert store.bytes_sent - before == coded < values.nbytes * 0.6


def test_feedback_goes_with_the_row_however_it_is_pushed(
    store: Store, fresh: Callable[[], str]
) -> None:
    """`sign` of a piece is its mean size: what is left out must find its row again."""
    name = fresh()
    table = store.create(name, 20_000, width=32, sparse=True, codec="sign")
    assert max(len(piece.spans) for piece in table.pieces(0, 20_000)) == 2
    random = torch.Generator().manual_seed(0)
    offered = torch.zeros(20_000, 32)
    for start, stop in (0, 20_000), (1234, 18_765):
        values = torch.randn(stop - start, 32, generator=random)
        store.push(name, values, start=start)
        offered[start:stop] += values
    rows = torch.randperm(20_000, generator=random)[:5000]
    store.push(name, torch.ones(5000, 32), rows=rows)
    offered[rows] += 1
    coding = store.coding(name)
    assert coding is not None
    left_rows, left = coding.flush()
    arrived = store.get(name)
    arrived[left_rows] += left
    torch.testing.assert_close(arrived, offered, rtol=1e-5, atol=1e-5)


def test_feedback_in_a_dense_table_of_several_ranges(
    store: Store, fresh: Callable[[], str]
) -> None:
    name, rows = fresh(), 2 * Table.dense("any", 1, ranges=32).block_rows + 5
    assert len(store.create(name, rows, codec="sign").used_ranges) == 3
    values = torch.linspace(-1, 1, rows)
    store.push(name, values)
    store.push(name, values[7:], start=7)
    Filtered(store, name).flush()
    expected = torch.cat([values[:7], 2 * values[7:]])
    torch.testing.assert_close(store.get(name)[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_rounds_are_coded(cluster: Cluster, fresh: Callable[[], str]) -> None:
    name, values = fresh(), torch.linspace(-1, 1, 20_000)
    with connect(cluster.address, cluster.key_file, rank=0) as store:
        store.create(name, 20_000, rounds=True, codec="int8")
        store.push(name, values)
        got = store.start_get(name, round_=1).wait()
    torch.testing.assert_close(got[:, 0], values, rtol=0, atol=0.005)


@pytest.mark.parametrize("codec", CODED)
def test_nan_is_refused_and_leaves_no_trace(
    store: Store, fresh: Callable[[], str], codec: str
) -> None:
    name, values = fresh(), torch.ones(5000)
    store.create(name, 5000, codec=codec)
    values[17] = torch.nan
    with pytest.raises(DivergedError, match="NaN"):
        store.push(name, values)
    assert not bool(store.get(name).any())
    for _ in range(12):  # topk needs some to send all
        store.push(name, torch.ones(5000))
    assert bool(store.get(name).isfinite().all())
    assert bool(store.get(name).all())


def test_codecs_of_a_table() -> None:
    def table(codec: str, dtype: str = "float32") -> Table:
        return Table.sparse("t", 10, ranges=1, dtype=dtype, codec=codec)

    assert Table.from_json(table("int8:block=64").to_json()).codec == "int8:block=64"
    with pytest.raises(UserError, match="'randk' needs all ranks"):
        table("randk")
    with pytest.raises(UserError, match="for floating-point numbers, not for int64"):
        table("int8", "int64")
    with pytest.raises(UserError, match="describes no table"):
        Table.from_json(table("").to_json().replace('"codec": ""', '"codec": 8'))


@pytest.mark.parametrize("text", CODED)
def test_a_shard_takes_what_was_coded_for_it(text: str) -> None:
    table = Table.dense("t", 3000, ranges=1, codec=text)
    shard = TableShard(table, table.used_ranges[0], parse_rule("add"))
    good = encode(parse_codec(text), torch.randn(3000))

    def problem(kind: Kind, values: torch.Tensor) -> Problem | None:
        return shard.problem_with(Command(kind, 0, table=table.id, stop=3000, values=values))

    assert problem(Kind.PUSH, good) is None
    assert problem(Kind.PUSH, torch.randn(3000)) is None, "exact"
    assert f"and {len(good) - 8} came" in str(problem(Kind.PUSH, good[8:]))
    assert "uint8 came" in str(problem(Kind.PUT, good))
    assert problem(Kind.PUSH, torch.full_like(good, 255)) is not None, "NaN, or no place of a row"


def test_every_codec_is_tested() -> None:
    usable = {name for name in CODECS if name not in ("randk", "powersgd")}
    assert {text.partition(":")[0] for text in CODED} == usable
