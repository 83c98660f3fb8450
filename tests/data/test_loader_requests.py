"""Which call of `run.loader` gets which loader, and with which epoch a new one begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from farandole.data.order import shuffled
from farandole.data.sameness import same
from farandole.errors import UserError
from farandole.testing import run_world
from farandole.train import Run

NUMBERS: Any = range(24)  # a dataset is anything with a length and indices
ORDERS = [shuffled(24, 0, epoch) for epoch in range(4)]


def negative(batch: list[int]) -> torch.Tensor:
    return -torch.tensor(batch)


def scaled(batch: list[int], factor: int) -> torch.Tensor:
    return factor * torch.tensor(batch)


class Scale:
    """A `collate_fn` that is an object; no two of them are known to be the same."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def __call__(self, batch: list[int]) -> torch.Tensor:
        return self.factor * torch.tensor(batch)


def flat(loader: Any) -> list[int]:
    return list(chain.from_iterable(batch.tolist() for batch in loader))


def alone(folder: Path, body: Callable[[Run], Any]) -> Any:
    return run_world(1, body, folder=folder)[0]


def test_other_options_are_another_loader(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        plain = run.loader(NUMBERS, 4, shuffle=False)
        other = run.loader(NUMBERS, 4, shuffle=False, collate_fn=negative)
        assert flat(plain) == list(range(24))
        assert flat(other) == [-number for number in range(24)]
        assert run.loader(NUMBERS, 4, shuffle=False, collate_fn=negative) is other
        assert run.loader(NUMBERS, 4, shuffle=False) is plain
        assert run.loader(NUMBERS, 4, num_workers=1).num_workers == 1
        assert run.loader(NUMBERS, 4, num_workers=2).num_workers == 2

    alone(tmp_path, body)


def test_a_function_written_in_the_loop_is_the_same_in_each_epoch(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        sign, loaders, orders = -1, set(), []
        for _ in range(3):
            loader = run.loader(NUMBERS, 4, collate_fn=lambda batch: sign * torch.tensor(batch))
            loaders.add(loader)
            orders.append(flat(loader))
        assert len(loaders) == 1
        assert orders == [[-number for number in order] for order in ORDERS[:3]]

    alone(tmp_path, body)


CHANGING: dict[str, Callable[[Run, int], Any]] = {
    "batch": lambda run, epoch: run.loader(NUMBERS, 2 + epoch),
    "function": lambda run, epoch: run.loader(
        NUMBERS, 4, collate_fn=lambda batch, epoch=epoch: torch.tensor(batch)
    ),
    "object": lambda run, epoch: run.loader(NUMBERS, 4, collate_fn=Scale()),
    "DataLoader": lambda run, epoch: run.loader(DataLoader(NUMBERS, 4, shuffle=True)),
    "generator": lambda run, epoch: run.loader(NUMBERS, 4, generator=torch.Generator()),
}


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("counted", [True, False])
def test_options_that_change_from_epoch_to_epoch_go_on_with_the_epochs(
    tmp_path: Path, kind: str, counted: bool
) -> None:
    """Not with epoch 0 again: that would show every epoch in the same order."""

    def body(run: Run) -> list[list[int]]:
        epochs = run.epochs(3) if counted else range(3)
        return [flat(CHANGING[kind](run, epoch)) for epoch in epochs]

    assert alone(tmp_path, body) == ORDERS[:3]


def test_a_pass_that_is_broken_off_is_not_shown_again_by_the_next_loader(tmp_path: Path) -> None:
    def body(run: Run) -> list[list[int]]:
        seen = []
        for epoch in range(3):
            for batch in run.loader(NUMBERS, 4 + epoch):
                seen.append(batch.tolist())
                break
        return seen

    assert alone(tmp_path, body) == [ORDERS[epoch][: 4 + epoch] for epoch in range(3)]


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("save_at", [3, 12, 17, 24, 30, 48])
def test_changing_options_resume_where_they_were(tmp_path: Path, kind: str, save_at: int) -> None:
    def passes(run: Run, *, saves: bool) -> Iterator[int]:
        seen = 0
        for epoch in run.epochs(3):
            for batch in CHANGING[kind](run, epoch):
                yield from batch.tolist()
                seen += len(batch)
                if saves and seen >= save_at:
                    run.save()
                    return

    def resumed(run: Run) -> list[int]:
        assert run.load() is not None
        return list(passes(run, saves=False))

    before = alone(tmp_path, lambda run: list(passes(run, saves=True)))
    after = alone(tmp_path, resumed)
    assert before + after == list(chain(*ORDERS[:3]))


def test_training_and_evaluation_each_keep_their_place(tmp_path: Path) -> None:
    """On the same data, with other options, and resumed in the second epoch of both."""

    def epoch_of(run: Run) -> list[list[int]]:
        trained = flat(run.loader(NUMBERS, 4))
        with torch.no_grad():
            judged = flat(run.loader(NUMBERS, 4, collate_fn=Scale(-1)))
        return [trained, judged]

    def saves(run: Run) -> None:
        for _ in run.epochs(1):
            epoch_of(run)
            run.save()

    def resumed(run: Run) -> list[list[list[int]]]:
        run.load()
        return [epoch_of(run) for _ in run.epochs(3)]

    def whole(run: Run) -> list[list[list[int]]]:
        return [epoch_of(run) for _ in run.epochs(3)]

    uninterrupted = alone(tmp_path / "other", whole)
    assert [trained for trained, _ in uninterrupted] == ORDERS[:3]
    alone(tmp_path, saves)
    assert alone(tmp_path, resumed) == uninterrupted[1:]


def test_parts_of_one_dataset_are_different_data(tmp_path: Path) -> None:
    whole: Any = TensorDataset(torch.arange(24))
    first, second = Subset(whole, range(12)), Subset(whole, range(12, 24))

    def body(run: Run) -> None:
        for epoch in run.epochs(2):
            for part in (first, second):
                loader = run.loader(part, 4)
                assert loader.epoch == epoch
                assert sum(len(batch[0]) for batch in loader) == 12

    alone(tmp_path, body)


def test_two_that_follow_one_another_cannot_be_read_at_once(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        first = run.loader(NUMBERS, 4)
        flat(first)
        second = run.loader(NUMBERS, 4, collate_fn=negative)
        for _ in zip(first, second, strict=True):
            pass

    with pytest.raises(UserError, match=r"Call run\.loader for both before either is read"):
        alone(tmp_path, body)


def test_two_made_before_either_is_read_can_be_read_at_once(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        for epoch in range(2):
            pair = (run.loader(NUMBERS, 4), run.loader(NUMBERS, 4, collate_fn=negative))
            order = ORDERS[epoch]
            for at, (one, other) in enumerate(zip(*pair, strict=True)):
                assert one.tolist() == order[4 * at : 4 * at + 4]
                assert other.tolist() == [-number for number in one.tolist()]

    alone(tmp_path, body)


def adder(number: int) -> Callable[[int], int]:
    return lambda other: number + other


def with_mark(mark: int) -> Callable[[], int]:
    def marked() -> int:
        return 1

    marked.mark = mark  # type: ignore[attr-defined]
    return marked


OBJECT, SCALE = object(), Scale()
ADDER = adder(1)


@pytest.mark.parametrize(
    ("one", "other", "are"),
    [
        (1, 1, True),
        (1, True, False),  # which DataLoader may take for another thing
        (1, 1.0, False),
        ("fork", "spawn", False),
        ((1, (2, "x")), (1, (2, "x")), True),
        ((1, 2), (1, 2, 3), False),
        (OBJECT, OBJECT, True),
        (object(), object(), False),
        ([1], [1], False),  # one of the two may be changed later
        (Scale(1), Scale(1), False),
        (ADDER, ADDER, True),
        (adder(1), adder(2), False),
        (adder(1), adder(1), False),  # each has a variable of its own
        (SCALE.__call__, SCALE.__call__, True),
        (Scale(1).__call__, Scale(1).__call__, False),
        (functools.partial(scaled, factor=2), functools.partial(scaled, factor=2), True),
        (functools.partial(scaled, factor=2), functools.partial(scaled, factor=3), False),
        (functools.partial(scaled, [1], 2), functools.partial(scaled, [1], 2), False),
        (*[lambda x, y=by: x + y for by in (1, 2)], False),
        (*[lambda x, y=by: x + y for by in (1, 1)], True),
        (*[lambda x, *, y=by: x + y for by in (1, 2)], False),
        (*[lambda x: x for _ in range(2)], True),
        (lambda x: x, lambda x: x + 1, False),
        (negative, scaled, False),
        (with_mark(1), with_mark(2), False),
    ],
)
def test_what_is_the_same(one: Any, other: Any, are: bool) -> None:
    assert same(one, other) is are
    assert same(other, one) is are
