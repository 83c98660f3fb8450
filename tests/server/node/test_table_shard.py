"""A table's rows in one range: what puts and pushes do to them, and what is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch

from farandole.server.node.table_shard import TableShard
from farandole.server.protocol.messages import Command, Kind, Read
from farandole.server.rules import parse_rule
from farandole.server.tables import Table

ROWS, WIDTH = 6, 2


def shard(rule: str = "add", dtype: str = "float64", **more: object) -> TableShard:
    table = Table("t", ROWS, WIDTH, dtype, rule, ROWS, 1, **more)
    return TableShard(table, 0, parse_rule(rule))


def values(rows: int, first: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(first, first + rows * WIDTH).to(dtype)


def run(kind: Kind, tensor: torch.Tensor, start: int = 0, **more: object) -> Command:
    """A command about a run of rows."""
    stop = start + tensor.numel() // WIDTH
    return Command(kind, 0, values=tensor, start=start, stop=stop, **more)


def listed(kind: Kind, rows: list[int], tensor: torch.Tensor, **more: object) -> Command:
    return Command(kind, 0, values=tensor, rows=torch.tensor(rows), **more)


def whole(of: TableShard, slot: int = 0) -> torch.Tensor:
    return of.read(Read(0, stop=ROWS, slot=slot))


def do(on: TableShard, command: Command) -> None:
    assert on.problem_with(command) is None
    {Kind.PUT: on.put, Kind.PUSH: on.push}[command.kind](command)


def test_rows_that_nobody_has_written_are_0_and_take_no_memory():
    empty = shard("adam")
    assert torch.equal(whole(empty), torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    assert empty.read(Read(0, rows=torch.tensor([5, 0]))).tolist() == [[0, 0], [0, 0]]
    assert empty.nbytes == 0
    do(empty, listed(Kind.PUT, [4], values(1)))
    assert whole(empty).tolist() == [[0, 0]] * 4 + [[1, 2], [0, 0]]
    assert empty.nbytes == 3 * ROWS * WIDTH * 8


def test_a_slot_begins_with_what_its_rule_says_before_and_after_the_first_write():
    empty = shard("adagrad:initial_sum=0.5")
    assert (whole(empty, slot=1) == 0.5).all()
    do(empty, listed(Kind.PUSH, [0], torch.ones(WIDTH, dtype=torch.float64)))
    assert whole(empty, slot=1).tolist() == [[1.5, 1.5]] + [[0.5, 0.5]] * (ROWS - 1)


def test_puts_overwrite_and_pushes_add_by_run_and_by_list():
    on = shard()
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for command, where in [
        (run(Kind.PUT, values(4), 1), slice(1, 5)),
        (run(Kind.PUSH, values(3, 50), 2, rate=2.0), slice(2, 5)),
        (listed(Kind.PUSH, [0, 3, 5], values(3, 9), rate=-1.0), [0, 3, 5]),
        (listed(Kind.PUT, [1, 3], values(2, 7)), [1, 3]),
        (run(Kind.PUSH, values(0), 6), slice(6, 6)),
    ]:
        do(on, command)
        assert command.values is not None
        given = command.values.view(-1, WIDTH)
        if command.kind == Kind.PUT:
            expected[where] = given
        else:
            expected[where] += command.rate * given
        assert torch.equal(whole(on), expected)
    assert torch.equal(on.read(Read(0, start=2, stop=4)), expected[2:4])
    assert torch.equal(on.read(Read(0, rows=torch.tensor([5, 1]))), expected[[5, 1]])


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        ("sgd:momentum=0.9,nesterov", lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
        ("adam:weight_decay=0.01", lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01)),
    ],
)
def test_rules_with_state_do_what_torch_does(rule, optimizer):
    torch.manual_seed(0)
    on, first = shard(rule), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    weight = torch.nn.Parameter(first.clone())
    theirs = optimizer([weight])
    do(on, run(Kind.PUT, first.view(-1)))
    for _ in range(5):
        weight.grad = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        theirs.step()
        do(on, run(Kind.PUSH, weight.grad.view(-1), rate=0.1))
    torch.testing.assert_close(whole(on), weight.detach(), rtol=1e-12, atol=1e-12)


def test_state_of_rows_that_are_not_pushed_stays():
    on = shard("sgd:momentum=0.5")
    do(on, listed(Kind.PUSH, [1, 4], torch.ones(2 * WIDTH, dtype=torch.float64)))
    do(on, listed(Kind.PUSH, [4], torch.ones(WIDTH, dtype=torch.float64)))
    assert whole(on, slot=1)[:, 0].tolist() == [0, 1, 0, 0, 1.5, 0]
    assert whole(on)[:, 0].tolist() == [0, -1, 0, 0, -2.5, 0]


def test_state_can_be_put_and_read():
    on = shard("sgd:momentum=0.5")
    do(on, run(Kind.PUT, values(ROWS), slot=1))
    assert torch.equal(whole(on, slot=1).view(-1), values(ROWS))
    assert not whole(on).any()


def test_what_is_lent_does_not_change_until_it_is_read():
    on = shard()
    do(on, run(Kind.PUT, values(ROWS)))
    reading = [True, False]
    lent = whole(on)
    on.lend(lambda: reading[0])
    on.lend(lambda: reading[1])  # this one is over already
    do(on, run(Kind.PUSH, values(ROWS)))
    assert torch.equal(lent.view(-1), values(ROWS))
    assert torch.equal(whole(on).view(-1), 2 * values(ROWS))


def test_after_that_it_changes_where_it_is():
    on = shard()
    do(on, run(Kind.PUT, values(ROWS)))
    lent = whole(on)
    on.lend(lambda: False)
    do(on, run(Kind.PUSH, values(ROWS)))
    assert torch.equal(lent, whole(on))  # the same memory: no copy was made


def test_state_that_was_read_does_not_change_either():
    on = shard("sgd:momentum=0.5")
    do(on, run(Kind.PUSH, values(ROWS)))
    read = whole(on, slot=1)
    before = read.clone()
    on.lend(lambda: True)
    do(on, run(Kind.PUSH, values(ROWS)))
    assert torch.equal(read, before)


def test_it_can_be_lent_as_often_as_one_likes():
    on = shard()
    do(on, run(Kind.PUT, values(ROWS)))
    for _ in range(5000):
        on.lend(lambda: False)
    do(on, run(Kind.PUSH, values(ROWS)))
    assert torch.equal(whole(on).view(-1), 2 * values(ROWS))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (run(Kind.PUSH, values(3) * math.nan), "'t'.*NaN"),
        (run(Kind.PUT, torch.full((4,), math.inf, dtype=torch.float64)), "'t'.*NaN or infinity"),
        (run(Kind.PUSH, values(1), rate=math.nan), "'t'.*rate: nan"),
        (run(Kind.PUSH, values(1), rate=-math.inf), "'t'.*rate: -inf"),
        (run(Kind.PUSH, values(2), 5), "'t' has 6 rows in this range; 5 to 6 are not"),
        (run(Kind.PUSH, values(1), -1), "'t' has 6 rows in this range; -1 to -1 are not"),
        (listed(Kind.PUSH, [0, 6], values(2)), "'t' has 6 rows in this range; 0 to 6 are not"),
        (listed(Kind.PUT, [-2, 1], values(2)), "'t' has 6 rows in this range; -2 to 1 are not"),
        (Read(0, start=4, stop=2), "'t' has 6 rows in this range; 4 to 1 are not"),
        (Read(0, stop=7), "'t' has 6 rows in this range; 0 to 6 are not"),
        (Read(0, rows=torch.tensor([9])), "'t' has 6 rows in this range; 9 to 9 are not"),
        (Read(0, rows=torch.tensor([1], dtype=torch.int32)), "'t': a list of rows must be int64"),
        (Read(0, stop=1, slot=2), "'t' keeps 1 states under 'sgd:momentum=0.5'; there is no 2"),
        (run(Kind.PUT, values(1), slot=-1), "'t' keeps 1 states.*there is no -1"),
        (Command(Kind.PUSH, 0, stop=2), "'t': 2 rows × 2 of torch.float64.*nothing came"),
        (
            Command(Kind.PUSH, 0, stop=2, values=values(3)),
            "'t': 2 rows × 2 of torch.float64.*6 of torch.float64 came",
        ),
        (
            run(Kind.PUT, values(2, dtype=torch.float32)),
            "'t': 2 rows × 2 of torch.float64.*4 of torch.float32 came",
        ),
        (
            listed(Kind.PUSH, [1], values(2)),
            "'t': 1 rows × 2 of torch.float64.*4 of torch.float64 came",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_values(message, complaint):
    problem = shard("sgd:momentum=0.5").problem_with(message)
    assert problem is not None
    assert re.search(complaint, problem.text), problem


def test_large_numbers_are_not_taken_for_infinity():
    huge = torch.full((WIDTH,), 3e38, dtype=torch.float32)  # whose sum is infinite
    assert shard(dtype="float32").problem_with(run(Kind.PUSH, huge)) is None
