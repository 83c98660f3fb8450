"""`run.epochs` after a resume: which epoch comes next, by where the run was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farandole.testing import run_world
from farandole.train import Run

DATA = list(range(8))  # a dataset is anything with a length and indices

Seen = list[tuple[int, list[int]]]


def epoch_of(run: Run, epoch: int, seen: Seen) -> None:
    for batch in run.loader(DATA, batch_size=4):  # type: ignore[arg-type]
        seen.append((epoch, batch.tolist()))


def uninterrupted(folder: Path, epochs: int) -> Seen:
    def body(run: Run) -> Seen:
        seen: Seen = []
        for epoch in run.epochs(epochs):
            epoch_of(run, epoch, seen)
        return seen

    return run_world(1, body, folder=folder)[0]


def going_on(folder: Path, epochs: int = 3) -> tuple[list[int], Seen]:
    """The epochs that a resumed run goes through, and what it sees in them."""

    def body(run: Run) -> tuple[list[int], Seen]:
        assert run.load() is not None
        assert run.resumed
        gone, seen = [], []
        for epoch in run.epochs(epochs):
            gone.append(epoch)
            epoch_of(run, epoch, seen)
        return gone, seen

    return run_world(1, body, folder=folder)[0]


def saved(folder: Path, body: Callable[[Run], None]) -> None:
    run_world(1, body, folder=folder)


def test_without_resuming_it_is_a_range(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[list[int], int]:
        return list(run.epochs(3)), run.epoch

    assert run_world(1, body, folder=tmp_path) == [([0, 1, 2], 3)]


def test_saved_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        for epoch in run.epochs(3):
            for _ in run.loader(DATA, batch_size=4):  # type: ignore[arg-type]
                if epoch == 1:
                    run.save()
                    return

    saved(tmp_path, body)
    assert going_on(tmp_path) == ([1, 2], uninterrupted(tmp_path, 3)[3:])


def test_saved_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        seen: Seen = []
        for epoch in run.epochs(3):
            epoch_of(run, epoch, seen)
            if epoch == 1:
                run.save()
                return

    saved(tmp_path, body)
    assert going_on(tmp_path) == ([2], uninterrupted(tmp_path, 3)[4:])


def test_saved_at_the_beginning_of_an_epoch(tmp_path: Path) -> None:
    """Before its first batch: the epoch is still to come."""

    def body(run: Run) -> None:
        seen: Seen = []
        for epoch in run.epochs(3):
            if epoch == 1:
                run.save()
                return
            epoch_of(run, epoch, seen)

    saved(tmp_path, body)
    assert going_on(tmp_path) == ([1, 2], uninterrupted(tmp_path, 3)[2:])


def test_saved_after_evaluating_at_the_beginning_of_an_epoch(tmp_path: Path) -> None:
    """Evaluation is no pass over the training data."""

    def body(run: Run) -> None:
        seen: Seen = []
        for epoch in run.epochs(3):
            with torch.no_grad():
                for _ in run.loader(list(range(5)), batch_size=5):  # type: ignore[arg-type]
                    pass
            if epoch == 1:
                run.save()
                return
            epoch_of(run, epoch, seen)

    saved(tmp_path, body)
    assert going_on(tmp_path)[0] == [1, 2]


@pytest.mark.parametrize("loader_first", [True, False])
def test_saved_before_the_first_epoch(tmp_path: Path, loader_first: bool) -> None:
    def body(run: Run) -> None:
        if loader_first:
            run.loader(DATA, batch_size=4)  # type: ignore[arg-type]
        run.save()

    saved(tmp_path, body)
    assert going_on(tmp_path) == ([0, 1, 2], uninterrupted(tmp_path, 3))


def test_saved_when_all_epochs_are_over_and_then_given_more(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        seen: Seen = []
        for epoch in run.epochs(2):
            epoch_of(run, epoch, seen)
        run.save()

    saved(tmp_path, body)
    assert going_on(tmp_path, epochs=2) == ([], [])
    assert going_on(tmp_path, epochs=4) == ([2, 3], uninterrupted(tmp_path, 4)[4:])


def test_saved_after_breaking_out(tmp_path: Path) -> None:
    """Whoever stops early has ended the epoch, and the loop over epochs too."""

    def body(run: Run) -> None:
        for epoch in run.epochs(5):
            for _ in run.loader(DATA, batch_size=4):  # type: ignore[arg-type]
                break
            if epoch == 1:
                break
        run.save()

    saved(tmp_path, body)
    assert going_on(tmp_path)[0] == [2]


def test_saved_with_data_of_one_s_own(tmp_path: Path) -> None:
    """Without `run.loader` nobody knows the position: a save ends the epoch."""

    def body(run: Run) -> None:
        for epoch in run.epochs(5):
            if epoch == 1:
                run.save()
                return

    saved(tmp_path, body)
    assert going_on(tmp_path)[0] == [2]


def test_saved_with_the_last_batch_only_the_end_of_the_epoch_is_left(tmp_path: Path) -> None:
    """And a run saved again after that end does not repeat the epoch."""

    def body(run: Run) -> None:
        for _ in run.epochs(3):
            for step, _ in enumerate(run.loader(DATA, batch_size=4)):  # type: ignore[arg-type]
                if step == 1:
                    run.save()
                    return

    def again(run: Run) -> None:
        run.load()
        for _ in run.epochs(3):
            assert list(run.loader(DATA, batch_size=4)) == []  # type: ignore[arg-type]
            run.save()
            return

    saved(tmp_path, body)
    whole = uninterrupted(tmp_path / "other", 3)
    assert going_on(tmp_path) == ([0, 1, 2], whole[2:])
    saved(tmp_path, again)
    assert going_on(tmp_path) == ([1, 2], whole[2:])


def test_two_loaders_resume_each_at_its_own_place(tmp_path: Path) -> None:
    other = list(range(100, 106))

    def passes(run: Run, save_at: int | None) -> list[list[int]]:
        seen = []
        for _ in run.epochs(2):
            pair = zip(
                run.loader(DATA, batch_size=2),  # type: ignore[arg-type]
                run.loader(other, batch_size=3),  # type: ignore[arg-type]
                strict=False,
            )
            for left, right in pair:
                seen.append(left.tolist() + right.tolist())
                if len(seen) == save_at:
                    run.save()
                    return seen
        return seen

    def resumed(run: Run) -> list[list[int]]:
        run.load()
        return passes(run, None)

    whole = run_world(1, lambda run: passes(run, None), folder=tmp_path)[0]
    before = run_world(1, lambda run: passes(run, 1), folder=tmp_path)[0]
    after = run_world(1, resumed, folder=tmp_path)[0]
    assert before + after == whole


def test_loaders_made_before_load_are_moved_too(tmp_path: Path) -> None:
    def save(run: Run) -> None:
        for _ in run.loader(DATA, batch_size=2):  # type: ignore[arg-type]
            run.save()
            return

    def load(run: Run) -> tuple[int, int]:
        loader = run.loader(DATA, batch_size=2)  # type: ignore[arg-type]
        run.load()
        return sum(len(batch) for batch in loader), run.samples

    saved(tmp_path, save)
    assert run_world(1, load, folder=tmp_path) == [(6, 8)]
