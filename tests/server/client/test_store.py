"""The store as scripts use it, with shared memory and without, on two servers with a replica each.

The servers are threads here: what is tested is what a script sees.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from farandole.errors import CommError, DivergedError, JoinError, UserError
from farandole.server import Cluster, Store, connect
from farandole.server.protocol.arena import Arena
from farandole.server.protocol.seal import make_key

ROWS = 40_000


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """So that tables of a few rows lie in several ranges too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farandole.server.tables._DENSE_BLOCK_BYTES", 1 << 14)
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(servers=2, replicas=1, in_threads=True) as found:
        yield found


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "sent"])
def store(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Store]:
    with connect(cluster.address, cluster.key_file, shared_memory=request.param) as found:
        yield found


@pytest.fixture(scope="module")
def names() -> Iterator[str]:
    """Tables are never taken back: everyone makes new ones."""
    return (f"table {number}" for number in itertools.count())


def spread(store: Store, name: str, rows: int = ROWS, **options: object) -> torch.Tensor:
    """A dense table that lies in several ranges; returns a tensor like it."""
    table = store.create(name, rows, **options)
    assert len(table.used_ranges) > 1
    return torch.zeros(rows, table.width, dtype=table.torch_dtype)


def test_a_dense_table_by_run(store, names):
    name = next(names)
    expected = spread(store, name, width=2)
    assert torch.equal(store.get(name), expected)
    for start, stop in [(0, ROWS), (7, 8), (100, ROWS - 1000), (20_000, 20_000)]:
        values = torch.randn(stop - start, 2)
        store.put(name, values, start=start)
        expected[start:stop] = values
        store.push(name, values, start=start, rate=0.5)
        expected[start:stop] += 0.5 * values
        store.add(name, values, start=start)
        expected[start:stop] += values
        assert torch.equal(store.get(name, start=start, stop=stop), expected[start:stop])
    assert torch.equal(store.get(name), expected)


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_by_list(store, names, sparse):
    name = next(names)
    table = store.create(name, 60_000, width=3, sparse=sparse)
    assert len(table.used_ranges) > 1
    expected = torch.zeros(60_000, 3)
    rows = torch.randperm(60_000)[:3000]
    values = torch.randn(3000, 3)
    store.put(name, values, rows=rows)
    expected[rows] = values
    store.push(name, values, rows=rows, rate=-2.0)
    expected[rows] -= 2 * values
    assert torch.equal(store.get(name, rows=rows), expected[rows])
    assert torch.equal(store.get(name), expected)


def test_a_row_named_twice_is_pushed_with_the_sum_read_twice_and_not_put(store, names):
    name = next(names)
    store.create(name, 100_000, sparse=True, dtype="float64")
    rows = torch.tensor([70_000, 3, 70_000, 3, 3, 99_999])
    store.push(name, torch.arange(1.0, 7.0), rows=rows)
    assert store.get(name, rows=rows).view(-1).tolist() == [4, 11, 4, 11, 11, 6]
    with pytest.raises(UserError, match="put names a row twice"):
        store.put(name, torch.zeros(6), rows=rows)


def test_rows_of_any_whole_kind_and_shape(store, names):
    name = next(names)
    store.create(name, 10, dtype="int64")
    rows = torch.tensor([[5, 1], [2, 9]], dtype=torch.int32)
    store.push(name, torch.tensor([1, 2, 3, 4]), rows=rows)
    assert store.get(name, rows=rows).view(-1).tolist() == [1, 2, 3, 4]
    for call in (store.get, lambda *a, **k: store.push(*a, torch.ones(1), **k)):
        with pytest.raises(UserError, match=r"whole numbers, not in torch.float32"):
            call(name, rows=torch.tensor([1.5]))


def test_no_rows_at_all(store, names):
    name = next(names)
    store.create(name, 10, width=2)
    none = torch.empty(0, dtype=torch.int64)
    store.push(name, torch.empty(0, 2), rows=none)
    store.put(name, torch.empty(0, 2))
    assert store.get(name, rows=none).shape == (0, 2)
    assert store.get(name, start=4, stop=4).shape == (0, 2)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32"])
def test_every_dtype_comes_back_as_it_went(store, names, dtype):
    name = next(names)
    expected = spread(store, name, dtype=dtype)
    expected += torch.randint(-100, 100, expected.shape)
    store.put(name, expected)
    store.push(name, torch.ones(len(expected)))
    got = store.get(name)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected + 1)


def test_into_a_tensor_of_ones_own_and_from_and_into_a_buffer(store, names):
    name = next(names)
    expected = spread(store, name).view(-1)
    source, target = store.buffer(ROWS, torch.float32), store.buffer(ROWS, torch.float32)
    assert not source.any()
    source.copy_(torch.randn(ROWS))
    expected += source
    store.push(name, source)
    assert store.start_get(name, out=target).wait() is target
    assert torch.equal(target, expected)
    own = torch.empty(20_000)
    store.start_get(name, start=5_000, stop=25_000, out=own).wait()
    assert torch.equal(own, expected[5_000:25_000])
    with pytest.raises(UserError, match=r"10 rows × 1 of float32 does not fit into \(9,\)"):
        store.start_get(name, stop=10, out=torch.empty(9))
    assert store.buffer(0, torch.float32).shape == (0,)


def test_many_under_way_at_once_are_seen_in_their_order(store, names):
    name = next(names)
    spread(store, name)
    pushes, reads = [], []
    for _ in range(20):
        pushes.append(store.start_push(name, torch.ones(ROWS)))
        reads.append(store.start_get(name))
    for number, read in reversed(list(enumerate(reads, start=1))):
        assert (read.wait() == number).all()  # one's own pushes, and none of later
    for push in pushes:
        push.wait()
        assert push.done()


def test_a_table_larger_than_the_shared_memory(cluster, names, monkeypatch):
    monkeypatch.setattr(
        "farandole.server.client.requests._ARENA_BYTES", 1 << 18
    )  # some ranges fit, not all
    name = next(names)
    with connect(cluster.address, cluster.key_file) as small:
        expected = spread(small, name, rows=10**6)
        expected += torch.randn(10**6, 1)
        small.push(name, expected)
        small.push(name, expected)
        assert torch.equal(small.get(name), expected + expected)


def test_where_there_is_no_shared_memory_it_works_without(cluster, names, monkeypatch):
    def no_room(length: int) -> Arena:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Arena, "make", no_room)
    with connect(cluster.address, cluster.key_file) as store:
        name = next(names)
        expected = spread(store, name)
        store.push(name, torch.ones(ROWS))
        assert torch.equal(store.get(name), expected + 1)


def test_a_store_that_is_closed_gives_its_memory_back(cluster):
    def look() -> int:
        gc.collect()
        names = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                names.append(str(link.readlink()))
        return sum("memfd:farandole" in name for name in names)

    before = look()
    for _ in range(3):
        store = connect(cluster.address, cluster.key_file)
        assert look() > before
        store.close()
        store.close()
        del store
    assert look() <= before  # the servers may have let go of others meanwhile


def test_questions_are_answered_where_the_rows_are(store, names):
    name = next(names)
    values = spread(store, name, dtype="float64")
    received = store.bytes_received
    assert store.ask("nonzeros", name).tolist() == [0]
    values[::2] = -3
    store.put(name, values)
    assert store.ask("nonzeros", name).tolist() == [ROWS // 2]
    assert store.ask("sum", name).tolist() == [-3 * ROWS // 2]
    assert store.ask("count", name).tolist() == [ROWS]
    assert store.bytes_received - received < 4096
    with pytest.raises(CommError, match=r"summ.*sum"):
        store.ask("summ", name)


def test_the_state_of_a_rule_can_be_read_and_put_back(store, names):
    name, other = next(names), next(names)
    gradient = torch.randn(ROWS)
    for of in (name, other):
        spread(store, of, rule="adam")
    store.push(name, gradient, rate=0.1)
    for slot in (0, 1, 2):
        values = store.start_get(name, slot=slot).wait()
        assert values.any()
        store.start_put(other, values, slot=slot).wait()
    store.set_updates(other, store.updates(name))
    for of in (name, other):
        store.push(of, gradient, rate=0.1)
    assert torch.equal(store.get(name), store.get(other))


def test_values_of_a_graph_and_of_other_dtypes_and_strides_can_be_pushed(store, names):
    name = next(names)
    spread(store, name, width=2)
    values = torch.randn(2, ROWS, dtype=torch.float64, requires_grad=True)
    store.push(name, values.t())
    assert torch.equal(store.get(name), values.detach().t().float())


def test_mistakes_are_told_with_the_values(store, names):
    name = next(names)
    store.create(name, 10, width=2)
    for call, complaint in [
        (lambda: store.get("tabel 0"), "'tabel 0' is not known here"),
        (lambda: store.push(name, torch.ones(3)), "rows of 2; 3 values do not make whole rows"),
        (lambda: store.push(name, torch.ones(3), rows=torch.tensor([1])), "3 values do not make 1"),
        (lambda: store.push(name, torch.ones(4), start=9), "rows 0 to 9; 9 to 10 are not"),
        (lambda: store.get(name, stop=11), "rows 0 to 9; 0 to 10 are not"),
        (lambda: store.get(name, stop=10**15), "rows 0 to 9; 0 to 999999999999999 are not"),
        (lambda: store.get(name, start=5, stop=3), "rows 0 to 9; 5 to 2 are not"),
        (lambda: store.get(name, rows=torch.tensor([10])), "rows 0 to 9; 10 to 10 are not"),
        (lambda: store.create(name, 0), "0 rows"),
        (lambda: store.create("x", 5, sparse=True, rounds=True), "rounds are for dense"),
    ]:
        with pytest.raises(UserError, match=complaint):
            call()


def test_what_servers_refuse_is_an_error_and_everything_goes_on(store, names):
    name = next(names)
    expected = spread(store, name)
    bad = torch.ones(ROWS)
    bad[ROWS - 1] = torch.nan
    with pytest.raises(DivergedError, match=f"refused: table '{name}'.*NaN"):
        store.push(name, bad)
    with pytest.raises(DivergedError, match="rate: inf"):
        store.push(name, torch.ones(ROWS), rate=float("inf"))
    with pytest.raises(CommError, match="keeps 0 states under 'add'; there is no 1"):
        store.start_get(name, slot=1).wait()
    with pytest.raises(CommError, match="exists already, with width=1, not 2"):
        store.create(name, ROWS, width=2)
    with pytest.raises(CommError, match=r"adagard.*adagrad"):
        store.create(next(names), 5, rule="adagard")
    with pytest.raises(CommError, match="'sgd' makes fractions"):
        store.create(next(names), 5, dtype="int64", rule="sgd")
    store.put(name, torch.zeros(ROWS))
    store.push(name, torch.ones(ROWS))
    assert torch.equal(store.get(name), expected + 1)


def test_the_class_of_an_error_does_not_come_from_its_text(store, names):
    """A table may be called what it likes."""
    name = f"NaN and infinity {next(names)}"
    store.create(name, 5)
    with pytest.raises(CommError, match="exists already, with rows=5, not 6"):
        store.create(name, 6)
    with pytest.raises(DivergedError, match="the values hold"):
        store.push(name, torch.tensor([1, 2, 3, 4, float("nan")]))


def test_a_wait_that_takes_too_long_names_whom_it_waits_for(cluster, names):
    with connect(cluster.address, cluster.key_file, rank=0, timeout=4.0) as worker:
        name = next(names)
        other = connect(cluster.address, cluster.key_file, rank=1)
        for store in (worker, other):
            store.create(name, 10)
            store.wake(0)
        worker.tick()
        with pytest.raises(CommError, match="slowest of 2 workers has reached clock 1"):
            worker.get(name, staleness=0)
        other.close()
        worker.get(name, staleness=0)  # nobody waits for one who has left


def test_a_registrar_that_is_not_there(cluster, free_port):
    with pytest.raises(JoinError, match=f"127.0.0.1:{free_port} within 0.3 s"):
        connect(f"tcp://127.0.0.1:{free_port}", cluster.key_file, timeout=0.3)


def test_another_jobs_key(cluster, tmp_path):
    make_key(tmp_path / "key")
    with pytest.raises(JoinError, match="is this its key file"):
        connect(cluster.address, tmp_path / "key", timeout=0.5)
    with pytest.raises(UserError, match="none"):
        connect(cluster.address, tmp_path / "none")


def together(*calls: Callable[[], object]) -> list[object]:
    """In threads of their own, at once."""
    results: list[object] = [None] * len(calls)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Iterator[tuple[Cluster, Store, Store]]:
    """Two workers of a cluster that waits for both."""
    with Cluster(servers=2, workers=2, in_threads=True) as found:
        first, second = together(
            *(lambda r=rank: connect(found.address, found.key_file, rank=r) for rank in (0, 1))
        )
        yield found, first, second
        first.close()
        second.close()


def test_no_worker_begins_before_all_are_there_but_a_guest_does(names):
    with Cluster(servers=1, workers=2, in_threads=True) as cluster:
        with pytest.raises(JoinError, match="have all workers been started"):
            connect(cluster.address, cluster.key_file, rank=0, timeout=0.3)
        with connect(cluster.address, cluster.key_file) as guest:
            guest.create("t", 3)
            assert guest.members == 0
        # The one who came too early has left: it does not count.
        with pytest.raises(JoinError, match="have all workers been started"):
            connect(cluster.address, cluster.key_file, rank=1, timeout=0.3)


def test_rounds_of_two_workers(pair, names):
    _, first, second = pair
    name = next(names)
    for store in (first, second):
        store.create(name, ROWS, rounds=True)
    for clock in range(3):
        for store, value in ((first, 1.0), (second, 3.0)):
            store.start_push(name, torch.full((ROWS,), value), ticks=True)
            store.tick()
        for store in (first, second):
            got = store.start_get(name, round_=clock + 1).wait()
            assert (got == 2 * (clock + 1)).all()
    assert first.rounds(name) == 3


def test_a_staleness_bound_between_two_workers_and_a_guest_beside_them(pair, names):
    cluster, first, second = pair
    name = next(names)
    for store in (first, second):
        store.create(name, ROWS)
    clock = max(first.clock, second.clock)
    for store in (first, second):
        store.wake(clock)
    for _ in range(3):
        first.push(name, torch.ones(ROWS))
        first.tick()
    assert (first.get(name, staleness=3) == 3).all()
    waiting = first.start_get(name, staleness=2)
    with connect(cluster.address, cluster.key_file) as guest:
        guest.create(name, ROWS)
        for _ in range(5):
            guest.tick()
        assert (guest.get(name) == 3).all()
        assert guest.members == 2
        assert not waiting.done()
    second.push(name, torch.full((ROWS,), 10.0))
    second.tick()
    assert (waiting.wait() == 13).all()  # with everything that was pushed in that clock


def test_one_who_comes_later_begins_where_the_slowest_is(pair, names):
    cluster, first, second = pair
    name = next(names)
    for store in (first, second):
        store.create(name, 10)
        store.wake(7)
    second.wake(9)
    with connect(cluster.address, cluster.key_file, rank=2) as third:
        third.create(name, 10)
        third.catch_up()
        assert third.clock == 7
        assert first.get(name, staleness=0).shape == (10, 1)
        first.tick()
        waiting = first.start_get(name, staleness=0)
        assert not waiting.done()
        third.tick()
        waiting.wait()


def test_one_who_comes_while_all_rest_begins_at_its_own_clock(pair, names):
    cluster, first, second = pair
    name = next(names)
    for store in (first, second):
        store.create(name, 10)
        store.rest()
    with connect(cluster.address, cluster.key_file, rank=2) as third:
        third.create(name, 10)
        third.catch_up()
        assert third.clock == 0


def test_meetings_of_two_workers(pair):
    _, first, second = pair
    gave = {0: b"one", 1: b""}
    for name in ("a", "b"):
        assert together(
            lambda n=name: first.meet(n, b"one"), lambda n=name: second.meet(n, b"")
        ) == [gave, gave]
